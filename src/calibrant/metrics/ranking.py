"""Metrics of the order of confidences: AUROC, selective risk, out-of-distribution detection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrant._core.checks import (
    FloatArray,
    IntArray,
    Values,
    as_values,
    check_level,
    silenced,
)
from calibrant._core.chunks import EstimandChoice
from calibrant._core.showing import as_axes, as_html, columns_frame, one_line
from calibrant.metrics.intervals import Estimate, logit_interval, share_intervals
from calibrant.metrics.reductions import (
    Data,
    Input,
    WeightedPairs,
    answers_from,
    keywords,
    pairs_from,
)
from calibrant.metrics.summary import Metric, PooledPairs, Statistic, Summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from typing_extensions import Unpack

POOLED_REPLICATES = 200
"""Bootstrap samples behind the interval of pooled pairs: the deviation is off by 5 % at most."""


@keywords(Data)
def auroc(
    logits: Input = None,
    labels: Input = None,
    *,
    estimand: EstimandChoice = "top_label",
    **data: Unpack[Data],
) -> float:
    r"""Probability that a right answer scores above a wrong one.

    .. math:: P(p^+ > p^-) + \tfrac12 P(p^+ = p^-)

    Of the top label, also with two classes: how well confidence separates right answers from wrong
    ones. The usual ROC AUC, of P(y = 1), is :func:`roc_auc`. NaN when all outcomes are equal. Input
    as for :func:`calibrant.ece`.

    >>> auroc(confidence=[0.9, 0.8, 0.8, 0.6], outcome=[1, 1, 0, 0])
    0.875
    """
    return auroc_with_error(*pairs_from(logits, labels, estimand=estimand, **data)).value


@keywords(Data)
def roc_auc(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    r"""Area under the ROC curve of P(y = 1), for two classes.

    .. math:: P(p^+ > p^-) + \tfrac12 P(p^+ = p^-)

    with the probabilities of class 1 where the label is 1 and where it is 0, as in scikit-learn.
    How well the confidence in the predicted class separates right from wrong is :func:`auroc`. More
    than two classes are refused; :func:`calibrant.metrics.one_vs_rest` makes pairs of one of them.
    Input as for :func:`calibrant.ece`.

    >>> roc_auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    0.75
    """
    with silenced():  # probabilities in place of logits have the same order
        return auroc(logits, labels, estimand="binary", **data)


@keywords(Data)
def aurc(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    r"""Area under the risk-coverage curve.

    .. math:: \frac1n \sum_{k=1}^n \frac1k \sum_{i=1}^k (1 - y_{(i)})

    The mean over k of the error rate among the k most confident answers. Examples of equal
    confidence count as if in random order. A weight is the share of an example in every mean;
    it is not the same as repeating the example. Input as for :func:`calibrant.ece`.

    >>> aurc(confidence=[0.9, 0.8, 0.7, 0.6], outcome=[1, 1, 1, 0])
    0.0625
    """
    return aurc_with_error(*answers_from(logits, labels, **data)).value


class RiskCoverage(NamedTuple):
    """Error rate among the examples at or above each confidence.

    The arrays are ``(distinct confidences,)``, highest first. ``low`` and ``high`` are Wilson's
    intervals of the risk at each single threshold.
    """

    threshold: FloatArray
    coverage: FloatArray
    risk: FloatArray
    low: FloatArray
    high: FloatArray
    level: float
    """Coverage of the intervals; NaN without."""

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the curve as by :func:`calibrant.show.figures.risk_coverage_plot`."""
        return as_axes(self, ax, **options)

    def __repr__(self) -> str:
        risk = f"risk {100 * self.risk[-1]:.2f} % at full coverage" if self.risk.size else ""
        return one_line(self, f"{len(self.risk)} thresholds", risk)

    def thinned(self, points: int = 200) -> RiskCoverage:
        """Return the curve at so many thresholds or fewer, evenly spread and with both ends."""
        last = len(self.risk) - 1
        places = np.unique(np.linspace(0, last, min(points, last + 1)).round().astype(np.int64))
        kept: dict[str, Any] = {name: column[places] for name, column in self._columns().items()}
        return self._replace(**kept)

    def without_intervals(self) -> RiskCoverage:
        """Return the curve alone: for examples that are not independent, intervals are too narrow.

        >>> curve = risk_coverage(confidence=[0.9, 0.8], outcome=[1, 0]).without_intervals()
        >>> curve.risk, curve.low
        (array([0. , 0.5]), array([nan, nan]))
        """
        unknown = np.full_like(self.risk, np.nan)
        return self._replace(low=unknown, high=unknown, level=math.nan)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each threshold. Needs pandas."""
        return columns_frame(self._columns())

    def _columns(self) -> dict[str, FloatArray]:
        return {name: values for name, values in self._asdict().items() if name != "level"}


@keywords(Data)
def risk_coverage(
    logits: Input = None, labels: Input = None, *, level: float = 0.9, **data: Unpack[Data]
) -> RiskCoverage:
    """Share of the examples kept and error rate among them, for every threshold.

    ``level`` is the coverage of the intervals. Input as for :func:`calibrant.ece`.

    >>> curve = risk_coverage(confidence=[0.9, 0.8, 0.8, 0.6], outcome=[1, 1, 0, 0])
    >>> curve.coverage, curve.risk
    (array([0.25, 0.75, 1.  ]), array([0.        , 0.33333333, 0.5       ]))
    """
    check_level(level)
    claimed, happened, weights = answers_from(logits, labels, **data)
    mass = np.ones_like(claimed) if weights is None else weights
    distinct, group = np.unique(-claimed, return_inverse=True)
    kept = np.cumsum(np.bincount(group, mass))
    wrong = np.cumsum(np.bincount(group, mass * (1 - happened)))
    risk = np.divide(wrong, kept, out=np.zeros_like(kept), where=kept > 0)
    squares = np.cumsum(np.bincount(group, mass**2))
    worth = np.divide(kept**2, squares, out=np.ones_like(kept), where=squares > 0)
    low, high = share_intervals(np.clip(risk, 0, 1), worth, level)
    return RiskCoverage(-distinct, kept / kept[-1], risk, low, high, level)


def ood_auroc(inside: Values, outside: Values) -> float:
    """AUROC of scores ``(n,)`` inside against scores ``(m,)`` outside the distribution.

    Higher scores mean more familiar examples.

    >>> ood_auroc([0.9, 0.8, 0.7], [0.6, 0.8])
    0.75
    """
    known, strange = as_values(inside, "inside"), np.sort(as_values(outside, "outside"))
    below, at_most = (np.searchsorted(strange, known, side) for side in ("left", "right"))
    return float((below + at_most).mean() / (2 * strange.size))


def fpr95(inside: Values, outside: Values) -> float:
    """False positive rate at 95 %, the usual figure of out-of-distribution detection.

    The share of ``outside`` ``(m,)`` at or above the largest threshold that at least 95 % of
    ``inside`` ``(n,)`` reach.

    >>> fpr95([0.9, 0.8, 0.7, 0.6], [0.65, 0.2])
    0.5
    """
    known, strange = as_values(inside, "inside"), as_values(outside, "outside")
    accepted = math.ceil(0.95 * known.size - 1e-9)
    threshold = np.sort(known)[known.size - accepted]
    return float((strange >= threshold).mean())


class Influenced(NamedTuple):
    """A value with its standard error and degrees of freedom, from the influence of examples."""

    value: float
    deviation: float
    freedom: float


def auroc_with_error(
    claimed: FloatArray, happened: FloatArray, weights: FloatArray | None
) -> Influenced:
    """AUROC with DeLong's standard error, in n log n."""
    mass = np.ones_like(claimed) if weights is None else weights
    group = _groups(claimed)
    yes, no = mass * happened, mass * (1 - happened)
    if not (yes.any() and no.any()):
        return Influenced(math.nan, math.nan, 0.0)
    # share of the other side that each example is ranked above; ties count half
    of_no, of_yes = np.bincount(group, no), np.bincount(group, yes)
    above_no = (np.cumsum(of_no) - of_no / 2)[group] / no.sum()
    above_yes = 1 - (np.cumsum(of_yes) - of_yes / 2)[group] / yes.sum()
    value = float(yes @ above_no / yes.sum())
    variance = 0.0
    for side, above in ((yes, above_no), (no, above_yes)):
        worth = _worth(side)
        spread = float(((side * (above - value)) ** 2).sum() / side.sum() ** 2)
        variance += spread * worth / (worth - 1) if worth > 1 else math.nan
    return Influenced(value, math.sqrt(variance), min(_worth(yes), _worth(no)) - 1)


