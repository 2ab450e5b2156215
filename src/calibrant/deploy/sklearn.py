"""A scikit-learn classifier around another one, with calibrated probabilities.

Needs scikit-learn: ``pip install 'calibrant[sklearn]'``.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    IntArray,
    as_weight,
    logits_from_probs,
    warn,
)
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import BOUNDS, Calibrator
from calibrant.calibrators.registry import CALIBRATORS, make_calibrator
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.workflows.effect import calibrated

try:
    from sklearn import get_config
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
    from sklearn.exceptions import NotFittedError
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, check_cv
    from sklearn.utils import check_random_state, get_tags
    from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
    from sklearn.utils.metaestimators import _safe_split
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.parallel import Parallel, delayed
    from sklearn.utils.validation import (
        _check_method_params,
        assert_all_finite,
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        has_fit_parameter,
        indexable,
    )
except ImportError as problem:
    raise ImportError(
        f"calibrant.deploy.sklearn needs scikit-learn 1.6 or newer ({problem}): "
        "pip install 'calibrant[sklearn]'"
    ) from problem

if TYPE_CHECKING:
    from typing_extensions import Self

PREFIT = "prefit"
LEAST = 1e-30
"""Probability below which an estimator cannot know what it says; smaller ones are raised to it."""
SCALES = 5
"""Scales that are tried for scores, each 20 times the one before, or a twentieth of it."""


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """A classifier whose probabilities are those of another one, calibrated.

    An estimator that is yet to be fitted is cross-fitted: copies of it are fitted on all folds
    but one and score the fold that is left, the calibrator is fitted on all of these
    out-of-fold scores at once, and the estimator is fitted on all data. What predicts is one
    estimator and one calibrator. A :class:`sklearn.frozen.FrozenEstimator` stays as it is, and
    the data of ``fit`` are those of the calibration.

    The scores are those of ``decision_function`` or, where there is none, the logarithms of the
    probabilities of ``predict_proba``.

    Parameters
    ----------
    estimator : classifier, optional
        :class:`sklearn.linear_model.LogisticRegression` by default.
    method : str or Calibrator
        A name from ``calibrant.CALIBRATORS``, or a calibrator, of which a copy is fitted.
    options : mapping, optional
        Arguments of the method that is named.
    cv : int, splitter, iterable of (train, test), or "prefit"
        Number of folds, each with its share of every class, or the folds themselves.
        ``"prefit"`` takes the estimator as it is; since scikit-learn's ``clone`` forgets fits, a
        ``FrozenEstimator`` is what works in pipelines and searches.
    n_jobs : int, optional
        Folds that are fitted at the same time, as elsewhere in scikit-learn.
    random_state : int, RandomState or None
        Seed by which the rows are shuffled into a number of folds, and of the method if it has
        one. None cuts the folds in the order of the rows, so that every fit is the same.

    Attributes
    ----------
    estimator_ : classifier
        Fitted, on all data unless it was fitted before.
    calibrator_ : Calibrator
        Fitted; of one logit, the log-odds of ``classes_[1]``, where there are two classes.
        :func:`calibrant.save` writes it.
    classes_ : (classes,) array
    floor_ : float or None
        What a probability of 0 becomes: the logarithm of half of the smallest positive one that
        the calibrator was fitted on, or of 1e-30 if that is more. None with
        ``decision_function``.
    scale_ : float
        What scores are divided by before they come to the calibrator: 1, unless their best
        temperature is out of the bounds of temperatures, 0.05 and 20.
    n_features_in_, feature_names_in_
        Those of ``estimator_``, if it has them.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.naive_bayes import MultinomialNB
    >>> digits, labels = load_digits(return_X_y=True)
    >>> fitted = CalibratedClassifier(MultinomialNB(), method="ts").fit(digits[:900], labels[:900])
    >>> round(fitted.score(digits[900:], labels[900:]), 2)
    0.86
    >>> round(float(fitted.estimator_.predict_proba(digits[900:]).max(-1).mean()), 2)  # says itself
    0.99
    >>> round(float(fitted.predict_proba(digits[900:]).max(-1).mean()), 2)
    0.85
    """

    estimator_: Any
    calibrator_: Calibrator
    classes_: NDArray[Any]
    floor_: float | None
    scale_: float

    def __init__(
        self,
        estimator: Any = None,
        *,
        method: str | Calibrator = "auto",
        options: Mapping[str, Any] | None = None,
        cv: Any = 5,
        n_jobs: int | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.estimator = estimator
        self.method = method
        self.options = options
        self.cv = cv
        self.n_jobs = n_jobs
        self.random_state = random_state

    # ------------------------------------------------------------------------------------- fit

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        groups: Any = None,
        **fit_params: Any,
    ) -> Self:
        """Fit the estimator, unless it is fitted, and the calibrator.

        Parameters
        ----------
        X : (n, ...)
            Whatever the estimator takes: arrays, sparse matrices, data frames.
        y : (n,)
            Classes, as numbers or strings.
        sample_weight : (n,), optional
            Weights of the rows, for the calibrator and, where it takes them, the estimator.
        groups : (n,), optional
            Rows of one group (a patient, a document) are never in two folds, neither in those
            of the estimator nor in those of a method that cross-validates.
        **fit_params
            Further arguments for the ``fit`` of the estimator.

        Returns
        -------
        self
        """
        y = _targets(y)
        check_consistent_length(X, y, sample_weight, groups)
        if sample_weight is not None:
            sample_weight = as_weight(sample_weight, y.shape)
            if not sample_weight.any():
                raise ValueError("sample_weight must not be zero for every row: give some weight")
        groups = None if groups is None else np.asarray(groups)
        calibrator, estimator = self._calibrator(), self._estimator()
        if self._prefit(estimator):
            scored = _scored_by(estimator, X, y, fit_params)
        else:
            X, y = indexable(X, y)
            params, split = self._routed(estimator, sample_weight, groups, fit_params)
            folds = self._folds(X, y, groups, split)
            blank, estimator = estimator, clone(estimator).fit(X, y, **params)
            scored = self._cross_scored(blank, estimator, X, y, folds, params)
            scored = _usable(scored, masks=calibrator.accepts_masked)
            if groups is None and len(np.unique(scored.rows)) < len(scored.rows):
                groups = np.arange(len(y))  # what was scored more than once stays together
        weight = None if sample_weight is None else sample_weight[scored.rows]
        floor = _floor(scored.logits, weight) if _says_probs(estimator) else None
        logits = _floored(scored.logits, scored.known, floor)
        as_is = isinstance(calibrator, Identity)
        scale = 1.0 if as_is else _scale(logits, scored.labels, weight)
        calibrator.fit(
            _given(logits) / scale,
            scored.labels,
            sample_weight=weight,
            groups=None if groups is None else groups[scored.rows],
        )
        self.estimator_, self.classes_, self.calibrator_ = estimator, scored.classes, calibrator
        self.floor_, self.scale_ = floor, scale
        return self

    def _calibrator(self) -> Calibrator:
        """Return a new calibrator."""
        options = dict(self.options or {})
        if isinstance(self.method, str) and self.random_state is not None:
            known = inspect.signature(CALIBRATORS.get(self.method, Calibrator)).parameters
            if "seed" in known and "seed" not in options:
                options["seed"] = int(check_random_state(self.random_state).randint(1 << 31))
        calibrator = copy.deepcopy(make_calibrator(self.method, options))
        if calibrator.needs_features:
            raise ValueError(
                f"{type(calibrator).__name__} needs the features before the last layer, which a "
                "scikit-learn estimator does not tell: choose another method, or fit it with "
                "fit(logits, labels, features=...)"
            )
        return calibrator

    def _estimator(self) -> Any:
        if self.estimator is not None:
            return self.estimator
        default = LogisticRegression()
        return default.set_fit_request(sample_weight=True) if _routing() else default

    def _prefit(self, estimator: Any) -> bool:
        if isinstance(self.cv, str) and self.cv != PREFIT:
            raise ValueError(
                f'cv must be a number of folds, a splitter, folds or "{PREFIT}", got {self.cv!r}'
            )
        return isinstance(self.cv, str) or isinstance(estimator, FrozenEstimator)

    def _routed(
        self,
        estimator: Any,
        sample_weight: FloatArray | None,
        groups: NDArray[Any] | None,
        fit_params: dict[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of the estimator's ``fit`` and of the splitter's ``split``."""
        if _routing():
            routed = process_routing(
                self, "fit", sample_weight=sample_weight, groups=groups, **fit_params
            )
            return routed.estimator.fit, routed.splitter.split
        params = dict(fit_params)
        if sample_weight is not None and has_fit_parameter(estimator, "sample_weight"):
            params["sample_weight"] = sample_weight
        elif sample_weight is not None:
            warn(
                f"the fit of {type(estimator).__name__} takes no sample_weight: only the "
                "calibrator is weighted"
            )
        return params, {} if groups is None else {"groups": groups}

    def _folds(
        self, X: Any, y: NDArray[Any], groups: NDArray[Any] | None, split: dict[str, Any]
    ) -> list[tuple[IntArray, IntArray]]:
        """Return rows to fit on and rows to score, of each fold."""
        cv = 5 if self.cv is None else self.cv
        if isinstance(cv, Integral):
            kind = StratifiedKFold if groups is None else StratifiedGroupKFold
            cv = kind(
                int(cv), shuffle=self.random_state is not None, random_state=self.random_state
            )
            split = {"groups": groups}
        with warnings.catch_warnings():
            # Of rare classes there is more to say once it is known what the folds lack.
            warnings.filterwarnings("ignore", message="The least populated class in y has only")
            return list(check_cv(cv, y, classifier=True).split(X, y, **split))

    def _cross_scored(
        self,
        blank: Any,
        estimator: Any,
        X: Any,
        y: NDArray[Any],
        folds: list[tuple[IntArray, IntArray]],
        params: dict[str, Any],
    ) -> _Scored:
        """Score every fold by a copy that was fitted on the others."""
        classes = _classes(estimator, y)
        parts = Parallel(n_jobs=self.n_jobs)(
            delayed(_out_of_fold)(clone(blank), X, y, train, test, params, classes)
            for train, test in folds
        )
        rows = np.concatenate([np.arange(len(y))[test] for _, test in folds])
        logits, known = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return _Scored(classes, rows, logits, known, _positions(classes, y)[rows])

    # --------------------------------------------------------------------------------- predict

    def predict_proba(self, X: Any) -> FloatArray:
        """Calibrated probabilities ``(n, classes)``, in the order of ``classes_``."""
        return np.asarray(self._calibrated(X).softmax(-1).numpy())

    def predict_log_proba(self, X: Any) -> FloatArray:
        """Logarithms of the calibrated probabilities, also where these are too small to hold."""
        return np.asarray(self._calibrated(X).log_softmax(-1).numpy())

    def predict(self, X: Any) -> NDArray[Any]:
        """Most probable class of each row.

        It is that of the estimator with methods that keep the predicted class, if the estimator
        predicts the class of its highest score.
        """
        best = self.predict_proba(X).argmax(-1)
        return np.asarray(self.classes_[best])

    def _calibrated(self, X: Any) -> Tensor:
        """Calibrated logits ``(n, classes)``."""
        check_is_fitted(self)
        scores = _class_logits(self.estimator_, X, self.classes_)
        given = _given(_floored(scores, True, self.floor_))
        logits = calibrated(self.calibrator_, given / self.scale_)
        two = logits.ndim == 1
        return torch.stack([torch.zeros_like(logits), logits], -1) if two else logits

    # ------------------------------------------------------------------------------ conventions

    @property
    def n_features_in_(self) -> int:
        """Number of columns that the estimator was fitted on."""
        return int(self.estimator_.n_features_in_)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """Names of the columns that the estimator was fitted on."""
        return np.asarray(self.estimator_.feature_names_in_)

    def get_metadata_routing(self) -> Any:
        """Routes of ``sample_weight``, ``groups`` and other arguments of ``fit``."""
        fit = MethodMapping().add(caller="fit", callee="fit")
        split = MethodMapping().add(caller="fit", callee="split")
        router = MetadataRouter(owner=self).add_self_request(self)
        return router.add(estimator=self._estimator(), method_mapping=fit).add(
            splitter=self.cv, method_mapping=split
        )

    def __sklearn_tags__(self) -> Any:
        tags, inner = super().__sklearn_tags__(), get_tags(self._estimator())
        tags.input_tags = copy.deepcopy(inner.input_tags)
        if inner.classifier_tags is not None:
            tags.classifier_tags.multi_class = inner.classifier_tags.multi_class
        return tags


