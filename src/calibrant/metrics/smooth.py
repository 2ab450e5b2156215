"""Calibration errors without bins: KS with its test, smooth ECE, and the exact smooth error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.fft import dct, idct

from calibrant._core.binning import stable_order, uniform_edges
from calibrant._core.checks import FloatArray
from calibrant.metrics.gaps import _drawn, _running
from calibrant.metrics.reductions import EventData, Input, WeightedPairs, keywords, pairs_from
from calibrant.metrics.summary import REPLICATES, Metric, PooledPairs

if TYPE_CHECKING:
    from typing_extensions import Unpack


MESH = 4096
"""Cells of [0, 1] on which smooth ECE is computed: a quarter of a thousandth each."""
NEAR = 1e-3
"""Difference from an error far above the steps in which it is bisected."""
TOGETHER = 64
"""Replicates of a test that are compared at a time."""
MOST_SINGLE = 1 << 15
"""Examples that smCE takes one by one, which takes a few microseconds for each."""


@keywords(EventData)
def ks(logits: Input = None, labels: Input = None, **data: Unpack[EventData]) -> float:
    r"""Kolmogorov-Smirnov: the largest running sum of residuals.

    .. math:: \max_t \; \frac{1}{n} | \sum_{i:\, p_i \le t} (p_i - y_i) |

    Input as for :func:`calibrant.ece`. Gupta et al. 2021, eq. 6.

    >>> ks(confidence=[0.2, 0.8], outcome=[1, 0])
    0.4
    """
    return float(_running(_residuals(pairs_from(logits, labels, **data))[1]))


@keywords(EventData)
def smooth_ece(logits: Input = None, labels: Input = None, **data: Unpack[EventData]) -> float:
    r"""Smooth ECE with its self-tuned bandwidth.

    .. math:: \mathrm{smECE}_\sigma = \int_0^1 | \frac{1}{n} \sum_i
        \tilde K_\sigma(t, p_i) (p_i - y_i) | \, dt

    with a Gaussian kernel that is reflected at 0 and 1, at the bandwidth :math:`\sigma =
    \mathrm{smECE}_\sigma`. Input as for :func:`calibrant.ece`. Blasiok and Nakkiran 2024, eq. 8
    and 10.

    >>> round(smooth_ece(confidence=[0.7] * 100, outcome=[1] * 50 + [0] * 50), 3)
    0.2
    """
    return _smooth_ece_of_pairs(pairs_from(logits, labels, **data))


@keywords(EventData)
def smce(logits: Input = None, labels: Input = None, **data: Unpack[EventData]) -> float:
    r"""Smooth calibration error: the largest mean residual under a smooth weight.

    .. math:: \max_{\phi} \frac{1}{n} \sum_i \phi(p_i) (p_i - y_i)

    over all 1-Lipschitz :math:`\phi : [0, 1] \to [-1, 1]`, in :math:`O(n \log n)`. Unlike ECE it
    is continuous in the predictions. Gaps whose sign alternates within a short range of confidence
    cancel. It is exact up to 2^15 (32,768) examples. More are pooled in bins of width 1/20,480
    before, which changes the value by less than 5e-5, and by less than 1e-6 where gaps vary
    smoothly. Input as for :func:`calibrant.ece`. Blasiok et al. 2023, def. 5.1.

    >>> smce(confidence=[0.7] * 10, outcome=[1] * 5 + [0] * 5)
    0.2
    """
    return _smce_of_pairs(pairs_from(logits, labels, **data))


def _smooth_ece_of_pairs(pairs: WeightedPairs | PooledPairs) -> float:
    """Compute :func:`smooth_ece` of checked pairs."""
    pairs = pairs.pairs if isinstance(pairs, PooledPairs) else pairs
    cell = np.minimum((pairs.confidence * MESH).astype(np.int64), MESH - 1)
    shares = np.bincount(cell, _residual_shares(pairs), MESH)
    return float(_smoothed(shares.astype(np.float64, copy=False)))


def _residuals(pairs: WeightedPairs | PooledPairs) -> tuple[FloatArray, FloatArray]:
    """Distinct confidences in order, and the share of the residuals ``p - y`` at each."""
    if isinstance(pairs, PooledPairs):
        held = pairs.bins.weight > 0
        return pairs.bins.confidence[held], pairs.bins.gap[held]
    order = stable_order(pairs.confidence)
    position, start = np.unique(pairs.confidence[order], return_index=True)
    return position, np.add.reduceat(_residual_shares(pairs)[order], start)


def _residual_shares(pairs: WeightedPairs) -> FloatArray:
    """Residual ``p - y`` of each example times its share of the weight."""
    residual = pairs.confidence - pairs.outcome
    if pairs.weight is None:
        return np.asarray(residual / residual.size)
    return np.asarray(residual * pairs.weight / pairs.weight.sum())


def _smoothed(residual: FloatArray) -> FloatArray:
    """Smooth ECE of residual shares on the cells of [0, 1], ``(..., cells) -> (...)``."""
    value = _smoothing(residual)
    low, high = np.zeros(residual.shape[:-1]), np.ones(residual.shape[:-1])
    for _ in range(14):  # the value falls as the width grows: bisect for value(width) == width
        middle = (low + high) / 2
        wider = value(middle) > middle
        low, high = np.where(wider, middle, low), np.where(wider, high, middle)
    # Gaussians narrower than a cell ring, which may lift the value above that without smoothing
    return np.asarray(np.minimum(value((low + high) / 2), np.abs(residual).sum(-1)))


def _smoothing(residual: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Mean absolute residual ``(...)`` after smoothing with kernels of widths ``(...)``.

    A cosine transform extends its input by reflection, so damping its frequencies is exactly
    the reflected Gaussian kernel.
    """
    cells = residual.shape[-1]
    spectrum = dct(residual, norm="ortho")
    frequency = (np.pi * np.arange(cells)) ** 2 / 2

    def value(width: FloatArray) -> FloatArray:
        damped = spectrum * np.exp(-frequency * width[..., None] ** 2)
        return np.asarray(np.abs(idct(damped, norm="ortho")).sum(-1))

    return value


