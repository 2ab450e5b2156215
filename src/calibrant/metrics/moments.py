"""Sums of scores that add, from which means and their standard errors follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from calibrant._core.checks import FloatArray
from calibrant.metrics.reductions import Reduced

SCORES = ("correct", "nll", "brier")
"""Columns of :class:`~calibrant.metrics.reductions.Reduced` that are averaged."""


@dataclass(frozen=True)
class Moments:
    """Sums over a set of examples; the sums of two sets add.

    ``first`` is ``(scores,)``: weight times score. ``powers`` is ``(3, scores)``: the square of
    the weight times the powers 0 to 2 of the score.
    """

    count: int
    weight: float
    first: FloatArray
    powers: FloatArray

    @classmethod
    def empty(cls) -> Moments:
        """Sums of no examples."""
        return cls(0, 0.0, np.zeros(len(SCORES)), np.zeros((3, len(SCORES))))

    @classmethod
    def of(cls, reduced: Reduced, weight: FloatArray | None) -> Moments:
        """Sums of the scores of reduced examples."""
        table = np.stack([getattr(reduced, name).astype(np.float64) for name in SCORES])
        mass = np.ones(reduced.nll.size) if weight is None else weight
        with np.errstate(over="ignore"):
            powers = np.stack([(table**k) @ mass**2 for k in range(3)])
        return cls(reduced.nll.size, float(mass.sum()), table @ mass, powers)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.weight + other.weight,
            self.first + other.first,
            self.powers + other.powers,
        )

    def mean(self, name: str) -> float:
        """Weighted mean of a score."""
        return float(self.first[SCORES.index(name)] / self.weight)

    def deviation(self, name: str) -> float:
        """Standard error of that mean; NaN for a single example."""
        if self.effective <= 1:
            return math.nan
        zeroth, first, second = self.powers[:, SCORES.index(name)]
        mean = np.float64(self.mean(name))
        with np.errstate(over="ignore", invalid="ignore"):  # losses beyond 1e154
            spread = second - 2 * mean * first + mean**2 * zeroth
        if not np.isfinite(spread):
            return math.inf
        return math.sqrt(max(spread, 0.0) / (1 - 1 / self.effective)) / self.weight

    @property
    def effective(self) -> float:
        """Number of equally weighted examples that would be worth as much."""
        return float(self.weight**2 / self.powers[0, 0])

    @property
    def worth(self) -> float:
        """Number of equally weighted examples whose accuracy would vary as much.

        As :attr:`effective`, or fewer where heavy examples are harder than others.
        """
        count, accuracy = self.effective, self.mean("correct")
        deviation = self.deviation("correct")
        if not deviation > 0:
            return count
        variance = deviation**2 * (1 - 1 / count)  # without the correction for few examples
        return min(count, accuracy * (1 - accuracy) / variance)
