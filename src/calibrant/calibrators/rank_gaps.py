"""Factors for the gaps between the logits of the first ranks, and one for all below."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from calibrant._core import chunks
from calibrant._core.checks import IGNORED, FloatArray
from calibrant._core.chunks import Examples, leading
from calibrant._core.solve import Solution, check_time, minimise
from calibrant.calibrators.affine_fit import CHUNK_OF_INPUTS
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.fit_inputs import _warn_together
from calibrant.calibrators.logpartition import LARGEST_GAP
from calibrant.calibrators.scaling import _fitted_sharpness

# a number and as many numbers as factors, from chunks of rows and factors
Sums: TypeAlias = Callable[["_Ordered", Tensor], tuple[Tensor, Tensor]]
MAX_RANKS = 14
"""Gaps with a factor of their own, which make sorting rows of many classes unnecessary."""


def _factor_count(classes: int) -> int:
    """Number of factors: of the first gaps, and one of all below."""
    return min(classes - 1, MAX_RANKS + 1)


class RankGaps(Calibrator):
    r"""Temperature scaling, then a factor for each gap between logits in order of size.

    With the logits of a row in descending order, :math:`s_1 \ge \ldots \ge s_K`, after division by
    the temperature with the least negative log-likelihood, and their gaps :math:`g_j = s_j -
    s_{j+1}`, the class of rank :math:`r` gets

    .. math:: s'_r = \sum_{j \ge r} a_j g_j , \quad a_j \ge 0 ,

    which keeps the order of all classes. All :math:`a_j = 1` is temperature scaling. The first 14
    gaps have a factor each; those below share one. The factors minimise the convex function

    .. math:: \frac{\sum_i w_i \, \mathrm{NLL}_i}{\sum_i w_i} + \frac1n \sum_j (a_j - 1)^2

    over :math:`n` labelled examples: the fewer they are, and the less a gap decides, the nearer its
    factor is to 1. Only the ratios of the weights :math:`w_i` matter. Masked classes stay
    impossible, and a gap to one counts for nothing.

    The map is a diagonal intra order-preserving one (Rahimi et al. 2020) whose function is linear
    in the gaps, which makes the fit convex.

    Attributes
    ----------
    temperature_ : scalar Tensor
    factors_ : (min(classes - 1, 15),) Tensor

    References
    ----------
    Rahimi, Shaban, Cheng, Hartley and Boots: Intra order-preserving functions for calibration of
    multi-class neural networks, NeurIPS 2020.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = -np.sort(-3 * rng.normal(size=(5000, 3)))
    >>> first, second = np.diff(-logits).T  # the gaps, of which the first says twice too much
    >>> truth = np.stack([first / 2 + second, second, 0 * second], axis=-1)
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = RankGaps().fit(logits, labels)
    >>> fitted.factors_ / fitted.temperature_
    tensor([0.5..., 1.0...])
    """

    name = "rank_gaps"
    part_of_auto = True
    keeps_argmax = True
    monotone = True
    learned_shapes = "factors_ classes-1|="
    temperature_: Tensor
    factors_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._store(temperature_=torch.tensor(1.0), factors_=torch.ones(MAX_RANKS + 1))

    def size(self, classes: int) -> int:
        """A temperature, and the factors."""
        return 1 + _factor_count(classes)

    def _fit(self, examples: Examples, context: Context) -> None:
        sharpness = math.exp(_fitted_sharpness(examples, context).x[0])
        self.solution_ = _solve(_gather(examples, sharpness))
        self._store(temperature_=1 / sharpness, factors_=self.solution_.x)
        if not self.solution_.converged:
            _warn_together(self, [f"the search stopped early, after {self.solution_.steps} steps"])

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        factors = (self.factors_ / self.temperature_).to(logits.dtype)
        first, order = leading(logits, len(self.factors_))
        levels = torch.cat(
            [torch.zeros_like(top), (-factors[:-1] * _gaps_of(first)).cumsum(-1)], -1
        )
        levels = torch.where(torch.isneginf(first), first, levels)
        masked = torch.isneginf(logits)
        drops = torch.where(masked, 0, first[..., -1:] - logits).clamp(min=0)
        lower = torch.where(masked, logits, levels[..., -1:] - factors[-1] * drops)
        return lower.scatter(-1, order, levels)


def _gaps_of(ordered: Tensor) -> Tensor:
    """Gaps ``(..., classes - 1)`` of logits in descending order; 0 if the lower one is masked."""
    upper, lower = ordered[..., :-1], ordered[..., 1:]
    return torch.where(torch.isneginf(lower), 0, upper - lower)


def _distances_below(last: Tensor, logits: Tensor) -> Tensor:
    """Distances of logits below the ``last`` of the first ranks; 0 for masked ones and above."""
    return torch.where(torch.isneginf(logits), 0, last - logits).clamp(min=0)


class _Ordered(NamedTuple):
    """Labelled rows with tempered logits in descending order, or some of them."""

    gaps: Tensor  # (n, m - 1) between the first m logits, single unless double came in
    drops: Tensor  # (n, classes - m) of the others below the last of these
    possible: Tensor  # (n, 1) number of classes that are not masked
    weight: Tensor  # (n,) float64

    def rows(self, which: slice) -> _Ordered:
        """Return some rows, in double precision."""
        return _Ordered(
            self.gaps[which].double(),
            self.drops[which].double(),
            self.possible[which],
            self.weight[which],
        )


class _Gathered(NamedTuple):
    """All labelled rows, and what is needed of them as a whole."""

    ordered: _Ordered
    own: Tensor  # (m,) weighted mean of the gaps above the label and of its drop, float64
    ranges: list[tuple[int, int]]  # first and last row of the share of each thread

    @property
    def total_weight(self) -> float:
        """Number of labelled examples, a weight of 2 for two."""
        return float(self.ordered.weight.sum())


def _gather(examples: Examples, sharpness: float) -> _Gathered:
    """Order the logits of checked examples: the only copy of them."""
    ranges = chunks.thread_ranges(examples)
    labelled = [int((examples.labels[a:b] != IGNORED).sum()) for a, b in ranges]
    places = list(pairwise(np.cumsum([0, *labelled]).tolist()))
    like = next(chunks.labelled_chunks(examples, 0, examples.labels.size)).logits
    weight = examples.labelled_weight()
    weight = np.ones(sum(labelled)) if weight is None else weight
    count = _factor_count(examples.classes)
    ordered = _Ordered(
        like.new_empty(sum(labelled), count - 1),
        like.new_empty(sum(labelled), examples.classes - count),
        torch.empty(sum(labelled), 1, dtype=torch.int64, device=like.device),
        torch.from_numpy(weight).to(like.device),
    )

    def fill(row_range: tuple[int, int], place: tuple[int, int]) -> Tensor:
        """Write the gaps of a run of rows; return the weighted sums of those of the labels."""
        done, total = place[0], ordered.weight.new_zeros(count)
        for chunk in chunks.labelled_chunks(examples, *row_range):
            check_time()
            rows = slice(done, done := done + len(chunk.labels))
            if chunk.logits.device.type == "cpu":  # where NumPy is several times faster
                falling = torch.from_numpy(np.sort(chunk.logits.numpy())).flip(-1)
            else:
                falling = chunk.logits.sort(descending=True).values
            own = chunk.logits.gather(-1, chunk.labels[:, None]).double()
            wide = falling.double()
            last = wide[:, count - 1 : count]
            gaps = sharpness * _gaps_of(wide[:, :count]).clamp_(max=LARGEST_GAP)
            ordered.gaps[rows] = gaps.to(ordered.gaps.dtype)
            drops = sharpness * _distances_below(last, wide[:, count:]).clamp_(max=LARGEST_GAP)
            ordered.drops[rows] = drops.to(ordered.drops.dtype)
            ordered.possible[rows] = (~torch.isneginf(falling)).sum(-1, keepdim=True)
            drop = sharpness * (last - own).clamp(0, LARGEST_GAP)
            of_label = torch.cat([gaps * (wide[:, : count - 1] > own), drop], -1)
            total += ordered.weight[rows] @ of_label
        return total

    parts = chunks.on_threads(fill, ranges, places)
    return _Gathered(ordered, torch.stack(parts).sum(0) / ordered.weight.sum(), places)


def _solve(data: _Gathered) -> Solution:
    """Factors with the least penalised loss.

    L-BFGS runs on factors that are scaled by the curvature at temperature scaling, since the first
    gaps decide much more than the last. There a gradient of 1e-4 is a loss of about 1e-8.
    """
    penalty, own = 1 / data.total_weight, data.own.cpu().numpy()
    _, curvature = _mean(data, _curvature, np.ones_like(own))
    scale = 1 / np.sqrt(curvature + 2 * penalty)

    def scaled(u: FloatArray) -> tuple[float, FloatArray]:
        away = scale * u
        value, slope = _mean(data, _log_partition, 1 + away)
        loss = value + own @ (1 + away) + penalty * away @ away
        return float(loss), scale * (slope + own + 2 * penalty * away)

    result = minimise(scaled, np.zeros_like(own), lowest=-1 / scale, tolerance=1e-4)
    return result._replace(x=np.maximum(1 + scale * result.x, 0))


def _mean(data: _Gathered, summed: Sums, factors: FloatArray) -> tuple[float, FloatArray]:
    """Means over all rows, from sums over some; on a thread for each range of them."""
    there, ordered = torch.from_numpy(factors).to(data.own.device), data.ordered
    size = CHUNK_OF_INPUTS if there.device.type == "cpu" else chunks.CHUNK_SIZE["cuda"]
    step = max(1, size // (ordered.gaps.shape[1] + ordered.drops.shape[1]))

    def share(row_range: tuple[int, int]) -> tuple[float, FloatArray]:
        value, vector = 0.0, torch.zeros_like(there)
        for start in range(*row_range, step):
            more = summed(ordered.rows(slice(start, min(start + step, row_range[1]))), there)
            value, vector = value + float(more[0]), vector + more[1]
        return value, vector.cpu().numpy()

    values, vectors = zip(*chunks.on_threads(share, data.ranges, always=True), strict=True)
    return sum(values) / data.total_weight, np.sum(vectors, axis=0) / data.total_weight


def _log_partition(rows: _Ordered, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows of the log-partition, and its derivatives by the factors."""
    total, below, dropped = _masses(rows, factors)
    slopes = torch.cat([below.mul_(rows.gaps), (dropped * rows.drops).sum(-1, keepdim=True)], -1)
    return rows.weight @ total.log(), -(rows.weight / total) @ slopes


