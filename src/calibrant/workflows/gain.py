"""What a calibrator gains: differences between pairs of losses, of the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, as_weight
from calibrant._core.chunks import EstimandChoice
from calibrant.calibrators.base import Calibrator
from calibrant.data.dataset import Split
from calibrant.workflows.effect import KeptLosses, calibrated_sums

POWER, MAX_RATIO = 0.8, 30.0
"""Probability with which a gain is seen on the examples that it needs; and the share of its
standard error beyond which it is none to speak of."""


@dataclass(frozen=True)
class LossReduction:
    """By how much calibration lowers the log loss of an example, on average.

    The interval is that of the differences between pairs of losses, of the same examples.
    """

    value: float
    low: float
    high: float
    needed: int | None
    """Examples that would probably show a gain of this size; None if there is none to show."""

    def __str__(self) -> str:
        value, low, high = self.value, self.low, self.high
        if value < 0:
            value, low, high = -value, -high, -low
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"


class PairedLosses(NamedTuple):
    """Examples after calibration ``(n,)``, and how much lower the loss of each is than before.

    Examples of one ``unit`` depend on each other: tags of an example, tokens of a text and members
    of a group.
    """

    top: FloatArray
    correct: BoolArray
    lower: FloatArray
    weight: FloatArray | None
    unit: IntArray

    def reduction(self, level: float) -> LossReduction:
        """Return by how much losses are lower on average, with an interval by units."""
        lower, weight = self.lower, self.weight
        share = np.full(lower.size, 1 / lower.size) if weight is None else weight / weight.sum()
        _, number = np.unique(self.unit, return_inverse=True)
        mean, units = float(share @ lower), int(number.max()) + 1
        by_unit = np.bincount(number, share * (lower - mean))
        if units < 2:
            return LossReduction(mean, -math.inf, math.inf, None)
        error = math.sqrt(float(by_unit @ by_unit) * units / (units - 1))
        reach = float(stdtrit(units - 1, (1 + level) / 2))
        # to be seen with a probability of 0.8, a gain must be so many of its standard errors
        ratio = (reach + float(ndtri(POWER))) * error / mean if mean > 0 else math.inf
        needed = math.ceil(lower.size * ratio**2) if ratio < MAX_RATIO else None
        return LossReduction(mean, mean - reach * error, mean + reach * error, needed)


def paired_losses(calibrators: Sequence[Calibrator], split: Split) -> PairedLosses:
    """Return the losses of a split; one calibrator serves all rows, several serve a fold each."""
    estimand: EstimandChoice = "multilabel" if calibrators[0].multilabel else "top_label"
    losses, stated = KeptLosses(estimand), KeptLosses(estimand)
    calibrated_sums(calibrators, split, losses, before=stated)
    top, correct, after = losses.joined()
    kept, weight = split.labels != IGNORED, None
    if split.weights is not None:
        weight = as_weight(split.weights, kept.shape).reshape(kept.shape)[kept]
    row = np.nonzero(kept)[0]
    unit = row if split.groups is None else split.groups[row]
    return PairedLosses(top, correct, stated.joined()[2] - after, weight, unit)
