"""A fitted temperature head, with the fingerprint of its model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from calibrant.llm.fingerprint import ModelFingerprint
from calibrant.llm.heads.modules import LIMIT, GlobalHead, Head

Figures = dict[str, dict[str, float]]


@dataclass(frozen=True, eq=False)
class FittedHead:
    """A temperature head, the model that it belongs to, and its results on held-out documents.

    Attributes
    ----------
    head : Head
        The adaptive head if it was kept, else the global temperature.
    fingerprint : ModelFingerprint
        Of the model.
    objective : str
        Training objective.
    kept : bool
        True if ``head`` is of the requested kind.
    reasons : str
        Why it was kept or not.
    figures : dict
        ``nll`` of the label; ``brier``, ``ece`` and ``auroc`` of the confidence in the top token;
        on held-out documents. Under ``before``, ``global`` and, for an adaptive head, ``head``.
    settings : dict
        Further choices: alpha, the epoch, the seed; and the ``tables`` that it was fitted on.
    """

    head: Head
    fingerprint: ModelFingerprint
    objective: str
    kept: bool = True
    reasons: str = ""
    figures: Figures = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head.requires_grad_(False).eval()

    @classmethod
    def from_temperature(
        cls, temperature: float, fingerprint: ModelFingerprint, reasons: str = ""
    ) -> FittedHead:
        """Make a head of one temperature, for instance that of :func:`daca`.

        >>> tiny = ModelFingerprint("tiny", 2, 3, "0" * 16, None)
        >>> float(FittedHead.from_temperature(2.0, tiny).head.bias)
        -0.69...
        """
        if not math.exp(-LIMIT) <= temperature <= math.exp(LIMIT):
            raise ValueError(f"temperature must be between 0.05 and 20, got {temperature}")
        return cls(GlobalHead(start=-math.log(temperature)), fingerprint, "given", reasons=reasons)
