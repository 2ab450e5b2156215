"""Where the confidence of an answer comes from: a map for one source is wrong for another."""

from __future__ import annotations

import re
from typing import NamedTuple

from calibrant._core.messages import printable


class SourceError(ValueError):
    """Confidences of another source than wanted, or of several."""


class Source(NamedTuple):
    """Origin of confidences; an empty part is unknown.

    Attributes
    ----------
    confidence : str
        An aggregate of token probabilities, ``p_true``, ``letters`` or ``texts`` (the probability
        of a choice), or any other name, such as that of a judge.
    prompt : str
        Form of the prompt: ``chat`` (with the digest of a system message), ``plain``, or
        ``short, 5 shots``.
    model, head : str
        Digests of the model and the temperature head; ``none`` without a head. A model that a
        service runs has its name there.
    sampling : str
        Parameters of the drawing of tokens, such as ``temperature=0, top_p=0.9``, or ``greedy``;
        ``default`` is that of the service.
    """

    confidence: str = ""
    prompt: str = ""
    model: str = ""
    head: str = ""
    sampling: str = ""

    @property
    def served(self) -> bool:
        """Whether the model is one of a service, whose weights are unknown."""
        return bool(self.model) and not re.fullmatch("[0-9a-f]{16}", self.model)

    def differences(self, other: Source) -> list[str]:
        """Return the parts that both state differently, in words.

        >>> Source("geometric", "chat").differences(Source("p_true", "", "0a1b"))
        ['confidence geometric, not p_true']
        """
        parts = zip(self._fields, self, other, strict=True)
        return [
            f"{name} {one}, not {two}" for name, one, two in parts if one and two and one != two
        ]

    def check(self, other: Source, remedy: str = "fit one on answers of the same source") -> None:
        """Raise if a map that was fitted on this source is applied to another."""
        differing = self.differences(other)
        if differing:
            said = printable("; ".join(differing))
            raise SourceError(f"the answer calibrator was fitted on {said}: {remedy}")
