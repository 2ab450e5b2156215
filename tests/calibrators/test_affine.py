"""Affine maps of the logits and class temperatures, against their definitions."""

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.solve import minimise, time_limit
from calibrant.calibrators import affine_fit as affine, class_temperatures as classwise
from calibrant.calibrators.affine import DirichletCalibration, MatrixScaling, VectorScaling
from calibrant.calibrators.class_temperatures import ClassTemperatures
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.masked import assert_masked_classes_are_refused
from tests.support.simulate import drawn
from tests.support.tensors import Largest

GIVEN: dict[str, Any] = {"off_diagonal": 2.0, "intercept": 0.5}


METHODS = {
    "vector": VectorScaling,
    "matrix": partial(MatrixScaling, **GIVEN),
    "dirichlet": partial(DirichletCalibration, **GIVEN),
    "cts": ClassTemperatures,
}


every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


AFFINE = {name: METHODS[name] for name in ("vector", "matrix", "dirichlet")}


every_affine = pytest.mark.parametrize("method", AFFINE.values(), ids=AFFINE)


ODIR = [MatrixScaling, DirichletCalibration]


def centred(logits):
    return logits - logits.mean(-1, keepdims=True)


def log_softmax(logits):
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def inputs_of(method, logits):
    return log_softmax(logits) if method is DirichletCalibration else centred(logits)


def confused(rng, n=600, classes=4, scale=2.0):
    """Logits, and labels drawn from an affine map of them that mixes classes."""
    logits = scale * rng.normal(size=(n, classes))
    matrix = 0.6 * np.eye(classes) + 0.3 * np.roll(np.eye(classes), 1, axis=0)
    truth = centred(logits) @ matrix.T + np.linspace(-1, 1, classes)
    return logits, (truth + rng.gumbel(size=truth.shape)).argmax(-1), truth


def slow_optimum(score, labels, start, weight=None):
    """Minimise a textbook loss, written out per sample, by BFGS with gradients from autograd."""

    def loss(x):
        parameters = torch.tensor(x, requires_grad=True)
        logits, penalty = score(parameters)
        each = -logits.log_softmax(-1)[torch.arange(len(labels)), torch.from_numpy(labels)]
        share = torch.ones_like(each) if weight is None else torch.from_numpy(weight)
        value = (share * each).sum() / share.sum() + penalty
        return value.item(), torch.autograd.grad(value, parameters)[0].numpy()

    return optimize.minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-9}).x


@pytest.mark.parametrize("weighted", [False, True])
def test_vector_scaling_is_the_likelihood_optimum(rng, weighted):
    logits, labels, _ = confused(rng)
    weight = rng.uniform(0.5, 3, len(labels)) if weighted else None
    z = torch.from_numpy(centred(logits))
    found = slow_optimum(lambda x: (z * x[:4] + x[4:], 0), labels, np.repeat([1.0, 0], 4), weight)
    fitted = VectorScaling().fit(logits, labels, sample_weight=weight)
    np.testing.assert_allclose(fitted.weight_, found[:4], atol=1e-3)
    np.testing.assert_allclose(centred(fitted.bias_.numpy()), centred(found[4:]), atol=1e-3)
    expected = torch.softmax(z * torch.from_numpy(found[:4]) + torch.from_numpy(found[4:]), -1)
    np.testing.assert_allclose(fitted.predict_proba(logits), expected, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [3, 5])
@pytest.mark.parametrize("method", ODIR)
def test_odir_is_the_penalised_optimum(rng, method, classes, weighted):
    logits, labels, _ = confused(rng, n=300, classes=classes)
    weight = rng.uniform(0.5, 3, len(labels)) if weighted else None
    off, intercept = 0.3, 0.07
    z = torch.from_numpy(inputs_of(method, logits))

    def score(x):
        matrix, bias = x[: classes**2].reshape(classes, classes), x[classes**2 :]
        outside = (matrix**2).sum() - (matrix.diagonal() ** 2).sum()
        penalty = off * outside / (classes * (classes - 1)) + intercept * (bias**2).sum() / classes
        return z @ matrix.T + bias, penalty

    start = np.concatenate([np.eye(classes).reshape(-1), np.zeros(classes)])
    found = slow_optimum(score, labels, start, weight)
    fitted = method(off_diagonal=off, intercept=intercept).fit(logits, labels, sample_weight=weight)
    expected = found[: classes**2].reshape(classes, classes)
    np.testing.assert_allclose(fitted.weight_, expected, atol=1e-3)
    np.testing.assert_allclose(fitted.bias_, found[classes**2 :], atol=1e-3)
    assert fitted.solution_.converged
    assert float(fitted.on_diagonal_) == 0


