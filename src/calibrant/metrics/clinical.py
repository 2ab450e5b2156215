"""Figures by which risk models and forecasts of an event are judged, of P(y = 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtrc, expit, logit, ndtr

from calibrant._core.binning import Bins
from calibrant._core.checks import FloatArray, Values, as_values, check_level, check_whole
from calibrant._core.showing import as_axes, as_html, columns_frame, one_line
from calibrant.metrics.curves import _parabola_weights
from calibrant.metrics.gaps import Functional
from calibrant.metrics.intervals import Estimate, normal_interval, share_intervals
from calibrant.metrics.reductions import Data, Input, WeightedPairs, keywords, pairs_from
from calibrant.metrics.smooth import CalibrationTest
from calibrant.metrics.summary import REPLICATES, Metric, PooledPairs, Summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from typing_extensions import Unpack

CURVE_BINS = 100
"""Bins of equal mass on which the smooth curve of the ICI is fitted."""
NEAREST = 2.0**-53
"""Probabilities count as at least this far from 0 and 1, so that their log-odds are finite."""


@keywords(Data)
def calibration_slope(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    r"""Slope of the logistic recalibration; 1 is best.

    .. math:: \mathrm{logit}\, P(y = 1) = a + b \, \mathrm{logit}\, p

    fitted by maximum likelihood; b is the slope, below 1 where P(y = 1) is over-confident, and a
    the :func:`calibration_intercept` (Cox 1958). NaN where no finite slope is best, as when p
    separates the classes. For two classes; of more, pass the pairs of one against the rest, by
    :func:`calibrant.metrics.one_vs_rest`. Input as for :func:`calibrant.ece`.

    >>> z = np.repeat([-2.0, 2.0], 100)
    >>> y = np.tile(np.arange(100) < 27, 2) ^ (z > 0)  # 27 % and 73 %, where 12 % and 88 % are said
    >>> round(calibration_slope(z, y), 3)
    0.497
    """
    return _recalibration(_event_pairs(logits, labels, **data))[1].value


@keywords(Data)
def calibration_intercept(
    logits: Input = None, labels: Input = None, **data: Unpack[Data]
) -> float:
    """Intercept of the logistic recalibration; 0 is best.

    It is fitted together with :func:`calibration_slope`, as in ``val.prob`` of R; with the slope
    fixed at 1 it is :func:`citl`. Input as for :func:`calibration_slope`.

    >>> round(calibration_intercept([-1.0, -1.0, 1.0, 1.0], [0, 1, 1, 1][::-1]), 3)
    nan
    """
    return _recalibration(_event_pairs(logits, labels, **data))[0].value


@keywords(Data)
def citl(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    r"""Calibration in the large: the best shift of log-odds.

    The intercept a of :math:`\mathrm{logit}\, P(y = 1) = a + \mathrm{logit}\, p`, fitted by
    maximum likelihood: 0 is best, and below 0 the mean of P(y = 1) is too high. NaN where all
    outcomes are equal. Input as for :func:`calibration_slope`.

    >>> round(citl([0.0] * 4, [1, 0, 0, 0]), 4)
    -1.0986
    """
    return _shift(_event_pairs(logits, labels, **data)).value


@keywords(Data)
def spiegelhalter_z(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    r"""Spiegelhalter's z, a test of the Brier score.

    .. math:: \frac{\sum_i (y_i - p_i)(1 - 2 p_i)}{\sqrt{\sum_i (1 - 2 p_i)^2 p_i (1 - p_i)}}

    It is normal with mean 0 and deviation 1 for a calibrated model, above 0 for an over-confident
    one. It misses errors that leave the mean Brier score as it is, which
    :func:`calibrant.metrics.calibration_test` finds. Spiegelhalter 1986. Input as for
    :func:`calibration_slope`.

    >>> round(spiegelhalter_z(confidence=[0.9] * 100, outcome=[1] * 80 + [0] * 20), 3)
    3.333
    """
    return _spiegelhalter(_event_pairs(logits, labels, **data)).statistic


@keywords(Data)
def spiegelhalter_p(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    """Two-sided p-value of Spiegelhalter's z.

    That of :func:`spiegelhalter_z`. Input as for :func:`calibration_slope`.

    >>> round(spiegelhalter_p(confidence=[0.9] * 100, outcome=[1] * 80 + [0] * 20), 5)
    0.00086
    """
    return _spiegelhalter(_event_pairs(logits, labels, **data)).p_value


@keywords(Data)
def hosmer_lemeshow_p(
    logits: Input = None,
    labels: Input = None,
    *,
    bins: int = 10,
    freedom: int | None = None,
    **data: Unpack[Data],
) -> float:
    """P-value of the Hosmer-Lemeshow test.

    Its bins have equal mass. It is kept for comparison with published results: it cannot tell how
    large an error is or where it lies, depends on the number of bins, misses errors that cancel
    within a bin, rejects any model with enough examples and hardly any with few. :func:`ici` with
    its interval says more. ``freedom`` are the degrees of freedom: the number of bins for examples
    that the model was not fitted on, and ``bins - 2`` for those of a logistic regression. Hosmer
    and Lemeshow 1980. Input as for :func:`calibration_slope`.

    >>> round(hosmer_lemeshow_p(confidence=[0.9] * 100, outcome=[1] * 80 + [0] * 20), 5)
    0.00086
    """
    if freedom is not None:
        check_whole("freedom", freedom)
    return _hosmer_lemeshow(_event_pairs(logits, labels, **data), bins, freedom).p_value


@keywords(Data)
def ici(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    r"""Mean distance from a smooth calibration curve.

    .. math:: \frac1n \sum_i | p_i - \hat c(p_i) |

    The integrated calibration index. The curve :math:`\hat c` is that of
    :func:`calibrant.metrics.smooth_reliability`: a loess of degree 2 with tricube weights, without
    cutting at 0 and 1, whose window holds :math:`n^{4/5}` examples, where loess in R takes 75 % of
    them whatever their number. It is fitted to 100 bins of equal mass. Austin and Steyerberg 2019.
    Input as for :func:`calibration_slope`.

    >>> round(ici(confidence=[0.2] * 50 + [0.6] * 50, outcome=([1] * 3 + [0] * 2) * 20), 3)
    0.2
    """
    return _distance_of(_event_pairs(logits, labels, **data), None)


@keywords(Data)
def e50(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    """Median distance from a smooth calibration curve.

    The curve is that of :func:`ici`. Input as for :func:`calibration_slope`.

    >>> round(e50(confidence=[0.2] * 60 + [0.6] * 40, outcome=([1] * 3 + [0] * 2) * 20), 3)
    0.4
    """
    return _distance_of(_event_pairs(logits, labels, **data), 0.5)


@keywords(Data)
def e90(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    """90 % quantile of the distance from a smooth curve.

    The curve is that of :func:`ici`. Input as for :func:`calibration_slope`.

    >>> round(e90(confidence=[0.2] * 15 + [0.6] * 85, outcome=([1] * 3 + [0] * 2) * 20), 3)
    0.4
    """
    return _distance_of(_event_pairs(logits, labels, **data), 0.9)


@keywords(Data)
def brier_skill(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    r"""Share of the Brier score of the base rate that is saved.

    .. math:: 1 - \frac{\sum_i (p_i - y_i)^2}{\sum_i (\bar y - y_i)^2}

    The Brier skill score: 1 is perfect, 0 as good as claiming the base rate of these examples, and
    less is worse. NaN where all outcomes are equal. Input as for :func:`calibration_slope`.

    >>> round(brier_skill(confidence=[0.8, 0.6, 0.4, 0.2], outcome=[1, 1, 0, 0]), 3)
    0.6
    """
    return _skill(_event_pairs(logits, labels, **data)).value


class DecisionCurve(NamedTuple):
    """Net benefit of acting where P(y = 1) reaches a threshold. The arrays are ``(thresholds,)``.

    Acting never has a net benefit of 0.
    """

    threshold: FloatArray
    net_benefit: FloatArray
    low: FloatArray
    high: FloatArray
    treat_all: FloatArray
    """Net benefit of acting always."""
    level: float
    """Coverage of the intervals, at each single threshold."""

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the curve as by :func:`calibrant.show.figures.decision_curve_plot`."""
        return as_axes(self, ax)

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.threshold)} thresholds")

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each threshold. Needs pandas."""
        return columns_frame({name: getattr(self, name) for name in self._fields[:5]})


@keywords(Data)
def decision_curve(
    logits: Input = None,
    labels: Input = None,
    *,
    thresholds: Values | None = None,
    level: float = 0.9,
    **data: Unpack[Data],
) -> DecisionCurve:
    r"""Net benefit of acting where P(y = 1) is at least a threshold (decision curve analysis).

    .. math:: \frac{\mathrm{TP}}{n} - \frac{\mathrm{FP}}{n} \, \frac{t}{1 - t}

    Who acts from a probability t on takes one true positive to be worth (1 - t) / t false ones. A
    model is worth using where its net benefit exceeds both that of acting always and 0, that of
    acting never. Vickers and Elkin 2006.

    Parameters
    ----------
    thresholds : (thresholds,), optional
        In (0, 1); 0.01, 0.02, ... 0.99 by default.
    level : float
        Coverage of the intervals, which hold at each single threshold, however few examples reach
        it.

    Examples
    --------
    >>> curve = decision_curve(confidence=[0.8, 0.6, 0.4, 0.2], outcome=[1, 0, 1, 0],
    ...                        thresholds=[0.5])
    >>> curve.net_benefit, curve.treat_all
    (array([0.]), array([0.]))
    """
    check_level(level)
    claimed, happened, weight, squares = _columns(_event_pairs(logits, labels, **data))
    cuts = np.arange(1, 100) / 100 if thresholds is None else as_values(thresholds, "thresholds")
    if not ((cuts > 0) & (cuts < 1)).all():
        raise ValueError("thresholds must be in (0, 1): they are probabilities at which to act")
    order = np.argsort(claimed, kind="stable")
    first = np.searchsorted(claimed[order], cuts)

    def reaching(mass: FloatArray) -> FloatArray:
        """Sum over the examples whose probability is at least each threshold."""
        return np.concatenate([np.cumsum(mass[order][::-1])[::-1], [0.0]])[first]

    total, odds = weight.sum(), cuts / (1 - cuts)
    true, false = happened, 1 - happened
    shares = np.stack([reaching(weight * true), reaching(weight * false)]) / total
    of_shares = np.stack([reaching(squares * true), reaching(squares * false)]) / total**2
    gain, rate = shares[0] - odds * shares[1], float(weight @ happened) / total
    below, above = _reach(shares, of_shares, float(squares.sum()) / total**2, odds, level)
    always = rate - odds * (1 - rate)
    return DecisionCurve(cuts, gain, gain - below, gain + above, always, level)


def _reach(
    shares: FloatArray, squares: FloatArray, of_all: float, odds: FloatArray, level: float
) -> tuple[FloatArray, FloatArray]:
    """Distances from a net benefit to the ends of its interval, each ``(thresholds,)``.

    They are put together from Wilson's intervals of the ``shares`` ``(2, thresholds)`` of true and
    false positives (MOVER, Zou and Donner 2008). Where many examples are flagged this is the
    normal interval, which has no width where none is. ``squares`` and ``of_all`` are sums of
    squared weights, of those and of all examples, over the square of all weight.
    """
    variance = squares * (1 - 2 * shares) + shares**2 * of_all
    covariance = shares.prod(0) * of_all - (shares * squares[::-1]).sum(0)
    spread = shares * (1 - shares)
    some = (spread > 0) & (variance > 0)
    count = np.divide(spread, variance, out=np.full_like(spread, 1 / of_all), where=some)
    scale = np.sqrt(variance.prod(0))
    correlation = np.divide(covariance, scale, out=np.zeros_like(scale), where=some.all(0))
    low, high = share_intervals(shares, count, level)
    down, up = shares - low, high - shares

    def distance(hits: FloatArray, alarms: FloatArray) -> FloatArray:
        square = hits**2 + alarms**2 - 2 * correlation * hits * alarms
        return np.asarray(np.sqrt(np.maximum(square, 0)))

    return distance(down[0], odds * up[1]), distance(up[0], odds * down[1])


def _event_pairs(logits: Input, labels: Input, **data: Unpack[Data]) -> WeightedPairs:
    return pairs_from(logits, labels, estimand="binary", **data)


def _columns(
    pairs: WeightedPairs | PooledPairs,
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return probabilities, outcomes, and sums of weights and of squared weights, each ``(n,)``."""
    if isinstance(pairs, PooledPairs):
        sides = (pairs.happened, pairs.rest)
        return *pairs.pairs, np.concatenate([side.squares[side.weight > 0] for side in sides])  # type: ignore[return-value]  # weights are there
    weight = np.ones_like(pairs.confidence) if pairs.weight is None else pairs.weight
    return pairs.confidence, pairs.outcome, weight, weight**2


