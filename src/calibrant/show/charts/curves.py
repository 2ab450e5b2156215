"""Charts of curves and bins: reliability diagrams, histograms and lines with bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrant.show.charts.axes import (
    PAINTS,
    Axes,
    _as_array,
    _finite,
    _first_names,
    _legend_places,
    _padded_range,
    path,
    spread,
)
from calibrant.show.html import Html, _rendered
from calibrant.show.style import Format, _short_percent

PALE = 0.5
"""Width of an interval above which a bin is pale."""
WIDEST = 0.2
"""Width of the bar of a bin that is wider, at its mean confidence: bins are joined where examples
are few, and a bar over half of the axis would speak for confidences that no example has."""


@dataclass(frozen=True)
class _Bin:
    """A bin of a reliability diagram that has examples."""

    left: float
    right: float
    confidence: float
    accuracy: float
    low: float
    high: float
    share: float

    def describe(self, claim: str, event: str) -> str:
        """Return the numbers of the bin, for its hover."""
        ends = (
            f" ({_short_percent(self.low)} to {_short_percent(self.high)})" if self.whiskers else ""
        )
        return (
            f"{claim} {_short_percent(self.left)} to {_short_percent(self.right)}: mean "
            f"{_short_percent(self.confidence)}, {event} {_short_percent(self.accuracy)}{ends}; "
            f"{_short_percent(self.share)} of the examples"
        )

    @property
    def bar(self) -> tuple[float, float]:
        """Where the bar begins and ends: all over the bin, or around the mean of a wide one."""
        if self.right - self.left <= WIDEST + 1e-9:
            return self.left, self.right
        start = min(max(self.confidence - WIDEST / 2, self.left), self.right - WIDEST)
        return start, start + WIDEST

    @property
    def whiskers(self) -> bool:
        """True if there is an interval."""
        return _finite(self.low, self.high)

    @property
    def unsure(self) -> bool:
        """True if too few examples are known to say much: such bins are pale."""
        return self.whiskers and self.high - self.low > PALE


def reliability_chart(
    edges: ArrayLike,
    confidence: ArrayLike,
    accuracy: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    share: ArrayLike,
    *,
    claim: str = "confidence",
    event: str = "accuracy",
    note: str = "",
) -> Html:
    """Return a reliability diagram: accuracy per bin, its interval, and the gap to the confidence.

    Parameters
    ----------
    edges : (bins + 1,)
    confidence, accuracy, low, high, share : (bins,)
        As in :class:`calibrant.metrics.curves.Reliability`; a bin without examples is NaN.
    claim, event : str
        Names of the axes.
    note : str
        A line in the corner, such as the ECE with its interval.

    Examples
    --------
    >>> chart = reliability_chart([0, 0.5, 1], [0.4, 0.9], [0.5, 0.7], [0.3, 0.6], [0.7, 0.8],
    ...                           [0.2, 0.8])
    >>> chart.startswith("<svg"), "accuracy 70 % (60 % to 80 %)" in chart
    (True, True)
    """
    columns = (_as_array(v).tolist() for v in (confidence, accuracy, low, high, share))
    rows = zip(pairwise(_as_array(edges).tolist()), zip(*columns, strict=True), strict=True)
    bins = [_Bin(*ends, *values) for ends, values in rows if _finite(*values[:2])]
    places, height = _legend_places([event, f"gap to {claim}", "ideal"], (46, 440, 396))
    return _rendered(
        "charts/reliability.html",
        axes=Axes.within((46, 86, 376, 386), (0, 1), (0, 1)),
        bins=bins,
        peak=max((b.share for b in bins), default=0),
        claim=claim,
        event=event,
        note=note,
        places=places,
        height=height,
        percent=_short_percent,
        label=f"Reliability diagram: {event} against {claim}. {note}".strip(),
    )


def histogram_chart(
    edges: ArrayLike,
    shares: Mapping[str, ArrayLike],
    *,
    x_label: str = "confidence",
    y_label: str = "share of the examples",
) -> Html:
    """Return shares per bin as outlines over each other, the first blue and the second orange.

    Examples
    --------
    >>> chart = histogram_chart([0, 0.5, 1], {"right": [0.1, 0.7], "wrong": [0.1, 0.1]})
    >>> chart.count("<rect"), "right, 50 % to 100 %: 70 %" in chart
    (6, True)
    """
    limits, columns = _as_array(edges), {name: _as_array(values) for name, values in shares.items()}
    peak = max((float(np.nanmax(v)) for v in columns.values() if np.isfinite(v).any()), default=1)
    sets = []
    for paint, (name, values) in zip(PAINTS, columns.items(), strict=False):
        bars = zip(limits, limits[1:], values, strict=False)
        sets.append((paint, name, [bar for bar in bars if _finite(bar[2])]))
    places, height = _legend_places(list(columns), (50, 270, 410))
    return _rendered(
        "charts/histogram.html",
        axes=Axes.within((50, 30, 396, 220), (limits[0], limits[-1]), (0, peak or 1)),
        sets=sets,
        x_label=x_label,
        y_label=y_label,
        places=places,
        height=height,
        percent=_short_percent,
        label=f"Histogram: {y_label} against {x_label}, {_first_names(columns)}",
    )


MAX_POINTS = 200
"""Points of a line that are drawn; more cannot be told apart."""
MAX_HOVERS = 25
"""Points of a line that show their numbers."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: ``x``, ``y`` and, for a band, ``low`` and ``high``, each ``(n,)``."""

    name: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    colour: str = ""  # of the palette; by its place among the lines without
    dashed: bool = False


