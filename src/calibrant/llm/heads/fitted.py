"""A fitted temperature head, with the fingerprint of its model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from calibrant.llm.fingerprint import ModelFingerprint
from calibrant.llm.heads.modules import LIMIT, GlobalHead, Head, make_head

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

    def describe(self) -> str:
        """Describe the head in a sentence."""
        name = self.fingerprint.name
        return f"{self.head.kind} temperature head for {name}, trained on {self.objective}"

    def config(self) -> dict[str, Any]:
        """Return all but the learned values, for JSON: None stands for figures that are NaN."""
        figures = {
            group: {name: None if math.isnan(v) else v for name, v in values.items()}
            for group, values in self.figures.items()
        }
        plain = {name: getattr(self, name) for name in ("objective", "kept", "reasons", "settings")}
        about = {"head": self.head.kind, "options": self.head.config(), "figures": figures}
        return {**about, **plain, "fingerprint": asdict(self.fingerprint)}

    @classmethod
    def from_config(
        cls,
        *,
        head: str,
        options: dict[str, Any],
        fingerprint: dict[str, Any],
        objective: str,
        kept: bool,
        reasons: str,
        figures: dict[str, dict[str, float | None]],
        settings: dict[str, Any],
    ) -> FittedHead:
        """Make a head of what :meth:`config` returned, without learned values."""
        made = make_head(head, **{"width": 1, **options})
        if made.config() != options:
            wanted = made.config()
            raise ValueError(f"options of the {head} head must be like {wanted}, got {options}")
        numbers = {
            group: {name: math.nan if v is None else float(v) for name, v in values.items()}
            for group, values in figures.items()
        }
        model = ModelFingerprint(**fingerprint)
        return cls(made, model, objective, kept, reasons, numbers, settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the learned values of the head."""
        return self.head.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the learned values of a head of the same kind and size."""
        self.head.load_state_dict(state)