class _Fitted(NamedTuple):
    """A figure and its standard error."""

    value: float
    deviation: float = math.nan


def _log_odds(probability: FloatArray) -> FloatArray:
    return np.asarray(logit(np.clip(probability, NEAREST, 1 - NEAREST)))


def _recalibration(pairs: WeightedPairs | PooledPairs) -> list[_Fitted]:
    """Return intercept and slope of the logistic recalibration."""
    claimed, happened, weight, squares = _columns(pairs)
    odds, yes = _log_odds(claimed), happened == 1
    if yes.all() or not yes.any():
        return [_Fitted(math.nan)] * 2
    if odds[yes].min() >= odds[~yes].max() or odds[~yes].min() >= odds[yes].max():
        return [_Fitted(math.nan)] * 2  # separated: the likelihood grows without end
    design = np.stack([np.ones_like(odds), odds], 1)
    return _logistic(design, np.zeros_like(odds), happened, weight, squares, [0.0, 0.0])


def _shift(pairs: WeightedPairs | PooledPairs) -> _Fitted:
    """Return the calibration in the large."""
    claimed, happened, weight, squares = _columns(pairs)
    if happened.min() == happened.max():
        return _Fitted(math.nan)
    odds, design = _log_odds(claimed), np.ones((claimed.size, 1))
    # Newton's method may leave for infinity where probabilities are 0 and 1 and some are wrong
    rate = float(logit(weight @ happened / weight.sum()))
    ends = rate - float(odds.max()) - 1, rate - float(odds.min()) + 1
    start = float(brentq(lambda a: weight @ (expit(odds + a) - happened), *ends))
    return _logistic(design, odds, happened, weight, squares, [start])[0]


