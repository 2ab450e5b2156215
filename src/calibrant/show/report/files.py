"""Files of reports, whose form is told by their suffix."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import comma_separated

SUFFIXES = (".html", ".md", ".json")
ALIASES = {".htm": ".html", ".markdown": ".md"}


def form_of(path: str | os.PathLike[str]) -> str:
    """Return the form that the suffix of a path stands for; an error for others.

    >>> form_of("report.HTM")
    '.html'
    """
    suffix = Path(path).suffix.lower()
    suffix = ALIASES.get(suffix, suffix)
    if suffix not in SUFFIXES:
        raise ValueError(
            f"a report is written as {comma_separated(SUFFIXES)}, got {Path(path).name}"
        )
    return suffix


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise if a report cannot be written there, before it is made."""
    form_of(path)
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"folder {Path(path).parent} does not exist; create it first")


def write_form(path: str | os.PathLike[str], forms: Mapping[str, Callable[[], str]]) -> None:
    """Write the form of the suffix; the file is replaced as a whole, or stays as it was."""
    text = forms[form_of(path)]()
    with replacing(Path(path)) as temporary:
        # halves of characters, as in file names that are not UTF-8, are written as escapes
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
