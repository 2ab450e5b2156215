"""Errors without bins against their definitions: a loop, a linear program, an integral."""

import numpy as np
import pytest

import calibrant as cal
from calibrant.metrics.smooth import (
    _lipschitz_error,
    _lipschitz_excess,
    _smoothed,
    _smoothed_excess,
)
from tests.support.definitions import integrated_ece, lipschitz_program
from tests.support.named_predictions import (
    TIGHT,
    pairs_of,
    predictions,
    weights_and_ties,
    weights_of,
)


@weights_and_ties
def test_ks_equals_a_loop_over_thresholds(rng, name, weigh, digits):
    confidence, outcome = (part[:1000] for part in pairs_of(*predictions(name), digits=digits))
    weight = weights_of(rng, outcome.size, weigh)
    mass = np.ones(outcome.size) if weight is None else weight
    residual = mass * (confidence - outcome) / mass.sum()
    expected = max(abs(residual[confidence <= t].sum()) for t in confidence)
    assert cal.ks(confidence=confidence, outcome=outcome, sample_weight=weight) == pytest.approx(
        expected, abs=TIGHT
    )


@weights_and_ties
def test_smce_is_the_optimum_of_its_linear_program(rng, name, weigh, digits):
    confidence, outcome = (part[:800] for part in pairs_of(*predictions(name), digits=digits))
    weight = weights_of(rng, outcome.size, weigh)
    expected = lipschitz_program(confidence, outcome, weight)
    found = cal.smce(confidence=confidence, outcome=outcome, sample_weight=weight)
    assert found == pytest.approx(expected, abs=1e-9)  # HiGHS stops at 1e-7 of its own scale


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_smce_of_few_points_is_the_optimum_of_its_linear_program(rng, size):
    for _ in range(20):
        confidence = rng.choice([0.0, 1.0, *rng.random(4)], size)
        outcome = rng.random(size) < 0.5
        expected = lipschitz_program(confidence, outcome)
        assert cal.smce(confidence=confidence, outcome=outcome) == pytest.approx(expected, abs=1e-9)


def test_smce_needs_the_bound_on_the_witness():
    """All wrong by 1 at both ends: a 1-Lipschitz witness of [-1, 1] reaches 0 in between."""
    confidence, outcome = np.array([0.0, 1.0]), np.array([1, 0])
    assert lipschitz_program(confidence, outcome) == pytest.approx(0.5)
    assert cal.smce(confidence=confidence, outcome=outcome) == pytest.approx(0.5, abs=TIGHT)


@weights_and_ties
def test_smooth_ece_is_the_integral_at_a_bandwidth_equal_to_itself(rng, name, weigh, digits):
    """It is computed on 4096 cells, so each confidence moves by at most 1.2e-4 of the unit."""
    confidence, outcome = (part[:2000] for part in pairs_of(*predictions(name), digits=digits))
    weight = weights_of(rng, outcome.size, weigh)
    found = cal.smooth_ece(confidence=confidence, outcome=outcome, sample_weight=weight)
    expected = integrated_ece(confidence, outcome, found, weight)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("shape", [(0.5, 0.5), (2.0, 2.0), (1.0, 3.0)])
def test_smooth_ece_of_any_distribution_is_the_integral(rng, shape):
    confidence = rng.beta(*shape, 500)
    outcome = rng.random(500) < confidence**1.5
    found = cal.smooth_ece(confidence=confidence, outcome=outcome)
    assert found == pytest.approx(integrated_ece(confidence, outcome, found), abs=1e-4)


@pytest.mark.parametrize(
    ("error", "excess", "cells"),
    [(_smoothed, _smoothed_excess, 128), (_lipschitz_error, _lipschitz_excess, 40)],
)
@pytest.mark.parametrize("shift", [0.0, 0.03, -0.03])
def test_errors_are_compared_with_a_bound_as_they_are_computed(rng, error, excess, cells, shift):
    """Errors next to the bound, and the bound itself, are among them."""
    residual = (shift + rng.normal(0, 0.1, (300, cells))) / cells
    errors = error(residual)
    for bound in (0.0, *np.quantile(errors, [0.02, 0.5, 0.98])):
        for near in (bound * (1 - 1e-9), bound * (1 + 1e-9)):
            np.testing.assert_array_equal(np.sign(excess(residual, near)), np.sign(errors - near))
    assert excess(np.zeros((2, cells)), 0.0).tolist() == [0, 0]


@pytest.mark.parametrize("residual", np.geomspace(3e-5, 3e-4, 7))
def test_smooth_ece_is_at_most_the_mean_residual(residual):
    """Kernels narrower than a cell of the mesh would lift it above."""
    confidence = 1 - residual * np.array([0.8, 1.2])
    found = cal.smooth_ece(confidence=confidence, outcome=np.ones(2))
    assert 0 < found <= residual * (1 + 1e-9)
