r"""Shifts between a reference and a batch that can be seen without labels, and their size.

All shifts are measured by one number, the :math:`\chi^2` divergence of the batch :math:`P` from
the reference :math:`Q`,

.. math:: \rho = \sup_f \frac{(E_P f - E_Q f)^2}{\operatorname{Var}_Q f} ,

over the functions :math:`f` of a view: constants on bins of the confidence, on bins of the margin
or on predicted classes, or sums of random cosines of the features (Rahimi and Recht 2007). The
same inequality bounds what a shift does to the accuracy: a shift of outcomes whose divergence
is at most :math:`\rho` changes the mean of an outcome by at most :math:`\sqrt\rho` of its standard
deviations. What is estimated of :math:`\rho` has the part of the sampling noise subtracted.

A change of the class frequencies alone can be recognised: the reference, weighted by the ratio of
new and old frequencies, then has the distributions of the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import chdtrc, chdtri, chndtrinc, fdtrc

from calibrant._core.checks import FloatArray, IntArray
from calibrant.decide.priors import estimate_prior
from calibrant.estimate.cells import (
    CELLS,
    _effective,
    _equal_parts,
    _log_odds_cell,
    _Rows,
    _sums_by,
)

BINS = 20
"""Bins of confidence and of margin."""
PER_BIN = 25
"""Examples of the reference for each bin, on average."""
COSINES = 32
"""Random functions of the features."""
PER_CLASS = 10
"""Labels for each class, on average, from which class frequencies are estimated."""
POWER = 0.8
"""Probability with which a visible shift is seen."""
NONE: FloatArray = np.zeros(0)


class Shift(NamedTuple):
    """Difference of a batch from the reference in one view."""

    view: str
    size: float  # chi-squared divergence
    p_value: float
    freedom: int  # number of functions that are compared

    def visible(self, n: float, m: float, level: float) -> float:
        """Return the size from which a test at some level sees a shift in four of five cases.

        ``n`` and ``m`` are the numbers of examples. 0 if there is nothing to compare.

        >>> round(Shift("confidence", 0.0, 1.0, 11).visible(200, 300, 0.005), 2)
        0.21
        """
        if self.freedom == 0:
            return 0.0
        critical = chdtri(self.freedom, level)
        return float(chndtrinc(critical, self.freedom, 1 - POWER)) * (1 / n + 1 / m)


class _Seen(NamedTuple):
    """Examples as the views see them: sums of weights, and a sample of rows."""

    event: FloatArray  # (CELLS,) by log-odds of the event
    margin: FloatArray  # (CELLS,) by margin
    predicted: FloatArray  # (classes,)
    size: float  # number of examples, effectively
    features: FloatArray | None = None  # (sample, width)
    weight: FloatArray = NONE  # (sample,)


def _seen_rows(rows: _Rows, weight: FloatArray, classes: int, event: IntArray) -> _Seen:
    """Sums of rows for the views; ``event`` are their cells."""
    margin = _sums_by(_log_odds_cell(rows.margin), weight, CELLS)
    predicted = _sums_by(rows.predicted, weight, classes)
    size = _effective(weight.sum(), float(weight @ weight))
    return _Seen(_sums_by(event % CELLS, weight, CELLS), margin, predicted, size)


def _find_shifts(batch: _Seen, reference: _Seen, *, seed: int) -> list[Shift]:
    """Return the difference of a batch from the reference in every view."""
    bins = int(np.clip(reference.size // PER_BIN, 2, BINS))
    views = {"confidence": (batch.event, reference.event)}
    if batch.predicted.size > 2:  # of two classes, the margin is the confidence
        views["margin"] = (batch.margin, reference.margin)
    cut = {view: _equal_parts(old, bins) for view, (_, old) in views.items()}
    views["predicted class"] = batch.predicted, reference.predicted
    # classes that are predicted often have numbers of their own; all others share the last one
    often = reference.predicted / reference.predicted.sum() * reference.size >= PER_BIN
    cut["predicted class"] = np.where(often, np.cumsum(often) - 1, often.sum())
    shifts = []
    for view, index in cut.items():
        new, old = (_sums_by(index, values, int(index.max()) + 1) for values in views[view])
        shifts.append(_binned_shift(view, new, old, batch.size, reference.size))
    if batch.features is not None and reference.features is not None:
        weights = batch.weight, reference.weight
        shifts.append(_feature_shift(batch.features, reference.features, *weights, seed))
    return shifts


def _binned_shift(view: str, new: FloatArray, old: FloatArray, n: float, m: float) -> Shift:
    """Compare shares of bins by the chi-squared test of homogeneity.

    ``new`` and ``old`` are weights by bin, ``n`` and ``m`` the numbers of examples behind them.

    >>> shift = _binned_shift("x", np.array([60.0, 40.0]), np.array([500.0, 500.0]), 100, 1000)
    >>> round(shift.size, 3), round(shift.p_value, 3)
    (0.029, 0.056)
    """
    used = (new + old) > 0
    p, q = (values[used] / values.sum() for values in (new, old))
    freedom = p.size - 1
    if freedom == 0:
        return Shift(view, 0.0, 1.0, freedom)
    pooled = (n * p + m * q) / (n + m)
    statistic = n * m / (n + m) * float(((p - q) ** 2 / pooled).sum())
    size = float(((p - q) ** 2 / np.maximum(q, 1 / m)).sum()) - freedom * (1 / n + 1 / m)
    return Shift(view, max(size, 0.0), float(chdtrc(freedom, statistic)), freedom)


def _feature_shift(
    new: FloatArray, old: FloatArray, new_weight: FloatArray, old_weight: FloatArray, seed: int
) -> Shift:
    """Compare the means of random cosines of features ``(n, width)``, by Hotelling's test."""
    if new.shape[1:] != old.shape[1:]:
        raise ValueError(
            f"features must have the shape {old.shape[1:]} of those of the reference, got "
            f"{new.shape[1:]}: take both from one layer"
        )
    new, old = (x.reshape(len(x), -1).astype(np.float64) for x in (new, old))
    # the scale of the functions is the distance of two examples of the reference
    centre, scale = old.mean(0), old.std(0)
    varies = scale > 1e-9 * np.maximum(np.abs(old).max(0), 1e-300)
    rng = np.random.default_rng(seed)
    frequencies = rng.normal(size=(centre.size, COSINES)) / math.sqrt(max(varies.sum(), 1))
    frequencies = np.where(varies[:, None], frequencies / np.where(varies, scale, 1)[:, None], 0)
    phases = rng.uniform(0, 2 * np.pi, COSINES)
    weights = new_weight, old_weight
    n, m = (_effective(weight.sum(), float(weight @ weight)) for weight in weights)
    cosines = [np.cos((x - centre) @ frequencies + phases) for x in (new, old)]
    means = [np.average(x, 0, weight) for x, weight in zip(cosines, weights, strict=True)]
    scatter, of_reference = (
        np.cov(x, rowvar=False, aweights=weight) + 1e-9 * np.eye(COSINES)
        for x, weight in zip(cosines, weights, strict=True)
    )
    change = means[0] - means[1]
    freedom = n + m - COSINES - 1
    if freedom < COSINES:
        return Shift("features", 0.0, 1.0, 0)
    pooled = (n * scatter + m * of_reference) / (n + m)
    distance = float(change @ np.linalg.solve(pooled, change))
    divergence = float(change @ np.linalg.solve(of_reference, change))
    statistic = n * m / (n + m) * distance * freedom / ((n + m - 2) * COSINES)
    size = divergence - COSINES * (1 / n + 1 / m)
    return Shift("features", max(size, 0.0), float(fdtrc(COSINES, freedom, statistic)), COSINES)


def _label_shift_weights(
    reference: _Rows, weight: FloatArray, probs: FloatArray
) -> tuple[FloatArray, FloatArray] | None:
    """Return class frequencies of a batch, and the ratios to those of the reference.

    ``probs`` ``(n, classes)`` are of the batch. None if the reference has too few labels.
    """
    classes = probs.shape[1]
    counts = np.bincount(reference.label, weight, classes)
    if reference.label.size < PER_CLASS * classes:
        return None
    old = (counts + 0.5) / (counts + 0.5).sum()
    new = np.asarray(estimate_prior(probs=probs, old_prior=old))
    return new, new / old
