r"""Calibration errors that are functions of sums per bin.

Every function here takes pairs, a claimed probability and whether the event happened, so it
measures whichever estimand the pairs were reduced to (:func:`calibrant.top_label`,
:func:`calibrant.one_vs_rest`, :func:`calibrant.binary`, :func:`calibrant.multilabel`). With
:math:`n_b` of :math:`n` examples in bin :math:`b`, mean confidence :math:`\bar{p_b}` and mean
outcome :math:`\bar{y_b}`, the *gap* of a bin is
:math:`g_b = \frac{n_b}{n} (\bar{p_b} - \bar{y_b})`.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import erf

from calibrant._core.binning import Bins, equal_mass_edges, fill, uniform_edges
from calibrant._core.checks import BoolArray, FloatArray, Values, as_pairs, check_some
from calibrant._core.chunks import examples
from calibrant.metrics.classwise import Average, ClassBins
from calibrant.metrics.gap_curve import shape_of
from calibrant.metrics.reductions import walk


def bins_of(
    confidence: Values, outcome: Values, *, bins: int = 15, sample_weight: Values | None = None
) -> Bins:
    """Sums of pairs in ``bins`` equal-width bins.

    >>> bins_of([0.95, 1.0], [1, 0], bins=10).accuracy[-1]
    np.float64(0.5)
    """
    claimed, happened, weights = as_pairs(confidence, outcome, sample_weight)
    return fill(claimed, happened, uniform_edges(bins), weights)


def ece(
    confidence: Values, outcome: Values, *, bins: int = 15, sample_weight: Values | None = None
) -> float:
    r"""Expected calibration error with equal-width bins (Guo et al. 2017, eq. 3).

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{n} \, | \bar{y_b} - \bar{p_b} |

    Parameters
    ----------
    confidence : (...) in [0, 1]
    outcome : (...) 0 or 1
    bins : int
        Number of equal-width bins (lo, hi], the first one closed.
    weight : (...), optional
        Weight of each example.

    Examples
    --------
    >>> ece([0.95, 1.0], [1, 0], bins=10)
    0.475
    """
    return absolute(bins_of(confidence, outcome, bins=bins, sample_weight=sample_weight).gap)


def ada_ece(
    confidence: Values, outcome: Values, *, bins: int = 15, sample_weight: Values | None = None
) -> float:
    r"""Calibration error with bins of equal mass ("adaptive", Nguyen and O'Connor 2015).

    The sum of :func:`ece` over bins that hold about equally many examples each. Equal
    confidences are never parted, so ties leave fewer bins, and there are never more bins than
    examples.

    >>> ada_ece([0.7] * 1000, [1] * 700 + [0] * 300)
    0.0
    """
    claimed, happened, weights = as_pairs(confidence, outcome, sample_weight)
    edges = equal_mass_edges(claimed, bins, weights)
    return absolute(fill(claimed, happened, edges, weights).gap)


def debiased_ece(
    confidence: Values, outcome: Values, *, bins: int = 15, sample_weight: Values | None = None
) -> float:
    r"""ECE without the part that sampling noise adds.

    Each :math:`|\hat g_b|` is too large on average, since noise of deviation :math:`\sigma_b`
    does not cancel inside the absolute value: a perfectly calibrated model has a positive ECE.
    The debiased value is :math:`s \sum_b |d_b|`, where :math:`d_b` are the gaps of a curve
    through the observed ones (smooth where that explains them), and :math:`s` is such that the
    observed sum is what noise would make of it on average,

    .. math:: \sum_b E\,| s d_b + \sigma_b \varepsilon | = \sum_b |\hat g_b|, \quad
        \varepsilon \sim N(0, 1),

    and 0 where noise alone explains the sum. Kumar et al. (2019) subtract one estimate of the
    bias instead, which leaves about 60 % of it when the model is calibrated. A copy of an
    example counts as more evidence here, a larger weight does not.

    >>> rng = np.random.default_rng(0)
    >>> p = rng.uniform(0.5, 1, 1000)
    >>> y = rng.random(1000) < p
    >>> round(ece(p, y), 3), round(debiased_ece(p, y), 3)
    (0.026, 0.0)
    """
    return debiased(bins_of(confidence, outcome, bins=bins, sample_weight=sample_weight))


def mce(
    confidence: Values,
    outcome: Values,
    *,
    bins: int = 15,
    min_count: int | None = None,
    sample_weight: Values | None = None,
) -> float:
    r"""Maximum calibration error over the bins that hold enough examples (Guo et al., eq. 5).

    .. math:: \mathrm{MCE} = \max_{b:\, n_b \ge m} | \bar{y_b} - \bar{p_b} |

    A bin of three examples is off by 0.3 through luck alone; without a minimum the figure
    tells the size of the smallest bin. The default ``min_count`` is 1 % of the examples and at
    least 10; the figure is NaN when no bin has that many.

    >>> mce([0.9] * 50 + [0.2], [1] * 40 + [0] * 10 + [1])
    0.1
    """
    filled = bins_of(confidence, outcome, bins=bins, sample_weight=sample_weight)
    return largest(filled, min_count)


def over_ece(
    confidence: Values, outcome: Values, *, bins: int = 15, sample_weight: Values | None = None
) -> float:
    r"""Over-confident part of ECE: the bins where confidence exceeds accuracy.

    ``over_ece + under_ece == ece`` for the same bins.

    .. math:: \sum_b \max(g_b, 0)

    >>> over_ece([0.9, 0.9, 0.5, 0.5], [1, 0, 1, 1], bins=10)
    0.2
    """
    return positive(bins_of(confidence, outcome, bins=bins, sample_weight=sample_weight).gap)


def under_ece(
    confidence: Values, outcome: Values, *, bins: int = 15, sample_weight: Values | None = None
) -> float:
    r"""Under-confident part of ECE: the bins where accuracy exceeds confidence.

    .. math:: \sum_b \max(-g_b, 0)

    >>> under_ece([0.9, 0.9, 0.5, 0.5], [1, 0, 1, 1], bins=10)
    0.25
    """
    return positive(-bins_of(confidence, outcome, bins=bins, sample_weight=sample_weight).gap)


def classwise_ece(
    logits: Values,
    labels: Values,
    *,
    bins: int = 15,
    average: Average = "mean",
    threshold: float = 0.0,
    sample_weight: Values | None = None,
) -> float:
    r"""Average over the classes of the one-vs-rest ECE (Nixon et al. 2019, Kull et al. 2019).

    .. math:: \frac{1}{K} \sum_k \sum_b \frac{n_{kb}}{n_k} | \bar{y_{kb}} - \bar{p_{kb}} |

    With many classes almost every probability is near zero and right, and the plain mean says
    little. Two remedies:

    - ``average="prevalence"`` weighs each class by its share of the labels;
    - ``threshold`` leaves out probabilities at or below it, so that a class is judged by the
      examples in which it was at stake (0.01 is a usual choice at 1000 classes).

    Parameters
    ----------
    logits : (..., classes)
    labels : (...) integers, -100 ignored

    Examples
    --------
    >>> round(classwise_ece([[2.0, 0.0], [2.0, 0.0]], [0, 1]), 3)
    0.381
    """
    sums = class_bins(logits, labels, bins=bins, threshold=threshold, sample_weight=sample_weight)
    return sums.average(average)


def per_class_ece(
    logits: Values,
    labels: Values,
    *,
    bins: int = 15,
    threshold: float = 0.0,
    sample_weight: Values | None = None,
) -> FloatArray:
    """One-vs-rest ECE of each class, ``(classes,)``; NaN for a class with nothing to count.

    >>> per_class_ece([[2.0, 0.0], [2.0, 0.0]], [0, 1]).round(3)
    array([0.381, 0.381])
    """
    return class_bins(
        logits, labels, bins=bins, threshold=threshold, sample_weight=sample_weight
    ).errors()


def class_bins(
    logits: Values,
    labels: Values,
    *,
    bins: int = 15,
    threshold: float = 0.0,
    sample_weight: Values | None = None,
) -> ClassBins:
    """One-vs-rest sums of logits ``(..., classes)`` per class and bin."""
    given = examples(logits, labels, sample_weight)
    sums = ClassBins.empty(given.columns, bins, threshold=threshold)
    check_some(walk(given, sums).nll.size)
    return sums


def absolute(gap: FloatArray) -> float:
    """Sum of absolute gaps."""
    return float(np.abs(gap).sum())


def positive(gap: FloatArray) -> float:
    """Sum of positive gaps."""
    return float(np.maximum(gap, 0).sum())


def enough(filled: Bins, min_count: int | None = None) -> BoolArray:
    """Which bins hold at least ``min_count`` examples (1 %, at least 10, by default)."""
    least = max(10, math.ceil(0.01 * int(filled.count.sum()))) if min_count is None else min_count
    return np.asarray(filled.count >= max(least, 1))


def largest(filled: Bins, min_count: int | None = None) -> float:
    """Largest difference of confidence and accuracy among bins with enough examples."""
    off = np.abs(filled.confidence - filled.accuracy)[enough(filled, min_count)]
    return float(off.max()) if off.size else math.nan


def debiased(filled: Bins) -> float:
    """Solve the equation of :func:`debiased_ece` for sums per bin."""
    deviation, observed = gap_deviation(filled), absolute(filled.gap)
    claimed = np.where(filled.weight > 0, filled.confidence, 0.0)
    curve = filled.weight / filled.total * shape_of(filled)(claimed)

    def excess(scale: float) -> float:
        return float(folded_mean(scale * curve, deviation).sum()) - observed

    if excess(0.0) >= 0 or not curve.any():
        return 0.0
    limit = 1.0
    while excess(limit) < 0:
        limit *= 2
    return min(float(brentq(excess, 0.0, limit)) * absolute(curve), observed)


def gap_deviation(filled: Bins) -> FloatArray:
    """Standard deviation of each gap over samples of this size, ``(bins,)``."""
    gap, total = filled.gap, filled.total
    variance = np.maximum(filled.spread - gap**2 * filled.squares.sum(), 0)
    return np.asarray(np.sqrt(variance) / total)


def folded_mean(mean: FloatArray, deviation: FloatArray) -> FloatArray:
    """Mean of the absolute value of a normal variable."""
    size = np.abs(mean)
    # beyond forty deviations the fold is invisible, and the ratio may not be finite
    ratio = np.divide(size, deviation, out=np.full_like(size, 40.0), where=size < 40 * deviation)
    bell = deviation * math.sqrt(2 / math.pi) * np.exp(-(ratio**2) / 2)
    return np.asarray(bell + size * erf(ratio / math.sqrt(2)))
