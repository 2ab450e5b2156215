"""Results as frames of pandas and as tables for LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibrant._core.messages import printable, printable_name
from calibrant._core.optional import needed

if TYPE_CHECKING:
    import pandas as pd

_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    "[": "{[}",  # at the start of a line it would be an option of the line break before
}


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame, with None for missing values; pandas is needed only here."""
    with needed("to_frame needs pandas", "pandas; to_dict() has the same values without it"):
        import pandas as pd
    return pd.DataFrame(list(rows))


def columns_frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return arrays ``(n,)`` by name as a frame; pandas is needed only here."""
    rows = zip(*columns.values(), strict=True)
    return frame(dict(zip(columns, row, strict=True)) for row in rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, the first column to the left and the others to the right.

    >>> aligned([["method", "ECE"], ["ts", "0.91 %"]])
    ['method     ECE', 'ts      0.91 %']
    """
    rows = [[printable_name(cell) for cell in row] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    cells = ([row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows)
    return ["  ".join(line).rstrip() for line in cells]


def latex_escaped(text: str) -> str:
    r"""Return text of any origin as LaTeX that prints it.

    >>> print(latex_escaped("top_1 & 50 %"))
    top\_1 \& 50 \%
    """
    plain = " ".join(printable(text).split())
    return re.sub("|".join(map(re.escape, _SPECIAL)), lambda match: _SPECIAL[match[0]], plain)


def latex_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return a ``tabular`` in the style of the package booktabs, whose first column has names.

    A star in front of a figure, as tables on screen mark the best ones, becomes bold type.

    >>> print(latex_table(["method", "ECE %"], [["none", "4.24"], ["ts", "*0.91"]]))
    \begin{tabular}{lr}
    \toprule
    method & ECE \% \\
    \midrule
    none & 4.24 \\
    ts & \textbf{0.91} \\
    \bottomrule
    \end{tabular}
    """

    def line(cells: Sequence[str]) -> str:
        return " & ".join([latex_escaped(cells[0]), *map(_figure, cells[1:])]).rstrip() + r" \\"

    columns = "l" + "r" * (len(headings) - 1)
    body = [r"\toprule", line(headings), r"\midrule", *map(line, rows), r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}"])


def _figure(cell: str) -> str:
    if cell == "-":
        return "--"
    text = latex_escaped(cell.removeprefix("*"))
    return rf"\textbf{{{text}}}" if cell.startswith("*") else text
