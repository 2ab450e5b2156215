"""Bins of confidences, and sums per bin, which can be added up.

Bin ``i`` is ``(edges[i], edges[i + 1]]`` and the first bin also holds ``edges[0]``, so that
confidences of exactly 0 and exactly 1 are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, TypeAlias

import numpy as np

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.options import at_least, at_most

RULE = "(lo, hi], first bin closed"
_MAX_BINS = 100_000
BinCount: TypeAlias = Annotated[int, at_least(1), at_most(_MAX_BINS)]


def uniform_edges(bins: int) -> FloatArray:
    """Return the edges of ``bins`` equal-width bins of [0, 1], to be read only."""
    check_bins(bins)
    return _uniform_edges(bins)


@lru_cache
def _uniform_edges(bins: int) -> FloatArray:
    # the float nearest to the edge: 0.3, where numpy.linspace gives 0.30000000000000004
    edges = np.arange(bins + 1) / bins
    edges.flags.writeable = False
    return edges


def stable_order(values: FloatArray) -> IntArray:
    """Return the index that sorts values, of equal ones in the order in which they come.

    NumPy's stable sort takes several times as long for many values, unless they are nearly sorted.

    >>> stable_order(np.array([2.0, 1.0, 2.0, 1.0]))
    array([1, 3, 0, 2])
    """
    order = np.argsort(values)
    placed = values[order]
    rises = placed[1:] != placed[:-1]
    if rises.all():
        return order
    keys = np.append(0, np.cumsum(rises)) * len(values) + order
    keys.sort()
    return np.asarray(keys % len(values))


def equal_mass_edges(
    confidence: FloatArray, bins: int, weight: FloatArray | None = None
) -> FloatArray:
    """Return edges of bins of about equal weight, which never split a tie.

    There are fewer bins if there are fewer distinct values than ``bins``.
    """
    check_bins(bins)
    order = np.argsort(confidence, kind="stable")
    mass = np.cumsum(np.ones(order.size) if weight is None else weight[order])
    wanted = mass[-1] * np.arange(1, bins) / bins
    # the last example of a bin is the first one that brings the running mass up to its share
    cuts = np.searchsorted(mass, wanted * (1 - 1e-12))
    inner = np.unique(confidence[order[cuts]])
    # an inner edge at 0 keeps claims of exactly 0 in a bin of their own
    return np.concatenate([[0.0], inner[inner < confidence.max()], [1.0]])


def bin_index(confidence: FloatArray, edges: FloatArray) -> IntArray:
    """Return the index of the bin that each confidence falls into."""
    bins = edges.size - 1
    if (uniform := _uniform_edges(bins)) is edges or (uniform == edges).all():
        # a search takes several times as long, since processors cannot foresee its comparisons
        index = (confidence * bins).astype(np.int64)  # never rounded down below an edge
        np.minimum(index, bins - 1, out=index)
        index -= confidence <= edges.take(index)  # on the edge, or rounded up to it
    else:
        index = edges.searchsorted(confidence) - 1
        np.minimum(index, bins - 1, out=index)
    return np.maximum(index, 0, out=index)


def check_bins(bins: int) -> None:
    """Raise unless ``bins`` is a positive whole number, and one that memory has room for."""
    if not isinstance(bins, (int, np.integer)) or bins < 1:
        raise ValueError(f"bins must be a positive whole number, got {bins!r}")
    if bins > _MAX_BINS:
        raise ValueError(f"bins must be at most {_MAX_BINS:,}, got {bins!r}")


@dataclass(frozen=True, eq=False)
class Bins:
    """Sums per bin; those of two sets of examples add up to those of their union.

    Attributes
    ----------
    edges : (bins + 1,) float64
    count : (bins,) int64
        Number of examples.
    weight : (bins,) float64
        Sum of weights; the counts where there are no weights.
    claimed, observed : (bins,) float64
        Weighted sums of confidences and of outcomes.
    spread : (bins,) float64
        Sum of squared weight times squared ``confidence - outcome``.
    squares : (bins,) float64
        Sum of squared weights.
    """

    edges: FloatArray
    count: IntArray
    weight: FloatArray
    claimed: FloatArray
    observed: FloatArray
    spread: FloatArray
    squares: FloatArray

    @classmethod
    def empty(cls, edges: FloatArray) -> Bins:
        """Return empty bins."""
        zeros = np.zeros(edges.size - 1)
        return cls(edges, zeros.astype(np.int64), zeros, zeros, zeros, zeros, zeros)

    def __add__(self, other: Bins) -> Bins:
        if not np.array_equal(self.edges, other.edges):
            raise ValueError("bins with different edges do not add")
        sums = (getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[1:])
        return Bins(self.edges, *sums)

    @property
    def total(self) -> float:
        """Return the sum of all weights."""
        return float(self.weight.sum())

    @property
    def effective(self) -> FloatArray:
        """Return the effective sample size of each bin."""
        return _ratio(self.weight**2, self.squares, 0.0)

    @property
    def gap(self) -> FloatArray:
        """Return the share of examples times (mean confidence - mean outcome), per bin."""
        return (self.claimed - self.observed) / self.total

    @property
    def confidence(self) -> FloatArray:
        """Return the mean confidence per bin; NaN where the bin is empty."""
        return _ratio(self.claimed, self.weight)

    @property
    def accuracy(self) -> FloatArray:
        """Return the mean outcome per bin; NaN where the bin is empty."""
        return _ratio(self.observed, self.weight)


def fill(
    confidence: FloatArray, outcome: FloatArray, edges: FloatArray, weight: FloatArray | None = None
) -> Bins:
    """Sum confidences ``(n,)`` and outcomes ``(n,)`` into bins."""
    return fill_at(bin_index(confidence, edges), confidence, outcome, edges, weight)


def fill_at(
    index: IntArray,
    confidence: FloatArray,
    outcome: FloatArray,
    edges: FloatArray,
    weight: FloatArray | None = None,
) -> Bins:
    """Sum examples into the bins of an index ``(n,)``, which may be anything, such as classes."""
    size = edges.size - 1

    def total(values: FloatArray) -> FloatArray:
        return np.bincount(index, values, size).astype(np.float64, copy=False)

    count = np.bincount(index, minlength=size).astype(np.int64, copy=False)
    residual = confidence - outcome
    if weight is None:
        mass = count.astype(np.float64)
        return Bins(edges, count, mass, total(confidence), total(outcome), total(residual**2), mass)
    return Bins(
        edges,
        count,
        total(weight),
        total(weight * confidence),
        total(weight * outcome),
        total((weight * residual) ** 2),
        total(weight**2),
    )


def _ratio(top: FloatArray, bottom: FloatArray, otherwise: float = np.nan) -> FloatArray:
    return np.divide(top, bottom, out=np.full_like(top, otherwise), where=bottom > 0)
