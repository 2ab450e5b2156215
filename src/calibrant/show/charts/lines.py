"""Charts of lines: curves with bands, and values over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrant.show.charts.elements import (
    CHARACTER,
    PAINTS,
    Axes,
    Format,
    as_array,
    colour,
    element,
    finite,
    first_names,
    group,
    legend,
    padded_range,
    percent,
    picture,
    plain,
    polyline,
    polylines,
    shortened,
    text,
    title,
)
from calibrant.show.html import Html

POINTS = 200
"""Points of a line that are drawn; more cannot be told apart."""
HOVERS = 25
"""Points of a line that show their numbers."""
HALO = {"paint_order": "stroke", "stroke": colour("paper"), "stroke_width": "4"}
"""Outline of text in the colour of the paper, so that lines below it do not disturb."""


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


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_format: Format = percent,
    y_format: Format = percent,
    y_range: tuple[float, float] | None = None,
    mark: tuple[float, float, str] | None = None,
) -> Html:
    """Return lines with their bands and a legend, and one marked point ``(x, y, words)``.

    Examples
    --------
    >>> risk = Line("by confidence", [0.5, 1], [0.02, 0.1])
    >>> chart = line_chart([risk], x_label="coverage", y_label="risk")
    >>> "by confidence: coverage 50 %, risk 2 %" in chart
    True
    """
    drawn = [_points(line, paint) for line, paint in zip(lines, PAINTS, strict=False)]
    across = padded_range([x for points in drawn for x in points.x])
    up = y_range or padded_range([0.0, *(v for points in drawn for v in points.heights())])
    axes = Axes.within((50, 30, 396, 220), across, up)
    names = [(element("path", d="M0 0L14 0", **points.stroke), points.name) for points in drawn]
    below, height = legend(names, (50, 270, 410)) if len(drawn) > 1 else ("", 0)
    parts = [
        axes.left(y_label, y_format),
        axes.bottom(x_label, x_format),
        *(points.band(axes) for points in drawn),
        *(points.line(axes) for points in drawn),
        *(points.hovers(axes, (x_label, x_format), (y_label, y_format)) for points in drawn),
        _mark(axes, mark) if mark else "",
        below,
    ]
    label = f"{y_label} against {x_label}: {first_names([line.name for line in lines])}"
    return picture(parts, 420, 262 + height, label)


class Points(NamedTuple):
    """The points of a line that are drawn."""

    name: str
    x: list[float]
    y: list[float]
    ends: list[tuple[float, float, float]]  # (x, low, high) of the band
    colour: str
    dashed: bool

    def heights(self) -> list[float]:
        """Return everything that the vertical axis has to show."""
        return [*self.y, *(end for _, low, high in self.ends for end in (low, high))]

    @property
    def stroke(self) -> dict[str, str]:
        """Attributes of the line."""
        dash = {"stroke_dasharray": "5 4"} if self.dashed else {}
        return {"stroke": colour(self.colour), "stroke_width": "2", "fill": "none", **dash}

    def line(self, axes: Axes) -> str:
        """Return the line itself."""
        d = axes.path(self.x, self.y)
        return element("path", title(self.name), d=d, **self.stroke) if d else ""

    def band(self, axes: Axes) -> str:
        """Return the area between the ends."""
        there = [axes.at(x, high) for x, _, high in self.ends]
        back = [axes.at(x, low) for x, low, _ in reversed(self.ends)]
        d = polyline([*there, *back])
        return (
            element("path", d=f"{d}Z", fill=colour(self.colour), fill_opacity="0.18") if d else ""
        )

    def hovers(self, axes: Axes, across: tuple[str, Format], up: tuple[str, Format]) -> str:
        """Return points that show their numbers: dots where they are few, else invisible."""
        few = len(self.x) <= HOVERS and not self.dashed
        (x_name, x_format), (y_name, y_format) = across, up
        dots = [
            element(
                "circle",
                title(f"{self.name}: {x_name} {x_format(x)}, {y_name} {y_format(y)}"),
                cx=axes.x(x),
                cy=axes.y(y),
                r=2.5 if few else 7,
            )
            for x, y in ((self.x[k], self.y[k]) for k in spread(len(self.x), HOVERS))
        ]
        return group(dots, fill=colour(self.colour), fill_opacity="1" if few else "0")


def _points(line: Line, paint: str) -> Points:
    """Return few points of a line, its ends among them; those without a value are left out."""
    x, y = as_array(line.x), as_array(line.y)
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    kept = known[spread(known.size, POINTS)]
    ends: list[tuple[float, float, float]] = []
    if line.low is not None and line.high is not None:
        columns = (v[kept].tolist() for v in (x, as_array(line.low), as_array(line.high)))
        ends = [row for row in zip(*columns, strict=True) if finite(*row)]
    drawn = x[kept].tolist(), y[kept].tolist()
    return Points(line.name, *drawn, ends, line.colour or paint, line.dashed)


def spread(size: int, count: int) -> list[int]:
    """Return at most ``count`` places of ``size``, evenly spread and with both ends."""
    return sorted({round(k) for k in np.linspace(0, size - 1, min(size, count)).tolist()})


def _mark(axes: Axes, mark: tuple[float, float, str]) -> str:
    x, y, words = mark
    at_x, at_y = axes.at(x, y)
    end = at_x > (axes.x.start + axes.x.end) / 2
    dot = element("circle", title(words), cx=at_x, cy=at_y, r=5, fill=colour("wrong"))
    shift, anchor = (-9, "end") if end else (9, "start")
    return dot + text(words, at_x + shift, at_y - 8, text_anchor=anchor, **HALO)


def drift_chart(
    names: Sequence[str],
    values: ArrayLike,
    *,
    label: str,
    limit: float | None = None,
    alarm: str | None = None,
    form: Format = plain,
    log: bool = False,
) -> Html:
    """Return a value over time windows, with its limit and the window of an alarm.

    Examples
    --------
    >>> chart = drift_chart(["mon", "tue"], [1, 30], label="e-value", limit=20, alarm="tue")
    >>> "tue: e-value 30" in chart, ">alarm<" in chart
    (True, True)
    """
    numbers = as_array(values)
    shown = [(k, v) for k, v in enumerate(numbers.tolist()) if finite(v) and (v > 0 or not log)]
    reach = [v for _, v in shown] + ([] if limit is None else [limit])
    low, high = padded_range(reach if log else [*reach, 0.0])
    span = (low / 1.6, high * 1.6) if log else (low, high + (high - low) * 0.06)
    axes = Axes.within((50, 30, 406, 200), (0, max(len(names) - 1, 1)), span, log=log)
    dots = [
        element("circle", title(f"{names[k]}: {label} {form(v)}"), cx=axes.x(k), cy=axes.y(v), r=3)
        for k, v in (shown[place] for place in spread(len(shown), POINTS))
    ]
    path = axes.path(*zip(*shown, strict=True)) if shown else ""
    line = {"stroke": colour("right"), "stroke_width": "2", "fill": "none"}
    parts = [
        axes.left(label, form),
        window_axis(names, axes),
        _limit(axes, limit, form) if limit is not None else "",
        element("path", d=path, **line) if path else "",
        group(dots, fill=colour("right")),
        _alarm(axes, list(names).index(alarm)) if alarm is not None and alarm in names else "",
    ]
    raised = "" if alarm is None else f", alarm at {alarm}"
    return picture(parts, 420, 232, f"{label} over {len(names)} windows{raised}")


def window_axis(names: Sequence[str], axes: Axes) -> str:
    """The line of the horizontal axis with the names of some windows."""
    count = min(len(names), 4)
    wide = int((axes.x.end - axes.x.start) / CHARACTER / max(count, 1)) - 2
    numbers = []
    for k in spread(len(names), count):
        anchor = {0: "start", len(names) - 1: "end"}.get(k, "middle")
        name = shortened(names[k], wide)
        numbers.append(text(name, axes.x(k), axes.y.start + 18, text_anchor=anchor))
    line = polylines([(axes.x.start, axes.y.start, axes.x.end, axes.y.start)])
    base = element("path", d=line, stroke=colour("muted"), fill="none")
    return base + group(numbers, fill=colour("muted"))


def _limit(axes: Axes, limit: float, form: Format) -> str:
    line = polylines([(axes.x.start, axes.y(limit), axes.x.end, axes.y(limit))])
    words = f"limit {form(limit)}"
    dashed = {"stroke": colour("bad"), "stroke_dasharray": "5 4", "stroke_width": "1.5"}
    paint = {"text_anchor": "end", "fill": colour("bad"), **HALO}
    label = text(words, axes.x.end - 2, axes.y(limit) - 5, **paint)
    return element("path", title(words), d=line, **dashed) + label


def _alarm(axes: Axes, at: int) -> str:
    x = axes.x(at)
    line = polylines([(x, axes.y.end, x, axes.y.start)])
    anchor = "end" if x > (axes.x.start + axes.x.end) / 2 else "start"
    shift = -5 if anchor == "end" else 5
    mark = element("path", d=line, stroke=colour("bad"), stroke_width=1.5)
    paint = {"text_anchor": anchor, "fill": colour("bad"), "font_weight": "600"}
    return mark + text("alarm", x + shift, axes.y.end - 6, **paint)
