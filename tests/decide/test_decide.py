"""Thresholds, prediction sets and class mixes: slow definitions, and truths that were drawn from.

A guarantee is tested by counting how often it fails where the truth is known. The counts may
exceed what is promised only by what chance allows once in ten thousand runs.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax, softmax
from scipy.stats import binom, binomtest, kstest

from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.decide import conformal_sets, priors, thresholds
from calibrant.decide.conformal_sets import conformal
from calibrant.decide.priors import PriorCorrection, estimate_prior, label_shift, shift_prior
from calibrant.decide.thresholds import threshold
from tests.support.simulate import drawn, drawn_pairs


def most(times, chance):
    """Number of events of a chance that is exceeded once in ten thousand runs."""
    return int(binom.ppf(0.9999, times, chance))


# ----------------------------------------------------------------------------------- thresholds


def slow_threshold(confidence, right, max_error, level):
    """The definition, one threshold after another, with sums for probabilities."""
    middle = math.log((1 - max_error) / max_error) - 0.05
    steps = range(70, -10 * max(0, math.ceil(middle + 7)) - 1, -1)
    grid = [1 / (1 + math.exp(-middle - i / 10)) for i in steps]
    total = sum(3.0 ** -abs(i // 10) for i in steps if i % 10 == 0)
    shares = [3.0 ** -abs(i // 10) / total if i % 10 == 0 else 0.0 for i in steps]
    found, carried = math.inf, 0.0
    for t, share in zip([*grid, 0.0], [*shares, 0.0], strict=True):
        taken = [bool(r) for c, r in zip(confidence, right, strict=True) if c >= t]
        m, k = len(taken), taken.count(False)
        terms = [math.comb(m, j) * max_error**j * (1 - max_error) ** (m - j) for j in range(k + 1)]
        have = carried + (1 - level) * share
        passes = m > 0 and have > 0 and math.fsum(terms) <= have
        found, carried = (t, have) if passes else (found, 0.0)
    return found


@pytest.mark.parametrize("max_error", [0.03, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("rounded", [None, 2, 1])
def test_threshold_is_that_of_the_definition(max_error, rounded):
    finite = 0
    for seed, gap in itertools.product(range(6), (0.0, 0.05, -0.04)):
        claimed, right = drawn_pairs(np.random.default_rng(seed), 150, gap, high=0.96)
        claimed = claimed if rounded is None else claimed.round(rounded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = threshold(claimed, right, max_error=max_error, level=0.6).threshold
        expected = slow_threshold(claimed, right, max_error, 0.6)
        assert found == pytest.approx(expected, rel=1e-12)
        finite += found < math.inf
    assert finite or max_error < 0.1


def test_threshold_says_what_it_accepts(rng):
    claimed, right = drawn_pairs(rng, 3000)
    found = threshold(claimed, right, max_error=0.15)
    accepted = claimed >= found.threshold
    assert found.coverage == accepted.mean()
    assert found.error == pytest.approx(1 - right[accepted].mean())
    assert found.error < found.bound <= 0.15
    assert found.n == 3000


def test_bound_is_that_of_clopper_and_pearson():
    """Of examples that are all alike the tests from 0.95 down pass, each with its share."""
    found = threshold(np.full(900, 0.96), np.arange(900) >= 20, max_error=0.05)
    assert found.threshold == 0
    grid, shares = thresholds._grid(0.05)
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
    rng, failures, times = np.random.default_rng(7), 0, 300
    for _ in range(times):
        drawn_at = rng.choice(len(claimed), n, p=mass)
        right = rng.random(n) >= wrong[drawn_at]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = threshold(claimed[drawn_at], right, max_error=max_error, level=0.8)
        accepted = int((claimed >= found.threshold).sum())
        failures += bool(accepted and truth[accepted - 1] > max_error)
    assert failures <= most(times, 0.2)


@pytest.mark.parametrize("n", [1, 10, 60, 72, 73, 200, 1000])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_threshold_of_equal_confidences_fails_with_an_exact_probability(n, level):
    """Of examples that are all alike the threshold depends on the number of wrong ones only."""
    limit, chance = 0.05, 0.0
    for wrong in range(n + 1):
        right = np.arange(n) >= wrong
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = threshold(np.full(n, 0.96), right, max_error=limit, level=level)
        if found.threshold == math.inf:
            break
        chance += binom.pmf(wrong, n, limit)  # the true error is the limit, as bad as can be
    assert chance <= 1 - level
    if n == 1000:
        assert chance > (1 - level) / 4  # and it is no more careful than it has to be


def test_threshold_shares_its_error_probability():
    for max_error in (0.001, 0.05, 0.5, 0.9999):
        grid, shares = thresholds._grid(max_error)
        assert shares.sum() == pytest.approx(1)
        assert (np.diff(grid) < 0).all()
        assert grid[-1] == 0
        odds = (1 - max_error) / max_error * math.exp(-0.05)  # half a step of a tenth below
        assert grid[shares.argmax()] == pytest.approx(odds / (1 + odds))


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.99, 1.0])
def test_fallback_rejects_true_hypotheses_as_seldom_as_promised(alike):
    """p-values that are uniform, each equal to the one before with a probability."""
    rng, failures, times = np.random.default_rng(0), 0, 1500
    shares = 0.2 * thresholds._grid(0.1)[1]
    for _ in range(times):
        fresh, p_values = rng.random(len(shares)), rng.random(len(shares))
        for i in range(1, len(shares)):
            p_values[i] = p_values[i - 1] if rng.random() < alike else fresh[i]
        failures += bool(thresholds._fallback(p_values, shares)[1].any())
    assert failures <= most(times, 0.2)


def test_fallback_goes_on_after_a_failure():
    shares = np.array([0.01, 0.0, 0.02, 0.0, 0.0])
    levels, passed = thresholds._fallback(np.array([0.001, 0.5, 0.02, 0.02, 0.03]), shares)
    assert levels.tolist() == [0.01, 0.01, 0.02, 0.02, 0.02]
    assert passed.tolist() == [True, False, True, True, False]


def test_a_test_without_error_probability_never_passes():
    levels, passed = thresholds._fallback(np.zeros(2), np.zeros(2))
    assert not levels.any()
    assert not passed.any()


def test_threshold_accepts_nearly_what_could_be_accepted(rng):
    """Uniform confidences: the error above t is (1 - t) / 2, so 0.8 is right for 10 %."""
    found = [threshold(*drawn_pairs(rng, 20_000), max_error=0.1).threshold for _ in range(5)]
    assert 0.8 <= np.mean(found) < 0.83


def test_all_right_is_all_accepted():
    found = threshold(np.linspace(0.1, 1, 300), np.ones(300), max_error=0.05)
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
    with pytest.warns(UserWarning, match=r"no threshold is shown to keep the error at 0\.05"):
        found = threshold(confidence, right, max_error=0.05)
    assert (found.threshold, found.coverage) == (math.inf, 0)
    assert math.isnan(found.error)
    assert math.isnan(found.bound)
    assert found.n == len(right)


def test_the_number_in_the_warning_is_enough():
    with pytest.warns(UserWarning, match="About 72 confident ones") as caught:
        threshold([0.99], [1], max_error=0.05)
    assert caught[0].filename == __file__
    assert threshold(np.full(72, 0.99), np.ones(72), max_error=0.05).threshold < 0.99


def test_threshold_takes_tensors_of_any_shape(rng):
    claimed, right = drawn_pairs(rng, 1200)
    found = threshold(
        torch.tensor(claimed).view(3, 400), torch.tensor(right).view(3, 400), max_error=0.2
    )
    assert found == threshold(claimed, right, max_error=0.2)


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
        found = threshold(held(claimed)[at], rng.random(2000) < truth[at], max_error=max_error)
        accepted = np.asarray(held(claimed) >= found.threshold)
        assert found.coverage == accepted[at].mean() > 0
        failures += bool(mass[accepted] @ (1 - truth[accepted]) > max_error * mass[accepted].sum())
    assert failures <= most(times, 0.05)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_accepted_is_what_was_tested_in_every_precision(rng, precision):
    for _ in range(10):
        claimed, right = drawn_pairs(rng, 3000)
        given = PRECISIONS[precision](claimed)
        found = threshold(given, right, max_error=0.1)
        accepted = np.asarray(given >= found.threshold)
        assert found.coverage == accepted.mean() > 0
        assert found.error == pytest.approx(1 - right[accepted].mean())


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 5, math.nan, 1e-17])
def test_threshold_refuses_impossible_wishes(bad):
    with pytest.raises(ValueError, match="max_error must be between 0 and 1, got"):
        threshold([0.9], [1], max_error=bad)
    with pytest.raises(ValueError, match="level must be between 0 and 1, got"):
        threshold([0.9], [1], max_error=0.1, level=bad)
    with pytest.raises(TypeError, match=r"max_error must be a number, got '5%': 0\.05 allows"):
        threshold([0.9], [1], max_error="5%")  # type: ignore[arg-type]


def test_threshold_refuses_what_is_no_pair():
    with pytest.raises(ValueError, match=r"confidence must be in \[0, 1\]"):
        threshold([2.5], [1], max_error=0.1)
    with pytest.raises(ValueError, match="nothing to measure"):
        threshold(np.empty(0), np.empty(0), max_error=0.1)


# ------------------------------------------------------------------------------ prediction sets

SCORES = ["lac", "aps", "raps"]


def probabilities(rng, n, classes=8, temperature=1.0):
    logits, labels = drawn(rng, n, classes, temperature)
    return softmax(logits, -1), labels


def slow_score(row, label, score, part):
    """Score of one class of one row, in words: everything before it, and a part of it, less 1."""
    if score == "lac":
        return -row[label]
    order = sorted(range(len(row)), key=lambda k: (-row[k], k))
    rank = order.index(label)
    found = sum(row[k] for k in order[:rank]) + part * row[label] - sum(row)
    return found + (0.01 * max(0, rank + 1 - 5) if score == "raps" else 0)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("digits", [16, 1])
def test_sets_are_those_of_the_definition(score, digits):
    rng = np.random.default_rng(1)
    probs, labels = probabilities(rng, 60)
    if digits == 1:  # with many ties
        probs = rng.multinomial(10, probs) / 10
    parts = conformal_sets._uniform(probs, 5)
    scores = [slow_score(*each) for each in zip(probs, labels, itertools.repeat(score), parts)]
    limit = sorted(scores)[math.ceil(61 * 0.8) - 1]
    fitted = conformal(probs, labels, coverage=0.8, score=score, seed=5)
    assert fitted.limit == pytest.approx(limit, rel=1e-5)
    expected = [
        [slow_score(row, k, score, part) <= limit + 1e-5 * abs(limit) for k in range(8)]
        for row, part in zip(probs, parts, strict=True)
    ]
    assert fitted.sets(probs).tolist() == expected


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("n", "coverage", "temperature"), [(19, 0.9, 1.0), (60, 0.8, 3.0), (9, 0.9, 0.5)]
)
def test_coverage_is_what_was_asked_for(score, n, coverage, temperature):
    rng, times, covered = np.random.default_rng(11), 800, []
    for seed in range(times):
        probs, labels = probabilities(rng, n + 20, temperature=temperature)
        fitted = conformal(probs[:n], labels[:n], coverage=coverage, score=score, seed=seed)
        sets = fitted.sets(probs[n:])
        covered.append(sets[np.arange(20), labels[n:]].mean())
    slack = 4 * np.std(covered) / math.sqrt(times)
    exact = math.ceil((n + 1) * coverage - 1e-9) / (n + 1)
    assert coverage <= exact <= coverage + 1 / (n + 1)
    assert abs(np.mean(covered) - exact) <= slack
    assert slack < 0.02


def test_coverage_of_a_sample_holds_on_average_only_once_it_is_large(rng):
    probs, labels = probabilities(rng, 30_000)
    fitted = conformal(probs[:5000], labels[:5000], coverage=0.95)
    sets = fitted.sets(probs[5000:])
    assert sets[np.arange(25_000), labels[5000:]].mean() == pytest.approx(0.95, abs=0.012)
    assert 1 < sets.sum(-1).mean() < 6


def test_sizes_are_ordered_as_the_scores_promise(rng):
    difficulty = rng.uniform(1, 6, size=(20_000, 1))
    logits = difficulty * rng.normal(size=(20_000, 50))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    probs = softmax(logits, -1)
    sizes = {}
    for score in SCORES:
        fitted = conformal(probs[:10_000], labels[:10_000], score=score)  # type: ignore[arg-type]
        sizes[score] = fitted.sets(probs[10_000:]).sum(-1)
    assert sizes["lac"].mean() < sizes["aps"].mean()
    assert sizes["raps"].mean() < sizes["aps"].mean()
    assert sizes["raps"].max() < sizes["aps"].max()


@pytest.mark.parametrize(
    ("n", "coverage", "rank"), [(9, 0.9, 9), (99, 0.55, 55), (99, 0.95, 95), (10, 0.5, 6)]
)
def test_the_rank_of_the_limit_is_exact(n, coverage, rank):
    scores = np.random.default_rng(0).permutation(n) + 1.0
    assert conformal_sets._limit(scores, coverage) == rank


@pytest.mark.parametrize("score", SCORES)
def test_too_few_examples_give_every_class(rng, score):
    probs, labels = probabilities(rng, 8)
    with pytest.warns(
        UserWarning, match=r"8 examples cannot show a coverage of 0\.9.*9 examples"
    ) as caught:
        fitted = conformal(probs, labels, score=score)
    assert caught[0].filename == __file__
    assert fitted.limit == math.inf
    assert fitted.sets(probs).all()


@pytest.mark.parametrize("score", SCORES)
def test_a_row_has_its_set_in_whatever_batch_it_comes(rng, score):
    probs, labels = probabilities(rng, 300)
    fitted = conformal(probs, labels, score=score)
    whole = fitted.sets(probs)
    alone = np.concatenate([fitted.sets(row[None]) for row in probs])
    assert np.array_equal(whole, alone)
    assert np.array_equal(fitted.sets(probs[::-1]), whole[::-1])
    assert np.array_equal(fitted.sets(probs.reshape(30, 10, 8)), whole.reshape(30, 10, 8))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_the_random_part_is_uniform(rng, dtype):
    rows = softmax(rng.normal(size=(20_000, 5)), -1).astype(dtype).astype(float)
    first, second = conformal_sets._uniform(rows, 0), conformal_sets._uniform(rows, 1)
    rows[:, [0, 1]] = rows[:, [1, 0]]
    for part in (first, second):
        assert kstest(part, "uniform").pvalue > 1e-4
    for other in (second, conformal_sets._uniform(rows, 0)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.04
    assert abs(np.corrcoef(first, rows.max(-1))[0, 1]) < 0.04


def few_rows(rng, n):
    """Probabilities of a calibrator that gives five different ones, and events."""
    p = rng.choice([0.55, 0.7, 0.8, 0.9, 0.95], n, p=[0.05, 0.05, 0.3, 0.3, 0.3])
    return np.stack([1 - p, p], -1), (rng.random(n) < p).astype(int)


def binned_rows(rng, n):
    """Of ten classes one has a probability of four, the rest is shared evenly."""
    p, top = rng.choice([0.5, 0.7, 0.85, 0.95], n), rng.integers(10, size=n)
    probs = np.repeat((1 - p)[:, None] / 9, 10, 1)
    probs[np.arange(n), top] = p
    return probs, (np.cumsum(probs, -1) < rng.random((n, 1))).sum(-1).clip(max=9)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("draw", [few_rows, binned_rows])
@pytest.mark.parametrize(
    ("fitted_in", "used_in"),
    [
        ("float64", "float32"),
        ("float64", "float16"),
        ("float32", "float64"),
        ("float16", "float64"),
        ("float64", "other last digits"),
    ],
)
def test_rounding_takes_no_coverage_where_many_rows_are_alike(score, draw, fitted_in, used_in):
    covered = np.empty((3, 40))
    for seed, sample in np.ndindex(covered.shape):  # for each seed: what one lacks another may have
        rng = np.random.default_rng(sample)
        probs, labels = draw(rng, 1000)
        fitted = conformal(
            probs[:500].astype(fitted_in), labels[:500], coverage=0.9, score=score, seed=seed
        )
        if used_in == "other last digits":
            new = probs[500:] * (1 + 1e-15 * rng.integers(-3, 4, (500, 1)))
        else:
            new = probs[500:].astype(used_in)
        covered[seed, sample] = fitted.sets(new)[np.arange(500), labels[500:]].mean()
    assert (covered.mean(1) >= 0.9 - 4 * covered.std(1) / math.sqrt(40)).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sharp", [20, 50])
def test_very_sure_probabilities_have_small_sets(score, sharp):
    """Those of the true class, where the model is wrong, are below 1e-17: 1 - p is 1."""
    covered, sizes = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = 2.5 * rng.normal(size=(2000, 10))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
        logs = log_softmax(sharp * logits, -1)
        fitted = conformal(np.exp(logs[:1000]), labels[:1000], score=score, seed=seed)
        sets = fitted.sets(np.exp(logs[1000:]))
        covered.append(sets[np.arange(1000), labels[1000:]].mean())
        sizes.append(sets.sum(-1).mean())
        if score == "lac":
            limit = np.sort(-logs[np.arange(1000), labels[:1000]])[math.ceil(1001 * 0.9) - 1]
            assert np.array_equal(sets, -logs[1000:] <= limit + 1e-5)
    assert np.mean(covered) == pytest.approx(0.9, abs=0.0015 + 4 * np.std(covered) / math.sqrt(20))
    assert np.mean(sizes) < 3


@pytest.mark.parametrize("score", SCORES)
def test_probabilities_too_small_for_float32_take_no_coverage(score):
    rng = np.random.default_rng(3)
    logits = 2.5 * rng.normal(size=(8000, 10))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    probs = softmax(60 * logits, -1)
    assert (probs[np.arange(8000), labels].astype(np.float32) == 0).mean() > 0.1
    fitted = conformal(probs[:4000], labels[:4000], score=score)
    sets = fitted.sets(probs[4000:].astype(np.float32))
    assert sets[np.arange(4000), labels[4000:]].mean() > 0.88
    two = softmax(20 * logits[:, :2], -1)  # of P(y = 1) what is left to one, below 6e-8
    events = (logits[:, 1] + rng.logistic(size=8000) > logits[:, 0]).astype(int)
    fitted = conformal(two[:4000], events[:4000], coverage=0.97, score=score)
    sets = fitted.sets(two[4000:, 1].astype(np.float32))
    assert sets[np.arange(4000), events[4000:]].mean() > 0.96


def test_a_limit_of_low_precision_serves_a_higher_one():
    probs = np.repeat([[0.3, 0.7]], 20, 0)  # 0.3 is a little more in float16
    fitted = conformal(probs.astype(np.float16), np.arange(20) % 2, score="lac")
    assert fitted.sets(probs).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_zeros_have_the_random_part_that_they_had(score, dtype):
    events = np.arange(100) % 2
    one = np.where(np.arange(100) < 80, events, 1 - events).astype(dtype)  # 80 of 100 are right
    for probs, seed in itertools.product((one, np.eye(2, dtype=dtype)[one.astype(int)]), range(5)):
        fitted = conformal(probs, events, coverage=0.7, score=score, seed=seed)
        assert fitted.sets(probs)[np.arange(100), events].mean() >= 0.7


@pytest.mark.parametrize("sharp", [5, 10])
def test_rows_of_a_sure_model_do_not_share_their_random_part(sharp):
    rng = np.random.default_rng(0)
    logits = sharp * (rng.normal(size=(2000, 10)) + 5 * np.eye(10)[rng.integers(10, size=2000)])
    probs = softmax(logits, -1)
    assert np.median(probs.max(-1)) > 1 - 1e-6
    assert len(np.unique(conformal_sets._uniform(probs, 0))) > 1900
    assert kstest(conformal_sets._uniform(probs, 0), "uniform").pvalue > 1e-4


def test_no_set_is_empty_if_so_wished(rng):
    probs, labels = probabilities(rng, 400, classes=3)
    probs = shift_prior(probs**4 / (probs**4).sum(-1, keepdims=True), [1 / 3] * 3, [1 / 3] * 3)
    fitted = conformal(probs, labels, coverage=0.3, score="lac")
    plain, filled = fitted.sets(probs), fitted.sets(probs, nonempty=True)
    empty = ~plain.any(-1)
    assert empty.any()
    assert np.array_equal(plain[~empty], filled[~empty])
    assert (filled[empty].sum(-1) == 1).all()
    assert (filled[empty].argmax(-1) == probs[empty].argmax(-1)).all()


def test_sets_of_tensors_are_tensors(rng):
    probs, labels = probabilities(rng, 100)
    given = torch.tensor(probs)
    fitted = conformal(given, torch.tensor(labels))
    assert fitted == conformal(probs, labels)
    sets = fitted.sets(given)
    assert sets.dtype == torch.bool
    assert np.array_equal(sets.numpy(), fitted.sets(probs))
    assert fitted.sets(given.float()).shape == (100, 8)


def test_one_probability_stands_for_two_classes(rng):
    probs, labels = probabilities(rng, 200, classes=2)
    assert conformal(probs[:, 1], labels).classes == 2
    assert np.array_equal(
        conformal(probs[:, 1], labels, score="lac").sets(probs[:, 1]),
        conformal(np.stack([1 - probs[:, 1], probs[:, 1]], -1), labels, score="lac").sets(probs),
    )


def test_ignored_examples_do_not_count(rng):
    probs, labels = probabilities(rng, 300)
    some = np.where(np.arange(300) % 3 == 0, -100, labels)
    assert conformal(probs, some) == conformal(probs[some >= 0], labels[some >= 0])


@pytest.mark.parametrize(
    ("probs", "labels", "options", "message"),
    [
        ([[0.5, 0.6]], [0], {}, "probs must sum to one in each row, got 1.1 at row 0"),
        ([[1.5, -0.5]], [0], {}, r"probs must be in \[0, 1\].*take the softmax first"),
        ([[np.nan, 1.0]], [0], {}, r"probs must be in \[0, 1\]: NaN"),
        ([[1.0]], [0], {}, r"probs must be \(..., classes\) or \(n,\), got \(1, 1\)"),
        ([[0.5, 0.5]], [2], {}, r"labels must be in \[0, 2\)"),
        ([[0.5, 0.5]], [0, 1], {}, "one row of logits is wanted for each label"),
        ([[0.5, 0.5]], [-100], {}, "nothing to measure"),
        ([[0.5, 0.5]], [0], {"coverage": 90}, "coverage must be between 0 and 1, got 90"),
        ([[0.5, 0.5]], [0], {"score": "best"}, "score must be one of .*, got 'best'"),
    ],
)
def test_conformal_refuses(probs, labels, options, message):
    with pytest.raises(ValueError, match=message):
        conformal(probs, labels, **options)


def test_sets_refuse_another_number_of_classes(rng):
    fitted = conformal(*probabilities(rng, 100))
    with pytest.raises(ValueError, match="probs must have 8 classes, as in conformal, got 3"):
        fitted.sets([[0.2, 0.3, 0.5]])


# ------------------------------------------------------------------------------ another class mix

OLD, NEW = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
CENTRES = np.array([[0.0, 0.0], [1.5, 0.5], [0.5, 2.0]])


def mixture(rng, n, prior):
    """Log-likelihoods ``(n, 3)`` of points under three normal classes, and the classes."""
    labels = rng.choice(3, n, p=prior)
    points = CENTRES[labels] + rng.normal(size=(n, 2))
    return -0.5 * ((points[:, None] - CENTRES) ** 2).sum(-1), labels


def nll(probs, labels):
    return -np.log(probs[np.arange(len(labels)), labels]).mean()


def test_shift_is_bayes_rule(rng):
    likelihood, _ = mixture(rng, 500, NEW)
    old, new = (softmax(likelihood + np.log(prior), -1) for prior in (OLD, NEW))
    np.testing.assert_allclose(shift_prior(old, OLD, NEW), new, rtol=1e-9)
    np.testing.assert_allclose(shift_prior(shift_prior(old, OLD, NEW), NEW, OLD), old, rtol=1e-9)
    np.testing.assert_allclose(shift_prior(old, OLD, OLD), old, rtol=1e-12)
    cube = old.reshape(10, 50, 3)
    np.testing.assert_allclose(shift_prior(cube, OLD, NEW), new.reshape(10, 50, 3), rtol=1e-9)


def test_shift_of_one_probability_is_that_of_two(rng):
    p = rng.random(50)
    both = shift_prior(np.stack([1 - p, p], -1), [0.4, 0.6], [0.9, 0.1])
    alone = shift_prior(p, [0.4, 0.6], [0.9, 0.1])
    assert alone.shape == (50,)
    np.testing.assert_allclose(alone, both[:, 1])


def test_shift_keeps_kind_and_precision():
    given = torch.tensor([[0.5, 0.5]], dtype=torch.float32)
    found = shift_prior(given, torch.tensor([0.5, 0.5]), [0.2, 0.8])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.8]]))
    assert estimate_prior(given, [0.5, 0.5]).dtype == torch.float32
    assert isinstance(shift_prior([[0.5, 0.5]], [0.5, 0.5], [0.5, 0.5]), np.ndarray)


def test_a_class_may_vanish():
    found = shift_prior([[0.2, 0.3, 0.5]], [0.4, 0.4, 0.2], [0.5, 0.5, 0.0])
    np.testing.assert_allclose(found, [[0.4, 0.6, 0.0]])
    with pytest.raises(ValueError, match=r"row 1 has no probability outside .* new prior is 0"):
        shift_prior([[0.5, 0.5], [0.0, 1.0]], [0.5, 0.5], [1.0, 0.0])


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([0.5, 0.5, 0.0], "old_prior must be 1e-12 or more in every class, got 0"),
        ([1.2, -0.1, -0.1], "old_prior must be 1e-12 or more in every class, got -0.1"),
        ([0.5, 0.5, math.nan], "old_prior must be 1e-12 or more in every class, got nan"),
        ([0.5, 0.5], r"one share for each of 3 classes, got \(2,\)"),
        ([[0.5, 0.3, 0.2]], r"one share for each of 3 classes, got \(1, 3\)"),
        ([50.0, 30.0, 20.0], "old_prior must sum to one, got 100: divide counts by their sum"),
    ],
)
def test_priors_that_are_none_are_refused(prior, message):
    for call in (
        lambda: shift_prior([[0.2, 0.3, 0.5]], prior, OLD),
        lambda: estimate_prior([[0.2, 0.3, 0.5]], prior),
        lambda: PriorCorrection(plain(3)).set_priors(prior, OLD),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_negative_new_prior_is_refused():
    with pytest.raises(ValueError, match=r"new_prior must be 0 or more in every class, got -0\.1"):
        shift_prior([[0.2, 0.3, 0.5]], OLD, [0.6, 0.5, -0.1])
    with pytest.raises(TypeError, match="new_prior must be floating point, got int64"):
        shift_prior([[0.2, 0.3, 0.5]], OLD, [1, 0, 0])


@pytest.mark.parametrize("new", [OLD, NEW, [0.98, 0.01, 0.01], [0.0, 0.5, 0.5]])
def test_the_prior_of_unlabelled_data_is_found(rng, new):
    likelihood, labels = mixture(rng, 20_000, new)
    found = estimate_prior(softmax(likelihood + np.log(OLD), -1), OLD)
    assert found.sum() == pytest.approx(1)
    assert np.abs(found - np.bincount(labels, minlength=3) / 20_000).max() < 0.015


@pytest.mark.parametrize("n", [4, 40, 400])
def test_the_prior_found_is_the_best_with_an_example_more_for_each_class(rng, n):
    likelihood, _ = mixture(rng, n, NEW)
    probs = softmax(likelihood + np.log(OLD), -1)

    def loss(free):
        prior = softmax([0.0, *free])
        return -np.log(probs / OLD @ prior).sum() - 3 * OLD @ np.log(prior)

    best = optimize.minimize(loss, [0.0, 0.0], tol=1e-10)
    found = estimate_prior(probs, OLD)
    assert loss(np.log(found[1:] / found[0])) - best.fun < priors.PRECISION
    np.testing.assert_allclose(found, softmax([0.0, *best.x]), atol=0.04 / math.sqrt(n))


def test_a_search_that_does_not_settle_says_so(rng, monkeypatch):
    monkeypatch.setattr(priors, "ROUNDS", 1)
    likelihood, _ = mixture(rng, 400, NEW)
    with pytest.warns(UserWarning, match="had not settled after 1 steps"):
        found = estimate_prior(softmax(likelihood + np.log(OLD), -1), OLD)
    assert found.sum() == pytest.approx(1)


def test_one_row_tells_a_prior():
    assert estimate_prior([[0.5, 0.3, 0.2]], OLD).tolist() == pytest.approx(OLD)  # nothing new
    given = [[0.9, 0.05, 0.05]]
    found = estimate_prior(given, OLD)
    # where EM stands still: the row, shifted, and three examples at the old frequencies
    np.testing.assert_allclose(found, (shift_prior(given, OLD, found)[0] + 3 * OLD) / 4, atol=0.01)
    with pytest.raises(ValueError, match="nothing to measure"):
        estimate_prior(np.empty((0, 3)), OLD)


def many_classes(rng, n, prior, distance):
    """Log-likelihoods ``(n, classes)`` of normal inputs, one coordinate for each class."""
    labels = rng.choice(len(prior), n, p=prior)
    points = rng.normal(size=(n, len(prior)))
    points[np.arange(n), labels] += distance
    return distance * points, labels


@pytest.mark.parametrize(("classes", "n", "worse"), [(10, 100, 0.05), (100, 300, 0.15)])
def test_without_a_shift_little_is_lost(classes, n, worse):
    """Few rows for each class: a maximum of the likelihood alone rules classes out."""
    old, lost = np.full(classes, 1 / classes), []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        found = estimate_prior(softmax(many_classes(rng, n, old, 2.5)[0], -1), old)
        logits, labels = many_classes(rng, 2000, old, 2.5)
        probs = softmax(logits, -1)
        lost.append(nll(shift_prior(probs, old, found), labels) - nll(probs, labels))
    assert np.mean(lost) < worse


@pytest.mark.parametrize(("n", "short"), [(1000, 0.04), (4000, 0.02)])
def test_a_strong_shift_of_ten_classes_is_found(n, short):
    old, new = np.full(10, 0.1), np.array([0.5, 0.2, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01, 0.0])
    gained, lacking = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        found = estimate_prior(softmax(many_classes(rng, n, new, 1.5)[0], -1), old)
        logits, labels = many_classes(rng, 3000, new, 1.5)
        probs = softmax(logits, -1)
        plain_nll, found_nll, known_nll = (
            nll(shift_prior(probs, old, prior), labels) for prior in (old, found, new)
        )
        gained.append(plain_nll - found_nll)
        lacking.append(found_nll - known_nll)
    assert np.mean(gained) > 0.3
    assert np.mean(lacking) < short


def plain(classes):
    """A fitted calibrator that changes nothing."""
    return Identity().fit(np.eye(classes), np.arange(classes))


def refitted(logits, labels):
    """The best temperature and bias of each class for labelled data: what labels could give."""

    def loss(x):
        return nll(softmax(logits / np.exp(x[0]) + x[1:], -1), labels)

    return optimize.minimize(loss, np.zeros(4)).fun


def test_a_calibrator_is_adapted_without_labels(rng):
    likelihood, labels = mixture(rng, 10_000, OLD)
    fitted = TemperatureScaling().fit(2.5 * (likelihood + np.log(OLD)), labels)
    likelihood, labels = mixture(rng, 10_000, NEW)
    logits = 2.5 * (likelihood + np.log(OLD))
    adapted = label_shift(fitted, logits, old_prior=OLD)
    assert np.abs(adapted.new_prior_.numpy() - NEW).max() < 0.02
    before, after = (nll(each.predict_proba(logits), labels) for each in (fitted, adapted))
    ideal = nll(softmax(likelihood + np.log(NEW), -1), labels)
    assert before - ideal > 0.2
    assert after - ideal < 0.002
    assert after - refitted(logits, labels) < 0.002


def test_one_logit_is_adapted_without_labels(rng):
    labels = (rng.random(6000) < 0.5).astype(int)
    fitted = TemperatureScaling().fit(3 * 2 * rng.normal(2 * labels - 1), labels)
    labels = (rng.random(6000) < 0.1).astype(int)
    odds = 2 * rng.normal(2 * labels - 1)  # for classes that are as frequent
    adapted = label_shift(fitted, 3 * odds, old_prior=[0.5, 0.5])
    assert adapted.new_prior_[1].item() == pytest.approx(0.1, abs=0.02)
    found, truth = adapted.predict_proba(3 * odds), 1 / (1 + np.exp(-odds - np.log(0.1 / 0.9)))
    assert found.shape == (6000,)
    assert np.abs(found - truth).max() < 0.05


def test_correction_adds_the_logarithm_of_the_ratio(rng):
    logits, labels = drawn(rng, 300, 3, temperature=2.0)
    inside = TemperatureScaling().fit(logits, labels)
    module = PriorCorrection(inside).set_priors(OLD, NEW)
    assert module.size(3) == 3
    expected = log_softmax(inside(torch.tensor(logits)).numpy() + np.log(NEW / OLD), -1)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        found = module(torch.tensor(logits, dtype=dtype))
        assert found.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        assert (found.amax(-1) == 0).all()
        np.testing.assert_allclose(found.double().log_softmax(-1), expected, atol=tolerance)
    np.testing.assert_allclose(
        module.predict_proba(logits), shift_prior(inside.predict_proba(logits), OLD, NEW), atol=1e-6
    )


def test_correction_changes_the_answer_and_says_so():
    module = PriorCorrection(plain(2)).set_priors([0.5, 0.5], [0.1, 0.9])
    assert not module.keeps_argmax
    assert not module.monotone
    assert module(torch.tensor([[1.0, 0.0]])).argmax() == 1


def test_correction_of_masked_and_vanished_classes():
    module = PriorCorrection(plain(3)).set_priors(OLD, [0.4, 0.6, 0.0])
    rows = np.array([[1.0, 1.0, 1.0], [1.0, -np.inf, 3.0], [-np.inf, -np.inf, 1.0]])
    found = module.predict_proba(rows)
    np.testing.assert_allclose(found[0], [0.8 / 2.8, 2 / 2.8, 0], atol=1e-6)
    np.testing.assert_allclose(found[1:], [[1, 0, 0], [0, 0, 1]], atol=1e-6)


def test_corrections_stack(rng):
    logits = rng.normal(size=(20, 3))
    once = PriorCorrection(plain(3)).set_priors(OLD, NEW)
    back = PriorCorrection(once).set_priors(NEW, OLD)
    np.testing.assert_allclose(back.predict_proba(logits), softmax(logits, -1), atol=1e-6)


def test_fit_forgets_a_correction_and_takes_the_frequencies_of_the_labels(rng):
    logits, labels = drawn(rng, 600, 3, temperature=2.0)
    labels[:50] = -100
    weight = rng.uniform(0.5, 2, 600)
    module = PriorCorrection(TemperatureScaling().fit(logits, labels)).set_priors(OLD, NEW)
    module.fit(3 * logits, labels, sample_weight=weight)
    alone = TemperatureScaling().fit(3 * logits, labels, sample_weight=weight)
    assert torch.equal(module.calibrator.state_dict()["temperature_"], alone.temperature_)
    np.testing.assert_allclose(module.predict_proba(logits), alone.predict_proba(logits))
    kept = labels >= 0
    shares = np.bincount(labels[kept], weight[kept]) / weight[kept].sum()
    np.testing.assert_allclose(module.old_prior_, shares, rtol=1e-6)
    odds, events = logits[:, 1] - logits[:, 0], (labels == 1).astype(int)
    binary = PriorCorrection(TemperatureScaling()).fit(odds, events)
    assert binary.predict_proba(odds).shape == (600,)
    assert binary.old_prior_[1].item() == pytest.approx(events.mean())


def test_a_class_that_fit_did_not_see_is_left_alone(rng):
    logits = rng.normal(size=(100, 3))
    module = PriorCorrection(Identity()).fit(logits, rng.integers(2, size=100))
    np.testing.assert_allclose(module.predict_proba(logits), softmax(logits, -1), atol=1e-6)


def test_correction_of_what_is_not_fitted_is_refused():
    with pytest.raises(RuntimeError, match="this TemperatureScaling is not fitted"):
        PriorCorrection(TemperatureScaling()).set_priors([0.5, 0.5], [0.5, 0.5])
    with pytest.raises(RuntimeError, match="this TemperatureScaling is not fitted"):
        label_shift(TemperatureScaling(), np.zeros((1, 2)), old_prior=[0.5, 0.5])
    with pytest.raises(RuntimeError, match="this PriorCorrection is not fitted"):
        PriorCorrection(plain(2)).predict_proba([[0.0, 0.0]])


class Featured(Calibrator):
    """A calibrator that adds its features to the logits."""

    needs_features = True

    def size(self, classes):
        return 0

    def _fit(self, given, context):
        pass

    def _transform(self, logits, top, features):
        return logits + features


def test_features_reach_the_calibrator_inside(rng):
    logits, labels = drawn(rng, 200, 3)
    features = rng.normal(size=(200, 3))
    inside = Featured().fit(logits, labels, features=features)
    module = label_shift(inside, logits, old_prior=OLD, features=features)
    assert module.needs_features
    assert not PriorCorrection(plain(3)).needs_features
    expected = shift_prior(softmax(logits + features, -1), OLD, module.new_prior_.double())
    np.testing.assert_allclose(module.predict_proba(logits, features), expected, atol=1e-5)
    with pytest.raises(ValueError, match="PriorCorrection needs features"):
        module.fit(logits, labels)
