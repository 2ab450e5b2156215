"""Pairs in fine bins: metrics to within a bin, and intervals by a Poisson bootstrap."""

import numpy as np
import pytest
from scipy.stats import binom

import calibrant as cal
from calibrant._core.binning import fill, uniform_edges
from calibrant.metrics import summary
from calibrant.metrics.ranking import (
    _pooled_aurc,
    _pooled_auroc,
    aurc_with_error,
    auroc_with_error,
)
from calibrant.metrics.reductions import Pairs
from calibrant.metrics.summary import PooledPairs, _fine_edges
from tests.support.predictions import predictions


def drawn(seed, n=2000):
    rng = np.random.default_rng(seed)
    confidence = rng.beta(4, 2, n)
    return confidence, rng.random(n) < confidence**1.3


@pytest.fixture
def pooled(monkeypatch):
    """Pool the pairs of every stream."""
    monkeypatch.setattr(summary, "MOST_PAIRS", 0)


@pytest.mark.parametrize("weighed", [False, True])
def test_wider_bins_are_exact(weighed):
    confidence, outcome = drawn(0)
    confidence[:6] = [0.0, 1.0, 0.5, 1 / 40, 1 - 1e-15, 1e-20]
    weight = np.random.default_rng(1).gamma(1, size=outcome.size) if weighed else None
    sums = PooledPairs.of(Pairs(confidence, outcome), weight)
    for bins in (40, 128, 4096):
        found = sums.filled(uniform_edges(bins))
        expected = fill(confidence, outcome.astype(float), uniform_edges(bins), weight)
        assert found.count.tolist() == expected.count.tolist()
        for name in ("weight", "claimed", "observed", "spread", "squares"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-12)


def test_edges_hold_equal_mass():
    confidence, outcome = drawn(0, 20_000)
    sums = PooledPairs.of(Pairs(confidence, outcome), None)
    assert sums.filled(sums.equal_mass_edges(15)).count == pytest.approx(20_000 / 15, rel=0.01)
    tied = PooledPairs.of(Pairs(np.full(10, 0.7), np.arange(10) < 6), None)
    assert tied.equal_mass_edges(15).tolist() == [0.0, 1.0]


def test_confidences_near_one_stay_apart():
    """Models that are sure differ in the seventh digit and beyond."""
    claims = np.array([1 - 10.0**-digits for digits in range(1, 13)])
    bins = PooledPairs.of(Pairs(claims, np.ones(12, bool)), None).bins
    assert bins.count.max() == 1


def test_values_are_those_of_single_pairs():
    confidence, outcome = drawn(0)
    sums = PooledPairs.of(Pairs(confidence, outcome), None)
    exact = auroc_with_error(confidence, outcome.astype(float), None)
    assert sums.value(_pooled_auroc) == pytest.approx(exact.value, abs=1e-5)
    assert sums.deviation(_pooled_auroc, 400, 0) == pytest.approx(exact.deviation, rel=0.15)
    exact = aurc_with_error(confidence, outcome.astype(float), None)
    assert sums.value(_pooled_aurc) == pytest.approx(exact.value, abs=2e-4)
    assert sums.deviation(_pooled_aurc, 400, 0) == pytest.approx(exact.deviation, rel=0.15)


def test_replicates_have_the_moments_of_weights_of_rows():
    """Rows weigh a Poisson number each: the sum over a bin has its mean, and squares as variance.

    Whether it is drawn for the bin or row by row must not matter.
    """
    rng = np.random.default_rng(0)
    weight = rng.gamma(2, size=60) * np.where(np.arange(60) < 20, 5.0, 1.0)
    confidence, outcome = np.repeat([0.7, 0.9], [20, 40]), np.arange(60) % 3 > 0
    sums = PooledPairs.of(Pairs(confidence, outcome), weight)
    drawn_by_bin = [np.concatenate(side) for side in zip(*sums.replicates(4000, 0), strict=True)]
    rows = rng.poisson(1, (4000, 60)) * weight
    for side, happened in zip(drawn_by_bin, (True, False), strict=True):
        for column, place in zip(side.T, (0.7, 0.9), strict=True):
            by_row = rows[:, (outcome == happened) & (confidence == place)].sum(1)
            assert column.mean() == pytest.approx(by_row.mean(), rel=0.03)
            assert column.std() == pytest.approx(by_row.std(), rel=0.06)