def _curvature(rows: _Ordered, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The same with second derivatives."""
    total, below, dropped = _masses(rows, factors)
    probs, tail = below / total[:, None], dropped / total[:, None]
    mean = (tail * rows.drops).sum(-1, keepdim=True)
    of_tail = (tail * rows.drops**2).sum(-1, keepdim=True) - mean**2
    bends = torch.cat([rows.gaps**2 * probs * (1 - probs), of_tail], -1)
    return rows.weight @ total.log(), rows.weight @ bends


def _masses(rows: _Ordered, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of exponentials relative to the top: of all classes and below each gap; and the last."""
    count, classes = len(factors), rows.gaps.shape[1] + rows.drops.shape[1] + 1
    levels = (-factors[:-1] * rows.gaps).cumsum_(-1)
    last = levels[:, -1:] if count > 1 else torch.zeros_like(rows.drops[:, :1])
    dropped = (last - factors[-1] * rows.drops).exp_()
    powers = levels.exp()
    if (rows.possible < classes).any():
        rank = torch.arange(1, classes, device=powers.device)
        powers.masked_fill_(rank[: count - 1] >= rows.possible, 0)
        dropped.masked_fill_(rank[count - 1 :] >= rows.possible, 0)
    rest = dropped.sum(-1, keepdim=True)
    below = rest + powers.flip(-1).cumsum(-1).flip(-1)
    total = 1 + (below[:, 0] if count > 1 else rest[:, 0])
    return total, below, dropped
