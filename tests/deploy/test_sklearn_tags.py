"""The scikit-learn classifier for tags, and as an ensemble."""

import pickle

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.special import expit, logit, softmax

import calibrant as cal
from calibrant.calibrators.tags import TagScaling
from tests.support.simulate import drawn, drawn_tags

sklearn = pytest.importorskip("sklearn", minversion="1.6")

from sklearn.base import BaseEstimator, ClassifierMixin, clone  # noqa: E402
from sklearn.datasets import make_classification, make_multilabel_classification  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.frozen import FrozenEstimator  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.metrics import log_loss  # noqa: E402
from sklearn.model_selection import KFold, StratifiedKFold  # noqa: E402
from sklearn.multiclass import OneVsRestClassifier  # noqa: E402
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier  # noqa: E402
from sklearn.naive_bayes import GaussianNB  # noqa: E402
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402
from sklearn.utils import estimator_checks, get_tags  # noqa: E402

from calibrant.deploy.sklearn import CalibratedClassifier  # noqa: E402

SLOPE, INTERCEPT = np.array([0.4, 0.6, 0.9]), np.array([-1.0, 0.5, 0.0])


class Boastful(ClassifierMixin, BaseEstimator):
    """Scores are the features: there is nothing to learn, and the right calibration is known."""

    def fit(self, X, y):
        self.n_features_in_ = X.shape[1]
        return self

    def decision_function(self, X):
        return np.asarray(X)


@pytest.fixture(scope="module")
def tagged():
    X, y = make_multilabel_classification(1200, 10, n_classes=4, random_state=0)
    return X[:600], y[:600], X[600:], y[600:]


def mean_log_loss(y, probs):
    return float(
        np.mean([log_loss(y[:, t], probs[:, t], labels=[0, 1]) for t in range(y.shape[1])])
    )


# ------------------------------------------------------------------------------------------ tags


@pytest.mark.parametrize("ensemble", [False, True])
def test_known_lines(rng, ensemble):
    logits, labels = drawn_tags(rng, 20_000, SLOPE, INTERCEPT)
    fitted = CalibratedClassifier(Boastful(), ensemble=ensemble).fit(logits, labels)
    new = 2 * rng.normal(size=(500, 3))
    truth = expit(SLOPE * new + INTERCEPT)
    np.testing.assert_allclose(fitted.predict_proba(new), truth, atol=0.025)
    np.testing.assert_array_equal(fitted.predict(new), fitted.predict_proba(new) > 0.5)
    logs = fitted.predict_log_proba(new)
    np.testing.assert_allclose(np.exp(logs), fitted.predict_proba(new), atol=1e-6)
    np.testing.assert_array_equal(fitted.classes_, [0, 1, 2])
    assert fitted.n_features_in_ == 3


def test_calibrator_of_out_of_fold_scores(tagged):
    X, y, new, _ = tagged
    estimator = OneVsRestClassifier(LogisticRegression())
    fitted = CalibratedClassifier(estimator).fit(X, y)
    scores = np.zeros(y.shape)
    for train, test in KFold(5).split(X):
        scores[test] = clone(estimator).fit(X[train], y[train]).decision_function(X[test])
    expected = TagScaling().fit(scores, y)
    np.testing.assert_allclose(fitted.calibrator_.slope_, expected.slope_, rtol=1e-5)
    odds = clone(estimator).fit(X, y).decision_function(new)
    np.testing.assert_allclose(fitted.predict_proba(new), expected.predict_proba(odds), rtol=1e-5)


