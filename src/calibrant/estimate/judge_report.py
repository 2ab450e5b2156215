"""The report on judged answers: success rates, their differences, and the quality of the judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.messages import printable_name
from calibrant._core.showing import as_html, frame, one_line
from calibrant.estimate.judges import JudgeAgreement, PositionBias, agreement, length_bias
from calibrant.estimate.success_rate import RateEstimate, rate_difference, success_rate
from calibrant.metrics.intervals import Estimate

if TYPE_CHECKING:
    import pandas as pd


class JudgedAnswers(NamedTuple):
    """Answers that a judge scored, some of them with a human label. Arrays are ``(n,)``.

    Attributes
    ----------
    judge : scores
    human : labels in [0, 1]; NaN where there is none
    scale : (float, float)
        Lowest and highest score.
    probability : probability of being drawn for labelling, or None
    strata, questions, systems : texts, or None
    lengths : characters of the answers, or None
    """

    judge: FloatArray
    human: FloatArray
    scale: tuple[float, float] = (0.0, 1.0)
    probability: FloatArray | None = None
    strata: NDArray[Any] | None = None
    questions: NDArray[Any] | None = None
    systems: NDArray[Any] | None = None
    lengths: FloatArray | None = None

    @property
    def known(self) -> BoolArray:
        """True for answers with a label."""
        return ~np.isnan(self.human)

    @property
    def shares(self) -> FloatArray:
        """Scores as shares of their scale, in [0, 1]."""
        low, high = self.scale
        return (self.judge - low) / (high - low)

    def part(self, rows: BoolArray) -> JudgedAnswers:
        """Return some of the answers."""
        columns = ("judge", "human", "probability", "strata", "questions", "systems", "lengths")
        values = {name: getattr(self, name) for name in columns}
        kept: Any = {name: v if v is None else v[rows] for name, v in values.items()}
        return self._replace(**kept)

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.judge):,} answers", f"{int(self.known.sum()):,} labelled")


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


def judge_report(
    judged: JudgedAnswers,
    *,
    cut: float | None = None,
    level: float = 0.9,
    position: PositionBias | None = None,
    width: float | None = None,
) -> JudgeReport:
    """Estimate success rates from judged answers, and measure the judge.

    Parameters
    ----------
    judged : JudgedAnswers
        From :func:`~calibrant.llm.read_judged`.
    cut : float, optional
        Scores from here on count as the verdict that an answer is right, for the agreement; by
        default the middle of the scale.
    level : float
        Coverage of the intervals.
    position : PositionBias, optional
        To report with the rest.
    width : float, optional
        Half-width of intervals, for which the report says how many labels it needs.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> right = rng.random(3000) < 0.7
    >>> judge = np.where(rng.random(3000) < 0.9, right, ~right).astype(float)
    >>> human = np.where(rng.random(3000) < 0.1, right, np.nan)
    >>> judge_report(JudgedAnswers(judge, human))
    JudgeReport(rate 71.1 %, kappa 0.76)
    """
    known = judged.known
    if not known.any():
        raise ValueError(
            f"none of {known.size:,} answers has a human label: label some of them, drawn at random"
        )
    systems = {"": judged}
    if judged.systems is not None:
        names = dict.fromkeys(judged.systems.tolist())  # in the order of the file
        systems = {name: judged.part(judged.systems == name) for name in names}
    rates = {}
    for name, part in systems.items():
        about: Any = {"probability": part.probability, "strata": part.strata}
        try:
            rates[name] = success_rate(
                part.judge, part.human, groups=part.questions, level=level, **about
            )
        except ValueError as error:
            if not name:
                raise
            raise ValueError(f"system {printable_name(name)}: {error}") from error
    first, *others = systems
    base, differences = systems[first].questions, {}
    for name in others:
        own = systems[name].questions
        pairs = None if own is None or base is None else (base, own)
        differences[name] = rate_difference(rates[first], rates[name], questions=pairs)
    found = agreement(
        judged.judge[known],
        judged.human[known],
        cut=sum(judged.scale) / 2 if cut is None else cut,
        sample_weight=_weights(judged),
        level=level,
    )
    length = None
    if judged.lengths is not None:
        length = length_bias(
            judged.shares[known], judged.human[known], judged.lengths[known], level=level
        )
    return JudgeReport(level, rates, differences, found, length, position, width)


def _weights(judged: JudgedAnswers) -> FloatArray | None:
    """Return how many answers each labelled one stands for; None if all stand for as many."""
    known = judged.known
    if judged.probability is not None:
        return 1 / judged.probability[known]
    if judged.strata is None:
        return None
    _, number = np.unique(judged.strata, return_inverse=True)
    ratio = np.bincount(number) / np.maximum(np.bincount(number, known), 1)
    return np.asarray(ratio[number[known]])
