"""The table of metrics. A new one stands in the table of its own module."""

from __future__ import annotations

from calibrant._core.messages import resolve_name
from calibrant.metrics.binned import BINNED_ERRORS
from calibrant.metrics.ranking import RANKINGS
from calibrant.metrics.scores import ACCURACY, PROPER_SCORES
from calibrant.metrics.smooth import ERRORS_WITHOUT_BINS
from calibrant.metrics.summary import Metric

METRICS: dict[str, Metric] = {
    **ACCURACY,
    **BINNED_ERRORS,
    **ERRORS_WITHOUT_BINS,
    **PROPER_SCORES,
    **RANKINGS,
}
"""Every metric of :func:`calibrant.evaluate`, by its name on the command line and in JSON."""

_ALIASES = {alias: name for name, metric in METRICS.items() for alias in metric.aliases}


def metric_name(name: str) -> str:
    """Return the name in :data:`METRICS` for a name as typed: any case, or an alias.

    >>> metric_name("ECE"), metric_name("Brier score")
    ('ece', 'brier')
    """
    return resolve_name("metric", name, METRICS, _ALIASES)
