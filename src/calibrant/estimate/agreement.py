r"""Comparison of the labels of a batch with the accuracy that its predictions claim.

Labelled answers :math:`i` with weights :math:`w_i`, which add up to one, are right
(:math:`y_i = 1`) or not; the reference, or without one the confidence, claims that they are with
the probability :math:`q_i`. Claims are allowed to be off by two points, towards what the labels
show. The sum of :math:`w_i (y_i - q_i)` is then compared with its standard error if the claims are
true: that of the outcomes, and that of the reference, which is a sample as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from calibrant.estimate.cells import event_cell, sums_by
from calibrant.estimate.predictions import NEVER, Summary
from calibrant.estimate.strata import Strata

TOLERANCE = 0.02
"""Error of a claim that is no contradiction, however many labels show it."""


class Agreement(NamedTuple):
    """Accuracy as claimed and as labels show it, and the p-value of their difference."""

    claimed: float
    shown: float
    p_value: float


def compare_labels(batch: Summary, strata: Strata | None) -> Agreement:
    """Compare the labels of a batch with a reference, or with its confidences if that is None."""
    rows = batch.rows
    cell = event_cell(rows, NEVER)
    event = rows.event if strata is None else strata.adjusted(rows.event, cell)
    sign = np.where((rows.predicted == 1) | (not batch.two_classes), 1.0, -1.0)
    claimed = np.where(sign > 0, event, 1 - event)
    weight = batch.weight / batch.inclusion
    weight = weight / weight.sum()
    expected, shown = float(weight @ claimed), float(weight @ (rows.label == rows.predicted))
    direction = 1 if shown > expected else -1
    allowed = np.clip(claimed + direction * TOLERANCE, 0, 1)
    variance = weight**2 @ (allowed * (1 - allowed))
    if strata is not None:
        moved = sums_by(strata.stratum[cell], weight * sign, strata.size.size)
        variance += moved**2 @ strata.variance()
    half_a_label = weight @ weight / 2  # correction of continuity
    excess = max(direction * (shown - weight @ allowed) - half_a_label, 0.0)
    p_value = 2 * ndtr(-excess / math.sqrt(max(variance, 1e-12)))
    return Agreement(expected, shown, float(p_value))
