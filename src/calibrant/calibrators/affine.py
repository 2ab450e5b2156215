r"""Affine maps of the logits: a factor for each class, or a matrix, and an intercept.

All of them minimise one convex function of the parameters :math:`\theta`,

.. math:: \frac{\sum_i s_i \, \mathrm{NLL}_i(\theta)}{\sum_i s_i}
          + \sum_j c_j (\theta_j - \theta^0_j)^2 .

:math:`s_i` are weights of samples, :math:`\theta^0` is temperature scaling as an affine map, with
:math:`1/T` on the diagonal and 0 elsewhere, and :math:`c_j > 0` are penalties. Each of them is at
least :data:`RIDGE`, so there always is one optimum and it is bounded: where the data are
separable, or a class has no sample, :math:`|\theta - \theta^0|^2` is at most the mean loss of
temperature scaling divided by :data:`RIDGE`.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from calibrant._core.checks import IGNORED, FloatArray, IntArray, Values, check_some, warn
from calibrant._core.chunks import BLOCK, Block, Examples, blocks, explained, on_threads
from calibrant._core.logpartition import tabulate
from calibrant._core.solve import Objective, Solution, check_time, minimise
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.folds import folds
from calibrant.calibrators.scaling import best_sharpness

RIDGE = 1e-6
"""Smallest penalty of a parameter. It moves an optimum that the data define by less than the
noise of a million samples, and is enough to hold one that they do not define."""
WIDEST = 200
"""Number of classes up to which a matrix is fitted."""
FOLDS = 5
GRID = 10.0 ** np.arange(2, -5.25, -0.5)
"""Penalties that cross-validation tries, from strong to weak: of each entry off the diagonal,
when logits are divided by their best temperature."""
ON_DIAGONAL, OF_INTERCEPT = 0.1, 0.01
"""Penalties of a diagonal entry and of an intercept, relative to those of :data:`GRID`."""
PATIENCE, RISE = 6, 0.01
"""Penalties in a row that may be worse than the best before cross-validation stops, and how much
worse the last may be, as a part of the loss. Strong penalties are fast and may differ by chance,
weak ones are slow and over-fit quickly."""

PIECE = 1 << 17
"""Elements of inputs that are worked on at a time: a megabyte, with room for copies of it."""
FADE = "the fit makes them improbable, as far as its penalties let it"

Inputs: TypeAlias = Callable[[Tensor], Tensor]
Runs: TypeAlias = Sequence[tuple[int, int]]
T = TypeVar("T")


# ------------------------------------------------------------------------------- the calibrators


class FiniteCalibrator(Calibrator):
    """A calibrator that adds up the logits of a row, so that none of them may be -inf.

    ``fit`` and ``predict_proba`` refuse masked classes. A call of the module does not look at
    the values: there they give NaN.
    """

    def _scores(self, logits: Values) -> Tensor:
        scores = super()._scores(logits)
        if torch.isneginf(scores).any():
            rows = scores.reshape(-1, scores.shape[-1] if self._classes > 1 else 1)
            raise masked(int(torch.isneginf(rows).any(-1).nonzero()[0]))
        return scores


class Affine(FiniteCalibrator):
    """A factor per class or a matrix, and an intercept. Subclasses write ``_inputs``, ``_fit``."""

    weight_: Tensor
    bias_: Tensor
    learned_shapes = "weight_ classes classes|classes; bias_ classes"

    def __init__(self) -> None:
        super().__init__()
        self._learned(weight_=torch.ones(1), bias_=torch.zeros(1))

    @staticmethod
    def _inputs(logits: Tensor) -> Tensor:
        """What is multiplied, ``(..., classes)``; the same if a row is shifted by a constant."""
        return centred(logits)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        return applied(
            self._inputs(logits), self.weight_.to(logits.dtype), self.bias_.to(logits.dtype)
        )

    def _keep(self, solution: Solution, classes: int) -> None:
        weight, bias = unpacked(solution.x, classes)
        self._learned(weight_=weight, bias_=bias)
        self.solution_ = solution

    def _warn(self, notes: list[str]) -> None:
        """Say everything in one warning."""
        if self.solution_ is not None and not self.solution_.converged:
            notes = [*notes, f"the search stopped early, after {self.solution_.steps} steps"]
        if notes:
            warn(f"{type(self).__name__}: {'; '.join(notes)}")


class VectorScaling(Affine):
    r"""A factor and an intercept for each class: :math:`\mathrm{softmax}(w \odot z + b)`.

    Vector scaling of Guo et al. 2017, with :math:`2K` parameters, fitted by the negative
    log-likelihood. Logits are centred first, :math:`z - \bar z`: a factor for each class would
    make different predictions of :math:`z` and of :math:`z + c`, which mean the same. A ridge of
    1e-6 towards temperature scaling bounds the parameters where the data do not, which a
    warning says.

    Attributes
    ----------
    weight_ : (classes,) Tensor
    bias_ : (classes,) Tensor

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(20000, 3))
    >>> truth = 2 * (logits - logits.mean(-1, keepdims=True)) + [1.0, 0.0, -1.0]
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = VectorScaling().fit(logits, labels)
    >>> [round(float(b)) for b in fitted.bias_], round(float(fitted.weight_.mean()))
    ([1, 0, -1], 2)
    """

    def size(self, classes: int) -> int:
        """A factor and an intercept for each class."""
        return 2 * classes

    def _fit(self, given: Examples, context: Context) -> None:
        held = gather(given, self._inputs)
        found = solve_all(held, np.full(self.size(given.classes), RIDGE))
        self._keep(found, given.classes)
        notes = missing(given, FADE)
        away = found.x - tempered(given.classes, held.sharpness, found.x.size)
        if RIDGE * float(away @ away) > 0.1 * found.value:
            notes.append(
                f"it can tell the {len(held.labels):,} samples apart almost without error, so "
                "that only a ridge bounds its parameters: fit it on more samples"
            )
        self._warn(notes)


class Penalties(NamedTuple):
    """What is added to the loss, in sums over entries of each kind."""

    off_diagonal: float
    intercept: float
    diagonal: float


class Regularised(Affine):
    """A matrix and an intercept, with penalties that are given or cross-validated."""

    off_diagonal_: Tensor
    intercept_: Tensor
    on_diagonal_: Tensor

    def __init__(
        self, *, off_diagonal: float | None = None, intercept: float | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.off_diagonal = _checked("off_diagonal", off_diagonal)
        self.intercept = _checked("intercept", intercept)
        self.seed = seed
        self._used(Penalties(math.nan, math.nan, math.nan))

    @property
    def is_diagonal_(self) -> bool:
        """Whether there were too many classes for a matrix, so that it is diagonal."""
        return self.weight_.ndim == 1

    def size(self, classes: int) -> int:
        """A matrix and an intercept; above 200 classes a diagonal and an intercept."""
        return (classes if classes <= WIDEST else 1) * classes + classes

    def _fit(self, given: Examples, context: Context) -> None:
        fold = None
        if self.off_diagonal is None or self.intercept is None:
            fold = dealt(given, context.groups, self.seed)
        held = gather(given, self._inputs, fold)
        candidates = self._candidates(given.classes, held.sharpness)
        vectors = [penalty_vector(given.classes, each) for each in candidates]
        best = cross_validated(held, vectors)
        self._used(candidates[best])
        self._keep(solve_all(held, vectors[best]), given.classes)
        self._warn(_narrowed(given.classes) + missing(given, FADE))

    def _used(self, penalties: Penalties) -> None:
        off_diagonal, intercept, diagonal = penalties
        self._learned(off_diagonal_=off_diagonal, intercept_=intercept, on_diagonal_=diagonal)

    def _candidates(self, classes: int, sharpness: float) -> list[Penalties]:
        """Penalties to choose from, from strong to weak; one where none is to be chosen."""
        found = []
        # a diagonal has few parameters and many rows are slow: every other penalty will do
        for each in GRID[:: 1 if classes <= WIDEST else 2].tolist():
            # of entries that multiply logits, not tempered ones
            entry = each / sharpness**2
            off, diagonal = self.off_diagonal, 0.0
            if off is None:
                off, diagonal = entry * classes * (classes - 1), ON_DIAGONAL * entry * classes
            bias = OF_INTERCEPT * each * classes if self.intercept is None else self.intercept
            found.append(Penalties(off if classes <= WIDEST else math.inf, bias, diagonal))
        return list(dict.fromkeys(found))


class MatrixScaling(Regularised):
    r"""A matrix and an intercept: :math:`\mathrm{softmax}(W z + b)`, kept near a diagonal.

    Matrix scaling of Guo et al. 2017 with the off-diagonal and intercept regularisation (ODIR)
    of Kull et al. 2019. The mean negative log-likelihood is minimised plus

    .. math:: \frac{\lambda}{K (K - 1)} \sum_{i \ne j} W_{ij}^2 + \frac{\mu}{K} \sum_j b_j^2 .

    Logits are centred first, :math:`z - \bar z`, since :math:`z` and :math:`z + c` mean the
    same. A ridge of 1e-6 towards temperature scaling bounds what the penalties leave free.

    When :math:`\lambda` is chosen by cross-validation, so is a third penalty,
    :math:`\frac{\delta}{K} \sum_k (W_{kk} - 1/T)^2` with the temperature :math:`T` that is best
    for all: strong penalties then end in temperature scaling, and a fit that has nothing to gain
    loses little. ODIR leaves the diagonal free, which over-fits where samples per class are few.

    Parameters
    ----------
    off_diagonal : float, optional
        :math:`\lambda`. None: chosen by cross-validation, for the lowest held-out loss.
    intercept : float, optional
        :math:`\mu`. None: chosen likewise. What is chosen is chosen together, with
        :math:`\delta/K` a tenth and :math:`\mu/K` a hundredth of :math:`\lambda/K(K-1)` (for
        logits divided by :math:`T`).
    seed : int
        Of the five folds: by class, or by the ``groups`` of the fit, which stay together.

    Attributes
    ----------
    weight_ : (classes, classes) Tensor, or (classes,) when it is diagonal
    bias_ : (classes,) Tensor
    off_diagonal_, intercept_, on_diagonal_ : scalar Tensor
        :math:`\lambda`, :math:`\mu` and :math:`\delta` that were used; :math:`\lambda` is inf
        when the matrix is diagonal.
    is_diagonal_ : bool
        Whether there were more than 200 classes: then only the diagonal is fitted.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(5000, 3))
    >>> logits -= logits.mean(-1, keepdims=True)
    >>> truth = logits @ np.array([[2.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 2.0, 0.0]])
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = MatrixScaling().fit(logits, labels)  # sees that two classes were swapped
    >>> fitted.predict_proba(np.array([[4.0, 1.0, 0.0], [0.0, 4.0, 1.0]])).argmax(-1)
    array([0, 2])
    """


class DirichletCalibration(Regularised):
    r"""A matrix and an intercept on log-probabilities: :math:`\mathrm{softmax}(W \log p + b)`.

    Dirichlet calibration of Kull et al. 2019, with their off-diagonal and intercept
    regularisation (ODIR): the mean negative log-likelihood is minimised plus

    .. math:: \frac{\lambda}{K (K - 1)} \sum_{i \ne j} W_{ij}^2 + \frac{\mu}{K} \sum_j b_j^2 .

    It differs from :class:`MatrixScaling` in the shift of each row only, :math:`\log p = z -
    \log \sum_k e^{z_k}` instead of :math:`z - \bar z`; the diagonal is penalised as there when
    :math:`\lambda` is chosen by cross-validation. No probability is clipped, since logits are
    at hand.

    Parameters
    ----------
    off_diagonal : float, optional
        :math:`\lambda`. None: chosen by cross-validation, for the lowest held-out loss.
    intercept : float, optional
        :math:`\mu`. None: chosen likewise, and tied as in :class:`MatrixScaling`.
    seed : int
        Of the five folds: by class, or by the ``groups`` of the fit, which stay together.

    Attributes
    ----------
    weight_ : (classes, classes) Tensor, or (classes,) when it is diagonal
    bias_ : (classes,) Tensor
    off_diagonal_, intercept_, on_diagonal_ : scalar Tensor
        The penalties that were used; ``off_diagonal_`` is inf when the matrix is diagonal.
    is_diagonal_ : bool
        Whether there were more than 200 classes: then only the diagonal is fitted.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 3 * rng.normal(size=(2000, 3))
    >>> labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = DirichletCalibration().fit(logits, labels)
    >>> fitted.weight_.diagonal().mean()
    tensor(0.5...)
    """

    @staticmethod
    def _inputs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)


def _narrowed(classes: int) -> list[str]:
    if classes <= WIDEST:
        return []
    return [
        f"{classes:,} classes are too many for a matrix of {classes**2:,} entries (the limit is "
        f"{WIDEST} classes): only its diagonal is fitted"
    ]


def _checked(name: str, value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(
            f"{name} must be a finite number of at least 0, or None for cross-validation, got "
            f"{value!r}"
        )
    return value


# --------------------------------------------------------------------------------- the parameters


def centred(logits: Tensor) -> Tensor:
    """Logits ``(..., classes)`` less the mean of their row."""
    return logits - logits.mean(-1, keepdim=True)


def applied(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The affine map of ``(..., classes)``, by a diagonal ``(classes,)`` or a matrix."""
    return inputs * weight + bias if weight.ndim == 1 else linear(inputs, weight, bias)


