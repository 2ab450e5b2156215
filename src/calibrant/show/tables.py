"""Tables in every form: text, HTML, Markdown and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from calibrant._core.messages import printable, printable_name
from calibrant.show.html import Html, _markdown_escaped, _rendered

LONGEST = 20
"""Rows of a table in a notebook; the number of the others is said."""
MIN_SCALE = 5.0
"""Gap in points that reaches an end of its cell, if none in the column is larger."""
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    "[": "{[}",  # at the start of a line it would be an option of the line break before
}


@dataclass(frozen=True)
class Table:
    r"""Cells as text, of which the first of each row is its name.

    A star in front of a figure marks it as one of the best: it becomes bold type, and stays a star
    where there is none.

    Parameters
    ----------
    headings : sequence of str
        Those of columns without a name are empty.
    rows : sequence of sequences of str
    words : collection of int
        Columns of words, which are set to the left; figures are set to the right.
    highlighted : collection of int
        Rows that stand out.
    caption : str
    longest : int, optional
        Rows that HTML shows; the number of the others stands below.
    bars : int, optional
        Column of gaps in points, behind which pages draw bars.

    Examples
    --------
    >>> table = Table(("method", "ECE %"), [("none", "4.24"), ("ts", "*0.91")])
    >>> print(table.text())
    method  ECE %
    none     4.24
    ts      *0.91
    >>> print(table.markdown())
    | method | ECE % |
    | :-- | --: |
    | none | 4.24 |
    | ts | **0.91** |
    >>> print(table.latex())
    \begin{tabular}{lr}
    \toprule
    method & ECE \% \\
    \midrule
    none & 4.24 \\
    ts & \textbf{0.91} \\
    \bottomrule
    \end{tabular}
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    highlighted: Collection[int] = ()
    caption: str = ""
    longest: int | None = None
    bars: int | None = None

    def text(self) -> str:
        """Return lines of aligned columns."""
        head = [self.headings] if any(self.headings) else []
        rows = [[printable_name(cell) for cell in row] for row in (*head, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(
                cell.ljust(width) if k in self.words else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    def __html__(self) -> Html:
        rows = self.rows[: self.longest]
        return _rendered("table.html", table=self, rows=rows, left=len(self.rows) - len(rows))

    def captioned(self, caption: str) -> Html:
        """Return the table as HTML with a caption."""
        return replace(self, caption=caption).__html__()

    def bar(self, gap: str) -> tuple[str, str]:
        """Return the direction of a gap, and its bar in percent of the cell: at most a half."""
        gaps = [
            abs(float(row[self.bars].removesuffix(" %")))
            for row in self.rows
            if self.bars is not None and row[self.bars] not in ("-", "")
        ]
        points = float(gap.removesuffix(" %"))
        return ("over" if points > 0 else "under"), f"{abs(points) / max(*gaps, MIN_SCALE) / 2:.0%}"

    def markdown(self) -> str:
        """Return the table in the dialect of GitHub; names of rows that stand out are bold."""

        def shown(number: int, column: int, cell: str) -> str:
            text, best = self.cell(column, cell)
            bold = best or (column == 0 and number in self.highlighted)
            return f"**{_markdown_escaped(text)}**" if bold and text else _markdown_escaped(text)

        rule = [":--" if k in self.words else "--:" for k in range(len(self.headings))]
        rows = ([shown(n, k, c) for k, c in enumerate(row)] for n, row in enumerate(self.rows))
        lines = [list(map(_markdown_escaped, self.headings)), rule, *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def latex(self) -> str:
        """Return a ``tabular`` in the style of the package booktabs."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join(cells).rstrip() + r" \\"

        def shown(cell: str, best: bool) -> str:
            text = "--" if cell == "-" else _latex_escaped(cell)
            return rf"\textbf{{{text}}}" if best else text

        columns = "".join("l" if k in self.words else "r" for k in range(len(self.headings)))
        rows = (
            line([shown(*self.cell(k, cell)) for k, cell in enumerate(row)]) for row in self.rows
        )
        body = [r"\toprule", line([*map(_latex_escaped, self.headings)]), r"\midrule", *rows]
        frame = [rf"\begin{{tabular}}{{{columns}}}", *body, r"\bottomrule", r"\end{tabular}"]
        return "\n".join(frame)

    def cell(self, column: int, text: str) -> tuple[str, bool]:
        """Return the text of a cell without its star, and whether it had one."""
        best = column not in self.words and text.startswith("*")
        return (text[1:], True) if best else (text, False)


def facts(values: Mapping[str, object], caption: str = "") -> Table:
    """Return a table of two columns, name and value."""
    rows = [(name, str(value)) for name, value in values.items()]
    return Table(("", ""), rows, words=(0, 1), caption=caption)


def _latex_escaped(text: str) -> str:
    r"""Return text of any origin as LaTeX that prints it.

    >>> print(_latex_escaped("top_1 & 50 %"))
    top\_1 \& 50 \%
    """
    plain = " ".join(printable(text).split())
    return re.sub("|".join(map(re.escape, _LATEX)), lambda match: _LATEX[match[0]], plain)
