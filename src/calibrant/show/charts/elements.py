"""Elements of SVG as text, and the axes that charts share.

Colours are CSS variables (``--cal-ink`` and so on, see :mod:`calibrant.show.palette`), so that a
chart follows the page from light to dark. Coordinates are rounded to a tenth of a pixel.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrant._core.messages import printable
from calibrant.show.html import Html

Format = Callable[[float], str]
"""Text of a number, as axes and hovers show it."""
SIZE = 12
"""Size of text, in units of the view box; a chart of 400 units is legible on a phone."""
CHARACTER = 6.4
"""Width of a character of that size, about."""
PAINTS = ("right", "wrong", "good", "muted", "warn", "bad", "ink") * 10
"""Colours of the palette for one series after the other."""


def escaped(text: object) -> str:
    """Return text of any origin as XML that shows it: markup and control characters are inert.

    >>> escaped("<b>cat & dog</b>")
    '&lt;b&gt;cat &amp; dog&lt;/b&gt;'
    """
    return html.escape(printable(str(text)), quote=True)


def plain(value: float) -> str:
    """Return a number with three significant digits.

    >>> plain(0.12345), plain(1500), plain(2e9)
    ('0.123', '1500', '2e+09')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e5 else f"{value:.3g}"


def percent(value: float) -> str:
    """Return a fraction in percent, with one decimal where it matters.

    >>> percent(0.1234), percent(0.2)
    ('12.3 %', '20 %')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def tick(form: Format, value: float) -> str:
    """Return the number of a tick, without zeros at the end of its decimals.

    >>> tick("{:.2f} %".format, 2.5), tick(plain, 100)
    ('2.5 %', '100')
    """
    shown = form(value)
    return re.sub(r"\.?0+(?=$| )", "", shown) if "." in shown else shown


def coordinate(value: float) -> str:
    """Return a coordinate as text, rounded to a tenth.

    >>> coordinate(12.04), coordinate(0.25)
    ('12', '0.2')
    """
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0" if abs(value) < 0.05 else "-0")


def colour(name: str) -> str:
    """Return a colour of the palette as a CSS variable."""
    return f"var(--cal-{name})"


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """Return an element of SVG; ``stroke_width`` becomes ``stroke-width``.

    Attributes are the caller's own words and numbers; only ``content`` may come from data, escaped.

    >>> element("circle", cx=1.26, cy=2, fill=colour("ink"))
    '<circle cx="1.3" cy="2" fill="var(--cal-ink)"/>'
    """
    parts = "".join(
        f' {key.rstrip("_").replace("_", "-")}="'
        f'{value if isinstance(value, str) else coordinate(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{parts}>{content}</{name}>" if content else f"<{name}{parts}/>"


def title(text: str) -> str:
    """Return the text that is shown while the pointer is over the element around it."""
    return element("title", escaped(text))


def text(content: object, x: float, y: float, /, **attributes: str | float) -> str:
    """Return text at a place; data are escaped."""
    return element("text", escaped(content), x=x, y=y, **attributes)


def group(parts: Iterable[str], **attributes: str | float) -> str:
    """Return elements with common attributes; nothing for none."""
    content = "".join(parts)
    return element("g", content, **attributes) if content else ""


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """Return the ``d`` of a path through points; those that round to the same are left out."""
    steps: list[str] = []
    for x, y in points:
        step = f"{coordinate(x)} {coordinate(y)}"
        if not steps or steps[-1] != step:
            steps.append(step)
    return "M" + "L".join(steps) if steps else ""


def picture(parts: Iterable[str], width: float, height: float, label: str) -> Html:
    """Return a whole chart that fills the width of its container, up to its own size.

    ``label`` says in words what it shows, for readers who do not see it.
    """
    return Html(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escaped(label)}" '
        f'viewBox="0 0 {coordinate(width)} {coordinate(height)}" class="cal-chart" '
        f'style="width:100%;max-width:{coordinate(width)}px;height:auto;display:block" '
        f'font-family="system-ui,sans-serif" font-size="{SIZE}" fill="{colour("ink")}">'
        f"{''.join(parts)}</svg>"
    )


def shortened(name: object, length: int) -> str:
    """Return a name with an ellipsis in its middle where it is longer than that.

    >>> shortened("temperature_scaling", 12)
    'temper…aling'
    """
    whole = str(name)
    if len(whole) <= length:
        return whole
    rest = length - 1
    return f"{whole[: rest - rest // 2]}…{whole[len(whole) - rest // 2 :]}"


def finite(*values: float) -> bool:
    """Return True if all values can be drawn."""
    return all(map(math.isfinite, values))


@dataclass(frozen=True)
class Scale:
    """A map from values between ``low`` and ``high`` to coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value; values outside lie on the border."""
        low, high, at = (self._position(v) for v in (self.low, self.high, value))
        share = (at - low) / ((high - low) or 1)
        return self.start + min(max(share, 0), 1) * (self.end - self.start)

    def _position(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values in the range, ``count`` of them or fewer."""
        return _powers(self.low, self.high, count) if self.log else self._steps(count)

    def _steps(self, count: int) -> list[float]:
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        rough = span / max(count - 1, 1)
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * (1 - 1e-9))
        first, last = (math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9))
        return [round(k * step, 12) for k in range(first, last + 1)]


