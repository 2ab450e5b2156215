"""Parts of examples: tests of their gaps, adjusted for their number."""

import numpy as np
import pytest
from scipy.stats import binomtest

import calibrant as cal
from calibrant._core.binning import Bins, fill
from calibrant.show.report.model import (
    _merged_bins,
    _noise,
    _parts_of,
    binomial_test,
    holm,
)


@pytest.mark.parametrize(
    ("right", "n", "p"), [(0, 7, 0.3), (7, 7, 0.9), (45, 100, 0.6), (3, 4, 0.5)]
)
def test_the_binomial_test_is_twice_the_smaller_tail(right, n, p):
    tails = [binomtest(right, n, p, alternative=side).pvalue for side in ("less", "greater")]
    assert binomial_test(right, n, p) == pytest.approx(min(1.0, 2 * min(tails)))


def test_holm_by_its_definition():
    p_values = [0.01, 0.04, 0.03, 0.005]
    # sorted: 4 * 0.005, 3 * 0.01, 2 * 0.03, 1 * 0.04, each at least the one before
    assert holm(p_values) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_calibrated_parts_of_differing_confidences_are_rarely_rejected():
    rng = np.random.default_rng(0)
    rejected = 0
    for _ in range(400):
        confidence = rng.beta(4, 1, 60)
        bins = fill(confidence, (rng.random(60) < confidence).astype(float), np.array([0.0, 1.0]))
        (part,) = _parts_of(bins, ["all"], 0.9)
        rejected += part.p_value < 0.05
    assert rejected / 400 <= 0.05


def test_parts_count_weights_and_leave_out_what_is_empty():
    confidence, outcome = np.array([0.2, 0.9, 0.7]), np.array([0.0, 1.0, 0.0])
    weight = np.array([1.0, 3.0, 1.0])
    bins = fill(confidence, outcome, np.array([0.0, 0.1, 0.5, 1.0]), weight)
    low, high = _parts_of(bins, ["none", "low", "high"], 0.9)
    assert (low.name, low.n, high.name, high.n) == ("low", 1, "high", 2)
    assert high.share == pytest.approx(0.8)
    assert high.confidence == pytest.approx((3 * 0.9 + 0.7) / 4)
    assert high.accuracy == pytest.approx(0.75)
    assert high.gap == pytest.approx(high.confidence - 0.75)
    assert high.low < 0.75 < high.high


@pytest.mark.parametrize("n", [3, 60, 400])
def test_bins_are_joined_until_they_have_enough_examples(n):
    rng = np.random.default_rng(n)
    confidence = np.concatenate([rng.beta(8, 2, n), np.full(30, 0.05)])
    fine = fill(confidence, (rng.random(n + 30) < confidence) * 1.0, np.arange(16) / 15)
    bins = _merged_bins(fine)
    assert set(bins.edges) <= set(fine.edges)
    assert (bins.edges[0], bins.edges[-1]) == (0, 1)
    assert all(count == 0 or count >= 25 for count in bins.count)
    for name in ("count", "weight", "claimed", "observed"):
        assert getattr(bins, name).sum() == pytest.approx(getattr(fine, name).sum())
    if n > 3:  # nothing is joined with examples that are far away
        assert bins.count[0] == 30
        assert bins.count[1] == 0


def test_no_examples_have_no_parts():
    assert _parts_of(Bins.empty(np.arange(4.0)), ["a", "b", "c"], 0.9) == []


@pytest.mark.parametrize("n", [40, 150, 300])
def test_the_usual_error_is_that_of_calibrated_models(n):
    """By the mean over many models whose labels are drawn from their probabilities."""
    found, usual = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        logits = 2 * rng.normal(size=n)
        labels = (logits + rng.logistic(size=n) > 0).astype(int)
        result = cal.evaluate(logits, labels, metrics=["ece"], level=None)
        found.append(result["ece"].value)
        usual.append(_noise(result.bins))
    assert np.mean(usual) == pytest.approx(np.mean(found), rel=0.08)
    assert np.std(usual) < np.std(found) / 2
