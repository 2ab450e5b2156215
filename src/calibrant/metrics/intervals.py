r"""Intervals whose coverage was checked by simulation, and a test of calibration.

Means and rank statistics have a standard error in closed form. Calibration errors do not: noise
never cancels inside a norm of the gaps, so that a percentile bootstrap adds it a second time. Here
an interval holds the errors of those true accuracies that are compatible with the data. The
candidates are :math:`q_s(p) = p - s\, d(p)`, where d is the observed gap as a function of
confidence; s = 0 is a calibrated model. With the error :math:`\varphi` of samples whose outcomes
are drawn from :math:`q_s`, bin by bin, the ends are

.. math:: P(\varphi(s_\mathrm{low}) \ge \varphi_\mathrm{obs}) = \alpha_\mathrm{low}, \qquad
   P(\varphi(s_\mathrm{high}) \le \varphi_\mathrm{obs}) =
   \tfrac{\alpha}{2}\, P(\varphi(0) \le \varphi_\mathrm{obs}) .

:math:`\alpha_\mathrm{low}` falls from :math:`\alpha` at s = 0, where an upper end cannot miss, to
:math:`\alpha / 2` where the candidate's error exceeds the noise. The last factor (the CLs rule of
particle physics) keeps a lucky small estimate from giving a too-good upper end.

Accuracies stay within [0, 1], so that the candidates of a model that is never right end at the
observed error. The upper end then lies as far above the error of the last candidate as the observed
error lies above the lower quantile of its draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc, expit, gammaincinv, ndtri, stdtrit

from calibrant._core.binning import Bins
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.metrics.binomial import Binomials, drawn
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.gaps import Excess, Functional, gap_curve, running
from calibrant.metrics.pooled import PooledPairs
from calibrant.metrics.reductions import EventData, Input, WeightedPairs, keywords, pairs_from
from calibrant.metrics.reliability import Estimate as Estimate

if TYPE_CHECKING:
    from typing_extensions import Unpack


INPUTS = 1.1
"""Factor on the deviation of the class-wise error: the sizes of its cells vary with the inputs,
too, which in simulation added up to a tenth."""
LIMIT = 8.0
"""Largest scale of a candidate."""
STEP = LIMIT / 4096
"""Scale to which an end is searched, far less than what it varies by with the draws."""
TOGETHER = 64
"""Replicates of a test that are compared at a time."""
SMALLEST = 1e-9
"""What separates a probability from 1, or a sum from a whole number, by more than rounding."""


@dataclass(frozen=True, eq=False)
class Cells:
    """Bins of confidence in which outcomes can be drawn anew. Arrays are ``(cells,)``."""

    observed: FloatArray  # gaps as they are
    share: FloatArray  # of the examples
    claimed: FloatArray  # mean confidence
    shape: FloatArray  # mean gap of the candidates at s = 1
    size: IntArray  # examples, effectively
    sampled: Callable[[FloatArray], FloatArray]
    """Maps true accuracies to gaps in samples of this size, ``(replicates, cells)``."""
    samples: dict[float, FloatArray] = field(default_factory=dict)  # metrics share those of a scale
    ends: dict[tuple[Functional, float], tuple[float, float]] = field(default_factory=dict)

    def accuracy(self, scale: float) -> FloatArray:
        """True accuracy of a candidate."""
        return np.clip(self.claimed - scale * self.shape, 0, 1)

    def gaps(self, scale: float) -> FloatArray:
        """True gaps of a candidate, ``(cells,)``."""
        return self.share * (self.claimed - self.accuracy(scale))

    def drawn(self, scale: float) -> FloatArray:
        """Gaps in samples from a candidate, ``(replicates, cells)``."""
        if scale not in self.samples:
            self.samples[scale] = self.sampled(self.accuracy(scale))
        return self.samples[scale]

    @cached_property
    def constant(self) -> list[Cells]:
        """Cells with candidates whose gap at s = 1 is one standard error, of either sign."""
        count = int(self.size.sum())
        right = float(self.share @ self.claimed - self.observed.sum())
        likely = (right * count + 0.5) / (count + 1)  # unseen errors are possible all the same
        shape = np.full_like(self.shape, math.sqrt(likely * (1 - likely) / count))
        return [replace(self, shape=sign * shape, samples={}) for sign in (1, -1)]


def cells_of(filled: Bins, curve: Bins, replicates: int, seed: int) -> Cells:
    """Make cells from sums per bin, and candidates from the gap curve of those or other bins."""
    # unequal weights count as fewer examples; a sum of equal ones is off by rounding only
    whole = np.floor(filled.effective + 1e-6)
    size = np.maximum(whole, filled.weight > 0).astype(np.int64)
    claimed = np.clip(np.where(size > 0, filled.confidence, 0.0), 0, 1)
    share = filled.weight / filled.total
    rng = np.random.default_rng([seed, 1])  # apart from the outcomes, which use the seed alone
    trials = rng.multinomial(size.sum(), size / size.sum(), replicates).astype(np.float64)
    scatter = np.sqrt(trials * _excess(filled)) * rng.standard_normal(trials.shape)
    outcomes = Binomials(trials, np.random.default_rng(seed).random(trials.shape))
    # sums of gaps but for the hits; they scatter beyond these where claims within a bin differ
    rest, each = trials * claimed + scatter, share / np.maximum(size, 1)

    def sampled(accuracy: FloatArray) -> FloatArray:
        return np.asarray(each * (rest - outcomes.hits(accuracy)))

    return Cells(filled.gap, share, claimed, gap_curve(curve)(claimed), size, sampled)


def _excess(filled: Bins) -> FloatArray:
    """Variance of (confidence - outcome) per bin beyond that of the outcomes."""
    held = filled.weight > 0
    excess = np.zeros(held.size)
    accuracy, gap = filled.accuracy[held], (filled.confidence - filled.accuracy)[held]
    variance = filled.spread[held] / filled.squares[held] - gap**2
    excess[held] = np.maximum(variance - accuracy * (1 - accuracy), 0.0)
    return excess


def error_interval(
    value: float, error: Functional, cells: Cells, level: float, excess: Excess | None = None
) -> Estimate:
    """Interval of a calibration error by inverting tests along the shape of the gaps.

    Where these are near zero, multiples of them are too: the upper end also tries constant gaps.
    ``excess`` is passed where errors are compared with a bound at less cost than computed.
    """
    if (error, level) not in cells.ends:
        compared = excess or (lambda gaps, bound: np.asarray(error(gaps) - bound))
        cells.ends[error, level] = _ends(error, compared, cells, level)
    low, high = cells.ends[error, level]
    return Estimate(value, min(low, value), max(high, value))


def _ends(error: Functional, excess: Excess, cells: Cells, level: float) -> tuple[float, float]:
    """Return the errors of the first and of the last candidate that the data do not rule out."""
    alpha = 1 - level
    # draws that equal the observed error but for rounding count on both sides
    observed = float(error(cells.observed[None])[0])
    slack = 1e-9 * observed
    calibrated = error(cells.drawn(0.0))
    noise, draws = float(np.median(calibrated)), len(calibrated)

    def share(event: BoolArray) -> float:
        return (1 + int(event.sum())) / (1 + draws)

    def exceeds(one: float, other: float) -> float:
        # shares come in steps: on a step that is as high, a search would end anywhere
        return math.log(one / other) + SMALLEST

    def true_error(candidates: Cells, scale: float) -> float:
        return float(error(candidates.gaps(scale)[None])[0])

    # Fewer than two draws cannot be told from none. An estimate below almost all draws of a
    # calibrated model is therefore taken for the lowest one of which enough draws are left.
    fewest = 2 / (1 + draws)
    luckiest = float(np.quantile(calibrated, min(2 * fewest / alpha, 0.05)))
    shown = max(observed, luckiest) + slack
    rarely = max(share(calibrated <= shown) * alpha / 2, fewest)

    def reached(scale: float) -> float:
        tail = _lower_tail(true_error(cells, scale), noise, alpha)
        return exceeds(share(excess(cells.drawn(scale), observed - slack) >= 0), tail)

    def last(candidates: Cells, start: float = 0.0) -> float:
        def ruled_out(scale: float) -> float:
            return exceeds(rarely, share(excess(candidates.drawn(scale), shown) <= 0))

        return _root(ruled_out, start, STEP)

    low, high = _root(reached, 0.0, STEP), last(cells)
    # above 0 only where accuracies of 0 or 1 stop the candidates; see the top of this file
    beyond = max(observed - float(np.quantile(error(cells.drawn(high)), rarely)), 0.0)
    high_error = min(true_error(cells, high) + beyond, 1.0)
    for each in cells.constant:

        def larger(scale: float, each: Cells = each, least: float = high_error) -> float:
            return float(excess(each.gaps(scale)[None], least)[0])

        high_error = max(high_error, true_error(each, last(each, _root(larger, 0.0, STEP))))
    return true_error(cells, low), high_error


def class_interval(value: float, sums: ClassBins, level: float) -> Estimate:
    """Interval of the class-wise error, by inverting tests along the shape of its gaps.

    The noise of the error may be so large that all compatible truths lie below it. The upper end is
    then that of what other samples of this size would show, since the value is in its interval.
    """
    cells, alpha = class_cells_of(sums), 1 - level
    floor, _ = cells.noisy(0.0)

    def quantile(scale: float, share: float) -> float:
        mean, deviation = cells.noisy(scale)
        if deviation == 0:
            return mean
        few = (deviation / mean) ** 2  # a sum of few absolute values is skewed, as a gamma variable
        return float(gammaincinv(1 / few, share)) * few * mean

    def lowest(scale: float) -> float:
        """Highest error that a candidate is likely to show, less the observed one."""
        return quantile(scale, 1 - _lower_tail(cells.error(scale), floor, alpha)) - value

    low, high = _root(lowest), _root(lambda scale: quantile(scale, alpha / 2) - value)
    reach = float(ndtri(1 - alpha / 2)) * cells.noisy(high)[1]
    highest = max(cells.error(high), value + reach)
    return Estimate(value, min(cells.error(low), value), min(highest, 1.0))


@dataclass(frozen=True, eq=False)
class ClassCells:
    """Bins of classes, whose hits are binomial variables. Arrays are ``(cells,)``.

    The class-wise error is the sum over cells of ``unit`` times the absolute sum of their gaps.
    """

    unit: FloatArray
    mass: FloatArray  # weight of an example, effectively
    size: FloatArray  # examples, effectively
    claimed: FloatArray  # mean confidence
    shape: FloatArray  # mean gap of the candidates at s = 1
    group: IntArray  # the row of the covariance that holds this cell
    covariance: FloatArray  # (groups, groups) of sums of gaps

    def accuracy(self, scale: float) -> FloatArray:
        """True accuracy of a candidate."""
        return np.clip(self.claimed - scale * self.shape, 0, 1 - SMALLEST)

    def error(self, scale: float) -> float:
        """True class-wise error of a candidate."""
        gap = np.abs(self.claimed - self.accuracy(scale))
        return float((self.unit * self.mass * self.size) @ gap)

    def noisy(self, scale: float) -> tuple[float, float]:
        """Mean and standard deviation of the error in samples of this size from a candidate."""
        right, claimed = self.accuracy(scale), self.size * self.claimed
        expected, variance = self.size * right, self.size * right * (1 - right)
        # P(hits <= claimed), and the same with one trial less, give the mean absolute deviation
        whole = np.floor(claimed + SMALLEST)  # also where rounding left a sum just below
        rest = np.maximum(self.size - whole, SMALLEST)
        slope = np.asarray(2 * betainc(rest, whole + 1, 1 - right) - 1, dtype=np.float64)
        fewer = betainc(rest, np.maximum(whole, SMALLEST), 1 - right)
        absolute = claimed * slope - expected * (2 * fewer - 1)
        # a part of each deviation follows the noise of its cell with that slope, a part does not
        alone = (claimed - expected) ** 2 + variance * (1 - slope**2) - absolute**2
        scaled = self.unit * self.mass
        spread = float(scaled**2 @ np.maximum(alone, 0))
        spread += self._shared(slope, (claimed - expected) * self.mass, variance * self.mass**2)
        return float(scaled @ absolute), INPUTS * math.sqrt(max(spread, 0.0))

    def _shared(self, slope: FloatArray, gap: FloatArray, variance: FloatArray) -> float:
        """Variance of the error by noise of the cells, which moves together within a group."""
        variance = np.maximum(variance, SMALLEST * variance.max() + 1e-100)
        summed = self._grouped(variance)
        slope, summed = self.unit * slope, np.where(summed > 0, summed, 1.0)
        common = self._grouped(slope * variance) / summed
        apart = (slope - common[self.group]) ** 2 @ variance
        # absolute values whose slopes cancel still vary together: the next term of the expansion
        bell = np.exp(-np.minimum(gap**2 / variance, 1000) / 2) * math.sqrt(2 / math.pi)
        bend = self._grouped(self.unit * bell * variance**1.5) / summed**2
        squared = self.covariance**2
        np.fill_diagonal(squared, 0.0)
        together = common @ self.covariance @ common + bend @ squared @ bend / 2
        return float(apart + together)

    def _grouped(self, values: FloatArray) -> FloatArray:
        return np.bincount(self.group, values, len(self.covariance)).astype(np.float64, copy=False)


def class_cells_of(sums: ClassBins) -> ClassCells:
    """Make cells from the sums per class and bin, and candidates from their gaps."""
    # only ratios of weights matter, and powers of huge or tiny ones leave the range of numbers
    scale = float(sums.weight.sum(1).max()) or 1.0
    tables = (sums.weight, sums.claimed, sums.observed)
    weight, claimed, observed = (x.numpy() / scale for x in tables)
    squares, products = (x.numpy() / scale / scale for x in (sums.squares, sums.products))
    total = weight.sum(1, keepdims=True)
    # a first bin from which everything was moved is off by rounding
    held = (weight > SMALLEST * np.maximum(total, 1.0)) & (squares > 0)
    weight, squares = np.where(held, weight, 1.0), np.where(held, squares, 1.0)
    size = np.maximum(weight**2 / squares, 1.0)
    confidence = np.where(held, np.clip(claimed / weight, 0, 1), 0.0)
    gap = np.where(held, confidence - np.clip(observed / weight, 0, 1), 0.0)
    unit = sums.shares("mean")[:, None] / np.where(total > 0, total, 1.0)
    share = np.where(held, unit * weight, 0.0)
    # gaps are shrunk to the common one of their bin as far as noise explains that they differ
    common = (share * gap).sum(0) / np.where(held.any(0), share.sum(0), 1.0)
    right = np.clip(confidence - common, 0, 1)
    noise = (share**2 * right * (1 - right) / size).sum(0)
    spread = (share**2 * (gap - common) ** 2).sum(0)
    left = np.divide(spread - noise, spread, out=np.zeros_like(spread), where=spread > noise)
    shape = common + np.sqrt(left) * (gap - common)
    group = sums.group.numpy()[:, None] * sums.bins + np.arange(sums.bins)
    unit = np.broadcast_to(unit, held.shape)
    group = np.broadcast_to(group, held.shape)
    return ClassCells(
        unit=unit[held],
        mass=(weight / size)[held],
        size=size[held],
        claimed=confidence[held],
        shape=shape[held],
        group=group[held],
        covariance=products,
    )


def mean_interval(value: float, deviation: float, level: float) -> Estimate:
    """Normal interval."""
    reach = float(ndtri((1 + level) / 2)) * deviation
    return Estimate(value, value - reach, value + reach)


def loss_interval(value: float, deviation: float, level: float) -> Estimate:
    """Normal interval of a mean of losses, which are not negative."""
    _, low, high = mean_interval(value, deviation, level)
    return Estimate(value, max(low, 0.0), high)


def share_interval(value: float, count: float, level: float) -> Estimate:
    """Wilson's interval of a share of ``count`` (effective) examples."""
    low, high = share_intervals(np.array([value]), np.array([count]), level)
    return Estimate(value, float(low[0]), float(high[0]))


