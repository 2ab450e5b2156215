r"""Penalised fit of affine maps of the logits.

All affine calibrators minimise one convex function of the parameters :math:`\theta`,

.. math:: \frac{\sum_i s_i \, \mathrm{NLL}_i(\theta)}{\sum_i s_i}
          + \sum_j c_j (\theta_j - \theta^0_j)^2 .

with weights :math:`s_i`, temperature scaling :math:`\theta^0` and penalties :math:`c_j` of at least
:data:`RIDGE`, so that there always is one optimum and it is bounded.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from calibrant._core import chunks
from calibrant._core.checks import IGNORED, FloatArray, IntArray, check_some
from calibrant._core.chunks import Examples, LabelledRows, exponential
from calibrant._core.solve import Objective, Solution, check_time, minimise
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.fit_inputs import Passes, Sums, _masked_row, folds
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import best_sharpness

RIDGE = 1e-6
"""Smallest penalty of a parameter: less than the noise of a million examples."""
FOLDS = 5
PATIENCE, RISE = 6, 0.01
"""Penalties in a row that may be worse than the best before cross-validation stops, and how much
worse the last may be, relative to the loss. Weak penalties are slow and over-fit quickly."""
CHUNK_OF_INPUTS = 1 << 17  # elements that are processed at a time: a megabyte
MAX_STEPS, TOLERANCE = 50, 1e-10  # of Newton's method for the sharpness, over passes

Inputs: TypeAlias = Callable[[Tensor], Tensor]
Ranges: TypeAlias = Sequence[tuple[int, int]]
_Map: TypeAlias = Callable[[FloatArray], FloatArray]
# Second derivatives of a mean loss at temperature scaling: of a diagonal and an intercept those by
# each parameter, (size,); of a matrix two factors, (classes, classes) and (classes + 1,) * 2.
Curvature: TypeAlias = Sequence[FloatArray]
T = TypeVar("T")


class _Penalties(NamedTuple):
    """Penalties of the sums over entries of each kind."""

    off_diagonal: float
    intercept: float
    diagonal: float


def _centred(logits: Tensor) -> Tensor:
    """Logits ``(..., classes)`` less the mean of their row."""
    return logits - logits.mean(-1, keepdim=True)


def _applied(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The affine map of ``(..., classes)``, by a diagonal ``(classes,)`` or a matrix."""
    return inputs * weight + bias if weight.ndim == 1 else linear(inputs, weight, bias)


def unpacked(x: FloatArray, classes: int, device: Any = None) -> tuple[Tensor, Tensor]:
    """Weight ``(classes,)`` or ``(classes, classes)`` and bias ``(classes,)``."""
    weight, bias = torch.from_numpy(x).to(device).split([x.size - classes, classes])
    return (weight if len(weight) == classes else weight.view(classes, classes)), bias


def _tempered(classes: int, sharpness: float, size: int) -> FloatArray:
    """The ``size`` parameters, flat, of temperature scaling."""
    x = np.zeros(size)
    x[_diagonal(classes, size)] = sharpness
    return x


def _penalty_vector(classes: int, penalties: _Penalties) -> FloatArray:
    """Penalty of each parameter, flat; an infinite one off the diagonal leaves the diagonal."""
    off_diagonal, intercept, diagonal = penalties
    size = classes * (2 if math.isinf(off_diagonal) else classes + 1)
    result = np.full(size, off_diagonal / (classes * (classes - 1)))
    result[_diagonal(classes, size)] = diagonal / classes
    result[-classes:] = intercept / classes
    return np.asarray(np.maximum(result, RIDGE))


def _diagonal(classes: int, size: int) -> slice:
    return slice(0, size - classes, 1 if size == 2 * classes else classes + 1)


