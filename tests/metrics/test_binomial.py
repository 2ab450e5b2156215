"""Binomial variables at quantiles that are drawn once."""

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from calibrant.metrics.gaps import RARE, SINGLE, Binomials, _drawn


@pytest.mark.parametrize("size", [1, 5, 40, 3000])
def test_hits_are_the_quantiles_of_scipy(rng, size):
    trials = rng.integers(0, 2 * size, (400, 30)).astype(float)
    chance = np.linspace(0, 1, 30)
    variables = Binomials(trials, rng.random(trials.shape))
    hits = variables.hits(chance)
    expected = np.clip(binom.ppf(variables.uniform, trials, chance), 0, trials)  # -1 of none
    off = hits - expected
    rare = np.minimum(trials * chance, trials * (1 - chance)) < RARE - 1e-9
    assert (off[rare] == 0).all()
    assert np.abs(off).max() <= 1
    assert (off != 0).mean() < 0.025
    assert abs(off.mean()) < 0.005


def test_hits_only_rise_with_the_chance(rng):
    """But where one way of computing quantiles takes over from the other, by one hit."""
    trials = rng.integers(0, 60, (300, 4)).astype(float)
    variables = Binomials(trials, rng.random(trials.shape))
    hits = np.stack([variables.hits(np.full(4, p)) for p in np.linspace(0, 1, 301)])
    steps = np.diff(hits, axis=0)
    assert (steps >= 0).mean() > 0.999
    assert steps.min() >= -1
    np.testing.assert_array_equal(hits[0], 0)
    np.testing.assert_array_equal(hits[-1], trials)


@pytest.mark.parametrize("trials", [1, 3, SINGLE, SINGLE + 1, 50])
def test_draws_have_the_distribution_of_hits(rng, trials):
    """Both where each trial is drawn and where their sum is."""
    hits = _drawn(rng, np.array([trials, 1]), np.array([0.3, 1.0]), 20_000)
    assert (hits[1] == 1).all()
    expected = 20_000 * binom.pmf(np.arange(trials + 1), trials, 0.3)
    seen = np.bincount(hits[0].astype(int), minlength=trials + 1)
    usual = expected >= 5
    seen, expected = (np.append(x[usual], x[~usual].sum()) for x in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3
