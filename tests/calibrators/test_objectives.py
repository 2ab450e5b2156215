"""The objectives against their formulas, their gradients against differences; and the folds."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy.special import softmax

from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.objectives import (
    PROPER,
    Objective,
    _binned_gaps,
    _gridded_gaps,
    _memberships,
    _with_likelihood,
    ece,
    nll,
    pointwise,
    soft_ece,
)
from tests.support.simulate import drawn, drawn_pairs

SMOOTH: dict[str, Objective] = {
    **PROPER,
    "smoothing": partial(nll, smoothing=0.4),
    "soft_ece": soft_ece,
    "charbonnier": partial(soft_ece, delta=1e-3),
    "wide": partial(soft_ece, sigma=0.2, delta=0.05),
    "pointwise": pointwise,
    "wide pointwise": partial(pointwise, sigma=0.2, delta=0.05),
    "anchored": partial(_with_likelihood, soft_ece, 0.3),
    "anchored pointwise": partial(_with_likelihood, pointwise, 2.0),
    "not anchored": partial(_with_likelihood, soft_ece, 0.0),
}


ALL: dict[str, Objective] = {**SMOOTH, "ece": ece}


def kernel(confidence, sigma):
    weights = [math.exp(-((confidence - (b + 0.5) / 15) ** 2) / (2 * sigma**2)) for b in range(15)]
    return [w / sum(weights) for w in weights]


def nll_of(probs, label, smoothing=0.0):
    possible = probs[probs > 0]
    own, mean = -math.log(probs[label]), -np.log(possible).mean()
    return (1 - smoothing) * own + smoothing * mean


def brier_of(probs, label):
    return sum((p - (k == label)) ** 2 for k, p in enumerate(probs))


def each(score):
    def measure(probs, labels, share):
        return sum(s * score(p, y) for p, y, s in zip(probs, labels, share, strict=True))

    return measure


def top_of(probs, labels):
    return probs.max(-1), [float(p.argmax() == y) for p, y in zip(probs, labels, strict=True)]


def soft_ece_of(probs, labels, share, sigma=0.05, delta=0.0):
    total = 0.0
    confidence, right = top_of(probs, labels)
    parts = [kernel(c, sigma) for c in confidence]
    for b in range(15):
        mass = sum(s * part[b] for s, part in zip(share, parts, strict=True))
        gap = sum(
            s * part[b] * (c - a)
            for s, part, c, a in zip(share, parts, confidence, right, strict=True)
        )
        total += mass * (math.sqrt((gap / mass) ** 2 + delta**2) - delta)
    return total


def pointwise_of(probs, labels, share, sigma=0.05, delta=1e-3):
    total = 0.0
    for c, a, s in zip(*top_of(probs, labels), share, strict=True):
        for b, part in enumerate(kernel(c, sigma)):
            total += s * part * (math.sqrt((a - (b + 0.5) / 15) ** 2 + delta**2) - delta)
    return total


def ece_of(probs, labels, share):
    confidence, right = top_of(probs, labels)
    gaps = [0.0] * 15
    for c, a, s in zip(confidence, right, share, strict=True):
        gaps[math.ceil(c * 15) - 1] += s * (c - a)
    return sum(map(abs, gaps))


def anchored(measure, weight):
    return lambda *given: measure(*given) + weight * each(nll_of)(*given)


DEFINITIONS = {
    "nll": each(nll_of),
    "ls": each(partial(nll_of, smoothing=0.05)),
    "smoothing": each(partial(nll_of, smoothing=0.4)),
    "brier": each(brier_of),
    "mse": each(lambda probs, label: brier_of(probs, label) / len(probs)),
    "soft_ece": soft_ece_of,
    "charbonnier": partial(soft_ece_of, delta=1e-3),
    "wide": partial(soft_ece_of, sigma=0.2, delta=0.05),
    "pointwise": pointwise_of,
    "wide pointwise": partial(pointwise_of, sigma=0.2, delta=0.05),
    "anchored": anchored(soft_ece_of, 0.3),
    "anchored pointwise": anchored(pointwise_of, 2.0),
    "not anchored": soft_ece_of,
    "ece": ece_of,
}


@pytest.fixture(scope="module")
def data():
    """Over-confident logits with a few masked classes, labels and weights."""
    rng = np.random.default_rng(7)
    logits, labels = drawn(rng, 60, 6, 2.0)
    hidden = rng.random(logits.shape) < 0.1
    hidden[np.arange(60), labels] = False
    return np.where(hidden, -math.inf, logits), labels, rng.exponential(size=60)


@pytest.fixture(scope="module")
def records(data):
    logits, labels, weight = data
    return tabulate(examples(logits, labels, weight))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("u", [-2.5, -0.7, 0.0, 0.9, 2.2])
def test_one_sharpness_gives_the_value_of_the_definition(data, records, name, u):
    logits, labels, weight = data
    probs = softmax(math.exp(u) * logits, -1)
    expected = DEFINITIONS[name](probs, labels, weight / weight.sum())
    found = ALL[name](records, u)
    assert isinstance(found.value, float)
    assert found.value == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found.gradient.shape == (60,)


@pytest.mark.parametrize("name", ALL)
def test_a_sharpness_for_each_gives_the_value_of_the_definition(rng, data, records, name):
    logits, labels, weight = data
    u = rng.uniform(-2.5, 2.5, 60)
    probs = softmax(np.exp(u)[:, None] * logits, -1)
    expected = DEFINITIONS[name](probs, labels, weight / weight.sum())
    assert ALL[name](records, u).value == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_objectives_are_exact_for_two_and_for_many_classes(rng):
    for classes in (2, 400):
        logits, labels = drawn(rng, 30, classes, 2.0)
        found = tabulate(examples(logits, labels))
        for name, measure in ALL.items():
            expected = DEFINITIONS[name](softmax(0.6 * logits, -1), labels, np.full(30, 1 / 30))
            value = measure(found, math.log(0.6)).value
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-5), (name, classes)


@pytest.mark.parametrize("measure", [soft_ece, pointwise])
def test_a_curve_that_is_known_stands_for_the_table(records, measure):
    u = np.linspace(-2, 2, 60)
    without = replace(records, table=np.full_like(records.table, math.nan))
    found = measure(without, u, curve=records.log_partition(np.exp(u)))
    expected = measure(records, u)
    assert found.value == expected.value
    np.testing.assert_array_equal(found.gradient, expected.gradient)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradient_is_that_of_central_differences(rng, records, name):
    u, step = rng.uniform(-2.5, 2.5, 60), 1e-6
    found = SMOOTH[name](records, u).gradient
    for i in range(60):
        shift = step * np.eye(60)[i]
        above, below = (SMOOTH[name](records, u + s).value for s in (shift, -shift))
        assert found[i] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=2e-8)


@pytest.mark.parametrize("name", SMOOTH)
def test_beyond_the_nodes_the_gradient_is_that_of_differences(records, name):
    for at in (-4.5, 3.9, 4.5):
        u, step = np.full(60, at), 1e-5
        found = SMOOTH[name](records, u).gradient.sum()
        above, below = (SMOOTH[name](records, u + s).value for s in (step, -step))
        assert found == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-7)


def test_the_binned_error_has_no_gradient(records):
    assert np.isnan(ece(records, 0.2).gradient).all()


@pytest.mark.parametrize("gaps", [_binned_gaps, _gridded_gaps])
@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.3, 5.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.1])
def test_the_gradient_of_binned_gaps_is_that_of_differences(rng, gaps, sigma, delta):
    confidence, outcome = drawn_pairs(rng, 40, 0.2, 0.05, 0.999)
    share = rng.dirichlet(np.ones(40))
    measure = partial(gaps, outcome=outcome, share=share, sigma=sigma, delta=delta)
    value, gradient = measure(confidence)
    assert value >= 0
    for i in range(40):
        shift = 1e-7 * np.eye(40)[i]
        difference = measure(confidence + shift)[0] - measure(confidence - shift)[0]
        assert gradient[i] == pytest.approx(difference / 2e-7, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.1])
def test_the_grid_changes_next_to_nothing(rng, delta):
    confidence, outcome = drawn_pairs(rng, 3000, 0.2)
    confidence[:3] = 0, 0.5, 1
    arguments = confidence, outcome, rng.dirichlet(np.ones(3000))
    for sigma in (0.03, 0.05, 0.3):
        exact, gridded = (
            measure(*arguments, sigma=sigma, delta=delta)
            for measure in (_binned_gaps, _gridded_gaps)
        )
        assert gridded[0] == pytest.approx(exact[0], rel=1e-6)
        error = np.abs(gridded[1] - exact[1]).max()
        assert error < 0.01 * np.abs(exact[1]).max()


@pytest.mark.parametrize("sigma", [0.003, 0.015, 0.0199, 0.0201, 0.05, 1.0])
def test_parts_are_those_of_the_definition(rng, sigma):
    confidence = np.concatenate([rng.random(50), [0, 0.5, 1]])
    expected = np.transpose([kernel(c, sigma) for c in confidence])
    np.testing.assert_allclose(_memberships(confidence, sigma), expected, rtol=1e-9, atol=1e-300)


def test_delta_makes_small_gaps_count_by_their_square(rng, records):
    for u in (-1.0, 0.0, 1.0):
        values = [soft_ece(records, u, delta=d).value for d in (0.0, 1e-3, 0.01, 0.1, 1.0)]
        assert values == sorted(values, reverse=True)
        assert values[0] - values[1] < 1e-3
    confidence, outcome = np.full(10, 0.5), np.arange(10) < 4  # a gap of 0.1 in the middle bin
    share = np.full(10, 0.1)
    for delta in (0.0, 1e-3, 0.1, 10.0):
        value, _ = _binned_gaps(confidence, outcome, share, sigma=0.01, delta=delta)
        assert value == pytest.approx(math.hypot(0.1, delta) - delta, rel=1e-9)


def test_calibrated_answers_have_the_least_soft_error(rng):
    logits, labels = drawn(rng, 4000, 5, 2.0)
    records = tabulate(examples(logits, labels))
    at = {t: soft_ece(records, -math.log(t)).value for t in (0.5, 1.0, 1.5, 2.0, 2.7, 4.0)}
    assert min(at, key=lambda t: at[t]) == 2.0


@pytest.mark.parametrize(("right", "best"), [(0.7, "highest"), (0.3, "lowest")])
def test_pointwise_makes_all_sure_or_none(right, best):
    labels = np.where(np.arange(100) < 100 * right, 0, 1)
    records = tabulate(examples(np.tile([1.0, 0.0], (100, 1)), labels))
    grid = np.linspace(-2.9, 2.9, 59)
    cost = [pointwise(records, u).value for u in grid]
    assert int(np.argmin(cost)) == (58 if best == "highest" else 0)
    if best == "highest":
        confidence = np.exp(-records.log_partition(np.exp(grid[-1])).value)
        assert confidence.min() > 0.999
        honest = min(grid, key=lambda u: nll(records, u).value)
        assert np.exp(-records.log_partition(np.exp(honest)).value)[0] == pytest.approx(
            0.7, abs=0.02
        )


@pytest.mark.parametrize("name", ALL)
def test_weights_count_as_repeated_rows(rng, data, name):
    logits, labels, _ = data
    times = rng.integers(1, 5, 60)
    weighted = tabulate(examples(logits, labels, times.astype(float)))
    repeated = tabulate(examples(np.repeat(logits, times, 0), np.repeat(labels, times)))
    u = rng.uniform(-2, 2, 60)
    one, many = ALL[name](weighted, u), ALL[name](repeated, np.repeat(u, times))
    assert one.value == pytest.approx(many.value, rel=1e-6)
    per_row = np.bincount(np.repeat(np.arange(60), times), many.gradient, 60)
    np.testing.assert_allclose(one.gradient, per_row, rtol=1e-5, atol=1e-8)
