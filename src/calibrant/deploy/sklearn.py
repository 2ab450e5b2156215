"""A scikit-learn classifier with calibrated probabilities, around any other."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import BOUNDS, Calibrator
from calibrant.calibrators.registry import CALIBRATORS, make_calibrator
from calibrant.calibrators.scaling import Identity, TemperatureScaling

try:
    from sklearn import get_config
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
    from sklearn.exceptions import NotFittedError
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, check_cv
    from sklearn.utils import check_random_state, get_tags, metadata_routing, validation
    from sklearn.utils.metaestimators import _safe_split
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.parallel import Parallel, delayed
    from sklearn.utils.validation import check_is_fitted
except ImportError as problem:
    message = f"this needs scikit-learn 1.6 or newer ({problem}): pip install 'calibrant[sklearn]'"
    raise ImportError(message) from problem

if TYPE_CHECKING:
    from typing_extensions import Self

Arguments: TypeAlias = dict[str, Any]
Fold: TypeAlias = tuple[IntArray, IntArray]  # examples to fit on, and examples to score
LEAST = math.log(1e-30)
"""Smaller log-probabilities are raised to this one: no estimator can know them."""
RESCALINGS = 5
"""Scales of scores to try, each 20 times the one before, or a twentieth of it."""


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """A classifier with the calibrated probabilities of another one.

    An unfitted estimator is cross-fitted: the calibrator is fitted once, on the out-of-fold scores
    of all examples, and the estimator is fitted on all data. A
    :class:`sklearn.frozen.FrozenEstimator` stays as it is, and all data of ``fit`` calibrate it.
    Scores are those of ``decision_function``, or the logarithms of ``predict_proba`` without one.

    Parameters
    ----------
    estimator : classifier, optional
        :class:`sklearn.linear_model.LogisticRegression` by default.
    method : str or Calibrator
        A name from ``calibrant.CALIBRATORS``, or a calibrator, of which a copy is fitted.
    options : mapping, optional
        Arguments of the named method.
    cv : int, splitter, iterable of (train, test), or "prefit"
        Number of stratified folds, or the folds themselves. ``"prefit"`` takes the estimator as
        it is; in pipelines and searches use a ``FrozenEstimator``, since ``clone`` forgets fits.
    n_jobs : int, optional
        Folds that are fitted at the same time.
    random_state : int, RandomState or None
        Seed that shuffles examples into folds, and seed of the method if it has one. None makes
        folds in the order of the examples.

    Attributes
    ----------
    estimator_ : classifier
        Fitted, on all data unless it was fitted before.
    calibrator_ : Calibrator
        Fitted; for two classes on one logit, the log-odds of ``classes_[1]``.
    classes_ : (classes,) array
    floor_ : float or None
        Logit of a probability of 0: the logarithm of half of the smallest positive probability in
        the fit, at least that of 1e-30. None with ``decision_function``.
    scale_ : float
        Divisor of scores: 1, unless the best temperature is outside of [0.05, 20].
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
    >>> round(float(fitted.estimator_.predict_proba(digits[900:]).max(-1).mean()), 2)
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

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None, **fit_params: Any
    ) -> Self:
        """Fit the estimator, unless it is fitted, and the calibrator.

        Parameters
        ----------
        X : (n, ...)
            Anything that the estimator accepts: arrays, sparse matrices, data frames.
        y : (n,)
            Classes, as numbers or strings.
        sample_weight : (n,), optional
            Weights for the calibrator and, if it accepts them, the estimator.
        groups : (n,), optional
            Examples of one group stay in one fold, also of a method that cross-validates.
        **fit_params
            Further arguments of the estimator's ``fit``.
        """
        y = np.asarray(validation.column_or_1d(y, warn=True))
        validation.assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        validation.check_consistent_length(X, y, sample_weight, groups)
        if sample_weight is not None:
            sample_weight = checks.as_weight(sample_weight, y.shape)
            if not sample_weight.any():
                raise ValueError("sample_weight must not be zero for every example")
        groups = None if groups is None else np.asarray(groups)
        calibrator, estimator = self._calibrator(), self._estimator()
        if isinstance(self.cv, str) and self.cv != "prefit":
            raise ValueError(f'cv must be folds, their number or "prefit", got {self.cv!r}')
        if isinstance(self.cv, str) or isinstance(estimator, FrozenEstimator):
            scores = _frozen_scores(estimator, X, y, fit_params)
        else:
            X, y = validation.indexable(X, y)
            params, split = self._routed(estimator, sample_weight, groups, fit_params)
            estimator, scores = self._cross_fitted(X, y, params, groups, split)
            scores = _usable(scores, masks=calibrator.accepts_masked)
            if groups is None and len(np.unique(scores.rows)) < len(scores.rows):
                groups = np.arange(len(y))  # copies of an example stay together
        weight = None if sample_weight is None else sample_weight[scores.rows]
        has_scores = hasattr(estimator, "decision_function")
        floor = None if has_scores else _floor(scores.logits, weight)
        logits = _log_odds(scores.logits, floor, scores.known)
        same = isinstance(calibrator, Identity)
        scale = 1.0 if same else _scale(logits, scores.labels, weight)
        kept = None if groups is None else groups[scores.rows]
        calibrator.fit(logits / scale, scores.labels, sample_weight=weight, groups=kept)
        self.estimator_, self.classes_, self.calibrator_ = estimator, scores.classes, calibrator
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
            name = type(calibrator).__name__
            raise ValueError(f"{name} needs features of a last layer: choose another method")
        return calibrator

    def _estimator(self) -> Any:
        if self.estimator is not None:
            return self.estimator
        default = LogisticRegression()
        return default.set_fit_request(sample_weight=True) if _is_routing() else default

    def _routed(
        self, estimator: Any, sample_weight: Any, groups: Any, fit_params: Arguments
    ) -> tuple[Arguments, Arguments]:
        """Return the arguments of the estimator's ``fit`` and of the splitter's ``split``."""
        if _is_routing():
            routed = metadata_routing.process_routing(
                self, "fit", sample_weight=sample_weight, groups=groups, **fit_params
            )
            return routed.estimator.fit, routed.splitter.split
        params = dict(fit_params)
        if sample_weight is not None and validation.has_fit_parameter(estimator, "sample_weight"):
            params["sample_weight"] = sample_weight
        elif sample_weight is not None:
            name = type(estimator).__name__
            checks.warn(f"{name}.fit takes no sample_weight: only the calibrator is weighted")
        return params, {} if groups is None else {"groups": groups}

    def _cross_fitted(
        self, X: Any, y: NDArray[Any], params: Arguments, groups: Any, split: Arguments
    ) -> tuple[Any, _Scores]:
        """Return the estimator fitted on all data, and the out-of-fold scores of all examples."""
        folds = self._folds(X, y, groups, split)
        estimator = clone(self._estimator()).fit(X, y, **params)
        classes = _classes(estimator, y)
        parts = Parallel(n_jobs=self.n_jobs)(
            delayed(_out_of_fold)(clone(self._estimator()), X, y, fold, params, classes)
            for fold in folds
        )
        rows = np.concatenate([np.arange(len(y))[test] for _, test in folds])
        logits, known = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return estimator, _Scores(classes, rows, logits, known, _positions(classes, y)[rows])

    def _folds(self, X: Any, y: NDArray[Any], groups: Any, split: Arguments) -> list[Fold]:
        cv = 5 if self.cv is None else self.cv
        if isinstance(cv, Integral):
            kind = StratifiedKFold if groups is None else StratifiedGroupKFold
            shuffle = self.random_state is not None
            cv = kind(int(cv), shuffle=shuffle, random_state=self.random_state)
            split = {} if groups is None else {"groups": groups}
        with warnings.catch_warnings():
            # _usable warns of rare classes, with the consequence
            warnings.filterwarnings("ignore", message="The least populated class in y has only")
            return list(check_cv(cv, y, classifier=True).split(X, y, **split))

    def predict_proba(self, X: Any) -> FloatArray:
        """Return calibrated probabilities ``(n, classes)``, in the order of ``classes_``."""
        return np.asarray(self._calibrated(X).softmax(-1).numpy())

    def predict_log_proba(self, X: Any) -> FloatArray:
        """Return logarithms of the calibrated probabilities, without underflow."""
        return np.asarray(self._calibrated(X).log_softmax(-1).numpy())

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable classes; most methods keep the estimator's prediction."""
        best = self.predict_proba(X).argmax(-1)  # first, since it checks that there was a fit
        return np.asarray(self.classes_[best])

    def _calibrated(self, X: Any) -> Tensor:
        check_is_fitted(self)
        scores = _log_odds(_class_logits(self.estimator_, X, self.classes_), self.floor_)
        logits = torch.as_tensor(self.calibrator_.transform(scores / self.scale_))
        return torch.stack([torch.zeros_like(logits), logits], -1) if logits.ndim == 1 else logits

    @property
    def n_features_in_(self) -> int:
        """Number of columns that the estimator was fitted on."""
        return int(self.estimator_.n_features_in_)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """Names of the columns that the estimator was fitted on."""
        return np.asarray(self.estimator_.feature_names_in_)

    def get_metadata_routing(self) -> Any:
        """Return the routes of ``sample_weight``, ``groups`` and other arguments of ``fit``."""
        fit = metadata_routing.MethodMapping().add(caller="fit", callee="fit")
        split = metadata_routing.MethodMapping().add(caller="fit", callee="split")
        router = metadata_routing.MetadataRouter(owner=self).add_self_request(self)
        return router.add(estimator=self._estimator(), method_mapping=fit).add(
            splitter=self.cv, method_mapping=split
        )

    def __sklearn_tags__(self) -> Any:
        tags, inner = super().__sklearn_tags__(), get_tags(self._estimator())
        tags.input_tags = copy.deepcopy(inner.input_tags)
        if inner.classifier_tags is not None:
            tags.classifier_tags.multi_class = inner.classifier_tags.multi_class
        return tags


