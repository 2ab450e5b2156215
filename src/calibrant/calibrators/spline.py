"""Recalibration of the confidence by a spline through cumulated errors."""

from __future__ import annotations

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.special import expit
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, check_whole
from calibrant._core.chunks import chunk_slices
from calibrant.calibrators.piecewise import interpolate
from calibrant.calibrators.top_label import TopLabelMap, warn_of_bounds

POINTS = 512
"""Points of a stored curve at most: what lies between is off by a hundredth of its noise."""


class SplineCalibration(TopLabelMap):
    r"""Recalibration by the slope of a spline through cumulated errors (Gupta et al. 2021).

    Examples are sorted by their confidence :math:`c`. With the share :math:`t` of examples up to
    one of them, the cumulated error

    .. math:: e(t) = \int_0^t (\text{right} - c)

    has the slope :math:`e'(t) = P(\text{right} \mid c) - c`. A natural cubic spline with equally
    spaced knots is fitted to it by least squares, and :math:`c' = c + e'(t)`.

    The least squares are an integral over :math:`t`, not a sum over examples as in the paper, so
    that the order of examples of equal confidence does not matter and a weight of 2 is an example
    twice. :math:`c'` is kept :math:`1 / 2n` away from 0 and 1, where the paper cuts at 0 and 1 and
    one wrong answer could cost any amount of likelihood. The map need not rise: it can change which
    of two examples is the surer, and thus the AUROC.

    Parameters
    ----------
    knots : int
        The paper has 6.
    keep_argmax : bool
        Hold every other class below the top one.

    Attributes
    ----------
    odds_, shift_ : (points,) Tensor
        Log-odds, and what is added to a confidence there; lines between, level beyond.
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
    odds_: Tensor
    shift_: Tensor
    least_: Tensor
    learned_shapes = "odds_ points; shift_ points"

    def __init__(self, *, knots: int = 6, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        check_whole("knots", knots, 2)
        self.knots = knots
        self._store(odds_=torch.zeros(1), shift_=torch.zeros(1), least_=1e-9)

    def size(self, classes: int) -> int:
        """The values at the knots."""
        return self.knots

    def _fit_map(self, odds: FloatArray, correct: BoolArray, weight: FloatArray) -> None:
        share = weight / weight.sum()
        if correct.all() or not correct.any():
            warn_of_bounds(self, len(odds))
        # rounded, so that rounding errors do not sort what is equal
        x, group = np.unique(odds.round(4), return_inverse=True)
        mass = np.bincount(group, share).astype(np.float64)
        gain = np.bincount(group, share * (correct - expit(odds))).astype(np.float64)
        shift = smooth_slope(mass, gain, self.knots)
        middle = np.cumsum(mass) - mass / 2
        wanted = np.linspace(middle[0], middle[-1], POINTS)
        chosen = np.unique(np.searchsorted(middle, wanted).clip(max=len(x) - 1))
        self._store(odds_=x[chosen], shift_=shift[chosen], least_=0.5 / len(odds))
        self.solution_ = None

    def _map(self, odds: Tensor) -> Tensor:
        shift = interpolate(odds, self.odds_, self.shift_)
        least = self.least_.to(odds.dtype)
        right, wrong = torch.sigmoid(odds) + shift, torch.sigmoid(-odds) - shift
        return right.clamp(least, 1 - least).log() - wrong.clamp(least, 1 - least).log()


def smooth_slope(mass: FloatArray, gain: FloatArray, knots: int) -> FloatArray:
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
