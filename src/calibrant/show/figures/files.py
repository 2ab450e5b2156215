"""Figures as files."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import warn
from calibrant._core.messages import comma_separated
from calibrant.show.figures.look import figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GLYPH = re.compile(r"Glyph (\d+) .*missing from .*font")
SUFFIXES = (".pdf", ".png", ".svg")
DPI = 300


def check_suffix(out: str | os.PathLike[str]) -> str:
    """Return the suffix of a file for a figure, or raise.

    >>> check_suffix("figure.PDF")
    '.pdf'
    """
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES:
        known = comma_separated(SUFFIXES)
        raise ValueError(f"figures are written as {known}, got {os.fspath(out)}: change the suffix")
    return suffix


def save_figure(drawn: Axes | Figure, out: str | os.PathLike[str]) -> None:
    """Write what a drawing function returned to a file: ``.pdf``, ``.png`` or ``.svg``.

    The file is replaced as a whole. The same figure gives the same bytes: no date is written.
    PDF files have TrueType fonts, which journals ask for, and PNG files 300 dots per inch.

    Parameters
    ----------
    drawn : Axes or Figure
    out : path

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.metrics import reliability
    >>> axes = reliability(confidence=[0.9, 0.8], outcome=[1, 0]).plot()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_figure(axes, f"{folder}/reliability.svg")
    """
    import matplotlib

    suffix = check_suffix(out)
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    settings: Any = {"pdf.fonttype": 42, "svg.hashsalt": "calibrant"}
    with replacing(Path(out)) as temporary, matplotlib.rc_context(settings), _one_warning():
        figure_of(drawn).savefig(temporary, format=suffix[1:], dpi=DPI, metadata=dates.get(suffix))


@contextmanager
def _one_warning() -> Iterator[None]:
    """Warn once of all characters that no font has, where matplotlib warns of each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    missing = {m[1] for w in caught if (m := GLYPH.search(str(w.message)))}
    for other in (w for w in caught if not GLYPH.search(str(w.message))):
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    if missing:
        warn(
            f"no font here has {len(missing)} of the characters, which are drawn as boxes: install "
            "one for the script of these names, such as Noto Sans CJK"
        )