class _Scores(NamedTuple):
    """Scores of examples; ``logits`` and ``known`` are ``(m, classes)``.

    A class is unknown where the estimator was not fitted on it; its logit is -inf, as that of a
    probability of 0 is.
    """

    classes: NDArray[Any]
    rows: IntArray  # (m,) positions of the examples in the data
    logits: FloatArray
    known: BoolArray
    labels: IntArray


def _frozen_scores(estimator: Any, X: Any, y: NDArray[Any], fit_params: Arguments) -> _Scores:
    if fit_params:
        names = comma_separated(fit_params)
        raise ValueError(f"the estimator is fitted already and takes no {names}")
    try:
        check_is_fitted(estimator)
    except NotFittedError as problem:
        name = type(estimator).__name__
        raise NotFittedError(
            f"this {name} is not fitted, or a clone (as in GridSearchCV) has forgotten its fit: "
            "fit it first, and wrap it in a FrozenEstimator"
        ) from problem
    classes = _classes(estimator, y)
    labels, logits = _positions(classes, y), _class_logits(estimator, X, classes)
    return _Scores(classes, np.arange(len(y)), logits, np.ones(logits.shape, bool), labels)


def _out_of_fold(
    estimator: Any, X: Any, y: NDArray[Any], fold: Fold, params: Arguments, classes: NDArray[Any]
) -> tuple[FloatArray, BoolArray]:
    """Return scores ``(test, classes)`` by a fit on the rest, and the classes that it knows."""
    train, test = fold
    X_train, y_train = _safe_split(estimator, X, y, train)
    X_test, _ = _safe_split(estimator, X, y, test, train)
    fitted = estimator.fit(X_train, y_train, **validation._check_method_params(X, params, train))
    seen = getattr(fitted, "classes_", np.unique(y_train))
    logits = np.full((len(y[test]), len(classes)), -np.inf)
    known = np.zeros(logits.shape, bool)
    if len(seen) > 1:  # one class alone has no scores
        at = _positions(classes, np.asarray(seen))
        logits[:, at], known[:, at] = _class_logits(fitted, X_test, seen), True
    return logits, known