class _FitData(NamedTuple):
    """The labelled rows, one fold after the other."""

    inputs: Tensor  # (n, classes), in single precision unless double came in
    labels: Tensor  # (n,)
    weight: Tensor  # (n,) float64
    cuts: list[int]  # where the folds begin, and the end
    sharpness: float  # 1 / T of temperature scaling

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.inputs.shape[-1])

    def ranges(self, *, without: int | None = None) -> list[tuple[int, int]]:
        """First and last row of each fold, or of each but one."""
        every = list(pairwise(self.cuts))
        return every if without is None else every[:without] + every[without + 1 :]


def _gather(
    examples: Examples,
    inputs: Inputs,
    fold: IntArray | None = None,
    *,
    sharpness: float | None = None,
) -> _FitData:
    """Keep the labelled rows, transformed and sorted by fold: the only copy of the logits.

    The sharpness of temperature scaling is searched unless it is known.
    """
    which = np.flatnonzero(examples.labels != IGNORED)
    check_some(which.size)
    fold = np.zeros(which.size, dtype=np.int64) if fold is None else fold
    order = np.argsort(fold, kind="stable")
    place = torch.from_numpy(np.argsort(order, kind="stable"))
    values, done = torch.empty(0), 0
    for chunk in chunks.labelled_chunks(examples, 0, examples.labels.size):
        check_time()
        transformed = _finite_inputs(inputs, examples, chunk)
        if done == 0:
            values = chunk.logits.new_empty(which.size, examples.classes)
        rows = place[done : done + len(chunk.labels)]
        done += len(chunk.labels)
        values[rows.to(values.device)] = transformed.to(values.dtype)
    weight = np.ones(examples.labels.size) if examples.weight is None else examples.weight
    labels, weights = (torch.from_numpy(x[which[order]]) for x in (examples.labels, weight))
    cuts = [0, *np.cumsum(np.bincount(fold)).tolist()]
    if sharpness is None:
        sharpness = math.exp(best_sharpness(tabulate(examples)).x[0])
    return _FitData(values, labels.to(values.device), weights.to(values.device), cuts, sharpness)


def _finite_inputs(inputs: Inputs, examples: Examples, chunk: LabelledRows) -> Tensor:
    """Return the inputs of a chunk in float64, or raise for the row that has none."""
    transformed = inputs(chunk.logits.double())
    bad = ~torch.isfinite(transformed).all(-1)
    if bad.any():
        at = int(bad.nonzero()[0])
        number, row = int(chunk.number[at]), chunk.logits[at]
        masked = not (torch.isnan(row) | torch.isposinf(row)).any()
        raise _masked_row(number) if masked else chunks.explained(examples, number)
    return transformed


def _dealt(examples: Examples, groups: NDArray[Any] | None, seed: int) -> IntArray:
    """Fold of each labelled example, ``(n,)``: every class spread evenly, or groups together."""
    kept = examples.labels != IGNORED
    together = None if groups is None else groups[kept]
    fold = np.empty(int(kept.sum()), dtype=np.int64)
    for number, part in enumerate(folds(examples.labels[kept], FOLDS, groups=together, seed=seed)):
        fold[part] = number
    return fold


def _solve(
    data: _FitData,
    penalty: FloatArray,
    *,
    without: int | None = None,
    start: FloatArray | None = None,
    curvature: Curvature | None = None,
    steps: int = 500,
    tolerance: float = 1e-6,
) -> Solution:
    """Minimise the penalised loss of all folds, or of all but one.

    L-BFGS runs on parameters that are scaled by the curvature at temperature scaling, since
    penalties may be a million times apart. There a gradient of 1e-6 is a loss of about 1e-12.
    Those of a matrix are turned to the eigenvectors of its curvature too: a third of the steps.
    """
    centre = _tempered(data.classes, data.sharpness, penalty.size)
    start = centre if start is None else start
    curved = _curvature_of(data, penalty.size) if curvature is None else curvature
    loss = _mean_nll(data, data.ranges(without=without))
    limits: dict[str, Any] = {"steps": steps, "tolerance": tolerance}
    return _minimise_penalised(loss, centre, penalty, curved, start, **limits)


