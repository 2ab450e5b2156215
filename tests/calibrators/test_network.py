"""Temperatures by a small network: its gradient, its inputs, and what it recovers."""

import math
import warnings
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate
from calibrant._core.solve import time_limit
from calibrant.calibrators.network import (
    FLOOR,
    ParametrizedTemperatureScaling,
    _initial,
    _leading,
    _network_objective,
)
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.smart import (
    INDICATORS,
    SMART,
    SmartIndicator,
    SmartObjective,
    margin_bounds,
)
from tests.support.simulate import drawn

OBJECTIVES: tuple[SmartObjective, ...] = get_args(SmartObjective)
TABLED: tuple[SmartIndicator, ...] = tuple(i for i in get_args(SmartIndicator) if i != "all")


def at_rate(rate, calibrator):
    calibrator.rate = rate
    return calibrator


def fitted(calibrator, logits, labels, **options) -> Any:
    """Fit without a word about small samples or the pointwise objective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* parameters for .* examples")
        warnings.filterwarnings("ignore", 'objective "pointwise"')
        return calibrator.fit(logits, labels, **options)


def masked(rng, logits, labels, share=0.2):
    hidden = rng.random(logits.shape) < share
    hidden[np.arange(len(labels)), labels] = False
    return np.where(hidden, -np.inf, logits)


def margins(logits):
    """Largest minus second largest of each row."""
    return np.diff(np.sort(logits, -1)[:, -2:], axis=-1)[:, 0]


@pytest.fixture(scope="module")
def data():
    """Over-confident logits with masked classes, labels and weights."""
    rng = np.random.default_rng(11)
    logits, labels = drawn(rng, 400, 6, 2.0, scale=4.0)
    return masked(rng, logits, labels), labels, rng.exponential(size=400)


# The network


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
    assert FLOOR < outputs(parameters, (1, 1), [[0.0]])[0] < 0.11


@pytest.mark.parametrize("kind", [SMART, ParametrizedTemperatureScaling])
def test_the_first_step_is_the_best_single_temperature(data, kind):
    logits, labels, weight = data
    found = fitted(kind(steps=1), logits, labels, sample_weight=weight).temperature(logits)
    best = TemperatureScaling().fit(logits, labels, sample_weight=weight)
    np.testing.assert_allclose(found, float(best.temperature_), rtol=1e-5)
    assert abs(found[0] - 1) > 0.3


def test_the_second_step_has_the_length_of_the_rate(data):
    smart = fitted(at_rate(3e-4, SMART(steps=2)), *data[:2])
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
    smart = at_rate(0.1, SMART(steps=400, likelihood=1.0))
    with pytest.warns(UserWarning, match="no best temperature in .* stopped at 0.05. Usually all"):
        smart.fit(logits, logits.argmax(-1))
    found = smart.temperature(logits)
    assert found.min() >= 0.1
    assert found.max() < 0.2


# What it looks at


def described(name, logits):
    """Indicators by their names."""
    probs = softmax(logits, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "margin": margins(logits),
            "entropy": -np.where(probs > 0, probs * np.log(probs), 0).sum(-1),
            "confidence": probs.max(-1),
            "max_logit": logits.max(-1),
            "max_minus_mean": np.array([row.max() - row[row > -np.inf].mean() for row in logits]),
        }[name]


@pytest.mark.parametrize("indicator", TABLED)
def test_indicators_of_the_table_and_of_logits_are_what_they_are_called(data, indicator):
    logits, labels, _ = data
    of_records, of_logits = INDICATORS[indicator]
    expected = described(indicator, logits)
    records = of_records(tabulate(examples(logits, labels)))
    assert records.shape == (400, 1)
    np.testing.assert_allclose(records[:, 0], expected, rtol=2e-5, atol=2e-6)
    top = torch.from_numpy(logits.max(-1, keepdims=True))
    direct = of_logits(torch.from_numpy(logits) - top, top)
    np.testing.assert_allclose(direct[:, 0], expected, rtol=1e-10)


def test_there_is_an_indicator_for_every_name():
    assert set(TABLED) == set(INDICATORS)


@pytest.mark.parametrize("indicator", TABLED)
def test_inputs_are_standardised_with_the_weighted_population_deviation(rng, indicator):
    logits, labels = drawn(rng, 20, 5)
    weight = rng.exponential(size=20)
    smart = fitted(SMART(indicator=indicator, steps=1), logits, labels, sample_weight=weight)
    x = described(indicator, logits)
    mean = np.average(x, weights=weight)
    deviation = math.sqrt(np.average((x - mean) ** 2, weights=weight))
    assert float(smart.mean_) == pytest.approx(mean, rel=1e-5)
    assert float(smart.deviation_) == pytest.approx(deviation, rel=1e-5)
    assert float(smart.low_) == pytest.approx(x.min(), rel=1e-5, abs=1e-6)
    assert float(smart.high_) == pytest.approx(x.max(), rel=1e-5)


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
    with pytest.warns(UserWarning, match="no best temperature in"):
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


# Objectives and indicators


def value_of(objective, logits, labels, temperature, share, likelihood):
    """The objectives of the paper's table 3 on the exact softmax."""
    sigma, delta = 0.05, 1e-3
    log_probs = log_softmax(logits / temperature[:, None], -1)
    probs, n = np.exp(log_probs), np.arange(len(labels))
    own = -log_probs[n, labels]
    brier = ((probs - np.eye(probs.shape[1])[labels]) ** 2).sum(-1)
    flat = np.array([-row[row > -np.inf].mean() for row in log_probs])
    proper = {
        "nll": own,
        "brier": brier,
        "mse": brier / probs.shape[1],
        "ls": 0.95 * own + 0.05 * flat,
    }
    if objective in proper:
        return share @ proper[objective]
    confidence, right = probs.max(-1), probs.argmax(-1) == labels
    centres = (np.arange(15) + 0.5) / 15
    part = np.exp(-((confidence[:, None] - centres) ** 2) / (2 * sigma**2))
    part /= part.sum(-1, keepdims=True)
    mass, gap = share @ part, (share * (confidence - right)) @ part
    error = np.sqrt((right[:, None] - centres) ** 2 + delta**2) - delta
    soft = {
        "charbonnier": (mass * (np.sqrt((gap / mass) ** 2 + delta**2) - delta)).sum(),
        "soft_ece": np.abs(gap).sum(),
        "pointwise": share @ (part * error).sum(-1),
    }
    return soft[objective] + likelihood * share @ own


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_is_the_one_it_is_called_and_falls(data, objective):
    logits, labels, weight = data
    smart = SMART(objective=objective, steps=30, likelihood=0.2)
    fitted(smart, logits, labels, sample_weight=weight)
    share = weight / weight.sum()
    found = value_of(objective, logits, labels, smart.temperature(logits), share, likelihood=0.2)
    assert smart.solution_ is not None
    assert smart.solution_.value == pytest.approx(found, rel=1e-4)
    one = float(TemperatureScaling().fit(logits, labels, sample_weight=weight).temperature_)
    start = value_of(objective, logits, labels, np.full(400, one), share, likelihood=0.2)
    assert found < start - 1e-4 / (6 if objective == "mse" else 1)


