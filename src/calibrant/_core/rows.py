"""Rows of predictions: random samples of them, and copies among them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    IntArray,
    Logits,
    _rows_are_known,
    as_float64,
    warn,
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MAX_ROWS, _MAX_NUMBERS = 100_000, 1 << 19
"""Rows, and numbers in them, that are looked at."""
_MIN_SHARE = 0.1  # of copies among the rows, below which they hardly matter
_MIN_DISTINCT = 10  # distinct rows, below which they may well be as frequent as one another
_MIN_MISTAKES = 5  # distinct rows, predicted wrongly, whose copies must all be wrong as well


class Sample(NamedTuple):
    """A share of all rows, each kept or not by its own number and a seed.

    Samples of one seed are disjoint if the ranges from ``start`` to ``start + share`` are.
    """

    share: float
    seed: int = 0
    start: float = 0.0

    def keeps(self, first: int, count: int) -> BoolArray:
        """Return which of ``count`` rows from number ``first`` on are in the sample.

        >>> sample = Sample(0.5)
        >>> whole = sample.keeps(0, 10_000)
        >>> bool((whole[300:400] == sample.keeps(300, 100)).all()), round(float(whole.mean()), 1)
        (True, 0.5)
        """
        place = uniform(self.seed, first, count)
        return np.asarray((place >= self.start) & (place < self.start + self.share))


def uniform(seed: int, first: int, count: int) -> FloatArray:
    """Return numbers in [0, 1) that belong to the rows from ``first`` on."""
    rows = np.arange(first, first + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed], np.uint64) + _GOLDEN)
        mixed = _mixed(start + (rows + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return pseudo-random numbers of consecutive ones by SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def warn_of_copies(scores: Logits, labels: IntArray, *, probs: bool = False) -> None:
    """Warn if many of the first rows of logits ``(n, classes)`` or ``(n,)``, or probs, are copies.

    Tokens are left alone: those of one beginning are rightly alike.
    """
    tokens = labels.ndim != 1 or scores.shape[:1] != labels.shape or scores.ndim > 2
    if tokens or _rows_are_known():
        return
    rows = first_rows(tuple(scores.shape[1:]))
    if not rows:
        return
    kept = labels[:rows] != IGNORED
    values = as_float64(scores[:rows])[kept]
    if values.ndim == 1:
        values = np.stack([1 - values if probs else np.zeros_like(values), values], -1)
    copies, count = _count_copies(values, labels[:rows][kept]), len(values)
    if copies:
        warn(
            f"{copies:,} of the first {count:,} rows are copies of other rows: intervals are too "
            "narrow, and cross-validation sees what it holds out; keep one of each, or name the "
            "originals as groups= (--groups) where a method is fitted"
        )


def first_rows(shape: tuple[int, ...]) -> int:
    """Return how many rows of a shape are looked at; 0 where they are too large."""
    return min(_MAX_ROWS, _MAX_NUMBERS // max(1, math.prod(shape)))


def _count_copies(scores: FloatArray, labels: IntArray) -> int:
    """Return how many rows ``(n, classes)`` are copies of others; 0 where they may be honest.

    Equal scores are no proof: trees, votes and rounded probabilities have few values, at which
    labels differ. Copies give themselves away as rows that all occur equally often, or as
    mistakes that are repeated with the same label while no row has two labels.
    """
    bits = (scores + 0.0).view(np.uint64)  # the two zeros are one
    random = np.random.default_rng(0).integers(2**63, size=bits.shape[1], dtype=np.uint64)
    mixed = (bits ^ (bits >> np.uint64(32))) * (2 * random + np.uint64(1))
    # a number for each row: equal ones of equal rows, and only of these
    of_row = (mixed ^ (mixed >> np.uint64(29))).sum(-1, dtype=np.uint64)
    distinct, index, count = np.unique(of_row, return_inverse=True, return_counts=True)
    copies = len(scores) - len(distinct)
    if copies < _MIN_SHARE * len(scores) or len(distinct) < _MIN_DISTINCT:
        return 0  # also if there are no rows
    if count.min() == count.max():
        return copies
    if not np.ptp(labels):
        return 0
    first = np.zeros(len(distinct), np.int64)
    first[index] = labels
    repeated: BoolArray = (count > 1)[index] & (scores.argmax(-1) != labels)
    mistakes = len(np.unique(index[repeated]))
    return copies if mistakes >= _MIN_MISTAKES and (first[index] == labels).all() else 0