def unpacked(x: FloatArray, classes: int, device: Any = None) -> tuple[Tensor, Tensor]:
    """Weight ``(classes,)`` or ``(classes, classes)`` and bias ``(classes,)``."""
    weight, bias = torch.from_numpy(x).to(device).split([x.size - classes, classes])
    return (weight if len(weight) == classes else weight.view(classes, classes)), bias


def tempered(classes: int, sharpness: float, size: int) -> FloatArray:
    """The ``size`` parameters, flat, of temperature scaling.

    >>> tempered(2, 0.5, 4), tempered(2, 0.5, 6)
    (array([0.5, 0.5, 0. , 0. ]), array([0.5, 0. , 0. , 0.5, 0. , 0. ]))
    """
    x = np.zeros(size)
    x[_diagonal(classes, size)] = sharpness
    return x


def penalty_vector(classes: int, penalties: Penalties) -> FloatArray:
    """Penalty of each parameter, flat: those of a kind have equal shares, and all the ridge.

    An infinite penalty off the diagonal leaves only the diagonal.

    >>> penalty_vector(2, Penalties(6.0, 4.0, 2.0))
    array([1., 3., 3., 1., 2., 2.])
    >>> penalty_vector(2, Penalties(math.inf, 4.0, 2.0))
    array([1., 1., 2., 2.])
    """
    off_diagonal, intercept, diagonal = penalties
    size = classes * (2 if math.isinf(off_diagonal) else classes + 1)
    found = np.full(size, off_diagonal / (classes * (classes - 1)))
    found[_diagonal(classes, size)] = diagonal / classes
    found[-classes:] = intercept / classes
    return np.asarray(np.maximum(found, RIDGE))


