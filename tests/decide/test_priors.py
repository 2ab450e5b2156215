"""Priors are estimated from unlabelled data, and calibrators corrected by Bayes' rule."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax, softmax

from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.decide import priors
from calibrant.decide.priors import PriorCorrection, estimate_prior, label_shift, shift_prior
from tests.support.simulate import drawn

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
    np.testing.assert_allclose(shift_prior(probs=old, old_prior=OLD, new_prior=NEW), new, rtol=1e-9)
    np.testing.assert_allclose(
        shift_prior(
            probs=shift_prior(probs=old, old_prior=OLD, new_prior=NEW), old_prior=NEW, new_prior=OLD
        ),
        old,
        rtol=1e-9,
    )
    np.testing.assert_allclose(
        shift_prior(probs=old, old_prior=OLD, new_prior=OLD), old, rtol=1e-12
    )
    cube = old.reshape(10, 50, 3)
    np.testing.assert_allclose(
        shift_prior(probs=cube, old_prior=OLD, new_prior=NEW), new.reshape(10, 50, 3), rtol=1e-9
    )


def test_logits_are_shifted_and_counted_as_their_probabilities(rng):
    logits = 2 * rng.normal(size=(200, 3))
    probs = softmax(logits, -1)
    shifted = shift_prior(logits, old_prior=OLD, new_prior=NEW)
    np.testing.assert_allclose(shifted, shift_prior(probs=probs, old_prior=OLD, new_prior=NEW))
    estimated = estimate_prior(logits, old_prior=OLD)
    np.testing.assert_allclose(estimated, estimate_prior(probs=probs, old_prior=OLD))
    odds = shift_prior(torch.tensor([0.0, 1.0]), old_prior=[0.5, 0.5], new_prior=[0.2, 0.8])
    torch.testing.assert_close(odds, torch.tensor([0.0, 1.0]).add(np.log(4)).sigmoid())
    with pytest.raises(TypeError, match="pass either logits or probs=, got both"):
        shift_prior(logits, probs=probs, old_prior=OLD, new_prior=NEW)  # type: ignore[call-overload]


def test_shift_of_one_probability_is_that_of_two(rng):
    p = rng.random(50)
    both = shift_prior(probs=np.stack([1 - p, p], -1), old_prior=[0.4, 0.6], new_prior=[0.9, 0.1])
    alone = shift_prior(probs=p, old_prior=[0.4, 0.6], new_prior=[0.9, 0.1])
    assert alone.shape == (50,)
    np.testing.assert_allclose(alone, both[:, 1])


def test_shift_keeps_kind_and_precision():
    given = torch.tensor([[0.5, 0.5]], dtype=torch.float32)
    found = shift_prior(probs=given, old_prior=torch.tensor([0.5, 0.5]), new_prior=[0.2, 0.8])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.8]]))
    assert estimate_prior(probs=given, old_prior=[0.5, 0.5]).dtype == torch.float32
    assert isinstance(
        shift_prior(probs=[[0.5, 0.5]], old_prior=[0.5, 0.5], new_prior=[0.5, 0.5]), np.ndarray
    )


def test_a_class_may_vanish():
    found = shift_prior(
        probs=[[0.2, 0.3, 0.5]], old_prior=[0.4, 0.4, 0.2], new_prior=[0.5, 0.5, 0.0]
    )
    np.testing.assert_allclose(found, [[0.4, 0.6, 0.0]])
    message = "row 1 has probability only in .* new prior is 0: give those classes a small share"
    with pytest.raises(ValueError, match=message):
        shift_prior(probs=[[0.5, 0.5], [0.0, 1.0]], old_prior=[0.5, 0.5], new_prior=[1.0, 0.0])


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([0.5, 0.5, 0.0], "old_prior must be 1e-12 or more in every class, got 0"),
        ([1.2, -0.1, -0.1], "old_prior must be 1e-12 or more in every class, got -0.1"),
        ([0.5, 0.5, math.nan], "old_prior must be 1e-12 or more in every class, got nan"),
        ([0.5, 0.5], r"must be \(3,\), one share per class, got \(2,\)"),
        ([[0.5, 0.3, 0.2]], r"must be \(3,\), one share per class, got \(1, 3\)"),
        ([50.0, 30.0, 20.0], "old_prior must sum to one, got 100: divide counts by their sum"),
    ],
)
def test_priors_that_are_none_are_refused(prior, message):
    for call in (
        lambda: shift_prior(probs=[[0.2, 0.3, 0.5]], old_prior=prior, new_prior=OLD),
        lambda: estimate_prior(probs=[[0.2, 0.3, 0.5]], old_prior=prior),
        lambda: PriorCorrection(plain(3)).set_priors(prior, OLD),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_negative_new_prior_is_refused():
    with pytest.raises(ValueError, match=r"new_prior must be 0 or more in every class, got -0\.1"):
        shift_prior(probs=[[0.2, 0.3, 0.5]], old_prior=OLD, new_prior=[0.6, 0.5, -0.1])
    with pytest.raises(TypeError, match="new_prior must be floating point, got int64"):
        shift_prior(probs=[[0.2, 0.3, 0.5]], old_prior=OLD, new_prior=[1, 0, 0])


@pytest.mark.parametrize("new", [OLD, NEW, [0.98, 0.01, 0.01], [0.0, 0.5, 0.5]])
def test_the_prior_of_unlabelled_data_is_found(rng, new):
    likelihood, labels = mixture(rng, 20_000, new)
    found = estimate_prior(probs=softmax(likelihood + np.log(OLD), -1), old_prior=OLD)
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
    found = estimate_prior(probs=probs, old_prior=OLD)
    assert loss(np.log(found[1:] / found[0])) - best.fun < priors.PRECISION
    np.testing.assert_allclose(found, softmax([0.0, *best.x]), atol=0.04 / math.sqrt(n))


def test_a_search_that_does_not_settle_says_so(rng, monkeypatch):
    monkeypatch.setattr(priors, "ROUNDS", 1)
    likelihood, _ = mixture(rng, 400, NEW)
    with pytest.warns(UserWarning, match="did not converge in 1 steps"):
        found = estimate_prior(probs=softmax(likelihood + np.log(OLD), -1), old_prior=OLD)
    assert found.sum() == pytest.approx(1)


def test_one_row_tells_a_prior():
    assert estimate_prior(probs=[[0.5, 0.3, 0.2]], old_prior=OLD).tolist() == pytest.approx(
        OLD
    )  # nothing new
    given = [[0.9, 0.05, 0.05]]
    found = estimate_prior(probs=given, old_prior=OLD)
    # where EM stands still: the row, shifted, and three examples at the old frequencies
    np.testing.assert_allclose(
        found,
        (shift_prior(probs=given, old_prior=OLD, new_prior=found)[0] + 3 * OLD) / 4,
        atol=0.01,
    )
    with pytest.raises(ValueError, match="nothing to measure"):
        estimate_prior(probs=np.empty((0, 3)), old_prior=OLD)


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
        found = estimate_prior(probs=softmax(many_classes(rng, n, old, 2.5)[0], -1), old_prior=old)
        logits, labels = many_classes(rng, 2000, old, 2.5)
        probs = softmax(logits, -1)
        lost.append(
            nll(shift_prior(probs=probs, old_prior=old, new_prior=found), labels)
            - nll(probs, labels)
        )
    assert np.mean(lost) < worse


@pytest.mark.parametrize(("n", "short"), [(1000, 0.04), (4000, 0.02)])
def test_a_strong_shift_of_ten_classes_is_found(n, short):
    old, new = np.full(10, 0.1), np.array([0.5, 0.2, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01, 0.0])
    gained, lacking = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        found = estimate_prior(probs=softmax(many_classes(rng, n, new, 1.5)[0], -1), old_prior=old)
        logits, labels = many_classes(rng, 3000, new, 1.5)
        probs = softmax(logits, -1)
        plain_nll, found_nll, known_nll = (
            nll(shift_prior(probs=probs, old_prior=old, new_prior=prior), labels)
            for prior in (old, found, new)
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
        module.predict_proba(logits),
        shift_prior(probs=inside.predict_proba(logits), old_prior=OLD, new_prior=NEW),
        atol=1e-6,
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


@pytest.mark.filterwarnings("ignore:accuracy .* is no better")
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
    expected = shift_prior(
        probs=softmax(logits + features, -1), old_prior=OLD, new_prior=module.new_prior_.double()
    )
    np.testing.assert_allclose(module.predict_proba(logits, features), expected, atol=1e-5)
    with pytest.raises(ValueError, match="PriorCorrection needs features"):
        module.fit(logits, labels)
