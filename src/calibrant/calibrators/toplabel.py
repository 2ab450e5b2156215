r"""Maps of the top class's confidence, and how the rest of the row moves with it."""

from __future__ import annotations

import warnings
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from calibrant._checks import BoolArray, FloatArray
from calibrant._partition import LARGEST_GAP, Records
from calibrant._solve import Objective, minimise
from calibrant.calibrators.base import Claims, RecordsCalibrator, check_choice
from calibrant.calibrators.objectives import binned_gaps
from calibrant.calibrators.scaling import best_sharpness

CERTAIN = 30.0
"""Log-odds beyond which float32 cannot tell a confidence from 0 or 1."""


def with_log_odds(logits: Tensor, odds: Tensor) -> Tensor:
    r"""Give the top class new log-odds; the other classes keep their proportions.

    .. math:: z'_\text{top} = 0, \qquad z'_k = z_k - \log\sum_{j \ne \text{top}} e^{z_j} - s

    so that the confidence is :math:`\sigma(s)`. Where that would lift another class above the top
    one, a calibrator that keeps the argmax holds it just below: the confidence of the top class
    then ends above the wanted one, at that of the runner-up.

    Parameters
    ----------
    logits : (..., classes)
        With the largest at 0.
    odds : (..., 1)
    """
    return _without_top(logits, logits - log_rest(logits) - odds, 0.0)


def log_rest(logits: Tensor) -> Tensor:
    """Logarithm of the sum over all classes but the top one, ``(..., 1)``.

    With the largest logit at 0 its negative are the log-odds of the top class. It is finite also
    where no other class is possible.
    """
    rest = _without_top(logits, logits, -torch.inf).logsumexp(-1, keepdim=True)
    return rest.clamp(min=-LARGEST_GAP)


def _without_top(logits: Tensor, values: Tensor, at_top: float) -> Tensor:
    """Put a number in the place of the top class, the first of equals."""
    top = logits.argmax(-1, keepdim=True)
    return values.scatter(-1, top, at_top)


class OddsMap(RecordsCalibrator):
    r"""A temperature, then a monotone map of the log-odds :math:`s` of the top class.

    The log-odds become :math:`s' = \sum_j \theta_j \phi_j(s) + \theta_0` with increasing
    :math:`\phi_j` and :math:`\theta_j \ge 0`, and the other classes keep their proportions
    (:func:`with_log_odds`). The negative log-likelihood then falls apart into that of "is the
    top class right?" and that of the rest, so that calibrating the first does not cost the
    second, as it does under a temperature.

    Subclasses write ``_basis`` and may place their knots in ``_prepare``.
    """

    LIMIT: ClassVar[float] = 20.0
    """Largest parameter: data without an optimum end there, with a warning."""

    temperature_: Tensor
    parameters_: Tensor

    objective: str

    def _basis(self, odds: Tensor) -> Tensor:
        """Increasing functions of log-odds ``(...) -> (..., functions)``."""
        raise NotImplementedError

    def _prepare(self, odds: FloatArray, share: FloatArray) -> None:
        """Place what the basis needs, given the log-odds ``(n,)`` of the fit."""

    def _options(self, objective: str, functions: int) -> None:
        check_choice("objective", objective, ("both", "nll"))
        self.objective = objective
        # theta_0 stands last
        start = torch.cat([torch.ones(functions), torch.zeros(1)])
        self._learned(temperature_=1.0, parameters_=start)

    def size(self, classes: int) -> int:
        """The parameters of the map, and the temperature."""
        return len(self.parameters_) + 1

    def _fit_records(self, records: Records) -> None:
        self._learned(temperature_=np.exp(-best_sharpness(records).x[0]))
        odds, share = self._odds(records), records.weight / records.weight.sum()
        self._prepare(odds, share)
        functions = len(self.parameters_) - 1
        found = minimise(
            _confidence_objective(
                self._inputs(odds), records.correct, share, float(self.objective == "both")
            ),
            np.array([1.0] * functions + [0.0]),
            bounds=[(0.0, self.LIMIT)] * functions + [(-self.LIMIT, self.LIMIT)],
        )
        if not found.converged or np.abs(found.x).max() >= self.LIMIT:
            warnings.warn(
                f"{type(self).__name__} found no optimum for these {len(records):,} samples and "
                "stopped at its bounds; are all of them right, or all wrong?",
                stacklevel=5,
            )
        self.solution_ = found
        self._learned(parameters_=found.x)

    def _odds(self, records: Records) -> FloatArray:
        rest = records.log_rest(1 / float(self.temperature_)).value
        return np.clip(-rest, -CERTAIN, CERTAIN)

    def _inputs(self, odds: FloatArray) -> FloatArray:
        """The basis and a column of ones, ``(n, parameters)``."""
        basis = self._basis(torch.from_numpy(odds).to(self.parameters_.device)).cpu().numpy()
        return np.concatenate([basis, np.ones((len(odds), 1))], axis=1)

    def claims(self, records: Records) -> Claims:
        """Confidence and negative log-likelihood of each sample after calibration."""
        b = 1 / float(self.temperature_)
        odds = self._inputs(self._odds(records)) @ self.parameters_.double().cpu().numpy()
        rest = records.log_rest(b).value
        # logits of the runners-up and of the label, before the argmax is seen to
        gaps = np.minimum(records.gaps[:, 1:].astype(np.float64), LARGEST_GAP)
        next_best = -b * gaps - (rest + odds)[:, None]
        own = np.where(records.correct, 0.0, np.minimum(-b * records.own_gap - rest - odds, 0))
        lifted = np.expm1(np.clip(next_best, 0, CERTAIN)).sum(1)
        total = np.log1p(np.maximum(np.exp(-odds) - lifted, 0))
        return Claims(np.exp(-total), total - own)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        tempered = logits / self.temperature_.to(logits.dtype)
        odds = (-log_rest(tempered)).clamp(-CERTAIN, CERTAIN)
        parameters = self.parameters_.to(logits.dtype)
        moved = self._basis(odds[..., 0]) @ parameters[:-1] + parameters[-1]
        return with_log_odds(tempered, moved[..., None])