def _diagonal(classes: int, size: int) -> slice:
    """Where the diagonal stands among the parameters."""
    return slice(0, size - classes, 1 if size == 2 * classes else classes + 1)


# ----------------------------------------------------------------------------------- the examples


class Held(NamedTuple):
    """What a search reads again and again: the labelled rows, one fold after the other."""

    inputs: Tensor  # (n, classes), in single precision unless double came in
    labels: Tensor  # (n,)
    weight: Tensor  # (n,) float64
    cuts: list[int]  # where the folds begin, and the end
    sharpness: float  # 1 / T of temperature scaling

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.inputs.shape[-1])

    def runs(self, *, without: int | None = None) -> list[tuple[int, int]]:
        """First and last row of each fold, or of each but one."""
        every = list(pairwise(self.cuts))
        return every if without is None else every[:without] + every[without + 1 :]


def gather(given: Examples, inputs: Inputs, fold: IntArray | None = None) -> Held:
    """Keep the labelled rows, transformed and sorted by fold: the only copy of the logits."""
    which = np.flatnonzero(given.labels != IGNORED)
    check_some(which.size)
    fold = np.zeros(which.size, dtype=np.int64) if fold is None else fold
    order = np.argsort(fold, kind="stable")
    place = torch.from_numpy(np.argsort(order, kind="stable"))
    values, done = torch.empty(0), 0
    for block in blocks(given, 0, given.labels.size):
        check_time()
        _check_finite(block, given)
        if done == 0:
            values = block.logits.new_empty(which.size, given.classes)
        after = done + len(block.labels)
        rows = inputs(block.logits.double()).to(values.dtype)
        values[place[done:after].to(values.device)] = rows
        done = after
    weight = np.ones(given.labels.size) if given.weight is None else given.weight
    labels, weights = (torch.from_numpy(x[which[order]]) for x in (given.labels, weight))
    cuts = [0, *np.cumsum(np.bincount(fold)).tolist()]
    sharpness = math.exp(best_sharpness(tabulate(given)).x[0])
    return Held(values, labels.to(values.device), weights.to(values.device), cuts, sharpness)


