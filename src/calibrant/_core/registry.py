"""Registries: methods, metrics and losses by the names that people type."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from calibrant._core.messages import plain_name, unknown_name

T = TypeVar("T")


class Registry(dict[str, T]):
    """Entries by name, which are found in any case, with dashes or blanks, and by their aliases.

    >>> class TemperatureScaling:
    ...     aliases = ("temperature",)
    >>> methods = Registry("method", {"ts": TemperatureScaling})
    >>> methods["Temperature"].__name__, list(methods)
    ('TemperatureScaling', ['ts'])
    """

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        super().__init__(entries)
        self.kind = kind
        self.aliases: dict[str, str] = {
            alias: name
            for name, entry in entries.items()
            for alias in getattr(entry, "aliases", ())
        }

    def has(self, typed: str) -> bool:
        """Return True if a name as people type it is that of an entry."""
        plain = plain_name(typed)
        return plain in self or plain in self.aliases

    def name(self, typed: str) -> str:
        """Return the name of an entry for a name as people type it."""
        if not self.has(typed):
            raise unknown_name(self.kind, typed, self, self.aliases)
        plain = plain_name(typed)
        return self.aliases.get(plain, plain)

    def __missing__(self, typed: str) -> T:
        try:
            return self[self.name(typed)]
        except ValueError as problem:
            raise KeyError(str(problem)) from None


def tables(package: str, first: Sequence[str], without: Collection[str] = ()) -> Iterator[Any]:
    """Yield the ``TABLE`` of each module of a package that has one; some modules come first."""
    modules = pkgutil.iter_modules(sys.modules[package].__path__)
    others = sorted({module.name for module in modules} - {*first, *without})
    for name in (*first, *others):
        table = vars(import_module(f"{package}.{name}")).get("TABLE")
        if table is not None:
            yield table
