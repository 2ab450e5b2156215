"""Smooth maps of one probability, of the top class or class 1: Platt's line, beta, a spline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.special import expit
from torch import Tensor
from torch.nn.functional import softplus

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.chunks import chunk_slices
from calibrant._core.options import at_least
from calibrant._core.solve import Solution, minimise_within
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.piecewise import _interpolate
from calibrant.calibrators.top_label import TopLabelMap, _confidence_objective, _warn_of_bounds

MAX_SLOPE = 1 / BOUNDS[0]  # largest slope, which is the largest sharpness of a temperature
_MAX_CURVE_POINTS = 512
"""Of a stored curve at most: lines between them are off by a hundredth of its noise."""
MAX_MEAN_ODDS = 20.0  # largest log-odds, either way, of the mean example: 1 in 500 million is wrong


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
    for run in chunk_slices(len(cuts) - 1):
        low, high = cuts[:-1][run, None], cuts[1:][run, None]
        t = (low + high + (high - low) * node).ravel() / 2
        values, weight = basis(t), ((high - low) * part).ravel()
        gram += values.T @ (weight[:, None] * values)
        pull += values.T @ (weight * np.interp(t, ends, curve))
    spline = CubicSpline(at, np.linalg.solve(gram, pull), bc_type="natural")
    width = np.diff(ends)
    rises = np.diff(spline(ends)) / np.where(width > 1e-9, width, 1)
    return np.where(width > 1e-9, rises, spline((ends[:-1] + ends[1:]) / 2, 1))
