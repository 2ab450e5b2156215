"""Accuracy and proper scores against their definitions."""

import numpy as np
import pytest
from scipy.special import softmax

import calibrant as cal
from tests.support.named_predictions import TIGHT, predictions, weights_and_ties, weights_of
from tests.support.simulate import drawn


@weights_and_ties
def test_brier_is_the_sum_of_squares_over_the_classes(rng, name, weigh, digits):
    logits, labels = predictions(name)
    weight = weights_of(rng, labels.size, weigh)
    off = softmax(logits, axis=-1) - np.eye(logits.shape[1])[labels]
    expected = np.average((off**2).sum(-1), weights=weight)
    assert cal.brier(logits, labels, sample_weight=weight) == pytest.approx(expected, abs=TIGHT)


def test_extreme_logits_are_stable():
    found = cal.evaluate(np.array([[1e4, 0.0], [0.0, 1e4]]), [0, 0], level=None)
    assert found["nll"].value == pytest.approx(5000)
    assert found["ece"].value == pytest.approx(0.5)


@pytest.mark.parametrize("score", [cal.nll, cal.brier])
def test_a_proper_score_is_best_at_the_true_temperature(rng, score):
    logits, labels = drawn(rng, 20_000, 4, 1.5)
    at = {t: score(logits / t, labels) for t in (0.7, 1.0, 1.5, 2.2, 4.0)}
    assert min(at, key=lambda t: at[t]) == 1.5
