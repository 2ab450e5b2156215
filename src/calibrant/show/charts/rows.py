"""Charts with a row for each name: intervals and bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from calibrant.show.charts.axes import Scale, as_array, finite, first_names, padded_range, shortened
from calibrant.show.html import Html, rendered
from calibrant.show.numbers import Format, percent

ROW = 24
"""Height of a row."""


class Row(NamedTuple):
    """A name with its value and interval; NaN where undefined."""

    name: str
    value: float
    low: float
    high: float
    y: float
    chosen: bool
    words: str
    """The value and its interval in numbers."""

    @property
    def shown(self) -> str:
        """The name as it is drawn."""
        return shortened(self.name, 16)

    @property
    def known(self) -> bool:
        """True if there is a value."""
        return finite(self.value)

    @property
    def interval(self) -> bool:
        """True if there is an interval."""
        return finite(self.low, self.high)


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
    rows = _rows(names, values, low, high, form, highlighted)
    known = [v for row in rows for v in row[1:4] if finite(v)]
    least, most = padded_range([*known, *([] if reference is None else [reference])])
    room = 0.06 * (most - least)
    # from 0 on where that is near, and with room on both sides
    span = (0.0 if 0 <= least <= most / 2 else least - room), most + room
    about = f"{label} with intervals: {first_names(names)}"
    return _chart(rows, Scale(*span, 116, 300), label, form, about, reference=reference)


def bar_chart(
    names: Sequence[str], values: ArrayLike, *, label: str, form: Format = percent
) -> Html:
    """Return a horizontal bar for each name, from zero and orange below, with its number.

    Examples
    --------
    >>> chart = bar_chart(["cat", "dog"], [0.04, -0.01], label="gap")
    >>> "cat: gap 4 %" in chart, chart.count("<rect")
    (True, 2)
    """
    unknown = [float("nan")] * len(names)
    rows = _rows(names, values, unknown, unknown, form, None)
    span = padded_range([*(row.value for row in rows if row.known), 0.0])
    return _chart(
        rows, Scale(*span, 116, 350), label, form, f"{label}: {first_names(names)}", bars=True
    )


def _rows(
    names: Sequence[str],
    values: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    form: Format,
    highlighted: str | None,
) -> list[Row]:
    columns = (as_array(v).tolist() for v in (values, low, high))
    rows = []
    for k, (name, value, least, most) in enumerate(zip(names, *columns, strict=True)):
        words = form(value) if finite(value) else "undefined"
        if finite(value, least, most):
            words += f" ({form(least)} to {form(most)})"
        y, chosen = ROW * (k + 1.5), name == highlighted
        rows.append(Row(name, value, least, most, y, chosen, words))
    return rows


def _chart(
    rows: Sequence[Row],
    x: Scale,
    label: str,
    form: Format,
    about: str,
    *,
    reference: float | None = None,
    bars: bool = False,
) -> Html:
    frame = {"x": x, "bottom": ROW * (len(rows) + 1), "label": label, "form": form, "about": about}
    return rendered("charts/rows.html", rows=rows, reference=reference, bars=bars, **frame)
