"""Temperatures by a small network: its gradient, its inputs, and what it recovers."""

import math
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from calibrant._core.chunks import examples
from calibrant.calibrators import network
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.network import (
    _MIN_TEMPERATURE,
    ParametrizedTemperatureScaling,
    _initial,
    _network_objective,
)
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.smart import SMART
from tests.support.networks import at_rate, fitted, margins, masked, value_of
from tests.support.simulate import drawn


@pytest.fixture(scope="module")
def data():
    """Over-confident logits with masked classes, labels and weights."""
    rng = np.random.default_rng(11)
    logits, labels = drawn(rng, 400, 6, 2.0, scale=4.0)
    return masked(rng, logits, labels), labels, rng.exponential(size=400)


def outputs(parameters, widths, inputs):
    """Temperatures, one sample and one unit after the other."""
    found = []
    for row in inputs:
        values, at = list(row), 0
        for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
            sums = []
            for unit in range(fan_out):
                weights = [parameters[at + i * fan_out + unit] for i in range(fan_in)]
                bias = parameters[at + fan_in * fan_out + unit]
                sums.append(sum(w * v for w, v in zip(weights, values, strict=True)) + bias)
            at += fan_in * fan_out + fan_out
            values = sums if layer == len(widths) - 2 else [max(s, 0) for s in sums]
        assert at == len(parameters)
        found.append(math.log1p(math.exp(values[0])) + 0.1)
    return np.array(found)


def parameters_of(calibrator):
    """All weights and biases of a fitted network, layer by layer."""
    state = calibrator.state_dict()
    layers = range(len(calibrator.hidden) + 1)
    return np.concatenate(
        [
            state[f"{part}{i}_"].double().numpy().ravel()
            for i in layers
            for part in ("weight", "bias")
        ]
    )


WIDTHS = [(1, 1), (1, 16, 1), (1, 16, 16, 1), (10, 5, 5, 1), (3, 4, 2, 1)]


@pytest.mark.parametrize("widths", WIDTHS)
def test_value_and_gradient_of_the_network_are_those_of_differences(rng, widths):
    inputs = rng.normal(size=(30, widths[0]))
    size = sum((a + 1) * b for a, b in pairwise(widths))
    parameters = rng.normal(size=size)
    slope, curve = rng.normal(size=(2, 30))

    def measure(u):
        return float((slope * u + curve * u**2).sum()), slope + 2 * curve * u

    function = _network_objective(inputs, widths, measure)
    value, gradient = function(parameters)
    log_sharpness = -np.log(outputs(parameters, widths, inputs))
    assert value == pytest.approx(measure(log_sharpness)[0], rel=1e-12)
    step = 1e-6 * np.eye(size)
    expected = [(function(parameters + s)[0] - function(parameters - s)[0]) / 2e-6 for s in step]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert np.count_nonzero(gradient) > size / 4


