"""Smooth maps of the confidence, held against logistic regression and slow definitions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.interpolate import CubicSpline
from scipy.special import expit, log_expit, logit, logsumexp, softmax
from sklearn.linear_model import LogisticRegression

from calibrant.calibrators.confidence_maps import (
    _MAX_CURVE_POINTS,
    MAX_MEAN_ODDS,
    MAX_SLOPE,
    BetaCalibration,
    SigmoidScaling,
    SplineCalibration,
    _smooth_slope,
    fit_beta,
    fit_platt,
)
from calibrant.calibrators.fit_inputs import told
from tests.support.simulate import drawn

ALL: list[Any] = [SigmoidScaling, BetaCalibration, SplineCalibration]


def odds_of(logits):
    """Log-odds of the top class of each row, the others one after the other."""
    found = []
    for row in logits:
        top = row.argmax()
        found.append(row[top] - logsumexp(np.delete(row, top)))
    return np.clip(found, -30, 30)


def loss(odds, right, weight):
    return np.average(np.logaddexp(0, np.where(right, -odds, odds)), weights=weight)


def beta_odds(line, odds):
    a, b, m = line
    return a * log_expit(odds) - b * log_expit(-odds) + m


def of_two(odds, right):
    """Logits of two classes, the second of them with these log-odds, and labels."""
    return np.stack([np.zeros_like(odds), odds], axis=1), right.astype(int)


@pytest.fixture(scope="module")
def data():
    """Over-confident logits with random labels among them, masked classes, weights."""
    rng = np.random.default_rng(3)
    logits, labels = drawn(rng, 1500, 8, 2.0, scale=4.0)
    labels[::7] = rng.integers(0, 8, len(labels[::7]))
    hidden = rng.random(logits.shape) < 0.2
    hidden[np.arange(1500), labels] = False
    return np.where(hidden, -np.inf, logits), labels, rng.exponential(size=1500)


@pytest.mark.parametrize("kind", ALL)
def test_the_map_is_applied_to_the_top_class_and_the_rest_keeps_its_proportions(kind, data):
    logits, labels, weight = data
    fitted = kind(keep_argmax=False).fit(logits, labels, sample_weight=weight)
    odds, found = odds_of(logits), fitted.predict_proba(logits)
    if kind is SigmoidScaling:
        wanted = expit(float(fitted.slope_) * odds + float(fitted.offset_))
    elif kind is BetaCalibration:
        wanted = expit(beta_odds(fitted.line_.double().numpy(), odds))
    else:
        x, shift = fitted.odds_.double().numpy(), fitted.shift_.double().numpy()
        wanted = np.clip(expit(odds) + np.interp(odds, x, shift), 1 / 3000, 1 - 1 / 3000)
    before, top = softmax(logits, -1), logits.argmax(-1)
    for i in range(len(logits)):
        rest = np.delete(before[i], top[i])
        rest *= (1 - wanted[i]) / max(rest.sum(), 1e-300)
        np.testing.assert_allclose(found[i, top[i]], wanted[i], atol=2e-6)
        np.testing.assert_allclose(np.delete(found[i], top[i]), rest, atol=2e-6)
    assert float(fitted.temperature_) == 1


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.filterwarnings("ignore:.*keeps predictions", "ignore:accuracy .* is no better")
def test_only_on_wish_another_class_may_come_out_on_top(kind, rng):
    logits, labels = drawn(rng, 2000, 5, scale=1.0)
    labels[::2] = rng.integers(0, 5, 1000)
    labels = np.where(rng.random(2000) < 0.6, logits.argsort(-1)[:, -2], labels)
    free, held = (kind(keep_argmax=keep).fit(logits, labels) for keep in (False, True))
    assert not free.keeps_argmax
    assert not free.monotone
    assert held.keeps_argmax
    assert held.monotone
    changed = free.predict_proba(logits).argmax(-1) != logits.argmax(-1)
    assert changed.mean() > 0.1
    assert (held.predict_proba(logits).argmax(-1) == logits.argmax(-1)).all()
    assert kind(**free.config()).keep_argmax is False


def beta_data(rng, a, b, m, n=3000, spread=1.5):
    odds = rng.normal(1, spread, n)
    return odds, rng.random(n) < expit(beta_odds((a, b, m), odds)), rng.exponential(size=n)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("truth", [(1.0, 1.0, 0.0), (0.6, 1.5, -0.5), (2.0, 0.4, 1.0)])
def test_free_coefficients_are_those_of_logistic_regression(rng, truth, weigh):
    linear_model = pytest.importorskip("sklearn.linear_model")
    odds, right, weight = beta_data(rng, *truth)
    weight = weight if weigh else np.ones(len(odds))
    confidence = expit(odds)
    inputs = np.stack([np.log(confidence), -np.log(1 - confidence)], axis=1)
    other = linear_model.LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000)
    other.fit(inputs, right, weight)
    assert (other.coef_ > 0).all()
    found = fit_beta(odds, right, weight)
    np.testing.assert_allclose(found.x, [*other.coef_[0], other.intercept_[0]], atol=2e-3)
    assert found.converged


@pytest.mark.parametrize("truth", [(-0.5, 1.0, 0), (1.5, -0.4, 1), (-0.8, -0.3, 0.5), (0.5, -2, 3)])
def test_no_other_coefficients_that_are_not_negative_are_likelier(rng, truth):
    odds, right, weight = beta_data(rng, *truth)
    found = fit_beta(odds, right, weight)
    assert (found.x[:2] >= 0).all()
    assert found.x[:2].min() < 1e-9
    assert found.converged  # an end at 0 is an optimum
    bounds = [(0, 20), (0, 20), (-20, 20)]

    def value(line):
        return loss(beta_odds(line, odds), right, weight)

    options: Any = {"maxiter": 4000, "xatol": 1e-7, "fatol": 1e-12}
    for start in ([1, 1, 0], [0.1, 2, -1], [2, 0.1, 1]):
        other = optimize.minimize(
            value, start, method="Nelder-Mead", bounds=bounds, options=options
        )
        assert value(found.x) <= other.fun + 1e-9


def test_where_one_term_must_go_it_is_as_in_the_authors_code_but_never_falls():
    """betacal 1.1.0 drops a term with a negative coefficient and fits the other without bounds."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    free = {"C": np.inf, "tol": 1e-10, "max_iter": 10_000}
    rng, rising, falling = np.random.default_rng(5), 0, 0
    for _ in range(200):
        odds = rng.normal(rng.uniform(-1, 4), rng.uniform(0.3, 3), 300)
        right = rng.random(300) < expit(beta_odds((*rng.uniform(-1.5, 2, 2), 0), odds))
        inputs = np.stack([log_expit(odds), -log_expit(-odds)], axis=1)
        both = linear_model.LogisticRegression(**free).fit(inputs, right).coef_[0]
        if (both >= 0).all():
            continue
        kept = int(both[0] < 0)
        theirs = linear_model.LogisticRegression(**free).fit(inputs[:, [kept]], right)
        line = np.zeros(3)
        line[kept], line[2] = theirs.coef_[0, 0], theirs.intercept_[0]
        ours = fit_beta(odds, right, np.ones(300)).x
        if line[kept] < 0:
            np.testing.assert_allclose(ours[:2], 0, atol=1e-9)
            falling += 1
        else:
            np.testing.assert_allclose(ours, line, atol=2e-3)
            rising += 1
    assert min(rising, falling) > 20