def _class_logits(estimator: Any, X: Any, classes: NDArray[Any]) -> FloatArray:
    """Return scores ``(n, classes)``; probabilities of 0 are -inf."""
    if hasattr(estimator, "decision_function"):
        name = f"the decision_function of {type(estimator).__name__}"
        scores = np.asarray(estimator.decision_function(X)).astype(np.float64, copy=False)
        if len(classes) == 2 and scores.size == len(scores):
            return np.stack([np.zeros(len(scores)), scores.reshape(-1)], -1)
        if len(classes) > 2 and _one_vs_one(estimator):
            raise ValueError(f'{name} scores pairs of classes: set decision_function_shape="ovr"')
    else:
        name = f"the predict_proba of {type(estimator).__name__}"
        probs = np.asarray(estimator.predict_proba(X))
        scores = np.maximum(checks.logits_from_probs(probs)[0], LEAST)
        scores = np.where(probs > 0, scores, -np.inf)
    if scores.ndim != 2 or scores.shape[1] != len(classes):
        raise ValueError(
            f"{name} must be (n, {len(classes)}), a column per class, got {scores.shape}"
        )
    return scores


def _one_vs_one(estimator: Any) -> bool:
    """Return True if scores are of pairs of classes, of which three classes have three."""
    params = estimator.get_params() if hasattr(estimator, "get_params") else {}
    return any(k.endswith("decision_function_shape") and v == "ovo" for k, v in params.items())