# ------------------------------------------------------------------------------------- the scores


class _Scored(NamedTuple):
    """Scored rows ``(m,)`` of the data; ``logits`` and ``known`` are ``(m, classes)``.

    A class is not known where the estimator was not fitted on it. The logit is -inf there, and
    where a probability is 0.
    """

    classes: NDArray[Any]
    rows: IntArray
    logits: FloatArray
    known: BoolArray
    labels: IntArray


def _scored_by(estimator: Any, X: Any, y: NDArray[Any], fit_params: dict[str, Any]) -> _Scored:
    """Scores of an estimator that stays as it is."""
    if fit_params:
        raise ValueError(
            f"{comma_separated(fit_params)} would go to the fit of the estimator, which is fitted already: "
            "only sample_weight and groups are of use"
        )
    try:
        check_is_fitted(estimator)
    except NotFittedError as problem:
        raise NotFittedError(
            f'this {type(estimator).__name__} is not fitted, and cv="{PREFIT}" or FrozenEstimator '
            "leave it so: fit it first. Clones (in GridSearchCV, cross_val_score) forget fits "
            "unless the estimator is a FrozenEstimator"
        ) from problem
    classes = _classes(estimator, y)
    labels, logits = _positions(classes, y), _class_logits(estimator, X, classes)
    return _Scored(classes, np.arange(len(y)), logits, np.ones(logits.shape, bool), labels)


