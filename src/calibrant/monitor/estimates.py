"""Accuracies of windows that were estimated without labels."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, NamedTuple, Protocol

from calibrant.data.dataset import Split

WITHDRAWN = "withdrawn"


class WindowEstimate(NamedTuple):
    """Estimated accuracy of a window; ends are NaN if nothing is promised."""

    value: float
    low: float
    high: float
    promise: str  # a status of PerformanceEstimate, such as "holds"

    @classmethod
    def from_state(cls, state: list[Any]) -> WindowEstimate:
        """Make the estimate of a saved state, in which None stands for NaN."""
        *shares, promise = state
        value, low, high = (math.nan if x is None else float(x) for x in shares)
        if not 0 <= value <= 1 or not isinstance(promise, str):
            raise ValueError(f"an estimate is a share with its promise, got {state!r:.200}")
        return cls(value, low, high, promise)

    def state(self) -> list[Any]:
        """Return the estimate for JSON."""
        return [None if isinstance(x, float) and math.isnan(x) else x for x in self]


class Estimator(Protocol):
    """Estimates the accuracy of a window without labels."""

    def window_estimate(self, split: Split) -> WindowEstimate:
        """Return the estimate for the examples of a split."""
        ...


class WindowEstimates:
    """Estimates by the number of their window."""

    def __init__(self) -> None:
        self.by_window: dict[int, WindowEstimate] = {}

    def keep(
        self, number: int, estimate: WindowEstimate, windows: Container[int], alarm: bool
    ) -> None:
        """Add an estimate, without a promise after an alarm; forget those of lost windows."""
        if alarm:
            estimate = WindowEstimate(estimate.value, math.nan, math.nan, WITHDRAWN)
        kept = {**self.by_window, number: estimate}
        self.by_window = {key: value for key, value in kept.items() if key in windows}

    def figures(self, number: int) -> dict[str, Any]:
        """Return the entries of a window in a report; none if nothing was ever estimated."""
        if not self.by_window:
            return {}
        missing = WindowEstimate(math.nan, math.nan, math.nan, "")
        value, low, high, promise = self.by_window.get(number, missing)
        ends = {"estimate_low": low, "estimate_high": high}
        return {"estimate": value, **ends, "promise": promise}

    def state(self) -> dict[str, list[Any]]:
        """Return all estimates for JSON."""
        return {str(number): estimate.state() for number, estimate in self.by_window.items()}

    def restore(self, state: dict[str, list[Any]]) -> None:
        """Take over the estimates that :meth:`state` describes."""
        self.by_window = {int(k): WindowEstimate.from_state(v) for k, v in state.items()}
