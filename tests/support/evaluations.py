"""Checks of metrics that trainers and trackers were sent, against an evaluation of all at once."""

import numpy as np
import pytest

import calibrant as cal

FEW = ("accuracy", "ece", "nll")
"""Metrics that are computed in no time."""


def predictions(rng, n=37, classes=3):
    """Logits and labels, a few of them ignored, in float32 as networks give them."""
    logits = rng.normal(size=(n, classes)).astype(np.float32) * 2
    labels = rng.integers(classes, size=n)
    labels[::9] = -100
    return logits, labels


def expected_scalars(evaluation, prefix):
    """Scalars as the documentation describes them, by a plain loop."""
    values = {f"{prefix}n": evaluation.n}
    for name, estimate in evaluation.to_dict()["metrics"].items():
        for end, value in zip(("", "_low", "_high"), estimate.values(), strict=True):
            if value is not None:
                values[f"{prefix}{name}{end}"] = value
    if evaluation.test is not None:
        values[f"{prefix}p_value"] = evaluation.test.p_value
    return values


def check_scalars(
    logged, logits, labels, *, prefix="calibration/", stream=False, tolerance=1e-9, **options
):
    """Logged values under a prefix are those of all examples; their number exactly.

    A ``stream`` without pairs has neither the metrics that need them nor a p-value.
    """
    if stream:
        options["metrics"] = [n for n, metric in cal.METRICS.items() if not metric.needs_pairs]
    result = cal.evaluate(logits, labels, **options)
    wanted = expected_scalars(result, prefix)
    if stream:
        del wanted[f"{prefix}p_value"]
    mine = {name: value for name, value in logged.items() if name.startswith(prefix)}
    assert mine == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    assert mine[f"{prefix}n"] == result.n == (np.asarray(labels) != -100).sum()
