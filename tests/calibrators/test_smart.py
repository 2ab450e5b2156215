"""SMART: its indicators and objectives against slow definitions, and what it recovers."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.smart import _INDICATORS, SMART, SmartIndicator, SmartObjective
from tests.support.networks import at_rate, fitted, margins, masked, value_of
from tests.support.simulate import drawn

OBJECTIVES: tuple[SmartObjective, ...] = get_args(SmartObjective)


TABLED: tuple[SmartIndicator, ...] = tuple(i for i in get_args(SmartIndicator) if i != "all")


@pytest.fixture(scope="module")
def data():
    """Over-confident logits with masked classes, labels and weights."""
    rng = np.random.default_rng(11)
    logits, labels = drawn(rng, 400, 6, 2.0, scale=4.0)
    return masked(rng, logits, labels), labels, rng.exponential(size=400)


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
    of_records, of_logits = _INDICATORS[indicator]
    expected = described(indicator, logits)
    records = of_records(tabulate(examples(logits, labels)))
    np.testing.assert_allclose(records, expected, rtol=2e-5, atol=2e-6)
    top = torch.from_numpy(logits.max(-1, keepdims=True))
    direct = of_logits(torch.from_numpy(logits) - top, top)
    np.testing.assert_allclose(direct[:, 0], expected, rtol=1e-10)


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
    smart = SMART(indicator=indicator, objective=objective, steps=60)
    with at_rate(0.02):
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
    smart = SMART(indicator="all", objective="nll", steps=300)
    assert not smart.fits_records
    shift = 5 * rng.normal(size=(3000, 1))  # which is not for the network to see
    with at_rate(0.02):
        found = smart.fit(logits, labels).temperature(logits)
        smart.fit(logits + shift, labels)
    assert np.median(found[truth == 3]) > 1.7 * np.median(found[truth == 1])
    np.testing.assert_allclose(smart.temperature(logits - shift), found, rtol=1e-3)
    records = tabulate(examples(logits, labels))
    with pytest.raises(ValueError, match='indicator "all" needs the logits: use fit'):
        smart.fit_records(records)
    with pytest.raises(ValueError, match='indicator "all" needs the logits'):
        smart.predict_records(records)
    hidden = np.where(np.arange(4) == 3, -np.inf, logits)
    with pytest.raises(ValueError, match='indicator "all" needs finite logits, got -inf'):
        smart.fit(hidden, np.zeros(3000, int))


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
    with pytest.warns(UserWarning, match='pushes confidence to 1 .* use "charbonnier"'):
        smart.fit(*given)
    assert error(smart, *fresh) > max(0.05, 5 * floor)


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
    smart = fitted(SMART.paper(), 2 * logits, labels)
    assert smart.size(10) == 321
    assert smart.solution_ is not None
    assert smart.solution_.converged
    assert 200 < smart.solution_.steps < 2000
    assert error(smart, 2 * logits, labels) < 0.05
    assert 1.4 < smart.temperature(2 * logits).mean() < 2.8


def test_random_weights_start_as_those_of_torch(rng):
    """Mean and deviation of the first temperatures over many seeds, against torch's layers."""
    logits, labels = drawn(rng, 100, 4)
    x = torch.from_numpy((margins(logits) - margins(logits).mean()) / margins(logits).std())[
        :, None
    ]
    ours, theirs = [], []
    for seed in range(300):
        smart = fitted(SMART(start="random", steps=1, seed=seed), logits, labels)
        ours.append(smart.temperature(logits))
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(
            torch.nn.Linear(1, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Softplus()
        ).double()
        theirs.append(layers(x).detach().numpy()[:, 0] + 0.1)
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.03)
    assert np.std(ours, axis=0).mean() == pytest.approx(np.std(theirs, axis=0).mean(), rel=0.1)
