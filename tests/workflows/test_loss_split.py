"""The split of losses into calibration and refinement."""

import numpy as np
import pytest

import calibrant as cal
from calibrant.workflows.loss_split import loss_split
from tests.support.simulate import drawn


@pytest.mark.parametrize("weighted", [False, True])
def test_terms_are_the_losses_before_and_after_a_cross_fit(rng, weighted):
    logits, labels = drawn(rng, 900, 4, 1.8)
    weight = rng.exponential(size=900) if weighted else None
    found = loss_split(logits, labels, sample_weight=weight)
    fitted = cal.cross_fit(logits, labels, method="ts", sample_weight=weight)
    for name, terms in found.items():
        before, after = fitted.effect.before[name].value, fitted.effect.after[name].value
        values = [term.value for term in terms]
        assert values == pytest.approx([before, before - after, after], abs=1e-6)
        assert all(term.low < term.value < term.high for term in terms)
        # differences vary less than the losses
        assert np.ptp(terms.calibration[1:]) < np.ptp(terms.total[1:]) / 2


def test_terms_equal_those_of_probmetrics():
    """1.3.0: MetricsWithCalibration of "temp-scaling", with a splitter of the same five folds."""
    logits, labels = drawn(np.random.default_rng(0), 900, 4, 1.8)
    found = loss_split(logits, labels)
    nll, brier = ([term.value for term in found[name][1:]] for name in ("nll", "brier"))
    assert nll == pytest.approx([0.13609212261134, 1.10396376431981], abs=1e-7)
    assert brier == pytest.approx([0.03728512031653, 0.59560930258084], abs=1e-7)


def test_the_calibration_term_is_that_of_the_truth():
    hits = 0
    for seed in range(20):
        logits, labels = drawn(np.random.default_rng(seed), 1000, 4, 1.8)
        low, high = loss_split(logits, labels, seed=seed)["nll"].calibration[1:]
        hits += low <= TRUTH <= high
    assert hits >= 15


def true_saving():
    logits, labels = drawn(np.random.default_rng(99), 400_000, 4, 1.8)
    return cal.nll(logits, labels) - cal.nll(logits / 1.8, labels)


TRUTH = true_saving()


def test_other_methods_probabilities_and_tags(rng):
    z = 2 * rng.normal(size=600)
    clicked = (rng.random(600) < 1 / (1 + np.exp(1.5 - z))).astype(int)
    with pytest.warns(UserWarning, match="keeps predictions, so that"):
        scaled = loss_split(z, clicked)["nll"].calibration.value
    shifted = loss_split(probs=1 / (1 + np.exp(-z)), labels=clicked, method="sigmoid")["nll"]
    assert shifted.calibration.value > scaled + 0.05  # a temperature cannot shift
    tags = rng.integers(0, 2, (200, 3))
    logits = 3 * (tags - 0.5) + 4 * rng.normal(size=tags.shape)
    found = loss_split(logits, tags, method="pooled", estimand="multilabel")
    assert found["brier"].calibration.value > 0.01
