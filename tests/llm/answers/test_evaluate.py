"""Calibration of answers."""

import math

import numpy as np
import pytest
from scipy.stats import binom

import calibrant as cal
from calibrant.llm.answers.evaluate import evaluate_answers
from calibrant.workflows.evaluate import evaluate


def test_values_equal_the_metrics(rng):
    sure = rng.random(700)
    right = rng.random(700) < sure**2
    found = evaluate_answers(sure, right)
    assert found["accuracy"].value == pytest.approx(right.mean())
    assert found["ece"].value == pytest.approx(cal.ece(confidence=sure, outcome=right))
    assert found["brier"].value == pytest.approx(((sure - right) ** 2).mean())
    assert found["auroc"].value == pytest.approx(cal.auroc(confidence=sure, outcome=right))
    assert found["aurc"].value == pytest.approx(cal.aurc(confidence=sure, outcome=right))
    loss = [-math.log(p if y else 1 - p) for p, y in zip(sure, right, strict=True)]
    assert found["nll"].value == pytest.approx(np.mean(loss))
    for e in found.values():
        assert e.low <= e.value <= e.high
    assert found["ece"].low > 0.1  # claims are sure, truths their squares
    assert "700 answers" in str(found)
    assert found.test is not None


def test_confidences_of_zero_and_one():
    found = evaluate_answers([1.0, 1.0, 0.0, 0.5, 0.9], [1, 0, 0, 1, 1])
    assert math.isfinite(found["nll"].value)
    plain = evaluate_answers([0.6, 0.7], [1, 0], level=None)
    assert all(math.isnan(e.low) for e in plain.values())


def test_intervals_cover(rng, monkeypatch):
    """Those that evaluate_answers makes itself; the others are tested with the metrics."""
    once = evaluate(rng.normal(size=300), rng.integers(2, size=300), estimand="binary")
    monkeypatch.setattr("calibrant.llm.answers.evaluate.evaluate", lambda *args, **options: once)
    held = dict.fromkeys(("accuracy", "brier"), 0)
    for _ in range(100):
        sure = rng.uniform(0.2, 0.8, 300)
        right = rng.random(300) < sure
        found = evaluate_answers(sure, right)
        truth = {"accuracy": 0.5, "brier": 0.25 - 0.6**2 / 12}
        for name, value in truth.items():
            held[name] += found[name].low <= value <= found[name].high
    assert min(held.values()) >= binom.ppf(1e-3, 100, 0.9), held
