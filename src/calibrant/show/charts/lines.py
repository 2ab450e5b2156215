"""Charts of curves with bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrant.show.charts.axes import (
    PAINTS,
    Axes,
    as_array,
    finite,
    first_names,
    legend_places,
    padded_range,
    path,
    spread,
)
from calibrant.show.html import Html, rendered
from calibrant.show.numbers import Format, percent

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


class Points(NamedTuple):
    """The points of a line that are drawn."""

    name: str
    x: list[float]
    y: list[float]
    ends: list[tuple[float, float, float]]  # (x, low, high) of the band
    colour: str
    dashed: bool

    @classmethod
    def of(cls, line: Line, paint: str) -> Points:
        """Return few points of a line, its ends among them; those without a value are left out."""
        x, y = as_array(line.x), as_array(line.y)
        known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        kept = known[spread(known.size, MAX_POINTS)]
        ends: list[tuple[float, float, float]] = []
        if line.low is not None and line.high is not None:
            columns = (v[kept].tolist() for v in (x, as_array(line.low), as_array(line.high)))
            ends = [row for row in zip(*columns, strict=True) if finite(*row)]
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
    x_format: Format = percent,
    y_format: Format = percent,
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
    drawn = [Points.of(line, paint) for line, paint in zip(lines, PAINTS, strict=False)]
    across = padded_range([x for points in drawn for x in points.x])
    up = y_range or padded_range([0.0, *(v for points in drawn for v in points.heights())])
    names = [points.name for points in drawn]
    places, height = legend_places(names, (50, 270, 410)) if len(drawn) > 1 else ([], 0)
    return rendered(
        "charts/lines.html",
        axes=Axes.within((50, 30, 396, 220), across, up),
        lines=drawn,
        x_label=x_label,
        y_label=y_label,
        x_format=x_format,
        y_format=y_format,
        places=places,
        height=height,
        label=f"{y_label} against {x_label}: {first_names(names)}",
    )