def _out_of_fold(
    estimator: Any,
    X: Any,
    y: NDArray[Any],
    train: IntArray,
    test: IntArray,
    params: dict[str, Any],
    classes: NDArray[Any],
) -> tuple[FloatArray, BoolArray]:
    """Scores ``(test, classes)`` by an estimator that is fitted on other rows."""
    X_train, y_train = _safe_split(estimator, X, y, train)
    X_test, _ = _safe_split(estimator, X, y, test, train)
    fitted = estimator.fit(X_train, y_train, **_check_method_params(X, params, train))
    seen = getattr(fitted, "classes_", np.unique(y_train))
    logits = np.full((len(y[test]), len(classes)), -np.inf)
    known = np.zeros(logits.shape, bool)
    if len(seen) > 1:  # by one class nothing is told apart
        at = _positions(classes, np.asarray(seen))
        logits[:, at], known[:, at] = _class_logits(fitted, X_test, seen), True
    return logits, known


def _says_probs(estimator: Any) -> bool:
    return not hasattr(estimator, "decision_function")


def _class_logits(estimator: Any, X: Any, classes: NDArray[Any]) -> FloatArray:
    """Scores ``(n, classes)``; for two classes their difference is the log-odds.

    Those of probabilities that are 0 are -inf.
    """
    name = f"the {{}} of {type(estimator).__name__}"
    if _says_probs(estimator):
        return _columns(_log_probs(estimator, X), len(classes), name.format("predict_proba"))
    scores = np.asarray(estimator.decision_function(X)).astype(np.float64, copy=False)
    if len(classes) == 2 and scores.size == len(scores):
        return np.stack([np.zeros(len(scores)), scores.reshape(-1)], -1)
    name = name.format("decision_function")
    if len(classes) > 2 and _one_vs_one(estimator):
        raise ValueError(f'{name} scores pairs of classes: set decision_function_shape="ovr"')
    return _columns(scores, len(classes), name)