@pytest.mark.parametrize("objective", ["charbonnier", "nll"])
@pytest.mark.parametrize("indicator", TABLED)
def test_the_table_and_the_logits_give_the_same_temperatures(data, indicator, objective):
    logits, labels, weight = data
    smart = at_rate(0.02, SMART(indicator=indicator, objective=objective, steps=60))
    fitted(smart, logits, labels, sample_weight=weight)
    found = smart.temperature(logits)
    sharpness = smart._sharpness(tabulate(examples(logits, labels)))
    np.testing.assert_allclose(1 / np.asarray(sharpness), found, rtol=1e-4)
    assert np.ptp(found) > 0.1


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are)")
def test_all_logits_can_be_the_indicator(rng):
    """A temperature that depends on one class, which only the logits themselves can tell."""
    logits = 3 * rng.normal(size=(3000, 4))
    truth = np.where(logits[:, 0] > logits.max(-1) - 2, 3.0, 1.0)
    labels = (logits / truth[:, None] + rng.gumbel(size=logits.shape)).argmax(-1)
    smart = at_rate(0.02, SMART(indicator="all", objective="nll", steps=300))
    assert not smart.fits_records
    found = smart.fit(logits, labels).temperature(logits)
    assert np.median(found[truth == 3]) > 1.7 * np.median(found[truth == 1])
    shift = 5 * rng.normal(size=(3000, 1))  # which is not for the network to see
    smart.fit(logits + shift, labels)
    np.testing.assert_allclose(smart.temperature(logits - shift), found, rtol=1e-3)
    records = tabulate(examples(logits, labels))
    with pytest.raises(ValueError, match='indicator "all" needs the logits: use fit'):
        smart.fit_records(records)
    hidden = np.where(np.arange(4) == 3, -np.inf, logits)
    with pytest.raises(ValueError, match='indicator "all" needs finite logits, got -inf'):
        smart.fit(hidden, np.zeros(3000, int))


