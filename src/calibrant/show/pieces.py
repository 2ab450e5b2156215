"""Pieces of HTML for boxes that are put together by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from calibrant.show.box import Box, Kind, Verdict
from calibrant.show.html import Html as Html, notebook as notebook, page as page, rendered
from calibrant.show.tables import Table


def html_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], highlighted: Collection[int] = ()
) -> Html:
    """Return a table."""
    return Table(headings, rows, highlighted=highlighted).__html__()


def joined(pieces: Sequence[object]) -> Html:
    """Return pieces after each other; what is not HTML is escaped."""
    return rendered("joined.html", pieces=pieces)


def heading(title: str, *notes: str) -> Html:
    """Return the title of a result, if there is one, with notes below."""
    return Box(title, notes).__html__()


def verdict(text: str, kind: Kind = "") -> Html:
    """Return a sentence that stands out, marked as good, warning or bad; nothing without text."""
    return Box(verdicts=[Verdict(text, kind)]).__html__()


def remarks(lines: Sequence[str]) -> Html:
    """Return further lines in smaller type."""
    return Box(remarks=lines).__html__()
