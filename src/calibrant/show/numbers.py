"""Numbers as text, as charts and tables have them."""

from __future__ import annotations

import re
from collections.abc import Callable

Format = Callable[[float], str]
"""Text of a number, as axes and hovers show it."""


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

    >>> coordinate(12.04), coordinate(0.25), coordinate(-0.01)
    ('12', '0.2', '0')
    """
    shown = f"{value:.1f}".removesuffix(".0")
    return "0" if shown == "-0" else shown
