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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from calibrant._core.binning import Bins, bin_index, uniform_edges
from calibrant._core.checks import FloatArray, IntArray, check_whole
from calibrant.metrics.intervals import clopper_pearson
from calibrant.metrics.reductions import Pairs

TILTS: FloatArray = np.outer([1, -1], 0.05 * 2.0 ** np.arange(7)).reshape(-1)
"""Changes of the log-odds that are bet on: 0.05 to 3.2 in either direction, by factors of 2.

A shift of the odds by less than half the smallest tilt beyond the tolerance is never detected:
0.6 points of accuracy at a confidence of 50 %, 0.2 points at 90 %."""
SUMS = ("count", "right", "claimed", "cumulant")


class BinRanges(NamedTuple):
    """Ranges of neighbouring bins; each field is ``(ranges,)``."""

    first: IntArray
    end: IntArray  # the bin after the last
    log_stake: FloatArray  # for each tilt


@cache
def bin_ranges(bins: int) -> BinRanges:
    """All ranges of neighbouring bins; the one of all bins has half of the stake."""
    first, last = np.triu_indices(bins)
    whole = last - first == bins - 1
    shares = np.where(whole, 0.5, 0.5 / max(first.size - 1, 1)) if bins > 1 else np.ones(1)
    return BinRanges(first, last + 1, np.log(shares / TILTS.size))


def range_sums(values: FloatArray) -> FloatArray:
    """Sums of values ``(tilts, bins)`` over every range of bins, ``(tilts, ranges)``."""
    ranges = bin_ranges(values.shape[1])
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
        return cls(bins, 0, np.full((TILTS.size, bin_ranges(bins).first.size), -np.inf))

    def after(self, log_factors: FloatArray, position: int) -> EProcess:
        """Add the bets on drifts up to ``position``, and multiply all by ``(tilts, bins)``."""
        added = math.log((position - self.position) / ((self.position + 1) * (position + 1)))
        log_bets = np.logaddexp(self.log_bets, added) + range_sums(log_factors)
        return EProcess(self.bins, position, log_bets)

    def log_shares(self) -> FloatArray:
        """Logarithm of each bet's part of the e-value, ``(tilts, ranges)``."""
        return self.log_bets + bin_ranges(self.bins).log_stake

    def log_e_value(self) -> float:
        """Logarithm of the e-value, including the stakes on drifts yet to begin."""
        return float(np.logaddexp(logsumexp(self.log_shares()), -math.log(self.position + 1)))

    @property
    def e_value(self) -> float:
        """The e-value, bounded so that JSON can hold it."""
        return math.exp(min(self.log_e_value(), 690.0))


@dataclass(eq=False)
class Window:
    """Sums over the labelled examples of one window; sums of two windows add."""

    number: int
    name: str
    count: IntArray  # (bins,)
    right: IntArray  # (bins,)
    claimed: FloatArray  # (bins,) sums of confidences
    cumulant: FloatArray  # (tilts, bins) sums of the logarithms of the bets' denominators

    @classmethod
    def empty(cls, bins: int, number: int = 0, name: str = "") -> Window:
        """A window without examples."""
        count, right = np.zeros((2, bins), np.int64)
        return cls(number, name, count, right, np.zeros(bins), np.zeros((TILTS.size, bins)))

    def __add__(self, other: Window) -> Window:
        sums = (getattr(self, key) + getattr(other, key) for key in SUMS)
        return Window(self.number, self.name, *sums)

    @property
    def n(self) -> int:
        """Number of labelled examples."""
        return int(self.count.sum())

    def figures(self) -> dict[str, float]:
        """Accuracy, mean confidence, their difference and the ECE; NaN without examples."""
        n = self.n or np.nan
        accuracy, confidence = float(self.right.sum() / n), float(self.claimed.sum() / n)
        ece = float(np.abs(self.claimed - self.right).sum() / n)
        gap = confidence - accuracy
        return {"accuracy": accuracy, "confidence": confidence, "gap": gap, "ece": ece}

    def log_factors(self) -> FloatArray:
        """Logarithm of the factor of each bet, ``(tilts, bins)``."""
        return np.asarray(TILTS[:, None] * self.right - self.cumulant)

    def state(self) -> dict[str, Any]:
        """The window for JSON; bins without examples are left out."""
        filled = np.flatnonzero(self.count)
        sums = {key: getattr(self, key)[..., filled].tolist() for key in SUMS}
        return {"number": self.number, "name": self.name, "bins": filled.tolist(), **sums}

    @classmethod
    def from_state(cls, state: dict[str, Any], bins: int) -> Window:
        """Build the window that :meth:`state` describes."""
        window = cls.empty(bins, int(state["number"]), str(state["name"]))
        for key in SUMS:
            getattr(window, key)[..., state["bins"]] = state[key]
        window._check()
        return window

    def _check(self) -> None:
        """Raise for sums that no examples have."""
        counted = (self.right >= 0) & (self.right <= self.count)
        claimed = (self.claimed >= 0) & (self.claimed <= self.count * (1 + 1e-9))
        if not (counted & claimed).all() or not np.isfinite(self.cumulant).all():
            raise ValueError(f"no examples have the sums of window {self.name!r:.60}")
        if abs(self.number) > 2**53:
            raise ValueError(f"windows are numbered up to 2**53, got {self.number!r:.60}")


