"""Scales and axes that charts share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrant.show.style import _coordinate

CHARACTER = 6.4
"""Approximate width of a character in charts."""
PAINTS = ("right", "wrong", "good", "muted", "warn", "bad", "ink") * 10
"""Colours of the palette for one series after the other."""


def path(points: Iterable[tuple[float, float]]) -> str:
    """Return the ``d`` of a path through points; those that round to the same are left out."""
    steps: list[str] = []
    for x, y in points:
        step = f"{_coordinate(x)} {_coordinate(y)}"
        if not steps or steps[-1] != step:
            steps.append(step)
    return "M" + "L".join(steps) if steps else ""


def _shortened(name: object, length: int) -> str:
    """Return a name with an ellipsis in its middle where it is longer than that.

    >>> _shortened("temperature_scaling", 12)
    'temper…aling'
    """
    whole = str(name)
    if len(whole) <= length:
        return whole
    rest = length - 1
    return f"{whole[: rest - rest // 2]}…{whole[len(whole) - rest // 2 :]}"


def _finite(*values: float) -> bool:
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
        return path(self.at(a, b) for a, b in pairs if _finite(a, b))


def _legend_places(
    names: Sequence[str], box: tuple[float, float, float]
) -> tuple[list[tuple[float, float, str]], float]:
    """Return the place of each mark of a legend with its name, and the height of all lines.

    Marks are 14 wide; ``box`` is (left, top, right).
    """
    left, top, right = box
    x, y, places = left, top, []
    for name in names:
        shown = _shortened(name, int((right - left - 20) / CHARACTER))
        width = 20 + CHARACTER * len(shown)
        if x > left and x + width > right:
            x, y = left, y + 18
        places.append((x, y, shown))
        x += width + 14
    return places, y - top + 18


def spread(size: int, count: int) -> list[int]:
    """Return at most ``count`` places of ``size``, evenly spread and with both ends."""
    return sorted({round(k) for k in np.linspace(0, size - 1, min(size, count)).tolist()})


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, a little apart where they are equal."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _as_array(values: ArrayLike) -> NDArray[np.float64]:
    """Return values as an array of at least one dimension."""
    return np.atleast_1d(np.asarray(values, np.float64))


def _first_names(names: Sequence[str] | Mapping[str, ArrayLike]) -> str:
    """Return the first names for a label."""
    first = [_shortened(name, 30) for name in [*names][:10]]
    return ", ".join(first) + f" and {len(names) - 10} more" * (len(names) > 10)


def _axis_names(probability: str) -> tuple[str, str]:
    """Return the names of the claimed probability and of what it is compared with.

    >>> _axis_names("P(y = 1)"), _axis_names("")
    (('P(y = 1)', 'frequency of y = 1'), ('confidence', 'accuracy'))
    """
    if not probability:
        return "confidence", "accuracy"
    return probability, f"frequency of {probability.removeprefix('P(').removesuffix(')')}"
