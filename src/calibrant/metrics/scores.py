"""Accuracy and proper scores: means over the examples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from calibrant._core.checks import FloatArray, Values, check_some
from calibrant._core.chunks import examples
from calibrant.metrics.reductions import Rows, walk


def accuracy(logits: Values, labels: Values, *, sample_weight: Values | None = None) -> float:
    """Share of the examples whose largest logit is at the label (the first of equals).

    >>> accuracy([[2.0, 1.0], [2.0, 1.0]], [0, 1])
    0.5
    """
    return scores(logits, labels, sample_weight).mean("correct")


def nll(logits: Values, labels: Values, *, sample_weight: Values | None = None) -> float:
    r"""Mean negative log-likelihood, :math:`-\frac1n \sum_i \log p_{i, y_i}`, in nats.

    >>> round(nll([[0.0, 0.0]], [1]), 4)
    0.6931
    """
    return scores(logits, labels, sample_weight).mean("nll")


def brier(logits: Values, labels: Values, *, sample_weight: Values | None = None) -> float:
    r"""Mean Brier score summed over the classes, from 0 to 2 (Brier 1950).

    .. math:: \frac1n \sum_i \sum_k (p_{ik} - 1[y_i = k])^2

    >>> brier([[0.0, 0.0]], [1])
    0.5
    """
    return scores(logits, labels, sample_weight).mean("brier")


def scores(logits: Values, labels: Values, weight: Values | None = None) -> Moments:
    """Sums of the scores of logits ``(..., classes)``."""
    given = examples(logits, labels, weight)
    rows = walk(given)
    check_some(rows.nll.size)
    return Moments.empty() + Moments.of(rows, given.labelled_weight())


SCORES = ("correct", "nll", "brier")
"""Columns of :class:`~calibrant.metrics.reductions.Rows` that are averaged."""


@dataclass(frozen=True)
class Moments:
    """Sums from which means and their standard errors follow; sums of two sets add.

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
    def of(cls, rows: Rows, weight: FloatArray | None) -> Moments:
        """Sums of the scores of rows."""
        table = np.stack([getattr(rows, name).astype(np.float64) for name in SCORES])
        mass = np.ones(rows.nll.size) if weight is None else weight
        with np.errstate(over="ignore"):
            powers = np.stack([(table**k) @ mass**2 for k in range(3)])
        return cls(rows.nll.size, float(mass.sum()), table @ mass, powers)

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
