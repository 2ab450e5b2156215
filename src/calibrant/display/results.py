"""How results show themselves: a line in a console, and a box in a notebook.

A result defines ``__repr__`` with :func:`one_line` and ``_repr_html_`` with
:func:`calibrant.display.html.notebook` around the pieces that are made here. (A mixin would not do:
named tuples have no other bases.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from calibrant._core.messages import printable
from calibrant.display.html import Html, html_table, joined, tag

LONGEST = 20
"""Rows of a table in a notebook; the number of the others is said."""

Kind = Literal["", "good", "warn", "bad"]


def one_line(result: object, *words: str) -> str:
    r"""Return the ``repr`` of a result: its type, and what it says of itself in a line.

    >>> one_line(0.5, "half", "as\nexpected")
    'float(half, as expected)'
    """
    said = ", ".join(" ".join(word.split()) for word in words if word)
    return f"{type(result).__name__}({printable(said)})"


def threshold_text(confidence: float) -> str:
    """Return a threshold with the digits that tell it from 1, which few answers reach.

    >>> threshold_text(0.71843), threshold_text(0.9999955), threshold_text(1.0)
    ('0.7184', '0.99999550', '1.0000')
    """
    distance = 1 - confidence
    digits = 4 if distance <= 0 else max(4, 2 - math.floor(math.log10(distance)))
    return f"{confidence:.{digits}f}"


def heading(title: str, *notes: str) -> Html:
    """Return the title of a result, if there is one, with notes below."""
    above = [tag("p", title, class_="cal-title")] if title else []
    return joined([*above, remarks(notes)])


def verdict(text: str, kind: Kind = "") -> Html:
    """Return a sentence that stands out, marked as good, warning or bad; nothing without text."""
    classes = f"cal-verdict cal-{kind}" if kind else "cal-verdict"
    return tag("p", text, class_=classes) if text else Html()


def remarks(lines: Sequence[str]) -> Html:
    """Return further lines in smaller type."""
    return joined([tag("p", line, class_="cal-note") for line in lines if line])


def facts(values: Mapping[str, object], caption: str = "") -> Html:
    """Return a table of two columns, name and value.

    >>> "<td" in facts({"examples": "1,000"})
    True
    """
    rows = list(values.items())
    return html_table(("", ""), rows, words=(0, 1), caption=caption) if rows else Html()


def long_table(
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    highlighted: Sequence[int] = (),
    words: Sequence[int] = (0,),
) -> Html:
    """Return a table of the first rows, and a line about how many others there are."""
    table = html_table(headings, rows[:LONGEST], highlighted=highlighted, words=words)
    left = len(rows) - LONGEST
    return joined([table, remarks([f"and {left:,} more"])]) if left > 0 else table