def test_beta_calibration_finds_its_truth_and_is_no_worse_than_the_line(rng):
    odds, right, _ = beta_data(rng, 0.2, 1.4, -0.3, n=40_000)
    logits, labels = of_two(np.abs(odds), right)
    beta, line = BetaCalibration().fit(logits, labels), SigmoidScaling().fit(logits, labels)
    assert beta.solution_ is not None
    assert line.solution_ is not None
    assert beta.solution_.value <= line.solution_.value + 1e-12
    found = fit_beta(odds, right, np.ones(40_000))
    np.testing.assert_allclose(found.x, [0.2, 1.4, -0.3], atol=0.08)


def slow_slopes(confidence, right, knots):
    """The paper's definition: a spline through cumulated errors, fitted by least squares."""
    order = np.argsort(confidence)
    n, at = len(order), np.linspace(0, 1, knots)
    t = np.linspace(0, 1, n)
    error = np.cumsum(right[order] - confidence[order]) / n
    columns = [CubicSpline(at, unit, bc_type="natural") for unit in np.eye(knots)]
    values = np.stack([column(t) for column in columns], axis=1)
    heights, *_ = np.linalg.lstsq(values, error, rcond=None)
    found = np.empty(n)
    found[order] = CubicSpline(at, heights, bc_type="natural")(t, 1)
    return found


