"""Maps of the probability of the top class or of class 1: lines, beta, a spline, Venn-Abers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.special import expit
from torch import Tensor
from torch.nn.functional import softplus

from calibrant._core.checks import BoolArray, FloatArray, Values
from calibrant._core.chunks import chunk_slices
from calibrant._core.options import at_least
from calibrant._core.solve import Solution, check_time, minimise_within
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.logpartition import LARGEST_GAP
from calibrant.calibrators.piecewise import BEYOND, _at_place, _filled, _interpolate, _place
from calibrant.calibrators.top_label import TopLabelMap, _confidence_objective, _warn_of_bounds

MAX_SLOPE = 1 / BOUNDS[0]  # largest slope, which is the largest sharpness of a temperature
_Point: TypeAlias = tuple[float, float]

_MAX_CURVE_POINTS = 512
"""Of a stored curve at most: lines between them are off by a hundredth of its noise."""
MAX_MEAN_ODDS = 20.0  # largest log-odds, either way, of the mean example: 1 in 500 million is wrong
_MAX_SQUARED_ODDS = 10.0  # log-odds at which the square is cut: a chance of 1 in 22,000
_VENN_ABERS_SIZE = 10
"""Parameters that Venn-Abers counts for; in truth its steps grow with the examples."""


class SigmoidScaling(TopLabelMap):
    r"""A line for the log-odds of the top class: :math:`s' = a s + b` (Platt 1999).

    The slope is at least 0. Platt's priors, which pull outcomes away from 0 and 1, are left out:
    calibration sets are large enough. The other classes keep their proportions.

    For two classes :math:`s` are the log-odds of class 1, so that :math:`b` is the usual intercept
    and the threshold of 0.5 may move.

    Parameters
    ----------
    keep_argmax : bool, optional
        Hold the other classes below the top one; by default for more than two classes. With True,
        :math:`s` are the log-odds of the top class for two classes as well.

    Attributes
    ----------
    slope_, offset_ : scalar Tensor

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = rng.normal(size=20_000)
    >>> labels = (rng.random(20_000) < expit(0.5 * odds + 1)).astype(int)
    >>> fitted = SigmoidScaling().fit(odds, labels)
    >>> round(float(fitted.slope_), 1), round(float(fitted.offset_), 1)
    (0.5, 1.0)
    """

    name = "sigmoid"
    aliases = ("platt", "platt_scaling")
    summary = "a line for the log-odds of the top class or class 1 (Platt)"
    parameter_count = 2
    tempered = False
    slope_: Tensor
    offset_: Tensor

    def __init__(self, *, keep_argmax: bool | None = None) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._store(slope_=1.0, offset_=0.0)

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        slope, offset = self._keep(fit_platt(odds, outcome, weight), len(odds))
        self._store(slope_=slope, offset_=offset)

    def _map(self, odds: Tensor) -> Tensor:
        return self.slope_.to(odds.dtype) * odds + self.offset_.to(odds.dtype)


class BetaCalibration(TopLabelMap):
    r"""Beta calibration of the confidence (Kull et al. 2017).

    .. math:: \log\frac{c'}{1 - c'} = a \log c - b \log(1 - c) + m

    with :math:`a, b \ge 0`: the map that is right where the confidences of right and of wrong
    answers are beta distributed. :math:`a = b` is :class:`SigmoidScaling`, whose ``keep_argmax`` it
    has: for two classes :math:`c` is the probability of class 1. (The authors' code refits without
    a term whose coefficient is negative.)

    Attributes
    ----------
    line_ : (3,) Tensor
        :math:`a`, :math:`b` and :math:`m`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sure = rng.uniform(0.5, 1, 200_000)
    >>> odds = np.log(sure) - np.log(1 - sure)
    >>> right = rng.random(200_000) < expit(2 * np.log(sure) - 0.5 * np.log(1 - sure))
    >>> BetaCalibration().fit(odds, right.astype(int)).line_[:2]
    tensor([2.0..., 0.5...])
    """

    name = "beta"
    aliases = ("beta_calibration",)
    summary = "beta calibration of the top class or class 1 (Kull 2017)"
    parameter_count = 3
    tempered = False
    line_: Tensor

    def __init__(self, *, keep_argmax: bool | None = None) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._store(line_=torch.tensor([1.0, 1.0, 0.0]))

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        self._store(line_=self._keep(fit_beta(odds, outcome, weight), len(odds)))

    def _map(self, odds: Tensor) -> Tensor:
        a, b, m = self.line_.to(odds.dtype).unbind()
        return b * softplus(odds) - a * softplus(-odds) + m


class SplineCalibration(TopLabelMap):
    r"""Recalibration by the slope of a spline through cumulated errors (Gupta et al. 2021).

    Examples are sorted by their confidence :math:`c`. With the share :math:`t` of examples up to
    one of them, the cumulated error

    .. math:: e(t) = \int_0^t (\text{right} - c)

    has the slope :math:`e'(t) = P(\text{right} \mid c) - c`. A natural cubic spline with equally
    spaced ``knots`` is fitted to it by least squares, and :math:`c' = c + e'(t)`.

    The squares are integrated over :math:`t`, not summed over examples as in the paper, so that
    the order of equal confidences does not matter and a weight of 2 is an example twice.
    :math:`c'` is kept :math:`1 / 2n` away from 0 and 1, where one wrong answer would cost any
    amount of likelihood. The map need not rise: it can change the AUROC.

    ``keep_argmax`` is that of :class:`SigmoidScaling`: for two classes :math:`c` is the probability
    of class 1, and "right" means that it is the label.

    Attributes
    ----------
    odds_, shift_ : (points,) Tensor
        Log-odds, and the shift of the confidence there; lines between, level beyond.
    least_ : scalar Tensor
        Distance that confidences keep from 0 and 1.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sure = rng.uniform(0.5, 1, 50_000)
    >>> right = rng.random(50_000) < sure**2
    >>> odds = np.log(sure) - np.log(1 - sure)
    >>> fitted = SplineCalibration(keep_argmax=False).fit(odds, right.astype(int))
    >>> fitted.predict_proba(np.log([0.6 / 0.4, 0.9 / 0.1])).round(2)
    array([0.36, 0.81])
    """

    name = "spline"
    aliases = ("spline_calibration",)
    summary = "a spline through the cumulated errors (KS)"
    tempered = False
    learned_shapes = "odds_ points; shift_ points"
    odds_: Tensor
    shift_: Tensor
    least_: Tensor

    def __init__(
        self, *, knots: Annotated[int, at_least(2)] = 6, keep_argmax: bool | None = None
    ) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self.knots = knots
        self._store(odds_=torch.zeros(1), shift_=torch.zeros(1), least_=1e-9)

    def size(self, classes: int) -> int:
        """The values at the knots."""
        return self.knots

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        share = weight / weight.sum()
        if outcome.all() or not outcome.any():
            _warn_of_bounds(self, len(odds))
        # rounded, so that rounding errors do not sort what is equal
        x, group = np.unique(odds.round(4), return_inverse=True)
        mass = np.bincount(group, share).astype(np.float64)
        gain = np.bincount(group, share * (outcome - expit(odds))).astype(np.float64)
        shift = _smooth_slope(mass, gain, self.knots)
        middle = np.cumsum(mass) - mass / 2
        wanted = np.linspace(middle[0], middle[-1], _MAX_CURVE_POINTS)
        chosen = np.unique(np.searchsorted(middle, wanted).clip(max=len(x) - 1))
        self._store(odds_=x[chosen], shift_=shift[chosen], least_=0.5 / len(odds))
        self.solution_ = None

    def _map(self, odds: Tensor) -> Tensor:
        shift = _interpolate(odds, self.odds_, self.shift_)
        least = self.least_.to(odds.dtype)
        right, wrong = torch.sigmoid(odds) + shift, torch.sigmoid(-odds) - shift
        return right.clamp(least, 1 - least).log() - wrong.clamp(least, 1 - least).log()


class QuadraticScaling(TopLabelMap):
    r"""A quadratic for the log-odds of class 1: :math:`x' = a x^2 + b x + c`.

    It is right where the log-odds of both classes are normal, with different variances. The mean
    negative log-likelihood has a ridge towards :math:`(0, 1, 0)`,

    .. math:: \frac1n \left(100\, a^2 + (b - 1)^2\right),

    one example's worth at :math:`x = 10`, where log-odds are cut: forests and naive Bayes are as
    sure as that without a reason, and a square would let these examples decide the fit. The curve
    falls on one side of its vertex. For two classes only.

    Attributes
    ----------
    line_ : (3,) Tensor
        :math:`a`, :math:`b` and :math:`c`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = 2 * rng.normal(size=20_000)
    >>> truth = 0.2 * odds**2 + odds - 1
    >>> labels = (rng.random(20_000) < 1 / (1 + np.exp(-truth))).astype(int)
    >>> QuadraticScaling().fit(odds, labels).line_.numpy().round(1)
    array([ 0.2,  1. , -1. ], dtype=float32)
    """

    name = "quadratic"
    aliases = ("quadratic_scaling",)
    part_of_auto = True
    two_classes_only = True
    tempered = False
    parameter_count = 3
    limit = _MAX_SQUARED_ODDS

    def __init__(self) -> None:
        super().__init__(keep_argmax=False)
        self._store(line_=torch.tensor([0.0, 1.0, 0.0]))

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        inputs = np.stack([odds * odds, odds], -1)
        prior: Any = {
            "start": (0.0, 1.0),
            "ridge": (_MAX_SQUARED_ODDS**2, 1.0),
            "lowest": -MAX_SLOPE,
        }
        result = _fit_logistic(inputs, outcome, weight, **prior)
        self._store(line_=self._keep(result, len(odds)))

    def _map(self, odds: Tensor) -> Tensor:
        line = self.line_.to(odds.dtype)
        return torch.stack([odds * odds, odds], -1) @ line[:2] + line[2]


class RobustSigmoid(TopLabelMap):
    r"""A line for the log-odds of class 1 that bends where they are large.

    .. math:: x' = a\,(x - \operatorname{asinh} x) + b \operatorname{asinh} x + c

    with :math:`a, b \ge 0`: the slope is :math:`b` at :math:`x = 0` and approaches :math:`a` for
    large :math:`|x|`, where :math:`\operatorname{asinh} x` grows like a logarithm. With
    :math:`a = b` it is :class:`SigmoidScaling`, whose one slope must serve both the middle and the
    saturated scores of forests, boosting and naive Bayes. The mean negative log-likelihood has a
    ridge :math:`\frac1n ((a - 1)^2 + (b - 1)^2)`, one example's worth. For two classes only. This
    is calibrant's own method.

    Attributes
    ----------
    line_ : (3,) Tensor
        :math:`a`, :math:`b` and :math:`c`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=20_000)
    >>> labels = (rng.random(20_000) < 1 / (1 + np.exp(-truth))).astype(int)
    >>> fitted = RobustSigmoid().fit(np.sinh(truth), labels)  # too sure, the more so the surer
    >>> fitted.line_
    tensor([ 0.01...,  0.99..., -0.00...])
    """

    name = "robust_sigmoid"
    aliases = ("robust_platt",)
    part_of_auto = True
    two_classes_only = True
    tempered = False
    parameter_count = 3

    def __init__(self) -> None:
        super().__init__(keep_argmax=False)
        self._store(line_=torch.tensor([1.0, 1.0, 0.0]))

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        inputs = self._inputs(torch.from_numpy(odds)).numpy()
        result = _fit_logistic(inputs, outcome, weight, ridge=(1.0, 1.0))
        self._store(line_=self._keep(result, len(odds)))

    def _map(self, odds: Tensor) -> Tensor:
        line = self.line_.to(odds.dtype)
        return self._inputs(odds) @ line[:2] + line[2]

    def _inputs(self, odds: Tensor) -> Tensor:
        bent = torch.asinh(odds)
        return torch.stack([odds - bent, bent], -1)


class VennAbers(TopLabelMap):
    r"""Inductive Venn-Abers prediction (Vovk, Petej and Fedorova 2015).

    An isotonic regression is fitted with the new example labelled 0, and one with it labelled 1.
    Their values at the new example are :math:`p_0 \le p_1`, and

    .. math:: p = \frac{p_1}{1 - p_0 + p_1}.

    If the examples are exchangeable, the one of :math:`p_0` and :math:`p_1` that belongs to the
    true label is calibrated, whatever the model. Unlike isotonic regression it never claims 0
    or 1. Log-odds are compared in single precision. A new example weighs as much as the mean
    example of the fit. For two classes only.

    Attributes
    ----------
    edges_, levels_ : (2, m) and (2, m + 1) Tensor
        Log-odds between steps, and :math:`1 - p_0` (first row, of the log-odds of class 0) and
        :math:`p_1` there.

    Examples
    --------
    >>> odds = np.linspace(-2, 2, 60)
    >>> labels = np.array([0] * 20 + [0, 1] * 10 + [1] * 20)
    >>> fitted = VennAbers().fit(odds, labels)
    >>> low, high = fitted.predict_bounds(np.array([-2.0, 0.0, 2.0]))
    >>> low.round(2), high.round(2)
    (array([0.  , 0.45, 0.95]), array([0.05, 0.55, 1.  ]))
    >>> fitted.predict_proba(np.array([-2.0, 0.0, 2.0])).round(2)
    array([0.04, 0.5 , 0.96])
    """

    name = "venn_abers"
    aliases = ("ivap", "vennabers")
    summary = "isotonic fits with a new example in either class (Venn-Abers)"
    two_classes_only = True
    tempered = False
    parameter_count = _VENN_ABERS_SIZE
    limit = LARGEST_GAP
    learned_shapes = "edges_ classes cuts; levels_ classes cuts+1"
    positive = (*TopLabelMap.positive, "levels_")

    def __init__(self) -> None:
        super().__init__(keep_argmax=False)
        self._store(edges_=torch.zeros(2, 0), levels_=torch.full((2, 1), 0.5))

    def predict_bounds(self, logits: Values) -> tuple[Any, Any]:
        """The probabilities :math:`p_0` and :math:`p_1` of class 1, each of the rows' shape."""
        scores = self._checked(logits)
        rows = self._wide(scores)
        with torch.no_grad():
            miss, hit = self._levels(rows[..., 1] - rows[..., 0]).unbind(-1)
        if isinstance(logits, Tensor):
            return 1 - miss, hit
        return (1 - miss).cpu().numpy(), hit.cpu().numpy()

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        weight, single = weight / weight.mean(), odds.astype(np.float32)
        curves = [
            _venn_abers_steps(-single, ~outcome, weight),
            _venn_abers_steps(single, outcome, weight),
        ]
        edges, levels = zip(*curves, strict=True)
        self._store(edges_=_filled(edges, BEYOND), levels_=_filled(levels, 1.0))
        self.solution_ = None

    def _levels(self, odds: Tensor) -> Tensor:
        """``(...) -> (..., 2)``: :math:`1 - p_0` and :math:`p_1`."""
        both = torch.stack([-odds, odds], -1).float()  # as in the fit
        return _at_place(self.levels_.to(odds.dtype), _place(both, self.edges_))

    def _map(self, odds: Tensor) -> Tensor:
        miss, hit = self._levels(odds).log().unbind(-1)
        return hit - miss