def _check_finite(block: Block, given: Examples) -> None:
    bad = ~torch.isfinite(block.logits).all(-1)
    if bad.any():
        at = int(bad.nonzero()[0])
        number, row = int(block.number[at]), block.logits[at]
        known = torch.isnan(row).any() or torch.isposinf(row).any()
        raise explained(given, number) if known else masked(number)


def masked(at: int) -> ValueError:
    """Say that a row has masked classes where none may be."""
    return ValueError(
        f"logits must be finite here, row {at} has -inf: this method adds up the logits of a "
        "row; a temperature method (ts) takes masked classes"
    )


def missing(given: Examples, then: str) -> list[str]:
    """A note about classes without a sample, and what becomes of them."""
    count = np.bincount(given.labels[given.labels != IGNORED], minlength=given.classes)
    absent = np.flatnonzero(count == 0)
    if absent.size == 0:
        return []
    named = ", ".join(map(str, absent[:5])) + (", ..." if absent.size > 5 else "")
    return [f"{absent.size:,} of {given.classes:,} classes have no sample ({named}): {then}"]


def dealt(given: Examples, groups: NDArray[Any] | None, seed: int) -> IntArray:
    """Fold of each labelled example, ``(n,)``: every class spread evenly, or groups together."""
    kept = given.labels != IGNORED
    together = None if groups is None else groups[kept]
    fold = np.empty(int(kept.sum()), dtype=np.int64)
    for number, part in enumerate(folds(given.labels[kept], FOLDS, groups=together, seed=seed)):
        fold[part] = number
    return fold


