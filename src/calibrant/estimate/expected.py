"""Metrics of a batch from the weight and the events in each cell, for many draws at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.estimate.cells import CELLS, Cells


class FilledCells(NamedTuple):
    """Cells that have examples, by rising log-odds; ``(cells,)`` each."""

    number: IntArray
    weight: FloatArray
    claimed: FloatArray  # mean probability of the event
    predicted: BoolArray  # True if the event is predicted: class 1 of two, or always
    accepted: BoolArray  # True if the confidence reaches the threshold
    two_classes: bool

    def right(self, events: FloatArray) -> FloatArray:
        """Weight of right answers, ``(..., cells)``, from that of the events."""
        return np.where(self.predicted, events, self.weight - events)


def filled_cells(cells: Cells, two_classes: bool) -> FilledCells:
    """Return the cells that have examples."""
    used = np.flatnonzero(cells.weight > 0)
    used = used[np.argsort(used % CELLS, kind="stable")]
    predicted = (used % CELLS >= CELLS // 2) | (not two_classes)
    weight = cells.weight[used]
    return FilledCells(
        used, weight, cells.claimed[used] / weight, predicted, used >= CELLS, two_classes
    )


def share_metrics(events: FloatArray, filled: FilledCells) -> dict[str, FloatArray]:
    """Return the accuracy, and coverage and error of the answers that reach the threshold.

    ``events`` ``(..., cells)`` is the weight of the events in each cell.
    """
    right, weight = filled.right(events), filled.weight
    accepted = np.full(right.shape[:-1], weight[filled.accepted].sum())
    return {
        "accuracy": right.sum(-1) / weight.sum(),
        "coverage": accepted / weight.sum(),
        "accepted_error": _ratio(accepted - right[..., filled.accepted].sum(-1), accepted),
    }


def two_class_metrics(events: FloatArray, filled: FilledCells) -> dict[str, FloatArray]:
    """Return the metrics of two classes; ``events`` as in :func:`share_metrics`."""
    others, claimed, total = filled.weight - events, filled.claimed, filled.weight.sum()
    tiny = np.finfo(np.float64).tiny
    surprise, otherwise = -np.log(np.maximum([claimed, 1 - claimed], tiny))
    tp, fp = (x[..., filled.predicted].sum(-1) for x in (events, others))
    fn, tn = (x[..., ~filled.predicted].sum(-1) for x in (events, others))
    return {
        "brier": 2 * (events * (1 - claimed) ** 2 + others * claimed**2).sum(-1) / total,
        "nll": (events * surprise + others * otherwise).sum(-1) / total,
        "precision": _ratio(tp, tp + fp),
        "recall": _ratio(tp, tp + fn),
        "f1": _ratio(2 * tp, 2 * tp + fp + fn),
        "auroc": expected_auroc(events, others),
        "true_positives": tp,
        "false_positives": fp,
        "false_negatives": fn,
        "true_negatives": tn,
    }


def expected_auroc(events: FloatArray, others: FloatArray) -> FloatArray:
    """Probability that an event has a larger score than an example without; ties count half.

    >>> float(expected_auroc(np.array([0.0, 1.0]), np.array([1.0, 1.0])))
    0.75
    """
    below = np.cumsum(others, -1) - others / 2
    return _ratio((events * below).sum(-1), events.sum(-1) * others.sum(-1))


def _ratio(top: FloatArray, bottom: FloatArray) -> FloatArray:
    """Return quotients, NaN where there is nothing to divide by."""
    top, bottom = np.asarray(top), np.asarray(bottom)
    quotients = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=quotients, where=bottom > 0)
    return quotients
