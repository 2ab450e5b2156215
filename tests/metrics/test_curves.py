"""Data of the diagrams, against their definitions."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom, binomtest, norm

import calibrant as cal
from calibrant.metrics.reliability import reliability_of
from tests.support.simulate import drawn, drawn_pairs


@pytest.fixture
def pairs(rng):
    return drawn_pairs(rng, 700, 0.1, low=0.2)


# Reliability


@pytest.mark.parametrize("bins", [1, 7, 15])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_bars_are_the_means_of_their_bins_with_exact_binomial_intervals(pairs, bins, level):
    confidence, outcome = pairs
    found = cal.metrics.reliability(confidence=confidence, outcome=outcome, bins=bins, level=level)
    assert found.edges.tolist() == [i / bins for i in range(bins + 1)]
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        n, hits = int(inside.sum()), int(outcome[inside].sum())
        assert found.share[b] == pytest.approx(n / 700)
        bar = [column[b] for column in found[1:5]]
        if n == 0:
            assert np.isnan(bar).all()
            continue
        ends = binomtest(hits, n).proportion_ci(level, method="exact")
        expected = [confidence[inside].mean(), hits / n, ends.low, ends.high]
        np.testing.assert_allclose(bar, expected, atol=1e-9)
    assert found.share.sum() == pytest.approx(1)


def test_intervals_of_all_right_and_all_wrong_bins_end_at_the_ends():
    found = cal.metrics.reliability(
        confidence=[0.25] * 5 + [0.75] * 8, outcome=[0] * 5 + [1] * 8, bins=2
    )
    np.testing.assert_allclose(found.low, [0, beta.ppf(0.05, 8, 1)])
    np.testing.assert_allclose(found.high, [beta.ppf(0.95, 1, 5), 1])


def test_bars_of_equal_mass_hold_equally_many(pairs):
    found = cal.metrics.reliability(confidence=pairs[0], outcome=pairs[1], bins=7, equal_mass=True)
    np.testing.assert_allclose(found.share, 1 / 7)
    assert np.isfinite(found.accuracy).all()
    order = np.argsort(pairs[0])
    means = [pairs[1][part].mean() for part in np.split(order, 7)]
    np.testing.assert_allclose(found.accuracy, means)


def test_weights_of_bars_count_as_fewer_examples(rng, pairs):
    """With weights 1 and 0 the dropped rows are gone; unequal ones widen the interval."""
    kept = rng.random(700) < 0.5
    dropped = cal.metrics.reliability(confidence=pairs[0][kept], outcome=pairs[1][kept])
    found = cal.metrics.reliability(
        confidence=pairs[0], outcome=pairs[1], sample_weight=kept.astype(float)
    )
    for ours, theirs in zip(found[:6], dropped[:6], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    weight = rng.exponential(size=700)
    uneven = cal.metrics.reliability(
        confidence=pairs[0], outcome=pairs[1], bins=3, sample_weight=weight
    )
    for b in range(3):
        inside = (pairs[0] > b / 3) & (pairs[0] <= (b + 1) / 3)
        w, y = weight[inside], pairs[1][inside]
        effective = w.sum() ** 2 / (w**2).sum()
        hits = effective * np.average(y, weights=w)
        assert uneven.accuracy[b] == pytest.approx(np.average(y, weights=w))
        assert uneven.low[b] == pytest.approx(beta.ppf(0.05, hits, effective - hits + 1))
        assert uneven.high[b] == pytest.approx(beta.ppf(0.95, hits + 1, effective - hits))
    plain = cal.metrics.reliability(confidence=pairs[0], outcome=pairs[1], bins=3)
    assert (uneven.high - uneven.low > plain.high - plain.low).all()


def test_bars_of_a_stream_are_those_of_its_pairs(rng):
    logits, labels = drawn(rng, 400, 4)
    filled = cal.evaluate(logits, labels, metrics=["ece"], level=None).bins
    expected = cal.metrics.reliability(logits, labels, level=0.5)
    for ours, theirs in zip(reliability_of(filled, level=0.5)[:6], expected[:6], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_bars_of_a_calibrated_model_cover_the_diagonal(rng):
    """At 90 %: about one bar in ten misses, over 40 samples of some 8 full bars each."""
    hit, bars = 0, 0
    for _ in range(40):
        confidence, outcome = drawn_pairs(rng, 500)
        found = cal.metrics.reliability(confidence=confidence, outcome=outcome)
        seen = np.isfinite(found.low)
        hit += int(((found.low <= found.confidence) & (found.confidence <= found.high))[seen].sum())
        bars += int(seen.sum())
    assert bars > 300
    assert 0.87 < hit / bars < 0.98  # exact intervals cover a little more than they say


# Smooth curve


def kernel(t, centre, width):
    """Gaussian of t around the centre and all its mirror images at 0 and 1."""
    total = np.zeros(np.broadcast_shapes(t.shape, centre.shape))
    for sign, k in itertools.product((1, -1), range(-3, 4)):
        total = total + np.exp(-(((t - sign * centre - 2 * k) / width) ** 2) / 2)
    return total / (width * math.sqrt(2 * math.pi))


def on_cells(rng, n, points):
    """Confidences in the middle of cells, so that the curve is free of their width."""
    confidence = (rng.integers(points // 5, points, n) + 0.5) / points
    return confidence, rng.random(n) < confidence - 0.05


@pytest.mark.parametrize("weigh", [False, True])
def test_the_smooth_curve_is_a_local_parabola(rng, weigh):
    """At each point numpy's polyfit to the nearest examples; the band by its linear weights."""
    points, n = 64, 600
    confidence, outcome = on_cells(rng, n, points)
    weight = rng.exponential(size=n) if weigh else np.ones(n)
    found = cal.metrics.smooth_reliability(
        confidence=confidence, outcome=outcome, points=points, sample_weight=weight
    )
    t = (np.arange(points) + 0.5) / points
    np.testing.assert_allclose(found.confidence, t)
    wanted = weight.sum() * (weight.sum() ** 2 / (weight**2).sum()) ** -0.2
    fits = np.zeros((points, n))  # linear in the outcomes
    for i, x in enumerate(t):
        away = np.abs(confidence - x)
        order = np.argsort(away)
        reach = away[order][np.searchsorted(np.cumsum(weight[order]), wanted)]
        width = 1.01 * max(reach, 2 / points)
        tricube = weight * np.clip(1 - (away / width) ** 3, 0, None) ** 3
        design = np.stack([np.ones(n), confidence - x, (confidence - x) ** 2], -1)
        fits[i] = np.linalg.solve(design.T * tricube @ design, design.T * tricube)[0]
    accuracy = np.clip(fits @ outcome, 0, 1)
    inner = (t > confidence.min()) & (t < confidence.max())
    np.testing.assert_allclose(found.accuracy[inner], accuracy[inner], atol=1e-4)
    z2 = norm.ppf(0.95) ** 2
    worth = 1 / (fits**2).sum(1)
    centre = (accuracy * worth + z2 / 2) / (worth + z2)  # Agresti and Coull
    around = np.interp(confidence, t, centre)
    variance = (fits**2 * around * (1 - around)).sum(1) * worth / (worth + z2)
    low, high = (centre + sign * np.sqrt(z2 * variance) for sign in (-1, 1))
    np.testing.assert_allclose(found.low[inner], np.maximum(low, 0)[inner], atol=1e-3)
    np.testing.assert_allclose(found.high[inner], np.minimum(high, 1)[inner], atol=1e-3)
    density = kernel(t[:, None], confidence, 0.02) @ weight / weight.sum()
    assert found.density.mean() == pytest.approx(1)
    np.testing.assert_allclose(found.density[4:-4], density[4:-4], rtol=0.2, atol=0.05)


