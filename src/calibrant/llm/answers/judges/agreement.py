"""Agreement of a judge with people: the same verdicts, beyond chance, and in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from calibrant._core.checks import FloatArray, Values, as_values, as_weight, check_level
from calibrant.display.results import one_line
from calibrant.metrics.intervals import Estimate, logit_interval, share_interval
from calibrant.metrics.ranking import auroc_with_error


class Agreement(NamedTuple):
    """How far the verdicts of a judge are those of people.

    Attributes
    ----------
    raw : Estimate
        Share of equal verdicts.
    kappa : Estimate
        The same beyond what independent verdicts with these frequencies would share (Cohen 1960): 0
        is chance, 1 is perfect.
    auroc : Estimate
        Probability that a right answer has a higher score than a wrong one; it needs no cut.
    lenient, strict : float
        Share of the wrong answers that the judge calls right, and of the right ones that it calls
        wrong.
    n : int
        Labelled answers.
    cut : float
        Scores from here on count as the verdict that an answer is right.
    """

    raw: Estimate
    kappa: Estimate
    auroc: Estimate
    lenient: float
    strict: float
    n: int
    cut: float

    def __repr__(self) -> str:
        return one_line(self, f"{100 * self.raw.value:.1f} %", f"kappa {self.kappa.value:.2f}")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        estimates = {name: getattr(self, name)._asdict() for name in ("raw", "kappa", "auroc")}
        rest = {name: getattr(self, name) for name in ("lenient", "strict", "n", "cut")}
        return estimates | rest


def agreement(
    judge: Values,
    human: Values,
    *,
    cut: float = 0.5,
    sample_weight: Values | None = None,
    level: float = 0.9,
) -> Agreement:
    """Compare the scores of a judge with the labels of people for the same answers.

    Parameters
    ----------
    judge : (n,)
        Scores or votes.
    human : (n,) in [0, 1]
        Labels; grades of at least 1/2 count as right.
    cut : float
        Scores from here on count as the verdict that an answer is right.
    sample_weight : (n,), optional
        Of the answers, such as the inverse probability of being labelled.
    level : float
        Coverage of the intervals.

    Examples
    --------
    >>> round(agreement([1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 1]).kappa.value, 3)
    0.333
    """
    check_level(level)
    scores, right = as_values(judge, "judge"), as_values(human, "human") >= 0.5
    if right.shape != scores.shape:
        raise ValueError(f"human must have {scores.size} labels, got {right.size}")
    weight = np.ones(scores.size)
    if sample_weight is not None:
        weight = as_weight(sample_weight, right.shape)
    share = weight / weight.sum()
    count, verdict = 1 / float(share @ share), scores >= cut
    raw = float(share @ (verdict == right))
    area = auroc_with_error(scores, right.astype(np.float64), weight)
    return Agreement(
        share_interval(raw, count, level),
        _kappa(verdict.astype(np.int64), right.astype(np.int64), share, level),
        logit_interval(*area, level),
        _rate(verdict, ~right, share),
        _rate(~verdict, right, share),
        scores.size,
        cut,
    )


def _rate(event: Any, within: Any, share: FloatArray) -> float:
    """Share of an event, within other events; NaN if these do not occur."""
    total = float(share @ within)
    return float(share @ (event & within)) / total if total else np.nan


def _kappa(judge: Any, human: Any, share: FloatArray, level: float) -> Estimate:
    """Cohen's kappa with the interval of its influences, by Student's quantile."""
    rows, columns = (np.bincount(each, share, 2) for each in (judge, human))
    chance, raw = float(rows @ columns), float(share @ (judge == human))
    if chance == 1:
        return Estimate(np.nan)
    value = (raw - chance) / (1 - chance)
    count = 1 / float(share @ share)
    if raw == 1 or count <= 1:
        return Estimate(value)
    off = (judge == human) - raw
    moved = columns[judge] + rows[human] - 2 * chance
    influence = share * (off / (1 - chance) - (1 - raw) * moved / (1 - chance) ** 2)
    deviation = float(np.sqrt(influence @ influence * count / (count - 1)))
    reach = float(stdtrit(count - 1, (1 + level) / 2)) * deviation
    return Estimate(value, max(value - reach, -1.0), min(value + reach, 1.0))