def _logistic(
    design: FloatArray,
    offset: FloatArray,
    happened: FloatArray,
    weight: FloatArray,
    squares: FloatArray,
    start: list[float],
) -> list[_Fitted]:
    """Fit a logistic regression by Newton's method; standard errors are those of the sandwich.

    They hold also where the truth is no logistic function of the log-odds.
    """
    total = weight.sum()
    weight, squares, found = weight / total, squares / total**2, np.array(start)

    def loss(values: FloatArray) -> float:
        margin = offset + design @ values
        return float(weight @ (np.logaddexp(0, margin) - happened * margin))

    for _ in range(100):
        chance = expit(offset + design @ found)
        slope = design.T @ (weight * (chance - happened))
        inverse = np.linalg.pinv(design.T @ (design * (weight * chance * (1 - chance))[:, None]))
        step = inverse @ slope
        if slope @ step < 1e-14:  # the error of this step is squared by it
            found = found - step
            break
        size, before = 1.0, loss(found)
        while loss(found - size * step) > before and size > 1e-6:  # too far
            size /= 2
        found = found - size * step
    spread = design.T @ (design * (squares * (chance - happened) ** 2)[:, None])
    variance = np.diag(inverse @ spread @ inverse)
    return [_Fitted(float(v), math.sqrt(s)) for v, s in zip(found, variance, strict=True)]


