"""The gap between claim and outcome as a function of confidence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import chi2

from calibrant._core.binning import Bins, bin_index
from calibrant._core.checks import FloatArray

BANDWIDTH = 0.1
"""Width, in confidence, of the smoothing of the gaps."""

Shape = Callable[[FloatArray], FloatArray]
"""Mean of (claim - outcome) as a function of confidence."""


def shape_of(filled: Bins) -> Shape:
    """The observed gap as a function of confidence: a smooth curve if that explains it."""
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
    return smooth if (off**2).sum() <= chi2.ppf(0.99, off.size) else stepped
