"""Evaluations have the figures of the single metrics, in intervals that hold them."""

import math
from typing import Any

import numpy as np

import calibrant as cal
from tests.fuzz.accumulators import some_metrics
from tests.fuzz.examples import random_examples


def check(rng: np.random.Generator) -> None:
    """Evaluate legal examples with intervals, by subgroup now and then."""
    examples = random_examples(rng)
    if not examples.legal:
        return
    data = (examples.passed, examples.labels)
    by = rng.integers(2, size=len(examples.labels)) if rng.random() < 0.2 else None
    level = float(rng.choice([0.5, 0.9, 0.99]))
    options: dict[str, Any] = {"metrics": some_metrics(rng, examples), "level": level}
    found = cal.evaluate(*data, sample_weight=examples.weight, by=by, **options)
    assert found.n == examples.kept.sum()
    for name, (value, low, high) in found.items():
        expected = cal.METRICS[name].compute(*data, sample_weight=examples.weight)
        same = math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)
        assert same or (math.isnan(value) and math.isnan(expected)), (name, value, expected)
        within = low <= high and low <= value + 1e-9 and value <= high + 1e-9
        # the debiased value may lie below the interval of the error, and undefined ones have none
        assert math.isnan(low) or within or name == "debiased_ece", (name, value, low, high)
        assert math.isnan(low) == math.isnan(high), (name, low, high)
    for evaluation in found.by.values():
        assert set(evaluation) == set(found)
        assert str(evaluation)
