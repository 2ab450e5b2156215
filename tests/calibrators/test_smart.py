"""SMART: its indicators, objectives and bounds of temperatures, against slow definitions."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.smart import (
    INDICATORS,
    SMART,
    SmartIndicator,
    SmartObjective,
    margin_bounds,
)
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