def test_the_band_contains_the_truth_where_confidences_crowd_near_one():
    """As of image models: half of the claims above 0.95, few in between, all too high.

    The mean of a window of one width for all would be that of the crowd.
    """
    at, covered, repetitions = np.array([0.5, 0.65, 0.8, 0.9, 0.99]), np.zeros(5), 40

    def true(p):
        return 0.35 + 0.6 * p**4

    for seed in range(repetitions):
        rng = np.random.default_rng(seed)
        confidence = 1 - 0.7 * rng.random(1500) ** 4
        outcome = rng.random(1500) < true(confidence)
        curve = cal.metrics.smooth_reliability(confidence=confidence, outcome=outcome, points=128)
        low, high = (np.interp(at, curve.confidence, end) for end in (curve.low, curve.high))
        covered += (low <= true(at)) & (true(at) <= high)
        assert (high - low)[2] < 0.25
    assert (covered >= binom.ppf(0.001, repetitions, 0.85)).all(), covered


def test_claims_of_a_few_values_have_the_accuracy_of_each(rng):
    """Two or three distinct claims within a window have no parabola through more."""
    confidence = rng.choice([0.6, 0.8], 1000)
    outcome = rng.random(1000) < confidence - 0.1
    curve = cal.metrics.smooth_reliability(confidence=confidence, outcome=outcome)
    bars = cal.metrics.reliability(confidence=confidence, outcome=outcome, bins=10)
    for value in (0.6, 0.8):
        at = int(value * 512)
        assert curve.accuracy[at] == pytest.approx(outcome[confidence == value].mean(), abs=0.01)
        assert curve.high[at] - curve.low[at] == pytest.approx(
            np.nansum((bars.high - bars.low)[int(10 * value) - 1 : int(10 * value)]), rel=0.3
        )


