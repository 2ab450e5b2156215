"""Agreement of judges with people, and biases: for the first answer shown, and for long ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtri, stdtrit

from calibrant._core.checks import FloatArray, Values, as_float64, as_values, as_weight, check_level
from calibrant._core.showing import one_line
from calibrant._core.solve import minimise
from calibrant.metrics.intervals import Estimate, logit_interval, share_interval
from calibrant.metrics.ranking import auroc_with_error

_WINNERS = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""What each verdict is worth to the system a."""
_STEEPEST = 15.0
"""Slope beyond which lengths separate the scores, so that no finite one fits best."""


class PositionBias(NamedTuple):
    """Effect of the order in which two answers are shown to a judge.

    Attributes
    ----------
    flips : Estimate
        Share of the questions on which the verdict changes with the order.
    first : Estimate
        Share of the judgements that the answer shown first wins, ties counted half. Since each pair
        is shown in both orders, it is 1/2 without a bias.
    n : int
        Questions.
    """

    flips: Estimate
    first: Estimate
    n: int

    def __repr__(self) -> str:
        flips, first = 100 * self.flips.value, 100 * self.first.value
        return one_line(self, f"{flips:.1f} % flips", f"first wins {first:.1f} %")


def position_bias(
    winner: Sequence[str], swapped_winner: Sequence[str], *, level: float = 0.9
) -> PositionBias:
    """Measure how verdicts on pairs of answers depend on their order.

    Parameters
    ----------
    winner : sequence of {"a", "b", "tie"}
        Verdicts with the answer of system a shown first.
    swapped_winner : sequence of {"a", "b", "tie"}
        Verdicts on the same pairs with the answer of b first.
    level : float
        Coverage of the intervals. That of ``first`` is Agresti and Min's (2005), in which two
        further pairs, one of them split between both ways to flip, keep rare flips honest.

    Examples
    --------
    >>> position_bias(["a", "a", "b", "a"], ["a", "b", "b", "b"])
    PositionBias(50.0 % flips, first wins 75.0 %)
    """
    check_level(level)
    wins, swapped = (
        np.array([_worth(v, i) for i, v in enumerate(verdicts)])
        for verdicts in (winner, swapped_winner)
    )
    if wins.shape != swapped.shape or not wins.size:
        raise ValueError(
            f"winner and swapped_winner must have a verdict for each pair, got {wins.size} and "
            f"{swapped.size}"
        )
    flips = share_interval(float((wins != swapped).mean()), wins.size, level)
    first = (wins + 1 - swapped) / 2  # of the two judgements of each pair
    pseudo, share = np.array([1.0, 0.5, 0.0]), np.array([0.5, 1.0, 0.5])
    values, weight = np.append(first, pseudo), np.append(np.ones(first.size), share)
    centre = float(np.average(values, weights=weight))
    variance = float(np.average((values - centre) ** 2, weights=weight)) / weight.sum()
    reach = float(ndtri((1 + level) / 2)) * math.sqrt(variance)
    value = float(first.mean())
    low, high = min(centre - reach, value), max(centre + reach, value)
    return PositionBias(flips, Estimate(value, max(low, 0.0), min(high, 1.0)), wins.size)


def _worth(verdict: str, pair: int) -> float:
    value = _WINNERS.get(str(verdict).strip().lower())
    if value is None:
        raise ValueError(
            f"verdicts must be a, b or tie, got {verdict!r:.40} for pair {pair}: name the system "
            "that wins, not its place"
        )
    return value


def length_bias(judge: Values, human: Values, length: Values, *, level: float = 0.9) -> Estimate:
    r"""Measure whether a judge prefers long answers that are not better.

    A logistic model of the scores, :math:`\sigma(a + b\,y + c \log_2 \text{length})`, separates the
    slope c of the length from what the label y explains. The result is :math:`2^c`, the factor on
    the odds of a high score when an answer is twice as long: 1 without a bias, NaN if the lengths
    are all equal, or separate the scores. Its interval is robust to the form of the scores (HC3).

    Parameters
    ----------
    judge : (n,) in [0, 1]
        Votes, or scores as shares of their scale.
    human : (n,) in [0, 1]
        Labels of the same answers.
    length : (n,)
        Characters or tokens of the answers, above 0.
    level : float
        Coverage of the interval.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> right, length = rng.random(2000) < 0.7, rng.integers(20, 400, size=2000)
    >>> odds = 2.0 * right - 1 + 0.5 * np.log2(length / 100)
    >>> vote = rng.random(2000) < 1 / (1 + np.exp(-odds))
    >>> round(float(length_bias(vote, right, length).value), 2)
    1.7
    """
    check_level(level)
    scores, labels = as_values(judge, "judge"), as_values(human, "human")
    size = as_float64(length)
    if not (scores.shape == labels.shape == size.shape):
        raise ValueError(
            f"judge, human and length must have the same size, got {scores.size}, {labels.size} "
            f"and {size.size}"
        )
    if not (size > 0).all():
        raise ValueError("length must be above 0 for every answer: leave empty answers out")
    doublings = np.log2(size)
    # columns that do not vary would have no slope of their own
    columns = [x - x.mean() for x in (doublings, labels) if np.ptp(x)]
    if not np.ptp(doublings) or not np.ptp(scores) or scores.size <= len(columns) + 2:
        return Estimate(math.nan)
    inputs = np.column_stack([*columns, np.ones(scores.size)])

    def loss(line: FloatArray) -> tuple[float, FloatArray]:
        odds = inputs @ line
        value = float((np.logaddexp(0, odds) - scores * odds).sum())
        return value, inputs.T @ (expit(odds) - scores)

    slope, *_ = line = minimise(loss, np.zeros(inputs.shape[1])).x
    chance = expit(inputs @ line)
    weight = chance * (1 - chance)
    inverse = np.linalg.pinv(inputs.T @ (weight[:, None] * inputs))
    leverage = weight * np.einsum("ij,jk,ik->i", inputs, inverse, inputs)
    residual = (scores - chance) / np.maximum(1 - leverage, 1e-6)
    deviation = float(np.linalg.norm((inputs * residual[:, None]) @ inverse[0]))
    if not deviation or abs(slope) > _STEEPEST:
        return Estimate(math.nan)
    reach = float(stdtrit(scores.size - inputs.shape[1], (1 + level) / 2)) * deviation
    ends = (math.exp(x) for x in (slope, slope - reach, slope + reach))
    return Estimate(*ends)


class JudgeAgreement(NamedTuple):
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


def agreement(
    judge: Values,
    human: Values,
    *,
    cut: float = 0.5,
    sample_weight: Values | None = None,
    level: float = 0.9,
) -> JudgeAgreement:
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
    return JudgeAgreement(
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
