"""Curves of a fitted calibrator over the margin or the confidence, as data for plots."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from calibrant._core.checks import (
    Features,
    FloatArray,
    IntArray,
    Logits,
    Values,
    as_float64,
    as_scores,
    as_values,
)
from calibrant._core.chunks import as_tensor
from calibrant._core.showing import as_axes
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.records import TemperatureCalibrator
from calibrant.metrics.reductions import margins

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 60
"""Confidences at which a map is drawn without examples."""
_CLASSES = 24  # classes, evenly spaced, whose maps are looked at without examples
_MAX_ODDS = 7.0  # log-odds up to which a map is drawn without examples: a confidence of 99.9 %


class MarginTemperature(NamedTuple):
    """Temperatures in bins of equally many examples by margin, each ``(bins,)``.

    ``low`` and ``high`` hold the middle nine tenths of the temperatures of a group.
    """

    margin: FloatArray
    temperature: FloatArray
    low: FloatArray
    high: FloatArray

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the curve as by :func:`calibrant.show.figures.temperature_plot`."""
        return as_axes(self, ax, **options)


class MarginChange(NamedTuple):
    """Mean change of the confidence in bins by margin, each ``(bins,)``."""

    margin: FloatArray
    change: FloatArray

    def plot(self, ax: Axes | None = None, *, label: str = "calibrated") -> Axes:
        """Draw the curve as by :func:`calibrant.show.figures.adjustment_plot`."""
        return as_axes(self, ax, label=label)


def margin_temperature(
    calibrator: TemperatureCalibrator, logits: Values, *, bins: int = 30
) -> MarginTemperature:
    """Temperature against margin (SMART, figure 16).

    >>> from calibrant.calibrators import Identity
    >>> logits = np.random.default_rng(0).normal(size=(90, 4))
    >>> margin_temperature(Identity().fit(logits, logits.argmax(-1)), logits, bins=2).temperature
    array([1., 1.])
    """
    margin, parts = _by_margin(logits, bins)
    scores = as_scores(logits)
    result = as_float64(calibrator.temperature(scores)).reshape(-1)
    middle, low, high = (
        np.array([np.quantile(result[part], share) for part in parts])
        for share in (0.5, 0.05, 0.95)
    )
    return MarginTemperature(np.array([margin[part].mean() for part in parts]), middle, low, high)


def margin_change(calibrator: Calibrator, logits: Values, *, bins: int = 30) -> MarginChange:
    """Mean change of the confidence by a calibrator, by margin (SMART, figure 15 f).

    >>> from calibrant.calibrators import Identity
    >>> logits = np.random.default_rng(0).normal(size=(90, 4))
    >>> margin_change(Identity().fit(logits, logits.argmax(-1)), logits, bins=2).change
    array([0., 0.])
    """
    margin, parts = _by_margin(logits, bins)
    scores = as_scores(logits)
    wide = as_tensor(scores).double()
    probs = wide.sigmoid() if wide.ndim == 1 else wide.softmax(-1)  # of class 1 for log-odds
    after_fit: Any = calibrator.predict_proba(scores)
    before, after = (
        np.maximum(p, 1 - p) if wide.ndim == 1 else p.max(-1)
        for p in (as_float64(probs), as_float64(after_fit))
    )
    change = (after - before).reshape(-1)
    return MarginChange(*(np.array([x[p].mean() for p in parts]) for x in (margin, change)))


def _by_margin(logits: Values, bins: int) -> tuple[FloatArray, list[IntArray]]:
    """Margins of all rows, and bins of equally many of those that are finite."""
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    margin = margins(logits).reshape(-1)
    order = np.argsort(margin, kind="stable")[: int(np.isfinite(margin).sum())]
    return margin, np.array_split(order, min(bins, order.size)) if order.size else []


class TemperatureBounds(NamedTuple):
    """Least and largest temperature, each of the shape of the margins."""

    low: FloatArray
    high: FloatArray


