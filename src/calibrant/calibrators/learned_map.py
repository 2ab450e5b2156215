"""The map from confidence to calibrated confidence that a calibrator has learned, as data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import Features, FloatArray, Logits, Values, as_float64, as_scores
from calibrant._core.chunks import as_tensor
from calibrant._core.showing import as_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 60
"""Confidences at which a map is drawn without examples."""
CLASSES = 24
"""Classes, evenly spaced, whose maps are looked at without examples."""
ODDS = 7.0
"""Log-odds up to which a map is drawn without examples: a confidence of 99.9 %."""


class LearnedMap(NamedTuple):
    """Confidence after calibration against that before; the arrays are ``(points,)``."""

    before: FloatArray
    after: FloatArray
    """Median."""
    low: FloatArray
    high: FloatArray
    """Ends of the middle nine tenths."""
    probability: str
    """Name of the confidence where it is that of one event, such as P(y = 1), else empty."""
    spread: str
    """What the median and the nine tenths are of."""

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the map as by :func:`calibrant.show.figures.map_plot`, with its options."""
        return as_axes(self, ax, **options)


class Fitted(Protocol):
    """The part of a calibrator that a map is made of."""

    multilabel: bool
    needs_features: bool

    @property
    def classes(self) -> int:
        """Number of classes; 1 if fitted on log-odds, 0 before a fit."""

    def predict_proba(self, logits: Any, features: Any = None) -> Any:
        """Calibrated probabilities."""


def learned_map(
    calibrator: Fitted, logits: Values | None = None, *, features: Features | None = None
) -> LearnedMap:
    """Confidence after calibration against that before.

    With ``logits``, in bins of equally many examples: the median and the middle nine tenths of
    their calibrated confidences. Without, for examples whose other classes are equally probable,
    over some classes on top. Of two classes it is P(y = 1), of tags the probability of each.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [2.0, 0.0]] * 40)
    >>> fitted = TemperatureScaling().fit(logits, [0, 1, 1, 0, 0] * 40)
    >>> curve = learned_map(fitted)
    >>> curve.probability, bool(curve.after[-1] < curve.before[-1])
    ('P(y = 1)', True)
    """
    check_drawable(calibrator, logits, features)
    if logits is not None:
        return _of_examples(calibrator, as_scores(logits), features)
    if calibrator.multilabel:
        odds = _odds()
        after = _probs(calibrator, np.repeat(odds[:, None], calibrator.classes, 1))
        return _summary(_sigmoid(odds), after, "P(tag)", "nine tenths of the tags")
    if calibrator.classes <= 2:
        odds = _odds()
        one = calibrator.classes == 1
        after = _probs(calibrator, odds if one else np.stack([np.zeros_like(odds), odds], 1))
        return _summary(_sigmoid(odds), after if one else after[:, 1:], "P(y = 1)", "")
    before, tops = _one_against_equals(calibrator)
    return _summary(before, tops, "", "nine tenths of the classes")


def check_drawable(calibrator: Fitted, logits: Values | None, features: Features | None) -> None:
    """Raise unless a calibrator is fitted, and has the inputs that it needs."""
    name = type(calibrator).__name__
    if not calibrator.classes:
        raise RuntimeError(f"this {name} is not fitted: call fit(logits, labels) first")
    if calibrator.needs_features and (logits is None or features is None):
        raise ValueError(f"{name} needs features, too: pass logits and features= of some examples")


def margin_rows(classes: int) -> FloatArray:
    """Logits of examples whose other classes are equally probable, with margins from 0 on."""
    margin = np.linspace(0, ODDS + math.log(max(classes, 2)), POINTS)
    if classes == 1:
        return margin
    rows = np.zeros((POINTS, classes))
    rows[:, 0] = margin
    return rows


def _odds() -> FloatArray:
    return np.linspace(-ODDS, ODDS, 2 * POINTS + 1)


def _sigmoid(odds: FloatArray) -> FloatArray:
    return 1 / (1 + np.exp(-odds))


def _probs(calibrator: Fitted, rows: FloatArray) -> FloatArray:
    """Calibrated probabilities ``(rows, columns)``."""
    probs = np.asarray(calibrator.predict_proba(rows), dtype=np.float64)
    return probs.reshape(len(rows), -1)


def _one_against_equals(calibrator: Fitted) -> tuple[FloatArray, FloatArray]:
    """Confidences before ``(points,)`` and after ``(points, tops)``, for some classes on top."""
    classes = calibrator.classes
    tops = np.unique(np.linspace(0, classes - 1, CLASSES).astype(np.int64))
    odds = np.linspace(-math.log(classes - 1), ODDS, POINTS)
    rows = np.zeros((POINTS, classes))
    after = []
    for top in tops.tolist():
        rows[:, top] = odds + math.log(classes - 1)
        after.append(_probs(calibrator, rows).max(1))
        rows[:, top] = 0
    return _sigmoid(odds), np.stack(after, 1)


def _summary(before: FloatArray, after: FloatArray, probability: str, spread: str) -> LearnedMap:
    """Median and nine tenths of calibrated confidences ``(points, columns)``."""
    low, middle, high = np.quantile(after, [0.05, 0.5, 0.95], axis=1)
    return LearnedMap(before, middle, low, high, probability, spread)


def _of_examples(calibrator: Fitted, logits: Logits, features: Features | None) -> LearnedMap:
    probs = calibrator.predict_proba(logits, features)
    wide = as_tensor(logits).double()
    one = logits.ndim == 1 or calibrator.multilabel
    before = wide.sigmoid() if one else wide.softmax(-1)
    two = logits.ndim > 1 and logits.shape[-1] == 2 and not calibrator.multilabel
    event = "P(tag)" if calibrator.multilabel else "P(y = 1)" if one or two else ""

    def claimed(values: Tensor) -> FloatArray:
        some = values if one else values[..., 1] if two else values.amax(-1)
        return as_float64(some).reshape(-1)

    x, y = claimed(before), claimed(torch.as_tensor(probs))
    order = np.argsort(x, kind="stable")
    parts = np.array_split(order, min(POINTS, order.size))
    low, middle, high = np.array([np.quantile(y[p], [0.05, 0.5, 0.95]) for p in parts]).T
    centres = np.array([x[p].mean() for p in parts])
    return LearnedMap(centres, middle, low, high, event, "nine tenths of the examples")


def plot(
    calibrator: Any,
    logits: Values | None = None,
    *,
    features: Features | None = None,
    ax: Axes | None = None,
    label: str = "",
) -> Axes:
    """Draw what was learned: temperature by margin if it varies, else confidence by confidence.

    Parameters
    ----------
    logits : (..., classes) or (n,), optional
        Examples to draw it for: the line is their median, and nine tenths of them are shaded.
        Without, examples are imagined whose other classes are equally probable.
    features : (..., width), optional
        Of the examples, for methods that need them.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    label : str
        Name of the line; that of the method by default.
    """
    return as_axes(calibrator, logits, features=features, ax=ax, label=label)
