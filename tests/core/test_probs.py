"""Probabilities become logits, and zeros among them count as something."""

import functools

import numpy as np
import pytest
from scipy.special import softmax

from calibrant._core.probs import Zeros, logits_from_probs


def test_zeros_count_as_half_of_the_smallest_other_probability():
    votes = np.array([[0.9, 0.1, 0.0], [0.3, 0.5, 0.2], [1.0, 0.0, 0.0]])
    zeros = Zeros.among(votes)
    assert (zeros.exact, zeros.total) == (3, 9)
    assert zeros.floor(3) == pytest.approx(0.05)
    assert Zeros.among(np.eye(4)).floor(4) == 1 / 8  # the others are all 1: of half a chance
    # of class 1, whose complement is rounded: 0.9999999999999999 is 1
    assert Zeros.among(np.array([0.25, 1 - 1e-16, 0.0, 0.8])).floor(2) == pytest.approx(0.1)
    assert Zeros.among(np.array([0.25, 1 - 6e-8, 0.0, 0.8], np.float32)).floor(2) == pytest.approx(
        0.1
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_of_a_softmax_are_negligible(rng, dtype):
    logits = 40 * rng.normal(size=(2000, 5))
    probs = softmax(logits, -1).astype(dtype)
    assert (probs == 0).any() == (dtype == np.float32)
    assert 5e-13 <= Zeros.among(probs).floor(5) < 6e-13
    assert Zeros.among(softmax(logits / 100, -1)).floor(5) == 1e-12  # none that is so small


def test_zeros_of_parts_are_those_of_the_whole(rng):
    probs = np.round(rng.dirichlet(np.full(3, 0.3), 60), 2)
    whole = Zeros.among(probs)
    assert 0 < whole.exact < whole.total
    parts = [Zeros.among(part) for part in np.split(probs, [7, 30])]
    assert functools.reduce(Zeros.plus, parts, Zeros()) == whole


def test_logarithms_of_zeros():
    probs = np.array([[1.0, 0.0], [1 - 1e-60, 1e-60]])
    np.testing.assert_allclose(logits_from_probs(probs)[:, 1], -100)
    np.testing.assert_allclose(logits_from_probs(probs, floor=0.1)[:, 1], np.log(0.1))
    np.testing.assert_allclose(logits_from_probs(probs[:, 1]), -100)  # log-odds
    np.testing.assert_allclose(logits_from_probs(probs, tags=True)[0], [100, -100])
