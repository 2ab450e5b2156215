"""The scikit-learn classifier: its conventions, and scores whose right calibration is known."""

import runpy
import sys
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, logit, softmax
from torch import nn

import calibrant as cal
from tests.support.simulate import drawn

sklearn = pytest.importorskip("sklearn", minversion="1.6")
joblib = pytest.importorskip("joblib")

from sklearn.base import BaseEstimator, ClassifierMixin, clone  # noqa: E402
from sklearn.calibration import CalibratedClassifierCV  # noqa: E402
from sklearn.datasets import load_digits, make_classification  # noqa: E402
from sklearn.ensemble import (  # noqa: E402
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.frozen import FrozenEstimator  # noqa: E402
from sklearn.linear_model import LogisticRegression, Perceptron, RidgeClassifier  # noqa: E402
from sklearn.metrics import log_loss  # noqa: E402
from sklearn.model_selection import (  # noqa: E402
    GridSearchCV,
    GroupKFold,
    RepeatedStratifiedKFold,
    StratifiedKFold,
    cross_val_predict,
    cross_val_score,
)
from sklearn.naive_bayes import GaussianNB, MultinomialNB  # noqa: E402
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.svm import SVC, LinearSVC  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from calibrant.calibrators.fit_inputs import told  # noqa: E402
from calibrant.deploy.sklearn import CalibratedClassifier  # noqa: E402

FOLDS = StratifiedKFold(5)
NEEDY = [name for name, kind in cal.CALIBRATORS.items() if kind.needs_features]
TWO_ONLY = [name for name, kind in cal.CALIBRATORS.items() if kind.two_classes_only]


class Boastful(ClassifierMixin, BaseEstimator):
    """Scores are the features, multiplied: the truth is known, and there is nothing to learn."""

    def __init__(self, factor=3.0):
        self.factor = factor

    def fit(self, X, y):
        self.classes_ = np.unique(y)
        return self

    def decision_function(self, X):
        scores = self.factor * np.asarray(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X):
        scores = self.decision_function(X)
        return self.classes_[scores.argmax(-1) if scores.ndim == 2 else (scores > 0).astype(int)]


class Sayer(ClassifierMixin, BaseEstimator):
    """Says the features as probabilities."""

    def fit(self, X, y, sample_weight=None):
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X):
        return np.asarray(X)


class Recorder(LogisticRegression):
    """Keeps what its copies are fitted on."""

    seen: ClassVar[list[dict]] = []

    def fit(self, X, y, sample_weight=None, extra=None):
        type(self).seen.append(
            {"rows": np.asarray(X)[:, -1], "weight": sample_weight, "extra": extra}
        )
        return super().fit(X, y, sample_weight)


@pytest.fixture
def recorder():
    Recorder.seen = []
    return Recorder()


@pytest.fixture(scope="module")
def digits():
    return load_digits(return_X_y=True)


@pytest.fixture(scope="module")
def three():
    return make_classification(
        600, 8, n_informative=5, n_classes=3, flip_y=0.2, class_sep=0.7, random_state=1
    )


@pytest.fixture(scope="module")
def two():
    return make_classification(600, 8, n_informative=5, flip_y=0.2, class_sep=0.7, random_state=1)


@pytest.fixture(scope="module")
def numbered(three):
    """Examples whose last column is their number, over 600."""
    X, y = three
    return np.concatenate([X, np.arange(600)[:, None] / 600], axis=1), y


def best_temperature(logits, labels, weight=None):
    """The optimum of the likelihood, searched without the library."""

    def loss(log_temperature):
        logs = log_softmax(logits / np.exp(log_temperature), axis=-1)
        return -np.average(logs[np.arange(len(labels)), labels], weights=weight)

    found = minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    return np.exp(found.x)


def temperature(fitted):
    return float(fitted.calibrator_.temperature_)


# ------------------------------------------------------------------------------ the conventions

NOT_REPEATED = {
    f"check_sample_weight_equivalence_on_{kind}_data": (
        "auto draws folds of the rows and asks how many there are: a row of weight 2 is not two"
    )
    for kind in ("dense", "sparse")
}


@pytest.mark.filterwarnings(
    # the checks fit a dozen rows, or separable ones, or those of one class
    "ignore:.*too few to choose a method",
    "ignore:no best temperature in",
    "ignore:Blend has .. parameters for",
    "ignore:OddsScaling found no optimum",
    "ignore:VectorScaling has . parameters for",
    "ignore:VectorScaling. it can tell the",
    "ignore:VectorScaling. 1 of 2 classes have no example",
    "ignore:divide by zero encountered in log:RuntimeWarning:sklearn.naive_bayes",
)
@parametrize_with_checks(
    [
        CalibratedClassifier(options={"candidates": ["none", "ts"]}),
        CalibratedClassifier(LogisticRegression(), method="vector"),
        CalibratedClassifier(DecisionTreeClassifier(max_depth=3), method="ts", cv=3),
    ],
    expected_failed_checks=lambda one: NOT_REPEATED if one.method == "auto" else {},
)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", [GaussianNB(), LogisticRegression(tol=1e-10)])
@pytest.mark.filterwarnings("ignore:.*rows are copies")
def test_weight_two_equals_two_examples(three, estimator):
    X, y = three
    weight = np.arange(600) % 3
    rows = np.repeat(np.arange(600), weight)
    folds = [
        (np.flatnonzero(np.arange(600) % 4 != k), np.flatnonzero(np.arange(600) % 4 == k))
        for k in range(4)
    ]
    again = [(np.flatnonzero(rows % 4 != k), np.flatnonzero(rows % 4 == k)) for k in range(4)]
    one = CalibratedClassifier(estimator, method="ts", cv=folds).fit(X, y, sample_weight=weight)
    two = CalibratedClassifier(estimator, method="ts", cv=again).fit(X[rows], y[rows])
    assert temperature(one) == pytest.approx(temperature(two), rel=1e-5)
    np.testing.assert_allclose(one.predict_proba(X), two.predict_proba(X), rtol=1e-4)


