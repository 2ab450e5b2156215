r"""A test of calibration that may be looked at after every label: an e-process over windows.

The *e-value* is the amount that bets against the model have won. It starts at 1 and, while the
model is calibrated, ever reaches :math:`1/\alpha` with probability :math:`\alpha` at most (Ville's
inequality). For each example with confidence c and outcome y, a bet with tilt :math:`\lambda`
multiplies its stake by

.. math:: f = e^{\lambda y} / (1 - q + q e^\lambda),

where q is c plus (for :math:`\lambda > 0`) or minus the tolerance. The mean of f is at most 1 if y
happens with a probability within the tolerance of c, given everything before it. The stake is
spread in advance over all tilts, all ranges of neighbouring bins, and all windows k in which a
drift may begin, with weights 1 / (k (k + 1)). The bets of one tilt and range on all beginnings
together follow the Shiryaev-Roberts recursion
:math:`S_t = (S_{t-1} + w_t) \prod_{i \in t} f_i`, so that sums per window, bin and tilt suffice.
See Ramdas et al. (2023), "Game-theoretic statistics and safe anytime-valid inference".
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from calibrant._core.checks import FloatArray, IntArray

TILTS: FloatArray = np.outer([1, -1], 0.05 * 2.0 ** np.arange(7)).reshape(-1)
"""Changes of the log-odds that are bet on: 0.05 to 3.2 in either direction, by factors of 2.

A shift of the odds by less than half the smallest tilt beyond the tolerance is never detected:
0.6 points of accuracy at a confidence of 50 %, 0.2 points at 90 %."""


class _BinRanges(NamedTuple):
    """Ranges of neighbouring bins; each field is ``(ranges,)``."""

    first: IntArray
    end: IntArray  # the bin after the last
    log_stake: FloatArray  # for each tilt


@cache
def _bin_ranges(bins: int) -> _BinRanges:
    """All ranges of neighbouring bins; the one of all bins has half of the stake."""
    first, last = np.triu_indices(bins)
    whole = last - first == bins - 1
    shares = np.where(whole, 0.5, 0.5 / max(first.size - 1, 1)) if bins > 1 else np.ones(1)
    return _BinRanges(first, last + 1, np.log(shares / TILTS.size))


def _range_sums(values: FloatArray) -> FloatArray:
    """Sums of values ``(tilts, bins)`` over every range of bins, ``(tilts, ranges)``."""
    ranges = _bin_ranges(values.shape[1])
    sums = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)
    return np.asarray(sums[:, ranges.end] - sums[:, ranges.first])


class EProcess(NamedTuple):
    """The bets on drifts that began in windows up to a position."""

    bins: int
    position: int
    log_bets: FloatArray  # (tilts, ranges)

    @classmethod
    def start(cls, bins: int) -> EProcess:
        """Return the state before the first window."""
        return cls(bins, 0, np.full((TILTS.size, _bin_ranges(bins).first.size), -np.inf))

    def after(self, log_factors: FloatArray, position: int) -> EProcess:
        """Add the bets on drifts up to ``position``, and multiply all by ``(tilts, bins)``."""
        added = math.log((position - self.position) / ((self.position + 1) * (position + 1)))
        log_bets = np.logaddexp(self.log_bets, added) + _range_sums(log_factors)
        return EProcess(self.bins, position, log_bets)

    def log_shares(self) -> FloatArray:
        """Logarithm of each bet's part of the e-value, ``(tilts, ranges)``."""
        return self.log_bets + _bin_ranges(self.bins).log_stake

    def log_e_value(self) -> float:
        """Logarithm of the e-value, including the stakes on drifts yet to begin."""
        return float(np.logaddexp(logsumexp(self.log_shares()), -math.log(self.position + 1)))

    @property
    def e_value(self) -> float:
        """The e-value, bounded so that JSON can hold it."""
        return math.exp(min(self.log_e_value(), 690.0))
