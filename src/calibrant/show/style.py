"""Colours and numbers, as everything that calibrant draws has them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Palette:
    """Colours for one kind of paper, as ``#rrggbb``."""

    paper: str
    panel: str  # of boxes on the paper
    ink: str
    muted: str  # of notes, ticks and counts
    grid: str
    right: str  # accuracy, right answers, "after"
    wrong: str  # gaps, wrong answers, "before"
    good: str
    warn: str
    bad: str

    def css_variables(self) -> str:
        """Declare the colours as ``--cal-NAME`` for a rule of CSS."""
        return " ".join(f"--cal-{f.name}: {getattr(self, f.name)};" for f in fields(self))


LIGHT = Palette(
    paper="#ffffff",
    panel="#f5f7f9",
    ink="#1c2733",
    muted="#566370",
    grid="#dde3e9",
    right="#2372ab",
    wrong="#b94a12",
    good="#1d7a45",
    warn="#8f5a00",
    bad="#b3261e",
)
DARK = Palette(
    paper="#14181d",
    panel="#1d232a",
    ink="#e6eaee",
    muted="#a3aeb9",
    grid="#333c46",
    right="#6db3e6",
    wrong="#f0935c",
    good="#62cb8e",
    warn="#e2ad52",
    bad="#f28b82",
)


def themes() -> str:
    """Return CSS that declares the colours: by the system, unless ``data-theme`` is set.

    >>> themes().count("--cal-paper")
    5
    """
    light, dark = LIGHT.css_variables(), DARK.css_variables()
    return (
        f':root, :root[data-theme="light"] {{ {light} }}\n'
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f':root[data-theme="light"] {{ {light} }}\n:root[data-theme="dark"] {{ {dark} }}\n'
        f"@media print {{ :root, :root[data-theme] {{ {light} }} }}\n"
    )


Format = Callable[[float], str]
"""Text of a number, as axes and hovers show it."""


def _plain(value: float) -> str:
    """Return a number with three significant digits.

    >>> _plain(0.12345), _plain(1500), _plain(2e9)
    ('0.123', '1500', '2e+09')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e5 else f"{value:.3g}"


def percent(value: float, digits: int = 1) -> str:
    """Return a fraction as percent; a dash where it is undefined.

    >>> percent(0.0424), percent(float("nan"))
    ('4.2 %', '-')
    """
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f} %"


def _short_percent(value: float) -> str:
    """Return a fraction as percent for a chart, with one decimal where it matters.

    >>> _short_percent(0.1234), _short_percent(0.2)
    ('12.3 %', '20 %')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def points(value: float) -> str:
    """Return a difference of fractions in points."""
    return f"{100 * value:.1f} points"


def tick(form: Format, value: float) -> str:
    """Return the number of a tick, without zeros at the end of its decimals.

    >>> tick("{:.2f} %".format, 2.5), tick(_plain, 100)
    ('2.5 %', '100')
    """
    shown = form(value)
    return re.sub(r"\.?0+(?=$| )", "", shown) if "." in shown else shown


def _coordinate(value: float) -> str:
    """Return a coordinate as text, rounded to a tenth.

    >>> _coordinate(12.04), _coordinate(0.25), _coordinate(-0.01)
    ('12', '0.2', '0')
    """
    shown = f"{value:.1f}".removesuffix(".0")
    return "0" if shown == "-0" else shown