@pytest.mark.parametrize(
    "estimator",
    [
        OneVsRestClassifier(GaussianNB()),
        MultiOutputClassifier(GaussianNB()),
        ClassifierChain(GaussianNB()),
        RandomForestClassifier(30, random_state=0),
        KNeighborsClassifier(),
        DecisionTreeClassifier(max_depth=6, random_state=0),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_every_form_of_scores_is_calibrated(tagged, estimator):
    X, y, new, truth = tagged
    fitted = CalibratedClassifier(estimator).fit(X, y)
    probs = fitted.predict_proba(new)
    assert probs.shape == truth.shape
    before = clone(estimator).fit(X, y).predict_proba(new)
    if isinstance(before, list):
        before = np.stack([p[:, 1] for p in before], -1)
    assert mean_log_loss(truth, probs) < mean_log_loss(truth, before)
    for ours, theirs in zip(probs.T, before.T, strict=True):  # in the same order
        assert (np.diff(ours[np.argsort(theirs)]) >= -1e-6).all()


def test_zero_probabilities_get_half_of_the_smallest(tagged):
    X, y, *_ = tagged
    forest = RandomForestClassifier(10, random_state=0, max_depth=5).fit(X[:300], y[:300])
    fitted = CalibratedClassifier(FrozenEstimator(forest), method="pooled").fit(X[300:], y[300:])
    probs = np.stack([p[:, 1] for p in forest.predict_proba(X[300:])], -1)
    both = np.stack([probs, 1 - probs])
    least = both[both > 0].min()
    assert float(fitted.calibrator_.floor_) == pytest.approx(least / 2)
    slope, intercept = (
        float(x[0]) for x in (fitted.calibrator_.slope_, fitted.calibrator_.intercept_)
    )
    inner = fitted.predict_proba(X[300:])[probs == 0]
    np.testing.assert_allclose(logit(inner), slope * np.log(least / 2) + intercept, rtol=1e-5)


@pytest.mark.parametrize("form", [list, csr_matrix, np.asarray])
def test_forms_of_labels(tagged, form):
    X, y, new, _ = tagged
    estimator = CalibratedClassifier(OneVsRestClassifier(LogisticRegression()), cv=3)
    expected = clone(estimator).fit(X, y).predict_proba(new)
    given = [list(row) for row in y] if form is list else form(y)
    np.testing.assert_array_equal(clone(estimator).fit(X, given).predict_proba(new), expected)


def test_weights_and_groups(tagged, rng):
    X, y, *_ = tagged
    weight, groups = rng.uniform(0.1, 3, 600), np.arange(600) // 5
    frozen = FrozenEstimator(OneVsRestClassifier(LogisticRegression()).fit(X[:300], y[:300]))
    fitted = CalibratedClassifier(frozen).fit(X[300:], y[300:], weight[300:])
    expected = TagScaling().fit(
        frozen.decision_function(X[300:]), y[300:], sample_weight=weight[300:]
    )
    np.testing.assert_allclose(fitted.calibrator_.slope_, expected.slope_, rtol=1e-5)
    seen = []

    class Recorder(Boastful):
        def fit(self, X, y):
            seen.append(set(X[:, -1]))
            return super().fit(X, y)

    numbered = np.column_stack([X[:, :3], groups])
    CalibratedClassifier(Recorder(), method="pooled").fit(numbered, y, groups=groups)
    inside = seen[1:]  # the first fit is on all data
    assert len(inside) == 5
    assert all(len(one) == 96 for one in inside)  # of 120 groups, 24 are whole in the other part


@pytest.mark.filterwarnings("ignore:TagScaling")
def test_tags_that_a_fold_does_not_know_are_left_out(rng):
    X, y = drawn_tags(rng, 100, SLOPE, INTERCEPT)
    y[:, 2] = 0
    y[:20, 2] = 1  # only the first of five folds has it
    message = "20 of 300 labels were scored by a fit on examples that all have, or all lack, one"
    with pytest.warns(UserWarning, match=message):
        fitted = CalibratedClassifier(Boastful()).fit(X, y)
    ignored = y.copy()
    ignored[:20, 2] = -100
    expected = TagScaling().fit(X, ignored)
    np.testing.assert_array_equal(fitted.calibrator_.slope_, expected.slope_)


@pytest.mark.filterwarnings("ignore:TagScaling")
def test_a_tag_that_no_example_has(tagged):
    X, y, new, _ = tagged
    y = y.copy()
    y[:, 1] = 0
    with pytest.warns(UserWarning, match="all lack"):
        fitted = CalibratedClassifier(RandomForestClassifier(10, random_state=0)).fit(X, y)
    probs = fitted.predict_proba(new)
    assert probs[:, 1].max() < 0.05
    assert np.isfinite(probs).all()


def test_scale_of_scores_of_tags(rng):
    logits, labels = drawn_tags(rng, 4000, SLOPE, INTERCEPT)
    plain = CalibratedClassifier(Boastful()).fit(logits, labels)
    large = CalibratedClassifier(Boastful()).fit(1e4 * logits, labels)
    assert plain.scale_ == 1 < large.scale_
    np.testing.assert_allclose(
        large.predict_proba(1e4 * logits), plain.predict_proba(logits), atol=0.01
    )


def test_methods_must_suit_the_labels(tagged, rng):
    X, y, *_ = tagged
    with pytest.raises(ValueError, match="unknown multi-label method 'ts'"):
        CalibratedClassifier(DecisionTreeClassifier(), method="ts").fit(X, y)
    with pytest.raises(ValueError, match="TagScaling is for tags: y must have a column of 0"):
        CalibratedClassifier(LogisticRegression(), method=TagScaling()).fit(X, y[:, 0])
    with pytest.raises(ValueError, match="y of tags must be 0 or 1 in each column, got 0, 2"):
        CalibratedClassifier(DecisionTreeClassifier()).fit(X, 2 * y)
    with pytest.raises(ValueError, match=r"must be \(n, 4\), a column per tag, got \(\d+, 10\)"):
        CalibratedClassifier(Boastful()).fit(X, y)


def test_one_hot_classes_are_told_apart_from_tags(three):
    X, y = three
    with pytest.warns(UserWarning, match=r"a single 1 in each row, .* pass y.argmax\(1\)"):
        CalibratedClassifier(MultiOutputClassifier(GaussianNB()), method="pooled").fit(
            X, np.eye(3, dtype=int)[y]
        )


@pytest.mark.parametrize("ensemble", [False, True])
def test_checks_of_scikit_learn_for_tags(ensemble):
    estimator = CalibratedClassifier(
        DecisionTreeClassifier(max_depth=3, random_state=0), cv=3, ensemble=ensemble
    )
    assert get_tags(estimator).classifier_tags.multi_label
    assert not get_tags(clone(estimator).set_params(method="ts")).classifier_tags.multi_label
    assert not get_tags(CalibratedClassifier()).classifier_tags.multi_label
    name, estimator = "CalibratedClassifier", estimator.set_params(method="pooled")  # is quick
    estimator_checks.check_classifiers_multilabel_representation_invariance(name, estimator)
    estimator_checks.check_classifiers_multilabel_output_format_predict(name, estimator)
    estimator_checks.check_classifiers_multilabel_output_format_predict_proba(name, estimator)


# -------------------------------------------------------------------------------------- ensembles


@pytest.fixture(scope="module")
def three():
    return make_classification(
        600, 8, n_informative=5, n_classes=3, flip_y=0.2, class_sep=0.7, random_state=1
    )


@pytest.mark.parametrize("method", ["ts", "vector"])
def test_an_ensemble_shares_one_calibrator(three, method, rng):
    X, y = three
    weight = rng.uniform(0.5, 2, len(y))
    estimator = GaussianNB()
    fitted = CalibratedClassifier(estimator, method=method, ensemble=True).fit(X, y, weight)
    inner, scores = [], np.zeros((len(y), 3))
    for train, test in StratifiedKFold(5).split(X, y):
        inner.append(clone(estimator).fit(X[train], y[train], weight[train]))
        scores[test] = np.log(inner[-1].predict_proba(X[test]))
    one = cal.CALIBRATORS[method]().fit(scores, y, sample_weight=weight)
    expected = np.mean([one.predict_proba(np.log(each.predict_proba(X))) for each in inner], axis=0)
    np.testing.assert_allclose(fitted.predict_proba(X), expected, atol=1e-4)
    np.testing.assert_allclose(fitted.predict_log_proba(X), np.log(fitted.predict_proba(X)))
    assert len(fitted.estimators_) == 5
    np.testing.assert_array_equal(fitted.predict(X), fitted.predict_proba(X).argmax(-1))
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))


