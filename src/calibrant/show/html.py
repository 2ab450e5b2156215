"""HTML from templates, safe whatever the data hold."""

from __future__ import annotations

import html
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from calibrant._core.messages import printable
from calibrant.show.style import DARK, LIGHT, _coordinate, tick

if TYPE_CHECKING:
    from jinja2 import Environment

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


_MARKDOWN = re.compile(r"([\\`*_\[\]{}|~#$!])")
_ENTITIES = {
    **{"&": "&amp;", "<": "&lt;", ">": "&gt;"},
    **{"@": "&#64;", "://": "&#58;//", "www.": "www&#46;"},
}
"""Markup, and what GitHub makes links of."""


class Html(str):
    """A piece of HTML that is complete and safe; templates escape everything else."""

    __slots__ = ()

    def __html__(self) -> Html:
        return self


@cache
def _templates() -> Environment:
    """Return the templates of this package, which escape what is not HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("calibrant.show"),
        autoescape=lambda name: not str(name).endswith(".md"),
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {"unbroken": _unbroken, "md": _markdown_escaped}
    made.filters |= {"xy": _coordinate, "tick": lambda value, form: tick(form, value)}
    return made


def _visible(value: Any) -> Any:
    """Return what a template was given, with control characters as text."""
    return value if hasattr(value, "__html__") else printable(str(value))


def escaped(text: object) -> str:
    """Return text of any origin as HTML that shows it: markup and control characters are inert.

    >>> escaped("<b>cat & dog</b>")
    '&lt;b&gt;cat &amp; dog&lt;/b&gt;'
    """
    return html.escape(printable(str(text)), quote=True)


def _rendered(template: str, **values: Any) -> Html:
    r"""Return a template filled with values; those that are not HTML are escaped.

    >>> from calibrant.show.box import Box
    >>> print(_rendered("box.html", box=Box("a < b\x1b")))
    <p class="cal-title">a &lt; b\x1b</p>
    """
    return Html(_templates().get_template(template).render(**values))


def _unbroken(text: str) -> str:
    """Return text whose percentages and intervals are not torn apart at the end of a line."""
    return re.sub(r"(?<=\d) (?=%)|(?<=\d,) (?=[\d.]+\])", "\u00a0", text)


def _asset(name: str) -> Html:
    """Return a file beside the templates as it is."""
    return Html(files("calibrant.show").joinpath("templates", name).read_text("utf-8"))


def _notebook(*content: object) -> str:
    """Return pieces of HTML as the output of a notebook cell, with their style.

    The colours follow the theme of JupyterLab, VS Code, Colab and Sphinx, else that of the system.
    Nothing outside the box changes, and there is no script.
    """
    return _rendered("notebook.html", style=_style_sheet(), content=content)


@cache
def _style_sheet() -> Html:
    """Return the style of :func:`_notebook`, all of it for ``.cal`` and what is inside."""
    on_light, on_dark = (
        ",".join(f"{page} .cal" for page in pages) for pages in (LIGHT_PAGES, DARK_PAGES)
    )
    light, dark = LIGHT.css_variables(), DARK.css_variables()
    colours = {"light": light, "dark": dark, "on_light": on_light, "on_dark": on_dark}
    text = (
        _templates().get_template("notebook.css").render({k: Html(v) for k, v in colours.items()})
    )
    return Html("".join(text.splitlines()))


def _markdown_escaped(text: object) -> str:
    r"""Return text of any origin as Markdown that shows it.

    >>> print(_markdown_escaped("<b>*cat* | dog"))
    &lt;b&gt;\*cat\* \| dog
    """
    plain = _MARKDOWN.sub(r"\\\1", " ".join(printable(str(text)).split()))
    for raw, safe in _ENTITIES.items():
        plain = plain.replace(raw, safe)
    return plain
