"""Factors for the gaps between the logits of neighbouring ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from calibrant._core import chunks
from calibrant._core.checks import IGNORED, FloatArray
from calibrant._core.chunks import Examples
from calibrant._core.logpartition import LARGEST_GAP
from calibrant._core.solve import Solution, check_time, minimise
from calibrant.calibrators.affine_fit import CHUNK_OF_INPUTS
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.data_checks import warn_together
from calibrant.calibrators.scaling import fitted_sharpness

# a number and (classes - 1,) numbers, from gaps, possible classes, weights and factors
Sums: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class RankGaps(Calibrator):
    r"""Temperature scaling, then a factor for each gap between logits in order of size.

    With the logits of a row in descending order, :math:`s_1 \ge \ldots \ge s_K`, after division by
    the temperature with the least negative log-likelihood, and their gaps :math:`g_j = s_j -
    s_{j+1}`, the class of rank :math:`r` gets

    .. math:: s'_r = \sum_{j \ge r} a_j g_j , \quad a_j \ge 0 ,

    which keeps the order of all classes. All :math:`a_j = 1` is temperature scaling. The factors
    minimise the convex function

    .. math:: \frac{\sum_i w_i \, \mathrm{NLL}_i}{\sum_i w_i} + \frac1n \sum_j (a_j - 1)^2

    over :math:`n` labelled examples: the fewer they are, and the less a gap decides, the nearer its
    factor is to 1. Only the ratios of the weights :math:`w_i` matter. Masked classes stay
    impossible, and a gap to one counts for nothing.

    The map is a diagonal intra order-preserving one (Rahimi et al. 2020) whose function is linear
    in the gaps, which makes the fit convex.

    Attributes
    ----------
    temperature_ : scalar Tensor
    factors_ : (classes - 1,) Tensor

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
    summary = "a temperature, then a factor for each gap between logits in order of size"
    keeps_argmax = True
    monotone = True
    learned_shapes = "factors_ classes-1"
    temperature_: Tensor
    factors_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._store(temperature_=torch.tensor(1.0), factors_=torch.ones(1))

    def size(self, classes: int) -> int:
        """A temperature, and a factor for each gap."""
        return classes

    def _fit(self, examples: Examples, context: Context) -> None:
        sharpness = math.exp(fitted_sharpness(examples, context).x[0])
        self.solution_ = solve(gather(examples, sharpness))
        self._store(temperature_=1 / sharpness, factors_=self.solution_.x)
        if not self.solution_.converged:
            warn_together(self, [f"the search stopped early, after {self.solution_.steps} steps"])

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        ordered, order = logits.sort(dim=-1, descending=True)
        factors = (self.factors_ / self.temperature_).to(logits.dtype)
        lower = torch.cat([torch.zeros_like(top), (-factors * gaps_of(ordered)).cumsum(-1)], -1)
        lower = torch.where(torch.isneginf(ordered), ordered, lower)
        return logits.scatter(-1, order, lower)


def gaps_of(ordered: Tensor) -> Tensor:
    """Gaps ``(..., classes - 1)`` of logits in descending order; 0 if the lower one is masked."""
    upper, lower = ordered[..., :-1], ordered[..., 1:]
    return torch.where(torch.isneginf(lower), 0, upper - lower)


class Ordered(NamedTuple):
    """The labelled rows, with their tempered logits as gaps in descending order."""

    gaps: Tensor  # (n, classes - 1), in single precision unless double came in
    possible: Tensor  # (n, 1) number of classes that are not masked
    weight: Tensor  # (n,) float64
    own_gap: Tensor  # (classes - 1,) weighted mean of the gaps above the label, float64
    ranges: list[tuple[int, int]]  # first and last row of the share of each thread

    @property
    def total_weight(self) -> float:
        """Number of labelled examples, a weight of 2 for two."""
        return float(self.weight.sum())


def gather(examples: Examples, sharpness: float) -> Ordered:
    """Order the logits of checked examples: the only copy of them."""
    ranges = chunks.thread_ranges(examples)
    labelled = [int((examples.labels[a:b] != IGNORED).sum()) for a, b in ranges]
    places = list(pairwise(np.cumsum([0, *labelled]).tolist()))
    like = next(chunks.labelled_chunks(examples, 0, examples.labels.size)).logits
    weight = examples.labelled_weight()
    weight = np.ones(sum(labelled)) if weight is None else weight
    data = Ordered(
        like.new_empty(sum(labelled), examples.classes - 1),
        torch.empty(sum(labelled), 1, dtype=torch.int64, device=like.device),
        torch.from_numpy(weight).to(like.device),
        like.new_zeros(examples.classes - 1, dtype=torch.float64),
        places,
    )
    parts = chunks.on_threads(partial(_fill, examples, sharpness, data), ranges, places)
    return data._replace(own_gap=torch.stack(parts).sum(0) / data.total_weight)