def fit_platt(odds: FloatArray, correct: BoolArray, weight: FloatArray) -> Solution:
    r"""The rising line :math:`s' = a s + b` under which outcomes are likeliest (Platt 1999).

    Inputs are ``(n,)``, the solution ``(slope, offset)``. Data without an optimum (all right, all
    wrong, or right exactly above some log-odds) are not ``converged``, and may end at a bound:
    :data:`MAX_SLOPE` for the slope, :data:`MAX_MEAN_ODDS` for the new log-odds at the mean of the
    old ones.
    """
    share = weight / weight.sum()
    centre = float(share @ odds)
    centred = odds - centre

    def value_and_gradient(line: FloatArray) -> tuple[float, FloatArray]:
        result = line[0] * centred + line[1]
        value = float(share @ (np.logaddexp(0, result) - correct * result))
        pull = share * (expit(result) - correct)
        return value, np.array([pull @ centred, pull.sum()])

    start = np.array([1.0, np.clip(centre, -MAX_MEAN_ODDS, MAX_MEAN_ODDS)])
    bounds = [(0.0, MAX_SLOPE), (-MAX_MEAN_ODDS, MAX_MEAN_ODDS)]
    result = minimise_within(value_and_gradient, start, bounds)
    slope, level = result.x
    # a threshold tells right from wrong: no line is steep enough
    separable = odds.max(where=~correct, initial=-np.inf) < odds.min(where=correct, initial=np.inf)
    # within rounding of a bound is at the bound
    inside = slope < MAX_SLOPE * (1 - 1e-6) and abs(level) < MAX_MEAN_ODDS * (1 - 1e-6)
    return result._replace(
        x=np.array([slope, level - slope * centre]),
        converged=bool(result.converged and inside and not separable),
    )