@pytest.mark.parametrize("classes", [3, 6])
@pytest.mark.parametrize("method", ODIR)
def test_gradient_of_the_loss_equals_that_of_the_normalised_penalty(rng, method, classes):
    logits, labels, _ = confused(rng, n=1000, classes=classes)
    fitted = method(off_diagonal=4.0, intercept=0.2).fit(logits, labels)
    error = fitted.predict_proba(logits) - np.eye(classes)[labels]
    pull = error.T @ inputs_of(method, logits) / len(labels)
    outside = ~np.eye(classes, dtype=bool)
    strength = 2 * 4.0 / (classes * (classes - 1))
    np.testing.assert_allclose(
        pull[outside], -strength * fitted.weight_.numpy()[outside], atol=1e-5
    )
    np.testing.assert_allclose(np.diag(pull), 0, atol=1e-5)
    np.testing.assert_allclose(error.mean(0), -2 * 0.2 / classes * fitted.bias_.numpy(), atol=1e-5)


@pytest.mark.parametrize("method", ODIR)
def test_strong_penalties_win_where_there_is_nothing_to_gain(rng, method):
    logits, labels = drawn(rng, 1000, 5, 2.0)
    fitted = method().fit(logits, labels)
    sharpness = 1 / float(TemperatureScaling().fit(logits, labels).temperature_)
    entry = float(fitted.off_diagonal_) / 20 * sharpness**2
    assert entry >= 0.3
    new, answers = drawn(rng, 5000, 5, 2.0)
    best = cal.nll(new / 2, answers)
    assert cal.nll(fitted(torch.from_numpy(new)), answers) < best + 0.004


@pytest.mark.parametrize("method", ODIR)
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_weak_penalties_win_where_classes_are_confused(rng, method):
    logits, labels, _ = confused(rng, n=4000)
    fitted = method().fit(logits, labels)
    assert float(fitted.off_diagonal_) / 12 < 0.03
    new, answers, truth = confused(rng, n=4000)
    found = cal.nll(fitted(torch.from_numpy(new)), answers)
    assert found < cal.nll(truth, answers) + 0.01
    tempered = TemperatureScaling().fit(logits, labels)(torch.from_numpy(new))
    assert found < cal.nll(tempered, answers) - 0.2
    true = torch.from_numpy(truth).softmax(-1).numpy()
    assert np.abs(fitted.predict_proba(new) - true).mean() < 0.02


def test_matrix_of_the_truth_is_recovered(rng):
    logits, labels, _ = confused(rng, n=20_000)
    fitted = MatrixScaling().fit(logits, labels)
    truth = 0.6 * np.eye(4) + 0.3 * np.roll(np.eye(4), 1, axis=0)
    # a softmax of centred logits leaves the mean of each row and of each column open
    found = centred(centred(fitted.weight_.numpy()).T).T
    np.testing.assert_allclose(found, centred(centred(truth).T).T, atol=0.05)


def test_penalty_that_is_given_is_kept_while_the_other_is_chosen(rng):
    logits, labels, _ = confused(rng, n=500)
    fitted = MatrixScaling(off_diagonal=7.0).fit(logits, labels)
    assert float(fitted.off_diagonal_) == 7
    assert float(fitted.on_diagonal_) == 0
    assert 0 < float(fitted.intercept_) < np.inf
    fitted = MatrixScaling(intercept=7.0).fit(logits, labels)
    assert float(fitted.intercept_) == 7
    assert float(fitted.off_diagonal_) > 0 < float(fitted.on_diagonal_)


def test_choice_does_not_depend_on_the_scale_of_the_logits(rng):
    logits, labels, _ = confused(rng, n=500)
    plain, large = (MatrixScaling().fit(s * logits, labels) for s in (1, 8))
    assert float(large.off_diagonal_) == pytest.approx(64 * float(plain.off_diagonal_), rel=1e-3)
    np.testing.assert_allclose(
        large.predict_proba(8 * logits), plain.predict_proba(logits), atol=1e-4
    )


def repeated(rng):
    """Few rows, each ten times with the same label: leaks unless copies stay together."""
    logits, labels = drawn(rng, 60, 3, 4.0)
    return np.repeat(logits, 10, 0), np.repeat(labels, 10), np.repeat(np.arange(60), 10)


