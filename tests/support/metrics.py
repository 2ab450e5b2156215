"""Which metrics suit which data."""

import calibrant as cal

ANY_CLASSES = [name for name, metric in cal.METRICS.items() if not metric.two_classes_only]
"""Metrics of any number of classes: all that are in evaluations of more than two."""


def classes_for(name, several):
    """Number of classes of examples for a metric: several where it takes them, else two."""
    return several if name in ANY_CLASSES else 2
