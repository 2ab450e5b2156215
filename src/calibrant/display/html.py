"""Text and tables as HTML that is safe whatever the data hold."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

from calibrant._core.messages import printable
from calibrant.display.palette import DARK, LIGHT


def escaped(text: object) -> str:
    """Return text of any origin as HTML that shows it: markup and control characters are inert.

    >>> escaped("<b>cat & dog</b>")
    '&lt;b&gt;cat &amp; dog&lt;/b&gt;'
    """
    return html.escape(printable(str(text)), quote=True)


class Html(str):
    """A piece of HTML that is complete and safe; everything else is escaped where it is used."""

    __slots__ = ()


def tag(name: str, *content: object, **attributes: str) -> Html:
    """Return an element of HTML; content that is not :class:`Html` is escaped.

    ``class_`` stands for ``class``; an attribute without text is left out.

    >>> tag("p", "a < b ", tag("b", "bold"), class_="cal-note")
    '<p class="cal-note">a &lt; b <b>bold</b></p>'
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value}
    start = "".join(f' {key}="{escaped(value)}"' for key, value in named.items())
    return Html(f"<{name}{start}>{joined(content)}</{name}>")


def joined(content: Iterable[object]) -> Html:
    """Return pieces after each other; what is not :class:`Html` is escaped.

    >>> joined(["1 < 2, ", tag("i", "so")])
    '1 &lt; 2, <i>so</i>'
    """
    return Html("".join(c if isinstance(c, Html) else escaped(c) for c in content))


def html_table(
    headings: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    highlighted: Collection[int] = (),
    words: Collection[int] = (0,),
    caption: str = "",
) -> Html:
    """Return a table; columns ``words`` are set to the left, all others as numbers.

    The first cell of each row is its heading. Rows ``highlighted`` have the class ``cal-chosen``.

    >>> html_table(["class", "ECE %"], [["<b>", "1.2"]])[-81:]
    '<tr><th scope="row">&lt;b&gt;</th><td class="cal-n">1.2</td></tr></tbody></table>'
    """
    kinds = ["" if k in words else "cal-n" for k in range(len(headings))]
    top = [
        # a heading without words would be read out as one
        tag("th", heading, scope="col", class_=kind) if heading else tag("td")
        for heading, kind in zip(headings, kinds, strict=True)
    ]
    body = [
        tag("tr", *_cells(row, kinds), class_="cal-chosen" if k in highlighted else "")
        for k, row in enumerate(rows)
    ]
    said = [tag("caption", caption)] if caption else []
    head = [tag("thead", tag("tr", *top))] if any(headings) else []
    return tag("table", *said, *head, tag("tbody", *body))


def _cells(row: Sequence[object], kinds: Sequence[str]) -> list[Html]:
    first, *others = row
    cells = [tag("td", c, class_=kind) for c, kind in zip(others, kinds[1:], strict=True)]
    return [tag("th", first, scope="row"), *cells]


def side_by_side(*parts: str) -> Html:
    """Return pieces of HTML in a row, below each other where the page is narrow."""
    boxes = (f'<div class="cal-part">{part}</div>' for part in parts if part)
    return Html(f'<div class="cal-parts">{"".join(boxes)}</div>')


def notebook(*content: str) -> str:
    """Return pieces of HTML as the output of a notebook cell, with their style.

    The colours follow the theme of JupyterLab, VS Code, Colab and Sphinx, else that of the system.
    Nothing outside the box changes, and there is no script.
    """
    return f'<div class="cal"><style>{style_sheet()}</style>{"".join(content)}</div>'


def page(title: str, *content: str) -> str:
    """Return a whole page that needs no other file, light or dark as the system is."""
    box = notebook(tag("h1", title, class_="cal-title"), *content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title></head><body><main>{box}</main></body></html>"
    )


DARK_PAGES = (
    "[data-jp-theme-light=false]",  # JupyterLab
    "body.vscode-dark",
    "body.vscode-high-contrast",
    "html[theme=dark]",  # Colab
    "[data-theme=dark]",  # Sphinx themes
)
LIGHT_PAGES = (
    "[data-jp-theme-light=true]",
    "body.vscode-light",
    "html[theme=light]",
    "[data-theme=light]",
)


def style_sheet() -> str:
    """Return the style of :func:`notebook`, all of it for ``.cal`` and what is inside."""
    light, dark = LIGHT.css_variables(), DARK.css_variables()
    on_light, on_dark = (
        ",".join(f"{page} .cal" for page in pages) for pages in (LIGHT_PAGES, DARK_PAGES)
    )
    return (
        f".cal{{{light}}}@media (prefers-color-scheme:dark){{.cal{{{dark}}}}}"
        f"{on_light}{{{light}}}{on_dark}{{{dark}}}{RULES}"
    )


# the class is doubled to be stronger than the rules that notebooks have for tables
RULES = """
.cal.cal{background:var(--cal-paper);color:var(--cal-ink);border:1px solid var(--cal-grid);
border-radius:8px;padding:12px 16px;margin:4px 0;max-width:920px;
font:14px/1.45 system-ui,sans-serif;text-align:left;overflow-x:auto}
.cal.cal *{box-sizing:border-box}
.cal.cal p{margin:4px 0;color:inherit;max-width:75ch}
.cal.cal .cal-title{font-size:16px;font-weight:600;margin:0 0 2px}
.cal.cal .cal-note{color:var(--cal-muted);font-size:13px}
.cal.cal .cal-verdict{max-width:none;border-left:4px solid var(--cal-muted);padding:4px 10px;
margin:8px 0;background:var(--cal-panel);border-radius:0 4px 4px 0}
.cal.cal .cal-good{border-color:var(--cal-good)}
.cal.cal .cal-warn{border-color:var(--cal-warn)}
.cal.cal .cal-bad{border-color:var(--cal-bad)}
.cal.cal .cal-parts{display:flex;flex-wrap:wrap;gap:12px 32px;align-items:flex-start}
.cal.cal .cal-part{flex:0 1 auto;min-width:min(100%,280px);max-width:100%;overflow-x:auto}
.cal.cal .cal-part>svg{min-width:280px;width:400px!important;max-width:100%!important}
.cal.cal table{border-collapse:collapse;border:0;margin:6px 0;font-size:13px;color:inherit;
background:none;table-layout:auto;width:auto}
.cal.cal caption{text-align:left;color:var(--cal-muted);padding:2px 0;caption-side:top}
.cal.cal tr,.cal.cal tbody tr:nth-child(n){background:none;color:inherit}
.cal.cal th,.cal.cal td{text-align:left;padding:3px 14px 3px 0;border:0;
border-bottom:1px solid var(--cal-grid);font-weight:400;color:inherit;vertical-align:baseline;
background:none;max-width:none;white-space:normal}
.cal.cal td.cal-n,.cal.cal th.cal-n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}
.cal.cal thead th{color:var(--cal-muted);font-size:12px;vertical-align:bottom}
.cal.cal tbody tr:hover{background:var(--cal-panel)}
.cal.cal tbody tr.cal-chosen,.cal.cal tbody tr.cal-chosen:hover{
background:color-mix(in srgb,var(--cal-right) 14%,transparent)}
.cal.cal tr.cal-chosen th,.cal.cal b{font-weight:600}
.cal.cal code{background:var(--cal-panel);color:inherit;padding:1px 4px;border-radius:3px;
font-size:12.5px}
.cal.cal details{margin:6px 0}
.cal.cal summary{cursor:pointer;color:var(--cal-muted)}
""".replace("\n", "")