@pytest.mark.parametrize("knots", [2, 3, 6, 12])
def test_slopes_are_those_of_the_paper(rng, knots):
    odds = rng.gamma(2, 1.5, 5000)
    right = rng.random(5000) < expit(odds) ** 2
    logits, labels = of_two(odds, right)
    fitted = SplineCalibration(knots=knots, keep_argmax=False).fit(logits, labels)
    expected = slow_slopes(expit(odds), right, knots)
    found = fitted.predict_proba(logits)[:, 1] - expit(odds)
    inside = (expit(odds) + expected > 1e-3) & (expit(odds) + expected < 1 - 1e-3)
    assert inside.mean() > 0.8
    assert np.abs(found - expected)[inside].max() < 3e-3 * knots / 6 + 1e-3
    assert np.abs(found - expected)[inside].mean() < 5e-4
    assert np.abs(expected).mean() > 0.05


@pytest.mark.parametrize("parts", [1, 3, 200])
def test_the_spline_is_the_best_one_for_the_broken_line(rng, parts):
    mass, gain = rng.dirichlet(np.ones(parts)), rng.normal(size=parts) / 50
    ends, curve = np.append(0, np.cumsum(mass)), np.append(0, np.cumsum(gain))
    t, at = (np.arange(200_000) + 0.5) / 200_000, np.linspace(0, 1, 5)
    values = CubicSpline(at, np.eye(5), bc_type="natural")(t)
    heights, *_ = np.linalg.lstsq(values, np.interp(t, ends, curve), rcond=None)
    spline = CubicSpline(at, heights, bc_type="natural")
    expected = np.diff(spline(ends)) / mass
    np.testing.assert_allclose(_smooth_slope(mass, gain, 5), expected, rtol=1e-3, atol=1e-6)


def test_parts_of_no_length_have_the_slope_of_their_neighbours(rng):
    mass = np.where(np.arange(2000) % 20 == 7, 1e-60, 1.0)
    gain = (np.sin(np.arange(2000) / 300) + rng.normal(size=2000)) * mass / mass.sum()
    found = _smooth_slope(mass / mass.sum(), gain, 6)
    at = np.flatnonzero(mass < 1)
    np.testing.assert_allclose(found[at], (found[at - 1] + found[at + 1]) / 2, atol=1e-4)
    assert np.ptp(found) > 0.5


def test_a_known_distortion_is_undone(rng):
    sure = rng.beta(4, 1.2, 60_000) / 2 + 0.5
    truth = 0.5 + 0.45 * np.sin((sure - 0.5) * np.pi) ** 2  # rises, and far from a line
    odds = np.log(sure) - np.log1p(-sure)
    logits, labels = of_two(odds, rng.random(60_000) < truth)
    fitted = SplineCalibration().fit(logits[:30_000], labels[:30_000])
    found = fitted.predict_proba(logits[30_000:])[:, 1]
    line = SigmoidScaling().fit(logits[:30_000], labels[:30_000])
    by_line = line.predict_proba(logits[30_000:])[:, 1]
    error = np.abs(found - truth[30_000:]).mean()
    assert error < 0.012
    assert error < np.abs(by_line - truth[30_000:]).mean() / 1.5


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are|rows are copies)")
def test_equal_confidences_share_one_value_whatever_their_order(rng):
    odds = rng.integers(0, 12, 3000) / 3
    right = rng.random(3000) < expit(0.5 * odds)
    fitted = SplineCalibration().fit(*of_two(odds, right))
    order = np.lexsort((right, odds))  # all wrong ones of a confidence first
    again = SplineCalibration().fit(*of_two(odds[order], right[order]))
    assert len(fitted.odds_) == 12
    np.testing.assert_allclose(again.shift_, fitted.shift_, atol=1e-6)
    # and rounding errors do not part them
    noise = SplineCalibration().fit(*of_two(odds + 1e-6 * right, right))
    assert len(noise.odds_) == 12


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are)")
def test_one_confidence_becomes_the_accuracy(rng):
    right = rng.random(500) < 0.7
    fitted = SplineCalibration().fit(*of_two(np.full(500, 2.0), right))
    found = fitted.predict_proba(np.array([[0.0, 2.0], [0.0, 2.5]]))[:, 1]
    assert found[0] == pytest.approx(right.mean(), abs=1e-6)
    assert found[1] == pytest.approx(right.mean() + expit(2.5) - expit(2.0), abs=1e-6)