def _columns(scores: FloatArray, classes: int, name: str) -> FloatArray:
    if scores.ndim != 2 or scores.shape[1] != classes:
        raise ValueError(
            f"{name} must have a column for each of {classes} classes, got {scores.shape}"
        )
    return scores


def _one_vs_one(estimator: Any) -> bool:
    """Whether scores are those of pairs of classes; of three classes there are three pairs."""
    params = estimator.get_params() if hasattr(estimator, "get_params") else {}
    return any(
        name.rpartition("__")[2] == "decision_function_shape" and value == "ovo"
        for name, value in params.items()
    )


def _log_probs(estimator: Any, X: Any) -> FloatArray:
    """Logarithms of probabilities, -inf for zeros and for others that of LEAST at least."""
    probs = np.asarray(estimator.predict_proba(X))
    logs = np.maximum(logits_from_probs(probs)[0], math.log(LEAST))
    return np.where(probs > 0, logs, -np.inf)


def _floor(logits: FloatArray, weight: FloatArray | None) -> float:
    """What zeros become: the logarithm of half of the smallest positive probability.

    What an estimator counts (votes, neighbours) is 0 long before it is too small for its dtype.
    """
    logits = logits if weight is None else logits[weight > 0]
    half = float(logits[np.isfinite(logits)].min()) - math.log(2)
    return max(half, math.log(LEAST))