def _minimise_penalised(
    loss: Objective,
    centre: FloatArray,
    penalty: FloatArray,
    curvature: Curvature,
    start: FloatArray,
    *,
    steps: int = 500,
    tolerance: float = 1e-6,
) -> Solution:
    """Minimise a loss plus the penalties of what is away from the centre."""
    forward, back = _scaling_of(curvature, penalty)

    def scaled(u: FloatArray) -> tuple[float, FloatArray]:
        x = start + forward(u)
        value, gradient = loss(x)
        away = penalty * (x - centre)
        return value + float(np.sum(away * (x - centre))), back(gradient + 2 * away)

    result = minimise(scaled, np.zeros_like(start), steps=steps, tolerance=tolerance)
    return result._replace(x=start + forward(result.x))


def _solve_all(data: _FitData, penalty: FloatArray, *, tolerance: float = 1e-6) -> Solution:
    """Minimise the penalised loss of all rows."""
    task = partial(_solve, data, penalty, tolerance=tolerance)
    return task() if _cores(data, penalty.size) > 1 else _on_own_threads([task])[0]


def _cross_validated(data: _FitData, penalties: Sequence[FloatArray]) -> int:
    """Number of the penalty with the lowest held-out loss; they come from strong to weak.

    Each search starts where the one before it ended, and the walk stops when the loss rises.
    """
    count = len(data.cuts) - 1
    if len(penalties) == 1 or count == 1:
        return 0
    curvature = _curvature_of(data, penalties[0].size)
    at: list[FloatArray | None] = [None] * count
    losses: list[float] = []
    parts = np.array_split(np.arange(count), min(_cores(data, penalties[0].size), count))

    def held_out(penalty: FloatArray, part: IntArray) -> float:
        return sum(_held_out(data, penalty, fold, at, curvature) for fold in part.tolist())

    for penalty in penalties:
        losses.append(sum(_on_own_threads([partial(held_out, penalty, part) for part in parts])))
        if len(losses) - np.argmin(losses) > PATIENCE or losses[-1] > (1 + RISE) * min(losses):
            break
    return int(np.argmin(losses))


def _held_out(
    data: _FitData,
    penalty: FloatArray,
    fold: int,
    at: list[FloatArray | None],
    curvature: Curvature,
) -> float:
    """Sum of the loss over a fold that the search did not see; its end is stored in ``at``."""
    # Gradients of this size could lower the loss by 2e-4 at most, all parameters together.
    tolerance = 0.02 / math.sqrt(penalty.size)
    search = partial(_solve, data, penalty, without=fold, start=at[fold], curvature=curvature)
    x = at[fold] = search(steps=100, tolerance=tolerance).x
    run = data.ranges()[fold]
    return _mean_nll(data, [run])(x)[0] * float(data.weight[slice(*run)].sum())


def _on_own_threads(tasks: Sequence[Callable[[], T]]) -> list[T]:
    # one core and the caller's time limit for each
    contexts = [contextvars.copy_context() for _ in tasks]
    return chunks.on_threads(lambda known, task: known.run(task), contexts, tasks, always=True)


def _cores(data: _FitData, size: int) -> int:
    # small steps share cores badly
    on_cpu = data.inputs.device.type == "cpu"
    return torch.get_num_threads() if on_cpu and len(data.labels) * size >= 1 << 23 else 1


def _mean_nll(data: _FitData, ranges: Ranges) -> Objective:
    """Weighted mean of the loss over ranges of rows, with its gradient ``G^T Z``."""
    total = float(sum(data.weight[a:b].sum() for a, b in ranges))

    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        rows = _float64_chunks(data, ranges)
        value, gradient = _nll_sums(x, data.classes, rows, data.inputs.device)
        return float(value) / total, (gradient / total).cpu().numpy()

    return loss


