"""A scikit-learn classifier with calibrated probabilities, around any other."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch import Tensor
from torch.nn.functional import logsigmoid

from calibrant._core import checks
from calibrant._core.checks import FloatArray
from calibrant._core.messages import plain_name
from calibrant.calibrators.base import Calibrator, feature_rows
from calibrant.calibrators.features.metadata_inputs import MetadataCalibrator
from calibrant.calibrators.registry import TAG_CALIBRATORS, calibrators_for, make_calibrator
from calibrant.calibrators.scaling import Identity
from calibrant.calibrators.tags import TagIdentity
from calibrant.slices import Slices, find_slices

try:
    from sklearn import get_config
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import (
        GroupKFold,
        KFold,
        StratifiedGroupKFold,
        StratifiedKFold,
        check_cv,
    )
    from sklearn.utils import (
        _safe_indexing,
        check_random_state,
        get_tags,
        metadata_routing,
        validation,
    )
    from sklearn.utils.metaestimators import _safe_split
    from sklearn.utils.parallel import Parallel, delayed
    from sklearn.utils.validation import check_is_fitted

    from calibrant.deploy import sklearn_scores as scoring
    from calibrant.deploy.sklearn_scores import Arguments, Fold, Scores
except ImportError as problem:
    message = f"this needs scikit-learn 1.6 or newer ({problem}): pip install 'calibrant[sklearn]'"
    raise ImportError(message) from problem

if TYPE_CHECKING:
    from typing_extensions import Self

LEARNED = ("calibrated_classifiers_", "estimator_", "calibrator_", "floor_", "scale_")
"""Attributes of a fit, of which an ensemble has the first and others the rest."""


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """A classifier with the calibrated probabilities of another one.

    An unfitted estimator is cross-fitted: the calibrator is fitted once, on the out-of-fold scores
    of all examples, and the estimator is fitted on all data. A
    :class:`sklearn.frozen.FrozenEstimator` stays as it is, and all data of ``fit`` calibrate it.
    Scores are those of ``decision_function``, or the logarithms of ``predict_proba`` without one.

    Labels 0 and 1 ``(n, tags)`` are tags: probabilities are then those of each tag, and methods
    those of ``calibrant.TAG_CALIBRATORS``.

    Parameters
    ----------
    estimator : classifier, optional
        :class:`sklearn.linear_model.LogisticRegression` by default.
    method : str or Calibrator
        A name from ``calibrant.CALIBRATORS``, for tags from ``calibrant.TAG_CALIBRATORS``, or a
        calibrator, of which a copy is fitted.
    options : mapping, optional
        Arguments of the named method. ``columns`` of ``multicalibration`` are those of ``X``: names
        in a data frame, or numbers.
    cv : int, splitter, iterable of (train, test), or "prefit"
        Number of stratified folds, or the folds themselves. ``"prefit"`` takes the estimator as
        it is; in pipelines and searches use a ``FrozenEstimator``, since ``clone`` forgets fits.
    ensemble : bool
        True keeps the estimator of each fold, with a calibrator fitted on its scores of that fold,
        and averages their probabilities. It makes no difference to a fitted estimator.
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
    calibrated_classifiers_ : list of CalibratedClassifier
        One for each fold, in place of the four attributes ``estimator_``, ``calibrator_``,
        ``floor_`` and ``scale_``, if they are an ensemble.
    classes_ : (classes,) array
        Of tags, their numbers.
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
    calibrated_classifiers_: list[CalibratedClassifier]
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
        ensemble: bool = False,
        n_jobs: int | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.estimator = estimator
        self.method = method
        self.options = options
        self.cv = cv
        self.ensemble = ensemble
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
        y : (n,), or (n, tags)
            Classes, as numbers or strings; or 0 and 1 for each tag.
        sample_weight : (n,), optional
            Weights for the calibrator and, if it accepts them, the estimator.
        groups : (n,), optional
            Examples of one group stay in one fold, also of a method that cross-validates.
        **fit_params
            Further arguments of the estimator's ``fit``.
        """
        y = scoring.targets(y)
        validation.check_consistent_length(X, y, sample_weight, groups)
        if sample_weight is not None:
            sample_weight = checks.as_weight(sample_weight, y.shape[:1])
            if not sample_weight.any():
                raise ValueError("sample_weight must not be zero for every example")
        groups = None if groups is None else np.asarray(groups)
        calibrator, estimator = self._calibrator(multilabel=y.ndim == 2), self._estimator()
        if isinstance(self.cv, str) and self.cv != "prefit":
            raise ValueError(f'cv must be folds, their number or "prefit", got {self.cv!r}')
        if isinstance(self.cv, str) or isinstance(estimator, FrozenEstimator):
            scores = scoring.frozen_scores(estimator, X, y, fit_params)
            learned = _calibrated_with(calibrator, estimator, X, scores, sample_weight, groups)
        else:
            X, y = validation.indexable(X, y)
            params, split = self._routed(estimator, sample_weight, groups, fit_params)
            folds = self._folds(X, y, groups, split)
            if self.ensemble:
                learned = self._ensemble(X, y, folds, params, sample_weight, groups)
            else:
                estimator, scores = self._cross_fitted(X, y, folds, params)
                scores = scoring.usable(scores, masks=calibrator.accepts_masked)
                if groups is None and len(np.unique(scores.rows)) < len(scores.rows):
                    groups = np.arange(len(y))  # copies of an example stay together
                learned = _calibrated_with(calibrator, estimator, X, scores, sample_weight, groups)
        self.__dict__ = {k: v for k, v in vars(self).items() if k not in LEARNED} | learned
        return self

    def _calibrator(self, *, multilabel: bool) -> Calibrator:
        """Return a new calibrator."""
        options: Arguments = dict(self.options or {})
        estimand: Any = "multilabel" if multilabel else "auto"
        if isinstance(self.method, str) and self.random_state is not None:
            kinds = calibrators_for(estimand)
            known = inspect.signature(kinds.get(self.method, Calibrator)).parameters
            if "seed" in known and "seed" not in options:
                options["seed"] = int(check_random_state(self.random_state).randint(1 << 31))
        calibrator = copy.deepcopy(make_calibrator(self.method, options, estimand))
        if calibrator.multilabel and not multilabel:
            name = type(calibrator).__name__
            raise ValueError(f"{name} is for tags: y must have a column of 0 and 1 for each")
        if calibrator.input_columns == ("features",):
            name, remedy = type(calibrator).__name__, "choose another method"
            if isinstance(calibrator, MetadataCalibrator):
                remedy = 'name columns of X, options={"columns": ["age", "site"]}, say'
            raise ValueError(f"{name} needs features of a last layer: {remedy}")
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
        self, X: Any, y: NDArray[Any], folds: list[Fold], params: Arguments
    ) -> tuple[Any, Scores]:
        """Return the estimator fitted on all data, and the out-of-fold scores of all examples."""
        estimator = clone(self._estimator()).fit(X, y, **params)
        classes = scoring.classes_of(estimator, y)
        parts = Parallel(n_jobs=self.n_jobs)(
            delayed(scoring.out_of_fold)(clone(self._estimator()), X, y, fold, params, classes)
            for fold in folds
        )
        rows = np.concatenate([np.arange(len(y))[test] for _, test in folds])
        logits, known = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        labels = scoring.labels_of(classes, y)
        return estimator, Scores(classes, rows, logits, known, labels[rows])

    def _ensemble(
        self,
        X: Any,
        y: NDArray[Any],
        folds: list[Fold],
        params: Arguments,
        sample_weight: FloatArray | None,
        groups: NDArray[Any] | None,
    ) -> Arguments:
        """Return a calibrated classifier for each fold, and the classes of all."""
        beside = {"sample_weight": sample_weight, "groups": groups}
        members = Parallel(n_jobs=self.n_jobs)(
            delayed(_member)(clone(self), clone(self._estimator()), X, y, fold, params, beside)
            for fold in folds
        )
        return {"calibrated_classifiers_": members, "classes_": scoring.classes_of(None, y)}

    def _folds(self, X: Any, y: NDArray[Any], groups: Any, split: Arguments) -> list[Fold]:
        cv = 5 if self.cv is None else self.cv
        if isinstance(cv, Integral):
            plain, grouped = StratifiedKFold, StratifiedGroupKFold
            if y.ndim == 2:  # tags have no strata
                plain, grouped = KFold, GroupKFold
            kind: Any = plain if groups is None else grouped
            shuffle = self.random_state is not None
            cv = kind(int(cv), shuffle=shuffle, random_state=self.random_state)
            split = {} if groups is None else {"groups": groups}
        with warnings.catch_warnings():
            # usable() warns of rare classes, with the consequence
            warnings.filterwarnings("ignore", message="The least populated class in y has only")
            return list(check_cv(cv, y, classifier=True).split(X, y, **split))

    def predict_proba(self, X: Any) -> FloatArray:
        """Return calibrated probabilities ``(n, classes)``, in the order of ``classes_``."""
        check_is_fitted(self)
        if "calibrated_classifiers_" not in vars(self):
            return np.exp(self.predict_log_proba(X))
        members = self.calibrated_classifiers_
        probs = np.zeros((validation._num_samples(X), len(self.classes_)))
        for one in members:
            at = scoring.positions(self.classes_, one.classes_)
            probs[:, at] += one.predict_proba(X) / len(members)
        return probs

    def predict_log_proba(self, X: Any) -> FloatArray:
        """Return logarithms of the calibrated probabilities, without underflow."""
        check_is_fitted(self)
        if "calibrated_classifiers_" in vars(self):
            with np.errstate(divide="ignore"):
                return np.log(self.predict_proba(X))
        logits = self._calibrated(X)
        tags = self.calibrator_.multilabel
        return np.asarray((logsigmoid(logits) if tags else logits.log_softmax(-1)).numpy())

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable classes; most methods keep the estimator's prediction.

        Of tags, 1 for each that is more probable than not.
        """
        probs = self.predict_proba(X)  # first, since it checks that there was a fit
        if self._first.calibrator_.multilabel:
            return (probs > 0.5).astype(int)
        return np.asarray(self.classes_[probs.argmax(-1)])

    def find_slices(
        self, X: Any, y: Any, *, columns: Sequence[str] | None = None, **options: Any
    ) -> Slices:
        """Find the subgroups of held-out examples whose probabilities are wrong.

        Parameters
        ----------
        X, y : (n, ...) and (n,)
            Examples that the classifier was not fitted on. Columns of a data frame, or of an array
            ``(n, columns)``, form subgroups.
        columns : sequence of str, optional
            Names of columns to use; all by default. Those of an array are ``"column 0"`` and on; a
            sparse matrix has none, and predictions alone form subgroups.
        **options
            Of :func:`calibrant.find_slices`, such as ``sample_weight``, ``depth`` and ``level``.

        Returns
        -------
        Slices
        """
        probs = self.predict_proba(X)  # first, since it checks that there was a fit
        if self._first.calibrator_.multilabel:
            raise ValueError("subgroups need one class per example: take one tag at a time")
        labels = scoring.labels_of(self.classes_, scoring.targets(y))
        data = {"probs": probs, "labels": labels, "class_names": self.classes_.astype(str)}
        metadata = None if issparse(X) else X
        return find_slices(data, metadata=metadata, columns=columns, **options)

    def _calibrated(self, X: Any) -> Tensor:
        tags = self.calibrator_.multilabel
        scores = scoring.logits_of(self.estimator_, X, self.classes_, tags=tags)
        odds = scoring.log_odds(scores, self.floor_)
        features = X if self.calibrator_.needs_features else None
        with checks.known_rows():  # they are the estimator's, whatever they look like
            logits = torch.as_tensor(self.calibrator_.transform(odds / self.scale_, features))
        return torch.stack([torch.zeros_like(logits), logits], -1) if logits.ndim == 1 else logits

    @property
    def _for_tags(self) -> bool:
        """True if the method is one for tags, or the name of one."""
        if isinstance(self.method, Calibrator):
            return self.method.multilabel
        return plain_name(self.method) in {*TAG_CALIBRATORS, *TAG_CALIBRATORS.aliases}

    @property
    def _first(self) -> CalibratedClassifier:
        """The first classifier of an ensemble, or else this one."""
        members = vars(self).get("calibrated_classifiers_", [self])
        first: CalibratedClassifier = members[0]
        return first

    @property
    def n_features_in_(self) -> int:
        """Number of columns that the estimator was fitted on."""
        return int(self._first.estimator_.n_features_in_)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """Names of the columns that the estimator was fitted on."""
        return np.asarray(self._first.estimator_.feature_names_in_)

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
            tags.classifier_tags.multi_label = inner.classifier_tags.multi_label and self._for_tags
        return tags