def aurc_with_error(
    claimed: FloatArray, happened: FloatArray, weights: FloatArray | None
) -> Influenced:
    """AURC with the standard error of the infinitesimal jackknife, in n log n."""
    mass = np.ones_like(claimed) if weights is None else weights
    order = np.argsort(-claimed, kind="stable")
    tie = _groups(-claimed[order])
    mass, wrong = mass[order], 1 - happened[order]
    size = np.bincount(tie)

    def tied(values: FloatArray) -> FloatArray:
        if size.size == tie.size:  # no ties
            return values
        return np.asarray((np.bincount(tie, values) / size)[tie])

    even, failed = tied(mass), tied(mass * wrong)
    kept, errors = np.cumsum(even), np.cumsum(failed)
    risk = errors / kept
    value = float(even @ risk / kept[-1])
    # derivative by the weight of an example: its own mean, and all later ones that it is part of
    shares, risks = (np.cumsum(x[::-1])[::-1] for x in (even / kept, even * risk / kept))
    later = wrong * tied(shares) - tied(risks)
    influence = mass * (tied(risk) + later - value) / kept[-1]
    deviation = float(np.sqrt((influence**2).sum()))
    return Influenced(value, deviation, _worth(mass * wrong) - 1)


def _groups(values: FloatArray) -> IntArray:
    """Return the rank of each value among the distinct ones; at once where they are in order."""
    steps = np.diff(values, prepend=values[:1])
    if (steps >= 0).all():
        return np.cumsum(steps > 0)
    _, group = np.unique(values, return_inverse=True)
    return np.asarray(group)


