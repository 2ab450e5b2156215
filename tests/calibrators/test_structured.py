"""Structured matrix and vector scaling, against their definition."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators import affine_fit
from calibrant.calibrators.affine import StructuredMatrixScaling, StructuredVectorScaling
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.simulate import drawn

METHODS = [StructuredMatrixScaling, StructuredVectorScaling]
every = pytest.mark.parametrize("method", METHODS)


def biased(rng, n=600, classes=4, temperature=2.0):
    """Logits, and labels of a model that confuses classes and prefers some of them."""
    truth = 2 * rng.normal(size=(n, classes))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    mixed = truth + 0.4 * np.roll(truth, 1, axis=-1) + np.linspace(-1, 1, classes)
    return temperature * mixed, labels


def likelihood(scores, labels):
    return -log_softmax(scores, -1)[np.arange(len(labels)), labels]


def inputs(logits, temperature, count):
    """Log-probabilities that the matrix multiplies."""
    tempered = np.exp(log_softmax(logits / temperature, -1))
    share = 1 / (count + 1)
    return np.log((1 - share) * tempered + share / logits.shape[1])


def slow_fit(logits, labels, weight=None, *, diagonal, penalty=1.0):
    """The definition by minimisers that know no gradients: T, D and b."""
    n, classes = logits.shape
    share = np.ones(n) if weight is None else weight
    total = share.sum()

    def tempered(t):
        return share @ likelihood(logits / t, labels)

    bounds: dict[str, Any] = {"bounds": (0.05, 20), "method": "bounded", "options": {"xatol": 1e-9}}
    temperature = optimize.minimize_scalar(tempered, **bounds).x
    x = inputs(logits, temperature, total)

    def unpacked(parameters):
        matrix, bias = parameters[:-classes], parameters[-classes:]
        return (np.diag(matrix) if diagonal else matrix.reshape(classes, classes)), bias

    def loss(parameters):
        matrix, bias = unpacked(parameters)
        on, off = np.diag(matrix), matrix[~np.eye(classes, dtype=bool)]
        price = classes / total * (bias @ bias + on @ on)
        price += classes * (classes - 1) / total * off @ off
        return share @ likelihood(x + x @ matrix.T + bias, labels) / total + penalty * price

    start = np.zeros((classes if diagonal else classes**2) + classes)
    found = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-7})
    return (temperature, *unpacked(found.x))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
@every
def test_it_is_the_penalised_optimum(rng, method, classes, weighted):
    logits, labels = biased(rng, n=120, classes=classes)
    weight = rng.uniform(0.2, 4, len(labels)) if weighted else None
    diagonal = method is StructuredVectorScaling
    mean_one = None if weight is None else weight / weight.mean()  # penalties count examples
    temperature, matrix, bias = slow_fit(logits, labels, mean_one, diagonal=diagonal)
    fitted = method().fit(logits, labels, sample_weight=weight)
    assert float(fitted.temperature_) == pytest.approx(temperature, rel=1e-4)
    added = fitted.weight_.numpy() - 1 if diagonal else fitted.weight_.numpy() - np.eye(classes)
    np.testing.assert_allclose(added, np.diag(matrix) if diagonal else matrix, atol=2e-4)
    np.testing.assert_allclose(fitted.bias_, bias, atol=2e-4)
    assert np.abs(bias).max() > 0.1
    x = inputs(logits, temperature, len(labels))
    expected = np.exp(log_softmax(x + x @ matrix.T + bias, -1))
    np.testing.assert_allclose(fitted.predict_proba(logits), expected, atol=1e-4)


@every
def test_a_factor_of_the_penalties_is_one_of_them_all(rng, method):
    logits, labels = biased(rng, n=120, classes=3)
    diagonal = method is StructuredVectorScaling
    _, matrix, bias = slow_fit(logits, labels, diagonal=diagonal, penalty=0.1)
    fitted = method(penalty=0.1).fit(logits, labels)
    added = fitted.weight_.numpy() - (1 if diagonal else np.eye(3))
    np.testing.assert_allclose(added, np.diag(matrix) if diagonal else matrix, atol=5e-4)
    np.testing.assert_allclose(fitted.bias_, bias, atol=5e-4)
    with pytest.raises(ValueError, match="penalty must be a number, at least 0"):
        method(penalty=-1)


@every
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_bias_towards_classes_is_corrected(rng, method):
    logits, labels = biased(rng, n=4000)
    new, answers = biased(rng, n=4000)
    fitted = method().fit(logits, labels)
    common = TemperatureScaling().fit(logits, labels)
    probs, before = fitted.predict_proba(new), common.predict_proba(new)
    assert (probs.argmax(-1) == answers).mean() > (before.argmax(-1) == answers).mean() + 0.02
    assert cal.nll(probs=probs, labels=answers) < cal.nll(probs=before, labels=answers) - 0.05


def test_matrix_gains_what_a_vector_cannot(rng):
    logits, labels = biased(rng, n=4000)
    new, answers = biased(rng, n=4000)
    matrix, vector = (m().fit(logits, labels).predict_proba(new) for m in METHODS)
    assert cal.nll(probs=matrix, labels=answers) < cal.nll(probs=vector, labels=answers) - 0.02


def cost(rng, make, n, classes, repeats=8):
    """Mean loss of fits on n examples above that of the truth, which is temperature scaling."""
    costs = []
    for _ in range(repeats):
        logits, labels = drawn(rng, n, classes, temperature=2.0, scale=3)
        new, answers = drawn(rng, 2000, classes, temperature=2.0, scale=3)
        found = make().fit(logits, labels).transform(new)
        costs.append((likelihood(found, answers) - likelihood(new / 2, answers)).mean())
    return np.mean(costs)


@pytest.mark.filterwarnings("ignore:.*classes have no example", "ignore:.*parameters? for")
@pytest.mark.parametrize(("n", "classes"), [(20, 20), (100, 20), (50, 5), (200, 5)])
def test_few_examples_cost_little(rng, n, classes):
    matrix, vector = (cost(rng, method, n, classes) for method in METHODS)
    free = cost(rng, cal.calibrators.VectorScaling, n, classes)
    assert vector < 0.04
    assert matrix < 0.1
    assert free > 1.5 * vector


@pytest.mark.filterwarnings("ignore:.*classes have no example")
@every
@pytest.mark.filterwarnings("ignore:.*rows are copies")
def test_five_examples_of_each_class_are_enough_unless_they_are_copies(rng, method):
    logits, labels = drawn(rng, 60, 5, temperature=2.0)
    labels[:5] = range(5)
    method().fit(logits[:25], labels[:25])  # a warning would be an error
    with pytest.warns(UserWarning, match="parameters for 24 examples: it may fit"):
        method().fit(logits[:24], labels[:24])
    with pytest.warns(UserWarning, match=r"1,200 examples \(17 of the first are not alike\)"):
        method().fit(np.repeat(logits[:20], 60, axis=0), np.repeat(labels[:20], 60))


def test_weak_penalties_end_in_dirichlet_calibration(rng):
    logits, labels = biased(rng, n=20_000)
    structured = StructuredMatrixScaling().fit(logits, labels)
    free = cal.calibrators.DirichletCalibration(off_diagonal=0.0, intercept=0.0).fit(logits, labels)
    away = structured.predict_proba(logits) - free.predict_proba(logits)
    assert np.abs(away).mean() < 0.003


def test_many_classes_fall_back_to_a_vector(rng):
    logits, labels = drawn(rng, 1005, 201, 2.0)
    labels[:201] = np.arange(201)
    with pytest.warns(UserWarning, match=r"201 classes are too many.* only its diagonal"):
        matrix = StructuredMatrixScaling().fit(logits, labels)
    vector = StructuredVectorScaling().fit(logits, labels)
    assert matrix.is_diagonal_
    assert matrix.weight_.shape == (201,)
    np.testing.assert_array_equal(matrix.predict_proba(logits), vector.predict_proba(logits))
    small = StructuredMatrixScaling().fit(*drawn(rng, 200, 4))
    assert not small.is_diagonal_
    assert small.weight_.shape == (4, 4)


@every
def test_scale_of_the_logits_does_not_matter(rng, method):
    logits, labels = biased(rng)
    plain, large = (method().fit(s * logits, labels) for s in (1, 5))
    assert float(large.temperature_) == pytest.approx(5 * float(plain.temperature_), rel=1e-3)
    np.testing.assert_allclose(
        large.predict_proba(5 * logits), plain.predict_proba(logits), atol=1e-3
    )


@every
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_masked_classes_stay_impossible_and_the_others_are_corrected(rng, method):
    """A mask of some rows does not keep the bias of the others from being found."""
    logits, labels = biased(rng, n=4000)
    hidden = rng.random(logits.shape) < 0.2
    hidden[np.arange(len(labels)), labels] = False
    masked = np.where(hidden, -np.inf, logits)
    fitted = method().fit(masked[:2000], labels[:2000])
    common = TemperatureScaling().fit(masked[:2000], labels[:2000])
    found, before = (each.transform(masked[2000:]) for each in (fitted, common))
    np.testing.assert_array_equal(np.isneginf(found), hidden[2000:])
    answers = labels[2000:]
    assert likelihood(found, answers).mean() < likelihood(before, answers).mean() - 0.03


@every
def test_missing_classes_and_data_without_an_optimum_are_told_of(rng, method):
    logits, labels = drawn(rng, 300, 5)
    kept = labels != 3
    with told(), pytest.warns(UserWarning, match=r"1 of 5 classes have no example \(3\)"):
        method().fit(logits[kept], labels[kept])
    with told(), pytest.warns(UserWarning, match="no best temperature"):
        sure = method().fit(logits, logits.argmax(-1))
    assert (sure.predict_proba(logits).argmax(-1) == logits.argmax(-1)).all()


def test_sharpness_that_is_known_is_not_searched(rng, monkeypatch):
    logits, labels = drawn(rng, 300, 3)
    monkeypatch.setattr(affine_fit, "best_sharpness", None)
    data = affine_fit._gather(examples(logits, labels), affine_fit._centred, sharpness=1.0)
    assert data.sharpness == 1
    assert torch.equal(data.labels, torch.from_numpy(labels))


def test_a_matrix_takes_few_steps(rng):
    logits, labels = drawn(rng, 2000, 10)
    found = StructuredMatrixScaling().fit(logits, labels).solution_
    assert found is not None
    assert found.steps <= 25
