"""New log-odds for the top class: the map, the line that is fitted, and the blend with SMART."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import expit, logit, logsumexp, softmax

import calibrant as cal
from calibrant._core.chunks import examples, top_class
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.parts import Blend, OddsScaling
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.smart import SMART
from calibrant.calibrators.top_label import (
    MAX_ODDS,
    _confidence_objective,
    _log_sum_without,
    _rest_sharpness,
    _top_odds,
    _with_log_odds,
    record_odds,
)
from tests.support.calibrators import EVERY_METHOD
from tests.support.simulate import drawn


def masked(rng, logits, labels, share=0.2):
    hidden = rng.random(logits.shape) < share
    hidden[np.arange(len(labels)), labels] = False
    return np.where(hidden, -np.inf, logits)


def odds_of(logits):
    """Log-odds of the top class of each row, the others one after the other."""
    found = []
    for row in logits:
        top = row.argmax()
        found.append(row[top] - logsumexp(np.delete(row, top)))
    return np.array(found)


def line_at(odds, slopes, offset, knots):
    """A broken line through the parts between the knots."""
    found = []
    for s in odds:
        total, below = offset + slopes[0] * min(s, knots[0]), knots[0]
        for slope, end in zip(slopes[1:], [*knots[1:], math.inf], strict=True):
            total += slope * max(min(s, end) - below, 0)
            below = end
        found.append(total)
    return np.array(found)


def line_of(fitted, odds):
    line, knots = fitted.line_.double().numpy(), fitted.knots_.double().numpy()
    return line_at(odds, line[:-1], line[-1], knots)


def soft_ece(confidence, right, share):
    centres = (np.arange(15) + 0.5) / 15
    part = np.exp(-((confidence[:, None] - centres) ** 2) / (2 * 0.05**2))
    part /= part.sum(-1, keepdims=True)
    mass, gap = share @ part, (share * (confidence - right)) @ part
    return float((mass * (np.sqrt((gap / mass) ** 2 + 1e-6) - 1e-3)).sum())


def drawn_from(rng, probs):
    return (np.log(np.maximum(probs, 1e-300)) + rng.gumbel(size=probs.shape)).argmax(-1)


@pytest.fixture(scope="module")
def data():
    """Over-confident logits with random labels among them, masked classes, weights."""
    rng = np.random.default_rng(21)
    logits, labels = drawn(rng, 1200, 8, 2.0, scale=5.0)
    labels[::6] = rng.integers(0, 8, 200)
    return masked(rng, logits, labels), labels, rng.exponential(size=1200)


# The map


@pytest.mark.parametrize("classes", [2, 5, 40])
def test_the_top_class_has_the_wanted_odds_and_the_rest_its_proportions(rng, classes):
    logits = rng.normal(size=(200, classes)) * 3
    if classes > 2:
        logits[:, 1:] = masked(rng, logits[:, 1:], np.zeros(200, int))  # two stay at least
    logits -= logits.max(-1, keepdims=True)
    wanted = rng.uniform(-8, 12, 200)
    out = _with_log_odds(torch.from_numpy(logits), torch.from_numpy(wanted[:, None])).numpy()
    before, after = softmax(logits, -1), softmax(out, -1)
    for i, top in enumerate(logits.argmax(-1)):
        assert out[i, top] == 0
        assert after[i, top] == pytest.approx(expit(wanted[i]), rel=1e-10)
        rest = np.delete(before[i], top) / (1 - before[i, top])
        np.testing.assert_allclose(
            np.delete(after[i], top), rest * expit(-wanted[i]), rtol=1e-9, atol=1e-300
        )
    assert (after[np.isneginf(logits)] == 0).all()


def test_only_the_first_of_equals_is_the_top():
    logits = torch.tensor([[-1.0, 0.0, 0.0, -2.0]], dtype=torch.float64)
    out = _with_log_odds(logits, torch.tensor([[3.0]], dtype=torch.float64))
    assert out[0, 1] == 0
    assert float(out[0, 2] - out[0, 0]) == pytest.approx(1)
    assert float(out.softmax(-1)[0, 1]) == pytest.approx(expit(3))


def test_the_rest_is_the_sum_without_the_top(rng):
    logits = rng.normal(size=(50, 6))
    logits -= logits.max(-1, keepdims=True)
    values = torch.from_numpy(logits)
    found = _log_sum_without(values, top_class(values))
    assert found.shape == (50, 1)
    np.testing.assert_allclose(-found[:, 0], odds_of(logits), rtol=1e-12)
    np.testing.assert_allclose(_top_odds(torch.from_numpy(logits)), -found, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rest_of_one_possible_class_is_finite(dtype):
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, -500.0, -torch.inf]], dtype=dtype)
    assert torch.isfinite(_log_sum_without(logits, top_class(logits))).all()
    np.testing.assert_array_equal(_top_odds(logits), [[MAX_ODDS], [MAX_ODDS]])
    out = _with_log_odds(logits, torch.tensor([[2.0], [2.0]], dtype=dtype))
    np.testing.assert_allclose(out, [[0, -np.inf, -np.inf], [0, -2, -np.inf]], atol=1e-6)


@pytest.mark.parametrize("sharpness", [0.6, 6.0])
def test_odds_of_the_table_are_those_of_the_logits(data, sharpness):
    logits, labels, _ = data
    found = record_odds(tabulate(examples(logits, labels)), sharpness)
    expected = np.clip(odds_of(sharpness * logits), -MAX_ODDS, MAX_ODDS)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert (found.max() == MAX_ODDS) == (sharpness > 1)


# The line


@pytest.mark.parametrize("knots", [1, 2, 4])
@pytest.mark.parametrize("objective", ["both", "nll"])
def test_the_line_is_applied_as_it_is_defined(data, knots, objective):
    logits, labels, weight = data
    fitted = OddsScaling(knots=knots, objective=objective)
    fitted.fit(logits, labels, sample_weight=weight)
    tempered = logits / float(fitted.temperature_)
    wanted = line_of(fitted, np.clip(odds_of(tempered), -MAX_ODDS, MAX_ODDS))
    others = logits / float(fitted.rest_temperature_)
    rest = softmax(np.where(logits == logits.max(-1, keepdims=True), -np.inf, others), -1)
    free = rest.max(-1) * expit(-wanted) < expit(wanted)  # the top stays the top
    found = fitted.predict_proba(logits)
    assert 0.5 < free.mean() <= 1
    np.testing.assert_allclose(found.max(-1)[free], expit(wanted)[free], atol=1e-6)
    expected = rest * expit(-wanted)[:, None]
    expected[np.arange(len(logits)), logits.argmax(-1)] = expit(wanted)
    np.testing.assert_allclose(found[free], expected[free], atol=1e-6)


def test_a_runner_up_is_held_below_the_top():
    fitted = OddsScaling(knots=1)
    fitted._set_classes(4)
    fitted._store(line_=torch.tensor([1.0, 1.0, -4.0]))
    logits = np.log([[0.4, 0.3, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01]])
    low, high = fitted.predict_proba(logits)
    # wanted were 0.4 / 0.6 / e^4 to 1: the three others, 3 : 2 : 1, would all have been above
    np.testing.assert_allclose(low, 0.25, atol=1e-6)
    assert low.argmax() == 0
    assert (np.diff(low) <= 0).all()
    assert high[0] == pytest.approx(expit(math.log(97 / 3) - 4), abs=1e-6)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("knots", [1, 2, 5])
def test_knots_cut_the_doubt_into_equal_parts(data, knots, weigh):
    logits, labels, weight = data
    surer = np.where(odds_of(logits) > 2, 10, 1)
    weight = weight * surer if weigh else np.ones(len(labels))
    fitted = OddsScaling(knots=knots).fit(logits, labels, sample_weight=weight)
    odds = np.clip(odds_of(logits / float(fitted.temperature_)), -MAX_ODDS, MAX_ODDS)
    doubt = weight * expit(odds) * expit(-odds)
    expected: list[float] = []
    total = 0.0
    for i in np.argsort(odds):
        total += doubt[i]
        while len(expected) < knots and total >= doubt.sum() * (len(expected) + 1) / (knots + 1):
            expected.append(odds[i])
    np.testing.assert_allclose(fitted.knots_, expected, atol=0.02)
    assert (np.diff(fitted.knots_.numpy()) > 0).all()
    assert fitted.size(8) == knots + 4 == len(fitted.line_) + 2


@pytest.mark.parametrize("weigh", [False, True])
def test_the_temperature_is_the_best_single_one(data, weigh):
    logits, labels, weight = data
    options = {"sample_weight": weight} if weigh else {}
    fitted = OddsScaling().fit(logits, labels, **options)
    expected = TemperatureScaling().fit(logits, labels, **options)
    assert float(fitted.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-6)


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.4])
def test_value_and_gradient_of_the_fit_are_those_of_differences(rng, weight):
    inputs = np.concatenate([rng.normal(size=(60, 3)), np.ones((60, 1))], axis=1)
    correct, share = rng.random(60) < 0.6, rng.dirichlet(np.ones(60))
    function = _confidence_objective(inputs, correct, share, weight)
    parameters = rng.normal(size=4)
    value, gradient = function(parameters)
    confidence = expit(inputs @ parameters)
    likelihood = -(share @ np.log(np.where(correct, confidence, 1 - confidence)))
    expected = likelihood + weight * soft_ece(confidence, correct, share)
    assert value == pytest.approx(expected, rel=1e-10)
    step = 1e-6 * np.eye(4)
    slopes = [(function(parameters + s)[0] - function(parameters - s)[0]) / 2e-6 for s in step]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("objective", ["nll", "both"])
@pytest.mark.parametrize("weigh", [False, True])
def test_no_other_line_is_better(data, objective, weigh):
    logits, labels, weight = data
    share = weight / weight.sum() if weigh else np.full(len(labels), 1 / len(labels))
    fitted = OddsScaling(objective=objective).fit(logits, labels, sample_weight=share)
    odds = np.clip(odds_of(logits / float(fitted.temperature_)), -MAX_ODDS, MAX_ODDS)
    right, knots = logits.argmax(-1) == labels, fitted.knots_.double().numpy()
    low = np.array([-np.inf, *knots])
    pieces = np.clip(odds[:, None], low, [*knots, np.inf]) - [0, *knots]

    def value(line):
        s = pieces @ line[:-1] + line[-1]
        nll = share @ np.logaddexp(0, np.where(right, -s, s))
        return nll + (soft_ece(expit(s), right, share) if objective == "both" else 0)

    found = value(fitted.line_.double().numpy())
    bounds = [(0, 5)] * 3 + [(-5, 5)]
    for start in ([1, 1, 1, 0], [0.2, 2, 0.5, -1]):
        other = optimize.minimize(value, start, method="Nelder-Mead", bounds=bounds)
        assert found <= other.fun + (1e-6 if objective == "nll" else 5e-4)


def test_a_distortion_of_the_odds_is_undone(rng):
    logits = rng.normal(size=(12_000, 4)) * 2
    logits[np.arange(12_000), rng.integers(0, 4, 12_000)] += rng.gamma(2, 2, 12_000)
    truth = line_at(odds_of(logits), [1.5, 0.1, 2.0], 0.3, [0.2, 1.4])
    gaps = torch.from_numpy(logits - logits.max(-1, keepdims=True))
    probs = _with_log_odds(gaps, torch.from_numpy(truth[:, None])).softmax(-1).numpy()
    labels = drawn_from(rng, probs)
    given, fresh = (logits[:6000], labels[:6000]), (logits[6000:], labels[6000:])
    known = np.take_along_axis(probs, logits.argmax(-1)[:, None], -1)[6000:, 0]
    errors, eces = [], []
    for kind in (TemperatureScaling, OddsScaling):
        calibrator = kind().fit(*given)
        errors.append(np.abs(calibrator.predict_proba(fresh[0]).max(-1) - known).mean())
        out = calibrator(torch.from_numpy(fresh[0])).numpy()
        eces.append(cal.ece(out, fresh[1]))
    assert errors[1] < min(0.016, errors[0] / 2.2), errors
    assert eces[1] < min(0.02, eces[0] / 2), eces


def test_slopes_are_never_negative(rng):
    """Answers that are right less often the surer they are make the line level, not falling."""
    odds = rng.uniform(0, 6, 4000)
    logits = np.stack([odds, np.zeros(4000)], axis=1)
    labels = (rng.random(4000) >= 0.9 - 0.06 * odds).astype(int)
    fitted = OddsScaling(objective="nll").fit(logits, labels)
    assert (fitted.line_[:-1] >= 0).all()
    assert fitted.line_[:-1].min() < 1e-12
    probs = fitted.predict_proba(logits[np.argsort(odds)])[:, 0]
    assert (np.diff(probs) >= -1e-12).all()


# The likelihood


def own_losses(calibrator, logits, labels):
    return -np.log(calibrator.predict_proba(logits)[np.arange(len(labels)), labels])


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("kind", ["plain", "noisy", "sharp"])
def test_the_likelihood_is_no_worse_than_that_of_one_temperature(rng, kind, weigh):
    scale, noise = {"plain": (3.0, 0.0), "noisy": (5.0, 0.2), "sharp": (0.7, 0.0)}[kind]
    logits, labels = drawn(rng, 600, 12, scale / 2, scale=scale)
    labels = np.where(rng.random(600) < noise, rng.integers(0, 12, 600), labels)
    weight = rng.exponential(size=600) if weigh else np.ones(600)
    fitted = OddsScaling(objective="nll").fit(logits, labels, sample_weight=weight)
    one = TemperatureScaling().fit(logits, labels, sample_weight=weight)
    found, expected = (own_losses(c, logits, labels) for c in (fitted, one))
    assert np.average(found, weights=weight) <= np.average(expected, weights=weight) + 1e-7
    both = OddsScaling().fit(logits, labels, sample_weight=weight)
    right, share = logits.argmax(-1) == labels, weight / weight.sum()
    total, before = (
        share @ own_losses(c, logits, labels)
        + soft_ece(c.predict_proba(logits).max(-1), right, share)
        for c in (both, one)
    )
    assert total <= before + 1e-4


def test_the_temperature_of_the_rest_is_the_best_for_wrong_answers(rng):
    """The top class is drawn at one temperature, the others at another."""
    logits = 3 * rng.normal(size=(20_000, 6))
    top = logits.argmax(-1)
    others = np.where(np.eye(6)[top] > 0, -np.inf, logits / 2.5)
    runner_up = (others + rng.gumbel(size=logits.shape)).argmax(-1)
    labels = np.where(rng.random(20_000) < 0.6, top, runner_up)
    fitted = OddsScaling().fit(logits, labels)
    assert float(fitted.rest_temperature_) == pytest.approx(2.5, rel=0.03)
    assert float(fitted.temperature_) != pytest.approx(2.5, rel=0.1)
    wrong = np.flatnonzero(labels != top)
    few = np.append(wrong[:3], np.flatnonzero(labels == top)[:10])
    records = tabulate(examples(logits[few], labels[few]))
    assert _rest_sharpness(records, 0.0) == pytest.approx(0, abs=0.3)


def test_two_classes_leave_nothing_to_say_about_the_rest(rng):
    logits, labels = drawn(rng, 500, 2, 2.0)
    fitted = OddsScaling().fit(logits, labels)
    assert float(fitted.rest_temperature_) == pytest.approx(float(fitted.temperature_), rel=1e-5)


@pytest.mark.parametrize("kind", [OddsScaling, Blend])
@pytest.mark.parametrize("classes", [2, 9, 60])
def test_claims_are_those_of_the_exact_map(rng, kind, classes):
    logits, labels = drawn(rng, 600, classes, 2.0, scale=5.0)
    labels[::6] = rng.integers(0, classes, 100)
    if classes > 2:
        logits = masked(rng, logits, labels)
    fitted = kind().fit(logits, labels)
    claims = fitted.predict_records(tabulate(examples(logits, labels)))
    np.testing.assert_allclose(claims.confidence, fitted.predict_proba(logits).max(-1), atol=1e-4)
    np.testing.assert_allclose(claims.nll, own_losses(fitted, logits, labels), atol=2e-3)


def test_claims_about_runners_up_that_are_held_down_are_exact(rng):
    logits, labels = drawn(rng, 500, 7, scale=1.0)
    fitted = OddsScaling().fit(logits, labels)
    fitted._store(line_=torch.tensor([1.0, 1.0, 1.0, -1.0]))
    claims = fitted.predict_records(tabulate(examples(logits, labels)))
    probs = fitted.predict_proba(logits)
    held = np.diff(np.sort(probs, -1)[:, -2:], axis=-1)[:, 0] < 1e-6
    assert held.mean() > 0.2
    np.testing.assert_allclose(claims.confidence, probs.max(-1), atol=1e-5)
    np.testing.assert_allclose(claims.nll, own_losses(fitted, logits, labels), atol=1e-4)


@pytest.mark.parametrize("name", ["sigmoid", "spline", "histogram"])
def test_claims_about_ties_are_exact_where_predictions_may_change(name, rng):
    """Only the first of equal classes gets the new odds; the others share the rest."""
    logits, labels = drawn(rng, 300, 4)
    logits = np.round(logits)
    kind: Any = EVERY_METHOD[name]
    fitted = kind(keep_argmax=False).fit(logits, labels)
    own = fitted.predict_proba(logits)[np.arange(300), labels]
    tied = (logits == logits.max(1, keepdims=True)).sum(1) > 1
    assert tied.sum() > 30
    claims = fitted.predict_records(tabulate(examples(logits, labels)))
    np.testing.assert_allclose(claims.nll, -np.log(own), atol=1e-4)


def test_claims_about_ties_are_exact(rng):
    """As in logits of half precision."""
    logits = np.round(drawn(rng, 2000, 10)[0])
    labels = drawn_from(rng, softmax(2 * logits, -1))
    labels[::2] = rng.integers(0, 10, 1000)
    fitted = OddsScaling().fit(logits, labels)
    claims = fitted.predict_records(tabulate(examples(logits, labels)))
    np.testing.assert_allclose(claims.confidence, fitted.predict_proba(logits).max(-1), atol=1e-4)
    np.testing.assert_allclose(claims.nll, own_losses(fitted, logits, labels), atol=1e-3)


# Data without an optimum, and refusals


@pytest.mark.parametrize("kind", [OddsScaling, Blend])
@pytest.mark.parametrize("answers", ["right", "wrong"])
def test_one_sided_answers_end_at_the_bounds_and_say_so(rng, kind, answers):
    logits = 3 * rng.normal(size=(1000, 4))
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    fitted: Any = kind()
    message = "OddsScaling found no optimum for these 1,000 examples and stopped at its bounds"
    with told(), pytest.warns(UserWarning, match=message):
        fitted.fit(logits, labels)
    line = (fitted if kind is OddsScaling else fitted.odds).line_
    assert line.abs().max() == OddsScaling.LIMIT
    confidence = fitted.predict_proba(logits).max(-1).mean()
    assert confidence > 0.999 if answers == "right" else confidence < 0.4


# The blend


def test_the_blend_is_the_mean_of_both_log_odds(data):
    logits, labels, weight = data
    blend = Blend(seed=3).fit(logits, labels, sample_weight=weight)
    smart = SMART(seed=3).fit(logits, labels, sample_weight=weight)
    line = OddsScaling().fit(logits, labels, sample_weight=weight)
    one = TemperatureScaling().fit(logits, labels, sample_weight=weight)
    found = blend.predict_proba(logits)
    by_margin = odds_of(logits / smart.temperature(logits)[:, None])
    by_line = line_of(line, np.clip(odds_of(logits / float(one.temperature_)), -MAX_ODDS, MAX_ODDS))
    wanted = (np.clip(by_margin, -MAX_ODDS, MAX_ODDS) + by_line) / 2
    free = np.diff(np.sort(found, -1)[:, -2:], axis=-1)[:, 0] > 1e-4
    assert free.mean() > 0.8
    np.testing.assert_allclose(found.max(-1)[free], expit(wanted)[free], atol=1e-5)
    # neither the mean of the probabilities nor either of both
    for other in ((expit(by_margin) + expit(by_line)) / 2, expit(by_margin), expit(by_line)):
        assert np.abs(found.max(-1) - other)[free].max() > 1e-3
    # the others keep their proportions at a temperature of their own
    at_one = softmax(logits / float(line.rest_temperature_), -1)
    for i in np.flatnonzero(free)[:100]:
        rest = np.delete(at_one[i], logits[i].argmax())
        mine = np.delete(found[i], logits[i].argmax())
        np.testing.assert_allclose(mine / mine.sum(), rest / rest.sum(), atol=1e-6)


def test_the_parts_of_a_blend_are_calibrators_of_their_own(data):
    logits, labels, weight = data
    blend = Blend(seed=3).fit(logits, labels, sample_weight=weight)
    for part, alone in ((blend.smart, SMART(seed=3)), (blend.odds, OddsScaling())):
        alone.fit(logits, labels, sample_weight=weight)
        np.testing.assert_array_equal(part.predict_proba(logits), alone.predict_proba(logits))
    assert {"smart.weight0_", "odds.line_", "temperature_"} <= set(blend.state_dict())
    assert blend.size(8) == blend.smart.size(8) + blend.odds.size(8)
    assert blend.solution_ is blend.smart.solution_
    other = Blend(seed=4).fit(logits, labels, sample_weight=weight)
    assert np.abs(other.predict_proba(logits) - blend.predict_proba(logits)).max() > 1e-5


def test_a_blend_calibrates_where_one_temperature_does_not(rng):
    logits = 3 * rng.normal(size=(9000, 6))
    truth = 0.7 + 2.5 * expit(2 - np.diff(np.sort(logits, -1)[:, -2:], axis=-1))
    labels = drawn_from(rng, softmax(logits / truth, -1))
    fresh, answers = logits[3000:], labels[3000:]
    errors = {}
    for kind in (TemperatureScaling, Blend):
        out = kind().fit(logits[:3000], labels[:3000])(torch.from_numpy(fresh)).numpy()
        errors[kind.__name__] = cal.ece(out, answers)
    assert errors["Blend"] < 0.025
    assert errors["Blend"] < errors["TemperatureScaling"] / 2


def test_logit_and_expit_of_the_map_agree_where_confidence_rounds_to_one():
    """Log-odds beyond what float32 can tell from 1 are all one confidence."""
    fitted = OddsScaling(knots=1)
    fitted._set_classes(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = np.array([[40.0, 0.0, 0.0], [4e4, 0.0, 0.0]])
        found = fitted.predict_proba(logits)
    np.testing.assert_allclose(logit(found[:, 1] * 2), [-MAX_ODDS, -MAX_ODDS], rtol=1e-3)
