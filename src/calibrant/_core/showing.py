"""How results find the functions that show them, which lie in a package above.

A result is data. What it looks like on a terminal, in a notebook and as a figure is known to
:mod:`calibrant.show`, which is imported when somebody looks; only a line for consoles is made here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from calibrant._core.messages import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def as_html(result: object) -> str:
    """Return the ``_repr_html_`` of a result: a box for notebooks."""
    from calibrant import show

    return show.box(result).notebook()


def as_text(result: object) -> str:
    """Return the ``str`` of a result: its tables and what they mean, for terminals."""
    from calibrant import show

    return show.box(result).text()


def as_latex(result: object) -> str:
    """Return the tables of a result for LaTeX, with the package booktabs."""
    from calibrant import show

    return show.box(result).latex()


def as_markdown(result: object) -> str:
    """Return the tables of a result in the dialect of GitHub."""
    from calibrant import show

    return "\n\n".join(table.markdown() for table in show.box(result).tables())


def as_axes(result: object, *data: Any, **options: Any) -> Axes:
    """Draw a result with matplotlib, in one diagram."""
    axes: Axes = as_drawing(result, *data, **options)
    return axes


def as_figure(result: object, *data: Any, **options: Any) -> Figure:
    """Draw a result with matplotlib, in several diagrams."""
    figure: Figure = as_drawing(result, *data, **options)
    return figure


def as_drawing(result: object, *data: Any, **options: Any) -> Any:
    """Draw a result with matplotlib; returns axes, or a figure of several diagrams."""
    from calibrant import show

    return show.draw(result, *data, **options)