# ------------------------------------------------------------------------------------- the search


def solve(
    held: Held,
    penalty: FloatArray,
    *,
    without: int | None = None,
    start: FloatArray | None = None,
    curvature: FloatArray | None = None,
    steps: int = 500,
    tolerance: float = 1e-6,
) -> Solution:
    """Minimise the penalised loss of all folds, or of all but one.

    L-BFGS runs on parameters that are scaled by the curvature at temperature scaling, since
    penalties may be a million times apart. There a gradient of 1e-6 means that a step along its
    parameter could lower the loss by about 1e-12.
    """
    centre = tempered(held.classes, held.sharpness, penalty.size)
    start = centre if start is None else start
    curved = diagonal_curvature(held, penalty.size) if curvature is None else curvature
    scale = 1 / np.sqrt(curved + 2 * penalty)
    loss = mean_nll(held, held.runs(without=without))

    def scaled(u: FloatArray) -> tuple[float, FloatArray]:
        x = start + scale * u
        value, gradient = loss(x)
        away = penalty * (x - centre)
        return value + float(np.sum(away * (x - centre))), scale * (gradient + 2 * away)

    found = minimise(scaled, np.zeros_like(start), steps=steps, tolerance=tolerance)
    return found._replace(x=start + scale * found.x)


def solve_all(held: Held, penalty: FloatArray) -> Solution:
    """Minimise the penalised loss of all rows."""
    task = partial(solve, held, penalty)
    return task() if cores(held, penalty.size) > 1 else apart([task])[0]