def _powers(low: float, high: float, count: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, -(-(last - first) // max(count - 1, 1)))
    return [10.0**k for k in range(first, last + 1, step)]


@dataclass(frozen=True)
class Axes:
    """A plotting area: two scales, of which ``y`` runs upwards."""

    x: Scale
    y: Scale

    @classmethod
    def within(
        cls,
        box: tuple[float, float, float, float],
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        *,
        log: bool = False,
    ) -> Axes:
        """Return axes in a box (left, top, right, bottom); ``log`` is of the vertical one."""
        left, top, right, bottom = box
        return cls(Scale(*x_range, left, right), Scale(*y_range, bottom, top, log))

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point."""
        return self.x(x), self.y(y)

    def path(self, x: Sequence[float], y: Sequence[float]) -> str:
        """Return the ``d`` of a line through the points that are finite."""
        pairs = zip(x, y, strict=True)
        return polyline(self.at(a, b) for a, b in pairs if finite(a, b))

    def left(self, label: str, form: Format, count: int = 5) -> str:
        """Return grid lines, numbers and the name of the vertical axis."""
        ticks, edge = self.y.ticks(count), self.x.start
        lines = polylines((edge, self.y(t), self.x.end, self.y(t)) for t in ticks)
        numbers = [text(tick(form, t), edge - 6, self.y(t) + 4) for t in ticks]
        return (
            element("path", d=lines, stroke=colour("grid"), fill="none")
            + group(numbers, fill=colour("muted"), text_anchor="end")
            + text(label, 2, self.y.end - 10, fill=colour("muted"))
        )

    def bottom(self, label: str, form: Format, count: int = 6) -> str:
        """Return the line, numbers and the name of the horizontal axis."""
        base, middle = self.y.start, (self.x.start + self.x.end) / 2
        numbers = [text(tick(form, t), self.x(t), base + 16) for t in self.x.ticks(count)]
        line = polylines([(self.x.start, base, self.x.end, base)])
        return (
            element("path", d=line, stroke=colour("muted"), fill="none")
            + group(numbers, fill=colour("muted"), text_anchor="middle")
            + text(label, middle, base + 34, fill=colour("muted"), text_anchor="middle")
        )


def polylines(lines: Iterable[tuple[float, float, float, float]]) -> str:
    """Return the ``d`` of a path of separate lines (x1, y1, x2, y2)."""
    return "".join(polyline([(a, b), (c, d)]) for a, b, c, d in lines)


def legend(
    entries: Sequence[tuple[str, str]], box: tuple[float, float, float]
) -> tuple[str, float]:
    """Return marks with their names in lines, and their height.

    ``entries`` are (mark, name), marks 14 wide; ``box`` is (left, top, right).
    """
    left, top, right = box
    x, y, drawn = left, top, []
    for mark, name in entries:
        shown = shortened(name, int((right - left - 20) / CHARACTER))
        width = 20 + CHARACTER * len(shown)
        if x > left and x + width > right:
            x, y = left, y + 18
        moved = group([mark], transform=f"translate({coordinate(x)} {coordinate(y)})")
        drawn.append(moved + text(shown, x + 19, y + 4))
        x += width + 14
    return "".join(drawn), y - top + 18


def padded_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, a little apart where they are equal."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def as_array(values: ArrayLike) -> NDArray[np.float64]:
    """Return values as an array of at least one dimension."""
    return np.atleast_1d(np.asarray(values, np.float64))


def first_names(names: Sequence[str] | Mapping[str, ArrayLike]) -> str:
    """Return the first names for a label."""
    first = [shortened(name, 30) for name in [*names][:10]]
    return ", ".join(first) + f" and {len(names) - 10} more" * (len(names) > 10)


def axis_names(probability: str) -> tuple[str, str]:
    """Return the names of the claimed probability and of what it is compared with.

    >>> axis_names("P(y = 1)"), axis_names("")
    (('P(y = 1)', 'frequency of y = 1'), ('confidence', 'accuracy'))
    """
    if not probability:
        return "confidence", "accuracy"
    return probability, f"frequency of {probability.removeprefix('P(').removesuffix(')')}"