def _nll_sums(
    x: FloatArray, classes: int, rows: Iterable[tuple[Tensor, Tensor, Tensor]], device: Any = None
) -> tuple[Tensor, Tensor]:
    """Sum of the loss over rows, and its gradient, flat."""
    weight, bias = unpacked(x, classes, device)
    value, by_weight, by_bias = bias.new_zeros(()), weight.new_zeros(weight.shape), 0 * bias
    for inputs, labels, share in rows:
        logits = _applied(inputs, weight, bias)
        logits -= logits.amax(-1, keepdim=True)
        own = logits.gather(-1, labels)[:, 0]
        error = exponential(logits)
        total = error.sum(-1)
        value += share @ (total.log() - own)
        error *= (share / total)[:, None]
        error.scatter_add_(-1, labels, -share[:, None])
        by_weight += _summed(error, inputs, weight.ndim)
        by_bias += error.sum(0)
    return value, torch.cat([by_weight.reshape(-1), by_bias])


def _curvature_of(data: _FitData, size: int) -> Curvature:
    """Return the curvature by ``size`` parameters."""
    rows = _float64_chunks(data, data.ranges())
    sums = _curvature_sums(rows, data.sharpness, data.classes, size, data.inputs.device)
    return [each / float(data.weight.sum()) for each in sums]


def _curvature_sums(
    rows: Iterable[tuple[Tensor, Tensor, Tensor]],
    sharpness: float,
    classes: int,
    size: int,
    device: Any = None,
) -> list[FloatArray]:
    r"""Sum over rows of the second derivatives at temperature scaling.

    For a matrix and an intercept they are
    :math:`\sum_i s_i (\mathrm{diag}(p_i) - p_i p_i^T) \otimes z_i z_i^T`, where a last 1 in
    :math:`z` stands for the intercept, and nearly the product of the means of both factors
    (Martens and Grosse 2015), whose sums are returned.
    """
    diagonal = size == 2 * classes
    shapes = [(size,)] if diagonal else [(classes, classes), (classes + 1, classes + 1)]
    sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
    for inputs, _, share in rows:
        probs = (sharpness * inputs).softmax(-1)
        weighed = probs * share[:, None]
        if diagonal:
            spread = weighed * (1 - probs)
            sums[0] += torch.cat([_summed(spread, inputs**2, 1), spread.sum(0)])
        else:
            wider = torch.cat([inputs, torch.ones_like(inputs[:, :1])], -1)
            sums[0] += weighed.sum(0).diag() - weighed.T @ probs
            sums[1] += wider.T @ (wider * share[:, None])
    return [each.cpu().numpy() for each in sums]


def _scaling_of(curvature: Curvature, penalty: FloatArray) -> tuple[_Map, _Map]:
    """Return a linear map of parameters, flat, and its transpose.

    Under the map, the second derivatives of the penalised loss are nearly 1.
    """
    if len(curvature) == 1:
        scale = 1 / np.sqrt(curvature[0] + 2 * penalty)
        return lambda u: scale * u, lambda gradient: scale * gradient
    # along the eigenvectors of both factors, of which a penalty is the mean over its entries
    by_logits, by_inputs = (torch.linalg.eigh(torch.from_numpy(each)) for each in curvature)
    left, right = by_logits.eigenvectors, by_inputs.eigenvectors
    bends = torch.outer(by_logits.eigenvalues.clamp(min=0), by_inputs.eigenvalues.clamp(min=0))
    held = (left**2).T @ _beside(torch.from_numpy(penalty), len(left)) @ right**2
    factor = (bends + 2 * held).rsqrt()

    def forward(u: FloatArray) -> FloatArray:
        matrix = left @ (factor * torch.from_numpy(u).view_as(factor)) @ right.T
        return np.asarray(torch.cat([matrix[:, :-1].reshape(-1), matrix[:, -1]]))

    def back(gradient: FloatArray) -> FloatArray:
        matrix = left.T @ _beside(torch.from_numpy(gradient), len(left)) @ right
        return np.asarray((factor * matrix).reshape(-1))

    return forward, back


def _beside(flat: Tensor, classes: int) -> Tensor:
    """Return flat parameters as a matrix with the intercept in its last column."""
    return torch.cat([flat[:-classes].view(classes, classes), flat[-classes:, None]], -1)


