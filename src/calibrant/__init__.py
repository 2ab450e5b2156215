"""Make classifiers and language models say how sure they are, and mean it.

>>> import calibrant as cal
>>> cal.ece([[2.0, 0.0], [1.0, 0.0]], [0, 1])
0.425...
"""

from __future__ import annotations

import ast
import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrant._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import public names and packages on first use, so that ``calibrant --help`` is quick."""
    if name == "__version__":
        return _version()
    if name == "__all__":
        return sorted(_homes())
    if not name.startswith("_"):
        if name in _homes():
            value = globals()[name] = getattr(import_module(_homes()[name]), name)
            return value
        if name in _packages():
            return import_module(f"calibrant.{name}")
    raise AttributeError(f"module 'calibrant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_homes(), "__version__", *_packages()]


@cache
def _homes() -> dict[str, str]:
    """Module of each public name, read from ``_api.py`` without importing anything."""
    listed = ast.parse(Path(__file__).with_name("_api.py").read_text("utf-8")).body
    imports = [node for node in listed if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@cache
def _packages() -> list[str]:
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name for module in modules if not module.name.startswith("_")]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("calibrant")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"