def _calibrated_with(
    calibrator: Calibrator,
    estimator: Any,
    X: Any,
    scores: Scores,
    sample_weight: FloatArray | None,
    groups: NDArray[Any] | None,
) -> Arguments:
    """Fit the calibrator on scores, and return the attributes of a fit."""
    weight = None if sample_weight is None else sample_weight[scores.rows]
    has_scores = hasattr(estimator, "decision_function")
    floor = None if has_scores else scoring.floor_of(scores.logits, weight)
    logits = scoring.log_odds(scores.logits, floor, scores.known)
    same = isinstance(calibrator, (Identity, TagIdentity))
    scale = 1.0 if same else scoring.scale_of(logits, scores.labels, weight)
    kept = None if groups is None else groups[scores.rows]
    features = None
    if isinstance(calibrator, MetadataCalibrator):
        features = feature_rows(calibrator.metadata_arrays(X), scores.rows)
    calibrator.fit(
        logits / scale, scores.labels, features=features, sample_weight=weight, groups=kept
    )
    return {
        **{"estimator_": estimator, "classes_": scores.classes, "calibrator_": calibrator},
        **{"floor_": floor, "scale_": scale},
    }


def _member(
    template: CalibratedClassifier,
    estimator: Any,
    X: Any,
    y: NDArray[Any],
    fold: Fold,
    params: Arguments,
    beside: Arguments,
) -> CalibratedClassifier:
    """Fit an estimator on one part of a fold, and calibrate it on the other."""
    train, test = fold
    X_train, y_train = _safe_split(estimator, X, y, train)
    X_test, y_test = _safe_split(estimator, X, y, test, train)
    estimator.fit(X_train, y_train, **validation._check_method_params(X, params, train))
    known = np.arange(len(y_test))
    if y.ndim == 1:  # without what it has never seen
        known = np.flatnonzero(np.isin(y_test, scoring.classes_of(estimator, y_train)))
    kept = {name: None if v is None else v[test][known] for name, v in beside.items()}
    member: CalibratedClassifier = template.set_params(
        estimator=FrozenEstimator(estimator), ensemble=False
    )
    member.fit(_safe_indexing(X_test, known), y_test[known], **kept)
    return member


def _is_routing() -> bool:
    return bool(get_config().get("enable_metadata_routing", False))
