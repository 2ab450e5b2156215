"""Shared temperatures: against scikit-learn, and against searches over the exact softmax."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax, softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators import scaling
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import (
    EnsembleTemperatureScaling,
    Identity,
    TemperatureObjective,
    TemperatureScaling,
)
from tests.support.simulate import drawn

OBJECTIVES: tuple[TemperatureObjective, ...] = ("nll", "brier", "ece", "soft_ece")


# Definitions on the exact softmax, in float64


def losses(objective, probs, labels):
    """One proper loss for each row."""
    if objective == "nll":
        return -np.log(probs[np.arange(len(labels)), labels])
    return ((probs - np.eye(probs.shape[-1])[labels]) ** 2).sum(-1)


def binned(confidence, right, share):
    """The gaps of 15 bins, each closed above."""
    inside = np.ceil(confidence * 15).clip(1, 15).astype(int) - 1
    gaps = np.bincount(inside, share * (confidence - right), 15)
    return float(np.abs(gaps).sum())


def soft_binned(confidence, right, share, sigma=0.05):
    """The gaps of 15 bins in which every sample has a part."""
    part = np.exp(-((confidence[:, None] - (np.arange(15) + 0.5) / 15) ** 2) / (2 * sigma**2))
    part /= part.sum(-1, keepdims=True)
    return float(np.abs((share * (confidence - right)) @ part).sum())


def measure(objective, logits, labels, temperature, weight=None):
    weight = np.ones(len(labels)) if weight is None else weight
    share = weight / weight.sum()
    z = logits.astype(np.float64) / temperature
    if objective == "nll":
        return float(share @ -log_softmax(z, -1)[np.arange(len(labels)), labels])
    probs = softmax(z, -1)
    if objective == "brier":
        return float(share @ losses("brier", probs, labels))
    right = z.argmax(-1) == labels
    return {"ece": binned, "soft_ece": soft_binned}[objective](probs.max(-1), right, share)


def best_temperature(logits, labels, weight=None, objective="nll"):
    """Minimum of an objective with one valley."""
    found = optimize.minimize_scalar(
        lambda u: measure(objective, logits, labels, math.exp(u), weight),
        bounds=(math.log(0.04), math.log(25)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return math.exp(found.x)


# One temperature


@pytest.mark.parametrize("classes", [2, 7, 150])
@pytest.mark.parametrize("weigh", [False, True])
def test_the_temperature_is_the_optimum_of_the_exact_softmax(rng, classes, weigh):
    logits, labels = drawn(rng, 600, classes, 1.5, scale=3.0)
    weight = rng.exponential(size=600) ** 3 if weigh else None
    fitted = TemperatureScaling().fit(logits, labels, sample_weight=weight)
    expected = best_temperature(logits, labels, weight)
    assert float(fitted.temperature_) == pytest.approx(expected, rel=1e-5)
    assert fitted.solution_ is not None
    assert fitted.solution_.converged


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("temperature", [0.1, 0.25, 1, 4, 7, 10, 20])
def test_a_known_temperature_is_recovered(rng, temperature, dtype):
    """Peers give 5e-08 for 7, or do nothing about single precision."""
    logits, labels = drawn(rng, 4000, 10, temperature, scale=2 * temperature)
    given = logits.astype(dtype)
    found = float(TemperatureScaling().fit(given, labels).temperature_)
    assert found == pytest.approx(temperature, rel=0.04)
    assert found == pytest.approx(best_temperature(given, labels), rel=1e-5)


@pytest.fixture(scope="module")
def noisy():
    """Over-confident logits, a fifth of the labels random: objectives disagree."""
    rng = np.random.default_rng(3)
    logits, labels = drawn(rng, 1500, 6, 2.0, scale=4.0)
    labels[::5] = rng.integers(0, 6, 300)
    return logits, labels, rng.exponential(size=1500)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_is_as_low_as_on_a_fine_grid(noisy, objective, weigh):
    logits, labels, weight = noisy
    weight = weight if weigh else None
    fitted = TemperatureScaling(objective=objective).fit(logits, labels, sample_weight=weight)
    found = measure(objective, logits, labels, float(fitted.temperature_), weight)
    grid = np.exp(np.linspace(math.log(0.5), math.log(8), 250))
    lowest = min(measure(objective, logits, labels, t, weight) for t in grid)
    # samples cross the edges of hard bins one by one
    assert found <= lowest + (2e-3 if objective == "ece" else 1e-6)


def test_objectives_have_optima_of_their_own(noisy):
    logits, labels, _ = noisy
    found = {
        objective: float(TemperatureScaling(objective=objective).fit(logits, labels).temperature_)
        for objective in OBJECTIVES
    }
    for objective in OBJECTIVES:
        own = measure(objective, logits, labels, found[objective])
        for other in OBJECTIVES:
            if {objective, other} != {"ece", "soft_ece"} and objective != other:
                assert own < measure(objective, logits, labels, found[other]) - 1e-6
    assert found["brier"] == pytest.approx(
        best_temperature(logits, labels, objective="brier"), rel=1e-4
    )
    assert found["ece"] == pytest.approx(found["soft_ece"], rel=0.15)
    assert found["nll"] > 1.2 * found["ece"]


def test_nothing_is_changed_by_none(rng):
    logits, labels = drawn(rng, 50, 4)
    fitted = Identity().fit(logits, labels)
    np.testing.assert_allclose(fitted.predict_proba(logits), softmax(logits, -1), rtol=1e-12)
    assert fitted.solution_ is None
    claims = fitted.predict_records(tabulate(examples(logits, labels)))
    assert claims.nll.mean() == pytest.approx(cal.nll(logits, labels), abs=1e-6)


# Data without an optimum


REASONS = {
    -1: "100 % of the predictions are right: if the model was trained on these examples",
    0: "A temperature makes no difference",
    1: "0 % of the predictions are right, no more than by guessing",
}


def at_bound(temperature, samples):
    return (
        rf"no best temperature in \[0.05, 20\] for these {samples:,} examples; stopped at "
        rf"{temperature:g}\. {REASONS[int(np.sign(temperature - 1))]}"
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("answers", "bound"), [("right", 0.05), ("wrong", 20.0)])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_one_sided_answers_end_at_the_bound_and_say_so(rng, objective, answers, bound, scale):
    assert bound in BOUNDS
    logits = scale * rng.normal(size=(1200, 4))
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    fitted = TemperatureScaling(objective=objective)
    with told(), pytest.warns(UserWarning, match=at_bound(bound, 1200)) as caught:
        fitted.fit(logits, labels)
    assert [w.filename for w in caught] == [__file__]
    assert float(fitted.temperature_) == pytest.approx(bound, rel=1e-6)
    assert fitted.solution_ is not None
    assert not fitted.solution_.converged


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (1e4, r"but the logits of some labels are up to \S+ below the largest: divide them all"),
        (1e-4, "but the logits hardly differ: multiply them all"),
    ],
)
def test_logits_of_an_unusual_scale_are_not_taken_for_guessing(rng, factor, reason):
    logits, labels = drawn(rng, 1000, 4, 1.0, scale=3.0)
    right = 100 * (logits.argmax(-1) == labels).mean()
    assert 60 < right < 90
    with pytest.warns(UserWarning, match=rf"{right:.4g} % of the predictions are right, {reason}"):
        TemperatureScaling().fit(factor * logits, labels)


@pytest.mark.parametrize("answers", ["right", "wrong"])
def test_the_ensemble_says_so_too(rng, answers):
    logits = rng.normal(size=(100, 4))
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    with (
        told(),
        pytest.warns(UserWarning, match=at_bound(0.05 if answers == "right" else 20.0, 100)),
    ):
        fitted = EnsembleTemperatureScaling().fit(logits, labels)
    expected = [1, 0, 0] if answers == "right" else [0, 0, 1]
    np.testing.assert_allclose(fitted.weights_, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are)")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_uniform_logits_have_no_best_temperature(objective):
    fitted = TemperatureScaling(objective=objective)
    with pytest.warns(UserWarning, match="no best temperature in"):
        fitted.fit(np.zeros((300, 5)), np.arange(300) % 4)
    assert float(fitted.temperature_) == 1


def test_right_answers_without_any_doubt_are_left_alone(rng):
    logits = 1e6 * rng.normal(size=(300, 5))
    with told(), pytest.warns(UserWarning, match="no best temperature"):
        fitted = TemperatureScaling().fit(logits, logits.argmax(-1))
    assert float(fitted.temperature_) == 1


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are)")
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_rows_with_one_possible_class_have_no_say(rng):
    logits, labels = drawn(rng, 500, 4, 2.0)
    sure = np.where(np.arange(4) == 2, 1.0, -np.inf) * np.ones((200, 1))
    given, with_sure = np.concatenate([logits, sure]), np.append(labels, np.full(200, 2))
    expected = float(TemperatureScaling().fit(logits, labels).temperature_)
    fitted = TemperatureScaling().fit(given, with_sure)
    assert float(fitted.temperature_) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(fitted.predict_proba(sure), np.isfinite(sure))
    with told(), pytest.warns(UserWarning, match=at_bound(1, 200)):
        TemperatureScaling().fit(sure, np.full(200, 2))


# An ensemble of three


def mixed(logits, temperature, weights):
    """The mixture by its definition; masked classes are not among the uniform ones."""
    possible = np.isfinite(logits)
    parts = [
        softmax(logits / temperature, -1),
        softmax(logits, -1),
        possible / possible.sum(-1, keepdims=True),
    ]
    return sum(w * p for w, p in zip(weights, parts, strict=True))


def simplex(steps):
    ticks = np.arange(steps + 1) / steps
    return [(a, b, max(1 - a - b, 0)) for a in ticks for b in ticks if a + b <= 1 + 1e-9]


def masked(rng, logits, labels):
    hidden = rng.random(logits.shape) < 0.2
    hidden[np.arange(len(labels)), labels] = False
    return np.where(hidden, -np.inf, logits)


# temperature of the data, share of random labels, scale
MIXTURES = {
    "tempered": (2.0, 0.0, 1.0),
    "noisy": (2.0, 0.3, 4.0),
    "flat": (0.5, 0.5, 1.0),
    "sharp": (0.5, 0.05, 3.0),
}


@pytest.mark.parametrize("objective", ["nll", "brier"])
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("weigh", [False, True])
def test_the_mixture_is_the_best_of_all(rng, objective, kind, weigh):
    temperature, noise, scale = MIXTURES[kind]
    logits, labels = drawn(rng, 400, 5, temperature, scale=scale * temperature)
    labels = np.where(rng.random(400) < noise, rng.integers(0, 5, 400), labels)
    logits = masked(rng, logits, labels)
    weight = rng.exponential(size=400) if weigh else np.ones(400)
    fitted = EnsembleTemperatureScaling(objective=objective)
    fitted.fit(logits, labels, sample_weight=weight)
    found, weights = float(fitted.temperature_), fitted.weights_.double().numpy()

    unmasked = np.maximum(logits, -1e9)
    assert found == pytest.approx(
        best_temperature(unmasked, labels, weight, objective=objective), rel=1e-4
    )
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-6)

    def value(w):
        return np.average(losses(objective, mixed(logits, found, w), labels), weights=weight)

    assert value(weights) <= min(value(w) for w in simplex(25)) + 1e-7
    # and nothing near is better
    for direction in np.eye(3)[:, None] - np.eye(3):
        for step in (1e-3, -1e-3):
            for nudge in direction:
                moved = weights + step * nudge
                if moved.min() >= 0:
                    assert value(weights) <= value(moved) + 1e-8


@pytest.mark.parametrize("objective", ["nll", "brier"])
def test_the_share_of_random_labels_is_the_uniform_part(rng, objective):
    logits, labels = drawn(rng, 8000, 8, scale=3.0)
    labels = np.where(rng.random(8000) < 0.3, rng.integers(0, 8, 8000), labels)
    fitted = EnsembleTemperatureScaling(objective=objective).fit(logits, labels)
    assert float(fitted.weights_[2]) == pytest.approx(0.3, abs=0.04)
    error = EnsembleTemperatureScaling().fit(*drawn(rng, 8000, 8, scale=3.0)).weights_[2]
    assert error < 0.02


@pytest.mark.parametrize("objective", ["nll", "brier"])
def test_the_mixture_is_applied_as_it_is_defined(rng, objective):
    logits, labels = drawn(rng, 500, 6, 2.0, scale=4.0)
    labels[::4] = rng.integers(0, 6, 125)
    logits = masked(rng, logits, labels)
    fitted = EnsembleTemperatureScaling(objective=objective).fit(logits, labels)
    assert fitted.weights_[2] > 0.01
    expected = mixed(logits, float(fitted.temperature_), fitted.weights_.double().numpy())
    probs = fitted.predict_proba(logits)
    np.testing.assert_allclose(probs, expected, atol=1e-7)
    assert (probs[np.isneginf(logits)] == 0).all()
    assert (probs.argmax(-1) == logits.argmax(-1)).all()
    claims = fitted.predict_records(tabulate(examples(logits, labels)))
    np.testing.assert_allclose(claims.confidence, expected.max(-1), atol=1e-5)
    np.testing.assert_allclose(claims.nll, losses("nll", expected, labels), atol=1e-4)


def test_an_unlikely_class_keeps_its_logarithm(rng):
    fitted = EnsembleTemperatureScaling().fit(*drawn(rng, 500, 3))
    fitted._store(weights_=torch.tensor([1.0, 0.0, 0.0]), temperature_=1.0)
    out = fitted(torch.tensor([[0.0, -300.0, -torch.inf]]))
    np.testing.assert_array_equal(out, [[0.0, -300.0, -np.inf]])


# Newton steps over large logits


@pytest.mark.parametrize("kind", ["plain", "masked", "weighted", "half", "tokens"])
def test_newton_steps_over_the_logits_find_the_optimum_of_the_table(rng, kind, monkeypatch):
    logits, labels = drawn(rng, 3000, 20, 2.5)
    options = {}
    if kind == "masked":
        hidden = rng.random(logits.shape) < 0.3
        hidden[np.arange(3000), labels] = False
        logits = np.where(hidden, -np.inf, logits)
    if kind == "weighted":
        options = {"sample_weight": rng.integers(0, 3, 3000).astype(float)}
        labels[::7] = -100
    if kind == "half":
        logits = logits.astype(np.float16)
    if kind == "tokens":
        logits, labels = logits.reshape(30, 100, 20), labels.reshape(30, 100)
    expected = TemperatureScaling().fit(logits, labels, **options)
    monkeypatch.setattr(scaling, "_NEWTON_FROM", 1)
    monkeypatch.setattr(scaling, "tabulate", spy := mock.Mock(side_effect=tabulate))
    found = TemperatureScaling().fit(logits, labels, **options)
    assert found.solution_ is not None
    assert found.solution_.steps <= 4
    assert (spy.call_args.args[0].labels >= 0).sum() < 2000  # the sample only
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are)")
def test_newton_steps_give_way_to_the_table_where_there_is_no_optimum(rng, monkeypatch):
    logits = rng.normal(size=(2000, 5))
    monkeypatch.setattr(scaling, "_NEWTON_FROM", 1)
    with told(), pytest.warns(UserWarning, match="no best temperature in"):
        fitted = TemperatureScaling().fit(logits, logits.argmax(-1))
    assert float(fitted.temperature_) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="row 1500 has NaN"):
        TemperatureScaling().fit(
            np.where(np.arange(2000)[:, None] == 1500, np.nan, logits), [0] * 2000
        )