def test_an_ensemble_of_small_folds_is_calibrated(rng):
    """A fold of 60 examples has 12, too few for a calibrator of its own."""
    X, y = make_classification(2060, 8, n_informative=4, flip_y=0.3, random_state=2)
    tree = DecisionTreeClassifier(random_state=0)
    losses = [
        log_loss(
            y[60:],
            CalibratedClassifier(tree, ensemble=True, method=m, cv=5)
            .fit(X[:60], y[:60])
            .predict_proba(X[60:]),
        )
        for m in ("none", "auto")
    ]
    assert losses[1] < losses[0] - 0.1


def test_a_refit_in_the_other_way_forgets(three):
    X, y = three
    model = CalibratedClassifier(method="ts", ensemble=True).fit(X, y)
    with pytest.raises(AttributeError, match="no single estimator_"):
        _ = model.estimator_
    model.set_params(ensemble=False).fit(X, y)
    assert model.estimators_ == [model.estimator_]
    expected = CalibratedClassifier(method="ts").fit(X, y).predict_proba(X)
    np.testing.assert_array_equal(model.predict_proba(X), expected)


@pytest.mark.filterwarnings("ignore:.*(of 400 examples were scored|have no example)")
@pytest.mark.parametrize(("method", "kept"), [("ts", 2), ("vector", 1)])
def test_classes_that_an_estimator_of_an_ensemble_lacks(rng, method, kept):
    logits, labels = drawn(rng, 400, 3)
    labels = np.where(labels == 2, 0, labels)
    labels[:4] = 2
    folds = [(np.arange(4, 400), np.arange(200)), (np.arange(200), np.arange(200, 400))]
    estimator = LogisticRegression()
    model = CalibratedClassifier(estimator, method=method, ensemble=True, cv=folds)
    probs = model.fit(logits, labels).predict_proba(logits)
    np.testing.assert_array_equal(model.classes_, [0, 1, 2])
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    assert len(model.estimators_) == kept
    if method == "vector":  # takes no masked classes
        return
    scores = [
        clone(estimator).fit(logits[a], labels[a]).decision_function(logits) for a, _ in folds
    ]
    temperature = float(model.calibrator_.temperature_) * model.scale_
    odds = expit(scores[0] / temperature)
    first = np.stack([1 - odds, odds, np.zeros(400)], -1)
    expected = (first + softmax(scores[1] / temperature, -1)) / 2
    np.testing.assert_allclose(probs, expected, atol=1e-6)


def test_a_fitted_estimator_is_no_ensemble(three):
    X, y = three
    frozen = FrozenEstimator(GaussianNB().fit(X[:300], y[:300]))
    one, other = (
        CalibratedClassifier(frozen, method="ts", ensemble=ensemble).fit(X[300:], y[300:])
        for ensemble in (False, True)
    )
    np.testing.assert_array_equal(one.predict_proba(X), other.predict_proba(X))
