"""A value with its interval, intervals in closed form, and the search for the ends of others.

The coverage of all of them was checked by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv, expit, ndtri, stdtrit

from calibrant._core.checks import FloatArray
from calibrant._core.showing import one_line

LIMIT = 8.0
"""Largest scale of a candidate."""
SMALLEST = 1e-9
"""What separates a probability from 1, or a sum from a whole number, by more than rounding."""


class Estimate(NamedTuple):
    """A value with an interval; NaN where undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __repr__(self) -> str:
        ends = {"low": self.low, "high": self.high}
        shown = [f"{k}={v:.4g}" for k, v in ends.items() if not math.isnan(v)]
        return one_line(self, f"{self.value:.4g}", *shown)

    def excludes(self, value: float) -> bool:
        """Return True if the value is outside the interval; False without one."""
        return self.low > value or self.high < value


def normal_interval(value: float, deviation: float, level: float) -> Estimate:
    """Normal interval of a figure with a standard error."""
    reach = float(ndtri((1 + level) / 2)) * deviation
    return Estimate(value, value - reach, value + reach)


def loss_interval(value: float, deviation: float, level: float) -> Estimate:
    """Normal interval of a mean of losses, which are not negative."""
    _, low, high = normal_interval(value, deviation, level)
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


def clopper_pearson(
    hits: FloatArray, trials: FloatArray, tail: Any
) -> tuple[FloatArray, FloatArray]:
    """Intervals of chances, each end of which misses with at most the probability ``tail``.

    Numbers of hits and trials, such as those of weighted examples, need not be whole.

    >>> low, high = clopper_pearson(np.array([0.0, 5.0]), np.array([10.0, 10.0]), 0.05)
    >>> low.round(3), high.round(3)
    (array([0.   , 0.222]), array([0.259, 0.778]))
    """
    low = np.where(hits > 0, betaincinv(hits, trials - hits + 1, tail), 0.0)
    high = np.where(hits < trials, betaincinv(hits + 1, trials - hits, 1 - tail), 1.0)
    return low, high


def _lower_tail(error: float, noise: float, alpha: float) -> float:
    """Share of alpha for the lower end: all of it at 0, where the upper end cannot miss."""
    return alpha * (1 - min(error / noise, 1.0) / 2) if noise > 0 else alpha / 2


def _first_root(rising: Callable[[float], float], start: float = 0.0, step: float = 1e-9) -> float:
    """Scale from ``start`` on at which a function reaches 0, or the nearest end of the range."""
    rising = cache(rising)
    if rising(start) >= 0:
        return start
    low, high = start, max(1.0, 2 * start)
    while high < LIMIT and rising(high) < 0:
        low, high = high, 2 * high
    high = min(high, LIMIT)
    return LIMIT if rising(high) <= 0 else float(brentq(rising, low, high, xtol=step))