def margin_bounds(margin: Values, confidence: Values, classes: int) -> TemperatureBounds:
    r"""Temperatures that can give an example of known margin a wanted confidence.

    .. math::
        \frac{m}{\log\frac{K - 1}{S}} \le T \le \frac{m}{-\log S}, \qquad S = \frac1p - 1

    (SMART, appendix A.1): the other classes are at least :math:`m` below the top. There is no
    upper bound for :math:`p \le 1/2`. ``confidence`` is between ``1 / classes`` and 1.

    >>> margin_bounds([1.0, 10.0], 0.8, classes=10)
    TemperatureBounds(low=array([0.279..., 2.790...]), high=array([0.721..., 7.213...]))
    """
    gaps = as_values(margin, "margin")
    wanted = np.broadcast_to(np.asarray(confidence, dtype=np.float64), gaps.shape)
    if (gaps < 0).any():
        raise ValueError(f"margin must not be negative, got {float(gaps.min()):g}")
    if not ((wanted > 1 / classes) & (wanted < 1)).all():
        got = f"{float(wanted.min()):g} to {float(wanted.max()):g}"
        raise ValueError(f"confidence must lie between 1/{classes} and 1, got {got}")
    odds = 1 / wanted - 1
    bounded = odds < 1
    high = np.full(gaps.shape, np.inf)
    np.divide(gaps, -np.log(odds), out=high, where=bounded)
    return TemperatureBounds(gaps / np.log((classes - 1) / odds), high)


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


def learned_map(
    calibrator: Calibrator, logits: Values | None = None, *, features: Features | None = None
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
    if calibrator.classes > 2 and not calibrator.multilabel:
        classes = calibrator.classes
        tops = np.unique(np.linspace(0, classes - 1, _CLASSES).astype(np.int64))
        odds = np.linspace(-math.log(classes - 1), _MAX_ODDS, POINTS)
        rows, confidence = np.zeros((POINTS, classes)), []
        for top in tops.tolist():
            rows[:, top] = odds + math.log(classes - 1)
            confidence.append(_probs(calibrator, rows).max(1))
            rows[:, top] = 0
        return _summary(expit(odds), np.stack(confidence, 1), "", "nine tenths of the classes")
    odds = np.linspace(-_MAX_ODDS, _MAX_ODDS, 2 * POINTS + 1)
    if calibrator.multilabel:
        after = _probs(calibrator, np.repeat(odds[:, None], calibrator.classes, 1))
        return _summary(expit(odds), after, "P(tag)", "nine tenths of the tags")
    one = calibrator.classes == 1
    after = _probs(calibrator, odds if one else np.stack([np.zeros_like(odds), odds], 1))
    return _summary(expit(odds), after if one else after[:, 1:], "P(y = 1)", "")


def check_drawable(
    calibrator: Calibrator, logits: Values | None, features: Features | None
) -> None:
    """Raise unless a calibrator is fitted, and has the inputs that it needs."""
    name = type(calibrator).__name__
    if not calibrator.classes:
        raise RuntimeError(f"this {name} is not fitted: call fit(logits, labels) first")
    if calibrator.needs_features and (logits is None or features is None):
        raise ValueError(f"{name} needs features, too: pass logits and features= of some examples")


def margin_rows(classes: int) -> FloatArray:
    """Logits of examples whose other classes are equally probable, with margins from 0 on."""
    margin = np.linspace(0, _MAX_ODDS + math.log(max(classes, 2)), POINTS)
    if classes == 1:
        return margin
    rows = np.zeros((POINTS, classes))
    rows[:, 0] = margin
    return rows


def _probs(calibrator: Calibrator, rows: FloatArray) -> FloatArray:
    """Calibrated probabilities ``(rows, columns)``."""
    probs = np.asarray(calibrator.predict_proba(rows), dtype=np.float64)
    return probs.reshape(len(rows), -1)


def _summary(before: FloatArray, after: FloatArray, probability: str, spread: str) -> LearnedMap:
    """Median and nine tenths of calibrated confidences ``(points, columns)``."""
    low, middle, high = np.quantile(after, [0.05, 0.5, 0.95], axis=1)
    return LearnedMap(before, middle, low, high, probability, spread)


def _of_examples(calibrator: Calibrator, logits: Logits, features: Features | None) -> LearnedMap:
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
