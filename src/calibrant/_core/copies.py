"""Rows of predictions that are copies of one another, as repeated or oversampled examples are."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    IntArray,
    Logits,
    as_float64,
    rows_are_known,
    warn,
)

_MAX_ROWS, _MAX_NUMBERS = 100_000, 1 << 19
"""Rows, and numbers in them, that are looked at."""
_MIN_SHARE = 0.1  # of copies among the rows, below which they hardly matter
_MIN_DISTINCT = 10  # distinct rows, below which they may well be as frequent as one another
_MIN_MISTAKES = 5  # distinct rows, predicted wrongly, whose copies must all be wrong as well


def warn_of_copies(scores: Logits, labels: IntArray, *, probs: bool = False) -> None:
    """Warn if many of the first rows of logits ``(n, classes)`` or ``(n,)``, or probs, are copies.

    Tokens are left alone: those of one beginning are rightly alike.
    """
    tokens = labels.ndim != 1 or scores.shape[:1] != labels.shape or scores.ndim > 2
    if tokens or rows_are_known():
        return
    rows = first_rows(tuple(scores.shape[1:]))
    if not rows:
        return
    kept = labels[:rows] != IGNORED
    values = as_float64(scores[:rows])[kept]
    if values.ndim == 1:
        values = np.stack([1 - values if probs else np.zeros_like(values), values], -1)
    copies, count = count_copies(values, labels[:rows][kept]), len(values)
    if copies:
        warn(
            f"{copies:,} of the first {count:,} rows are copies of other rows: intervals are too "
            "narrow, and cross-validation sees what it holds out; keep one of each, or name the "
            "originals as groups= (--groups) where a method is fitted"
        )


def first_rows(shape: tuple[int, ...]) -> int:
    """Return how many rows of a shape are looked at; 0 where they are too large."""
    return min(_MAX_ROWS, _MAX_NUMBERS // max(1, math.prod(shape)))


def count_copies(scores: FloatArray, labels: IntArray) -> int:
    """Return how many rows ``(n, classes)`` are copies of others; 0 where they may be honest.

    Equal scores are no proof: trees, votes and rounded probabilities have few values, at which
    labels differ. Copies give themselves away as rows that all occur equally often, or as
    mistakes that are repeated with the same label while no row has two labels.
    """
    of_row = _hashes(scores)
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


def _hashes(scores: FloatArray) -> NDArray[np.uint64]:
    """Return a number ``(n,)`` for each row: equal ones of equal rows, and only of these."""
    bits = (scores + 0.0).view(np.uint64)  # the two zeros are one
    random = np.random.default_rng(0).integers(2**63, size=bits.shape[1], dtype=np.uint64)
    mixed = (bits ^ (bits >> np.uint64(32))) * (2 * random + np.uint64(1))
    return np.asarray((mixed ^ (mixed >> np.uint64(29))).sum(-1, dtype=np.uint64))
