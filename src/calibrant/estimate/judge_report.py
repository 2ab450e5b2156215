"""The report on judged answers: success rates, their differences, and the quality of the judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrant._core.showing import as_html, frame, one_line
from calibrant.estimate.judges import JudgeAgreement, PositionBias
from calibrant.estimate.success_rate import RateEstimate
from calibrant.metrics.intervals import Estimate

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class JudgeReport:
    """Success rates, their differences, and the quality of the judge.

    Attributes
    ----------
    level : float
        Coverage of the intervals.
    rates : dict of RateEstimate
        By system; "" if there is only one.
    differences : dict of Estimate
        Rate of each further system minus that of the first, by its name; of answers to the same
        questions if these are known.
    agreement : JudgeAgreement or None
        None if there are only verdicts on pairs.
    length : Estimate or None
        Factor on the odds of a high score for twice the length; None without lengths.
    position : PositionBias or None
        None without verdicts on swapped pairs.
    width : float or None
        Half-width of the intervals that are wanted.
    """

    level: float
    rates: dict[str, RateEstimate] = field(default_factory=dict)
    differences: dict[str, Estimate] = field(default_factory=dict)
    agreement: JudgeAgreement | None = None
    length: Estimate | None = None
    position: PositionBias | None = None
    width: float | None = None

    def __repr__(self) -> str:
        rates = [f"{name or 'rate'} {100 * r.rate.value:.1f} %" for name, r in self.rates.items()]
        found = self.agreement
        return one_line(self, *rates, f"kappa {found.kappa.value:.2f}" if found else "")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        position = {"position_bias": self.position and _plain(self.position)}
        if self.agreement is None:
            return {"level": self.level, **position}
        length = self.length and {"odds_ratio": self.length._asdict(), "n": self.agreement.n}
        return {
            "level": self.level,
            "rates": {name: self._figures(rate) for name, rate in self.rates.items()},
            "differences": {name: each._asdict() for name, each in self.differences.items()},
            "agreement": _plain(self.agreement),
            "length_bias": length,
            **position,
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each system. Needs pandas."""
        return frame({"system": name, **self._figures(rate)} for name, rate in self.rates.items())

    def _figures(self, rate: RateEstimate) -> dict[str, Any]:
        names = ("n", "labelled", "worth", "slope")
        content = {name: getattr(rate, name) for name in names}
        content |= {"rate": rate.rate._asdict(), "labels_alone": rate.labels_alone._asdict()}
        if self.width is not None:
            needed = rate.labels_needed(self.width)
            answers = rate.answers_needed(self.width) if needed is None else rate.n
            content |= {"labels_needed": needed, "answers_needed": answers}
        return content

    def _repr_html_(self) -> str:
        return as_html(self)


def _plain(record: NamedTuple) -> dict[str, Any]:
    """Return the fields of a result as plain values, for JSON."""
    values = record._asdict().items()
    return {name: v._asdict() if isinstance(v, Estimate) else v for name, v in values}
