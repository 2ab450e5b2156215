"""A chart of estimates over time, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from calibrant.show.charts.elements import (
    Axes,
    colour,
    element,
    finite,
    group,
    legend,
    percent,
    picture,
    polylines,
    title,
)
from calibrant.show.charts.lines import POINTS, spread, window_axis
from calibrant.show.html import Html

BAR = {"stroke": colour("right"), "stroke_width": "4", "stroke_opacity": "0.4"}
CROSS = {"stroke": colour("bad"), "stroke_width": "2"}
DASH = {"stroke": colour("ink"), "stroke_width": "2"}


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
    shown = [(k, windows[k]) for k in spread(len(windows), POINTS)]
    reach = [share for _, window in shown for share in window[1:] if finite(share)]
    across = (0, max(len(windows) - 1, 1))
    low, high = min(reach, default=0.0), max(reach, default=1.0)
    room = max(0.06 * (high - low), 0.02)
    axes = Axes.within((50, 30, 406, 200), across, (max(low - room, 0), min(high + room, 1)))
    kinds = (
        ("estimated", _bar(7, 0, 5, -5), [_estimated(axes, *at, label) for at in shown]),
        ("withdrawn", _cross(7, 0), [_withdrawn(axes, *at, label) for at in shown]),
        ("measured", _dash(7, 0), [_measured(axes, *at, label) for at in shown]),
    )
    entries = [(sample, name) for name, sample, marks in kinds if any(marks)]
    below, height = legend(entries, (50, 240, 410))
    names = [window.name for window in windows]
    marks = [group(marks) for _, _, marks in kinds]
    parts = [axes.left(label, percent), window_axis(names, axes), *marks, below]
    return picture(parts, 420, 232 + height, f"estimated {label} of {len(names)} windows")


def _estimated(axes: Axes, k: int, window: EstimatedWindow, label: str) -> str:
    name, value, low, high, _ = window
    if not finite(value, low, high):
        return ""
    words = f"{name}: estimated {label} {percent(value)} ({percent(low)} to {percent(high)})"
    return _bar(axes.x(k), axes.y(value), axes.y(low), axes.y(high), title(words))


def _withdrawn(axes: Axes, k: int, window: EstimatedWindow, label: str) -> str:
    if not finite(window.value) or finite(window.low):
        return ""
    words = f"{window.name}: estimated {label} {percent(window.value)}, promise withdrawn"
    return _cross(*axes.at(k, window.value), title(words))


def _measured(axes: Axes, k: int, window: EstimatedWindow, label: str) -> str:
    if not finite(window.measured):
        return ""
    words = f"{window.name}: measured {label} {percent(window.measured)}"
    return _dash(*axes.at(k, window.measured), title(words))


def _bar(x: float, y: float, low: float, high: float, words: str = "") -> str:
    """A dot on its interval."""
    interval = element("path", d=polylines([(x, low, x, high)]), **BAR)
    return group([words, interval, element("circle", cx=x, cy=y, r=3, fill=colour("right"))])


def _cross(x: float, y: float, words: str = "") -> str:
    d = polylines([(x - 4, y - 4, x + 4, y + 4), (x - 4, y + 4, x + 4, y - 4)])
    return element("path", words, d=d, **CROSS)


def _dash(x: float, y: float, words: str = "") -> str:
    return element("path", words, d=polylines([(x - 7, y, x + 7, y)]), **DASH)
