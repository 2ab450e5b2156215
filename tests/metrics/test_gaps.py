"""The debiased error: near the truth where ECE is too large, and a solution of its equation."""

import math

import numpy as np
import pytest
from scipy.stats import chi2

import calibrant as cal
from calibrant._core.binning import fill, uniform_edges
from calibrant.metrics.gaps import BANDWIDTH, gap_curve, gap_deviation
from tests.support.simulate import drawn_pairs


def test_the_debiased_error_is_near_zero_when_calibrated_and_ece_is_not(rng):
    plain, debiased = [], []
    for _ in range(200):
        pairs = drawn_pairs(rng, 500)
        plain.append(cal.ece(confidence=pairs[0], outcome=pairs[1]))
        debiased.append(cal.debiased_ece(confidence=pairs[0], outcome=pairs[1]))
    assert np.mean(plain) > 0.03
    assert np.mean(debiased) < np.mean(plain) / 3
    assert np.mean(np.equal(debiased, 0)) > 0.4
    assert (np.array(debiased) <= np.array(plain) + 1e-15).all()


@pytest.mark.parametrize("gap", [0.05, 0.1, 0.2])
def test_the_debiased_error_is_near_the_truth_when_miscalibrated(rng, gap):
    pairs = [drawn_pairs(rng, 500, gap) for _ in range(150)]
    found = [cal.debiased_ece(confidence=p, outcome=y) for p, y in pairs]
    assert np.mean(found) == pytest.approx(gap, abs=0.01)


def test_the_debiased_error_solves_its_equation(rng):
    """The mean of |s d + noise| over many draws of the noise is the observed sum.

    The d are the gaps of the curve through the observed ones, and the error is s sum |d|.
    """
    confidence, outcome = drawn_pairs(rng, 400, 0.08)
    weight = rng.exponential(size=400)
    found = cal.debiased_ece(confidence=confidence, outcome=outcome, bins=10, sample_weight=weight)
    observed = cal.ece(confidence=confidence, outcome=outcome, bins=10, sample_weight=weight)
    cell = np.ceil(confidence * 10).astype(int) - 1
    residual = weight * (confidence - outcome) / weight.sum()
    gap = np.bincount(cell, residual, 10)
    # each example is in bin b by chance, too: variance of a sum over all of them
    share = weight / weight.sum()
    variance = np.array([((residual * (cell == b) - share * gap[b]) ** 2).sum() for b in range(10)])
    # the mixed term is nearly that of equal weights, which the closed form assumes
    noise = rng.normal(size=(200_000, 10)) * np.sqrt(variance)
    filled = fill(confidence, outcome.astype(float), uniform_edges(10), weight)
    held = filled.weight > 0
    curve = np.zeros(10)
    curve[held] = gap_curve(filled)(filled.confidence[held]) * filled.weight[held] / weight.sum()
    assert np.abs(curve - gap).max() > 1e-3  # smoother than what was observed
    mean = np.abs(found / np.abs(curve).sum() * curve + noise).sum(1).mean()
    assert mean == pytest.approx(observed, rel=0.01)


def test_the_deviation_of_a_gap_is_that_of_a_mean_over_all_examples(rng):
    """A gap is the mean of confidence - outcome, which is 0 for examples of the other bins."""
    confidence, outcome = drawn_pairs(rng, 400, 0.3)
    filled = fill(confidence, outcome.astype(float), uniform_edges(4))
    for b, found in enumerate(gap_deviation(filled)):
        inside = (confidence > b / 4) & (confidence <= (b + 1) / 4)
        terms = np.where(inside, confidence - outcome, 0)
        assert found == pytest.approx(terms.std() / np.sqrt(400))


def test_candidates_follow_a_smooth_curve_unless_the_bins_contradict_it(rng):
    """By a chi-squared test at 1 % of the gaps about the curve, example by example."""
    contradicted = []
    for jump in np.repeat([0.0, 0.1, 0.2], 12):  # up and down from bin to bin
        claimed = rng.uniform(0.2, 0.8, 600)
        number = np.ceil(claimed * 15).astype(int)
        right = rng.random(600) < claimed - jump * (-1.0) ** number
        bins = [number == b for b in np.unique(number)]
        gap = np.array([(claimed - right)[inside].mean() for inside in bins])
        middle, size = ([f(claimed[i]) for i in bins] for f in (np.mean, len))
        smooth, squares = [], 0.0
        for here, own, inside in zip(middle, gap, bins, strict=True):
            near = [math.exp(-(((here - other) / BANDWIDTH) ** 2) / 2) for other in middle]
            smooth.append(np.average(gap, weights=np.array(near) * size))
            likely = (right[inside].sum() + 0.5) / (inside.sum() + 1)
            squares += (own - smooth[-1]) ** 2 / (likely * (1 - likely) / inside.sum())
        contradicted.append(squares > chi2.ppf(0.99, len(bins)))
        curve = gap_curve(fill(claimed, right.astype(float), uniform_edges(15)))
        expected = gap if contradicted[-1] else smooth
        np.testing.assert_allclose(curve(np.array(middle)), expected, atol=1e-9)
    assert sum(contradicted[:12]) <= 1
    assert 0 < sum(contradicted[12:24]) < 12  # near the limit of the test
    assert all(contradicted[24:])