def _fill(
    examples: Examples,
    sharpness: float,
    data: Ordered,
    row_range: tuple[int, int],
    place: tuple[int, int],
) -> Tensor:
    """Write the gaps of a run of rows; return the weighted sum of those above the labels."""
    total, done = torch.zeros_like(data.own_gap), place[0]
    for chunk in chunks.labelled_chunks(examples, *row_range):
        check_time()
        rows = slice(done, done := done + len(chunk.labels))
        ordered = _descending(chunk.logits)
        gaps = sharpness * gaps_of(ordered.double()).clamp_(max=LARGEST_GAP)
        data.gaps[rows] = gaps.to(data.gaps.dtype)
        data.possible[rows] = (~torch.isneginf(ordered)).sum(-1, keepdim=True)
        above = ordered[:, :-1] > chunk.logits.gather(-1, chunk.labels[:, None])
        total += data.weight[rows] @ (gaps * above)
    return total


def _descending(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":  # where numpy is several times faster
        return torch.from_numpy(np.sort(logits.numpy())).flip(-1)
    return logits.sort(descending=True).values


def solve(data: Ordered) -> Solution:
    """Factors ``(classes - 1,)`` with the least penalised loss.

    L-BFGS runs on factors that are scaled by the curvature at temperature scaling, since the first
    gaps decide much more than the last. There a gradient of 1e-4 is a loss of about 1e-8.
    """
    penalty, own_gap = 1 / data.total_weight, data.own_gap.cpu().numpy()
    _, curvature = _mean(data, _curvature, np.ones_like(own_gap))
    scale = 1 / np.sqrt(curvature + 2 * penalty)

    def scaled(u: FloatArray) -> tuple[float, FloatArray]:
        away = scale * u
        value, slope = _mean(data, _log_partition, 1 + away)
        loss = value + own_gap @ (1 + away) + penalty * away @ away
        return float(loss), scale * (slope + own_gap + 2 * penalty * away)

    result = minimise(scaled, np.zeros_like(own_gap), lowest=-1 / scale, tolerance=1e-4)
    return result._replace(x=np.maximum(1 + scale * result.x, 0))


def _mean(data: Ordered, summed: Sums, factors: FloatArray) -> tuple[float, FloatArray]:
    """Means over all rows, from sums over some; on a thread for each range of them."""
    there = torch.from_numpy(factors).to(data.gaps.device)

    def share(row_range: tuple[int, int]) -> tuple[float, FloatArray]:
        value, vector = 0.0, torch.zeros_like(there)
        for gaps, possible, weight in _chunks(data, *row_range):
            more = summed(gaps, possible, weight, there)
            value, vector = value + float(more[0]), vector + more[1]
        return value, vector.cpu().numpy()

    values, vectors = zip(*chunks.on_threads(share, data.ranges, always=True), strict=True)
    return sum(values) / data.total_weight, np.sum(vectors, axis=0) / data.total_weight


def _log_partition(
    gaps: Tensor, possible: Tensor, weight: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows of the log-partition, and its derivatives by the factors."""
    total, below = _sums(gaps, possible, factors)
    return weight @ total.log(), -(weight / total) @ below.mul_(gaps)


def _curvature(
    gaps: Tensor, possible: Tensor, weight: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """The same with second derivatives."""
    total, below = _sums(gaps, possible, factors)
    probs = below / total[:, None]
    return weight @ total.log(), weight @ (gaps**2 * probs * (1 - probs))


def _sums(gaps: Tensor, possible: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of exponentials relative to the top: of all classes, and of those below each gap."""
    powers = (-factors * gaps).cumsum_(-1).exp_()
    classes = gaps.shape[-1] + 1
    if (possible < classes).any():
        powers.masked_fill_(torch.arange(1, classes, device=gaps.device) >= possible, 0)
    sums = powers.cumsum(-1)
    rest = sums[:, -1:].clone()
    return 1 + rest[:, 0], torch.sub(powers, sums, out=sums).add_(rest)


def _chunks(data: Ordered, first: int, last: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield gaps ``(rows, classes - 1)`` in float64, ``possible`` and weights of some rows."""
    on_cpu = data.gaps.device.type == "cpu"
    size = CHUNK_OF_INPUTS if on_cpu else chunks.CHUNK_SIZE["cuda"]
    step = max(1, size // data.gaps.shape[1])
    for start in range(first, last, step):
        rows = slice(start, min(start + step, last))
        yield data.gaps[rows].double(), data.possible[rows], data.weight[rows]
