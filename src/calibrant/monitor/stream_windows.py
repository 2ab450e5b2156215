"""Windows of a stream: the sums of each, their names, and their e-process and estimates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import chain, count
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from calibrant._core.binning import bin_index, uniform_edges
from calibrant._core.checks import FloatArray, IntArray, check_whole
from calibrant._core.showing import plain
from calibrant.data.dataset import Split
from calibrant.metrics.reductions import Pairs
from calibrant.monitor.e_process import TILTS, EProcess

WindowId: TypeAlias = int | date
SUMS = ("count", "right", "claimed", "cumulant")


class WindowEstimate(NamedTuple):
    """Estimated accuracy of a window; ends are NaN if nothing is guaranteed."""

    value: float
    low: float
    high: float
    promise: str  # a status of PerformanceEstimate, such as "holds"

    def figures(self) -> dict[str, Any]:
        """Return the entries of the window in a report."""
        value, low, high, promise = self
        ends = {"estimate_low": low, "estimate_high": high}
        return {"estimate": value, **ends, "promise": promise}

    @classmethod
    def from_state(cls, state: list[Any]) -> WindowEstimate:
        """Make the estimate of a saved state, in which None stands for NaN."""
        *shares, promise = state
        value, low, high = (math.nan if x is None else float(x) for x in shares)
        if not 0 <= value <= 1 or not isinstance(promise, str):
            raise ValueError(f"an estimate is a share with its guarantee, got {state!r:.200}")
        return cls(value, low, high, promise)

    def state(self) -> list[Any]:
        """Return the estimate for JSON."""
        return [plain(x) for x in self]


NOT_ESTIMATED = WindowEstimate(math.nan, math.nan, math.nan, "")
"""Stands for the estimate of a window that has none, where others have."""


@dataclass(eq=False)
class Window:
    """Sums over the labelled examples of one window, and its estimate; sums of two windows add."""

    number: int
    name: str
    count: IntArray  # (bins,)
    right: IntArray  # (bins,)
    claimed: FloatArray  # (bins,) sums of confidences
    cumulant: FloatArray  # (tilts, bins) sums of the logarithms of the bets' denominators
    answers: FloatArray  # (2,) sums over predicted classes, of right ones and of their confidence
    estimate: WindowEstimate | None = None

    @classmethod
    def empty(cls, bins: int, number: int = 0, name: str = "") -> Window:
        """A window without examples."""
        count, right = np.zeros((2, bins), np.int64)
        cumulant = np.zeros((TILTS.size, bins))
        return cls(number, name, count, right, np.zeros(bins), cumulant, np.zeros(2))

    def __add__(self, other: Window) -> Window:
        sums: Any = {key: getattr(self, key) + getattr(other, key) for key in (*SUMS, "answers")}
        return Window(self.number, self.name, **sums, estimate=other.estimate or self.estimate)

    @property
    def n(self) -> int:
        """Number of labelled examples."""
        return int(self.count.sum())

    def figures(self) -> dict[str, float]:
        """Accuracy, mean confidence, their difference and the ECE; NaN without examples."""
        n = self.n or np.nan
        accuracy, confidence = (self.answers / n).tolist()
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
        estimate = None if self.estimate is None else self.estimate.state()
        about = {"number": self.number, "name": self.name, "estimate": estimate}
        about["answers"] = self.answers.tolist()
        return {**about, "bins": filled.tolist(), **sums}

    @classmethod
    def from_state(cls, state: dict[str, Any], bins: int) -> Window:
        """Build the window that :meth:`state` describes."""
        window = cls.empty(bins, int(state["number"]), str(state["name"]))
        for key in SUMS:
            getattr(window, key)[..., state["bins"]] = state[key]
        window.answers[:] = state["answers"]
        if state["estimate"] is not None:
            window.estimate = WindowEstimate.from_state(state["estimate"])
        n = window.count
        counted = (window.right >= 0) & (window.right <= n)
        claimed = (window.claimed >= 0) & (window.claimed <= n * (1 + 1e-9))
        answers = (window.answers >= 0) & (window.answers <= window.n * (1 + 1e-9))
        known = (counted & claimed).all() and answers.all()
        if not known or not np.isfinite(window.cumulant).all():
            raise ValueError(f"no examples have the sums of window {window.name!r:.60}")
        if abs(window.number) > 2**53:
            raise ValueError(f"windows are numbered up to 2**53, got {window.number!r:.60}")
        return window


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

    def window(
        self, pairs: Pairs, number: int = 0, name: str = "", *, of_class_1: bool = False
    ) -> Window:
        """Sums of pairs per bin: of confidence and being right, or of P(y = 1) and y."""
        (confidence, outcome), bins = pairs, self.gaps.shape[1]
        index = bin_index(confidence, uniform_edges(bins))
        low, high = self.accuracy(confidence, index)
        costs = (np.log1p((high if tilt > 0 else low) * np.expm1(tilt)) for tilt in TILTS)
        count = np.bincount(index, minlength=bins)
        sums: list[Any] = [np.bincount(index, x, bins) for x in chain((outcome, confidence), costs)]
        right, claimed, *cumulant = sums
        answers = outcome.sum(), confidence.sum()
        if of_class_1:
            is_1 = confidence > 0.5
            answers = np.sum(is_1 == outcome), np.maximum(confidence, 1 - confidence).sum()
        per_bin = count, right.astype(np.int64), claimed, np.stack(cumulant)
        return Window(number, name, *per_bin, np.array(answers, np.float64))


def _window_number(window: WindowId) -> int:
    """Return the number of a window, the ordinal of a day."""
    if isinstance(window, date):
        return window.toordinal()
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
        raise TypeError(f"window must be a whole number or a date, got {window!r}")
    return int(window)


class Windows:
    """The last ``keep`` windows of a stream, and the e-process over these and all earlier ones."""

    def __init__(self, bins: int, keep: int, first: WindowId | None) -> None:
        self.keep, self.first = keep, None if first is None else _window_number(first)
        self.dated = isinstance(first, date)  # numbers are ordinals of days
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

    def name(self, number: int) -> str:
        """Return the name of a window that was not named."""
        return date.fromordinal(number).isoformat() if self.dated else str(number)

    def unused_name(self, name: str) -> str:
        """Return the name of a file, with a number if a window has it already."""
        taken = {window.name for window in self.kept.values()}
        names = chain([name], (f"{name} ({k})" for k in count(2)))
        return next(free for free in names if free not in taken)

    def check_open(self, window: WindowId | None) -> None:
        """Raise if a window lies before the stream, or among those that were summed up."""
        if window is None:
            return
        number = _window_number(window)
        if self.first is not None and number < self.first:
            first = self.name(self.first)
            raise ValueError(f"window {window} is before the first, {first}: set first= to it")
        if not self.is_open(number):
            raise ValueError(f"window {window} was summed up, all but {self.keep} were: raise keep")

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


class Estimator(Protocol):
    """Estimates the accuracy of a window without labels."""

    def window_estimate(self, split: Split) -> WindowEstimate:
        """Return the estimate for the examples of a split."""
        ...