def test_the_stored_curve_is_short_and_as_good_as_all_points(rng, monkeypatch):
    odds = rng.gamma(2, 1.5, 20_000)
    logits, labels = of_two(odds, rng.random(20_000) < expit(odds) ** 2)
    short = SplineCalibration().fit(logits, labels)
    assert len(short.odds_) == len(short.shift_) <= _MAX_CURVE_POINTS
    monkeypatch.setattr("calibrant.calibrators.confidence_maps._MAX_CURVE_POINTS", 30_000)
    long = SplineCalibration().fit(logits, labels)
    assert len(long.odds_) > 10_000
    difference = np.abs(short.predict_proba(logits) - long.predict_proba(logits))
    assert difference.max() < 2e-3
    assert difference.mean() < 1e-4  # the noise of a fit is a hundred times that


def test_the_map_may_fall(rng):
    """The surer half is right less often."""
    odds = rng.uniform(0, 4, 8000)
    logits, labels = of_two(odds, rng.random(8000) < 0.9 - 0.08 * odds)
    found = (
        SplineCalibration()
        .fit(logits, labels)
        .predict_proba(np.array([[0.0, 0.5], [0.0, 2.0], [0.0, 3.5]]))[:, 1]
    )
    np.testing.assert_allclose(found, [0.86, 0.74, 0.62], atol=0.03)


def test_confidences_stay_half_a_sample_from_certainty(rng):
    odds = rng.uniform(1, 8, 400)
    right = rng.random(400) < np.where(odds > 4, 1, 0.9)
    fitted = SplineCalibration().fit(*of_two(odds, right))
    found = fitted.predict_proba(np.array([[0.0, 8.0], [0.0, 25.0]]))
    assert found[:, 0].min() == pytest.approx(1 / 800, rel=1e-3)
    # the other way round: of ten classes none is ever right
    logits = 0.1 * rng.normal(size=(400, 10))
    with told(), pytest.warns(UserWarning, match="stopped at its bounds"):
        fitted = SplineCalibration(keep_argmax=False).fit(logits, logits.argmin(-1))
    top = np.take_along_axis(fitted.predict_proba(logits), logits.argmax(-1)[:, None], -1)
    assert top.min() == pytest.approx(1 / 800, rel=1e-3)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("answers", ["right", "wrong"])
def test_one_sided_answers_end_at_the_bounds_and_say_so(rng, kind, answers):
    logits = 3 * rng.normal(size=(1000, 4))
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    name = kind.__name__
    message = f"{name} found no optimum for these 1,000 examples and stopped at its bounds"
    with told(), pytest.warns(UserWarning, match=message):
        fitted = kind().fit(logits, labels)
    assert all(torch.isfinite(values).all() for values in fitted.state_dict().values())
    confidence = fitted.predict_proba(logits).max(-1)
    assert confidence.mean() > 0.99 if answers == "right" else confidence.mean() < 0.4


@pytest.mark.parametrize("kind", [SigmoidScaling, BetaCalibration])
def test_answers_that_a_threshold_parts_end_at_the_bounds_and_say_so(rng, kind):
    odds = rng.uniform(0, 6, 300)
    with pytest.warns(UserWarning, match="stopped at its bounds"):
        fitted = kind().fit(*of_two(odds, odds > 3))
    values = np.concatenate([v.reshape(-1) for v in fitted.state_dict().values()])
    assert np.isfinite(values).all()
    assert np.abs(values).max() < 200


