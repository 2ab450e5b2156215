"""The frame of a page: one file that fetches nothing, with its style and script inside."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from calibrant.display.html import Html, html_table, joined, tag
from calibrant.display.palette import themes
from calibrant.reports.content import Snippet, Table

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
GAP = "gap"
"""Heading of the column whose numbers have bars."""
WIDEST = 0.3
"""Gap whose bar fills its cell."""


@cache
def _asset(name: str) -> str:
    return files("calibrant.reports").joinpath(name).read_text("utf-8")


def document(title: str, subtitle: str, links: Sequence[tuple[str, str]], *main: Html) -> str:
    """Return a whole page: its title, links to sections, and what is in it."""
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"{tag('title', title)}<style>{themes()}{_asset('page.css')}</style>"
    )
    body = (
        tag("a", "Skip to the content", class_="skip", href="#main"),
        _header(title, subtitle),
        _navigation(links),
        tag("main", *main, id="main", class_="wrap"),
        _footer(),
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body>{joined(body)}<script>{script}</script></body></html>\n"
    )


def _header(title: str, subtitle: str) -> Html:
    words = tag(
        "div",
        tag("p", "calibrant", class_="brand"),
        tag("h1", title),
        tag("p", subtitle, class_="muted small"),
    )
    button = tag("button", "Dark theme", type="button", class_="theme", hidden="hidden")
    return tag("header", tag("div", words, button, class_="wrap"), class_="top")


def _navigation(links: Sequence[tuple[str, str]]) -> Html:
    items = [tag("li", tag("a", text, href=f"#{target}")) for target, text in links]
    inside = tag("div", tag("ul", *items), class_="wrap")
    return tag("nav", inside, class_="sections", aria_label="Sections")


def _footer() -> Html:
    words = "Made by calibrant. This file holds sums and figures, no examples, and fetches nothing."
    return tag("footer", tag("div", words, class_="wrap"))


def section(name: str, heading: Html, *content: Html | str) -> Html:
    """Return a section with an anchor."""
    return tag("section", heading, *content, class_="part", id=name)


def scrollable(table: Table, caption: str, *, name: str = "", kind: str = "") -> Html:
    """Return a table that scrolls by itself where the page is narrow; its gaps have bars."""
    rows = [list(row) for row in table.rows]
    if GAP in table.headings:
        column = list(table.headings).index(GAP)
        rows = [[*row[:column], _gap(row[column]), *row[column + 1 :]] for row in rows]
    inside = html_table(
        table.headings, rows, highlighted=table.highlighted, words=table.words, caption=caption
    )
    return tag(
        "div",
        inside,
        class_=f"scroll {kind}".strip(),
        id=name,
        tabindex="0",
        role="group",
        aria_label=caption,
    )


def _gap(text: str) -> Html | str:
    """Return a gap in points with a bar behind it, orange where the model is over-confident."""
    if text == "-":
        return text
    gap = float(text.removesuffix(" %")) / 100
    width = 100 * min(abs(gap) / WIDEST, 1)
    kind = "over" if gap > 0 else "under"
    return tag("span", text, class_=f"gap {kind}", style=f"--g:{width:.0f}%")


def unbroken(text: str) -> str:
    """Return text whose percentages and intervals are not torn apart at the end of a line."""
    return re.sub(r"(?<=\d) (?=%)|(?<=\d,) (?=[\d.]+\])", "\u00a0", text)


def chart(svg: str, caption: str) -> Html:
    """Return a chart with its caption."""
    return tag("figure", tag("figcaption", caption), Html(svg), class_="chart card")


def snippet(each: Snippet) -> Html:
    """Return code with a button that copies it."""
    button = tag(
        "button",
        "Copy",
        type="button",
        class_="copy",
        hidden="hidden",
        aria_label=f"Copy: {each.title}",
    )
    code = tag("pre", tag("code", each.code), tabindex="0", role="group", aria_label=each.title)
    return tag("figure", tag("figcaption", each.title, button), code, class_="snippet")
