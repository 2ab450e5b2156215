"""Charts with a row for each name: intervals and bars."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from calibrant.show.charts.elements import (
    Format,
    Scale,
    as_array,
    colour,
    element,
    finite,
    first_names,
    group,
    padded_range,
    percent,
    picture,
    polylines,
    shortened,
    text,
    tick,
    title,
)
from calibrant.show.html import Html

ROW = 24
"""Height of a row."""


def forest_chart(
    names: Sequence[str],
    values: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    *,
    label: str,
    form: Format = percent,
    highlighted: str | None = None,
    reference: float | None = None,
) -> Html:
    """Return a row for each name: its value, its interval and both in numbers.

    ``reference`` is a vertical line, such as the value before calibration; the row
    ``highlighted`` has a background.

    Examples
    --------
    >>> chart = forest_chart(["none", "ts"], [0.04, 0.01], [0.03, 0.005], [0.05, 0.02],
    ...                      label="ECE", highlighted="ts")
    >>> "ts: ECE 1 % (0.5 % to 2 %)" in chart
    True
    """
    columns = [as_array(v) for v in (values, low, high)]
    rows = list(zip(names, *columns, strict=True))
    known = [v for _, *row in rows for v in row if finite(v)]
    known += [] if reference is None else [reference]
    x = Scale(*_shown_range(known), 116, 300)
    bottom = 24 + ROW * len(rows)
    parts = [
        text(label, 116, 14, fill=colour("muted")),
        _columns_grid(x, 20, bottom, form),
        *(
            _forest_row(row, 24 + ROW * (k + 0.5), x, label, form, row[0] == highlighted)
            for k, row in enumerate(rows)
        ),
    ]
    if reference is not None:
        line = polylines([(x(reference), 20, x(reference), bottom)])
        dashed = {"stroke": colour("ink"), "stroke_dasharray": "4 3"}
        parts.append(element("path", title(f"{label} {form(reference)}"), d=line, **dashed))
    return picture(parts, 420, bottom + 24, f"{label} with intervals: {first_names(names)}")


def _shown_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values, from 0 on where that is near, and with room on both sides."""
    low, high = padded_range(values)
    room = 0.06 * (high - low)
    return (0.0 if 0 <= low <= high / 2 else low - room), high + room


def _forest_row(
    row: tuple[str, float, float, float],
    y: float,
    x: Scale,
    label: str,
    form: Format,
    highlighted: bool,
) -> str:
    name, value, low, high = row
    weight: dict[str, str] = {"font_weight": "600"} if highlighted else {}
    box = {"x": 0, "y": y - ROW / 2 + 1, "width": 420, "height": ROW - 2, "rx": 4}
    back = (
        [element("rect", **box, fill=colour("right"), fill_opacity="0.14")] if highlighted else []
    )
    heading = text(shortened(name, 16), 6, y + 4, **weight)
    if not finite(value):
        return group([title(f"{name}: {label} undefined"), *back, heading])
    interval = f" ({form(low)} to {form(high)})" if finite(low, high) else ""
    ink = colour("right" if highlighted else "ink")
    marks = [element("circle", cx=x(value), cy=y, r=4, fill=ink)]
    if interval:
        line = polylines([(x(low), y, x(high), y)])
        marks.append(element("path", d=line, stroke=ink, stroke_width=2))
    number = text(form(value), 414, y + 4, text_anchor="end", **weight)
    words = title(f"{name}: {label} {form(value)}{interval}")
    return group([words, *back, heading, *marks, number])


def _columns_grid(x: Scale, top: float, bottom: float, form: Format) -> str:
    """Vertical grid lines with their numbers below."""
    ticks = x.ticks(4)
    lines = polylines((x(t), top, x(t), bottom) for t in ticks)
    numbers = [text(tick(form, t), x(t), bottom + 16) for t in ticks]
    grid = element("path", d=lines, stroke=colour("grid"), fill="none")
    return grid + group(numbers, fill=colour("muted"), text_anchor="middle")


def bar_chart(
    names: Sequence[str],
    values: ArrayLike,
    *,
    label: str,
    form: Format = percent,
    highlighted: str | None = None,
) -> Html:
    """Return a horizontal bar for each name, from zero, with its number.

    Bars are orange below zero and where ``highlighted``.

    Examples
    --------
    >>> chart = bar_chart(["cat", "dog"], [0.04, -0.01], label="gap")
    >>> "cat: gap 4 %" in chart, chart.count("<rect")
    (True, 2)
    """
    numbers = as_array(values).tolist()
    known = [v for v in numbers if finite(v)]
    x = Scale(*padded_range([*known, 0.0]), 116, 350)
    bottom = 24 + ROW * len(numbers)
    parts = [text(label, 116, 14, fill=colour("muted")), _columns_grid(x, 20, bottom, form)]
    for k, (name, value) in enumerate(zip(names, numbers, strict=True)):
        y = 24 + ROW * (k + 0.5)
        words = f"{name}: {label} {form(value) if finite(value) else 'undefined'}"
        marks = [title(words), text(shortened(name, 16), 6, y + 4)]
        if finite(value):
            ends = sorted((x(0), x(value)))
            paint = colour("wrong" if value < 0 or name == highlighted else "right")
            size = {"x": ends[0], "y": y - 7, "width": ends[1] - ends[0], "height": 14}
            marks.append(element("rect", **size, fill=paint, fill_opacity="0.75"))
            marks.append(text(form(value), 414, y + 4, text_anchor="end"))
        parts.append(group(marks))
    return picture(parts, 420, bottom + 24, f"{label}: {first_names(names)}")