@pytest.mark.filterwarnings("ignore:.*rows are copies")
def test_groups_stay_together(rng):
    logits, labels, groups = repeated(rng)
    apart = MatrixScaling().fit(logits, labels)
    together = MatrixScaling().fit(logits, labels, groups=groups)
    assert float(together.off_diagonal_) > 10 * float(apart.off_diagonal_)
    named = MatrixScaling().fit(logits, labels, groups=[f"patient {g}" for g in groups])
    assert float(named.off_diagonal_) > 10 * float(apart.off_diagonal_)


def test_weights_enter_cross_validation(rng):
    logits, labels, _ = confused(rng, n=300)
    weight = np.where(np.arange(300) < 100, 2.0, 1.0)
    twice = np.concatenate([np.arange(300), np.arange(100)])
    weighted = MatrixScaling().fit(logits, labels, sample_weight=weight, groups=np.arange(300))
    doubled = MatrixScaling().fit(logits[twice], labels[twice], groups=twice)
    assert float(weighted.off_diagonal_) == pytest.approx(float(doubled.off_diagonal_))
    np.testing.assert_allclose(
        weighted.predict_proba(logits), doubled.predict_proba(logits), atol=1e-5
    )


def test_seed_decides_the_folds(rng):
    logits, labels, _ = confused(rng, n=300)
    once, again = (MatrixScaling(seed=3).fit(logits, labels) for _ in range(2))
    assert torch.equal(once.weight_, again.weight_)
    given = examples(logits, labels)
    assert (affine._dealt(given, None, 3) == affine._dealt(given, None, 3)).all()
    assert (affine._dealt(given, None, 3) != affine._dealt(given, None, 4)).any()


@pytest.mark.filterwarnings("ignore:.*parameters for")
def test_one_group_or_one_sample_takes_the_strongest_penalty(rng):
    logits, labels = drawn(rng, 200, 3, 2.0)
    fitted = MatrixScaling().fit(logits, labels, groups=np.zeros(200))
    common = TemperatureScaling().fit(logits, labels)
    np.testing.assert_allclose(
        fitted.predict_proba(logits), common.predict_proba(logits), atol=0.02
    )
    with pytest.warns(UserWarning, match="2 of 3 classes have no example"):
        alone = MatrixScaling().fit(logits[:1], labels[:1])
    assert torch.isfinite(alone.weight_).all()


@every_affine
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_fit_lowers_the_loss_below_temperature_scaling(rng, method):
    logits, labels, _ = confused(rng)
    given = torch.from_numpy(logits)
    tempered = TemperatureScaling().fit(logits, labels)(given)
    assert cal.nll(method().fit(logits, labels)(given), labels) < cal.nll(tempered, labels)


@every
def test_missing_classes_are_named_once_and_bounded(rng, method):
    logits, labels, _ = confused(rng, n=800, classes=6)
    kept = (labels != 2) & (labels != 5)
    with pytest.warns(UserWarning, match=r"2 of 6 classes have no example \(2, 5\)") as caught:
        fitted = method().fit(logits[kept], labels[kept])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    probs = fitted.predict_proba(logits)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    assert probs[:, 2].max() > 1e-9


