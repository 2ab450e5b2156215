"""A scikit-learn classifier whose decisions keep limits, around any other."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from calibrant._core.checks import FloatArray
from calibrant._core.messages import needed
from calibrant.decide.probabilities import check_share
from calibrant.decide.threshold_limits import threshold, thresholds
from calibrant.decide.threshold_results import Threshold

with needed("this needs scikit-learn 1.6 or newer", "'calibrant[sklearn]'"):
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupShuffleSplit, ShuffleSplit, StratifiedShuffleSplit
    from sklearn.utils import get_tags, validation
    from sklearn.utils.metaestimators import _safe_split
    from sklearn.utils.validation import check_is_fitted

    from calibrant.deploy import sklearn_scores as scoring

if TYPE_CHECKING:
    from typing_extensions import Self

LIMITS = ("precision", "recall", "max_fpr", "max_fnr", "max_cost", "cost")


class ThresholdClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """A classifier of two classes, or of tags, whose threshold keeps limits with certainty.

    As :class:`sklearn.model_selection.TunedThresholdClassifierCV` it chooses the threshold by
    examples that the estimator was not fitted on, here by :func:`calibrant.threshold`: the limits
    hold in the population, with the probability ``certainty``, and not only in these examples.

    Parameters
    ----------
    estimator : classifier, optional
        :class:`sklearn.linear_model.LogisticRegression` by default. A
        :class:`sklearn.frozen.FrozenEstimator` stays as it is, and all data of ``fit`` are for the
        threshold.
    precision, recall, max_fpr, max_fnr, max_cost, cost
        Limits, as for :func:`calibrant.threshold`; ``cost`` alone takes the cheapest threshold.
    certainty : float in (0, 1)
        Of all tags together, if there are several.
    pos_label : int, float, bool or str, optional
        Class to find; ``classes_[1]`` by default.
    holdout : float in (0, 1)
        Share of the examples that is kept for the threshold.
    random_state : int, RandomState or None
        Seed that chooses them.

    Attributes
    ----------
    estimator_ : classifier
    classes_ : (classes,) array
        Of tags, their numbers.
    thresholds_ : list of Threshold
        One, or one for each tag.
    multilabel_ : bool
        True for tags.

    Examples
    --------
    >>> from sklearn.datasets import make_classification
    >>> X, y = make_classification(4000, weights=[0.8], flip_y=0.1, random_state=0)
    >>> found = ThresholdClassifier(recall=0.8, random_state=0).fit(X[:2000], y[:2000])
    >>> found.thresholds_[0].promise()
    'With 95 % certainty, at least 80 % of the positive ones are found.'
    >>> bool(found.predict(X[2000:])[y[2000:] == 1].mean() > 0.8)
    True
    """

    estimator_: Any
    classes_: NDArray[Any]
    thresholds_: list[Threshold]
    multilabel_: bool

    def __init__(
        self,
        estimator: Any = None,
        *,
        precision: float | None = None,
        recall: float | None = None,
        max_fpr: float | None = None,
        max_fnr: float | None = None,
        max_cost: float | None = None,
        cost: ArrayLike | None = None,
        certainty: float = 0.95,
        pos_label: Any = None,
        holdout: float = 0.3,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.estimator = estimator
        self.precision = precision
        self.recall = recall
        self.max_fpr = max_fpr
        self.max_fnr = max_fnr
        self.max_cost = max_cost
        self.cost = cost
        self.certainty = certainty
        self.pos_label = pos_label
        self.holdout = holdout
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, groups: Any = None, **fit_params: Any) -> Self:
        """Fit the estimator, unless it is frozen, and find the threshold on other examples.

        Parameters
        ----------
        X, y : (n, ...), and (n,) or (n, tags)
        groups : (n,), optional
            Examples of one group are all for the estimator, or all for the threshold.
        **fit_params
            Further arguments of the estimator's ``fit``.
        """
        y = scoring._targets(y)
        validation.check_consistent_length(X, y, groups)
        estimator = LogisticRegression() if self.estimator is None else self.estimator
        if isinstance(estimator, FrozenEstimator):
            fitted, held, truth = estimator, X, y
        else:
            X, y = validation.indexable(X, y)
            train, test = self._halves(y, groups)
            X_train, y_train = _safe_split(estimator, X, y, train)
            params = validation._check_method_params(X, fit_params, train)
            fitted = clone(estimator).fit(X_train, y_train, **params)
            held, truth = _safe_split(estimator, X, y, test, train)
        classes = scoring._classes_of(fitted, y)
        if y.ndim == 1 and len(classes) > 2:
            raise ValueError(
                "Only binary classification is supported. The type of the target is multiclass: "
                "find thresholds for each class with calibrant.decide.thresholds"
            )
        self.classes_, self.estimator_, self.multilabel_ = classes, fitted, y.ndim == 2
        limits = {name: getattr(self, name) for name in LIMITS}
        if y.ndim == 2:
            found = thresholds(
                probs=self._positive(held), labels=truth, certainty=self.certainty, **limits
            )
            self.thresholds_ = list(found.values())
            return self
        positive = (truth == self._pos_label).astype(int)
        probs = self._positive(held)
        one = threshold(confidence=probs, outcome=positive, certainty=self.certainty, **limits)
        name = str(self._pos_label) if isinstance(self._pos_label, str) else None
        self.thresholds_ = [one._replace(positive=name)]
        return self

    def _halves(self, y: NDArray[Any], groups: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the examples for the estimator, and those for the threshold."""
        check_share(self.holdout, "holdout", "0.3 keeps 30 % for the threshold")
        kind: Any = StratifiedShuffleSplit if y.ndim == 1 else ShuffleSplit
        if groups is not None:
            kind = GroupShuffleSplit
        split = kind(1, test_size=self.holdout, random_state=self.random_state)
        train, test = next(split.split(np.zeros(len(y)), y, groups))
        return train, test

    @property
    def _pos_label(self) -> Any:
        if self.pos_label is not None and self.pos_label not in self.classes_:
            raise ValueError(f"pos_label must be one of {self.classes_}, got {self.pos_label!r}")
        return self.classes_[1] if self.pos_label is None else self.pos_label

    def _positive(self, X: Any) -> FloatArray:
        """Return the probability of the positive class, or of each tag."""
        logits = scoring._as_logits(self.estimator_, X, self.classes_, tags=self.multilabel_)
        probs = expit(scoring._log_odds(logits))
        if self.multilabel_ or self._pos_label == self.classes_[1]:
            return np.asarray(probs)
        return np.asarray(1 - probs)

    def predict_proba(self, X: Any) -> FloatArray:
        """Return the probabilities of the estimator."""
        check_is_fitted(self, "thresholds_")
        return np.asarray(self.estimator_.predict_proba(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the positive class where its probability reaches the threshold; of tags 1."""
        check_is_fitted(self, "thresholds_")
        least = np.array([one.threshold for one in self.thresholds_])
        probs = self._positive(X)
        if probs.ndim == 2:
            return (probs >= least).astype(int)
        other = self.classes_[self.classes_ != self._pos_label][0]
        return np.asarray(np.where(probs >= least, self._pos_label, other))

    @property
    def n_features_in_(self) -> int:
        """Number of columns that the estimator was fitted on."""
        return int(self.estimator_.n_features_in_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(LogisticRegression() if self.estimator is None else self.estimator)
        tags.input_tags = copy.deepcopy(inner.input_tags)
        tags.classifier_tags.multi_class = False
        return tags
