"""Accuracy per bin of confidence: the numbers of a reliability diagram."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrant._core.binning import Bins
from calibrant._core.checks import FloatArray, check_level
from calibrant._core.showing import as_axes, as_html, columns_frame, one_line
from calibrant.metrics.intervals import Estimate as Estimate, clopper_pearson

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


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
    low = high = np.full(filled.weight.size, np.nan)
    if level:
        check_level(level)
        size, held = filled.effective, filled.weight > 0
        with np.errstate(invalid="ignore"):  # of empty bins
            ends = clopper_pearson(filled.accuracy * size, size, (1 - level) / 2)
        low, high = (np.where(held, end, np.nan) for end in ends)
    ece = Estimate(float(np.abs(filled.gap).sum())) if ece is None else ece
    share = filled.weight / filled.total
    curve = (filled.edges, filled.confidence, filled.accuracy, low, high, share)
    return Reliability(*curve, level or math.nan, ece, probability)
