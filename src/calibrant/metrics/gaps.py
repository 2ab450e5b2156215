r"""Calibration errors as functions of the gaps per bin, and their intervals.

The gap of a bin with :math:`n_b` of :math:`n` examples, mean confidence :math:`\bar{p_b}` and mean
outcome :math:`\bar{y_b}` is :math:`g_b = \frac{n_b}{n} (\bar{p_b} - \bar{y_b})`.

Calibration errors have no standard error in closed form: noise never cancels inside a norm of the
gaps, so that a percentile bootstrap adds it a second time. Here an interval holds the errors of
those true accuracies that are compatible with the data. The candidates are :math:`q_s(p) = p - s\,
d(p)`, where d is the observed gap as a function of confidence; s = 0 is a calibrated model. With
the error :math:`\varphi` of samples whose outcomes are drawn from :math:`q_s`, bin by bin, the ends
are

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
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import erf, gammaincinv, ndtri

from calibrant._core.binning import Bins, bin_index
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.metrics.intervals import LIMIT, SMALLEST, Estimate, _first_root, _lower_tail

RARE = 3.0
"""Expected hits, or misses, up to which probabilities are added up one by one."""
CACHED = 1 << 14
"""Numbers in a block that stays in the cache through all steps."""
SINGLE = 8
"""Trials up to which it costs less to draw each of them."""


class Binomials:
    """Samples of binomial variables that move with the chances, as little as these do.

    A number that is drawn once says which quantile each variable takes. Samples of two chances
    therefore differ by what the chances differ in, not by luck, and a search over chances sees no
    noise. Quantiles are those of the expansion of Cornish and Fisher to the fourth moment, which
    is off by one hit in about one of fifty draws, and exact where hits or misses are rare.

    >>> few = Binomials(np.full((1, 3), 10.0), np.array([[0.05, 0.5, 0.95]]))
    >>> few.hits(np.full(3, 0.5))
    array([[2., 5., 8.]])
    """

    def __init__(self, trials: FloatArray, uniform: FloatArray) -> None:
        self.trials, self.uniform = trials, uniform  # (replicates, variables)
        self._normal = normal = ndtri(uniform)
        square = normal * normal
        # the terms of the expansion for skewness, kurtosis, and squared skewness
        self._terms = (square - 1) / 6, (square - 3) * normal / 24, (5 - 2 * square) * normal / 36

    def hits(self, chance: FloatArray) -> FloatArray:
        """Hits in samples with chances ``(variables,)``, ``(replicates, variables)``.

        They are quantiles of the expansion, which overwrite the means, but where hits are rare.
        """
        hits = self.trials * chance  # the means, which are overwritten
        rare = np.flatnonzero((hits < RARE) | (self.trials - hits < RARE))
        if rare.size < hits.size:
            step = max(1, CACHED // chance.size)
            for start in range(0, len(hits), step):
                rows = slice(start, start + step)
                skewed, peaked, bend = (term[rows] for term in self._terms)
                mean = hits[rows]
                variance = mean * (1 - chance)
                spread = variance + 1 / 12  # of whole numbers smeared over the width of one
                inverse = 1 / spread
                variance *= inverse
                skewness = variance * (1 - 2 * chance)  # these are times the deviation
                kurtosis = variance * (1 - 6 * chance * (1 - chance))
                kurtosis -= inverse * (1 / 120)
                kurtosis *= peaked
                kurtosis += skewness**2 * bend
                deviation = np.sqrt(spread, out=spread)
                kurtosis *= np.multiply(deviation, inverse, out=inverse)
                deviation *= self._normal[rows]
                skewness *= skewed
                for term in (deviation, skewness, kurtosis):
                    mean += term
                np.rint(mean, out=mean)
                np.minimum(mean, self.trials[rows], out=mean)
                np.maximum(mean, 0, out=mean)
        if rare.size:
            variable = rare % chance.size
            found = _added_up(
                self.uniform.ravel()[rare], self.trials.ravel()[rare], chance, variable
            )
            hits.ravel()[rare] = found
        return hits


def _added_up(
    uniform: FloatArray, trials: FloatArray, chance: FloatArray, variable: IntArray
) -> FloatArray:
    """Quantiles ``(n,)``: the rarer outcome is counted up to where its probabilities reach them.

    Each has its own number of trials, and the chance of a ``variable`` ``(n,)``.
    """
    flipped = chance > 0.5
    rarer = np.where(flipped, 1 - chance, chance)
    odds, flipped = (rarer / (1 - rarer))[variable], flipped[variable]
    probability = np.exp(trials * np.log1p(-rarer)[variable])
    left = np.where(flipped, 1 - uniform, uniform) - probability
    count, open_ = np.zeros_like(trials), np.arange(trials.size)
    rest = trials
    for hit in range(1, 60):
        more = np.flatnonzero(left > 0)
        if not more.size:
            break
        open_, odds, rest = open_[more], odds[more], rest[more]
        probability = probability[more] * odds * (rest - (hit - 1)) / hit
        left = left[more] - probability
        count[open_] = hit
    return np.where(flipped, trials - count, count)


def _drawn(
    rng: np.random.Generator, trials: IntArray, chance: FloatArray, replicates: int
) -> NDArray[np.integer[Any]]:
    """Draw hits of the same variables over and over, ``(variables, replicates)``."""
    if trials.max() > SINGLE:
        # draws of one variable in a row share what the generator prepares for them
        return rng.binomial(trials[:, None], chance[:, None], (trials.size, replicates))
    hits = np.zeros((trials.size, replicates), np.uint8)
    for trial in range(int(trials.max())):
        some = np.flatnonzero(trials > trial)
        uniform = rng.random((some.size, replicates), dtype=np.float32)
        hits[some] += uniform < chance[some, None].astype(np.float32)
    return hits


BANDWIDTH = 0.1
"""Width, in confidence, of the smoothing of the gaps."""
STEP = LIMIT / 4096
"""Scale to which an end is searched, far less than what it varies by with the draws."""
_MAX_DRAWS = 1 << 23
"""Random numbers in memory at a time: groups times replicates."""

Functional = Callable[[FloatArray], FloatArray]
"""Maps gaps ``(..., bins)`` to errors ``(...)``."""

Excess = Callable[[FloatArray, float], FloatArray]
"""Maps gaps ``(n, bins)`` and a bound to numbers ``(n,)`` with the signs of errors less bound."""


def total(gap: FloatArray) -> FloatArray:
    """Sum of absolute gaps."""
    return np.asarray(np.abs(gap).sum(-1))


def _over(gap: FloatArray) -> FloatArray:
    """Sum of positive gaps: the over-confident part."""
    return np.asarray(np.maximum(gap, 0).sum(-1))


def _under(gap: FloatArray) -> FloatArray:
    """Sum of negative gaps, without their sign: the under-confident part."""
    return _over(-gap)


def _running(gap: FloatArray) -> FloatArray:
    """Largest absolute running sum."""
    return np.asarray(np.abs(np.cumsum(gap, axis=-1)).max(-1))


def _worst(filled: Bins, min_count: int | None = None) -> Functional:
    """Largest difference of confidence and accuracy; see :func:`calibrant.mce`."""
    least = max(10, math.ceil(0.01 * int(filled.count.sum()))) if min_count is None else min_count
    held = filled.count >= max(least, 1)
    if not held.any():
        return lambda gap: np.asarray(math.nan)
    share = filled.weight[held] / filled.total
    return lambda gap: np.asarray(np.abs(gap[..., held] / share).max(-1))


def debiased(filled: Bins) -> float:
    """Solve the equation of :func:`calibrant.debiased_ece`."""
    deviation, observed = gap_deviation(filled), float(total(filled.gap))
    claimed = np.where(filled.weight > 0, filled.confidence, 0.0)
    curve = filled.weight / filled.total * gap_curve(filled)(claimed)

    def excess(scale: float) -> float:
        """Mean of the sum of absolute gaps with this noise, less the observed sum."""
        size = np.abs(scale * curve)
        # beyond forty deviations the sign is certain, and the ratio may not be finite
        certain = np.full_like(size, 40.0)
        ratio = np.divide(size, deviation, out=certain, where=size < 40 * deviation)
        bell = deviation * math.sqrt(2 / math.pi) * np.exp(-(ratio**2) / 2)
        return float((bell + size * erf(ratio / math.sqrt(2))).sum()) - observed

    if excess(0.0) >= 0 or not curve.any():
        return 0.0
    limit = 1.0
    while excess(limit) < 0:
        limit *= 2
    return min(float(brentq(excess, 0.0, limit)) * float(total(curve)), observed)


def gap_curve(filled: Bins) -> Callable[[FloatArray], FloatArray]:
    """Observed gap as a function of confidence: a smooth curve where that explains the gaps."""
    held = filled.weight > 0
    share, gap, claimed = (x[held] for x in (filled.weight, filled.gap, filled.confidence))
    share = share / filled.total

    def smooth(confidence: FloatArray) -> FloatArray:
        kernel = np.exp(-(((confidence[:, None] - claimed) / BANDWIDTH) ** 2) / 2) + 1e-12
        return np.asarray((kernel @ gap) / (kernel @ share))

    def stepped(confidence: FloatArray) -> FloatArray:
        steps = np.zeros_like(filled.gap)
        steps[held] = gap / share
        return steps[bin_index(confidence, filled.edges)]

    size, accuracy = filled.effective[held], filled.accuracy[held]
    likely = (accuracy * size + 0.5) / (size + 1)  # a bin without errors has noise all the same
    off = (gap / share - smooth(claimed)) / np.sqrt(likely * (1 - likely) / size)
    usual = 2 * gammaincinv(off.size / 2, 0.99)  # of a chi-squared variable
    return smooth if (off**2).sum() <= usual else stepped


def gap_deviation(filled: Bins) -> FloatArray:
    """Standard deviation of each gap over samples of this size, ``(bins,)``."""
    variance = np.maximum(filled.spread - filled.gap**2 * filled.squares.sum(), 0)
    return np.asarray(np.sqrt(variance) / filled.total)


@dataclass(frozen=True, eq=False)
class GapCells:
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
    def constant(self) -> list[GapCells]:
        """Cells with candidates whose gap at s = 1 is one standard error, of either sign."""
        count = int(self.size.sum())
        right = float(self.share @ self.claimed - self.observed.sum())
        likely = (right * count + 0.5) / (count + 1)  # unseen errors are possible all the same
        shape = np.full_like(self.shape, math.sqrt(likely * (1 - likely) / count))
        return [replace(self, shape=sign * shape, samples={}) for sign in (1, -1)]


def _cells_of(filled: Bins, curve: Bins, replicates: int, seed: int) -> GapCells:
    """Make cells from sums per bin, and candidates from the gap curve of those or other bins."""
    # unequal weights count as fewer examples; a sum of equal ones is off by rounding only
    whole = np.floor(filled.effective + 1e-6)
    size = np.maximum(whole, filled.weight > 0).astype(np.int64)
    claimed = np.clip(np.where(size > 0, filled.confidence, 0.0), 0, 1)
    share = filled.weight / filled.total
    rng = np.random.default_rng([seed, 1])  # apart from the outcomes, which use the seed alone
    trials = rng.multinomial(size.sum(), size / size.sum(), replicates).astype(np.float64)
    # claims within a bin may differ: then gaps scatter beyond the noise of the outcomes
    held = filled.weight > 0
    excess, right = np.zeros(held.size), filled.accuracy[held]
    variance = filled.spread[held] / filled.squares[held] - (filled.confidence[held] - right) ** 2
    excess[held] = np.maximum(variance - right * (1 - right), 0.0)
    scatter = np.sqrt(trials * excess) * rng.standard_normal(trials.shape)
    outcomes = Binomials(trials, np.random.default_rng(seed).random(trials.shape))
    # sums of gaps but for the hits
    rest, each = trials * claimed + scatter, share / np.maximum(size, 1)

    def sampled(accuracy: FloatArray) -> FloatArray:
        return np.asarray(each * (rest - outcomes.hits(accuracy)))

    return GapCells(filled.gap, share, claimed, gap_curve(curve)(claimed), size, sampled)


def _group_noise(influence: FloatArray, replicates: int, seed: int | list[int]) -> FloatArray:
    """Draw normal noise ``(replicates, columns)`` with the covariance of groups' influences."""
    rng, groups = np.random.default_rng(seed), len(influence)
    drawn = np.empty((replicates, influence.shape[1]))
    step = max(1, _MAX_DRAWS // groups)
    for start in range(0, replicates, step):
        some = min(step, replicates - start)
        drawn[start : start + some] = rng.standard_normal((some, groups)) @ influence
    return drawn


def _with_noise(cells: GapCells, noise: FloatArray) -> GapCells:
    """Return cells whose samples add noise ``(replicates, cells)`` to the gaps of a candidate."""
    right = float(cells.share @ cells.claimed - cells.observed.sum())
    worth = right * (1 - right) / max(float(noise.sum(1).var()), 1e-300)  # examples, in effect
    size = np.maximum(np.floor(cells.size * min(1.0, worth / cells.size.sum())), cells.size > 0)

    def sampled(accuracy: FloatArray) -> FloatArray:
        return np.asarray(cells.share * (cells.claimed - accuracy) + noise)

    return replace(cells, size=size.astype(np.int64), sampled=sampled, samples={}, ends={})


def error_interval(
    value: float, error: Functional, cells: GapCells, level: float, excess: Excess | None = None
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


def _ends(error: Functional, excess: Excess, cells: GapCells, level: float) -> tuple[float, float]:
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

    def true_error(candidates: GapCells, scale: float) -> float:
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

    def last(candidates: GapCells, start: float = 0.0) -> float:
        def ruled_out(scale: float) -> float:
            return exceeds(rarely, share(excess(candidates.drawn(scale), shown) <= 0))

        return _first_root(ruled_out, start, STEP)

    low, high = _first_root(reached, 0.0, STEP), last(cells)
    # above 0 only where accuracies of 0 or 1 stop the candidates; see the top of this file
    beyond = max(observed - float(np.quantile(error(cells.drawn(high)), rarely)), 0.0)
    high_error = min(true_error(cells, high) + beyond, 1.0)
    for each in cells.constant:

        def larger(scale: float, each: GapCells = each, least: float = high_error) -> float:
            return float(excess(each.gaps(scale)[None], least)[0])

        high_error = max(high_error, true_error(each, last(each, _first_root(larger, 0.0, STEP))))
    return true_error(cells, low), high_error