def test_claims_about_a_table_without_logits_are_refused_in_words(rng):
    logits, labels = drawn(rng, 200, 4)
    smart = fitted(SMART(indicator="all", steps=2), logits, labels)
    with pytest.raises(ValueError, match='indicator "all" needs the logits'):
        smart.predict_records(tabulate(examples(logits, labels)))


# What it recovers


def simulated(rng, n, classes=10, boost=2.2):
    """Logits that are calibrated: one class is boosted, labels are drawn from the softmax."""
    logits = rng.normal(size=(n, classes))
    logits[np.arange(n), rng.integers(0, classes, n)] += rng.gamma(2, boost, n)
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


def error(calibrator, logits, labels):
    """ECE after calibration."""
    out = calibrator(torch.from_numpy(logits)).numpy()
    return cal.ece(out, labels)


@pytest.fixture(scope="module")
def doubled():
    """The simulation with temperature 2: fit, test, and the least error there is."""
    rng = np.random.default_rng(1)
    logits, labels = simulated(rng, 5000)
    fresh, answers = simulated(rng, 20_000)
    return (2 * logits, labels), (2 * fresh, answers), cal.ece(fresh, answers)


def test_per_bin_gaps_calibrate(doubled):
    given, fresh, floor = doubled
    smart = SMART().fit(*given)
    assert error(smart, *fresh) < floor + 0.01
    assert 1.8 < smart.temperature(fresh[0]).mean() < 2.3
    assert floor + 0.1 < cal.ece(*fresh)


def test_gaps_of_single_samples_do_not_calibrate(doubled):
    given, fresh, floor = doubled
    smart = SMART(objective="pointwise", start="identity", likelihood=0)
    with pytest.warns(UserWarning, match="equation 6 of the paper.*it does not calibrate"):
        smart.fit(*given)
    assert error(smart, *fresh) > max(0.05, 5 * floor)


@pytest.mark.parametrize("indicator", ["margin", "all"])
def test_the_warning_points_to_the_line_of_the_fit(rng, indicator):
    logits, labels = drawn(rng, 700, 4)
    with pytest.warns(UserWarning, match="does not calibrate") as caught:
        SMART(objective="pointwise", indicator=indicator, steps=1).fit(logits, labels)
    assert [w.filename for w in caught] == [__file__]


def test_a_temperature_that_falls_with_the_margin_is_recovered(rng):
    logits = simulated(rng, 14_000)[0] * 1.5
    truth = 0.8 + 1.4 * np.exp(-margins(logits) / 2)
    labels = (logits / truth[:, None] + rng.gumbel(size=logits.shape)).argmax(-1)
    given, fresh = (logits[:4000], labels[:4000]), (logits[4000:], labels[4000:])
    smart, one = SMART().fit(*given), TemperatureScaling().fit(*given)
    assert error(one, *fresh) > 0.04
    assert error(smart, *fresh) < error(one, *fresh) / 3
    found = smart.temperature(fresh[0])
    assert np.corrcoef(found, truth[4000:])[0, 1] > 0.9
    assert np.abs(found - truth[4000:]).mean() < 0.2


def test_the_settings_of_the_paper_run_to_their_end(rng):
    logits, labels = simulated(rng, 600)
    smart = SMART(start="identity", likelihood=0, steps=2000)
    smart.patience = 200
    smart.fit(2 * logits, labels)
    assert smart.solution_ is not None
    assert smart.solution_.converged
    assert 200 < smart.solution_.steps < 2000
    assert error(smart, 2 * logits, labels) < 0.05
    assert 1.4 < smart.temperature(2 * logits).mean() < 2.8


def test_the_seed_decides(data):
    logits, labels, _ = data
    first, again, other = (
        fitted(SMART(seed=s, steps=40), logits, labels).temperature(logits) for s in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


def test_more_steps_get_lower(data):
    values = [fitted(SMART(steps=steps), *data[:2]).solution_.value for steps in (1, 20, 100, 300)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] - 0.002


@pytest.mark.parametrize("calibrator", [SMART(), ParametrizedTemperatureScaling()])
def test_a_time_limit_ends_the_fit(data, calibrator):
    with time_limit(0), pytest.raises(TimeoutError, match="time limit"):
        fitted(calibrator, *data[:2])


def test_the_unknown_is_refused_with_what_is_known():
    wrong: Any = {"objective": "ece", "indicator": "max", "start": "TS"}
    known = {
        "objective": "charbonnier, soft_ece, nll, brier, mse, ls, pointwise",
        "indicator": "margin, entropy, confidence, max_logit, max_minus_mean, all",
        "start": "ts, identity",
    }
    for name, value in wrong.items():
        message = f"{name} must be one of {known[name]}, got '{value}'"
        with pytest.raises(ValueError, match=message):
            SMART(**{name: value})
    with pytest.raises(ValueError, match="objective must be one of brier, nll, got 'mse'"):
        ParametrizedTemperatureScaling(objective="mse")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SMART, ParametrizedTemperatureScaling])
