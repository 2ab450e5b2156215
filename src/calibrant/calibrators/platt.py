"""Platt scaling: a line through log-odds, fitted by the likelihood of being right."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.solve import Solution, minimise_within
from calibrant.calibrators.base import BOUNDS

STEEPEST = 1 / BOUNDS[0]
"""Largest slope, which is the largest sharpness of a temperature."""
FARTHEST = 20.0
"""Largest log-odds, either way, of the mean example: 1 in 500 million is wrong, or right."""


def fit_platt(odds: FloatArray, correct: BoolArray, weight: FloatArray) -> Solution:
    r"""The rising line :math:`s' = a s + b` under which outcomes are likeliest (Platt 1999).

    No prior is put on the outcomes. Data without an optimum (all right, all wrong, or right exactly
    above some log-odds) end where nothing is left to gain, or at a bound: :data:`STEEPEST` for the
    slope, :data:`FARTHEST` for the new log-odds at the mean of the old ones. ``converged`` is then
    False. ``odds``, ``correct`` and ``weight`` are ``(n,)``; the solution is ``(slope, offset)``.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = rng.normal(2, 2, 50_000)
    >>> right = rng.random(50_000) < expit(0.5 * odds - 1)
    >>> fit_platt(odds, right, np.ones(50_000)).x.round(1)
    array([ 0.5, -1. ])
    """
    share = weight / weight.sum()
    centre = float(share @ odds)
    centred = odds - centre

    def value_and_gradient(line: FloatArray) -> tuple[float, FloatArray]:
        result = line[0] * centred + line[1]
        value = float(share @ (np.logaddexp(0, result) - correct * result))
        pull = share * (expit(result) - correct)
        return value, np.array([pull @ centred, pull.sum()])

    start = np.array([1.0, np.clip(centre, -FARTHEST, FARTHEST)])
    bounds = [(0.0, STEEPEST), (-FARTHEST, FARTHEST)]
    result = minimise_within(value_and_gradient, start, bounds)
    slope, level = result.x
    # within rounding of a bound is at the bound
    inside = slope < STEEPEST * (1 - 1e-6) and abs(level) < FARTHEST * (1 - 1e-6)
    return result._replace(
        x=np.array([slope, level - slope * centre]),
        converged=bool(result.converged and inside and not _apart(odds, correct)),
    )


def _apart(odds: FloatArray, correct: BoolArray) -> bool:
    """Whether a threshold tells right from wrong, so that no line is steep enough."""
    lowest_right = odds.min(where=correct, initial=np.inf)
    return bool(odds.max(where=~correct, initial=-np.inf) < lowest_right)