def _worth(mass: FloatArray) -> float:
    """Number of equally weighted examples that would be worth as much."""
    return float(mass.sum() ** 2 / (mass**2).sum()) if mass.any() else 0.0


def _pooled_auroc(yes: FloatArray, no: FloatArray) -> FloatArray:
    """AUROC of masses ``(..., bins)`` in order of confidence; those of one bin are ties."""
    below = np.cumsum(no, -1) - no / 2
    with np.errstate(invalid="ignore"):  # undefined where all outcomes are equal
        return np.asarray((yes * below).sum(-1) / (yes.sum(-1) * no.sum(-1)))


def _pooled_aurc(right: FloatArray, wrong: FloatArray) -> FloatArray:
    """AURC of masses ``(..., bins)`` in order of confidence, in random order within a bin.

    With mass K and errors E above it, a bin of mass m and error rate e adds the integral of
    (E + t e) / (K + t) over t from 0 to m.
    """
    mass, wrong = (right + wrong)[..., ::-1], wrong[..., ::-1]
    kept, errors = np.cumsum(mass, -1), np.cumsum(wrong, -1)
    before, missed = kept - mass, errors - wrong
    rate = np.divide(wrong, mass, out=np.zeros_like(mass), where=mass > 0)
    growth = np.log(np.divide(kept, before, out=np.ones_like(kept), where=before > 0))
    return np.asarray((wrong + (missed - rate * before) * growth).sum(-1) / kept[..., -1])


def _pooled_estimate(s: Summary, pairs: PooledPairs, statistic: Statistic) -> Estimate:
    """Interval by a Poisson bootstrap, of a statistic that is between 0 and 1."""
    value = pairs.value(statistic)
    if s.level is None or math.isnan(value):
        return Estimate(value)
    deviation = pairs.deviation(statistic, POOLED_REPLICATES, s.seed)
    sides = (pairs.rest,) if statistic is _pooled_aurc else (pairs.rest, pairs.happened)
    fewest = min(side.total**2 / max(float(side.squares.sum()), 1e-300) for side in sides)
    return logit_interval(value, deviation, fewest - 1, s.level)


def _auroc_estimate(s: Summary, pairs: WeightedPairs | PooledPairs) -> Estimate:
    if isinstance(pairs, PooledPairs):
        return _pooled_estimate(s, pairs, _pooled_auroc)
    return s.interval(logit_interval, *auroc_with_error(*pairs))


def _aurc_estimate(s: Summary) -> Estimate:
    if s.estimand not in ("auto", "top_label"):  # P(y = 1) is no confidence in an answer
        return Estimate(math.nan)
    if isinstance(s.answers, PooledPairs):
        return _pooled_estimate(s, s.answers, _pooled_aurc)
    return s.interval(logit_interval, *aurc_with_error(*s.answers))


TABLE = (
    Metric(
        "AUROC of confidence",
        auroc,
        lambda s: _auroc_estimate(s, s.answers),
        higher_is_better=True,
        needs_pairs=True,
    ),
    Metric(
        "ROC AUC",
        roc_auc,
        lambda s: _auroc_estimate(s, s.pairs),
        aliases=("auc",),
        higher_is_better=True,
        needs_pairs=True,
        two_classes_only=True,
    ),
    Metric("AURC", aurc, _aurc_estimate, "Geifman and El-Yaniv 2017", needs_pairs=True),
)