def share_intervals(
    value: FloatArray, count: FloatArray, level: float
) -> tuple[FloatArray, FloatArray]:
    """Both ends of Wilson's intervals of shares ``(n,)`` of ``count`` ``(n,)`` examples."""
    z2 = float(ndtri((1 + level) / 2)) ** 2
    centre = (value + z2 / (2 * count)) / (1 + z2 / count)
    reach = np.sqrt(z2 * (value * (1 - value) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    # the value is within, but for rounding where it is 0 or 1
    low, high = np.minimum(centre - reach, value), np.maximum(centre + reach, value)
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def logit_interval(value: float, deviation: float, freedom: float, level: float) -> Estimate:
    """Student's interval on the logit scale; undefined at 0 and 1 and without freedom."""
    if math.isnan(deviation) or not (0 < value < 1 and freedom > 0):
        return Estimate(value)
    centre = math.log(value / (1 - value))
    reach = float(stdtrit(freedom, (1 + level) / 2)) * deviation / (value * (1 - value))
    low, high = expit([centre - reach, centre + reach])
    return Estimate(value, float(low), float(high))


class CalibrationTest(NamedTuple):
    """Result of a test of the hypothesis that confidences are probabilities."""

    statistic: float
    p_value: float


@keywords(EventData)
def calibration_test(
    logits: Input = None,
    labels: Input = None,
    *,
    replicates: int = 999,
    seed: int = 0,
    **data: Unpack[EventData],
) -> CalibrationTest:
    """Test whether a model is miscalibrated at all.

    Outcomes are drawn with the claimed probabilities, and their KS error is compared with the
    observed one. Above two thousand examples, neighbours in confidence are drawn together. With
    weights the draws are normal, which needs more than a few examples. Input as for
    :func:`calibrant.ece`.

    >>> p = np.linspace(0.5, 1, 500)
    >>> calibration_test(confidence=p, outcome=p > 0.75).p_value
    0.001
    """
    return pairs_test(pairs_from(logits, labels, **data), replicates, seed)


def pairs_test(
    pairs: WeightedPairs | PooledPairs, replicates: int = 999, seed: int = 0
) -> CalibrationTest:
    """Compute :func:`calibration_test` of checked pairs."""
    filled = pairs.filled(pairs.equal_mass_edges(2000))
    held = filled.weight > 0
    share, size = filled.weight[held] / filled.total, filled.effective[held]
    probability = np.clip(filled.confidence[held], 0, 1)
    rng = np.random.default_rng(seed)
    if pairs.weight is None:
        hits = drawn(rng, filled.count[held], probability, replicates).T
        # a few replicates at a time stay in the cache
        some = (hits[first : first + TOGETHER] for first in range(0, replicates, TOGETHER))
        residuals = (share * (probability - np.ascontiguousarray(each) / size) for each in some)
    else:  # a sum of unequal weights is no binomial variable, but close to a normal one
        deviation = share * np.sqrt(probability * (1 - probability) / size)
        residuals = iter([deviation * rng.standard_normal((replicates, share.size))])
    statistic = float(running(filled.gap[held]))
    # draws that equal the observed error but for rounding count as reaching it
    least = statistic * (1 - 1e-9)
    reached = sum(int((running(residual) >= least).sum()) for residual in residuals)
    return CalibrationTest(statistic, (1 + reached) / (1 + replicates))


def _lower_tail(error: float, noise: float, alpha: float) -> float:
    """Share of alpha for the lower end: all of it at 0, where the upper end cannot miss."""
    return alpha * (1 - min(error / noise, 1.0) / 2) if noise > 0 else alpha / 2


def _root(rising: Callable[[float], float], start: float = 0.0, step: float = 1e-9) -> float:
    """Scale from ``start`` on at which a function reaches 0, or the nearest end of the range."""
    rising = cache(rising)
    if rising(start) >= 0:
        return start
    low, high = start, max(1.0, 2 * start)
    while high < LIMIT and rising(high) < 0:
        low, high = high, 2 * high
    high = min(high, LIMIT)
    return LIMIT if rising(high) <= 0 else float(brentq(rising, low, high, xtol=step))