def _spiegelhalter(pairs: WeightedPairs | PooledPairs) -> CalibrationTest:
    claimed, happened, weight, squares = _columns(pairs)
    lean = 1 - 2 * claimed
    variance = float(squares @ (lean**2 * claimed * (1 - claimed)))
    if not variance > 0:
        return CalibrationTest(math.nan, math.nan)
    z = float(weight @ ((happened - claimed) * lean)) / math.sqrt(variance)
    return CalibrationTest(z, float(2 * ndtr(-abs(z))))


def _hosmer_lemeshow(
    pairs: WeightedPairs | PooledPairs, bins: int = 10, freedom: int | None = None
) -> CalibrationTest:
    filled = pairs.filled(pairs.equal_mass_edges(bins))
    held = filled.weight > 0
    claimed = np.clip(filled.confidence[held], 0, 1)
    variance = filled.squares[held] * claimed * (1 - claimed)
    off = (filled.observed - filled.claimed)[held] ** 2
    statistic = np.divide(off, variance, out=np.where(off > 0, np.inf, 0.0), where=variance > 0)
    degrees = int(held.sum()) if freedom is None else freedom
    return CalibrationTest(float(statistic.sum()), float(chdtrc(degrees, statistic.sum())))


def _skill(pairs: WeightedPairs | PooledPairs) -> _Fitted:
    claimed, happened, weight, squares = _columns(pairs)
    total = weight.sum()
    rate = float(weight @ happened) / total
    if happened.min() == happened.max():
        return _Fitted(math.nan)
    loss, chance = (claimed - happened) ** 2, rate * (1 - rate)
    ratio = float(weight @ loss) / total / chance
    influence = ratio * (1 - 2 * rate) * (happened - rate) - (loss - ratio * chance)
    worth = total**2 / squares.sum()
    variance = float(squares @ influence**2) / (chance * total) ** 2 * worth / max(worth - 1, 1)
    return _Fitted(float(1 - ratio), math.sqrt(variance))


