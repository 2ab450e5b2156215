"""Wording that errors share, and names as people type them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def comma_separated(names: Iterable[str]) -> str:
    """Join names for an error message; "nothing" if there are none."""
    return ", ".join(names) or "nothing"


def resolve_name(
    kind: str, name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """Return the known name for a name as typed: in any case, with dashes, or an alias.

    >>> resolve_name("metric", "Smooth-ECE", ["ece", "smooth_ece"])
    'smooth_ece'
    """
    plain = _plain(name)
    plain = (aliases or {}).get(plain, plain)
    if plain not in known:
        raise unknown_name(kind, name, known, aliases)
    return plain


def unknown_name(
    kind: str, name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> ValueError:
    """Return the error for a name that does not exist, with the nearest one that does.

    >>> unknown_name("method", "tss", ["none", "ts"], {"temperature": "ts"})
    ValueError("unknown method 'tss': did you mean ts? choose from none, ts")
    """
    names, aliases = list(known), aliases or {}
    near = difflib.get_close_matches(_plain(name), [*names, *aliases], n=1)
    hint = f"did you mean {aliases.get(near[0], near[0])}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}: {hint}choose from {comma_separated(names)}")


def _plain(name: object) -> str:
    return str(name).strip().lower().replace("-", "_").replace(" ", "_")
