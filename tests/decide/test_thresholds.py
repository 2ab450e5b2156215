"""Thresholds keep their guarantee, in simulations whose truth is known and by the definition."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import binom, binomtest

from calibrant.decide.threshold_limits import threshold
from calibrant.decide.threshold_search import _fallback, threshold_grid
from calibrant.metrics import top_label
from tests.support.definitions import slow_threshold
from tests.support.simulate import drawn, drawn_pairs


def most(times, chance):
    """Number of events of a chance that is exceeded once in ten thousand runs."""
    return int(binom.ppf(0.9999, times, chance))


@pytest.mark.parametrize("max_error", [0.03, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("rounded", [None, 2, 1])
def test_threshold_is_that_of_the_definition(max_error, rounded):
    finite = 0
    for seed, gap in itertools.product(range(6), (0.0, 0.05, -0.04)):
        claimed, right = drawn_pairs(np.random.default_rng(seed), 150, gap, high=0.96)
        claimed = claimed if rounded is None else claimed.round(rounded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = threshold(
                confidence=claimed, outcome=right, max_error=max_error, certainty=0.6
            ).threshold
        expected = slow_threshold(claimed, right, max_error, 0.6)
        assert found == pytest.approx(expected, rel=1e-12)
        finite += found < math.inf
    assert finite or max_error < 0.1


def test_threshold_says_what_it_accepts(rng):
    claimed, right = drawn_pairs(rng, 3000)
    found = threshold(confidence=claimed, outcome=right, max_error=0.15)
    accepted = claimed >= found.threshold
    assert found.coverage == accepted.mean()
    assert found.error == pytest.approx(1 - right[accepted].mean())
    assert found.error < found.bound <= 0.15
    assert found.n == 3000


def test_bound_is_that_of_clopper_and_pearson():
    """Of examples that are all alike the tests from 0.95 down pass, each with its share."""
    found = threshold(confidence=np.full(900, 0.96), outcome=np.arange(900) >= 20, max_error=0.05)
    assert found.threshold == 0
    grid, shares = threshold_grid(0.05)
    level = 1 - 0.05 * shares[grid < 0.9501].sum()
    ends = binomtest(20, 900, alternative="less").proportion_ci(level, method="exact")
    assert found.bound == pytest.approx(ends.high)


def situation(name, limit):
    """Confidences, their probabilities and error rates."""
    if name == "calibrated":
        claimed = np.linspace(0.2, 0.999, 600)
        return claimed, np.ones(600), 1 - claimed
    if name == "over-confident":
        claimed = 1 - np.geomspace(1e-6, 0.7, 600)
        return claimed, np.ones(600), np.sqrt(1 - claimed)
    if name == "just too often wrong everywhere":
        return np.linspace(0.02, 0.9999, 400), np.ones(400), np.full(400, 1.0001 * limit)
    if name == "just too often wrong, near 1":
        return 1 - np.geomspace(1e-6, 0.9, 400), np.ones(400), np.full(400, 1.0001 * limit)
    if name == "up and down":
        claimed = 1 - np.geomspace(1e-4, 0.9, 600)
        return claimed, np.ones(600), limit * (1 + 0.8 * np.sin(6 * np.log(1 - claimed)))
    if name == "worse where surer":
        claimed = np.linspace(0.01, 0.999, 400)
        return claimed, np.ones(400), limit * (0.5 + 2 * claimed)
    if name == "ties":
        edge = np.array([0.3, 0.6, 1 - limit, 0.99])
        return edge, np.array([2, 3, 3, 2]), np.array([0.9, 0.5, 1.0001 * limit, 1.0001 * limit])
    return np.array([0.9]), np.ones(1), np.full(1, 1.0001 * limit)  # all alike


SITUATIONS = [
    *("calibrated", "over-confident", "up and down", "worse where surer", "ties", "all alike"),
    *("just too often wrong everywhere", "just too often wrong, near 1"),
]


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize(("n", "max_error"), [(15, 0.3), (120, 0.1), (500, 0.1)])
def test_threshold_is_wrong_as_seldom_as_promised(name, n, max_error):
    claimed, mass, wrong = situation(name, max_error)
    mass, order = mass / mass.sum(), np.argsort(-claimed)
    truth = np.cumsum((mass * wrong)[order]) / np.cumsum(mass[order])
    rng, failures, times = np.random.default_rng(7), 0, 200
    for _ in range(times):
        drawn_at = rng.choice(len(claimed), n, p=mass)
        right = rng.random(n) >= wrong[drawn_at]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = threshold(
                confidence=claimed[drawn_at], outcome=right, max_error=max_error, certainty=0.8
            )
        accepted = int((claimed >= found.threshold).sum())
        failures += bool(accepted and truth[accepted - 1] > max_error)
    assert failures <= most(times, 0.2)


@pytest.mark.parametrize("n", [1, 10, 60, 72, 73, 200, 1000])
@pytest.mark.parametrize("certainty", [0.8, 0.95])
def test_threshold_of_equal_confidences_fails_with_an_exact_probability(n, certainty):
    """Of examples that are all alike the threshold depends on the number of wrong ones only."""
    limit, chance = 0.05, 0.0
    for wrong in range(n + 1):
        right = np.arange(n) >= wrong
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = threshold(
                confidence=np.full(n, 0.96), outcome=right, max_error=limit, certainty=certainty
            )
        if found.threshold == math.inf:
            break
        chance += binom.pmf(wrong, n, limit)  # the true error is the limit, as bad as can be
    assert chance <= 1 - certainty
    if n == 1000:
        assert chance > (1 - certainty) / 4  # and it is no more careful than it has to be


def test_threshold_shares_its_error_probability():
    for max_error in (0.001, 0.05, 0.5, 0.9999):
        grid, shares = threshold_grid(max_error)
        assert shares.sum() == pytest.approx(1)
        assert (np.diff(grid) < 0).all()
        assert grid[-1] == 0
        odds = (1 - max_error) / max_error * math.exp(-0.05)  # half a step of a tenth below
        assert grid[shares.argmax()] == pytest.approx(odds / (1 + odds))


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.99, 1.0])
def test_fallback_rejects_true_hypotheses_as_seldom_as_promised(alike):
    """p-values that are uniform, each equal to the one before with a probability."""
    rng, failures, times = np.random.default_rng(0), 0, 1500
    shares = 0.2 * threshold_grid(0.1)[1]
    for _ in range(times):
        fresh, p_values = rng.random(len(shares)), rng.random(len(shares))
        for i in range(1, len(shares)):
            p_values[i] = p_values[i - 1] if rng.random() < alike else fresh[i]
        failures += bool(_fallback(p_values, shares)[1].any())
    assert failures <= most(times, 0.2)


def test_fallback_goes_on_after_a_failure():
    shares = np.array([0.01, 0.0, 0.02, 0.0, 0.0])
    levels, passed = _fallback(np.array([0.001, 0.5, 0.02, 0.02, 0.03]), shares)
    assert levels.tolist() == [0.01, 0.01, 0.02, 0.02, 0.02]
    assert passed.tolist() == [True, False, True, True, False]


def test_a_test_without_error_probability_never_passes():
    levels, passed = _fallback(np.zeros(2), np.zeros(2))
    assert not levels.any()
    assert not passed.any()


def test_threshold_accepts_nearly_what_could_be_accepted(rng):
    """Uniform confidences: the error above t is (1 - t) / 2, so 0.8 is right for 10 %."""
    pairs = [drawn_pairs(rng, 20_000) for _ in range(5)]
    found = [threshold(confidence=p, outcome=y, max_error=0.1).threshold for p, y in pairs]
    assert 0.8 <= np.mean(found) < 0.83


def test_all_right_is_all_accepted():
    found = threshold(confidence=np.linspace(0.1, 1, 300), outcome=np.ones(300), max_error=0.05)
    assert found.threshold == 0
    assert (found.coverage, found.error) == (1, 0)


@pytest.mark.parametrize(
    ("confidence", "right"),
    [
        ([0.9], [1]),
        ([0.9], [0]),
        (np.linspace(0.1, 1, 500), np.zeros(500)),
        (np.ones(71), [1] * 71),
    ],
    ids=["one right", "one wrong", "all wrong", "one too few"],
)
def test_where_no_threshold_is_shown_none_is_given(confidence, right):
    with pytest.warns(UserWarning, match=r"no threshold keeps the error at 0\.05"):
        found = threshold(confidence=confidence, outcome=right, max_error=0.05)
    assert (found.threshold, found.coverage) == (math.inf, 0)
    assert math.isnan(found.error)
    assert math.isnan(found.bound)
    assert found.n == len(right)


def test_the_number_in_the_warning_is_enough():
    with pytest.warns(UserWarning, match="about 71 more labels") as caught:
        threshold(confidence=[0.99], outcome=[1], max_error=0.05)
    assert caught[0].filename == __file__
    assert (
        threshold(confidence=np.full(72, 0.99), outcome=np.ones(72), max_error=0.05).threshold
        < 0.99
    )


def test_threshold_takes_tensors_of_any_shape(rng):
    claimed, right = drawn_pairs(rng, 1200)
    confidence, outcome = (torch.tensor(x).view(3, 400) for x in (claimed, right))
    found = threshold(confidence=confidence, outcome=outcome, max_error=0.2)
    assert found == threshold(confidence=claimed, outcome=right, max_error=0.2)


PRECISIONS: dict[str, Callable[[Any], Any]] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "torch.float32": lambda x: torch.tensor(x, dtype=torch.float32),
    "torch.bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("max_error", [0.05, 0.1, 0.2])
def test_ties_at_round_confidences_are_not_let_in_by_rounding(precision, max_error):
    """Half of those at 1 - max_error are wrong; whoever compares with >= must not accept them."""
    held = PRECISIONS[precision]
    claimed = np.array([0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0])
    mass = np.where(np.isclose(claimed, 1 - max_error), 0.4, 0.1)
    truth = np.where(claimed > 1 - max_error + 0.001, 1.0, 0.5)
    rng, failures, times = np.random.default_rng(0), 0, 60
    for _ in range(times):
        at = rng.choice(7, 2000, p=mass)
        found = threshold(
            confidence=held(claimed)[at], outcome=rng.random(2000) < truth[at], max_error=max_error
        )
        accepted = np.asarray(held(claimed) >= found.threshold)
        assert found.coverage == accepted[at].mean() > 0
        failures += bool(mass[accepted] @ (1 - truth[accepted]) > max_error * mass[accepted].sum())
    assert failures <= most(times, 0.05)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_accepted_is_what_was_tested_in_every_precision(rng, precision):
    for _ in range(10):
        claimed, right = drawn_pairs(rng, 3000)
        given = PRECISIONS[precision](claimed)
        found = threshold(confidence=given, outcome=right, max_error=0.1)
        accepted = np.asarray(given >= found.threshold)
        assert found.coverage == accepted.mean() > 0
        assert found.error == pytest.approx(1 - right[accepted].mean())


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 5, math.nan, 1e-17])
def test_threshold_refuses_impossible_wishes(bad):
    with pytest.raises(ValueError, match="max_error must be between 0 and 1, got"):
        threshold(confidence=[0.9], outcome=[1], max_error=bad)
    with pytest.raises(ValueError, match="certainty must be between 0 and 1, got"):
        threshold(confidence=[0.9], outcome=[1], max_error=0.1, certainty=bad)
    with pytest.raises(TypeError, match=r"max_error must be a number, got '5%': 0\.05 allows"):
        threshold(confidence=[0.9], outcome=[1], max_error="5%")  # type: ignore[arg-type]


def test_logits_and_probabilities_have_the_threshold_of_their_pairs(rng):
    logits, labels = drawn(rng, 4000, 4)
    confidence, right = top_label(logits, labels)
    expected = threshold(confidence=confidence, outcome=right, max_error=0.2)
    assert threshold(logits, labels, max_error=0.2) == expected
    probs = softmax(logits, -1)
    found = threshold(probs=probs, labels=labels, max_error=0.2)
    assert found[:3] == pytest.approx(expected[:3])
    assert found.limits[0][1:] == pytest.approx(expected.limits[0][1:])
    with pytest.raises(TypeError, match="threshold takes no sample_weight"):
        threshold(logits, labels, max_error=0.2, sample_weight=np.ones(4000))