def _floor(logits: FloatArray, weight: FloatArray | None) -> float:
    """Return the logit of half of the smallest positive probability, to stand for that of 0.

    Estimators that count (votes, neighbours) give 0 to classes that are merely rare.
    """
    logits = logits if weight is None else logits[weight > 0]
    return max(float(logits[np.isfinite(logits)].min()) - math.log(2), LEAST)


def _log_odds(logits: FloatArray, floor: float | None, known: Any = True) -> FloatArray:
    """Return the log-odds for two classes, the logits for more; those of 0 get the floor."""
    if floor is not None:
        logits = np.where(known & np.isneginf(logits), floor, logits)
    return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits


def _scale(logits: FloatArray, labels: IntArray, weight: FloatArray | None) -> float:
    """Return the divisor of scores that brings their best temperature into the usual bounds.

    It is 1 if there is no best temperature: all examples are right, or worse than chance.
    """
    wrong = (logits > 0 if logits.ndim == 1 else logits.argmax(-1)) != labels
    if not (wrong if weight is None else wrong & (weight > 0)).any():
        return 1.0
    scale = 1.0
    for _ in range(RESCALINGS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit itself warns
            fitted = TemperatureScaling().fit(logits / scale, labels, sample_weight=weight)
        temperature = float(fitted.temperature_)
        if 1.01 * BOUNDS[0] < temperature < 0.99 * BOUNDS[1]:
            return scale
        scale *= BOUNDS[0] if temperature < 1 else BOUNDS[1]
    return 1.0


def _usable(scores: _Scores, *, masks: bool) -> _Scores:
    """Leave out, with a warning, examples that were scored without knowledge of their class.

    Examples with other unknown classes stay if the method allows masked classes.
    """
    own = scores.known[np.arange(len(scores.rows)), scores.labels]
    kept = own & (True if masks else scores.known.all(1))
    if kept.all():
        return scores
    names = comma_separated(map(str, scores.classes[~scores.known.all(0)]))
    problem = (
        f"{(~kept).sum():,} of {len(own):,} examples were scored without one of these classes in "
        f"the training part of their fold: {names}"
    )
    if not kept.any():
        remedy = "use folds that have every class, or a method that allows masked classes (ts)"
        raise ValueError(f"{problem}. None is left to calibrate on: {remedy}")
    checks.warn(f"{problem}. They are left out of the calibration")
    columns: Any = (column[kept] for column in scores[1:])
    return _Scores(scores.classes, *columns)


def _classes(estimator: Any, y: NDArray[Any]) -> NDArray[Any]:
    """Return the classes of a fitted estimator, in the order of its scores."""
    classes = np.asarray(getattr(estimator, "classes_", np.unique(y)))
    if len(classes) < 2:
        raise ValueError(f"y must have two classes or more, got one class, {str(classes[0])!r}")
    return classes


def _positions(classes: NDArray[Any], values: NDArray[Any]) -> IntArray:
    """Return the position of each value among the classes."""
    known = np.isin(values, classes)
    if not known.all():
        others = comma_separated(map(str, np.unique(values[~known])))
        raise ValueError(
            f"y has classes that the estimator was not fitted on: {others}; it knows "
            f"{comma_separated(map(str, classes))}"
        )
    order = np.argsort(classes)
    return np.asarray(order[np.searchsorted(classes, values, sorter=order)])


def _is_routing() -> bool:
    return bool(get_config().get("enable_metadata_routing", False))