def _smoothed_excess(residual: FloatArray, bound: float) -> FloatArray:
    """Numbers with the signs of ``smoothed(residual) - bound``, ``(n, cells) -> (n,)``.

    The value falls as the width grows, and equals it at the error: the value at one width decides,
    unless it is so near that the steps of the bisection matter.
    """
    excess = _smoothing(residual)(np.array([bound])) - bound
    near = np.abs(excess) < NEAR
    if near.any():
        excess[near] = _smoothed(residual[near]) - bound
    return excess


def _lipschitz_error(residual: FloatArray) -> FloatArray:
    """:func:`smce` of residual shares on evenly spaced cells, ``(..., cells) -> (...)``.

    Between neighbouring cells of width h a witness moves by at most h, and the best one takes
    only values that differ from 1 by a multiple of h: a table over those values is exact.
    """
    columns = np.ascontiguousarray(np.moveaxis(residual, -1, 0))
    witness = np.linspace(-1, 1, 2 * len(columns) + 1).reshape(-1, *(1,) * (residual.ndim - 1))
    best = np.zeros((len(witness), *columns.shape[1:]))
    for column in columns:
        higher = np.maximum(best[1:], best[:-1])
        np.maximum(higher[1:], higher[:-1], out=best[1:-1])
        best[0], best[-1] = higher[0], higher[-1]
        best += column * witness
    return np.asarray(best.max(0))


def _lipschitz_excess(residual: FloatArray, bound: float) -> FloatArray:
    """Numbers with the signs of ``lipschitz_error(residual) - bound``, ``(n, cells) -> (n,)``.

    Witnesses that are 1 or -1 everywhere show that an error is large. That it is small follows by
    summation by parts: with running sums S of n cells, and for any number c between 0 and the last,
    it is at most ``abs(S[-1]) + sum(abs(S[:-1] - c)) / n``.
    """
    sums = np.cumsum(residual, -1)
    excess = np.asarray(np.abs(sums[:, -1]) - bound)
    rest = excess <= 1e-9 * bound
    centre = np.median(sums, -1).clip(np.minimum(sums[:, -1], 0), np.maximum(sums[:, -1], 0))
    most = np.abs(sums[:, :-1] - centre[:, None]).sum(-1) / sums.shape[-1]
    left = rest & (excess + most > -1e-9 * bound)
    if left.any():
        excess[left] = _lipschitz_error(residual[left]) - bound
    return excess


