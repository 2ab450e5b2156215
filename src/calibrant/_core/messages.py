"""Wording that errors share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def comma_separated(names: Iterable[str]) -> str:
    """Join names for an error message; "nothing" if there are none."""
    return ", ".join(names) or "nothing"


def unknown_name(
    kind: str, name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> ValueError:
    """Return the error for a name that does not exist, with the nearest one that does.

    >>> unknown_name("method", "tss", ["none", "ts"], {"temperature": "ts"})
    ValueError("unknown method 'tss': did you mean ts? choose from none, ts")
    """
    names, aliases = list(known), aliases or {}
    near = difflib.get_close_matches(plain_name(name), [*names, *aliases], n=1)
    hint = f"did you mean {aliases.get(near[0], near[0])}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}: {hint}choose from {comma_separated(names)}")


def plain_name(name: object) -> str:
    """Return a name as typed in lower case, with underscores for dashes and blanks."""
    return str(name).strip().lower().replace("-", "_").replace(" ", "_")