def test_the_smooth_curve_of_examples_at_one_does_not_leak_over_the_end():
    """Half of an unreflected kernel would lie beyond 1."""
    found = cal.metrics.smooth_reliability(
        confidence=np.ones(100), outcome=np.arange(100) < 90, points=256
    )
    assert found.density.mean() == pytest.approx(1)
    assert found.density.argmax() == 255
    assert found.accuracy[-1] == pytest.approx(0.9)


def test_the_smooth_curve_recovers_a_known_accuracy(rng):
    confidence = rng.random(40_000)
    found = cal.metrics.smooth_reliability(
        confidence=confidence, outcome=rng.random(40_000) < confidence**2
    )
    inner = (found.confidence > 0.15) & (found.confidence < 0.85)
    np.testing.assert_allclose(found.accuracy[inner], found.confidence[inner] ** 2, atol=0.06)
    assert (found.low <= found.accuracy).all()
    assert (found.accuracy <= found.high).all()
    assert found.low.min() >= 0
    assert found.high.max() <= 1


def test_a_higher_level_widens_the_band(pairs):
    narrow, wide = (
        cal.metrics.smooth_reliability(confidence=pairs[0], outcome=pairs[1], level=level)
        for level in (0.5, 0.95)
    )
    inner = (narrow.confidence > 0.3) & (narrow.confidence < 0.9)
    assert ((wide.high - wide.low) > (narrow.high - narrow.low))[inner].all()
    np.testing.assert_array_equal(narrow.accuracy, wide.accuracy)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("right", [0, 1])
def test_one_example_has_curves(value, right):
    bars = cal.metrics.reliability(confidence=[value], outcome=[right])
    assert np.nansum(bars.accuracy) == right
    smooth = cal.metrics.smooth_reliability(confidence=[value], outcome=[right])
    assert np.isfinite(smooth.accuracy).all()
    assert smooth.density.mean() == pytest.approx(1)
    assert (
        cal.metrics.confidence_histogram(confidence=[value], outcome=[right]).right.sum() == right
    )


# Histogram


def test_the_histogram_counts_right_and_wrong_apart(pairs):
    confidence, outcome = pairs
    found = cal.metrics.confidence_histogram(confidence=confidence, outcome=outcome, bins=8)
    for values, chosen in ((found.right, outcome), (found.wrong, ~outcome)):
        expected = np.histogram(confidence[chosen], found.edges)[0] / 700
        np.testing.assert_allclose(values, expected, atol=1e-12)
    assert found.right.sum() + found.wrong.sum() == pytest.approx(1)
    assert cal.metrics.confidence_histogram(confidence=confidence, outcome=outcome).edges.size == 31


# Margins


@pytest.mark.parametrize(("groups", "kind"), [(1, np.asarray), (3, torch.tensor), (4, np.asarray)])
def test_reliability_by_margin_splits_the_examples_by_margin(rng, groups, kind):
    logits, labels = drawn(rng, 301, 5)
    labels[::10] = -100
    kept = labels != -100
    found = cal.metrics.reliability_by_margin(
        kind(logits), kind(labels), margin_bins=groups, bins=10, level=0.8
    )
    top = np.sort(logits[kept], axis=-1)
    margin = top[:, -1] - top[:, -2]
    order = np.argsort(margin)
    assert len(found) == groups
    for part, group in zip(np.array_split(order, groups), found, strict=True):
        assert group.low == pytest.approx(margin[part].min())
        assert group.high == pytest.approx(margin[part].max())
        expected = cal.metrics.reliability(
            logits[kept][part], labels[kept][part], bins=10, level=0.8
        )
        for ours, theirs in zip(group.reliability[:6], expected[:6], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
    assert found[0].low == pytest.approx(margin.min())
    assert found[-1].high == pytest.approx(margin.max())


def test_margins_of_sequences_are_those_of_their_rows(rng):
    logits, labels = drawn(rng, 60, 3)
    flat = cal.metrics.reliability_by_margin(logits, labels)
    shaped = cal.metrics.reliability_by_margin(logits.reshape(6, 10, 3), labels.reshape(6, 10))
    for one, two in zip(flat, shaped, strict=True):
        assert one[:2] == two[:2]
        np.testing.assert_array_equal(one.reliability.accuracy, two.reliability.accuracy)


def test_there_are_no_more_bins_of_margins_than_examples():
    two = cal.metrics.reliability_by_margin([[1.0, 0.0], [3.0, 0.0]], [0, 1], margin_bins=5)
    assert len(two) == 2
    assert len(cal.metrics.reliability_by_margin([2.0, -1.0, 0.0], [0, 1, 1])) == 3


# Risk and coverage