def fit_beta(odds: FloatArray, correct: BoolArray, weight: FloatArray) -> Solution:
    """The beta map ``(a, b, m)`` under which outcomes are likeliest; see :func:`fit_platt`."""
    inputs = np.stack([-np.logaddexp(0, -odds), np.logaddexp(0, odds)], axis=1)
    return _fit_logistic(inputs, correct, weight)


def _fit_logistic(
    inputs: FloatArray,
    outcome: BoolArray,
    weight: FloatArray,
    *,
    start: Sequence[float] = (1.0, 1.0),
    ridge: Sequence[float] = (0.0, 0.0),
    lowest: float = 0.0,
) -> Solution:
    r"""Coefficients of a logistic regression on two inputs ``(n, 2)``, and its offset.

    .. math:: \frac1n \sum_i \text{NLL}_i + \frac1n \sum_j \lambda_j (w_j - w_j^0)^2

    with the ``ridge`` :math:`\lambda` that draws coefficients to their ``start`` :math:`w^0`. They
    are at least ``lowest``; the other bounds, for data without an optimum, are those of
    :func:`fit_platt`. The offset is free.
    """
    # the offset is bounded by way of the new log-odds at the mean of the inputs
    share, prior, pull = weight / weight.sum(), np.array(start), np.array(ridge) / len(inputs)
    columns = np.append(inputs, np.ones((len(inputs), 1)), axis=1)
    centre = share @ columns[:, :2]
    columns[:, :2] -= centre
    likelihood = _confidence_objective(columns, outcome, share, 0.0)

    def value_and_gradient(line: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = likelihood(line)
        off = line[:2] - prior
        return value + float(pull @ off**2), gradient + np.append(2 * pull * off, 0)

    bounds = [(lowest, MAX_SLOPE)] * 2 + [(-MAX_MEAN_ODDS, MAX_MEAN_ODDS)]
    level = np.clip(centre @ prior, -MAX_MEAN_ODDS, MAX_MEAN_ODDS)
    result = minimise_within(value_and_gradient, np.append(prior, level), bounds)
    inside = bool((np.abs(result.x) < [high for _, high in bounds]).all())
    x = np.append(result.x[:2], result.x[2] - result.x[:2] @ centre)
    return result._replace(x=x, converged=result.converged and inside)


def _smooth_slope(mass: FloatArray, gain: FloatArray, knots: int) -> FloatArray:
    """Mean slope of the spline over each of the parts ``(m,)`` that make up ``[0, 1]``.

    ``mass`` has their lengths and ``gain`` the rise of the curve, a broken line from 0, over each.
    """
    ends = np.append(0, np.cumsum(mass))
    ends /= ends[-1]
    curve = np.append(0, np.cumsum(gain))
    at = np.linspace(0, 1, knots)
    basis = CubicSpline(at, np.eye(knots), bc_type="natural")
    cuts = np.union1d(ends, at)
    node, part = np.polynomial.legendre.leggauss(4)  # exact for products of two cubics
    gram, pull = np.zeros((knots, knots)), np.zeros(knots)
    for run in chunk_slices(cuts[1:]):
        low, high = cuts[:-1][run, None], cuts[1:][run, None]
        t = (low + high + (high - low) * node).ravel() / 2
        values, weight = basis(t), ((high - low) * part).ravel()
        gram += values.T @ (weight[:, None] * values)
        pull += values.T @ (weight * np.interp(t, ends, curve))
    spline = CubicSpline(at, np.linalg.solve(gram, pull), bc_type="natural")
    width = np.diff(ends)
    rises = np.diff(spline(ends)) / np.where(width > 1e-9, width, 1)
    return np.where(width > 1e-9, rises, spline((ends[:-1] + ends[1:]) / 2, 1))


def _venn_abers_steps(
    odds: NDArray[np.float32], outcome: BoolArray, weight: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The value :math:`p_1` of a new example as a function of its log-odds.

    Returns edges ``(m,)`` and levels ``(m + 1,)`` of steps ``(low, high]``: between two log-odds of
    the fit it is that of the upper one, since a 1 in between joins the same steps, and 1 above all.
    """
    value, group = np.unique(odds, return_inverse=True)
    mass, hits = (np.bincount(group, w).astype(np.float64) for w in (weight, weight * outcome))
    level = np.append(_labelled_one(hits, mass), 1.0)
    last = np.append(np.diff(level) > 0, True)  # of equal levels
    return value[last[:-1]].astype(np.float64), level[last]


def _labelled_one(hits: FloatArray, mass: FloatArray) -> FloatArray:
    r"""Isotonic regression at each of ``(m,)`` groups, had it one more example, with outcome 1.

    The regression is the slope of the lower convex hull of the points :math:`P_i`, cumulated
    masses and hits. One more hit in group :math:`i` moves all points before it by :math:`(-1, -1)`,
    relative to the others. From group to group one point more is moved. The slope that is wanted,
    that of the edge over the group, never falls, so the left end of this edge only changes to the
    point moved last, and each point enters and leaves the hull once (after Vovk et al. 2015).
    """
    points = list(zip(np.cumsum(mass).tolist(), np.cumsum(hits).tolist(), strict=True))
    hull: list[_Point] = []  # from right to left
    for point in [*reversed(points), (-1.0, -1.0)]:
        _push(hull, point)
    result = np.empty(len(points))
    for i, (x, y) in enumerate(points):
        if i % 4096 == 0:
            check_time()
        (x0, y0), (x1, y1) = hull[-1], hull[-2]
        result[i] = (y1 - y0) / (x1 - x0)
        moved = x - 1, y - 1
        if _turn(hull[-1], hull[-2], moved) < 0:  # below the edge, or its right end was moved
            hull.pop()
            _push(hull, moved)
    return result


def _push(hull: list[_Point], point: _Point) -> None:
    """Add a point to the left of a lower hull, and drop those that are above it now."""
    while len(hull) > 1 and _turn(point, hull[-1], hull[-2]) <= 0:
        hull.pop()
    hull.append(point)


def _turn(a: _Point, b: _Point, c: _Point) -> float:
    """Positive where c is above the line from a to b."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
