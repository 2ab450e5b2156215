"""Forms of results that need to know nothing of them: JSON, frames and lines for consoles.

What a result looks like on a terminal, in a notebook and as a figure is known to
:mod:`calibrant.show`, a package above, which is imported when somebody looks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from calibrant._core.messages import needed, printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = 1
"""Version of all JSON: another one where keys change their meaning or go, not where some come."""


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


def json_text(content: Mapping[str, Any]) -> str:
    """Return JSON that every reader takes, with the version of the format first.

    >>> print(json_text({"ece": float("nan")}))
    {
      "format": 1,
      "ece": null
    }
    """
    return json.dumps({"format": FORMAT, **plain(content)}, indent=2, allow_nan=False)


def plain(content: Any) -> Any:
    """Return content without figures that are undefined or infinite, and with text that is Unicode.

    Names of files that are not UTF-8 have lone surrogates, which are escaped.
    """
    if isinstance(content, Mapping):
        return {plain(key): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, str):
        return content.encode("utf-8", "backslashreplace").decode("utf-8")
    return content


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame, with None for missing values; pandas is needed only here."""
    with needed("to_frame needs pandas", "pandas; to_dict() has the same values without it"):
        import pandas as pd
    return pd.DataFrame(list(rows))


def columns_frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return arrays ``(n,)`` by name as a frame; pandas is needed only here."""
    rows = zip(*columns.values(), strict=True)
    return frame(dict(zip(columns, row, strict=True)) for row in rows)
