"""Predictions reduced to sums by cells of probability, which chunks, shards and workers add up.

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
from scipy.special import chdtrc, xlogy

from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_labels
from calibrant._core.chunks import joined

WIDTH = 0.01
"""Width of a cell in log-odds."""
MOST = 16.0
"""Log-odds beyond which cells end: probabilities within 1e-7 of 0 or 1 share one."""
CELLS = round(2 * MOST / WIDTH)


class _Rows(NamedTuple):
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

    def take(self, chosen: BoolArray) -> _Rows:
        """Return some of the rows."""
        values: Any = [column[chosen] for column in self]
        return _Rows(*values)

    @classmethod
    def join(cls, parts: Sequence[_Rows]) -> _Rows:
        """Return rows one after another."""
        return cls(*joined(parts))


def _reduce_rows(probs: FloatArray, labels: IntArray | None = None) -> _Rows:
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
    return _Rows(
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


def _event_cell(rows: _Rows, threshold: float) -> IntArray:
    """Return the cell of each row; those from ``CELLS`` on reach the threshold."""
    with np.errstate(divide="ignore"):
        log_odds = np.log(rows.event) - np.log1p(-rows.event)
    return np.asarray(_log_odds_cell(log_odds) + CELLS * (rows.confidence >= threshold))


class _Cells(NamedTuple):
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
    def empty(cls) -> _Cells:
        """Sums of no examples."""
        return cls(*np.zeros((len(cls._fields), 2 * CELLS)))

    def plus(self, other: _Cells) -> _Cells:
        """Return the sums of both."""
        return _Cells(*(a + b for a, b in zip(self, other, strict=True)))

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


def _fill_cells(rows: _Rows, cell: IntArray, weight: FloatArray) -> _Cells:
    """Sums of rows by cell."""

    def sums(values: FloatArray) -> FloatArray:
        return _sums_by(cell, values, 2 * CELLS)

    happened, brier_gap, nll_gap = (
        np.where(rows.labelled, values, 0)
        for values in (rows.happened, rows.brier_gap, rows.nll_gap)
    )
    return _Cells(
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


MOST_STRATA = 10
FEWEST = 20
"""Labelled examples for each stratum, on average."""
NOT_SURE = 0.25
"""The imagined example is never surer than 1 - NOT_SURE: no errors among few examples do not
prove that there are none."""
SCORES = ("brier", "nll")


class _Strata(NamedTuple):
    """Labelled examples by stratum, ``(strata,)`` each."""

    stratum: IntArray  # (2 * CELLS,) stratum of each cell
    size: FloatArray  # number of labelled examples, effectively
    claimed: FloatArray  # their mean probability of the event
    share: FloatArray  # share of them with the event
    score_gap: FloatArray  # (2, strata) mean of score minus expected score, by SCORES
    score_scatter: FloatArray  # (2, strata) its variance

    def adjusted(
        self, probs: FloatArray, cells: IntArray, share: FloatArray | None = None
    ) -> FloatArray:
        """Return the probabilities of some cells with the means of their strata, ``(..., n)``."""
        share = self.share if share is None else share
        tiny = np.finfo(np.float64).tiny
        down = np.minimum(share / np.maximum(self.claimed, tiny), 1)
        up = np.minimum((1 - share) / np.maximum(1 - self.claimed, tiny), 1)
        at = self.stratum[cells]
        return np.asarray(1 - (1 - probs * down[..., at]) * up[..., at])

    def counts(self) -> tuple[FloatArray, FloatArray]:
        """Return examples with and without the event, and the imagined one: a beta distribution."""
        imagined = np.clip(self.claimed, NOT_SURE, 1 - NOT_SURE)
        return self.size * self.share + imagined, self.size * (1 - self.share) + 1 - imagined

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draw shares that agree with the examples, ``(count, strata)``."""
        return rng.beta(*self.counts(), (count, self.size.size))

    def variance(self) -> FloatArray:
        """Return the variances of the shares, ``(strata,)``."""
        events, others = self.counts()
        total = events + others
        return np.asarray(events * others / (total**2 * (total + 1)))

    def gap(self) -> tuple[float, float]:
        """Root mean squared gap of share and claim without its noise, and the p-value of none."""
        # the larger of both: of a sure claim there is next to none
        outcome = np.maximum(self.claimed * (1 - self.claimed), self.share * (1 - self.share))
        variance = outcome / np.maximum(self.size, 1)
        squared, weight = (self.share - self.claimed) ** 2, self.size / self.size.sum()
        statistic = float((squared / np.maximum(variance, 1e-12)).sum())
        p_value = float(chdtrc(self.size.size, statistic))
        return math.sqrt(max(weight @ (squared - variance), 0)), p_value


def _make_strata(cells: _Cells, *, two_classes: bool) -> IntArray:
    """Return the stratum of each cell, from labelled examples.

    Strata have equal parts of a measure that is half the examples and half their variance, so that
    thousands of sure answers are one stratum, and doubtful ones several. Those of two classes end
    at one half: right answers are events above and others below, whose shares differ.
    """
    count = int(np.clip(cells.size // FEWEST, 1, MOST_STRATA))
    weight, claimed = (x.reshape(2, CELLS).sum(0) for x in (cells.weight, cells.claimed))
    mean = claimed / np.maximum(weight, 1e-300)
    variance = weight * mean * (1 - mean)
    measure = weight / weight.sum() + variance / max(variance.sum(), 1e-300)
    if not two_classes:
        return np.tile(_equal_parts(measure, count), 2)
    low, high = np.split(measure, 2)
    below = round(count * low.sum() / measure.sum())
    first, second = (_equal_parts(x, max(k, 1)) for x, k in ((low, below), (high, count - below)))
    return np.tile(np.concatenate([first, first.max() + 1 + second]), 2)


def _equal_parts(measure: FloatArray, count: int) -> IntArray:
    """Cut places into at most ``count`` ranges of about equal measure; return that of each place.

    >>> _equal_parts(np.array([1.0, 1.0, 0.0, 2.0]), 2)
    array([0, 0, 1, 1])
    """
    if not measure.any():
        return np.zeros(measure.size, np.int64)
    middle = (np.cumsum(measure) - measure / 2) / measure.sum()
    index = np.minimum(middle * count, count - 1).astype(np.int64)
    present = np.unique(index[measure > 0])  # others, between heavy places, are left out
    return np.asarray(np.minimum(np.searchsorted(present, index), present.size - 1), np.int64)


def _fill_strata(stratum: IntArray, cells: _Cells) -> _Strata:
    """Sums of labelled examples by stratum; without any, all shares are equally likely."""
    count = int(stratum.max()) + 1

    def sums(values: FloatArray) -> FloatArray:
        return _sums_by(stratum, values, count)

    weight, square = sums(cells.weight), sums(cells.square)
    each = np.maximum(weight, 1e-300)
    gaps = np.stack([sums(cells.brier_gap), sums(cells.nll_gap)]) / each
    scatter = np.stack([sums(cells.brier_scatter), sums(cells.nll_scatter)]) / each - gaps**2
    return _Strata(
        stratum,
        np.array([_effective(*pair) for pair in zip(weight, square, strict=True)]),
        np.where(weight > 0, sums(cells.claimed) / each, 0.5),
        np.where(weight > 0, sums(cells.happened) / each, 0.5),
        gaps,
        np.maximum(scatter, 0),
    )
