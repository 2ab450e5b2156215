"""Charts of values with intervals: a row for each name, or a place for each time window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from calibrant.show.charts.axes import (
    CHARACTER,
    Axes,
    Scale,
    _as_array,
    _finite,
    _first_names,
    _legend_places,
    _padded_range,
    _shortened,
    spread,
)
from calibrant.show.html import Html, _rendered
from calibrant.show.style import Format, _plain, _short_percent

ROW = 24
"""Height of a row."""


class _ChartRow(NamedTuple):
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
        return _shortened(self.name, 16)

    @property
    def known(self) -> bool:
        """True if there is a value."""
        return _finite(self.value)

    @property
    def interval(self) -> bool:
        """True if there is an interval."""
        return _finite(self.low, self.high)


def forest_chart(
    names: Sequence[str],
    values: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    *,
    label: str,
    form: Format = _short_percent,
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
    known = [v for row in rows for v in row[1:4] if _finite(v)]
    least, most = _padded_range([*known, *([] if reference is None else [reference])])
    room = 0.06 * (most - least)
    # from 0 on where that is near, and with room on both sides
    span = (0.0 if 0 <= least <= most / 2 else least - room), most + room
    about = f"{label} with intervals: {_first_names(names)}"
    return _chart(rows, Scale(*span, 116, 300), label, form, about, reference=reference)


def bar_chart(
    names: Sequence[str], values: ArrayLike, *, label: str, form: Format = _short_percent
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
    span = _padded_range([*(row.value for row in rows if row.known), 0.0])
    return _chart(
        rows, Scale(*span, 116, 350), label, form, f"{label}: {_first_names(names)}", bars=True
    )


def _rows(
    names: Sequence[str],
    values: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    form: Format,
    highlighted: str | None,
) -> list[_ChartRow]:
    columns = (_as_array(v).tolist() for v in (values, low, high))
    rows = []
    for k, (name, value, least, most) in enumerate(zip(names, *columns, strict=True)):
        words = form(value) if _finite(value) else "undefined"
        if _finite(value, least, most):
            words += f" ({form(least)} to {form(most)})"
        y, chosen = ROW * (k + 1.5), name == highlighted
        rows.append(_ChartRow(name, value, least, most, y, chosen, words))
    return rows


def _chart(
    rows: Sequence[_ChartRow],
    x: Scale,
    label: str,
    form: Format,
    about: str,
    *,
    reference: float | None = None,
    bars: bool = False,
) -> Html:
    frame = {"x": x, "bottom": ROW * (len(rows) + 1), "label": label, "form": form, "about": about}
    return _rendered("charts/rows.html", rows=rows, reference=reference, bars=bars, **frame)


MAX_WINDOWS = 200
"""Windows whose values are marked."""


def drift_chart(
    names: Sequence[str],
    values: ArrayLike,
    *,
    label: str,
    limit: float | None = None,
    alarm: str | None = None,
    form: Format = _plain,
    log: bool = False,
) -> Html:
    """Return a value over time windows, with its limit and the window of an alarm.

    Examples
    --------
    >>> chart = drift_chart(["mon", "tue"], [1, 30], label="e-value", limit=20, alarm="tue")
    >>> "tue: e-value 30" in chart, ">alarm<" in chart
    (True, True)
    """
    numbers = enumerate(_as_array(values).tolist())
    shown = [(k, v) for k, v in numbers if _finite(v) and (v > 0 or not log)]
    reach = [v for _, v in shown] + ([] if limit is None else [limit])
    low, high = _padded_range(reach if log else [*reach, 0.0])
    span = (low / 1.6, high * 1.6) if log else (low, high + (high - low) * 0.06)
    axes = Axes.within((50, 30, 406, 200), (0, max(len(names) - 1, 1)), span, log=log)
    raised = "" if alarm is None else f", alarm at {alarm}"
    return _rendered(
        "charts/drift.html",
        axes=axes,
        names=names,
        windows=_named(names, axes),
        line=axes.path(*zip(*shown, strict=True)) if shown else "",
        points=[shown[place] for place in spread(len(shown), MAX_WINDOWS)],
        limit=limit,
        alarm=list(names).index(alarm) if alarm is not None and alarm in names else None,
        label=label,
        form=form,
        about=f"{label} over {len(names)} windows{raised}",
    )


def _named(names: Sequence[str], axes: Axes) -> list[tuple[int, str, str]]:
    """Return the windows that are named below the axis, with their names and anchors."""
    count = min(len(names), 4)
    wide = int((axes.x.end - axes.x.start) / CHARACTER / max(count, 1)) - 2
    anchors = {0: "start", len(names) - 1: "end"}
    return [
        (k, _shortened(names[k], wide), anchors.get(k, "middle")) for k in spread(len(names), count)
    ]


class EstimatedWindow(NamedTuple):
    """A share of one window; what is unknown is NaN, as are ends without a guarantee."""

    name: str
    value: float
    low: float
    high: float
    measured: float


def estimate_chart(windows: Sequence[EstimatedWindow], *, label: str) -> Html:
    """Return estimates with their intervals, crosses where these were withdrawn, and measured ones.

    Examples
    --------
    >>> nan = float("nan")
    >>> monday = EstimatedWindow("mon", 0.9, 0.85, 0.95, 0.91)
    >>> tuesday = EstimatedWindow("tue", 0.8, nan, nan, nan)
    >>> chart = estimate_chart([monday, tuesday], label="accuracy")
    >>> "mon: estimated accuracy 90 % (85 % to 95 %)" in chart
    True
    >>> "tue: estimated accuracy 80 %, guarantee withdrawn" in chart
    True
    """
    shown = [(k, windows[k]) for k in spread(len(windows), MAX_WINDOWS)]
    reach = [share for _, window in shown for share in window[1:] if _finite(share)]
    low, high = min(reach, default=0.0), max(reach, default=1.0)
    room = max(0.06 * (high - low), 0.02)
    span = (max(low - room, 0), min(high + room, 1))
    axes = Axes.within((50, 30, 406, 200), (0, max(len(windows) - 1, 1)), span)
    every = {
        "estimated": [(k, w) for k, w in shown if _finite(*w[1:4])],
        "withdrawn": [(k, w) for k, w in shown if _finite(w.value) and not _finite(w.low)],
        "measured": [(k, w) for k, w in shown if _finite(w.measured)],
    }
    kinds = {name: marks for name, marks in every.items() if marks}
    places, height = _legend_places(list(kinds), (50, 240, 410))
    return _rendered(
        "charts/estimates.html",
        axes=axes,
        windows=_named([window.name for window in windows], axes),
        kinds=kinds,
        label=label,
        percent=_short_percent,
        places=places,
        height=height,
        about=f"estimated {label} of {len(windows)} windows",
    )
