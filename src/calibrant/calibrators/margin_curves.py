"""Temperatures and changes of the confidence by margin, as data for plots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from calibrant._core.checks import FloatArray, IntArray, Values, as_float64, as_scores
from calibrant._core.chunks import as_tensor
from calibrant._core.showing import as_axes
from calibrant.metrics.reductions import margins

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class HasTemperature(Protocol):
    """A calibrator that divides by a temperature."""

    def temperature(self, logits: Any) -> Any:
        """Temperature of each row."""


class HasProbabilities(Protocol):
    """Any calibrator."""

    def predict_proba(self, logits: Any) -> Any:
        """Calibrated probabilities."""


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
    calibrator: HasTemperature, logits: Values, *, bins: int = 30
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


def margin_change(calibrator: HasProbabilities, logits: Values, *, bins: int = 30) -> MarginChange:
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
    before, after = (
        np.maximum(p, 1 - p) if wide.ndim == 1 else p.max(-1)
        for p in map(as_float64, (probs, calibrator.predict_proba(scores)))
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
