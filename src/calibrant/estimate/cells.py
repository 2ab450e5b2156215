r"""Predictions reduced to sums by cells of probability, which chunks, shards and workers add up.

The *event* of an example is y = 1 for two classes, and that the predicted class is right for more.
A cell holds the examples whose events have about the same log-odds, to 0.01, apart by whether
their confidence reaches a threshold. Ranks and thresholds of a million examples are exact up to the
width of a cell, in memory that does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import xlogy

from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_labels
from calibrant._core.chunks import joined

WIDTH = 0.01
"""Width of a cell in log-odds."""
MOST = 16.0
"""Log-odds beyond which cells end: probabilities within 1e-7 of 0 or 1 share one."""
CELLS = round(2 * MOST / WIDTH)


class Rows(NamedTuple):
    """Numbers of each example, ``(n,)``; those with labels are NaN without."""

    event: FloatArray  # probability of the event
    confidence: FloatArray
    margin: FloatArray  # log-odds of the two likeliest classes
    predicted: IntArray
    brier: FloatArray  # expected scores under the probabilities
    nll: FloatArray
    label: IntArray
    happened: FloatArray  # 1 if the event happened
    brier_gap: FloatArray  # score minus expected score
    nll_gap: FloatArray

    @property
    def labelled(self) -> BoolArray:
        """True for rows with a label."""
        return np.asarray(self.label != IGNORED)

    def take(self, chosen: BoolArray) -> Rows:
        """Return some of the rows."""
        values: Any = [column[chosen] for column in self]
        return Rows(*values)

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Return rows one after another."""
        return cls(*joined(parts))


def _reduce_rows(probs: FloatArray, labels: IntArray | None = None) -> Rows:
    """Reduce probabilities ``(n, classes)`` with their labels ``(n,)``, -100 for none.

    >>> rows = _reduce_rows(np.array([[0.2, 0.8], [0.7, 0.3]]), np.array([1, -100]))
    >>> rows.event, rows.happened
    (array([0.8, 0.3]), array([ 1., nan]))
    """
    n, classes = probs.shape
    label = np.full(n, IGNORED, np.int64) if labels is None else labels
    check_labels(label, classes)
    predicted, known = probs.argmax(1), label != IGNORED
    confidence = probs[np.arange(n), predicted]
    second = np.partition(probs, -2, axis=1)[:, -2]
    squares = np.einsum("ij,ij->i", probs, probs)
    entropy = -xlogy(probs, probs).sum(1)
    tiny = np.finfo(np.float64).tiny
    own = np.where(known, probs[np.arange(n), np.where(known, label, 0)], math.nan)
    happened = np.asarray(label == (1 if classes == 2 else predicted), np.float64)
    return Rows(
        event=probs[:, 1] if classes == 2 else confidence,
        confidence=confidence,
        margin=np.log(confidence / np.maximum(second, tiny)),
        predicted=predicted,
        brier=1 - squares,
        nll=entropy,
        label=label,
        happened=np.where(known, happened, math.nan),
        brier_gap=2 * (squares - own),
        nll_gap=-np.log(np.maximum(own, tiny)) - entropy,
    )


def _log_odds_cell(log_odds: FloatArray) -> IntArray:
    """Return the cell ``(low, high]`` of each of some log-odds."""
    place = np.ceil((np.clip(log_odds, -MOST, MOST) + MOST) / WIDTH) - 1
    return np.asarray(np.clip(place, 0, CELLS - 1), np.int64)


def _event_cell(rows: Rows, threshold: float) -> IntArray:
    """Return the cell of each row; those from ``CELLS`` on reach the threshold."""
    with np.errstate(divide="ignore"):
        log_odds = np.log(rows.event) - np.log1p(-rows.event)
    return np.asarray(_log_odds_cell(log_odds) + CELLS * (rows.confidence >= threshold))


class Cells(NamedTuple):
    """Sums by cell, ``(2 * CELLS,)`` each; those of two sets of examples add."""

    weight: FloatArray
    square: FloatArray  # of squared weights
    claimed: FloatArray  # of weight times probability of the event
    happened: FloatArray  # the same for events, in cells of labelled rows
    brier: FloatArray
    nll: FloatArray
    brier_gap: FloatArray
    nll_gap: FloatArray
    brier_scatter: FloatArray  # of weight times squared gap
    nll_scatter: FloatArray

    @classmethod
    def empty(cls) -> Cells:
        """Sums of no examples."""
        return cls(*np.zeros((len(cls._fields), 2 * CELLS)))

    def plus(self, other: Cells) -> Cells:
        """Return the sums of both."""
        return Cells(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def size(self) -> float:
        """Number of examples, effectively: that of equal weights with the same noise."""
        return _effective(self.weight.sum(), self.square.sum())


def _effective(weight: float, square: float) -> float:
    """Return the number of equal weights with the same noise as weights of these sums."""
    return float(weight**2 / square) if square > 0 else 0.0


def _sums_by(index: IntArray, values: FloatArray, count: int) -> FloatArray:
    """Sums of values by their index, ``(count,)``."""
    return np.bincount(index, values, count).astype(np.float64)


def _fill_cells(rows: Rows, cell: IntArray, weight: FloatArray) -> Cells:
    """Sums of rows by cell."""

    def sums(values: FloatArray) -> FloatArray:
        return _sums_by(cell, values, 2 * CELLS)

    happened, brier_gap, nll_gap = (
        np.where(rows.labelled, values, 0)
        for values in (rows.happened, rows.brier_gap, rows.nll_gap)
    )
    return Cells(
        weight=sums(weight),
        square=sums(weight**2),
        claimed=sums(weight * rows.event),
        happened=sums(weight * happened),
        brier=sums(weight * rows.brier),
        nll=sums(weight * rows.nll),
        brier_gap=sums(weight * brier_gap),
        nll_gap=sums(weight * nll_gap),
        brier_scatter=sums(weight * brier_gap**2),
        nll_scatter=sums(weight * nll_gap**2),
    )
