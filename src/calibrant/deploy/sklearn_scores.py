"""Scores of scikit-learn classifiers as logits, of classes or of tags."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import NotFittedError
from sklearn.utils import validation
from sklearn.utils.metaestimators import _safe_split
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted

from calibrant._core import checks
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray
from calibrant._core.chunks import MASKED_GAP
from calibrant._core.messages import comma_separated
from calibrant._core.probs import Zeros, logits_from_probs
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.scaling import TemperatureScaling

Arguments: TypeAlias = dict[str, Any]
Fold: TypeAlias = tuple[IntArray, IntArray]  # examples to fit on, and examples to score
_RESCALINGS = 5
"""Scales of scores to try, each 20 times the one before, or a twentieth of it."""


def _targets(y: Any) -> NDArray[Any]:
    """Return checked classes ``(n,)``, or labels 0 and 1 of tags ``(n, tags)``."""
    dense = y.toarray() if hasattr(y, "toarray") else np.asarray(y)
    tags = dense.ndim == 2 and dense.shape[1] > 1
    if tags and type_of_target(dense) == "multilabel-indicator":
        labels: NDArray[Any] = dense.astype(np.int64)
        if labels.min() < 0 or labels.max() > 1:
            got = comma_separated(map(str, np.unique(labels)))
            raise ValueError(f"y of tags must be 0 or 1 in each column, got {got}")
        if len(labels) >= checks.FEW and (labels.sum(1) == 1).all():
            checks.warn(
                "y has a single 1 in each row, as one-hot classes have, but its columns count as "
                "tags: for classes pass y.argmax(1)"
            )
        return labels
    classes = np.asarray(validation.column_or_1d(y, warn=True))
    validation.assert_all_finite(classes, input_name="y")
    check_classification_targets(classes)
    return classes


class Scores(NamedTuple):
    """Scores of examples; ``logits`` and ``known`` are ``(m, classes)``, ``labels`` ``(m,)``.

    A class is unknown where the estimator was not fitted on it; its logit is -inf. Of tags,
    ``logits`` are ``(m, tags, 2)``, of absence and presence, and ``known`` and ``labels`` ``(m,
    tags)``; a tag is unknown if all examples of the fit had the same label.
    """

    classes: NDArray[Any]
    rows: IntArray  # (m,) positions of the examples in the data
    logits: FloatArray
    known: BoolArray
    labels: IntArray

    def floor(self, weight: FloatArray | None) -> float:
        """Return what a probability of 0 counts as, where the logits are of probabilities."""
        counted = slice(None) if weight is None else weight > 0
        probs = np.exp(self.logits[counted])[self.known[counted]]
        zeros = Zeros.among(probs.reshape(len(probs), -1))
        return zeros.floor(self.logits.shape[-1])

    def raised(self, floor: float) -> Scores:
        """Return these with logits of known classes that are not below that of ``floor``."""
        known = self.known[..., None] if self.logits.ndim == 3 else self.known
        logits = np.where(known, np.maximum(self.logits, math.log(floor)), self.logits)
        return self._replace(logits=logits)


def _frozen_scores(estimator: Any, X: Any, y: NDArray[Any], fit_params: Arguments) -> Scores:
    """Return the scores of all examples by an estimator that is fitted already."""
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
    classes = _classes_of(estimator, y)
    labels, logits = _labels_of(classes, y), _as_logits(estimator, X, classes, tags=y.ndim == 2)
    known = np.ones((len(y), len(classes)), bool)
    return Scores(classes, np.arange(len(y)), logits, known, labels)


def _out_of_fold(
    estimator: Any,
    X: Any,
    y: NDArray[Any],
    fold: Fold,
    params: Arguments,
    classes: NDArray[Any],
    *,
    keep: bool,
) -> tuple[Any, FloatArray, BoolArray]:
    """Return a fit on the training part, its logits of the test part, and which of these it knows.

    The fit is None unless it is to be kept: models may be large to send between processes.
    """
    train, test = fold
    X_train, y_train = _safe_split(estimator, X, y, train)
    X_test, _ = _safe_split(estimator, X, y, test, train)
    fitted = estimator.fit(X_train, y_train, **validation._check_method_params(X, params, train))
    tags = y.ndim == 2
    logits = _as_logits(fitted, X_test, classes, tags=tags)
    known = ~np.isneginf(logits)
    if tags:  # each has scores, also where all labels were the same
        known = np.tile(y_train.min(0) < y_train.max(0), (len(logits), 1))
    return fitted if keep else None, logits, known


def _as_logits(estimator: Any, X: Any, classes: NDArray[Any], *, tags: bool) -> FloatArray:
    """Return scores as :class:`Scores` has them: -inf for classes that the estimator lacks."""
    if tags:
        return _tag_logits(estimator, X, len(classes))
    seen = np.asarray(getattr(estimator, "classes_", classes))
    logits = np.full((validation._num_samples(X), len(classes)), -np.inf)
    if len(seen) > 1:  # one class alone has no scores
        logits[:, _positions(classes, seen)] = _class_logits(estimator, X, seen)
    return logits


def _tag_logits(estimator: Any, X: Any, tags: int) -> FloatArray:
    """Return scores ``(n, tags, 2)``."""
    name, scores, stated = _scores_of(estimator, X)
    if isinstance(scores, list):  # an array for each tag, with a column for each label seen
        columns = zip(scores, estimator.classes_, strict=True)
        present = [
            np.asarray(p)[:, list(seen).index(1)] if 1 in seen else np.zeros(len(p))
            for p, seen in columns
        ]
        scores = np.stack(present, -1)
    scores = _checked_columns(name, np.asarray(scores), tags, "tag")
    if stated:
        return logits_from_probs(np.stack([1 - scores, scores], -1))
    return np.stack([np.zeros_like(scores), scores], -1)


def _class_logits(estimator: Any, X: Any, classes: NDArray[Any]) -> FloatArray:
    """Return scores ``(n, classes)``."""
    name, scores, stated = _scores_of(estimator, X)
    if not stated and len(classes) == 2 and scores.size == len(scores):
        return np.stack([np.zeros(len(scores)), scores.reshape(-1)], -1)
    if not stated and len(classes) > 2 and hasattr(estimator, "get_params"):
        # three classes have three pairs: the number of columns does not tell
        params = estimator.get_params().items()
        if any(key.endswith("decision_function_shape") and v == "ovo" for key, v in params):
            raise ValueError(f'{name} scores pairs of classes: set decision_function_shape="ovr"')
    scores = _checked_columns(name, np.asarray(scores), len(classes), "class")
    return logits_from_probs(scores) if stated else scores


def _scores_of(estimator: Any, X: Any) -> tuple[str, Any, bool]:
    """Return the name of what scores, the scores, and True if they are probabilities."""
    if hasattr(estimator, "decision_function"):
        scores = np.asarray(estimator.decision_function(X)).astype(np.float64, copy=False)
        return f"the decision_function of {type(estimator).__name__}", scores, False
    return f"the predict_proba of {type(estimator).__name__}", estimator.predict_proba(X), True


def _checked_columns(name: str, scores: NDArray[Any], count: int, each: str) -> NDArray[Any]:
    """Return scores ``(n, count)``, or raise."""
    if scores.ndim != 2 or scores.shape[1] != count:
        raise ValueError(f"{name} must be (n, {count}), a column per {each}, got {scores.shape}")
    return scores


def _log_odds(logits: FloatArray) -> FloatArray:
    """Return the log-odds for two classes and tags, else logits."""
    return logits[..., 1] - logits[..., 0] if logits.shape[-1] == 2 else logits


def _scale_of(logits: FloatArray, labels: IntArray, weight: FloatArray | None) -> float:
    """Return the divisor of scores that brings their best temperature into the usual bounds.

    It is 1 if there is no best temperature: all examples are right, or worse than chance. All
    labels of tags are examples here. Scores so far apart that classes would count as masked are
    brought nearer in any case.
    """
    gaps = np.abs(logits) if logits.ndim == 1 else logits.max(-1, keepdims=True) - logits
    widest = float(np.max(gaps, where=np.isfinite(gaps), initial=0))
    least = 10 * widest / MASKED_GAP if widest >= MASKED_GAP else 1.0
    if labels.ndim == 2:
        kept = labels != IGNORED
        weight = None if weight is None else np.broadcast_to(weight[:, None], kept.shape)[kept]
        logits, labels = logits[kept], labels[kept]
    wrong = (logits > 0 if logits.ndim == 1 else logits.argmax(-1)) != labels
    if not (wrong if weight is None else wrong & (weight > 0)).any():
        return least
    scale = least
    for _ in range(_RESCALINGS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit itself warns
            fitted = TemperatureScaling().fit(logits / scale, labels, sample_weight=weight)
        temperature = float(fitted.temperature_)
        if 1.01 * BOUNDS[0] < temperature < 0.99 * BOUNDS[1]:
            return scale
        scale *= BOUNDS[0] if temperature < 1 else BOUNDS[1]
    return least


def _usable(scores: Scores, *, masks: bool) -> Scores:
    """Leave out, with a warning, examples that were scored by a fit without their class.

    Examples with other unknown classes stay if the method allows masked classes. Labels of
    unknown tags are ignored.
    """
    names = comma_separated(map(str, scores.classes[~scores.known.all(0)]))
    if scores.labels.ndim == 2:
        if scores.known.all():
            return scores
        checks.warn(
            f"{(~scores.known).sum():,} of {scores.known.size:,} labels were scored by a fit on "
            f"examples that all have, or all lack, one of these tags: {names}. They are left out "
            "of the calibration"
        )
        logits = np.where(scores.known[..., None], scores.logits, 0)
        return scores._replace(logits=logits, labels=np.where(scores.known, scores.labels, IGNORED))
    own = scores.known[np.arange(len(scores.rows)), scores.labels]
    kept = own & (True if masks else scores.known.all(1))
    if kept.all():
        return scores
    problem = (
        f"{(~kept).sum():,} of {len(own):,} examples were scored without one of these classes in "
        f"the training part of their fold: {names}"
    )
    if not kept.any():
        remedy = "use folds that have every class, or a method that allows masked classes (ts)"
        raise ValueError(f"{problem}. None is left to calibrate on: {remedy}")
    checks.warn(f"{problem}. They are left out of the calibration")
    columns: Any = (column[kept] for column in scores[1:])
    return Scores(scores.classes, *columns)


def _classes_of(estimator: Any, y: NDArray[Any]) -> NDArray[Any]:
    """Return the classes of a fitted estimator, in the order of its scores; of tags, numbers."""
    if y.ndim == 2:
        return np.arange(y.shape[1])
    classes = np.asarray(getattr(estimator, "classes_", np.unique(y)))
    if len(classes) < 2:
        raise ValueError(f"y must have two classes or more, got one class, {str(classes[0])!r}")
    return classes


def _labels_of(classes: NDArray[Any], y: NDArray[Any]) -> IntArray:
    """Return the positions of classes, or the labels of tags as they are."""
    return y if y.ndim == 2 else _positions(classes, y)


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