@pytest.mark.parametrize("widths", [(1, 1), (1, 16, 1), (1, 5, 5, 1)])
@pytest.mark.parametrize("kind", ["spread", "tied", "equal"])
def test_straight_lines_join_the_outputs_of_many_single_inputs(rng, monkeypatch, widths, kind):
    values = {"spread": rng.normal(size=4000), "tied": rng.integers(0, 9, 4000), "equal": [0.7]}
    inputs = np.broadcast_to(np.asarray(values[kind], dtype=float), 4000)[:, None]
    parameters = rng.normal(size=sum((a + 1) * b for a, b in pairwise(widths)))
    slope = rng.normal(size=4000)

    def measure(u):
        return float(slope @ u + (u**2).sum()), slope + 2 * u

    whole: list[Any] = []
    joined: list[Any] = []
    for points, results in ((4000, whole), (800, joined)):
        monkeypatch.setattr(network, "_MAX_POINTS", points)
        results += _network_objective(inputs, widths, measure)(parameters)
    assert joined[0] == pytest.approx(whole[0], rel=1e-5)
    scale = np.abs(whole[1]).max()
    np.testing.assert_allclose(joined[1], whole[1], rtol=0, atol=1e-2 * scale)
    assert (kind == "spread") != np.allclose(joined[1], whole[1], rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("widths", WIDTHS)
def test_every_sample_starts_at_one_temperature(rng, widths, temperature):
    parameters = _initial(widths, temperature, 5)
    found = outputs(parameters, widths, 10 * rng.normal(size=(5, widths[0])))
    np.testing.assert_allclose(found, temperature, rtol=1e-12)
    hidden = parameters[: -widths[-2] - 1]
    assert len(np.unique(hidden)) == len(hidden)  # drawn, or units would stay alike
    if len(widths) > 2:
        first = hidden[: (widths[0] + 1) * widths[1]] * math.sqrt(widths[0])
        assert 0.5 < np.abs(first).max() <= 1


def test_a_start_below_the_floor_is_just_above_it():
    parameters = _initial((1, 1), 0.05, 0)
    assert _MIN_TEMPERATURE < outputs(parameters, (1, 1), [[0.0]])[0] < 0.11


@pytest.mark.parametrize("kind", [SMART, ParametrizedTemperatureScaling])
def test_the_first_step_is_the_best_single_temperature(data, kind):
    logits, labels, weight = data
    found = fitted(kind(steps=1), logits, labels, sample_weight=weight).temperature(logits)
    best = TemperatureScaling().fit(logits, labels, sample_weight=weight)
    np.testing.assert_allclose(found, float(best.temperature_), rtol=1e-5)
    assert abs(found[0] - 1) > 0.3


def test_the_second_step_has_the_length_of_the_rate(data):
    with at_rate(3e-4):
        smart = fitted(SMART(steps=2), *data[:2])
    moved = smart.weight1_.abs().numpy()
    assert moved.max() == pytest.approx(3e-4, rel=1e-3)


def test_the_first_step_may_be_the_identity(data):
    found = fitted(SMART(start="identity", steps=1), *data[:2]).temperature(data[0])
    np.testing.assert_allclose(found, 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("calibrator", "size"),
    [
        (SMART(), 49),
        (SMART(hidden=(16, 16)), 321),
        (SMART(hidden=()), 2),
        (SMART(indicator="entropy"), 49),
        (SMART(indicator="all"), 7 * 16 + 17),
        (ParametrizedTemperatureScaling(), 91),
        (ParametrizedTemperatureScaling(hidden=(3,)), 37),
    ],
)
def test_the_size_is_the_number_of_weights_and_biases(rng, calibrator, size):
    logits, labels = drawn(rng, 60, 6)
    assert calibrator.size(6) == size
    calibrator.steps = 3
    with (
        pytest.warns(UserWarning, match=f"has {size} parameters for 60 examples")
        if (5 * size > 60)
        else warnings.catch_warnings()
    ):
        calibrator.fit(logits, labels)
    assert len(parameters_of(calibrator)) == size
    assert calibrator.solution_.x.size == size


@pytest.mark.parametrize("hidden", [(), (16,), (4, 3)])
def test_temperatures_are_the_outputs_of_the_network(data, hidden):
    logits, labels, weight = data
    smart = fitted(SMART(hidden=hidden, steps=40), logits, labels, sample_weight=weight)
    standard = (margins(logits) - float(smart.mean_)) / float(smart.deviation_)
    expected = outputs(parameters_of(smart), (1, *hidden, 1), standard[:, None])
    found = smart.temperature(logits)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.ptp(found) > 0.05


def test_no_temperature_is_below_the_floor(rng):
    logits = rng.normal(size=(300, 4))
    smart = SMART(steps=400, likelihood=1.0)
    with (
        at_rate(0.1),
        told(),
        pytest.warns(UserWarning, match="no best temperature in .* stopped at 0.05. 100 % of"),
    ):
        smart.fit(logits, logits.argmax(-1))
    found = smart.temperature(logits)
    assert found.min() >= 0.1
    assert found.max() < 0.2


def test_a_row_with_one_possible_class_stands_at_the_largest_margin_seen(rng):
    logits, labels = drawn(rng, 40, 5)
    given = np.concatenate([logits, np.full((10, 5), -np.inf)])
    given[40:, 1] = 3.0
    smart = fitted(SMART(steps=5), given, np.append(labels, [1] * 10))
    largest = margins(logits).max()
    x = np.append(margins(logits), [largest] * 10)
    assert float(smart.high_) == pytest.approx(largest, rel=1e-6)
    assert float(smart.mean_) == pytest.approx(x.mean(), rel=1e-5)
    assert float(smart.deviation_) == pytest.approx(x.std(), rel=1e-5)
    found = smart.temperature(given)
    np.testing.assert_allclose(found[40:], found[margins(logits).argmax()], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are)")
def test_rows_with_one_possible_class_alone_change_nothing(rng):
    given = np.full((30, 5), -np.inf)
    given[:, 1] = 3.0
    smart = SMART(start="identity", steps=5)
    with told(), pytest.warns(UserWarning, match="no best temperature in"):
        fitted(smart, given, np.ones(30, int))
    np.testing.assert_array_equal(smart.predict_proba(given), np.isfinite(given))
    assert np.isfinite(smart.temperature(rng.normal(size=(5, 5)))).all()


@pytest.mark.parametrize("kind", ["margin", "pts"])
def test_inputs_are_held_within_the_range_that_was_seen(rng, kind):
    logits, labels = drawn(rng, 500, 4, 2.0, scale=4.0)
    m = margins(logits)
    seen = (m > 2) & (m < 6)
    if kind == "pts":
        found = fitted(ParametrizedTemperatureScaling(), logits[seen], labels[seen])
        sure = np.array([[0, -a, -a, -a] for a in (40.0, 60.0, 90.0)])
    else:
        found = fitted(SMART(), logits[seen], labels[seen])
        sure = np.array([[0, -a, -3 * a, -3 * a] for a in (m[seen].max(), 7.0, 1e6, np.inf)])
        blunt = np.array([[0, -a, -5, -9] for a in (m[seen].min(), 1.5, 0.1, 0.0)])
        assert np.ptp(found.temperature(blunt)) < 1e-6
        assert abs(found.temperature(blunt)[0] - found.temperature(sure)[0]) > 1e-3
    assert np.ptp(found.temperature(sure)) < 1e-6


def test_the_seed_decides(data):
    logits, labels, _ = data
    first, again, other = (
        fitted(SMART(seed=s, steps=40), logits, labels).temperature(logits) for s in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


@pytest.mark.parametrize("classes", [3, 10, 30])
def test_its_inputs_are_the_leading_log_probabilities_in_order(rng, classes):
    logits, labels = drawn(rng, 80, classes, scale=8.0)
    logits[:40] = masked(rng, logits[:40], labels[:40], 0.5)
    logits[1] *= 30
    expected = np.full((80, 10), -100.0)
    for row, out in zip(log_softmax(logits, -1), expected, strict=True):
        for place, value in enumerate(sorted(row, reverse=True)[:10]):
            out[place] = max(value, -100)
    with at_rate(0.05):
        pts = fitted(ParametrizedTemperatureScaling(steps=30), logits, labels)
    records = tabulate(examples(logits, labels))
    np.testing.assert_allclose(pts._leading_of(records), expected, rtol=1e-5, atol=1e-5)
    found = pts.temperature(logits)
    np.testing.assert_allclose(1 / np.asarray(pts._sharpness(records)), found, rtol=1e-4)
    standard = (expected - pts.mean_.numpy()) / pts.deviation_.numpy()
    slow = outputs(parameters_of(pts), (10, 5, 5, 1), standard)
    np.testing.assert_allclose(found, slow, rtol=1e-3)
    assert np.ptp(found) > 0.05
    shuffled = rng.permutation(classes)
    np.testing.assert_allclose(pts.temperature(logits[:, shuffled]), found, rtol=1e-6)


@pytest.mark.parametrize("objective", ["brier", "nll"])
def test_its_objective_is_the_one_it_is_called_and_falls(data, objective):
    logits, labels, weight = data
    pts = ParametrizedTemperatureScaling(objective=objective)
    fitted(pts, logits, labels, sample_weight=weight)
    share = weight / weight.sum()
    temperature = pts.temperature(logits)
    found = value_of(objective, logits, labels, temperature, share, 0)
    assert pts.solution_ is not None
    assert pts.solution_.value == pytest.approx(found, rel=1e-4)
    one = float(TemperatureScaling().fit(logits, labels, sample_weight=weight).temperature_)
    start = value_of(objective, logits, labels, np.full(400, one), share, 0)
    assert found < start - 1e-4
