"""Wording that errors share."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    """Names for an error message."""
    return ", ".join(names) or "nothing"