class _Points(NamedTuple):
    """The points of a line that are drawn."""

    name: str
    x: list[float]
    y: list[float]
    ends: list[tuple[float, float, float]]  # (x, low, high) of the band
    colour: str
    dashed: bool

    @classmethod
    def of(cls, line: Line, paint: str) -> _Points:
        """Return few points of a line, its ends among them; those without a value are left out."""
        x, y = _as_array(line.x), _as_array(line.y)
        known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        kept = known[spread(known.size, MAX_POINTS)]
        ends: list[tuple[float, float, float]] = []
        if line.low is not None and line.high is not None:
            columns = (v[kept].tolist() for v in (x, _as_array(line.low), _as_array(line.high)))
            ends = [row for row in zip(*columns, strict=True) if _finite(*row)]
        drawn = x[kept].tolist(), y[kept].tolist()
        return cls(line.name, *drawn, ends, line.colour or paint, line.dashed)

    def heights(self) -> list[float]:
        """Return everything that the vertical axis has to show."""
        return [*self.y, *(end for _, low, high in self.ends for end in (low, high))]

    def band(self, axes: Axes) -> str:
        """Return the outline of the area between the ends."""
        there = [axes.at(x, high) for x, _, high in self.ends]
        back = [axes.at(x, low) for x, low, _ in reversed(self.ends)]
        return path([*there, *back])

    @property
    def few(self) -> bool:
        """True if each point is a dot."""
        return len(self.x) <= MAX_HOVERS and not self.dashed

    def hovers(self) -> list[tuple[float, float]]:
        """Return points that show their numbers."""
        return [(self.x[k], self.y[k]) for k in spread(len(self.x), MAX_HOVERS)]


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_format: Format = _short_percent,
    y_format: Format = _short_percent,
    y_range: tuple[float, float] | None = None,
) -> Html:
    """Return lines with their bands and a legend.

    Examples
    --------
    >>> risk = Line("by confidence", [0.5, 1], [0.02, 0.1])
    >>> chart = line_chart([risk], x_label="coverage", y_label="risk")
    >>> "by confidence: coverage 50 %, risk 2 %" in chart
    True
    """
    drawn = [_Points.of(line, paint) for line, paint in zip(lines, PAINTS, strict=False)]
    across = _padded_range([x for points in drawn for x in points.x])
    up = y_range or _padded_range([0.0, *(v for points in drawn for v in points.heights())])
    names = [points.name for points in drawn]
    places, height = _legend_places(names, (50, 270, 410)) if len(drawn) > 1 else ([], 0)
    return _rendered(
        "charts/lines.html",
        axes=Axes.within((50, 30, 396, 220), across, up),
        lines=drawn,
        x_label=x_label,
        y_label=y_label,
        x_format=x_format,
        y_format=y_format,
        places=places,
        height=height,
        label=f"{y_label} against {x_label}: {_first_names(names)}",
    )