@dataclass(frozen=True, eq=False)
class Tolerated:
    """Differences of accuracy and confidence that are not called drift.

    ``gaps`` ``(2, bins)`` are the smallest and the largest difference in each bin of a reference,
    zeros without one; the tolerance is added on both sides.
    """

    gaps: FloatArray
    tolerance: float

    @property
    def has_reference(self) -> bool:
        """True if the gaps are those of a reference."""
        return bool(self.gaps.any())

    def accuracy(self, confidence: float | FloatArray, index: Any) -> FloatArray:
        """Smallest and largest accuracy at confidences in the bins ``index``, ``(2, ...)``."""
        limits = self.gaps + np.array([[-self.tolerance], [self.tolerance]])
        return np.asarray(np.clip(confidence + limits[:, index], 0, 1))

    def window(self, pairs: Pairs, number: int = 0, name: str = "") -> Window:
        """Sums of pairs per bin."""
        (confidence, outcome), bins = pairs, self.gaps.shape[1]
        index = bin_index(confidence, uniform_edges(bins))
        low, high = self.accuracy(confidence, index)
        costs = (np.log1p((high if tilt > 0 else low) * np.expm1(tilt)) for tilt in TILTS)
        count = np.bincount(index, minlength=bins)
        sums: list[Any] = [np.bincount(index, x, bins) for x in chain((outcome, confidence), costs)]
        right, claimed, *cumulant = sums
        return Window(number, name, count, right.astype(np.int64), claimed, np.stack(cumulant))


def reference_gaps(reference: Bins, level: float) -> FloatArray:
    """Limits of accuracy minus confidence in each bin, ``(2, bins)``, valid for all bins at once.

    Clopper-Pearson limits at ``level`` divided by the two sides of all bins with examples
    (Bonferroni). There is no upper limit (1) where all were right, no lower limit (-1) where none
    was, and neither in a bin without examples: its gap may differ from that of its neighbours.
    """
    n, right, total = reference.count, reference.observed, reference.claimed
    tail = level / (2 * np.count_nonzero(n))
    low, high = clopper_pearson(right, n.astype(float), tail)
    mean = total / np.maximum(n, 1)
    return np.stack([np.where(right > 0, low - mean, -1.0), np.where(right < n, high - mean, 1.0)])


class Windows:
    """The last ``keep`` windows of a stream, and the e-process over these and all earlier ones."""

    def __init__(self, bins: int, keep: int, first: int | None) -> None:
        self.keep, self.first = keep, first
        self.kept: dict[int, Window] = {}
        self.summed, self.summed_n = EProcess.start(bins), 0  # windows that are no longer kept
        # number of the last window and the state before it, which its examples do not change
        self._before: tuple[int, EProcess] | None = None

    @property
    def n(self) -> int:
        """Number of labelled examples."""
        return self.summed_n + sum(window.n for window in self.kept.values())

    def next_number(self) -> int:
        """Return the number of the window after the last."""
        first = 1 if self.first is None else self.first
        return max(self.kept, default=first - 1) + 1

    def position(self, number: int) -> int:
        """Place of a window in the stream, from 1."""
        assert self.first is not None
        return number - self.first + 1

    def is_open(self, number: int) -> bool:
        """Return True unless a window lies before the stream or among those summed up."""
        return self.first is None or self.position(number) > self.summed.position

    def put(self, window: Window) -> None:
        """Add to the window of a number, and sum up the oldest windows beyond those to keep."""
        number = window.number
        if self.first is None:
            self.first = number
        if self._before is not None and number < self._before[0]:
            self._before = None  # an earlier window changes
        self.kept[number] = self.kept[number] + window if number in self.kept else window
        while len(self.kept) > self.keep:
            oldest = self.kept.pop(min(self.kept))
            self.summed_n += oldest.n
            self.summed = self._after(self.summed, oldest)
            if self._before is not None and self._before[0] <= oldest.number:
                self._before = None

    def e_process(self) -> EProcess:
        """State after all windows; the state before the last one is remembered."""
        if not self.kept:
            return self.summed
        last = max(self.kept)
        if self._before is None or self._before[0] != last:
            start, state = self._before or (min(self.kept), self.summed)
            for number in sorted(self.kept)[:-1]:
                if number >= start:
                    state = self._after(state, self.kept[number])
            self._before = (last, state)
        return self._after(self._before[1], self.kept[last])

    def history(self) -> Iterator[tuple[Window, EProcess]]:
        """Yield each kept window with the state after it."""
        state = self.summed
        for number in sorted(self.kept):
            state = self._after(state, self.kept[number])
            yield self.kept[number], state

    def _after(self, state: EProcess, window: Window) -> EProcess:
        return state.after(window.log_factors(), self.position(window.number))

    def state(self) -> dict[str, Any]:
        """All windows for JSON."""
        position = self.summed.position
        logs = self.summed.log_bets.tolist() if position else None
        return {
            "windows": [self.kept[number].state() for number in sorted(self.kept)],
            "folded": {"n": self.summed_n, "position": position, "logs": logs},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Add the windows that :meth:`state` describes."""
        bins, summed = self.summed.bins, state["folded"]
        for name in ("n", "position"):
            check_whole(name, summed[name], least=0)
        if summed["position"]:
            logs = np.array(summed["logs"], np.float64).reshape(self.summed.log_bets.shape)
            begun = self.first is not None and state["windows"]
            if not (begun and np.isfinite(logs).all()):
                raise ValueError("windows were summed up, but not all of their bets are known")
            self.summed, self.summed_n = EProcess(bins, summed["position"], logs), summed["n"]
        for values in state["windows"]:
            window = Window.from_state(values, bins)
            if self.first is not None and self.position(window.number) <= self.summed.position:
                raise ValueError(f"window {window.number} is before the first that is kept")
            self.put(window)
