"""A scikit-learn classifier with calibrated probabilities, around any other."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch.nn.functional import logsigmoid

from calibrant._core import checks
from calibrant._core.checks import FloatArray
from calibrant._core.messages import needed, plain_name
from calibrant.calibrators.base import Calibrator, feature_rows
from calibrant.calibrators.features import Multicalibration
from calibrant.calibrators.features.multicalibration import metadata_arrays
from calibrant.calibrators.registry import TAG_CALIBRATORS, calibrators_for, make_calibrator
from calibrant.calibrators.scaling import Identity
from calibrant.calibrators.tags import TagIdentity
from calibrant.slices import Slices, find_slices

with needed("this needs scikit-learn 1.6 or newer", "'calibrant[sklearn]'"):
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
        check_random_state,
        get_tags,
        metadata_routing,
        validation,
    )
    from sklearn.utils.parallel import Parallel, delayed
    from sklearn.utils.validation import check_is_fitted

    from calibrant.deploy import sklearn_scores as scoring
    from calibrant.deploy.sklearn_scores import Arguments, Fold, Scores

if TYPE_CHECKING:
    from typing_extensions import Self


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
        True keeps the estimators of the folds, in place of one that is fitted on all data, and
        averages their calibrated probabilities. It makes no difference to a fitted estimator.
    n_jobs : int, optional
        Folds that are fitted at the same time.
    random_state : int, RandomState or None
        Seed that shuffles examples into folds, and seed of the method if it has one. None makes
        folds in the order of the examples.

    Attributes
    ----------
    estimators_ : list of classifiers
        One, fitted on all data unless it was fitted before, or those of the folds of an ensemble.
    estimator_ : classifier
        The only one; an ensemble has none.
    calibrator_ : Calibrator
        Fitted on the scores of all examples; for two classes on one logit, the log-odds of
        ``classes_[1]``.
    classes_ : (classes,) array
        Of tags, their numbers.
    scale_ : float
        Divisor of scores: 1, unless those of ``decision_function`` have their best temperature
        outside of [0.05, 20].
    n_features_in_, feature_names_in_
        Those of the estimators, if they have them.

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
    0.86
    """

    estimators_: list[Any]
    calibrator_: Calibrator
    classes_: NDArray[Any]
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
        y = scoring._targets(y)
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
            estimators = [estimator]
            scores = scoring._frozen_scores(estimator, X, y, fit_params)
        else:
            X, y = validation.indexable(X, y)
            params, split = self._routed(estimator, sample_weight, groups, fit_params)
            folds, masks = self._folds(X, y, groups, split), calibrator.accepts_masked
            estimators, scores = self._cross_fitted(X, y, folds, params, masks=masks)
            scores = scoring._usable(scores, masks=masks)
            if groups is None and len(np.unique(scores.rows)) < len(scores.rows):
                groups = np.arange(len(y))  # copies of an example stay together
        scale = _fitted_scale(calibrator, estimators[0], X, scores, sample_weight, groups)
        self.estimators_, self.classes_ = estimators, scores.classes
        self.calibrator_, self.scale_ = calibrator, scale
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
            if isinstance(calibrator, Multicalibration):
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
        self, X: Any, y: NDArray[Any], folds: list[Fold], params: Arguments, *, masks: bool
    ) -> tuple[list[Any], Scores]:
        """Return the estimators to keep, and the out-of-fold scores of all examples.

        Of an ensemble, those that lack a class are left out, unless ``masks`` are allowed.
        """
        whole = [] if self.ensemble else [clone(self._estimator()).fit(X, y, **params)]
        classes = scoring._classes_of(whole[0] if whole else None, y)
        score = delayed(partial(scoring._out_of_fold, keep=self.ensemble))
        parts = Parallel(n_jobs=self.n_jobs)(
            score(clone(self._estimator()), X, y, fold, params, classes) for fold in folds
        )
        fitted, logits, known = zip(*parts, strict=True)
        rows = np.concatenate([np.arange(len(y))[test] for _, test in folds])
        labels = scoring._labels_of(classes, y)[rows]
        scores = Scores(classes, rows, np.concatenate(logits), np.concatenate(known), labels)
        enough = [y.ndim == 2 or (k.any() if masks else k.all()) for k in known]
        return whole or [one for one, kept in zip(fitted, enough, strict=True) if kept], scores

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
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> FloatArray:
        """Return logarithms of the calibrated probabilities, without underflow."""
        check_is_fitted(self)
        logs = [self._log_probs(estimator, X) for estimator in self.estimators_]
        return np.asarray(np.logaddexp.reduce(logs) - math.log(len(logs)))

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable classes; most methods keep the estimator's prediction.

        Of tags, 1 for each that is more probable than not.
        """
        probs = self.predict_proba(X)  # first, since it checks that there was a fit
        if self.calibrator_.multilabel:
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
        if self.calibrator_.multilabel:
            raise ValueError("subgroups need one class per example: take one tag at a time")
        labels = scoring._labels_of(self.classes_, scoring._targets(y))
        data = {"probs": probs, "labels": labels, "class_names": self.classes_.astype(str)}
        metadata = None if issparse(X) else X
        return find_slices(data, metadata=metadata, columns=columns, **options)

    def _log_probs(self, estimator: Any, X: Any) -> FloatArray:
        tags, features = self.calibrator_.multilabel, None
        odds = scoring._log_odds(scoring._as_logits(estimator, X, self.classes_, tags=tags))
        if self.calibrator_.needs_features:
            features = X
        with checks.known_rows():  # they are the estimator's, whatever they look like
            logits = torch.as_tensor(self.calibrator_.transform(odds / self.scale_, features))
        if tags:
            return np.asarray(logsigmoid(logits).numpy())
        both = torch.stack([torch.zeros_like(logits), logits], -1) if logits.ndim == 1 else logits
        return np.asarray(both.log_softmax(-1).numpy())

    @property
    def estimator_(self) -> Any:
        """The fitted estimator, where it is the only one."""
        if len(vars(self).get("estimators_", ())) != 1:
            raise AttributeError("there is no single estimator_: see estimators_ of an ensemble")
        return self.estimators_[0]

    @property
    def n_features_in_(self) -> int:
        """Number of columns that the estimator was fitted on."""
        return int(self.estimators_[0].n_features_in_)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """Names of the columns that the estimator was fitted on."""
        return np.asarray(self.estimators_[0].feature_names_in_)

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
            if isinstance(self.method, Calibrator):
                for_tags = self.method.multilabel
            else:
                for_tags = plain_name(self.method) in {*TAG_CALIBRATORS, *TAG_CALIBRATORS.aliases}
            tags.classifier_tags.multi_class = inner.classifier_tags.multi_class
            tags.classifier_tags.multi_label = inner.classifier_tags.multi_label and for_tags
        return tags


def _fitted_scale(
    calibrator: Calibrator,
    estimator: Any,
    X: Any,
    scores: Scores,
    sample_weight: FloatArray | None,
    groups: NDArray[Any] | None,
) -> float:
    """Fit the calibrator on scores of an estimator, and return what they were divided by."""
    weight = None if sample_weight is None else sample_weight[scores.rows]
    kept = None if groups is None else groups[scores.rows]
    floor, scale = 0.0, 1.0
    if isinstance(calibrator, (Identity, TagIdentity)):
        pass  # probabilities stay as they are
    elif hasattr(estimator, "decision_function"):
        scale = scoring._scale_of(scoring._log_odds(scores.logits), scores.labels, weight)
    else:
        floor = scores.floor(weight)
        scores = scores.raised(floor)
    features = None
    if isinstance(calibrator, Multicalibration):
        features = feature_rows(metadata_arrays(X, calibrator.columns or ()), scores.rows)
    logits = scoring._log_odds(scores.logits) / scale
    calibrator.fit(logits, scores.labels, features=features, sample_weight=weight, groups=kept)
    calibrator.set_floor(floor)
    return scale


def _is_routing() -> bool:
    return bool(get_config().get("enable_metadata_routing", False))
