"""Charts of bins: reliability diagrams and histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from calibrant.show.charts.elements import (
    PAINTS,
    Axes,
    Scale,
    as_array,
    colour,
    element,
    finite,
    first_names,
    group,
    legend,
    percent,
    picture,
    polylines,
    text,
    title,
)
from calibrant.show.html import Html

PALE = 0.5
"""Width of an interval above which a bin is pale."""


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
    columns = [as_array(v) for v in (confidence, accuracy, low, high, share)]
    bins = [
        Bin(float(a), float(b), *map(float, values))
        for (a, b), values in zip(
            pairwise(as_array(edges)), zip(*columns, strict=True), strict=True
        )
        if finite(*values[:2])
    ]
    axes = Axes.within((46, 86, 376, 386), (0, 1), (0, 1))
    ideal = {"stroke": colour("ink"), "stroke_dasharray": "5 4", "fill": "none"}
    names = [
        (_box("right", 0.6), event),
        (_box("wrong", 0.35), f"gap to {claim}"),
        (element("path", d="M0 0L14 0", **ideal), "ideal"),
    ]
    below, height = legend(names, (46, 440, 396))
    parts = [
        text(note, 2, 12, font_weight="600") if note else "",
        axes.left(event, percent),
        axes.bottom(claim, percent),
        _strip(bins, axes),
        *(b.draw(axes, claim, event) for b in bins),
        element("path", d=axes.path([0, 1], [0, 1]), **ideal),
        below,
    ]
    label = f"Reliability diagram: {event} against {claim}. {note}".strip()
    return picture(parts, 400, 434 + height, label)


@dataclass(frozen=True)
class Bin:
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
        ends = f" ({percent(self.low)} to {percent(self.high)})" if self.whiskers else ""
        return (
            f"{claim} {percent(self.left)} to {percent(self.right)}: mean "
            f"{percent(self.confidence)}, {event} {percent(self.accuracy)}{ends}; "
            f"{percent(self.share)} of the examples"
        )

    @property
    def whiskers(self) -> bool:
        """True if there is an interval."""
        return finite(self.low, self.high)

    @property
    def unsure(self) -> bool:
        """True if too few examples are known to say much: such bins are pale."""
        return self.whiskers and self.high - self.low > PALE

    def draw(self, axes: Axes, claim: str, event: str) -> str:
        """Return the bar, the gap, and the interval at the mean confidence."""
        accuracy, ends = self.accuracy, sorted((self.accuracy, self.confidence))
        # less on top of the bar, where two colours would turn to mud
        gap = {"fill": colour("wrong"), "fill_opacity": "0.35", "stroke": colour("wrong")}
        gap |= {} if self.confidence >= accuracy else {"fill_opacity": "0.1"}
        marks = [
            title(self.describe(claim, event)),
            self._bar(axes, 0, accuracy, fill=colour("right"), fill_opacity="0.6"),
            self._bar(axes, *ends, **gap),
        ]
        x, y = axes.at(self.confidence, accuracy)
        if self.whiskers:
            line = polylines([(x, axes.y(self.low), x, axes.y(self.high))])
            marks.append(element("path", d=line, stroke=colour("ink"), stroke_width=1.5))
        marks.append(element("circle", cx=x, cy=y, r=3, fill=colour("ink")))
        return group(marks, **({"opacity": "0.4"} if self.unsure else {}))

    def _bar(self, axes: Axes, low: float, high: float, /, **paint: str) -> str:
        x, top = axes.at(self.left, high)
        height = axes.y(low) - top
        if height < 0.05:
            return ""
        return element(
            "rect", x=x + 0.5, y=top, width=axes.x(self.right) - x - 1, height=height, **paint
        )


def _strip(bins: Sequence[Bin], axes: Axes) -> str:
    """Share of the examples per bin, above a reliability diagram."""
    peak = max((b.share for b in bins), default=0)
    if not peak > 0:
        return ""
    top, bottom = 34, 60
    scale = Scale(0, peak, bottom, top)
    bars = [
        element(
            "rect",
            title(f"{percent(b.left)} to {percent(b.right)}: {percent(b.share)} of the examples"),
            x=axes.x(b.left) + 0.5,
            y=min(scale(b.share), bottom - 1),
            width=axes.x(b.right) - axes.x(b.left) - 1,
            height=max(bottom - scale(b.share), 1),
        )
        for b in bins
    ]
    label = f"share of the examples, at most {percent(peak)}"
    words = text(label, axes.x.start, 29, fill=colour("muted"))
    return words + group(bars, fill=colour("muted"), fill_opacity="0.55")


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
    limits, columns = as_array(edges), {name: as_array(values) for name, values in shares.items()}
    peak = max((float(np.nanmax(v)) for v in columns.values() if np.isfinite(v).any()), default=1)
    axes = Axes.within((50, 30, 396, 220), (limits[0], limits[-1]), (0, peak or 1))
    bars, names = [], []
    for paint, (name, values) in zip(PAINTS, columns.items(), strict=False):
        marks = [
            _column(axes, a, b, v, f"{name}, {percent(a)} to {percent(b)}: {percent(v)}")
            for (a, b), v in zip(pairwise(limits), values, strict=True)
            if finite(v)
        ]
        bars.append(group(marks, fill=colour(paint), fill_opacity="0.45", stroke=colour(paint)))
        names.append((_box(paint, 0.45), name))
    below, height = legend(names, (50, 270, 410))
    parts = [axes.left(y_label, percent), axes.bottom(x_label, percent), *bars, below]
    label = f"Histogram: {y_label} against {x_label}, {first_names(columns)}"
    return picture(parts, 420, 262 + height, label)


def _column(axes: Axes, left: float, right: float, value: float, words: str) -> str:
    x, y = axes.at(left, value)
    size = {"width": axes.x(right) - x, "height": axes.y.start - y}
    return element("rect", title(words), x=x, y=y, **size)


def _box(paint: str, opacity: float) -> str:
    """Box of a legend."""
    size = {"y": -5, "width": 14, "height": 10}
    return element("rect", **size, fill=colour(paint), fill_opacity=f"{opacity:g}")