@pytest.mark.filterwarnings("ignore:.* parameters? for")
@pytest.mark.parametrize("kind", ALL)
def test_one_confidence_and_few_samples_are_fitted(kind):
    for odds, right in (([2.0, 2.0], [True, False]), ([30.0, 30.0, 30.0], [True, True, False])):
        logits, labels = of_two(np.array(odds), np.array(right))
        fitted = kind(keep_argmax=False).fit(logits, labels)
        found = fitted.predict_proba(logits)[:, 1]
        np.testing.assert_allclose(found, np.mean(right), atol=1e-3)


def test_float32_keeps_apart_what_it_cannot_tell_from_one():
    fitted = SigmoidScaling()
    fitted._set_classes(2)
    fitted._store(slope_=0.1, offset_=0.0)
    found = fitted.predict_proba(np.array([[0.0, 20.0], [0.0, 28.0]], np.float32))[:, 1]
    np.testing.assert_allclose(found, [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-2.8))], rtol=1e-5)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize(("slope", "offset"), [(0.5, -0.5), (1.0, 0.0), (3.0, 1.0)])
def test_the_line_is_that_of_a_logistic_regression(rng, slope, offset, weigh):
    odds = rng.normal(0.5, 1.5, 3000)
    right = rng.random(3000) < expit(slope * odds + offset)
    weight = rng.exponential(size=3000) if weigh else np.ones(3000)
    other = LogisticRegression(C=1e10, tol=1e-10).fit(odds[:, None], right, weight)
    found = fit_platt(odds, right, weight)
    assert found.converged
    np.testing.assert_allclose(found.x, [other.coef_[0, 0], other.intercept_[0]], atol=1e-4)


def test_the_line_is_found_far_from_where_it_starts(rng):
    odds = rng.normal(15, 2, 50_000)
    found = fit_platt(odds, rng.random(50_000) < expit(2 * (odds - 15)), np.ones(50_000))
    assert found.converged
    np.testing.assert_allclose(found.x, [2, -30], rtol=0.04)


def test_the_line_never_falls_and_that_is_no_failure(rng):
    odds = rng.normal(0, 2, 2000)
    right = rng.random(2000) < expit(0.5 - odds)
    found = fit_platt(odds, right, np.ones(2000))
    assert found.converged
    np.testing.assert_allclose(found.x, [0, logit(right.mean())], atol=1e-5)


@pytest.mark.parametrize("answers", ["right", "wrong", "apart"])
def test_a_line_without_an_optimum_ends_at_a_bound(rng, answers):
    odds = rng.normal(2, 2, 500)
    right = {"right": odds < np.inf, "wrong": odds > np.inf, "apart": odds > 1}[answers]
    slope, offset = (found := fit_platt(odds, right, np.ones(500))).x
    assert not found.converged
    level = slope * odds.mean() + offset
    ends = {"right": MAX_MEAN_ODDS, "wrong": -MAX_MEAN_ODDS}
    if answers in ends:
        np.testing.assert_allclose(level, ends[answers])
    else:
        assert math.isclose(slope, MAX_SLOPE) or math.isclose(abs(level), MAX_MEAN_ODDS)
        assert ((expit(slope * odds + offset) > 0.5) == right).mean() > 0.99


@pytest.mark.parametrize("answers", ["right", "wrong", "apart"])
def test_no_optimum_is_said_wherever_the_search_stops(rng, answers):
    """The loss of answers that are sure and right is level long before a bound."""
    for _ in range(40):
        odds = rng.normal(rng.uniform(-10, 25), rng.uniform(0.1, 6), rng.integers(2, 400))
        middle = np.median(odds)
        right = {"right": odds < np.inf, "wrong": odds > np.inf, "apart": odds > middle}[answers]
        found = fit_platt(odds, right, np.ones(len(odds)))
        assert not found.converged
        assert 0 <= found.x[0] <= MAX_SLOPE
        assert abs(found.x[0] * odds.mean() + found.x[1]) <= MAX_MEAN_ODDS * (1 + 1e-9)


def test_an_optimum_beyond_a_bound_is_said(rng):
    """Right and wrong overlap here, but the best slope is 50."""
    odds = rng.normal(15, 0.05, 20_000)
    found = fit_platt(odds, rng.random(20_000) < expit(50 * (odds - 15)), np.ones(20_000))
    assert not found.converged
    np.testing.assert_allclose(found.x, [MAX_SLOPE, -15 * MAX_SLOPE], rtol=0.01)
