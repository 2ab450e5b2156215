"""Agreement of judges with people, and their biases."""

import math

import numpy as np
import pytest
from scipy.special import expit

from calibrant.estimate.judges import agreement, length_bias, position_bias


def test_position_bias_by_hand():
    winner = ["a", "A ", "b", "tie", "a", "b"]
    swapped = ["a", "b", "a", "a", "tie", "b"]
    found = position_bias(winner, swapped)
    assert found.flips.value == pytest.approx(4 / 6)
    # shares of the two judgements that the first answer won, pair by pair
    assert found.first.value == pytest.approx(np.mean([0.5, 1, 0, 0.25, 0.75, 0.5]))
    assert found.n == 6


@pytest.mark.parametrize("push", [0.0, 0.1, -0.3])
def test_preference_for_the_first_is_in_its_interval(push):
    hits = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        better = rng.random(60) < 0.7  # of the answers of a
        moved = rng.random(60) < abs(push)
        winner = np.where(moved, push > 0, better)
        swapped = np.where(moved, push < 0, better)
        found = position_bias(*(np.where(x, "a", "b").tolist() for x in (winner, swapped)))
        hits += found.first.low <= 0.5 + push / 2 <= found.first.high
    assert hits >= (200 if push == 0 else 168)


def test_verdicts_that_never_flip_do_not_prove_that_none_will():
    found = position_bias(["a"] * 30, ["a"] * 30)
    assert found.flips.value == 0
    assert found.flips.high > 0.05
    assert found.first.low < 0.49 < 0.51 < found.first.high


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        ((["a"], ["first"]), "verdicts must be a, b or tie, got 'first' for pair 0"),
        ((["a"], []), "must have a verdict for each pair, got 1 and 0"),
        (([], []), "must have a verdict for each pair, got 0 and 0"),
    ],
)
def test_bad_verdicts_are_refused(verdicts, message):
    with pytest.raises(ValueError, match=message):
        position_bias(*verdicts)


def judged(rng, n, slope, *, votes=True):
    """Scores that rise with the length beyond what the label explains; right answers are longer."""
    right = rng.random(n) < 0.6
    length = np.exp(rng.normal(4 + 0.5 * right, 0.7))
    mean = expit(2 * right - 1 + slope * (np.log2(length) - 6))
    return (rng.random(n) < mean if votes else rng.beta(4 * mean, 4 - 4 * mean)), right, length


@pytest.mark.parametrize("votes", [True, False])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_the_effect_of_length_is_in_its_interval(slope, votes):
    hits = 0
    for seed in range(100):
        rng = np.random.default_rng([seed, 1])
        ratio = length_bias(*judged(rng, 120, slope, votes=votes))
        hits += ratio.low <= math.exp(slope) <= ratio.high
    assert hits >= 83


def test_length_without_effect_or_variation_has_no_odds():
    same = length_bias([1, 0, 1, 0, 1], [1, 0, 0, 1, 1], np.full(5, 10))
    assert math.isnan(same.value)
    separated = length_bias(np.arange(40) >= 20, np.zeros(40), np.arange(1, 41))
    assert math.isnan(separated.value)
    assert math.isnan(length_bias([1, 0], [1, 0], [1, 2]).low)


@pytest.mark.parametrize(
    ("length", "message"),
    [([1, 2], "must have the same size, got 3, 3 and 2"), ([1, 0, 2], "length must be above 0")],
)
def test_bad_lengths_are_refused(length, message):
    with pytest.raises(ValueError, match=message):
        length_bias([1, 0, 1], [1, 0, 0], length)


sklearn_metrics = pytest.importorskip("sklearn.metrics")


def drawn(rng, n, *, noise=1.5):
    right = rng.random(n) < 0.6
    return np.clip(np.round(5.5 + 3 * (right - 0.5) + noise * rng.normal(size=n)), 1, 10), right


def test_values_are_those_of_scikit_learn(rng):
    scores, right = drawn(rng, 300)
    weight = rng.uniform(0.5, 3, size=300)
    found = agreement(scores, right, cut=6, sample_weight=weight)
    given = {"sample_weight": weight}
    assert found.raw.value == pytest.approx(
        sklearn_metrics.accuracy_score(right, scores >= 6, **given)
    )
    assert found.kappa.value == pytest.approx(
        sklearn_metrics.cohen_kappa_score(right, scores >= 6, **given)
    )
    assert found.auroc.value == pytest.approx(sklearn_metrics.roc_auc_score(right, scores, **given))
    assert found.n == 300
    table = sklearn_metrics.confusion_matrix(right, scores >= 6, normalize="true", **given)
    assert (found.lenient, found.strict) == pytest.approx((table[0, 1], table[1, 0]))


def test_intervals_contain_kappa():
    scores, right = drawn(np.random.default_rng(0), 400_000)
    truth = sklearn_metrics.cohen_kappa_score(right, scores >= 6)
    hits = 0
    for seed in range(200):
        found = agreement(*drawn(np.random.default_rng(seed), 80), cut=6).kappa
        hits += found.low <= truth <= found.high
    assert 168 <= hits <= 192  # 180 expected


def test_perfect_and_constant_verdicts():
    same = agreement([1, 0, 1, 0], [1, 0, 1, 0])
    assert (same.raw.value, same.kappa.value) == (1, 1)
    assert math.isnan(same.kappa.low)
    assert same.raw.low < 1
    constant = agreement([1, 1, 1], [1, 1, 1])
    assert math.isnan(constant.kappa.value)
    assert math.isnan(constant.auroc.value)
    assert math.isnan(constant.lenient)
    assert constant.strict == 0


def test_grades_from_a_half_on_count_as_right():
    assert agreement([1, 0], [0.5, 0.49]).raw.value == 1


def test_each_score_needs_a_label():
    with pytest.raises(ValueError, match="human must have 2 labels, got 1"):
        agreement([1, 0], [1])
