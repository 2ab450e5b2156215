"""Maps of the log-odds of the top class with two or three parameters: Platt's line, beta."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.solve import Solution, minimise_within
from calibrant.calibrators.platt import FARTHEST, STEEPEST, fit_platt
from calibrant.calibrators.top_label import TopLabelMap, confidence_objective, warn_of_bounds


class SigmoidScaling(TopLabelMap):
    r"""A line for the log-odds of the top class: :math:`s' = a s + b` (Platt 1999).

    The slope is at least 0. Platt's priors, which pull outcomes away from 0 and 1, are left out:
    calibration sets are large enough. The other classes keep their proportions.

    Parameters
    ----------
    keep_argmax : bool
        Hold every other class below the top one. If False, a top class that becomes less likely
        than another gives way to it.

    Attributes
    ----------
    slope_, offset_ : scalar Tensor

    Examples
    --------
    >>> from scipy.special import expit
    >>> rng = np.random.default_rng(0)
    >>> odds = rng.normal(size=20_000)
    >>> surer = np.abs(odds)
    >>> right = rng.random(20_000) < expit(0.5 * surer + 1)
    >>> fitted = SigmoidScaling().fit(odds, np.where(right, odds > 0, odds < 0).astype(int))
    >>> round(float(fitted.slope_), 1), round(float(fitted.offset_), 1)
    (0.5, 1.0)
    """

    name = "sigmoid"
    aliases = ("platt", "platt_scaling")
    summary = "a straight line for the log-odds of the top class (Platt)"
    tempered = False
    slope_: Tensor
    offset_: Tensor

    def __init__(self, *, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._store(slope_=1.0, offset_=0.0)

    def size(self, classes: int) -> int:
        """Slope and offset."""
        return 2

    def _fit_map(self, odds: FloatArray, correct: BoolArray, weight: FloatArray) -> None:
        self.solution_ = fit_platt(odds, correct, weight)
        if not self.solution_.converged:
            warn_of_bounds(self, len(odds))
        slope, offset = self.solution_.x
        self._store(slope_=slope, offset_=offset)

    def _map(self, odds: Tensor) -> Tensor:
        return self.slope_.to(odds.dtype) * odds + self.offset_.to(odds.dtype)


class BetaCalibration(TopLabelMap):
    r"""Beta calibration of the confidence (Kull et al. 2017).

    .. math:: \log\frac{c'}{1 - c'} = a \log c - b \log(1 - c) + m

    with :math:`a, b \ge 0`: the map that is right where the confidences of right and of wrong
    answers are beta distributed. :math:`a = b` is :class:`SigmoidScaling`. (The authors' code drops
    one term whose coefficient would be negative and fits the other freely, so its map can fall.)

    Parameters
    ----------
    keep_argmax : bool
        Hold every other class below the top one.

    Attributes
    ----------
    line_ : (3,) Tensor
        :math:`a`, :math:`b` and :math:`m`.

    Examples
    --------
    >>> from scipy.special import expit
    >>> rng = np.random.default_rng(0)
    >>> sure = rng.uniform(0.5, 1, 200_000)
    >>> odds = np.log(sure) - np.log(1 - sure)
    >>> right = rng.random(200_000) < expit(2 * np.log(sure) - 0.5 * np.log(1 - sure))
    >>> BetaCalibration().fit(odds, right.astype(int)).line_[:2]
    tensor([2.0..., 0.5...])
    """

    name = "beta"
    aliases = ("beta_calibration",)
    summary = "a line in the logarithms of confidence and doubt"
    tempered = False
    line_: Tensor

    def __init__(self, *, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._store(line_=torch.tensor([1.0, 1.0, 0.0]))

    def size(self, classes: int) -> int:
        """Two slopes and an offset."""
        return 3

    def _fit_map(self, odds: FloatArray, correct: BoolArray, weight: FloatArray) -> None:
        self.solution_ = fit_beta(odds, correct, weight)
        if not self.solution_.converged:
            warn_of_bounds(self, len(odds))
        self._store(line_=self.solution_.x)

    def _map(self, odds: Tensor) -> Tensor:
        a, b, m = self.line_.to(odds.dtype).unbind()
        return b * softplus(odds) - a * softplus(-odds) + m


def fit_beta(odds: FloatArray, correct: BoolArray, weight: FloatArray) -> Solution:
    """The beta map ``(a, b, m)`` under which outcomes are likeliest; see :func:`fit_platt`.

    ``m`` is bounded by way of the new log-odds at the mean of the inputs.
    """
    share = weight / weight.sum()
    inputs = np.stack([-np.logaddexp(0, -odds), np.logaddexp(0, odds), np.ones(len(odds))], axis=1)
    centre = share @ inputs[:, :2]
    inputs[:, :2] -= centre
    bounds = [(0.0, STEEPEST)] * 2 + [(-FARTHEST, FARTHEST)]
    start = np.array([1.0, 1.0, np.clip(centre.sum(), -FARTHEST, FARTHEST)])
    result = minimise_within(confidence_objective(inputs, correct, share, 0.0), start, bounds)
    (a, b, level), limits = result.x, [high for _, high in bounds]
    inside = bool((np.abs(result.x) < limits).all())
    x = np.array([a, b, level - result.x[:2] @ centre])
    return result._replace(x=x, converged=result.converged and inside)