def test_the_bootstrap_covers_the_truth():
    """A share below 82 % of 60 is seen with probability 0.01 if the coverage is 90 %."""
    confidence, outcome = drawn(10**6, 400_000)
    truth = auroc_with_error(confidence, outcome.astype(float), None).value
    covered = 0
    for seed in range(60):
        sums = PooledPairs.of(Pairs(*drawn(seed, 600)), None)
        reach = 1.645 * sums.deviation(_pooled_auroc, 100, seed)
        covered += abs(sums.value(_pooled_auroc) - truth) <= reach
    assert binom.ppf(0.01, 60, 0.9) <= covered <= 59


@pytest.mark.parametrize("classes", [2, 4])
def test_evaluations_agree_with_single_pairs(classes, monkeypatch):
    data = predictions(rows=3000, classes=classes)
    arrays = data["logits"], data["labels"]
    exact = cal.evaluate(*arrays, metrics=["ks", "ada_ece", "auroc", "aurc"])
    monkeypatch.setattr(summary, "MOST_PAIRS", 0)
    found = cal.evaluate(*arrays, metrics=list(exact))
    for name, (value, low, high) in exact.items():
        assert found[name].value == pytest.approx(value, abs=3e-4), name
        # draws differ, so that ends differ by a fraction of the width
        assert found[name].low == pytest.approx(low, abs=0.15 * (high - low) + 1e-3), name
        assert found[name].high == pytest.approx(high, abs=0.15 * (high - low) + 1e-3), name
    assert found.test == pytest.approx(exact.test, abs=1e-3)


def stream(data, cuts):
    """One accumulator for each run of rows, merged."""
    total = cal.Accumulator(pairs=True, metrics=["auroc", "aurc", "ada_ece"])
    for rows in np.split(np.arange(len(data["labels"])), cuts):
        part = total.like()
        part.update(data["logits"][rows], data["labels"][rows], by=rows % 2)
        total.merge(part)
    return total


def test_intervals_do_not_depend_on_shards(monkeypatch):
    """Counts decide what is pooled, and the draws are made from sums."""
    data = predictions(rows=900, classes=3)
    monkeypatch.setattr(summary, "MOST_PAIRS", 899)
    streams = [stream(data, cuts) for cuts in ([], [3, 500], [899])]
    assert all(each._kept.pooled for each in streams)  # by 900 labels, of which 847 count
    results = [each.compute() for each in streams]
    for other in results[1:]:
        for one, same in ((results[0], other), (results[0].by["1"], other.by["1"])):
            for name in one:
                assert same[name] == pytest.approx(one[name], rel=1e-9), name
    monkeypatch.setattr(summary, "MOST_PAIRS", 900)
    kept = stream(data, [500])
    assert not kept._kept.pooled
    assert kept.kept_pairs().outcome.size == (data["labels"] >= 0).sum()


@pytest.mark.usefixtures("pooled")
def test_kept_pairs_of_many_are_those_of_bins():
    data = predictions(rows=500, classes=3)
    total = cal.Accumulator(pairs=True).update(data["logits"], data["labels"])
    confidence, outcome, weight = total.kept_pairs()
    assert weight is not None
    expected = cal.top_label(data["logits"], data["labels"])
    assert weight.sum() == expected.outcome.size
    assert weight @ confidence == pytest.approx(expected.confidence.sum())
    assert weight @ outcome == expected.outcome.sum()


def test_smce_of_many_pairs(monkeypatch):
    confidence, outcome = drawn(0, 30_000)
    exact = cal.smce(confidence=confidence, outcome=outcome)
    monkeypatch.setattr("calibrant.metrics.smooth.MOST_SINGLE", 100)
    assert cal.smce(confidence=confidence, outcome=outcome) == pytest.approx(exact, abs=2e-6)


def test_edges_increase():
    assert (np.diff(_fine_edges()) > 0).all()
