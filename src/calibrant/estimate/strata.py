r"""Accuracy of the claimed probabilities, stratum by stratum, as labelled examples show it.

Within a stratum of neighbouring probabilities with mean :math:`q` on the labelled examples, of
which a share :math:`a` had the event, a probability :math:`p` becomes

.. math:: p' = p\, a / q \quad (a \le q), \qquad 1 - (1 - p) \frac{1 - a}{1 - q} \quad (a > q),

which stays in [0, 1] and has the mean :math:`a`. The share itself is uncertain; it is drawn from a
beta distribution, the posterior after one imagined example that agrees with the claim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import chdtrc

from calibrant._core.checks import FloatArray, IntArray
from calibrant.estimate.cells import CELLS, Cells, _effective, _sums_by

MOST_STRATA = 10
FEWEST = 20
"""Labelled examples for each stratum, on average."""
NOT_SURE = 0.25
"""The imagined example is never surer than 1 - NOT_SURE: no errors among few examples do not
prove that there are none."""
SCORES = ("brier", "nll")


class Strata(NamedTuple):
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


def _make_strata(cells: Cells, *, two_classes: bool) -> IntArray:
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


def _fill_strata(stratum: IntArray, cells: Cells) -> Strata:
    """Sums of labelled examples by stratum; without any, all shares are equally likely."""
    count = int(stratum.max()) + 1

    def sums(values: FloatArray) -> FloatArray:
        return _sums_by(stratum, values, count)

    weight, square = sums(cells.weight), sums(cells.square)
    each = np.maximum(weight, 1e-300)
    gaps = np.stack([sums(cells.brier_gap), sums(cells.nll_gap)]) / each
    scatter = np.stack([sums(cells.brier_scatter), sums(cells.nll_scatter)]) / each - gaps**2
    return Strata(
        stratum,
        np.array([_effective(*pair) for pair in zip(weight, square, strict=True)]),
        np.where(weight > 0, sums(cells.claimed) / each, 0.5),
        np.where(weight > 0, sums(cells.happened) / each, 0.5),
        gaps,
        np.maximum(scatter, 0),
    )