def test_pipelines(three):
    X, y = three
    inside = make_pipeline(StandardScaler(), CalibratedClassifier(LinearSVC(), method="ts"))
    around = CalibratedClassifier(make_pipeline(StandardScaler(), LinearSVC()), method="ts")
    for model in (inside, around):
        assert model.fit(X, y).predict_proba(X).shape == (600, 3)
    assert around.n_features_in_ == 8
    assert abs(temperature(around) / temperature(inside[-1]) - 1) < 0.05


def test_grid_search(three):
    X, y = three
    search = GridSearchCV(
        CalibratedClassifier(Boastful(factor=50.0)),
        {"method": ["none", "ts"], "estimator__factor": [5.0]},
        scoring="neg_log_loss",
        cv=3,
    )
    honest, labels = drawn(np.random.default_rng(0), 600, 3)
    assert search.fit(honest, labels).best_params_ == {"method": "ts", "estimator__factor": 5.0}
    assert abs(temperature(search.best_estimator_) - 5) < 1
    assert len(cross_val_score(CalibratedClassifier(method="ts"), X, y, cv=3)) == 3


def test_failed_fit_changes_nothing(three):
    X, y = three
    one = CalibratedClassifier(Sayer(), method="ts")
    with pytest.raises(ValueError, match="predict_proba of Sayer must be"):
        one.fit(X, y)
    with pytest.raises(NotFittedError):
        one.predict(X)
    one.set_params(estimator=GaussianNB()).fit(X, y)
    before = one.predict_proba(X)
    with pytest.raises(ValueError, match="weight must be 0"):
        one.fit(X, y, sample_weight=-np.ones(600))
    with pytest.raises(ValueError, match="must not be zero for every example"):
        one.fit(X, y, sample_weight=np.zeros(600))
    np.testing.assert_array_equal(one.predict_proba(X), before)


def test_features_without_names():
    honest, labels = drawn(np.random.default_rng(0), 200, 3)
    fitted = CalibratedClassifier(Boastful(), method="ts").fit(honest, labels)
    assert not hasattr(fitted, "n_features_in_")  # since it does not say


