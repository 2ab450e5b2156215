"""Charts of values over time windows: evidence of a drift, and estimates beside measured values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from calibrant.show.charts.axes import (
    CHARACTER,
    Axes,
    as_array,
    finite,
    legend_places,
    padded_range,
    shortened,
    spread,
)
from calibrant.show.html import Html, rendered
from calibrant.show.numbers import Format, percent, plain

MAX_WINDOWS = 200
"""Windows whose values are marked."""


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
    numbers = enumerate(as_array(values).tolist())
    shown = [(k, v) for k, v in numbers if finite(v) and (v > 0 or not log)]
    reach = [v for _, v in shown] + ([] if limit is None else [limit])
    low, high = padded_range(reach if log else [*reach, 0.0])
    span = (low / 1.6, high * 1.6) if log else (low, high + (high - low) * 0.06)
    axes = Axes.within((50, 30, 406, 200), (0, max(len(names) - 1, 1)), span, log=log)
    raised = "" if alarm is None else f", alarm at {alarm}"
    return rendered(
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
        (k, shortened(names[k], wide), anchors.get(k, "middle")) for k in spread(len(names), count)
    ]


class EstimatedWindow(NamedTuple):
    """A share of one window; what is unknown is NaN, as are ends without a promise."""

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
    >>> "tue: estimated accuracy 80 %, promise withdrawn" in chart
    True
    """
    shown = [(k, windows[k]) for k in spread(len(windows), MAX_WINDOWS)]
    reach = [share for _, window in shown for share in window[1:] if finite(share)]
    low, high = min(reach, default=0.0), max(reach, default=1.0)
    room = max(0.06 * (high - low), 0.02)
    span = (max(low - room, 0), min(high + room, 1))
    axes = Axes.within((50, 30, 406, 200), (0, max(len(windows) - 1, 1)), span)
    every = {
        "estimated": [(k, w) for k, w in shown if finite(*w[1:4])],
        "withdrawn": [(k, w) for k, w in shown if finite(w.value) and not finite(w.low)],
        "measured": [(k, w) for k, w in shown if finite(w.measured)],
    }
    kinds = {name: marks for name, marks in every.items() if marks}
    places, height = legend_places(list(kinds), (50, 240, 410))
    return rendered(
        "charts/estimates.html",
        axes=axes,
        windows=_named([window.name for window in windows], axes),
        kinds=kinds,
        label=label,
        percent=percent,
        places=places,
        height=height,
        about=f"estimated {label} of {len(windows)} windows",
    )