def _summed(left: Tensor, right: Tensor, dimensions: int) -> Tensor:
    """Sum over rows of the products of columns: all pairs ``(classes, classes)``, or equal ones."""
    return (left * right).sum(0) if dimensions == 1 else left.T @ right


def _float64_chunks(data: _FitData, ranges: Ranges) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs ``(rows, classes)`` in float64, labels ``(rows, 1)`` and weights ``(rows,)``."""
    on_cpu = data.inputs.device.type == "cpu"
    step = max(1, (CHUNK_OF_INPUTS if on_cpu else chunks.CHUNK_SIZE["cuda"]) // data.classes)
    for first, last in ranges:
        for a in range(first, last, step):
            rows = slice(a, min(a + step, last))
            yield data.inputs[rows].double(), data.labels[rows, None], data.weight[rows]


# ------------------------------------------- sums over passes, where logits are too many to hold


def _refined(passes: Passes, inputs: Inputs, penalty: FloatArray, start: FloatArray) -> Solution:
    """Minimise the penalised loss of all examples, from parameters of a fit on some of them."""
    weight = passes.sums(_total_weight)[0]
    sharpness, low, high = 1.0, 1 / BOUNDS[1], 1 / BOUNDS[0]
    for _ in range(MAX_STEPS):  # of Newton's method, for temperature scaling
        slope, bend = (
            float(total / weight) for total in passes.sums(partial(_slope_task, sharpness))
        )
        # in the logarithm, where a step cannot leave the positive numbers
        step = slope * sharpness / max(bend * sharpness**2 + abs(slope * sharpness), 1e-300)
        before = sharpness
        sharpness = float(np.clip(before * np.exp(-np.clip(step, -1, 1)), low, high))
        if abs(sharpness - before) <= TOLERANCE * before:
            break
    task = partial(_curvature_task, inputs, sharpness, penalty.size)
    curvature = [each / weight for each in passes.sums(task)]

    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = passes.sums(partial(_loss_task, inputs, x))
        return float(value / weight), np.asarray(gradient / weight)

    centre = _tempered(passes.classes, sharpness, penalty.size)
    return _minimise_penalised(loss, centre, penalty, curvature, start)


def _class_counts(examples: Examples) -> Sums:
    """Return the number of labels of each class."""
    labels = examples.labels[examples.labels != IGNORED]
    return [np.bincount(labels, minlength=examples.classes)]


def _total_weight(examples: Examples) -> Sums:
    weight = examples.labelled_weight()
    return [np.float64((examples.labels != IGNORED).sum() if weight is None else weight.sum())]


def _slope_task(sharpness: float, examples: Examples) -> Sums:
    """Return first and second derivative of the summed loss by the sharpness."""
    slope = bend = 0.0
    for inputs, labels, weight in _rows(_centred, examples):
        probs = (sharpness * inputs).softmax(-1)
        mean = (probs * inputs).sum(-1)
        slope += float(weight @ (mean - inputs.gather(-1, labels)[:, 0]))
        bend += float(weight @ ((probs * inputs**2).sum(-1) - mean**2))
    return [np.float64(slope), np.float64(bend)]


def _curvature_task(inputs: Inputs, sharpness: float, size: int, examples: Examples) -> Sums:
    rows = _rows(inputs, examples)
    return [*_curvature_sums(rows, sharpness, examples.classes, size)]


def _loss_task(inputs: Inputs, x: FloatArray, examples: Examples) -> Sums:
    value, gradient = _nll_sums(x, examples.classes, _rows(inputs, examples))
    return [np.float64(value), gradient.numpy()]


def _rows(inputs: Inputs, examples: Examples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs ``(rows, classes)`` in float64, labels ``(rows, 1)`` and weights ``(rows,)``."""
    for chunk in chunks.labelled_chunks(examples, 0, examples.labels.size):
        values = _finite_inputs(inputs, examples, chunk)
        weight = chunk.weight
        if weight is None:
            weight = values.new_ones(len(chunk.labels))
        yield values, chunk.labels[:, None], weight
