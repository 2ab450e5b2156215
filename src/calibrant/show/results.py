"""The box and the figure of a result, found by its class."""

from __future__ import annotations

from functools import singledispatch
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from calibrant.show.box import Box


def box(result: object) -> Box:
    """Return the title, sentences, tables and charts of a result."""
    _import_shows_of(result)
    return box_of(result)


def draw(result: object, *data: Any, **options: Any) -> Any:
    """Draw a result with matplotlib, and return the axes, or the figure of several."""
    _import_shows_of(result)
    return drawing_of(result, *data, **options)


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
def drawing_of(result: object, *data: Any, **options: Any) -> Any:
    """Draw a figure; what is registered here is for one class."""
    raise TypeError(f"a {type(result).__name__} has no figure: register one with drawing_of")
