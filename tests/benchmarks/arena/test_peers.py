"""Peers against their own libraries, called directly."""

import sys
from types import ModuleType

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logit, softmax

from benchmarks.arena.methods import read_method
from benchmarks.arena.peers import PEERS
from benchmarks.arena.tasks import Examples, Predictions
from tests.support.simulate import drawn


def task_of(rng, classes):
    return Predictions(
        Examples(*drawn(rng, 300, classes, 2)), Examples(*drawn(rng, 200, classes, 2))
    )


def calibrated(name, task):
    entrant = read_method(name).make()
    entrant.fit(task)
    return np.exp(entrant.predict(task.test))


@pytest.mark.parametrize("method", ["sigmoid", "isotonic"])
def test_scikit_learn_on_two_classes(rng, method):
    pytest.importorskip("sklearn")
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    task = task_of(rng, 2)
    odds, test = (np.diff(e.logits, axis=1)[:, 0] for e in (task.fit, task.test))
    labels = task.fit.labels
    if method == "isotonic":
        reference = IsotonicRegression(out_of_bounds="clip").fit(odds, labels).predict(test)
    else:  # Platt's targets: a logistic regression on both labels of each example, with weights
        ones = labels.sum()
        high, low = (ones + 1) / (ones + 2), 1 / (len(labels) - ones + 2)
        target = np.where(labels == 1, high, low)
        model = LogisticRegression(C=np.inf, tol=1e-10)
        both = np.concatenate([np.ones(300, int), np.zeros(300, int)])
        weight = np.concatenate([target, 1 - target])
        model.fit(np.tile(odds, 2)[:, None], both, sample_weight=weight)
        reference = model.predict_proba(test[:, None])[:, 1]
    np.testing.assert_allclose(calibrated(f"sklearn:{method}", task)[:, 1], reference, atol=1e-5)


def test_scikit_learn_on_more_classes_is_one_against_the_rest(rng):
    pytest.importorskip("sklearn")
    from sklearn.isotonic import IsotonicRegression

    task = task_of(rng, 3)
    fit, test = (
        np.exp(e.logits) / np.exp(e.logits).sum(1, keepdims=True) for e in (task.fit, task.test)
    )
    columns = [
        IsotonicRegression(out_of_bounds="clip")
        .fit(logit(fit[:, k]), task.fit.labels == k)
        .predict(logit(test[:, k]))
        for k in range(3)
    ]
    expected = np.stack(columns, 1) / np.sum(columns, 0)[:, None]
    np.testing.assert_allclose(calibrated("sklearn:isotonic", task), expected, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_temperature_of_scikit_learn_divides_logits(rng, classes):
    pytest.importorskip("sklearn", minversion="1.8")
    task = task_of(rng, classes)
    logits, labels, _ = task.fit

    def nll(inverse):
        return -log_softmax(inverse * logits, -1)[np.arange(len(labels)), labels].mean()

    best = minimize_scalar(nll, bounds=(0.01, 10), options={"xatol": 1e-9}).x
    expected = softmax(best * task.test.logits, -1)
    np.testing.assert_allclose(calibrated("sklearn:temperature", task), expected, atol=1e-6)


def test_scikit_learn_with_a_single_example_of_a_class(rng):
    pytest.importorskip("sklearn")
    task = task_of(rng, 3)
    task.fit.labels[:] = np.arange(300) % 2
    task.fit.labels[0] = 2
    np.testing.assert_allclose(calibrated("sklearn:sigmoid", task).sum(1), 1)


@pytest.mark.parametrize("classes", [2, 4])
def test_probmetrics(rng, classes):
    library = pytest.importorskip("probmetrics.calibrators")
    task = task_of(rng, classes)
    direct = library.get_calibrator("sms")
    fit, test = (
        np.exp(e.logits) / np.exp(e.logits).sum(1, keepdims=True) for e in (task.fit, task.test)
    )
    direct.fit(fit, task.fit.labels)
    found = calibrated("probmetrics:sms", task)
    np.testing.assert_allclose(found, direct.predict_proba(test), rtol=1e-4, atol=1e-6)


def test_venn_abers(rng):
    library = pytest.importorskip("venn_abers")
    task = task_of(rng, 2)
    fit, test = (
        np.exp(e.logits) / np.exp(e.logits).sum(1, keepdims=True) for e in (task.fit, task.test)
    )
    direct = library.VennAbers()
    direct.fit(fit, task.fit.labels)
    np.testing.assert_allclose(
        calibrated("venn_abers:inductive", task), direct.predict_proba(test)[0], atol=1e-9
    )


@pytest.fixture
def netcal(monkeypatch):
    """A stand-in with the calls of netcal: fit and transform, on P(1) of two classes."""

    class BBQ:
        def __init__(self, shrink=1.0):
            self.shrink = shrink

        def fit(self, X, y):
            self.shape = X.shape
            self.rate = np.mean(y) if X.ndim == 1 else np.bincount(y) / len(y)

        def transform(self, X):
            assert X.ndim == len(self.shape)
            return X + self.shrink * (self.rate - X)

    modules = {name: ModuleType(name) for name in ("netcal", "netcal.scaling", "netcal.binning")}
    modules["netcal.binning"].BBQ = BBQ  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_netcal(rng, netcal):
    two, three = task_of(rng, 2), task_of(rng, 3)
    expected = np.full(200, two.fit.labels.mean())
    np.testing.assert_allclose(calibrated("netcal:BBQ", two)[:, 1], expected)
    rates = np.bincount(three.fit.labels) / 300
    np.testing.assert_allclose(calibrated("netcal:BBQ", three), np.tile(rates, (200, 1)))
    assert read_method("netcal:BBQ:shrink=0.5").make().calibrator.calibrator.shrink == 0.5  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="netcal has no 'Nothing': choose from BBQ"):
        read_method("netcal:Nothing")


@pytest.mark.parametrize("library", PEERS)
def test_a_missing_library_is_named(library, monkeypatch):
    package = PEERS[library].package
    module = {"scikit-learn": "sklearn.calibration", "probmetrics": "probmetrics.calibrators"}
    hidden = module.get(package, {"netcal": "netcal.scaling"}.get(package, "venn_abers"))
    monkeypatch.setitem(sys.modules, hidden, None)
    method = {"sklearn": "sigmoid", "venn_abers": "inductive"}.get(library, "x")
    with pytest.raises(ImportError, match=f"pip install {package}"):
        read_method(f"{library}:{method}")