@pytest.mark.parametrize("turn", [0, 1], ids=["all right", "all wrong"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@every
def test_separable_data_stay_bounded(rng, method, scale, turn):
    logits = scale * rng.normal(size=(300, 3))
    labels = (logits.argmax(-1) + turn) % 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = method().fit(logits, labels)
    assert len(caught) <= 1
    for value in fitted.state_dict().values():
        assert (value.abs() < 1e4).all()
    assert np.isfinite(fitted.predict_proba(logits)).all()


def test_separable_data_are_said_to_be(rng):
    logits = rng.normal(size=(300, 3))
    with told(), pytest.warns(UserWarning, match="tell the 300 examples apart"):
        VectorScaling().fit(logits, logits.argmax(-1))
    with told(), pytest.warns(UserWarning, match="is at its bound"):
        ClassTemperatures().fit(logits, logits.argmax(-1))


def hasty(most):
    """The solver with a limit of its own on the number of steps."""

    def search(function, start, *, steps, tolerance):
        return minimise(function, start, steps=min(steps, most), tolerance=tolerance)

    return search


@every_affine
def test_search_that_stops_early_is_said_to(rng, method, monkeypatch):
    logits, labels, _ = confused(rng)
    monkeypatch.setattr(affine, "minimise", hasty(1))
    with pytest.warns(UserWarning, match="stopped early, after 1 steps"):
        fitted = method().fit(logits, labels)
    assert not fitted.solution_.converged


@every
def test_masked_classes_are_refused(rng, method):
    assert_masked_classes_are_refused(method, rng)


def test_time_limit_reaches_the_folds(rng, monkeypatch):
    logits, labels, _ = confused(rng)
    given = affine._gather(examples(logits, labels), affine._centred, np.arange(600) % 5)
    vectors = [affine._penalty_vector(4, affine._Penalties(each, 1.0, 1.0)) for each in (1.0, 0.1)]
    monkeypatch.setattr(affine, "_curvature_of", lambda held, size: [np.ones(size)])
    with time_limit(0), pytest.raises(TimeoutError):
        affine._cross_validated(given, vectors)
    with time_limit(0), pytest.raises(TimeoutError):
        classwise._search(given, 1)


def test_scaled_parameters_of_a_matrix_have_a_curvature_of_one(rng):
    # at sharpness 0 all rows have the same probabilities, and the two factors are exact
    classes, count, penalty = 3, 40, 0.1
    inputs, labels = torch.from_numpy(rng.normal(size=(count, classes))), torch.arange(count) % 3
    share = torch.from_numpy(rng.dirichlet(np.ones(count)))
    size = classes * (classes + 1)
    sums = affine._curvature_sums([(inputs, labels, share)], 0.0, classes, size)

    def loss(flat):
        logits = inputs @ flat[:-classes].view(classes, classes).T + flat[-classes:]
        each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return share @ each + penalty * flat.square().sum()

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(size, dtype=torch.float64))
    maps = affine._scaling_of(sums, np.full(size, penalty))
    forward, back = (np.stack([each(unit) for unit in np.eye(size)], axis=1) for each in maps)
    np.testing.assert_allclose(back, forward.T, atol=1e-12)
    np.testing.assert_allclose(back @ hessian.numpy() @ forward, np.eye(size), atol=1e-9)


def in_turn(tasks):
    return [task() for task in tasks]


@pytest.mark.filterwarnings("ignore:.*parameters for")
@pytest.mark.parametrize("method", ODIR)
def test_no_tensor_of_samples_by_classes_squared(rng, method, monkeypatch):
    logits, labels = drawn(rng, 1500, 150, 2.0)
    monkeypatch.setattr(affine, "minimise", hasty(3))
    monkeypatch.setattr(affine, "_on_own_threads", in_turn)  # what is seen is seen in this thread
    with Largest() as seen, pytest.warns(UserWarning, match="stopped early"):
        method(off_diagonal=1e4, intercept=1.0).fit(logits, labels)
    assert 150 * 150 <= seen.size <= logits.size


@pytest.mark.filterwarnings("ignore:.*parameters for")
@pytest.mark.parametrize("method", ODIR)
def test_many_classes_fall_back_to_a_diagonal(rng, method):
    logits, labels = drawn(rng, 1005, 201, 2.0)
    labels[:201] = np.arange(201)
    with pytest.warns(UserWarning, match=r"201 classes are too many.* only its diagonal") as caught:
        fitted = method().fit(logits, labels)
    assert sum("201 classes" in str(each.message) for each in caught) == 1
    assert fitted.is_diagonal_
    assert fitted.weight_.shape == fitted.bias_.shape == (201,)
    assert float(fitted.off_diagonal_) == np.inf
    assert (method().size(200), method().size(201)) == (200 * 201, 2 * 201)
    small = method(**GIVEN).fit(*drawn(rng, 400, 4))
    assert not small.is_diagonal_
    assert small.weight_.shape == (4, 4)


@pytest.mark.filterwarnings("ignore:.*parameters for", "ignore:.*201 classes are too many")
def test_diagonal_is_vector_scaling_where_penalties_are_weak(rng):
    logits, labels = drawn(rng, 3000, 201, 2.0, scale=4)
    labels[:201] = np.arange(201)
    plain = VectorScaling().fit(logits, labels)
    fitted = MatrixScaling(off_diagonal=1.0, intercept=0.0).fit(logits, labels)
    np.testing.assert_allclose(fitted.predict_proba(logits), plain.predict_proba(logits), atol=1e-5)