class OfTwo(Boastful):
    """Tells two classes apart and no more."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


@pytest.mark.parametrize(("base", "several"), [(OfTwo(), False), (Boastful(), True)])
def test_tags_of_the_estimator(base, several):
    assert CalibratedClassifier(base).__sklearn_tags__().classifier_tags.multi_class == several


def test_missing_scikit_learn(monkeypatch):
    file = sys.modules["calibrant.deploy.sklearn"].__file__
    assert file is not None
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"needs scikit-learn 1\.6 .*'calibrant\[sklearn\]'"):
        runpy.run_path(file)


# ------------------------------------------------------------------------------- a known truth


@pytest.mark.parametrize(
    ("method", "classes"), [("ts", 2), ("ts", 7), ("auto", 2), ("smart", 7), ("vector", 7)]
)
def test_overconfident_classifier(rng, method, classes):
    honest, labels = drawn(rng, 3000, classes)
    features = honest[:, 1:] - honest[:, :1] if classes == 2 else honest
    seen, new = slice(2000), slice(2000, None)
    model = CalibratedClassifier(Boastful(factor=3.0), method=method)
    probs = model.fit(features[seen], labels[seen]).predict_proba(features[new])
    said = cal.ece(3 * honest[new], labels[new])
    assert said > 0.08
    assert cal.ece(np.log(probs), labels[new]) < said / 3
    assert np.abs(probs - softmax(honest[new], axis=-1)).mean() < 0.02
    if method == "ts":
        assert temperature(model) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("data", ["two", "three"])
@pytest.mark.parametrize(
    "estimator",
    [
        LogisticRegression(),
        LinearSVC(),
        GradientBoostingClassifier(n_estimators=9, random_state=0),
        GaussianNB(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_temperature_of_out_of_fold_scores(request, data, estimator):
    X, y = request.getfixturevalue(data)
    by_scores = hasattr(estimator, "decision_function")
    scores = cross_val_predict(
        estimator, X, y, cv=FOLDS, method="decision_function" if by_scores else "predict_proba"
    )
    scores = scores if by_scores else np.log(scores)
    logits = np.stack([np.zeros_like(scores), scores], -1) if scores.ndim == 1 else scores
    fitted = CalibratedClassifier(estimator, method="ts").fit(X, y)
    assert temperature(fitted) == pytest.approx(best_temperature(logits, y), rel=1e-4)
    # and it is applied to an estimator that has seen all rows
    alone = clone(estimator).fit(X, y)
    scores = alone.decision_function(X) if by_scores else np.log(alone.predict_proba(X))
    logits = np.stack([np.zeros_like(scores), scores], -1) if scores.ndim == 1 else scores
    np.testing.assert_allclose(
        fitted.predict_proba(X), softmax(logits / temperature(fitted), axis=-1), rtol=1e-5
    )


@pytest.mark.skipif(
    tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 8), reason="has no temperature"
)
@pytest.mark.parametrize("frozen", [False, True])
def test_agreement_with_scikit_learn(digits, frozen):
    X, y = digits[0] / 16, digits[1]
    base = LogisticRegression(max_iter=300)
    if frozen:
        base = FrozenEstimator(base.fit(X[:600], y[:600]))
    theirs = CalibratedClassifierCV(base, method="temperature", cv=5, ensemble=False)
    ours = CalibratedClassifier(base, method="ts", cv=5)
    new = slice(1200, None)
    expected = theirs.fit(X[600:1200], y[600:1200]).predict_proba(X[new])
    np.testing.assert_allclose(
        ours.fit(X[600:1200], y[600:1200]).predict_proba(X[new]), expected, atol=2e-4
    )


# ---------------------------------------------------------------------- estimators that are fitted


def frozen(estimator):
    return CalibratedClassifier(FrozenEstimator(estimator), method="ts", cv=10_000)  # no folds


def prefit(estimator):
    return CalibratedClassifier(estimator, method="ts", cv="prefit")


@pytest.mark.parametrize("wrap", [frozen, prefit])
@pytest.mark.parametrize("data", ["two", "three"])
def test_prefit_estimator(request, data, wrap):
    X, y = request.getfixturevalue(data)
    base = LogisticRegression().fit(X[:200], y[:200])
    before = base.coef_.copy()
    fitted = wrap(base).fit(X[200:], y[200:])
    scores = base.decision_function(X[200:])
    logits = np.stack([np.zeros_like(scores), scores], -1) if scores.ndim == 1 else scores
    assert temperature(fitted) == pytest.approx(best_temperature(logits, y[200:]), rel=1e-4)
    np.testing.assert_array_equal(base.coef_, before)
    np.testing.assert_array_equal(fitted.estimator_.coef_, before)


@pytest.mark.parametrize("wrap", [frozen, prefit])
def test_prefit_estimator_that_is_not_fitted(three, wrap):
    with pytest.raises(NotFittedError, match=r"this .* is not fitted, or .*: fit it first"):
        wrap(LogisticRegression()).fit(*three)


@pytest.mark.parametrize("method", ["ts", "auto", "vector"])
def test_calibration_data_without_a_class(three, method):
    X, y = three
    base = FrozenEstimator(LogisticRegression().fit(X[:200], y[:200]))
    kept = np.flatnonzero(y[200:] != 1) + 200
    model = CalibratedClassifier(base, method=method)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*1 of 3 classes have no example")
        warnings.filterwarnings("ignore", message="Blend has .. parameters for 265 examples")
        warnings.filterwarnings("ignore", message=".*keeps predictions")
        probs = model.fit(X[kept], y[kept]).predict_proba(X)
    assert list(model.classes_) == [0, 1, 2]
    assert probs.shape == (600, 3)
    assert np.isfinite(probs).all()


def test_classes_unknown_to_the_estimator(three):
    X, y = three
    base = LogisticRegression().fit(X[y != 2], y[y != 2])
    with pytest.raises(ValueError, match="not fitted on: 2; it knows 0, 1"):
        frozen(base).fit(X, y)


def test_fit_params_of_a_fitted_estimator(three):
    base = LogisticRegression().fit(*three)
    with pytest.raises(ValueError, match="is fitted already and takes no extra"):
        frozen(base).fit(*three, extra=1)


# ----------------------------------------------------------------------------- classes and labels


def test_string_labels(three):
    X, y = three
    names = np.array(["pear", "apple", "fig"])[y]  # in another order than the numbers
    plain = CalibratedClassifier(method="ts").fit(X, y)
    named = CalibratedClassifier(method="ts").fit(X, names.tolist())
    assert list(named.classes_) == ["apple", "fig", "pear"]
    np.testing.assert_allclose(
        named.predict_proba(X), plain.predict_proba(X)[:, [1, 2, 0]], atol=1e-3
    )
    assert set(named.predict(X)) <= {"apple", "fig", "pear"}
    assert named.score(X, names) == pytest.approx(plain.score(X, y), abs=0.01)


class Unsorted(Boastful):
    """Has its classes in an order of its own, as some libraries do."""

    def fit(self, X, y):
        self.classes_ = np.unique(y)[::-1]
        return self

    def decision_function(self, X):
        return super().decision_function(X)[:, ::-1]


@pytest.mark.parametrize("fitted_before", [False, True])
def test_order_of_classes(rng, fitted_before):
    honest, labels = drawn(rng, 2000, 4)
    tilted = honest + np.array([0.0, 2.0, -2.0, 1.0])  # one temperature cannot put this right
    for kind in (Boastful, Unsorted):
        base = kind(factor=1.0)
        given = FrozenEstimator(base.fit(tilted, labels)) if fitted_before else base
        model = CalibratedClassifier(given, method="vector").fit(tilted, labels)
        assert list(model.classes_) == ([0, 1, 2, 3] if kind is Boastful else [3, 2, 1, 0])
        columns = [list(model.classes_).index(label) for label in range(4)]
        probs = model.predict_proba(tilted)[:, columns]
        np.testing.assert_array_equal(model.predict(tilted), probs.argmax(-1))
        assert np.abs(probs - softmax(honest, axis=-1)).mean() < 0.02


@pytest.fixture
def rare(rng):
    """Four classes, of which the last has one row, the first of all."""
    honest, labels = drawn(rng, 500, 3)
    labels[0] = 3
    return honest, labels


def test_temperature_with_a_rare_class(rare):
    X, y = rare
    votes = KNeighborsClassifier(10)
    with told(), pytest.warns(UserWarning, match="1 of 500 examples"):
        model = CalibratedClassifier(votes, method="ts").fit(X, y)
    logits = np.full((500, 4), -1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rare class, by StratifiedKFold
        parts = list(FOLDS.split(X, y))
    for train, test in parts:
        one = clone(votes).fit(X[train], y[train])
        logs = np.log(np.maximum(one.predict_proba(X[test]), 0.05))  # a vote of ten, halved
        logits[np.ix_(test, one.classes_)] = logs
    assert float(model.calibrator_.floor_) == pytest.approx(0.05)
    assert temperature(model) == pytest.approx(best_temperature(logits[1:], y[1:]), rel=1e-4)


def test_rare_class_and_methods_without_masks(rare):
    X, y = rare
    model = CalibratedClassifier(GaussianNB(), method="vector")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(X, y)
    first, second = [str(one.message) for one in said]
    assert first.startswith("100 of 500 examples were scored without")
    assert "1 of 4 classes have no example (3)" in second
    assert model.predict_proba(X).shape == (500, 4)


def test_folds_that_all_lack_a_class(three):
    X, y = three
    order = np.argsort(y)
    folds = [(np.flatnonzero(y[order] != k), np.flatnonzero(y[order] == k)) for k in range(3)]
    model = CalibratedClassifier(GaussianNB(), method="ts", cv=folds)
    with pytest.raises(
        ValueError, match=r"600 of 600 examples were scored without .* 0, 1, 2\. None is"
    ):
        model.fit(X[order], y[order])


def test_fold_of_one_class_is_left_out(two):
    X, y = two
    ones = np.flatnonzero(y == 1)
    rest = np.arange(600)
    folds = [(ones, rest[y == 0]), (ones, ones), (rest[::2], rest[1::2])]
    model = CalibratedClassifier(DecisionTreeClassifier(max_depth=2), method="ts", cv=folds)
    with pytest.warns(UserWarning, match="600 of 900 examples were scored without"):
        model.fit(X, y)
    alone = CalibratedClassifier(DecisionTreeClassifier(max_depth=2), method="ts", cv=folds[2:])
    np.testing.assert_allclose(model.predict_proba(X), alone.fit(X, y).predict_proba(X), atol=1e-6)


@pytest.mark.parametrize("cv", [5, "prefit"])
def test_one_class(two, cv):
    X, y = two[0], np.full(600, "only")
    model = CalibratedClassifier(DecisionTreeClassifier().fit(X, y), cv=cv)
    with pytest.raises(ValueError, match="two classes or more, got one class, 'only'"):
        model.fit(X, y)


# ----------------------------------------------------------------------------------- the scores


@pytest.mark.parametrize(
    ("data", "method"),
    [("three", name) for name in ("ts", "vector", "isotonic", "histogram_ovr", "auto")]
    + [("two", name) for name in ("ts", "vector", "isotonic", *TWO_ONLY)],
)
def test_predictions_follow_the_probabilities(request, data, method):
    X, y = request.getfixturevalue(data)
    model = CalibratedClassifier(LinearSVC(), method=method)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* parameters for 600 examples")
        model.fit(X, y)
    probs = model.predict_proba(X)
    assert probs.dtype == np.float64
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-12)
    np.testing.assert_array_equal(model.predict(X), probs.argmax(-1))
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), probs, atol=1e-12)
    if model.calibrator_.keeps_argmax:
        np.testing.assert_array_equal(model.predict(X), model.estimator_.predict(X))


@pytest.mark.parametrize(
    ("data", "estimator"),
    [
        ("two", Perceptron()),
        ("three", RidgeClassifier()),
        ("three", KNeighborsClassifier()),
        ("two", RandomForestClassifier(20, random_state=0)),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
@pytest.mark.filterwarnings("ignore:.*not alike")  # votes of a few trees or neighbours
def test_prediction_of_the_estimator_is_kept(request, data, estimator):
    X, y = request.getfixturevalue(data)
    model = CalibratedClassifier(estimator, method="blend").fit(X[::2], y[::2])
    np.testing.assert_array_equal(model.predict(X), model.estimator_.predict(X))


@pytest.mark.parametrize("factor", [1e-5, 30.0, 1e4, 1e9])
@pytest.mark.parametrize("method", ["ts", "odds", "vector"])
def test_scale_of_scores(rng, method, factor):
    honest, labels = drawn(rng, 1500, 4)
    usual = CalibratedClassifier(Boastful(1.5), method=method).fit(honest, labels)
    odd = CalibratedClassifier(Boastful(1.5 * factor), method=method).fit(honest, labels)
    assert usual.scale_ == 1
    assert odd.scale_ != 1
    expected = usual.predict_proba(honest)
    np.testing.assert_allclose(odd.predict_proba(honest), expected, atol=0.01)
    if method == "ts":
        assert temperature(odd) * odd.scale_ == pytest.approx(1.5 * factor, rel=0.1)
        np.testing.assert_allclose(odd.predict_proba(honest), expected, atol=1e-4)


def test_scale_without_a_best_temperature(rng):
    honest, _ = drawn(rng, 200, 3)
    model = CalibratedClassifier(Boastful(), method="ts")
    with pytest.warns(UserWarning, match="all predictions are right"):
        model.fit(honest, honest.argmax(-1))
    assert model.scale_ == 1


def test_scores_of_an_estimator_are_not_taken_for_probabilities(rng):
    """Log-odds of a hundred examples that are barely of class 1."""
    X = np.sort(rng.normal(size=(4000, 1)), axis=0)
    y = (rng.random(4000) < 1 / (1 + np.exp(-X[:, 0]))).astype(int)
    model = CalibratedClassifier(LogisticRegression(), method="ts").fit(X, y)
    scores = model.estimator_.decision_function(X)
    few = X[(scores > 0) & (scores < 1)]
    assert len(few) > 100
    assert (model.predict_proba(few)[:, 1] > 0.5).mean() > 0.9  # a warning would be an error


def votes_of_trees(honest):
    """Probabilities as 100 trees would vote: some are 0."""
    probs = np.round(softmax(2 * honest, axis=-1), 2)
    probs[:, 0] += 1 - probs.sum(-1)
    probs = np.maximum(np.round(probs, 2), 0)
    assert (probs == 0).any()
    return probs / probs.sum(-1, keepdims=True)


def tiny_probabilities(honest):
    probs = softmax(25 * honest, axis=-1)
    probs[:3] = [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert probs[probs > 0].min() < 1e-80
    return probs


@pytest.mark.parametrize("form", [votes_of_trees, tiny_probabilities])
def test_floor_of_small_probabilities(rng, form):
    honest, labels = drawn(rng, 2000, 3)
    probs = form(honest)
    model = CalibratedClassifier(Sayer(), method="ts").fit(probs, labels)
    floor = probs[probs >= 1e-12].min() / 2
    assert float(model.calibrator_.floor_) == pytest.approx(floor)
    logits = np.log(np.maximum(probs, floor))
    assert temperature(model) == pytest.approx(best_temperature(logits, labels), rel=1e-4)
    np.testing.assert_allclose(
        model.predict_proba(probs), softmax(logits / temperature(model), axis=-1), atol=1e-6
    )
    if form is votes_of_trees:  # 25 times the logits put most of them below the floor
        assert np.abs(model.predict_proba(probs) - softmax(honest, axis=-1)).mean() < 0.03


@pytest.mark.filterwarnings("ignore:.*not alike")
@pytest.mark.parametrize("method", ["ts", "sigmoid", "isotonic"])
def test_a_tree_is_calibrated_alike_here_and_in_a_file(two, method):
    X, y = two
    some, rest = slice(200), slice(200, None)
    tree = DecisionTreeClassifier(max_depth=6, random_state=0).fit(X[some], y[some])
    here = CalibratedClassifier(FrozenEstimator(tree), method=method).fit(X[rest], y[rest])
    probs, labels = tree.predict_proba(X[rest])[:, 1], np.searchsorted(tree.classes_, y[rest])
    with pytest.warns(UserWarning, match="probabilities are 0"):
        there = cal.fit({"probs": probs, "labels": labels}, method=method)
    expected = there.predict_proba(logit(np.clip(probs, 1e-40, 1 - 1e-16)))
    np.testing.assert_allclose(here.predict_proba(X[rest])[:, 1], expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:TemperatureScaling keeps predictions")
def test_floor_ignores_weight_zero():
    probs = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.0, 0.4, 0.6], [0.999, 0.001, 0.0]] * 20)
    labels = np.where(np.arange(80) < 8, 2, np.tile([0, 1, 2, 0], 20))
    weight = np.tile([1.0, 1.0, 1.0, 0.0], 20)
    model = CalibratedClassifier(Sayer(), method="ts").fit(probs, labels, sample_weight=weight)
    assert float(model.calibrator_.floor_) == pytest.approx(0.05)


def test_without_calibration_the_probabilities_are_those_of_the_estimator(rng):
    honest, labels = drawn(rng, 200, 3)
    votes = np.eye(3)[honest.argmax(-1)]  # as of a tree with pure leaves
    model = CalibratedClassifier(Sayer(), method="none").fit(votes, labels)
    np.testing.assert_allclose(model.predict_proba(votes), votes, atol=1e-12)


def test_log_proba_without_underflow():
    honest = np.array([[40.0], [-50.0], [0.3], [-0.4]] * 60)
    labels = (np.arange(240) % 7 != 0) ^ (honest[:, 0] < 0)
    model = CalibratedClassifier(Boastful(factor=40.0), method="none").fit(honest, labels)
    logs = model.predict_log_proba(honest[:2])
    np.testing.assert_allclose(logs[0], [-1600, 0], atol=1e-9)
    np.testing.assert_allclose(logs[1], [0, -2000], atol=1e-9)


def test_two_classes_are_log_odds(rng):
    honest = 2 * rng.normal(size=(3000, 1))
    labels = np.where(rng.random(3000) < expit(honest[:, 0]), "yes", "no")
    model = CalibratedClassifier(Boastful(factor=2.0), method="ts").fit(honest, labels)
    assert list(model.classes_) == ["no", "yes"]
    assert temperature(model) == pytest.approx(2, rel=0.1)
    np.testing.assert_allclose(model.predict_proba(honest)[:, 1], expit(honest[:, 0]), atol=0.02)
    assert int(model.calibrator_.classes_) == 1


class TwoColumns(Boastful):
    def decision_function(self, X):
        scores = super().decision_function(X)
        return np.stack([-scores / 2, scores / 2], -1)


def test_two_columns_of_two_classes(rng):
    honest = 2 * rng.normal(size=(500, 1))
    labels = (rng.random(500) < expit(honest[:, 0])).astype(int)
    one = CalibratedClassifier(Boastful(), method="ts").fit(honest, labels)
    both = CalibratedClassifier(TwoColumns(), method="ts").fit(honest, labels)
    assert temperature(both) == pytest.approx(temperature(one), rel=1e-6)


@pytest.mark.parametrize("classes", [3, 5])
def test_one_vs_one_scores_are_refused(rng, classes):
    honest, labels = drawn(rng, 150, classes)
    model = make_pipeline(StandardScaler(), SVC(decision_function_shape="ovo"))
    with pytest.raises(ValueError, match=r'scores pairs of classes: set .*shape="ovr"'):
        CalibratedClassifier(model, method="ts").fit(honest, labels)
    model.set_params(svc__decision_function_shape="ovr")
    assert CalibratedClassifier(model, method="ts").fit(honest, labels).score(honest, labels) > 0.5


def test_scores_that_are_refused(rng):
    honest, labels = drawn(rng, 100, 3)
    wide = np.concatenate([honest, honest], 1)
    with pytest.raises(ValueError, match=r"of Boastful must be \(n, 3\), a column .* \(20, 6"):
        CalibratedClassifier(Boastful()).fit(wide, labels)
    with pytest.raises(ValueError, match=r"probs must be in \[0, 1\]"):
        CalibratedClassifier(Sayer()).fit(honest, labels)


# ------------------------------------------------------------------------------- what is passed on


def test_sparse_features(three):
    sparse = pytest.importorskip("scipy.sparse")
    X, y = np.maximum(three[0], 0), three[1]
    dense = CalibratedClassifier(MultinomialNB(), method="ts").fit(X, y)
    for kind in (sparse.csr_matrix, sparse.csr_array):
        fitted = CalibratedClassifier(MultinomialNB(), method="ts").fit(kind(X), y)
        np.testing.assert_allclose(fitted.predict_proba(kind(X)), dense.predict_proba(X))


def test_data_frames(three):
    pd = pytest.importorskip("pandas")
    X, y = three
    frame = pd.DataFrame(X, columns=[f"column {i}" for i in range(8)], index=np.arange(600)[::-1])
    model = CalibratedClassifier(method="ts").fit(frame, pd.Series(y, index=frame.index))
    assert list(model.feature_names_in_) == list(frame.columns)
    plain = CalibratedClassifier(method="ts").fit(X, y)
    np.testing.assert_allclose(model.predict_proba(frame), plain.predict_proba(X))


def test_missing_values(three):
    X, y = three[0].copy(), three[1]
    X[::3, 0] = np.nan
    model = CalibratedClassifier(HistGradientBoostingClassifier(max_iter=5), method="ts").fit(X, y)
    assert model.__sklearn_tags__().input_tags.allow_nan
    assert np.isfinite(model.predict_proba(X)).all()


def test_precomputed_kernels(two):
    X, y = two
    kernel = SVC(kernel="precomputed")
    plain = CalibratedClassifier(SVC(kernel="linear"), method="ts").fit(X, y)
    cut = CalibratedClassifier(kernel, method="ts").fit(X @ X.T, y)
    assert cut.__sklearn_tags__().input_tags.pairwise
    np.testing.assert_allclose(cut.predict_proba(X @ X.T), plain.predict_proba(X), atol=1e-3)


def test_sample_weight(numbered, rng, recorder):
    X, y = numbered
    weight = rng.uniform(0.2, 3, size=600)
    fitted = CalibratedClassifier(recorder, method="ts").fit(X, y, weight)
    assert len(Recorder.seen) == 6
    for one in Recorder.seen:
        np.testing.assert_array_equal(one["weight"], weight[np.rint(600 * one["rows"]).astype(int)])
    assert sorted(len(one["rows"]) for one in Recorder.seen) == [480] * 5 + [600]
    logits = np.zeros((600, 3))
    for train, test in FOLDS.split(X, y):
        one = LogisticRegression().fit(X[train], y[train], weight[train])
        logits[test] = one.decision_function(X[test])
    assert temperature(fitted) == pytest.approx(best_temperature(logits, y, weight), rel=1e-4)
    assert abs(temperature(fitted) - best_temperature(logits, y)) > 1e-3


def test_estimator_without_sample_weight(three, rng):
    X, y = three
    model = CalibratedClassifier(KNeighborsClassifier(30), method="ts")
    with pytest.warns(UserWarning, match=r"KNeighborsClassifier\.fit takes no sample_weight: only"):
        model.fit(X, y, sample_weight=rng.uniform(0.2, 3, size=600))


def test_fit_params(numbered, recorder):
    X, y = numbered
    CalibratedClassifier(recorder, method="ts", cv=3).fit(X, y, extra=np.arange(600))
    for one in Recorder.seen:
        np.testing.assert_array_equal(one["extra"], np.rint(600 * one["rows"]))


def test_sample_weight_of_a_pipeline_step(three, rng):
    X, y = three
    weight = rng.uniform(0.2, 3, size=600)
    model = CalibratedClassifier(make_pipeline(StandardScaler(), GaussianNB()), method="ts")
    model.fit(X, y, gaussiannb__sample_weight=weight)
    alone = make_pipeline(StandardScaler(), GaussianNB()).fit(
        X, y, gaussiannb__sample_weight=weight
    )
    np.testing.assert_allclose(model.estimator_.predict_proba(X), alone.predict_proba(X))


@pytest.mark.parametrize("cv", [5, GroupKFold(4)])
def test_groups_stay_in_one_fold(numbered, recorder, cv):
    X, y = numbered
    groups = np.arange(600) // 7
    CalibratedClassifier(recorder, method="ts", cv=cv).fit(X, y, groups=groups)
    for one in Recorder.seen[1:]:
        rows = np.rint(600 * one["rows"]).astype(int)
        assert not set(groups[rows]) & set(np.delete(groups, rows))


def test_groups_of_the_method(three, monkeypatch):
    X, y = three
    groups = np.arange(600) // 7
    given = []
    before = cal.Auto.fit

    def listen(self, *arguments, **named):
        given.append(named["groups"])
        return before(self, *arguments, **named)

    monkeypatch.setattr(cal.Auto, "fit", listen)
    base = FrozenEstimator(LogisticRegression().fit(X, y))
    few = {"candidates": ["none", "ts"]}
    CalibratedClassifier(base, options=few).fit(X, y, groups=groups.tolist())
    np.testing.assert_array_equal(given[0], groups)
    folds = RepeatedStratifiedKFold(n_splits=3, n_repeats=2)
    CalibratedClassifier(cv=folds, options=few).fit(X, y)
    assert (np.bincount(given[1]) == 2).all()  # what is there twice stays together
    CalibratedClassifier(options=few).fit(X, y)
    assert given[2] is None


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


@pytest.mark.usefixtures("routing")
def test_metadata_routing(numbered, rng, recorder):
    X, y = numbered
    weight, groups = rng.uniform(0.2, 3, size=600), np.arange(600) // 7
    asked = recorder.set_fit_request(sample_weight=True)
    CalibratedClassifier(asked, method="ts", cv=GroupKFold(4)).fit(
        X, y, sample_weight=weight, groups=groups
    )
    for one in Recorder.seen:
        rows = np.rint(600 * one["rows"]).astype(int)
        np.testing.assert_array_equal(one["weight"], weight[rows])
        assert len(rows) == 600 or not set(groups[rows]) & set(np.delete(groups, rows))
    with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError):
        CalibratedClassifier(Recorder(), method="ts").fit(X, y, sample_weight=weight)
    Recorder.seen = []
    unweighted = Recorder().set_fit_request(sample_weight=False)
    CalibratedClassifier(unweighted, method="ts").fit(X, y, sample_weight=weight)
    assert all(one["weight"] is None for one in Recorder.seen)
    weighed = CalibratedClassifier(method="ts").fit(X, y, sample_weight=weight)
    plain = CalibratedClassifier(method="ts").fit(X, y)
    assert np.abs(weighed.estimator_.coef_ - plain.estimator_.coef_).max() > 1e-3


@pytest.mark.usefixtures("routing")
@pytest.mark.parametrize("cv", [5, "prefit", [(np.arange(300), np.arange(300, 600))]])
def test_calibrator_needs_no_routing(three, rng, cv):
    X, y = three
    base = LogisticRegression().set_fit_request(sample_weight=False).fit(X, y)
    weight = rng.uniform(0.2, 3, size=600)
    model = CalibratedClassifier(base, method="ts", cv=cv)
    plain = temperature(clone(model).set_params(estimator=base).fit(X, y))
    weighed = model.fit(X, y, sample_weight=weight, groups=np.arange(600) // 7)
    assert temperature(weighed) != plain


# ------------------------------------------------------------------------------- folds and chance


def test_forms_of_cv(three):
    X, y = three
    folds = list(FOLDS.split(X, y))
    masks = [(train, np.isin(np.arange(600), test)) for train, test in folds]
    expected = temperature(CalibratedClassifier(method="ts").fit(X, y))
    for cv in (folds, masks, FOLDS, None, np.int64(5)):
        assert temperature(CalibratedClassifier(method="ts", cv=cv).fit(X, y)) == expected


def test_repeated_and_partial_folds(three):
    X, y = three
    folds = list(FOLDS.split(X, y))
    twice = CalibratedClassifier(method="ts", cv=[*folds, *folds]).fit(X, y)
    once = CalibratedClassifier(method="ts", cv=folds).fit(X, y)
    assert temperature(twice) == pytest.approx(temperature(once), rel=1e-6)
    part = CalibratedClassifier(method="ts", cv=folds[:1]).fit(X, y)
    train, test = folds[0]
    scores = LogisticRegression().fit(X[train], y[train]).decision_function(X[test])
    assert temperature(part) == pytest.approx(best_temperature(scores, y[test]), rel=1e-4)


def test_seed_of_folds(numbered, recorder):
    X, y = numbered

    def rows(seed):
        Recorder.seen = []
        CalibratedClassifier(recorder, method="ts", random_state=seed).fit(X, y)
        return [tuple(one["rows"]) for one in Recorder.seen]

    assert rows(None) == rows(None)
    assert rows(3) == rows(3)
    assert len({tuple(rows(seed)) for seed in (None, 3, 4)}) == 3
    assert rows(np.random.RandomState(0)) == rows(np.random.RandomState(0))


def test_seed_of_the_method(three):
    X, y = three
    fast = {"candidates": ["none", "ts"]}
    base = FrozenEstimator(LogisticRegression().fit(X, y))
    seeds = [
        CalibratedClassifier(base, random_state=state, options={**fast, **more})
        .fit(X, y)
        .calibrator_.seed
        for state, more in [(None, {}), (1, {}), (1, {}), (2, {}), (2, {"seed": 5})]
    ]
    assert seeds[0] == cal.Auto().seed
    assert seeds[1] == seeds[2]
    assert seeds[4] == 5
    assert len(set(seeds)) == 4
    CalibratedClassifier(method="ts", random_state=1).fit(X, y)  # has none


def test_parallel_folds(three):
    X, y = three
    alone = CalibratedClassifier(GaussianNB(), method="ts").fit(X, y)
    with joblib.parallel_config("threading"):
        at_once = CalibratedClassifier(GaussianNB(), method="ts", n_jobs=2).fit(X, y)
    np.testing.assert_array_equal(alone.predict_proba(X), at_once.predict_proba(X))


# ---------------------------------------------------------------------------------- the methods


def test_calibrator_as_method(three):
    X, y = three
    given = cal.TemperatureScaling(objective="brier")
    model = CalibratedClassifier(method=given).fit(X, y)
    by_name = CalibratedClassifier(method="ts", options={"objective": "brier"}).fit(X, y)
    assert temperature(model) == temperature(by_name)
    assert temperature(model) != temperature(CalibratedClassifier(method="ts").fit(X, y))
    assert int(given.classes_) == 0
    assert clone(model).method is not given
    assert clone(model).method.objective == "brier"


class Needy(cal.TemperatureScaling):
    needs_features = True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"method": name}, "needs features of a last layer") for name in (Needy(), *NEEDY)),
        ({"method": "tss"}, "unknown method 'tss': did you mean ts"),
        ({"method": "ts", "options": {"folds": 3}}, "ts has no option 'folds'"),
        ({"method": Needy(), "options": {"objective": "nll"}}, "options go with the name"),
        ({"cv": "prefitt"}, 'cv must be folds, .* "prefit", got'),
        ({"cv": 1}, "n_splits"),
        ({"cv": 601}, "n_spl"),
    ],
)
def test_arguments_that_are_refused(three, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        CalibratedClassifier(**arguments).fit(*three)


# ------------------------------------------------------------------------------------- neural nets


@pytest.fixture
def skorch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("skorch")


def test_skorch(skorch, digits):
    X, y = (digits[0] / 16).astype(np.float32), digits[1]
    torch.manual_seed(0)
    net = skorch.NeuralNetClassifier(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.02,
        max_epochs=30,
        train_split=None,
        verbose=0,
    )
    model = CalibratedClassifier(net, method="ts", cv=3).fit(X[:600], y[:600])
    raw, probs = model.estimator_.predict_proba(X[600:]), model.predict_proba(X[600:])
    np.testing.assert_allclose(raw.sum(-1), 1, atol=1e-5)  # the softmax is skorch's
    np.testing.assert_array_equal(probs.argmax(-1), raw.argmax(-1))
    assert temperature(model) > 1.2
    assert log_loss(y[600:], probs) < log_loss(y[600:], raw)
    again = CalibratedClassifier(FrozenEstimator(model.estimator_), method="ts")
    assert again.fit(X[600:1200], y[600:1200]).score(X[1200:], y[1200:]) > 0.8