def _smce_of_pairs(pairs: WeightedPairs | PooledPairs) -> float:
    r"""Compute :func:`smce` of checked pairs by dynamic programming over sorted confidences.

    With running sums :math:`S_j` of the residuals and steps :math:`d_j` of the confidence, the dual
    problem is to approximate the sums by a path v that varies little,

    .. math:: \min_{v_0 = 0,\, v_n = S_n} \sum_j |v_j - v_{j-1}| + \sum_j d_j |S_j - v_j| .

    Let G(v) be the least cost up to j with :math:`v_j = v`: convex, piecewise linear, with
    slopes cut to [-1, 1] by the first term. The second adds a breakpoint at :math:`S_j` whose
    slope rises by :math:`2 d_j`, so the cut takes :math:`d_j` of rise from either end. Both
    ends are heaps, and each breakpoint enters and leaves each of them once.
    """
    if isinstance(pairs, WeightedPairs) and pairs.outcome.size > MOST_SINGLE:
        pairs = PooledPairs.of(pairs, pairs.weight)
    position, residual = _residuals(pairs)
    steps = np.diff(position)
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


class CalibrationTest(NamedTuple):
    """Result of a test of the hypothesis that confidences are probabilities."""

    statistic: float
    p_value: float


@keywords(EventData)
def calibration_test(
    logits: Input = None,
    labels: Input = None,
    *,
    replicates: int = 999,
    seed: int = 0,
    **data: Unpack[EventData],
) -> CalibrationTest:
    """Test whether a model is miscalibrated at all.

    Outcomes are drawn with the claimed probabilities, and their KS error is compared with the
    observed one. Above two thousand examples, neighbours in confidence are drawn together. With
    weights the draws are normal, which needs more than a few examples. Input as for
    :func:`calibrant.ece`.

    >>> p = np.linspace(0.5, 1, 500)
    >>> calibration_test(confidence=p, outcome=p > 0.75).p_value
    0.001
    """
    return pairs_test(pairs_from(logits, labels, **data), replicates, seed)


def pairs_test(
    pairs: WeightedPairs | PooledPairs, replicates: int = 999, seed: int = 0
) -> CalibrationTest:
    """Compute :func:`calibration_test` of checked pairs."""
    filled = pairs.filled(pairs.equal_mass_edges(2000))
    held = filled.weight > 0
    share, size = filled.weight[held] / filled.total, filled.effective[held]
    probability = np.clip(filled.confidence[held], 0, 1)
    rng = np.random.default_rng(seed)
    if pairs.weight is None:
        hits = _drawn(rng, filled.count[held], probability, replicates).T
        # a few replicates at a time stay in the cache
        some = (hits[first : first + TOGETHER] for first in range(0, replicates, TOGETHER))
        draws: Iterator[FloatArray] = (
            share * (probability - np.ascontiguousarray(each) / size) for each in some
        )
    else:  # a sum of unequal weights is no binomial variable, but close to a normal one
        deviation = share * np.sqrt(probability * (1 - probability) / size)
        draws = iter([deviation * rng.standard_normal((replicates, share.size))])
    statistic = float(_running(filled.gap[held]))
    # draws that equal the observed error but for rounding count as reaching it
    least = statistic * (1 - 1e-9)
    reached = sum(int((_running(residual) >= least).sum()) for residual in draws)
    return CalibrationTest(statistic, (1 + reached) / (1 + replicates))


TABLE = (
    Metric(
        "KS error",
        ks,
        lambda s: s.error(
            _running,
            lambda: s.pairs.filled(s.pairs.equal_mass_edges(100)),
            value=float(_running(_residuals(s.pairs)[1])),
            replicates=REPLICATES // 2,
        ),
        "Gupta et al. 2021",
        ("ks_error", "kolmogorov_smirnov"),
        needs_pairs=True,
    ),
    Metric(
        "smooth ECE",
        smooth_ece,
        lambda s: s.error(
            _smoothed,
            lambda: s.pairs.filled(uniform_edges(128)),
            value=_smooth_ece_of_pairs(s.pairs),
            replicates=REPLICATES // 5,
            excess=_smoothed_excess,
        ),
        "Blasiok and Nakkiran 2024",
        ("smece", "smoothece"),
        needs_pairs=True,
    ),
    Metric(
        "smCE",
        smce,
        lambda s: s.error(
            _lipschitz_error,
            lambda: s.pairs.filled(uniform_edges(40)),
            value=_smce_of_pairs(s.pairs),
            replicates=REPLICATES // 5,
            excess=_lipschitz_excess,
        ),
        "Kakade and Foster 2008, Blasiok et al. 2023",
        ("smooth_calibration_error",),
        needs_pairs=True,
    ),
)
