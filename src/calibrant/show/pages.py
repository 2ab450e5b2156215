"""Pages and Markdown of reports: frames, commands to copy, and files by their suffix."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import comma_separated, printable
from calibrant.show.html import Html, _asset, _rendered, _style_sheet
from calibrant.show.style import themes

Severity = Literal["good", "info", "warn", "bad"]
SEVERITIES: tuple[Severity, ...] = ("good", "info", "warn", "bad")
"""From harmless to serious."""
SEVERITY_NAMES: dict[Severity, str] = {
    **{"bad": "serious", "warn": "warning", "info": "note", "good": "good"}
}
"""Severities as readers see them."""
SEVERITY_MARKS: dict[Severity, str] = {"bad": "🔴", "warn": "🟠", "info": "🔵", "good": "🟢"}
"""Severities in Markdown."""
SUFFIXES = (".html", ".md", ".json")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


class Snippet(NamedTuple):
    """Commands or code to copy."""

    title: str
    language: str
    code: str


def document(
    template: str, title: str, subtitle: str, links: Iterable[object], **values: Any
) -> Html:
    """Return a page that extends ``page.html``: one file that fetches nothing.

    ``links`` are the anchors of its sections with their names.
    """
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    frame = {"style": Html(themes() + _asset("page.css")), "script": script}
    policy = f"{POLICY}; script-src 'sha256-{digest}'"
    about = {"title": title, "subtitle": subtitle, "links": links, "policy": Html(policy)}
    return _rendered(template, **frame, **about, **values)


def page(title: str, *content: object) -> str:
    """Return a whole page that needs no other file, light or dark as the system is."""
    return _rendered("plain_page.html", title=title, style=_style_sheet(), content=content)


def _fenced(language: str, code: str) -> str:
    """Return code in a Markdown fence that is longer than any in it."""
    longest = max(map(len, re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(code)}\n{fence}"


def check_target(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a report; an error where such a file cannot be written.

    >>> check_target("report.HTM")
    '.html'
    """
    suffix = Path(path).suffix.lower()
    suffix = {".htm": ".html", ".markdown": ".md"}.get(suffix, suffix)
    if suffix not in SUFFIXES:
        raise ValueError(
            f"a report is written as {comma_separated(SUFFIXES)}, got {Path(path).name}"
        )
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"folder {Path(path).parent} does not exist; create it first")
    return suffix


def _write_form(path: str | os.PathLike[str], forms: Mapping[str, Callable[[], str]]) -> None:
    """Write the form of the suffix; the file is replaced as a whole, or stays as it was."""
    text = forms[check_target(path)]()
    with replacing(Path(path)) as temporary:
        # lone surrogates, as in file names that are not UTF-8, are written as escapes
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