def _curve_bins(pairs: WeightedPairs | PooledPairs) -> Bins:
    return pairs.filled(pairs.equal_mass_edges(CURVE_BINS))


def _distance(filled: Bins, quantile: float | None) -> Functional:
    """Mean, or a quantile, of the distances of the bins from a smooth curve through their gaps."""
    held = filled.weight > 0
    mass, claimed = filled.weight[held] / filled.total, filled.confidence[held]
    window = (filled.total**2 / filled.squares.sum()) ** (-1 / 5)
    # a local parabola through the claims is the claims: the distance is a curve through the gaps
    smoother = _parabola_weights(claimed, claimed, mass, window, 1e-9).T / mass[:, None]

    def error(gap: FloatArray) -> FloatArray:
        off = np.abs(gap[..., held] @ smoother)
        if quantile is None:
            return np.asarray(off @ mass)
        order = np.argsort(off, -1)
        below = (np.cumsum(mass[order], -1) < quantile - 1e-9).sum(-1, keepdims=True)
        return np.take_along_axis(off, np.take_along_axis(order, below, -1), -1)[..., 0]

    return error


def _distance_of(pairs: WeightedPairs | PooledPairs, quantile: float | None) -> float:
    filled = _curve_bins(pairs)
    return float(_distance(filled, quantile)(filled.gap))


def _distance_estimate(quantile: float | None, s: Summary) -> Estimate:
    filled = _curve_bins(s.pairs)
    error = _distance(filled, quantile)
    return s.error(error, lambda: filled, replicates=REPLICATES // 5)


def _fitted_estimate(fitted: Callable[[WeightedPairs | PooledPairs], _Fitted]) -> Any:
    return lambda s: s.interval(normal_interval, *fitted(s.pairs))


_clinical = partial(Metric, percent=False, needs_pairs=True, two_classes_only=True, on_request=True)
TABLE = (
    _clinical(
        "calibration slope",
        calibration_slope,
        _fitted_estimate(lambda pairs: _recalibration(pairs)[1]),
        "Cox 1958",
        two_sided=True,
    ),
    _clinical(
        "calibration intercept",
        calibration_intercept,
        _fitted_estimate(lambda pairs: _recalibration(pairs)[0]),
        "Cox 1958",
        two_sided=True,
    ),
    _clinical(
        "calibration in the large",
        citl,
        _fitted_estimate(_shift),
        "Cox 1958",
        ("calibration_in_the_large",),
        two_sided=True,
    ),
    _clinical(
        "Spiegelhalter's z",
        spiegelhalter_z,
        lambda s: Estimate(_spiegelhalter(s.pairs).statistic),
        "Spiegelhalter 1986",
        two_sided=True,
    ),
    _clinical(
        "Spiegelhalter's p",
        spiegelhalter_p,
        lambda s: Estimate(_spiegelhalter(s.pairs).p_value),
        "Spiegelhalter 1986",
        higher_is_better=True,
    ),
    _clinical(
        "Hosmer-Lemeshow p",
        hosmer_lemeshow_p,
        lambda s: Estimate(_hosmer_lemeshow(s.pairs).p_value),
        "Hosmer and Lemeshow 1980",
        ("hosmer_lemeshow",),
        higher_is_better=True,
    ),
    _clinical(
        "ICI",
        ici,
        partial(_distance_estimate, None),
        "Austin and Steyerberg 2019",
        ("integrated_calibration_index",),
        percent=True,
    ),
    _clinical("E50", e50, partial(_distance_estimate, 0.5), "Harrell 2015", percent=True),
    _clinical("E90", e90, partial(_distance_estimate, 0.9), "Harrell 2015", percent=True),
    _clinical(
        "Brier skill",
        brier_skill,
        _fitted_estimate(_skill),
        "Murphy 1973",
        ("brier_skill_score", "bss"),
        higher_is_better=True,
    ),
)
