"""All metrics by name, from the tables in the modules of this package."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

from calibrant._core.messages import resolve_name
from calibrant.metrics.summary import Metric

ORDER = ("binned", "smooth", "scores", "ranking")
"""Modules whose metrics come first, after accuracy."""
READERS = {"accumulator", "evaluation", "registry"}
"""Modules that need the result, and have no table."""


def _metrics() -> list[Metric]:
    package = __name__.rpartition(".")[0]
    names = {module.name for module in pkgutil.iter_modules(sys.modules[package].__path__)}
    names -= {*READERS, *ORDER}
    modules = [import_module(f"{package}.{name}") for name in (*ORDER, *sorted(names))]
    metrics = [metric for module in modules for metric in getattr(module, "TABLE", ())]
    return sorted(metrics, key=lambda metric: metric.name != "accuracy")


METRICS: dict[str, Metric] = {metric.name: metric for metric in _metrics()}
"""Every metric of :func:`calibrant.evaluate`, by its name on the command line and in JSON."""
_ALIASES = {alias: name for name, metric in METRICS.items() for alias in metric.aliases}


def metric_name(name: str) -> str:
    """Return the name in ``METRICS`` for a name as typed: any case, or an alias.

    >>> metric_name("ECE"), metric_name("Brier score")
    ('ece', 'brier')
    """
    return resolve_name("metric", name, METRICS, _ALIASES)
