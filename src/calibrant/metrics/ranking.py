"""What the order of the confidences is worth: AUROC, selective risk, out-of-distribution scores."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from calibrant._checks import FloatArray, IntArray, as_pairs, as_values
from calibrant.metrics.binned import Values


def auroc(confidence: Values, outcome: Values, *, weight: Values | None = None) -> float:
    r"""Probability that an event that happened got more confidence than one that did not.

    .. math:: P(p^+ > p^-) + \tfrac12 P(p^+ = p^-)

    Of top-label pairs: how well confidence tells right answers from wrong ones. NaN when all
    outcomes are equal. It sees only the order: a monotone recalibration does not change it.

    >>> auroc([0.9, 0.8, 0.8, 0.6], [1, 1, 0, 0])
    0.875
    """
    claimed, happened, weights = as_pairs(confidence, outcome, weight)
    return placement(claimed, happened, weights).value


def aurc(confidence: Values, outcome: Values, *, weight: Values | None = None) -> float:
    r"""Area under the risk-coverage curve (Geifman and El-Yaniv 2017).

    The mean over k of the error rate among the k most confident examples. Examples of equal
    confidence count as if in random order. A weight is the share of an example in every mean;
    it is not the same as repeating the example.

    .. math:: \frac1n \sum_{k=1}^n \frac1k \sum_{i=1}^k (1 - y_{(i)})

    >>> aurc([0.9, 0.8, 0.7, 0.6], [1, 1, 1, 0])
    0.0625
    """
    claimed, happened, weights = as_pairs(confidence, outcome, weight)
    return accumulated_risk(claimed, happened, weights).value


class RiskCoverage(NamedTuple):
    """Error rate among the examples at or above each confidence.

    ``threshold``, ``coverage`` and ``risk`` are ``(distinct confidences,)``, most confident
    first.
    """

    threshold: FloatArray
    coverage: FloatArray
    risk: FloatArray


def risk_coverage(
    confidence: Values, outcome: Values, *, weight: Values | None = None
) -> RiskCoverage:
    """Share of the examples kept and error rate among them, for every threshold.

    >>> curve = risk_coverage([0.9, 0.8, 0.8, 0.6], [1, 1, 0, 0])
    >>> curve.coverage, curve.risk
    (array([0.25, 0.75, 1.  ]), array([0.        , 0.33333333, 0.5       ]))
    """
    claimed, happened, weights = as_pairs(confidence, outcome, weight)
    mass = np.ones_like(claimed) if weights is None else weights
    level, group = np.unique(-claimed, return_inverse=True)
    kept = np.cumsum(np.bincount(group, mass))
    wrong = np.cumsum(np.bincount(group, mass * (1 - happened)))
    risk = np.divide(wrong, kept, out=np.zeros_like(kept), where=kept > 0)
    return RiskCoverage(-level, kept / kept[-1], risk)


def ood_auroc(inside: Values, outside: Values) -> float:
    """AUROC with which a score tells data like the training data from other data.

    Parameters
    ----------
    inside : (n,) scores of in-distribution examples, higher meaning more familiar
    outside : (m,) scores of out-of-distribution examples

    Examples
    --------
    >>> ood_auroc([0.9, 0.8, 0.7], [0.6, 0.8])
    0.75
    """
    known, strange = as_values(inside, "inside"), as_values(outside, "outside")
    order = np.sort(strange)
    below = np.searchsorted(order, known, side="left")
    at_most = np.searchsorted(order, known, side="right")
    return float((below + at_most).mean() / (2 * order.size))


def fpr95(inside: Values, outside: Values) -> float:
    """Share of out-of-distribution examples accepted when 95 % of the others are.

    The threshold is the largest score that at least 95 % of ``inside`` reach.

    >>> fpr95([0.9, 0.8, 0.7, 0.6], [0.65, 0.2])
    0.5
    """
    known, strange = as_values(inside, "inside"), as_values(outside, "outside")
    accepted = math.ceil(0.95 * known.size - 1e-9)
    threshold = np.sort(known)[known.size - accepted]
    return float((strange >= threshold).mean())


class Influenced(NamedTuple):
    """A value, and its standard error from how much each example moves it."""

    value: float
    deviation: float


def placement(claimed: FloatArray, happened: FloatArray, weights: FloatArray | None) -> Influenced:
    """AUROC with DeLong's standard error, in n log n."""
    mass = np.ones_like(claimed) if weights is None else weights
    _, group = np.unique(claimed, return_inverse=True)
    yes, no = mass * happened, mass * (1 - happened)
    if not (yes.any() and no.any()):
        return Influenced(math.nan, math.nan)
    # share of the other side that each example is ranked above; ties count half
    above_no = _below(group, no)[group] / no.sum()
    above_yes = 1 - _below(group, yes)[group] / yes.sum()
    value = float(yes @ above_no / yes.sum())
    variance = ((yes * (above_no - value)) ** 2).sum() / yes.sum() ** 2
    variance += ((no * (above_yes - value)) ** 2).sum() / no.sum() ** 2
    return Influenced(value, math.sqrt(variance))


def accumulated_risk(
    claimed: FloatArray, happened: FloatArray, weights: FloatArray | None
) -> Influenced:
    """AURC with the standard error of the infinitesimal jackknife, in n log n."""
    mass = np.ones_like(claimed) if weights is None else weights
    order = np.argsort(-claimed, kind="stable")
    mass, wrong = mass[order], _shared_in_ties(-claimed[order], 1 - happened[order], mass[order])
    kept, errors = np.cumsum(mass), np.cumsum(mass * wrong)
    total = kept[-1]
    with np.errstate(invalid="ignore"):  # leading examples of weight zero: 0 / 0
        risk, share, pull = (
            np.nan_to_num(x) for x in (errors / kept, mass / kept, mass * errors / kept**2)
        )
    value = float(mass @ risk / total)
    # derivative by the weight of example i: its own term, and all later means that it is part of
    later = wrong * _from_here(share) - _from_here(pull)
    influence = mass * (risk + later - value) / total
    return Influenced(value, float(np.sqrt((influence**2).sum())))


def _below(group: IntArray, mass: FloatArray) -> FloatArray:
    """Mass in lower groups plus half of the own, per group."""
    per_group = np.bincount(group, mass)
    return np.cumsum(per_group) - per_group / 2


def _shared_in_ties(sorted_key: FloatArray, values: FloatArray, mass: FloatArray) -> FloatArray:
    """Give each example of a tie the mean value of the tie."""
    _, group = np.unique(sorted_key, return_inverse=True)
    total = np.bincount(group, mass)
    mean = np.divide(np.bincount(group, mass * values), total, where=total > 0, out=total * 0)
    return mean[group]


def _from_here(values: FloatArray) -> FloatArray:
    """Sum of each value and all later ones."""
    return np.cumsum(values[::-1])[::-1]
