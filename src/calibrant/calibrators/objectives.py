r"""Objectives of temperatures, from the log-partition table, with gradients in closed form.

An objective takes records and the log-sharpness :math:`u = -\log T`, one for all examples or one
for each ``(n,)``, and returns its value with its derivative by each example's ``u`` ``(n,)``. Of
records on a device all of them are tensors there, which nothing waits for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant._core.chunks import chunk_slices, namespace
from calibrant.calibrators.logpartition import Curve, Records
from calibrant.metrics.binned import ece as binned_ece

LogSharpness: TypeAlias = float | FloatArray


class Measured(NamedTuple):
    """Value of an objective and its derivative by the log-sharpness of each example ``(n,)``."""

    value: float
    gradient: FloatArray


Objective: TypeAlias = Callable[[Records, LogSharpness], Measured]

BINS = 15
_CENTRES = (np.arange(BINS) + 0.5) / BINS
_GRID_FROM = 1000  # examples from which on a grid is faster, on the CPU
_GRID = 2048  # steps of the confidence between which the parts in the bins are interpolated
_NARROW = 0.02  # a kernel whose values at the centres leave the range of float64


def nll(records: Records, u: LogSharpness, *, smoothing: float = 0.0) -> Measured:
    r"""Mean of :math:`b d_y + A(b)`, with label smoothing."""
    b, gap = _exp(u), records.own_gap
    if smoothing:
        gap = (1 - smoothing) * gap + smoothing * records.mean_gap
    return _likelihood(records.share, b * gap, records.log_partition(b))


def _likelihood(share: FloatArray, linear: FloatArray, curve: Curve) -> Measured:
    r"""Mean of :math:`b d_y + A(b)` from its terms, which are linear in b, and a curve."""
    mean: Any = share @ (linear + curve.value)
    return Measured(mean, share * (linear + curve.slope))


def brier(records: Records, u: LogSharpness) -> Measured:
    r"""Mean of :math:`\sum_k (p_k - [k = y])^2 = 1 - 2 e^{-b d_y - A(b)} + e^{A(2b) - 2A(b)}`."""
    b, share = _exp(u), records.share
    value, slope = records.log_partition(b)
    value2, slope2 = records.log_partition(2 * b)
    true, squares = _exp(-b * records.own_gap - value), _exp(value2 - 2 * value)
    gradient = 2 * true * (b * records.own_gap + slope) + squares * (slope2 - 2 * slope)
    return Measured(share @ (1 - 2 * true + squares), share * gradient)


def _mse(records: Records, u: LogSharpness) -> Measured:
    """The Brier score as a mean over the classes instead of their sum."""
    value, gradient = brier(records, u)
    return Measured(value / records.classes, gradient / records.classes)


def confidence_nll(records: Records, u: LogSharpness) -> Measured:
    r"""Log-loss of the confidence p that the top token is right.

    With :math:`R = \log((1 - p) / p)`: the mean of :math:`\log(1 + e^{\pm R})`.
    """
    rest, slope = records.log_rest(np.exp(u))
    sign, share = np.where(records.correct, 1.0, -1.0), records.share
    value = share @ np.logaddexp(0, sign * rest)
    return Measured(float(value), share * sign * expit(sign * rest) * slope)


def confidence_brier(records: Records, u: LogSharpness) -> Measured:
    r"""Brier score of the confidence: the mean of :math:`(p - [\text{top token right}])^2`."""
    rest, slope = records.log_rest(np.exp(u))
    confidence, share = expit(-rest), records.share
    gap = confidence - records.correct
    return Measured(float(share @ gap**2), share * 2 * gap * -confidence * expit(rest) * slope)


def soft_ece(
    records: Records,
    u: LogSharpness,
    *,
    sigma: float = 0.05,
    delta: float = 0.0,
    curve: Curve | None = None,
) -> Measured:
    r"""Soft-binned calibration error; with ``delta`` the Charbonnier penalty of SMART.

    .. math::
        \sum_b n_b \left[\sqrt{r_b^2 + \delta^2} - \delta\right], \qquad
        r_b = \frac{1}{n_b} \sum_i s_i w_{ib} (c_i - a_i), \quad n_b = \sum_i s_i w_{ib},

    where :math:`c_i` is the confidence, :math:`a_i` whether the answer is right, :math:`s_i` the
    share of an example and :math:`w_{ib} \propto \exp(-(c_i - \bar c_b)^2 / 2\sigma^2)` its part in
    the bin with centre :math:`\bar c_b`, with sum one.
    """
    on_cpu = not isinstance(records.own_gap, Tensor)
    gaps = _gridded_gaps if on_cpu and len(records) >= _GRID_FROM else _binned_gaps
    penalty = partial(gaps, sigma=sigma, delta=delta)
    return _by_confidence(penalty, records, u, curve)


def ece(records: Records, u: LogSharpness) -> Measured:
    """ECE with 15 equal-width bins. It has no useful gradient: NaN stands in its place."""
    sure = np.minimum(np.exp(-records.log_partition(np.exp(u)).value), 1)
    value = binned_ece(confidence=sure, outcome=records.correct, sample_weight=records.weight)
    return Measured(value, np.full(len(records), np.nan))


def pointwise(
    records: Records,
    u: LogSharpness,
    *,
    sigma: float = 0.05,
    delta: float = 1e-3,
    curve: Curve | None = None,
) -> Measured:
    r"""SMART's equation 6 to the letter: the penalty of each example before any average.

    .. math:: \sum_i s_i \sum_b w_{ib} \left[\sqrt{(a_i - \bar c_b)^2 + \delta^2} - \delta\right]

    It does not calibrate: it is smallest where confidence is 1 for all that is mostly right.
    """

    def penalty(
        confidence: FloatArray, outcome: BoolArray, share: FloatArray
    ) -> tuple[float, FloatArray]:
        part, centres = _memberships(confidence, sigma), _centres_for(confidence)
        cost = ((outcome - centres[:, None]) ** 2 + delta**2) ** 0.5 - delta
        value = (part * cost).sum(0)
        moved = (part * cost * (centres[:, None] - centres @ part)).sum(0) / sigma**2
        return share @ value, share * moved

    return _by_confidence(penalty, records, u, curve)


def _with_likelihood(
    objective: Callable[..., Measured], weight: float, records: Records, u: LogSharpness
) -> Measured:
    """An objective plus the weighted negative log-likelihood, from one look at the table."""
    b = _exp(u)
    curve = records.log_partition(b)
    value, gradient = objective(records, u, curve=curve)
    if not weight:
        return Measured(value, gradient)
    likelihood, slope = _likelihood(records.share, b * records.own_gap, curve)
    return Measured(value + weight * likelihood, gradient + weight * slope)


def _by_confidence(
    penalty: Callable[..., tuple[float, FloatArray]],
    records: Records,
    u: LogSharpness,
    curve: Curve | None,
) -> Measured:
    """A penalty on (confidence, outcome, share), with the chain rule through the table."""
    curve = curve or records.log_partition(_exp(u))
    confidence = _exp(-curve.value)
    result, gradient = penalty(confidence, records.correct, records.share)
    gradient *= -confidence
    gradient *= curve.slope
    return Measured(result, gradient)


def _binned_gaps(
    confidence: FloatArray, outcome: BoolArray, share: FloatArray, *, sigma: float, delta: float
) -> tuple[float, FloatArray]:
    """Value and gradient of :func:`soft_ece` by the confidences, each ``(n,)``."""
    xp, centres, gap = namespace(confidence), _centres_for(confidence), confidence - outcome
    together = [(run, _memberships(confidence[run], sigma)) for run in chunk_slices(confidence)]
    weighed = xp.stack([share, share * gap], 1)
    mass, total = reduce(operator.add, [part @ weighed[run] for run, part in together]).T
    value, rest, pull = _penalty(mass, total, delta)
    # d part / d confidence = part * (centre - mean centre of the example) / sigma^2
    factors = xp.stack([centres, rest, centres * rest, pull, centres * pull])
    gradient = xp.empty_like(confidence)
    for run, part in together:
        own, at_rest, far_rest, at_pull, far_pull = factors @ part
        moved = far_rest - own * at_rest + gap[run] * (far_pull - own * at_pull)
        gradient[run] = share[run] * (moved / sigma**2 + at_pull)
    return value, gradient


def _gridded_gaps(
    confidence: FloatArray, outcome: BoolArray, share: FloatArray, *, sigma: float, delta: float
) -> tuple[float, FloatArray]:
    """The same several times faster, where straight lines join the parts on a grid.

    The gradient is that of the lines, and jumps at the grid: nothing for line searches.
    """
    parts = _parts_on_grid(sigma)
    position = confidence * _GRID
    cell = np.minimum(position.astype(np.int64), _GRID - 1)
    along, gap = position - cell, confidence - outcome
    mass, total = (parts @ _on_grid(cell, along, x) for x in (share, share * gap))
    value, rest, pull = _penalty(mass, total, delta)
    by_mass, by_total = np.stack([rest, pull]) @ parts  # of an example at each point of the grid
    # the slope of one line times the gap, and of both the values, in two looks at the grid
    rise = _GRID * np.diff(by_total)
    fixed = _GRID * np.diff(by_mass) + by_total[:-1]
    along /= _GRID
    along += gap
    along *= rise.take(cell)
    along += fixed.take(cell)
    along *= share
    return value, along


def _exp(values: Any) -> Any:
    """Return exponentials of a number, an array or a tensor."""
    return values.exp() if isinstance(values, Tensor) else np.exp(values)


def _centres_for(confidence: FloatArray) -> FloatArray:
    """Return the centres of the bins ``(bins,)``, as a tensor for one."""
    if not isinstance(confidence, Tensor):
        return _CENTRES
    return _centres_on(confidence.device)


@lru_cache(maxsize=8)
def _centres_on(device: torch.device) -> Any:
    return torch.from_numpy(_CENTRES).to(device)


def _penalty(
    mass: FloatArray, total: FloatArray, delta: float
) -> tuple[float, FloatArray, FloatArray]:
    """Value of :func:`soft_ece`, and its derivatives by the masses and totals ``(bins,)``."""
    mean = total / (mass + (mass == 0))  # 0 in place of 0 / 0
    root = namespace(mass).sqrt(mean**2 + delta**2)
    pull = mean / (root if delta else root + (root == 0))
    excess = root - delta
    return mass @ excess, excess - mean * pull, pull


def _on_grid(cell: IntArray, along: FloatArray, values: FloatArray) -> FloatArray:
    """Sums of values ``(n,)``, each shared between both ends of its cell, ``(grid + 1,)``."""
    upper = values * along
    result = np.zeros(_GRID + 1)
    result[:-1] = np.bincount(cell, values - upper, _GRID)
    result[1:] += np.bincount(cell, upper, _GRID)
    return result


@lru_cache(maxsize=1)
def _parts_on_grid(sigma: float) -> FloatArray:
    return _memberships(np.arange(_GRID + 1) / _GRID, sigma)


def _memberships(confidence: FloatArray, sigma: float) -> FloatArray:
    """Part of each example in each bin, ``(bins, n)``, with sum one over the bins."""
    if isinstance(confidence, Tensor):  # fewer kernels, of which each goes through the memory once
        away = confidence - _centres_for(confidence)[:, None]
        return away.square_().mul_(-0.5 / sigma**2).softmax(0)
    if sigma > _NARROW:  # kernels over that at the middle centre
        # With equal steps between the centres, one exponential and products give them all:
        # (c - 1/2)^2 - (c - 1/2 - j / BINS)^2 = 2 (c - 1/2) j / BINS - (j / BINS)^2
        middle, width = BINS // 2, sigma * BINS
        step = np.exp((confidence - _CENTRES[middle]) * BINS / width**2)
        parts = np.empty((BINS, len(confidence)))
        parts[middle] = 1
        for j in range(middle):
            np.multiply(parts[middle + j], step, out=parts[middle + j + 1])
            np.divide(parts[middle - j], step, out=parts[middle - j - 1])
        parts *= _kernels_of_the_middle(sigma)
    else:  # over that at the nearest one, which stays however narrow the kernel is
        nearest = (np.clip(np.floor(confidence * BINS), 0, BINS - 1) + 0.5) / BINS
        centres = _CENTRES[:, None]
        # (c - nearest)^2 - (c - centre)^2 in factors
        exponent = (2 * confidence - nearest - centres) * (centres - nearest)
        parts = np.exp(exponent / (2 * sigma**2))
    parts /= np.ones(BINS) @ parts
    return parts


@lru_cache(maxsize=8)
def _kernels_of_the_middle(sigma: float) -> FloatArray:
    """Kernel of the middle centre at each centre, ``(bins, 1)``."""
    steps = np.arange(BINS) - BINS // 2
    return np.asarray(np.exp(-(steps**2) / (2 * (sigma * BINS) ** 2))[:, None])


PROPER: dict[str, Objective] = dict(nll=nll, brier=brier, mse=_mse, ls=partial(nll, smoothing=0.05))
"""Objectives that need no bins, by name; ``ls`` is the loss of label smoothing."""
