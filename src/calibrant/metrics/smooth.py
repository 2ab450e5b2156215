"""Calibration errors without bins: KS, smooth ECE, and the exact smooth calibration error."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from scipy.fft import dct, idct

from calibrant._core.checks import FloatArray, Values, as_pairs

MESH = 4096
"""Cells of [0, 1] on which smooth ECE is computed: a quarter of a thousandth each."""


def ks(confidence: Values, outcome: Values, *, sample_weight: Values | None = None) -> float:
    r"""Kolmogorov-Smirnov calibration error (Gupta et al. 2021, eq. 6).

    .. math:: \max_t \; \frac{1}{n} | \sum_{i:\, p_i \le t} (p_i - y_i) |

    >>> ks([0.2, 0.8], [1, 0])
    0.4
    """
    _, residual = residuals(confidence, outcome, sample_weight)
    return float(np.abs(np.cumsum(residual)).max())


def smooth_ece(
    confidence: Values, outcome: Values, *, sample_weight: Values | None = None
) -> float:
    r"""Smooth ECE with its self-tuned bandwidth (Blasiok and Nakkiran 2024, eq. 8 and 10).

    The residuals :math:`p_i - y_i`, placed at :math:`p_i`, are smoothed with a Gaussian kernel
    that is reflected at 0 and 1, and

    .. math:: \mathrm{smECE}_\sigma = \int_0^1 | \frac{1}{n} \sum_i
        \tilde K_\sigma(t, p_i) (p_i - y_i) | \, dt .

    Wider kernels give smaller values; the one returned is at the bandwidth
    :math:`\sigma = \mathrm{smECE}_\sigma`.

    >>> round(smooth_ece([0.7] * 100, [1] * 50 + [0] * 50), 3)
    0.2
    """
    claimed, happened, weights = as_pairs(confidence, outcome, sample_weight)
    share = (claimed - happened) / claimed.size
    if weights is not None:
        share = (claimed - happened) * weights / weights.sum()
    cell = np.minimum((claimed * MESH).astype(np.int64), MESH - 1)
    return float(smoothed(np.bincount(cell, share, MESH).astype(np.float64, copy=False)))


def smce(confidence: Values, outcome: Values, *, sample_weight: Values | None = None) -> float:
    r"""Smooth calibration error, exact (Kakade and Foster 2008; Blasiok et al. 2023, def. 5.1).

    .. math:: \max_{\phi} \frac{1}{n} \sum_i \phi(p_i) (p_i - y_i)

    over all 1-Lipschitz :math:`\phi : [0, 1] \to [-1, 1]`. Unlike ECE it is continuous in the
    predictions: no bin edge makes it jump. Gaps whose sign alternates within a short range of
    confidence cancel.

    The linear program is solved by dynamic programming over the sorted confidences in
    :math:`O(n \log n)`: a million examples take seconds.

    >>> smce([0.7] * 10, [1] * 5 + [0] * 5), smce([0.2, 0.8], [1, 0])
    (0.2, 0.24)
    """
    position, residual = residuals(confidence, outcome, sample_weight)
    return _best_lipschitz(np.diff(position), residual)


def residuals(
    confidence: Values, outcome: Values, weight: Values | None = None
) -> tuple[FloatArray, FloatArray]:
    """Distinct confidences in order, and the share of the residuals ``p - y`` at each.

    >>> residuals([0.5, 0.2, 0.5], [1, 0, 0])
    (array([0.2, 0.5]), array([0.06666667, 0.        ]))
    """
    claimed, happened, weights = as_pairs(confidence, outcome, weight)
    order = np.argsort(claimed, kind="stable")
    share = (claimed - happened)[order]
    share = share / claimed.size if weights is None else share * weights[order] / weights.sum()
    position, start = np.unique(claimed[order], return_index=True)
    return position, np.add.reduceat(share, start)


def smoothed(residual: FloatArray) -> FloatArray:
    """Smooth ECE of residual shares on the cells of [0, 1], ``(..., cells) -> (...)``.

    A cosine transform extends its input by reflection, so damping its frequencies is exactly
    the reflected Gaussian kernel.
    """
    cells = residual.shape[-1]
    spectrum = dct(residual, norm="ortho")
    frequency = (np.pi * np.arange(cells)) ** 2 / 2

    def value(width: FloatArray) -> FloatArray:
        damped = spectrum * np.exp(-frequency * width[..., None] ** 2)
        return np.asarray(np.abs(idct(damped, norm="ortho")).sum(-1))

    low, high = np.zeros(residual.shape[:-1]), np.ones(residual.shape[:-1])
    for _ in range(14):  # the value falls as the width grows: bisect for value(width) == width
        middle = (low + high) / 2
        wider = value(middle) > middle
        low, high = np.where(wider, middle, low), np.where(wider, high, middle)
    return value((low + high) / 2)


def lipschitz_error(residual: FloatArray) -> FloatArray:
    """:func:`smce` of residual shares on evenly spaced cells, ``(..., cells) -> (...)``.

    Between neighbouring cells of width h a witness moves by at most h, and the best one takes
    only values that differ from 1 by a multiple of h: a table over those values is exact.
    """
    cells = residual.shape[-1]
    witness = np.linspace(-1, 1, 2 * cells + 1)
    best = np.zeros((*residual.shape[:-1], witness.size))
    for cell in range(cells):
        reach = best.copy()
        np.maximum(reach[..., 1:], best[..., :-1], out=reach[..., 1:])
        np.maximum(reach[..., :-1], best[..., 1:], out=reach[..., :-1])
        best = reach + residual[..., cell, None] * witness
    return np.asarray(best.max(-1))


def _best_lipschitz(steps: FloatArray, residual: FloatArray) -> float:
    r"""Maximum of :math:`\sum_j r_j \phi_j` over :math:`|\phi_j| \le 1`, differences bounded.

    With running sums :math:`S_j = r_1 + \dots + r_j` the dual problem is to approximate them by
    a path v that varies little,

    .. math:: \min_{v_0 = 0,\, v_n = S_n} \sum_j |v_j - v_{j-1}| + \sum_j d_j |S_j - v_j| .

    Let G(v) be the least cost up to j with :math:`v_j = v`: convex, piecewise linear, with
    slopes cut to [-1, 1] by the first term. The second adds a breakpoint at :math:`S_j` whose
    slope rises by :math:`2 d_j`, so the cut takes :math:`d_j` of rise from either end. Both
    ends are heaps, and each breakpoint enters and leaves each of them once.
    """
    sums = np.concatenate([[0.0], np.cumsum(residual)])
    order = np.argsort(sums[:-1], kind="stable")
    place = sums[order].tolist()  # of each breakpoint, in order of size
    ranks = np.empty_like(order)
    ranks[order] = np.arange(order.size)
    rise = [0.0] * order.size  # of the slope at each breakpoint
    rise[ranks[0]] = 2.0  # G(v) = |v| at first
    lowest, highest = [int(ranks[0])], [-int(ranks[0])]
    offset = 0.0  # left of all breakpoints G(v) = offset - v
    for rank, step in zip(ranks[1:].tolist(), steps.tolist(), strict=True):
        rise[rank] = 2 * step
        heappush(lowest, rank)
        heappush(highest, -rank)
        offset += step * place[rank]
        excess = step
        while rise[lowest[0]] <= excess:  # also those that the other end has used up
            at = heappop(lowest)
            excess -= rise[at]
            offset -= rise[at] * place[at]
            rise[at] = 0.0
        rise[lowest[0]] -= excess
        offset -= excess * place[lowest[0]]
        excess = step
        while rise[-highest[0]] <= excess:
            at = -heappop(highest)
            excess -= rise[at]
            rise[at] = 0.0
        rise[-highest[0]] -= excess
    reach = sums[-1] - np.asarray(place)
    return float(offset - sums[-1] + np.maximum(reach, 0) @ np.asarray(rise))
