r"""Estimates of metrics with intervals, from draws of the labels that are not known.

A draw first takes accuracies of the strata that agree with the labelled examples, then the number
of events in each cell from binomial distributions, and adds the labels that are known. Its metrics
are those that the batch might have. Ends of intervals are quantiles over the draws: they hold for
the metrics that would be measured on this batch if all of its labels came.

A shift of size :math:`\rho` that cannot be seen (see :mod:`calibrant.estimate.shifts`) may change
the accuracy by :math:`\sqrt{\rho}` standard deviations of an outcome. Tilted draws have such a
change, in proportion to the variance :math:`p (1 - p)`: towards wrong answers, right answers, and
(for two classes) each of the classes. The interval is the hull of all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.estimate.cells import CELLS, SCORES, _Cells, _effective, _Strata, _sums_by
from calibrant.estimate.prediction_summary import _PredictionSummary
from calibrant.metrics.intervals import Estimate

DRAWS = 500
RUN = 50
"""Draws that are made at a time."""


def _estimate_metrics(
    batch: _PredictionSummary, strata: _Strata | None, *, widening: float, level: float, seed: int
) -> dict[str, Estimate]:
    """Return each metric with its interval.

    ``strata`` are of labelled examples. Without any, the probabilities are taken as they are, and
    there are no intervals. ``widening`` is the change of accuracy by a shift that cannot be seen.
    """
    filled = _filled_cells(batch.cells, batch.two_classes)
    probs = filled.claimed
    if strata is not None:
        probs = strata.adjusted(filled.claimed, filled.number)
    known = batch.labelled.happened[filled.number]
    unknown = batch.unlabelled.weight[filled.number]
    values = _metrics(unknown * probs + known, filled)
    scores = {
        name: _score_estimate(name, batch, strata, widening=widening, level=level)
        for name in (() if batch.two_classes else SCORES)
    }
    if strata is None:
        return {name: Estimate(float(value)) for name, value in values.items()} | scores
    drawn = [
        _drawn_metrics(batch, filled, strata, tilt, np.random.default_rng(seed))
        for tilt in _tilts(filled, probs, widening)
    ]
    ends = {name: [_ends(draws[name], level) for draws in drawn] for name in values}
    result = {}
    for name, value in values.items():  # with the smallest interval around all of them
        lows, highs = zip(*ends[name], strict=True)
        result[name] = Estimate(float(value), min(float(value), *lows), max(float(value), *highs))
    return result | scores


def _metrics(events: FloatArray, filled: _FilledCells) -> dict[str, FloatArray]:
    shares = _share_metrics(events, filled)
    return {**shares, **_two_class_metrics(events, filled)} if filled.two_classes else shares


def _tilts(filled: _FilledCells, probs: FloatArray, widening: float) -> list[FloatArray]:
    """Return changes of the probabilities per unit of variance; their mean is the widening."""
    none = np.zeros_like(probs)
    variance = float(filled.weight @ (probs * (1 - probs)) / filled.weight.sum())
    if widening <= 0 or variance <= 0:
        return [none]
    up, right = none + 1, np.where(filled.predicted, 1.0, -1.0)
    directions = [right, -right, *([up, -up] if filled.two_classes else [])]
    return [none, *(widening / variance * direction for direction in directions)]


def _drawn_metrics(
    batch: _PredictionSummary,
    filled: _FilledCells,
    strata: _Strata,
    tilt: FloatArray,
    rng: np.random.Generator,
) -> dict[str, FloatArray]:
    """Return metrics ``(DRAWS,)`` of batches that might have been."""
    weight, square = (x[filled.number] for x in batch.unlabelled[:2])
    trials = np.array([round(_effective(*pair)) for pair in zip(weight, square, strict=True)])
    each = weight / np.maximum(trials, 1)
    known = batch.labelled.happened[filled.number]
    runs = []
    for _ in range(0, DRAWS, RUN):
        probs = strata.adjusted(filled.claimed, filled.number, strata.draw(rng, RUN))
        tilted = np.clip(probs + tilt * probs * (1 - probs), 0, 1)
        events = each * rng.binomial(trials, tilted, (RUN, trials.size)) + known
        runs.append(_metrics(events, filled))
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}


def _ends(draws: FloatArray, level: float) -> tuple[float, float]:
    """Return quantiles of draws that leave out at most half of 1 - level on either side."""
    draws, outside = draws[~np.isnan(draws)], (1 - level) / 2
    if not draws.size:
        return math.nan, math.nan
    low, high = np.quantile(draws, [outside, 1 - outside], method="inverted_cdf")
    return float(low), float(high)


def _score_estimate(
    name: str, batch: _PredictionSummary, strata: _Strata | None, *, widening: float, level: float
) -> Estimate:
    """Return the Brier score or log loss of more than two classes, with Student's interval."""
    unknown, total = batch.unlabelled, batch.cells.weight.sum()
    known = getattr(batch.labelled, f"{name}_gap").sum()
    value = (getattr(batch.cells, name).sum() + known) / total
    if strata is None:
        return Estimate(float(value))
    i, count, size = SCORES.index(name), strata.size.size, strata.size
    share = _sums_by(strata.stratum, unknown.weight, count) / total
    square = _sums_by(strata.stratum, unknown.square, count) / total**2
    value += share @ strata.score_gap[i]
    scatter = strata.score_scatter[i] * size / np.maximum(size - 1, 1)
    # of the scores around the mean of their stratum, and of this mean
    variance = square @ scatter + share**2 @ (scatter / np.maximum(size, 1))
    # the widening, from the deviation of an outcome to that of this score
    outcome = size @ (strata.share * (1 - strata.share))
    wider = widening * math.sqrt(size @ scatter / max(outcome, 1e-300))
    freedom = max(size.sum() - count, 1)
    half = float(stdtrit(freedom, (1 + level) / 2) * math.sqrt(variance) + wider)
    return Estimate(float(value), max(float(value) - half, 0.0), float(value) + half)


class _FilledCells(NamedTuple):
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


def _filled_cells(cells: _Cells, two_classes: bool) -> _FilledCells:
    """Return the cells that have examples."""
    used = np.flatnonzero(cells.weight > 0)
    used = used[np.argsort(used % CELLS, kind="stable")]
    predicted = (used % CELLS >= CELLS // 2) | (not two_classes)
    weight = cells.weight[used]
    return _FilledCells(
        used, weight, cells.claimed[used] / weight, predicted, used >= CELLS, two_classes
    )


def _share_metrics(events: FloatArray, filled: _FilledCells) -> dict[str, FloatArray]:
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


def _two_class_metrics(events: FloatArray, filled: _FilledCells) -> dict[str, FloatArray]:
    """Return the metrics of two classes; ``events`` as in :func:`_share_metrics`."""
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
        "auroc": _expected_auroc(events, others),
        "true_positives": tp,
        "false_positives": fp,
        "false_negatives": fn,
        "true_negatives": tn,
    }


def _expected_auroc(events: FloatArray, others: FloatArray) -> FloatArray:
    """Probability that an event has a larger score than an example without; ties count half.

    >>> float(_expected_auroc(np.array([0.0, 1.0]), np.array([1.0, 1.0])))
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