def _floored(logits: FloatArray, known: BoolArray | bool, floor: float | None) -> FloatArray:
    return logits if floor is None else np.where(known & np.isneginf(logits), floor, logits)


def _scale(logits: FloatArray, labels: IntArray, weight: FloatArray | None) -> float:
    """Number by which scores are divided, so that calibrators find them of a usual size.

    It is 1 unless the best temperature is out of the bounds of temperatures, and 1 where there
    is no best one: every row is right, or they are worse than chance.
    """
    wrong = logits.argmax(-1) != labels
    if not (wrong if weight is None else wrong & (weight > 0)).any():
        return 1.0
    scale = 1.0
    for _ in range(SCALES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bounds and few samples; the fit has its own say
            found = TemperatureScaling().fit(_given(logits) / scale, labels, sample_weight=weight)
        temperature = float(found.temperature_)
        if 1.01 * BOUNDS[0] < temperature < 0.99 * BOUNDS[1]:
            return scale
        scale *= BOUNDS[0] if temperature < 1 else BOUNDS[1]
    return 1.0


def _usable(scored: _Scored, *, masks: bool) -> _Scored:
    """Leave out rows that an estimator scored without knowing their class, and say so.

    Rows with other unknown classes stay if the method takes masked ones.
    """
    own = ~scored.known[np.arange(len(scored.rows)), scored.labels]
    left_out = own | ~(scored.known.any(1) if masks else scored.known.all(1))
    if not left_out.any():
        return scored
    names = _named(scored.classes[~scored.known.all(0)])
    why = f"{left_out.sum():,} of {len(own):,} rows were scored without one of these classes in "
    why += f"the training part of their fold: {names}"
    if left_out.all():
        raise ValueError(
            f"{why}. None is left to calibrate on: use folds that have every class, or a method "
            "that takes masked classes (ts)"
        )
    warn(f"{why}. They are left out of the calibration")
    kept = ~left_out
    return scored._replace(
        rows=scored.rows[kept],
        logits=scored.logits[kept],
        known=scored.known[kept],
        labels=scored.labels[kept],
    )


def _given(logits: FloatArray) -> FloatArray:
    """Logits as a calibrator takes them: one column, the log-odds, for two classes."""
    return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits


# ------------------------------------------------------------------------------------ the targets


def _targets(y: Any) -> NDArray[Any]:
    """Return classes ``(n,)``, checked."""
    targets = column_or_1d(y, warn=True)
    assert_all_finite(targets, input_name="y")
    check_classification_targets(targets)
    return np.asarray(targets)


def _classes(estimator: Any, y: NDArray[Any]) -> NDArray[Any]:
    """Return the classes of a fitted estimator, in the order of its scores."""
    classes = np.asarray(getattr(estimator, "classes_", np.unique(y)))
    if len(classes) < 2:
        raise ValueError(f"y must have two classes or more, got one class, {str(classes[0])!r}")
    return classes


def _positions(classes: NDArray[Any], values: NDArray[Any]) -> IntArray:
    """Return the place of each value among the classes."""
    known = np.isin(values, classes)
    if not known.all():
        others = _named(np.unique(values[~known]))
        raise ValueError(
            f"y has classes that the estimator was not fitted on: {others}; it knows "
            f"{_named(classes)}"
        )
    order = np.argsort(classes)
    return np.asarray(order[np.searchsorted(classes, values, sorter=order)])


def _named(values: Iterable[Any]) -> str:
    return comma_separated([str(value) for value in values])


def _routing() -> bool:
    return bool(get_config().get("enable_metadata_routing", False))
