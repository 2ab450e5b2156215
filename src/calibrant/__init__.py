"""Make classifiers and language models say how sure they are, and mean it.

>>> import calibrant as cal
>>> cal.ece([0.9, 0.6], [1, 0])
0.35
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrant._api import *  # noqa: F403

_PACKAGES = (
    *("bench", "calibrators", "data", "decide", "deploy", "llm", "losses", "metrics"),
    *("monitor", "plots", "retrain", "workflows"),
)


def __getattr__(name: str) -> Any:
    """Import public names and packages on first use, so that ``calibrant --help`` is quick."""
    if name == "__version__":
        return _version()
    if name in _PACKAGES:
        return import_module(f"calibrant.{name}")
    if name == "__all__":
        return _public_names()
    if not name.startswith("_") and name in _public_names():
        value = globals()[name] = getattr(import_module("calibrant._api"), name)
        return value
    raise AttributeError(f"module 'calibrant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_public_names(), "__version__", *_PACKAGES]


def _public_names() -> list[str]:
    return sorted(name for name in vars(import_module("calibrant._api")) if name[0] != "_")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("calibrant")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"
