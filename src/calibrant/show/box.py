"""The boxes of results, on a terminal and in a notebook, found by the class of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeAlias

from calibrant._core.messages import printable
from calibrant.show.html import Html, _notebook, _rendered
from calibrant.show.tables import Table

Kind = Literal["", "good", "warn", "bad"]


class Callout(NamedTuple):
    """A sentence that stands out; nothing is shown of an empty one."""

    text: str
    kind: Kind = ""


class Chart:
    """A chart that is drawn where a page shows it: a terminal needs none.

    >>> Chart("<svg>{}</svg>".format, 5).__html__()
    '<svg>5</svg>'
    """

    def __init__(self, draw: Callable[..., str], *data: Any, **options: Any) -> None:
        self._draw = partial(draw, *data, **options)

    def __html__(self) -> Html:
        return Html(self._draw())


Part: TypeAlias = "Table | Html | Chart | Beside | Box"
"""A table, a chart, several of them side by side, or a box inside."""


@dataclass(frozen=True)
class Beside:
    """Parts in a row, below each other where the page is narrow; empty ones are left out."""

    parts: Sequence[Part]

    def __html__(self) -> Html:
        return _rendered("beside.html", parts=self.parts)


@dataclass(frozen=True)
class Box:
    """A title with lines about the examples, callouts, tables and charts, and remarks.

    >>> scores = Box("Scores", ["2 examples"], parts=[Table(("", "ECE"), [("all", "1 %")])])
    >>> print(scores.text())
    2 examples
         ECE
    all  1 %
    """

    title: str = ""
    about: Sequence[str] = ()
    callouts: Sequence[Callout] = ()
    parts: Sequence[Part] = ()
    remarks: Sequence[str] = ()

    def __html__(self) -> Html:
        return _rendered("box.html", box=self)

    def notebook(self) -> str:
        """Return the box as the output of a notebook cell."""
        return _notebook(self)

    def text(self) -> str:
        """Return everything but title and charts for a terminal, where the last line is read."""
        tables = [table.text() for table in self.tables()]
        said = [callout.text for callout in self.callouts]
        lines = [*self.about, *tables, *self.remarks, *said]
        return printable("\n".join(filter(None, lines)))

    def latex(self) -> str:
        """Return the tables for LaTeX, with the package booktabs."""
        return "\n\n".join(table.latex() for table in self.tables())

    def tables(self) -> Iterator[Table]:
        """Yield the tables in order, those of boxes inside too."""
        for part in self.parts:
            if isinstance(part, Table):
                yield part
            elif isinstance(part, (Box, Beside)):
                yield from Box(parts=part.parts).tables()


def box(result: object) -> Box:
    """Return the title, sentences, tables and charts of a result."""
    _import_shows_of(result)
    return box_of(result)


def draw(result: object, *data: Any, **options: Any) -> Any:
    """Draw a result with matplotlib, and return the axes, or the figure of several."""
    _import_shows_of(result)
    return _drawing_of(result, *data, **options)


def _import_shows_of(result: object) -> None:
    """Import the modules of this package that know the class of a result and its bases."""
    for kind in type(result).__mro__:
        top, _, below = kind.__module__.partition(".")
        module = f"calibrant.show.{below.partition('.')[0]}"
        if top == "calibrant" and find_spec(module):
            import_module(module)


@singledispatch
def box_of(result: object) -> Box:
    """Return a box; what is registered here is for one class."""
    raise TypeError(f"a {type(result).__name__} has no box: register one with box_of")


@singledispatch
def _drawing_of(result: object, *data: Any, **options: Any) -> Any:
    """Draw a figure; what is registered here is for one class."""
    raise TypeError(f"a {type(result).__name__} has no figure: register one with drawing_of")
