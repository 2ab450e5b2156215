r"""Calibration errors as functions of the gaps per bin.

The gap of a bin with :math:`n_b` of :math:`n` examples, mean confidence :math:`\bar{p_b}` and mean
outcome :math:`\bar{y_b}` is :math:`g_b = \frac{n_b}{n} (\bar{p_b} - \bar{y_b})`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erf, gammaincinv

from calibrant._core.binning import Bins, bin_index
from calibrant._core.checks import FloatArray

BANDWIDTH = 0.1
"""Width, in confidence, of the smoothing of the gaps."""

Functional = Callable[[FloatArray], FloatArray]
"""Maps gaps ``(..., bins)`` to errors ``(...)``."""

Excess = Callable[[FloatArray, float], FloatArray]
"""Maps gaps ``(n, bins)`` and a bound to numbers ``(n,)`` with the signs of errors less bound."""


def total(gap: FloatArray) -> FloatArray:
    """Sum of absolute gaps."""
    return np.asarray(np.abs(gap).sum(-1))


def over(gap: FloatArray) -> FloatArray:
    """Sum of positive gaps: the over-confident part."""
    return np.asarray(np.maximum(gap, 0).sum(-1))


def under(gap: FloatArray) -> FloatArray:
    """Sum of negative gaps, without their sign: the under-confident part."""
    return over(-gap)


def running(gap: FloatArray) -> FloatArray:
    """Largest absolute running sum."""
    return np.asarray(np.abs(np.cumsum(gap, axis=-1)).max(-1))


def worst(filled: Bins, min_count: int | None = None) -> Functional:
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
