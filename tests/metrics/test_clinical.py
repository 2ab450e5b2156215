"""Figures of risk models and forecasts, beside other packages and slow definitions."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, logit

import calibrant as cal
from calibrant.metrics import decision_curve
from calibrant.metrics.clinical import _recalibration, _shift, _skill
from calibrant.metrics.reductions import WeightedPairs
from calibrant.metrics.summary import PooledPairs
from tests.support.simulate import drawn

ROW = np.arange(240)
P = 0.02 + 0.96 * ((ROW * 37) % 240 + 0.5) / 240
Y = (((ROW * 101) % 240 + 0.5) / 240 < 0.1 + 0.75 * P**1.5).astype(int)
PAIRS: Any = {"confidence": P, "outcome": Y}
ON_REQUEST = [name for name, metric in cal.METRICS.items() if metric.on_request]

PEERS = {
    "calibration_slope": 0.67360035,  # statsmodels 0.15 GLM and calzone 0.1.0
    "calibration_intercept": -0.49758551,
    "citl": -0.58401116,  # statsmodels 0.15 GLM with an offset
    "spiegelhalter_z": 3.1852189142926104,  # calzone 0.1.0
    "spiegelhalter_p": 0.0014464454398943616,
}


@pytest.mark.parametrize("name", PEERS)
def test_figures_equal_those_of_other_packages(name):
    assert cal.METRICS[name].compute(**PAIRS) == pytest.approx(PEERS[name], abs=1e-8)


def test_a_published_example_of_val_prob():
    """Ten patients in the README of tuur/CalibrationSlopeInterceptPython, checked there with rms.

    Its in-the-large figure is the share of events less the mean probability.
    """
    claimed = np.array([0.01, 0.01, 0.24, 0.22, 0.02, 0.1, 0.03, 0.12, 0.04, 0.01])
    pairs: Any = {"confidence": claimed, "outcome": [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]}
    assert cal.metrics.calibration_slope(**pairs) == pytest.approx(0.16386382554885, abs=1e-6)
    assert cal.metrics.calibration_intercept(**pairs) == pytest.approx(-0.89273157267853, abs=1e-6)
    assert cal.metrics.citl(**pairs) > 0  # the sign of 0.12


def test_standard_errors_are_those_of_the_sandwich():
    """Those of statsmodels 0.15, with cov_type="HC0"."""
    pairs = WeightedPairs(P, Y.astype(float), None)
    errors = [fit.deviation for fit in (*_recalibration(pairs), _shift(pairs))]
    assert errors == pytest.approx([0.14956641, 0.11635004, 0.1717314], abs=1e-7)


def test_net_benefit_equals_that_of_dcurves():
    """1.1.7, for the model and for treating all."""
    curve = decision_curve(**PAIRS, thresholds=[0.1, 0.25, 0.5, 0.7])
    np.testing.assert_allclose(
        curve.net_benefit, [0.328704, 0.230556, 0.066667, -0.013889], atol=1e-6
    )
    np.testing.assert_allclose(curve.treat_all, [1 / 3, 0.2, -0.2, -1.0], atol=1e-12)
    assert (curve.low < curve.net_benefit).all()
    assert list(curve.to_frame().columns) == [
        "threshold",
        "net_benefit",
        "low",
        "high",
        "treat_all",
    ]
    with pytest.raises(ValueError, match=r"thresholds must be in \(0, 1\)"):
        decision_curve(**PAIRS, thresholds=[0.5, 1.0])


def test_the_interval_of_a_net_benefit_holds_where_hardly_any_example_is_flagged(rng):
    """Of two flagged ones in the mean, a normal interval holds in 52 % of the draws."""
    hit, alarm, odds, n = 0.004, 0.006, 3 / 7, 200
    kept = 0
    for hits, alarms, rest in rng.multinomial(n, [hit, alarm, 1 - hit - alarm], 400):
        claimed = np.repeat([0.9, 0.9, 0.1], [hits, alarms, rest])
        outcome = np.repeat([1, 0, 0], [hits, alarms, rest])
        curve = decision_curve(confidence=claimed, outcome=outcome, thresholds=[0.3])
        kept += curve.low[0] <= hit - odds * alarm <= curve.high[0]
    assert kept / 400 > 0.87


def test_the_interval_of_a_net_benefit_is_normal_where_many_are_flagged(rng):
    claimed = rng.random(40_000)
    outcome = (rng.random(40_000) < claimed).astype(int)
    gain = np.where(claimed >= 0.6, np.where(outcome == 1, 1, -0.6 / 0.4), 0)
    curve = decision_curve(confidence=claimed, outcome=outcome, thresholds=[0.6])
    reach = 1.6449 * gain.std() / 200
    assert curve.net_benefit - curve.low == pytest.approx(reach, rel=0.01)
    assert curve.high - curve.net_benefit == pytest.approx(reach, rel=0.01)


def test_weights_of_net_benefit_are_copies_but_for_the_interval():
    weight = 1 + ROW % 3
    found = decision_curve(**PAIRS, sample_weight=weight)
    copies = decision_curve(confidence=np.repeat(P, weight), outcome=np.repeat(Y, weight))
    np.testing.assert_allclose(found.net_benefit, copies.net_benefit, atol=1e-12)
    acting = slice(0, 90)  # nobody reaches the last thresholds
    assert (found.high > copies.high)[acting].all()


@pytest.mark.parametrize(
    ("freedom", "expected"), [(10, 0.003402087679748478), (8, 0.0009467842565102913)]
)
def test_hosmer_lemeshow_is_that_of_calzone(freedom, expected):
    """0.1.0: hosmer_lemeshow_test of ten groups of 24; in its own, the least of all is missing."""
    found = cal.metrics.hosmer_lemeshow_p(**PAIRS, freedom=freedom)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(100, (0.1414249, 0.1224027, 0.2099018)), (240, (0.1135022, 0.1142598, 0.1768864))],
)
def test_distances_are_those_of_the_loess_of_r(n, expected):
    """Cleveland's code, on which loess in R is built, of scikit-misc 0.5.3.

    Made with loess(p, y, span=ceil(n**0.8) / n, degree=2, surface="direct"). Of 240 examples the
    curve is fitted on 100 bins.
    """
    pairs: Any = {"confidence": P[:n], "outcome": Y[:n]}
    found = [cal.METRICS[name].compute(**pairs) for name in ("ici", "e50", "e90")]
    assert found[0] == pytest.approx(expected[0], abs=3e-4)
    assert found[1:] == pytest.approx(expected[1:], abs=3e-3)


def test_distances_find_a_known_truth(rng):
    z = rng.normal(0, 1.5, 100_000)
    right = 0.1 + 0.7 * expit(z) ** 2
    off = np.abs(expit(z) - right)
    y = rng.random(z.size) < right
    found = [cal.METRICS[name].compute(z, y.astype(int)) for name in ("ici", "e50", "e90")]
    expected = [off.mean(), *np.quantile(off, [0.5, 0.9])]
    assert found == pytest.approx(expected, abs=0.006)


def test_brier_skill_compares_with_the_base_rate():
    rate = Y.mean()
    expected = 1 - ((P - Y) ** 2).mean() / ((rate - Y) ** 2).mean()
    assert cal.metrics.brier_skill(**PAIRS) == pytest.approx(expected, abs=1e-12)
    assert cal.metrics.brier_skill(confidence=np.full(240, rate), outcome=Y) == pytest.approx(0)


@pytest.mark.parametrize("name", ON_REQUEST)
def test_they_are_computed_where_they_are_named_and_for_two_classes(rng, name):
    logits, labels = drawn(rng, 200, 3)
    assert name not in cal.evaluate(logit(P), Y, level=None)
    with pytest.raises(ValueError, match=f"{name} is a figure of .* one class against the rest"):
        cal.evaluate(logits, labels, metrics=[name])
    with pytest.raises(ValueError, match="one_vs_rest"):
        cal.METRICS[name].compute(logits, labels)
    pairs = cal.metrics.one_vs_rest(logits, labels, k=1)
    assert math.isfinite(cal.METRICS[name].compute(**pairs._asdict()))


@pytest.mark.parametrize(
    ("claimed", "happened"),
    [([0.2, 0.4, 0.6, 0.8], [0, 0, 1, 1]), ([0.2, 0.4, 0.6], [1, 1, 1]), ([0.5] * 4, [0, 1, 0, 1])],
    ids=["separated", "one outcome", "one claim"],
)
def test_a_recalibration_without_a_best_slope_is_undefined(claimed, happened):
    pairs = {"confidence": claimed, "outcome": happened}
    assert math.isnan(cal.metrics.calibration_slope(**pairs))
    assert math.isnan(cal.metrics.calibration_intercept(**pairs))


def test_extreme_claims_are_fitted():
    claimed = np.array([0.0, 1e-300, 0.3, 0.7, 1.0, 1.0])
    found = cal.metrics.calibration_slope(confidence=claimed, outcome=[0, 1, 0, 1, 1, 0])
    assert abs(found) < 0.1


def test_claims_of_0_and_1_of_which_some_are_wrong_are_fitted(rng):
    """As those of a decision tree, which has as many outcomes as the recalibration parameters."""
    claimed = np.repeat([0.0, 1.0], [400, 600])
    happened = np.r_[np.arange(400) < 40, np.arange(600) < 540].astype(int)
    pairs: Any = {"confidence": claimed, "outcome": happened}
    end = logit(1 - 2.0**-53)  # which claims of 0 and 1 count as
    assert cal.metrics.calibration_slope(**pairs) == pytest.approx(logit(0.9) / end)
    assert cal.metrics.calibration_intercept(**pairs) == pytest.approx(0, abs=1e-9)
    # log-odds are shifted until those of 0 lose the 20 that those of 1 have too many
    few = np.r_[np.arange(400) < 60, np.arange(600) < 520].astype(int)
    shift = cal.metrics.citl(confidence=claimed, outcome=few)
    total = 400 * expit(shift - end) + 600 * expit(shift + end)
    assert total == pytest.approx(580)


def test_degrees_of_freedom_are_a_whole_number():
    wrong: Any = (0, -1, 2.5)
    for freedom in wrong:
        with pytest.raises(ValueError, match="freedom must be a whole number, at least 1"):
            cal.metrics.hosmer_lemeshow_p(**PAIRS, freedom=freedom)


@pytest.mark.parametrize("fit", [lambda p: _recalibration(p)[1], _shift, _skill])
def test_pooled_pairs_give_nearly_the_same_with_the_same_error(rng, fit):
    z = rng.normal(size=20_000)
    y, weight = (rng.random(z.size) < expit(0.8 * z)).astype(float), rng.exponential(size=z.size)
    pairs = WeightedPairs(expit(z), y, weight)
    assert fit(PooledPairs.of(pairs, weight)) == pytest.approx(fit(pairs), abs=1e-4)


def test_a_limit_on_a_figure_that_is_best_in_the_middle_is_refused():
    found = cal.evaluate(logit(P), Y, metrics=["calibration_slope", "ici"])
    with pytest.raises(ValueError, match="best in the middle"):
        found.check_limits({"calibration_slope": 1.1})
    assert found.check_limits({"ici": 0.01})[0].exceeded