class OddsScaling(OddsMap):
    r"""A temperature, then a rising broken line for the log-odds of the top class.

    .. math:: s' = \theta_1 \min(s, k_1) + \theta_2\,[s]_{k_1}^{k_2} + \theta_3 \max(s - k_2, 0)
        + \theta_0

    with two knots :math:`k` where the uncertain samples are: they cut the sum of
    :math:`c\,(1 - c)`, the variance of being right, into thirds. Five parameters, all slopes at
    least 0. This is calibrant's own method.

    Parameters
    ----------
    objective : {"both", "nll"}
        ``both`` adds the soft-binned calibration error (:func:`objectives.soft_ece`) to the
        negative log-likelihood.
    knots : int

    Attributes
    ----------
    temperature_ : scalar Tensor
    knots_ : (knots,) Tensor
    parameters_ : (knots + 2,) Tensor
        Slopes, then the offset.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(5000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> OddsScaling().fit(3 * truth, labels).temperature_
    tensor(3.0...)
    """

    LIMIT = 5.0
    knots_: Tensor

    def __init__(self, *, objective: Literal["both", "nll"] = "both", knots: int = 2) -> None:
        super().__init__()
        if knots < 1:
            raise ValueError(f"knots must be at least 1, got {knots}")
        self.knots = knots
        self._options(objective, knots + 1)
        self._learned(knots_=torch.zeros(knots))

    def _prepare(self, odds: FloatArray, share: FloatArray) -> None:
        confidence = expit(odds)
        order = np.argsort(odds, kind="stable")
        doubt = np.cumsum((share * confidence * (1 - confidence))[order])
        cuts = doubt[-1] * np.arange(1, self.knots + 1) / (self.knots + 1)
        self._learned(knots_=odds[order][np.searchsorted(doubt, cuts)])

    def _basis(self, odds: Tensor) -> Tensor:
        knots = self.knots_.to(odds.dtype)
        low = torch.cat([knots.new_full((1,), -torch.inf), knots])
        high = torch.cat([knots, knots.new_full((1,), torch.inf)])
        start = torch.cat([knots.new_zeros(1), knots])
        return odds[..., None].clamp(low, high) - start


def _confidence_objective(
    inputs: FloatArray, correct: BoolArray, share: FloatArray, weight: float
) -> Objective:
    """Likelihood of being right under log-odds linear in the inputs, plus weighted soft ECE."""

    def value_and_gradient(parameters: FloatArray) -> tuple[float, FloatArray]:
        odds = inputs @ parameters
        confidence = expit(odds)
        value = float(share @ (np.logaddexp(0, odds) - correct * odds))
        gradient = share * (confidence - correct)
        if weight:
            gap, by_confidence = binned_gaps(confidence, correct, share, sigma=0.05, delta=1e-3)
            value += weight * gap
            gradient = gradient + weight * by_confidence * confidence * (1 - confidence)
        return value, gradient @ inputs

    return value_and_gradient