def cross_validated(held: Held, penalties: Sequence[FloatArray]) -> int:
    """Number of the penalty with the lowest held-out loss; they come from strong to weak.

    Each search starts where the one before it ended, and the walk stops when the loss rises.
    """
    count = len(held.cuts) - 1
    if len(penalties) == 1 or count == 1:
        return 0
    curvature = diagonal_curvature(held, penalties[0].size)
    at: list[FloatArray | None] = [None] * count
    losses: list[float] = []
    parts = np.array_split(np.arange(count), min(cores(held, penalties[0].size), count))

    def some(penalty: FloatArray, part: IntArray) -> float:
        return sum(_held_out(held, penalty, fold, at, curvature) for fold in part.tolist())

    for penalty in penalties:
        losses.append(sum(apart([partial(some, penalty, part) for part in parts])))
        if len(losses) - np.argmin(losses) > PATIENCE or losses[-1] > (1 + RISE) * min(losses):
            break
    return int(np.argmin(losses))


def _held_out(
    held: Held,
    penalty: FloatArray,
    fold: int,
    at: list[FloatArray | None],
    curvature: FloatArray,
) -> float:
    """Sum of the loss over a fold that the search did not see; ``at`` takes where it ended."""
    # Gradients of this size could lower the loss by 2e-4 at most, all parameters together.
    tolerance = 0.02 / math.sqrt(penalty.size)
    x = solve(
        held,
        penalty,
        without=fold,
        start=at[fold],
        curvature=curvature,
        steps=100,
        tolerance=tolerance,
    ).x
    at[fold], run = x, held.runs()[fold]
    return mean_nll(held, [run])(x)[0] * float(held.weight[slice(*run)].sum())


def apart(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run tasks on threads of their own, with one core and the caller's time limit for each."""
    contexts = [contextvars.copy_context() for _ in tasks]
    return on_threads(lambda known, task: known.run(task), contexts, tasks, always=True)


def cores(held: Held, size: int) -> int:
    """How many cores a search over ``size`` parameters is worth; small steps share none well."""
    on_cpu = held.inputs.device.type == "cpu"
    return torch.get_num_threads() if on_cpu and len(held.labels) * size >= 1 << 23 else 1


def mean_nll(held: Held, runs: Runs) -> Objective:
    """Weighted mean of the loss over runs of rows, with its gradient ``G^T Z``."""
    total = float(sum(held.weight[a:b].sum() for a, b in runs))

    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        weight, bias = unpacked(x, held.classes, held.inputs.device)
        value, by_weight, by_bias = bias.new_zeros(()), weight.new_zeros(weight.shape), 0 * bias
        for inputs, labels, share in pieces(held, runs):
            logs = applied(inputs, weight, bias).log_softmax(-1)
            value -= share @ logs.gather(-1, labels)[:, 0]
            error = logs.exp_().scatter_add_(-1, labels, -torch.ones_like(share)[:, None])
            error *= share[:, None]
            by_weight += summed(error, inputs, weight.ndim)
            by_bias += error.sum(0)
        gradient = torch.cat([by_weight.reshape(-1), by_bias]) / total
        return float(value) / total, gradient.cpu().numpy()

    return loss


def diagonal_curvature(held: Held, size: int) -> FloatArray:
    """Second derivative of the loss by each of ``size`` parameters, at temperature scaling."""
    diagonal = size == 2 * held.classes
    found = torch.zeros(size, dtype=torch.float64, device=held.inputs.device)
    for inputs, _, share in pieces(held, held.runs()):
        probs = (held.sharpness * inputs).softmax(-1)
        spread = probs * (1 - probs) * share[:, None]
        by_weight = summed(spread, inputs**2, 1 if diagonal else 2)
        found += torch.cat([by_weight.reshape(-1), spread.sum(0)])
    return np.asarray(found.cpu().numpy() / float(held.weight.sum()))


def summed(left: Tensor, right: Tensor, dimensions: int) -> Tensor:
    """Sum over rows of the products of columns: all pairs ``(classes, classes)``, or equal ones."""
    return (left * right).sum(0) if dimensions == 1 else left.T @ right


def pieces(held: Held, runs: Runs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs ``(rows, classes)`` in float64, labels ``(rows, 1)`` and weights ``(rows,)``."""
    on_cpu = held.inputs.device.type == "cpu"
    step = max(1, (PIECE if on_cpu else BLOCK["cuda"]) // held.classes)
    for first, last in runs:
        for a in range(first, last, step):
            rows = slice(a, min(a + step, last))
            yield held.inputs[rows].double(), held.labels[rows, None], held.weight[rows]
