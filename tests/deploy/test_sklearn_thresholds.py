"""The scikit-learn classifier whose decisions keep limits."""

from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from calibrant.decide import threshold, thresholds

sklearn = pytest.importorskip("sklearn", minversion="1.6")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import make_classification, make_multilabel_classification  # noqa: E402
from sklearn.frozen import FrozenEstimator  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.multiclass import OneVsRestClassifier  # noqa: E402
from sklearn.svm import LinearSVC  # noqa: E402
from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

from calibrant.deploy.sklearn_thresholds import ThresholdClassifier  # noqa: E402


@pytest.fixture(scope="module")
def data():
    X, y = make_classification(3000, weights=[0.7], flip_y=0.1, random_state=0)
    return (
        X[:2000],
        np.array(["ill", "well"])[y[:2000]],
        X[2000:],
        np.array(["ill", "well"])[y[2000:]],
    )


@pytest.mark.parametrize("pos_label", [None, "ill"])
def test_a_frozen_estimator_has_the_threshold_of_its_probabilities(data, pos_label):
    X, y, new, _ = data
    inner = LogisticRegression().fit(X[:1000], y[:1000])
    made = ThresholdClassifier(FrozenEstimator(inner), recall=0.8, pos_label=pos_label)
    made.fit(X[1000:], y[1000:])
    positive = pos_label or "well"
    column = int(positive == "well")
    claimed = inner.predict_proba(X[1000:])[:, column]
    expected = threshold(confidence=claimed, outcome=y[1000:] == positive, recall=0.8)
    assert made.thresholds_[0].threshold == pytest.approx(expected.threshold)
    flagged = inner.predict_proba(new)[:, column] >= expected.threshold
    assert ((made.predict(new) == positive) == flagged).all()
    assert f"of the examples of class {positive} are found" in made.thresholds_[0].promise()
    assert set(made.predict(new)) == {"ill", "well"}
    assert (made.predict_proba(new) == inner.predict_proba(new)).all()


def test_the_limit_holds_on_new_data(data):
    X, y, new, truth = data
    made = ThresholdClassifier(LinearSVC(), recall=0.75, certainty=0.999, random_state=0)
    recall = (made.fit(X, y).predict(new) == "well")[truth == "well"].mean()
    assert recall > 0.75
    assert made.thresholds_[0].n == 600
    assert clone(made).get_params()["recall"] == 0.75


def test_costs_alone_choose_the_cheapest_threshold(data):
    X, y, new, _ = data
    cost = [[0, 1], [5, 0]]
    inner = LogisticRegression().fit(X[:1000], y[:1000])
    made = ThresholdClassifier(FrozenEstimator(inner), cost=cost).fit(X[1000:], y[1000:])
    claimed, well = inner.predict_proba(X[1000:])[:, 1], y[1000:] == "well"
    costs = [((claimed >= at) & ~well).sum() + 5 * (well & (claimed < at)).sum() for at in claimed]
    flagged = made.predict(X[1000:]) == "well"
    assert (flagged & ~well).sum() + 5 * (well & ~flagged).sum() == min(costs)
    assert made.thresholds_[0].promise() == ""
    assert set(made.predict(new)) == {"ill", "well"}


def test_groups_are_not_divided(data):
    X, y, *_ = data
    seen = {}

    class Recorder(LogisticRegression):
        def fit(self, X, y, sample_weight=None):
            seen["rows"] = X[:, 0]
            return super().fit(X, y)

    group = np.arange(2000) // 20
    ThresholdClassifier(Recorder(), max_fpr=0.5, random_state=0).fit(X, y, groups=group)
    fitted = np.isin(X[:, 0], seen["rows"])
    assert not set(group[fitted]) & set(group[~fitted])
    assert 0.6 < fitted.mean() < 0.8


def test_tags_have_thresholds_of_their_own():
    X, y = make_multilabel_classification(1500, 10, n_classes=3, random_state=0)
    inner = OneVsRestClassifier(LogisticRegression()).fit(X[:700], y[:700])
    made = ThresholdClassifier(FrozenEstimator(inner), max_fnr=0.2).fit(X[700:], y[700:])
    odds = inner.decision_function(X[700:])
    expected = thresholds(odds, y[700:], max_fnr=0.2)
    for own, one in zip(made.thresholds_, expected.values(), strict=True):
        assert own.threshold == pytest.approx(one.threshold, rel=1e-6)
    limits = [one.threshold for one in made.thresholds_]
    assert (made.predict(X[700:]) == (expit(odds) >= limits)).all()


def test_what_is_not_binary_is_refused(data):
    X, _, *_ = data
    with pytest.raises(ValueError, match="Only binary classification is supported"):
        ThresholdClassifier(recall=0.9).fit(X, np.arange(2000) % 3)
    with pytest.raises(ValueError, match="pos_label must be one of"):
        ThresholdClassifier(recall=0.9, pos_label=7).fit(X, np.arange(2000) % 2)
    with pytest.raises(TypeError, match="name a limit"):
        ThresholdClassifier().fit(X, np.arange(2000) % 2)


@pytest.mark.filterwarnings("ignore:no threshold keeps")
def test_it_is_a_classifier_of_scikit_learn():
    """With a threshold of about a half, as some checks want a good accuracy."""
    options: dict[str, Any] = {"recall": 0.5, "certainty": 0.5, "cost": [[0, 1], [1, 0]]}
    made = ThresholdClassifier(**options)
    for estimator, check in estimator_checks_generator(made, mark="skip"):
        check(estimator)
