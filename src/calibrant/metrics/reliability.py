"""Accuracy per bin of confidence: the numbers of a reliability diagram."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrant._core.binning import Bins
from calibrant._core.checks import FloatArray, check_level
from calibrant._core.showing import as_axes, as_html, one_line
from calibrant._core.tables import columns_frame
from calibrant.metrics.binomial import clopper_pearson

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


class Estimate(NamedTuple):
    """A value with an interval; NaN where undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __repr__(self) -> str:
        ends = {"low": self.low, "high": self.high}
        shown = [f"{k}={v:.4g}" for k, v in ends.items() if not math.isnan(v)]
        return one_line(self, f"{self.value:.4g}", *shown)

    def excludes(self, value: float) -> bool:
        """Return True if the value is outside the interval; False without one."""
        return self.low > value or self.high < value


class Reliability(NamedTuple):
    """Accuracy per bin with an interval; empty bins are NaN. The arrays are ``(bins,)``."""

    edges: FloatArray  # (bins + 1,)
    confidence: FloatArray
    accuracy: FloatArray
    low: FloatArray
    high: FloatArray
    share: FloatArray
    level: float = math.nan
    """Coverage of the intervals; NaN without."""
    ece: Estimate = Estimate(math.nan)
    """The error that the bins add up to; with an interval if it is that of an evaluation."""
    probability: str = ""
    """Name of the confidence where it is that of one event, such as P(y = 1), else empty."""

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the bins as by :func:`calibrant.show.figures.reliability_diagram`."""
        return as_axes(self, ax, **options)

    def __repr__(self) -> str:
        used = int((self.share > 0).sum())
        return one_line(self, f"{len(self.share)} bins, {used} with examples")

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each bin: its ends and the values. Needs pandas."""
        ends = {"low_edge": self.edges[:-1], "high_edge": self.edges[1:]}
        values = {name: getattr(self, name) for name in self._fields[1:6]}
        return columns_frame({**ends, **values})


def reliability_of(
    filled: Bins,
    *,
    level: float | None = 0.9,
    probability: str = "",
    ece: Estimate | None = None,
) -> Reliability:
    """Reliability from sums per bin, such as those of an Evaluation; ``level`` None: no intervals.

    ``ece`` has the interval of the error, where one is known.
    """
    low, high = _bin_intervals(filled, level)
    empty = filled.weight == 0
    low[empty] = high[empty] = np.nan
    ece = Estimate(float(np.abs(filled.gap).sum())) if ece is None else ece
    share = filled.weight / filled.total
    curve = (filled.edges, filled.confidence, filled.accuracy, low, high, share)
    return Reliability(*curve, level or math.nan, ece, probability)


def _bin_intervals(filled: Bins, level: float | None) -> tuple[FloatArray, FloatArray]:
    """Intervals of the accuracy per bin."""
    if not level:
        return np.full(filled.weight.size, np.nan), np.full(filled.weight.size, np.nan)
    check_level(level)
    with np.errstate(invalid="ignore"):
        return clopper_pearson(
            filled.accuracy * filled.effective, filled.effective, (1 - level) / 2
        )
