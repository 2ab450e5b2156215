"""All metrics by name, from the tables in the modules of this package."""

from __future__ import annotations

from itertools import chain

from calibrant._core.options import Registry, tables
from calibrant.metrics.summary import Metric

ORDER = ("binned", "smooth", "scores", "ranking")
"""Modules whose metrics come first, after accuracy."""
READERS = {"accumulator", "clustered", "evaluation", "registry"}
"""Modules that need the result, and have no table."""


def _metrics() -> list[Metric]:
    package = __name__.rpartition(".")[0]
    metrics = chain.from_iterable(tables(package, ORDER, READERS))
    return sorted(metrics, key=lambda metric: metric.name != "accuracy")


METRICS = Registry("metric", {metric.name: metric for metric in _metrics()})
"""Every metric of :func:`calibrant.evaluate`, by its name on the command line and in JSON."""
