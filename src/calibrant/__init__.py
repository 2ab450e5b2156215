"""Measure and fix the confidence of classifiers and language models.

>>> import calibrant as cal
>>> cal.ece([[2.0, 0.0], [1.0, 0.0]], [0, 1])
0.425...
"""

from __future__ import annotations

import ast
import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrant import (
        artifacts as artifacts,
        calibrators as calibrators,
        data as data,
        decide as decide,
        deploy as deploy,
        estimate as estimate,
        integrations as integrations,
        llm as llm,
        losses as losses,
        metrics as metrics,
        monitor as monitor,
        show as show,
        slices as slices,
        ui as ui,
        workflows as workflows,
    )
    from calibrant._api import *  # noqa: F403

    __all__: list[str]
    __version__: str
else:  # type checkers would take any name for known

    def __getattr__(name: str) -> Any:
        """Import public names and packages on first use, so that ``calibrant --help`` is quick."""
        if name == "__version__":
            try:
                return str(import_module("calibrant._version").version)  # written by every build
            except ModuleNotFoundError:  # a checkout that was never installed
                return "unknown"
        if name == "__all__":
            return sorted(_homes())
        if not name.startswith("_"):
            if name in _homes():
                value = globals()[name] = getattr(import_module(_homes()[name]), name)
                return value
            if name in _packages():
                return import_module(f"calibrant.{name}")
        from calibrant._core.messages import no_attribute

        raise no_attribute("calibrant", name, __dir__())


def __dir__() -> list[str]:
    return [*_homes(), "__version__", *_packages()]


@cache
def _homes() -> dict[str, str]:
    """Module of each public name, read from ``_api.py`` without importing anything."""
    listed = ast.parse(pkgutil.get_data("calibrant", "_api.py") or b"").body
    imports = [node for node in listed if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@cache
def _packages() -> list[str]:
    modules = pkgutil.iter_modules(__path__)  # noqa: F405
    return [module.name for module in modules if not module.name.startswith("_")]