def test_numbers_that_cannot_be_are_refused(kind):
    with pytest.raises(ValueError, match="steps must be a whole number, at least 1, got 0"):
        kind(steps=0)
    with pytest.raises(TypeError, match=r"hidden must be a list of widths, \[16\] for one layer"):
        kind(hidden=16)
    with pytest.raises(ValueError, match="each width in hidden must be a whole number"):
        kind(hidden=(16, 0))


def test_only_what_differs_from_the_defaults_is_shown():
    assert repr(SMART()) == "SMART(not fitted)"
    assert repr(SMART(hidden=(8,), seed=2)) == "SMART(hidden=(8,), seed=2, not fitted)"


# Parametrized temperature scaling


@pytest.mark.parametrize("classes", [3, 10, 30])
def test_its_inputs_are_the_leading_log_probabilities_in_order(rng, classes):
    logits, labels = drawn(rng, 80, classes, scale=8.0)
    logits[:40] = masked(rng, logits[:40], labels[:40], 0.5)
    logits[1] *= 30
    expected = np.full((80, 10), -100.0)
    for row, out in zip(log_softmax(logits, -1), expected, strict=True):
        for place, value in enumerate(sorted(row, reverse=True)[:10]):
            out[place] = max(value, -100)
    pts = fitted(at_rate(0.05, ParametrizedTemperatureScaling(steps=30)), logits, labels)
    records = tabulate(examples(logits, labels))
    np.testing.assert_allclose(pts._inputs(records), expected, rtol=1e-5, atol=1e-5)
    top = torch.from_numpy(logits.max(-1, keepdims=True))
    direct = _leading(torch.from_numpy(logits) - top, top)
    np.testing.assert_allclose(direct, expected, rtol=1e-10, atol=1e-14)
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


# The interval of temperatures


def temperature_for(row, confidence):
    """The temperature that gives the top of a row a confidence, by bisection."""
    low, high = 1e-6, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        if softmax(row / middle).max() > confidence:
            low = middle
        else:
            high = middle
    return middle


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_the_temperature_lies_within_the_bounds_whatever_the_other_classes(rng, classes):
    for _ in range(60):
        margin, confidence = rng.exponential(3), rng.uniform(1.02 / classes, 0.99)
        others = -margin - rng.exponential(rng.choice([0.1, 5.0]), size=classes - 2)
        found = temperature_for(np.array([0.0, -margin, *others]), confidence)
        low, high = margin_bounds([margin], confidence, classes)
        assert low[0] * (1 - 1e-9) <= found <= high[0] * (1 + 1e-9)
        if classes == 2 and confidence > 0.5:
            assert low[0] == pytest.approx(high[0], rel=1e-12)


@pytest.mark.parametrize("confidence", [0.3, 0.5, 0.6, 0.95])
def test_both_bounds_are_attained(confidence):
    low, high = margin_bounds([2.0], confidence, classes=8)
    crowd = np.array([0.0] + [-2.0] * 7)
    assert temperature_for(crowd, confidence) == pytest.approx(low[0], rel=1e-6)
    if confidence > 0.5:
        alone = np.array([0.0, -2.0] + [-1e12] * 6)
        assert temperature_for(alone, confidence) == pytest.approx(high[0], rel=1e-6)
    else:
        assert high[0] == math.inf


def test_bounds_grow_with_the_margin_at_one_ratio():
    margin = np.array([1.0, 2.0, 10.0])
    low, high = margin_bounds(margin, [0.8, 0.8, 0.8], classes=10)
    np.testing.assert_allclose(high / low, math.log(36) / math.log(4))
    np.testing.assert_allclose(low, margin * low[0])
    each = margin_bounds(torch.tensor([1.0, 1.0]), [0.6, 0.9], classes=10)
    assert each.low[0] > each.low[1]
    assert each.high[0] > each.high[1]


def test_bounds_without_a_margin():
    low, high = margin_bounds([0.0], 0.7, classes=10)
    assert (low[0], high[0]) == (0, 0)


def test_bounds_without_a_margin_below_one_half():
    low, high = margin_bounds([0.0], 0.4, classes=10)
    assert (low[0], high[0]) == (0, math.inf)


def test_bounds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="margin must not be negative, got -2"):
        margin_bounds([1.0, -2.0], 0.5, classes=4)
    for confidence in (0.25, 0.1, 1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="confidence must lie between 1/4 and 1, got"):
            margin_bounds([1.0, 2.0], [0.5, confidence], classes=4)
