"""Calibrators by name, found in the modules of this package."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from calibrant._core.chunks import EstimandChoice
from calibrant._core.messages import comma_separated
from calibrant._core.options import Registry, options_of, unknown_option
from calibrant.calibrators.base import Calibrator

PACKAGE = "calibrant.calibrators"
ORDER = (
    *("scaling", "affine", "class_temperatures", "rank_gaps"),
    *("network", "smart", "confidence_maps", "histogram", "isotonic"),
    *("features.group_calibration", "features.proximity", "features.clipping"),
)
"""Order of the modules in lists of methods; others come after these, ``auto`` last."""


def _calibrators(*, multilabel: bool = False) -> Iterator[type[Calibrator]]:
    """Yield the classes that declare a ``name``, by module, then in the order of definition."""
    prefix = f"{PACKAGE}."
    modules = pkgutil.walk_packages(sys.modules[PACKAGE].__path__, prefix)
    names = [module.name.removeprefix(prefix) for module in modules if module.name != __name__]
    place = {name: i for i, name in enumerate(ORDER)} | {"auto": len(names) + len(ORDER)}
    for name in sorted(names, key=lambda name: (place.get(name, len(ORDER)), name)):
        module = import_module(prefix + name)
        for kind in vars(module).values():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            named = own and issubclass(kind, Calibrator) and vars(kind).get("name")
            if named and kind.multilabel == multilabel:
                yield kind


_KINDS = list(_calibrators())
CALIBRATORS = Registry("method", {kind.name: kind for kind in _KINDS if not kind.part_of_auto})
"""Every calibrator of exclusive classes by its name on the command line and in saved files."""
PARTS = Registry("part of auto", {kind.name: kind for kind in _KINDS if kind.part_of_auto})
"""Calibrators that ``auto`` is made of: understood as methods, and listed after these."""
TAG_CALIBRATORS = Registry(
    "multi-label method", {kind.name: kind for kind in _calibrators(multilabel=True)}
)
"""Every calibrator of tags by its name on the command line."""


def calibrators_for(estimand: EstimandChoice) -> Registry[type[Calibrator]]:
    """Return the calibrators of tags if the estimand is ``"multilabel"``, else the others."""
    return TAG_CALIBRATORS if estimand == "multilabel" else CALIBRATORS


def find_calibrator(typed: str, estimand: EstimandChoice = "auto") -> tuple[str, type[Calibrator]]:
    """Return name and class of a method, or of a part of ``auto``, for a name as people type it."""
    registry = calibrators_for(estimand)
    if registry is CALIBRATORS and PARTS.has(typed):
        registry = PARTS
    name = registry.name(typed)
    return name, registry[name]


def make_calibrator(
    method: str | Calibrator,
    options: Mapping[str, Any] | None = None,
    estimand: EstimandChoice = "auto",
) -> Calibrator:
    """Return an unfitted calibrator by its name and the arguments of its constructor.

    A calibrator that is given must be for the estimand.

    >>> make_calibrator("temperature", {"objective": "brier"})
    TemperatureScaling(objective='brier', not fitted)
    """
    if isinstance(method, Calibrator):
        if options:
            raise TypeError(
                f"options go with the name of a method, got {comma_separated(options)} beside a "
                f"{type(method).__name__}: pass them to its constructor"
            )
        method.estimand_for(estimand)
        return method
    if not isinstance(method, str):
        got, remedy = f"a {type(method).__name__}", "arrays go into fit(logits, labels) of a method"
        if isinstance(method, type):
            got, remedy = f"the class {method.__name__}", f"pass {method.__name__}()"
        raise TypeError(f"method must be a name or a calibrator, got {got}: {remedy}")
    (name, kind), options = find_calibrator(method, estimand), options or {}
    known = options_of(kind)
    for option in options:
        if option not in known:
            raise unknown_option(name, option, known)
    return kind(**options)
