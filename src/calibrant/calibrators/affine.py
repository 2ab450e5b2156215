"""Affine maps of the logits: a factor for each class or a matrix, and an intercept."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import FloatArray, as_float64
from calibrant._core.chunks import Examples
from calibrant._core.options import NonNegative, Seed
from calibrant._core.solve import Solution
from calibrant.calibrators import affine_fit as fit, affine_passes
from calibrant.calibrators.affine_fit import RIDGE, Penalties
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.data_checks import absent_classes, missing_classes, warn_together
from calibrant.calibrators.passes import Passes

WIDEST = 200  # number of classes up to which a matrix is fitted
GRID = 10.0 ** np.arange(2, -5.25, -0.5)
"""Penalties that cross-validation tries, from strong to weak: of each entry off the diagonal,
for logits divided by their best temperature."""
ON_DIAGONAL, OF_INTERCEPT = 0.1, 0.01  # penalties of these entries, relative to those of GRID
FADE = "the fit makes them improbable, as far as its penalties let it"


class Affine(Calibrator):
    """A factor per class or a matrix, and an intercept."""

    accepts_masked = False
    learned_shapes = "weight_ classes classes|classes; bias_ classes"
    weight_: Tensor
    bias_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._store(weight_=torch.ones(1), bias_=torch.zeros(1))

    def _inputs(self, logits: Tensor) -> Tensor:
        """Values that are multiplied; a constant added to a row does not change them."""
        return fit.centred(logits)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        weight, bias = self.weight_.to(logits.dtype), self.bias_.to(logits.dtype)
        return fit.applied(self._inputs(logits), weight, bias)

    def _penalty(self) -> FloatArray:
        """Penalty of each parameter, as in the last fit."""
        raise NotImplementedError

    def refine(self, passes: Passes) -> None:
        """Learn from all examples, with the penalties of a fit on some of them."""
        start = as_float64(torch.cat([self.weight_.reshape(-1), self.bias_]))
        result = affine_passes.refined(passes, self._inputs, self._penalty(), start)
        notes = absent_classes(passes.sums(affine_passes.class_counts)[0], FADE)
        self._keep(result, passes.classes, [*self._limits(passes.classes), *notes])

    def _limits(self, classes: int) -> list[str]:
        """Notes about what is not fitted for so many classes."""
        return []

    def _keep(self, solution: Solution, classes: int, notes: list[str]) -> None:
        weight, bias = fit.unpacked(solution.x, classes)
        self._store(weight_=weight, bias_=bias)
        self.solution_ = solution
        if not solution.converged:
            notes = [*notes, f"the search stopped early, after {solution.steps} steps"]
        warn_together(self, notes)


class VectorScaling(Affine):
    r"""A factor and an intercept for each class: :math:`\mathrm{softmax}(w \odot z + b)`.

    Vector scaling of Guo et al. 2017, fitted by the negative log-likelihood. Logits are centred
    first, :math:`z - \bar z`, since :math:`z` and :math:`z + c` mean the same. A ridge of 1e-6
    towards temperature scaling bounds the parameters where the data do not, with a warning.

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

    name = "vector"
    aliases = ("vector_scaling",)
    summary = "a factor and an intercept for each class"
    fits_passes = True

    def size(self, classes: int) -> int:
        """A factor and an intercept for each class."""
        return 2 * classes

    def _penalty(self) -> FloatArray:
        return np.full(self.size(len(self.bias_)), RIDGE)

    def _fit(self, examples: Examples, context: Context) -> None:
        data = fit.gather(examples, self._inputs)
        result = fit.solve_all(data, np.full(self.size(examples.classes), RIDGE))
        notes = missing_classes(examples, FADE)
        away = result.x - fit.tempered(examples.classes, data.sharpness, result.x.size)
        if RIDGE * float(away @ away) > 0.1 * result.value:
            notes.append(
                f"it can tell the {len(data.labels):,} examples apart almost without error, so "
                "that only a ridge bounds its parameters: fit it on more examples"
            )
        self._keep(result, examples.classes, notes)


class Regularised(Affine):
    """A matrix and an intercept, with penalties as options or by cross-validation."""

    fits_passes = True
    off_diagonal_: Tensor
    intercept_: Tensor
    on_diagonal_: Tensor

    def __init__(
        self,
        *,
        off_diagonal: NonNegative | None = None,
        intercept: NonNegative | None = None,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.off_diagonal = off_diagonal
        self.intercept = intercept
        self.seed = seed
        self._used(Penalties(math.nan, math.nan, math.nan))

    @property
    def is_diagonal_(self) -> bool:
        """True if there were too many classes for a matrix."""
        return self.weight_.ndim == 1

    def size(self, classes: int) -> int:
        """A matrix and an intercept; above 200 classes a diagonal and an intercept."""
        return (classes if classes <= WIDEST else 1) * classes + classes

    def _fit(self, examples: Examples, context: Context) -> None:
        chosen = self.off_diagonal is not None and self.intercept is not None
        fold = None if chosen else fit.dealt(examples, context.groups, self.seed)
        data = fit.gather(examples, self._inputs, fold)
        candidates = self._candidates(examples.classes, data.sharpness)
        vectors = [fit.penalty_vector(examples.classes, each) for each in candidates]
        best = fit.cross_validated(data, vectors)
        self._used(candidates[best])
        result = fit.solve_all(data, vectors[best])
        notes = missing_classes(examples, FADE)
        self._keep(result, examples.classes, [*self._limits(examples.classes), *notes])

    def _limits(self, classes: int) -> list[str]:
        return too_wide(classes)

    def _penalty(self) -> FloatArray:
        used = (self.off_diagonal_, self.intercept_, self.on_diagonal_)
        return fit.penalty_vector(len(self.bias_), Penalties(*map(float, used)))

    def _used(self, penalties: Penalties) -> None:
        off_diagonal, intercept, diagonal = penalties
        self._store(off_diagonal_=off_diagonal, intercept_=intercept, on_diagonal_=diagonal)

    def _candidates(self, classes: int, sharpness: float) -> list[Penalties]:
        """Penalties to choose from, from strong to weak; one where none is to be chosen."""
        result = []
        # a diagonal has few parameters and many rows are slow: every other penalty will do
        for each in GRID[:: 1 if classes <= WIDEST else 2].tolist():
            # of entries that multiply logits, not tempered ones
            entry = each / sharpness**2
            off, diagonal = self.off_diagonal, 0.0
            if off is None:
                off, diagonal = entry * classes * (classes - 1), ON_DIAGONAL * entry * classes
            bias = OF_INTERCEPT * each * classes if self.intercept is None else self.intercept
            result.append(Penalties(off if classes <= WIDEST else math.inf, bias, diagonal))
        return list(dict.fromkeys(result))


class MatrixScaling(Regularised):
    r"""A matrix and an intercept: :math:`\mathrm{softmax}(W z + b)`, kept near a diagonal.

    Matrix scaling of Guo et al. 2017 with the off-diagonal and intercept regularisation (ODIR)
    of Kull et al. 2019. The mean negative log-likelihood is minimised plus

    .. math:: \frac{\lambda}{K (K - 1)} \sum_{i \ne j} W_{ij}^2 + \frac{\mu}{K} \sum_j b_j^2 .

    Logits are centred first, :math:`z - \bar z`, since :math:`z` and :math:`z + c` mean the
    same. A ridge of 1e-6 towards temperature scaling bounds what the penalties leave free.

    ODIR leaves the diagonal free, which over-fits where examples per class are few. So when
    :math:`\lambda` is chosen by cross-validation, :math:`\frac{\delta}{K} \sum_k (W_{kk} - 1/T)^2`
    is added, with the best single temperature :math:`T`: strong penalties end in temperature
    scaling. Above 200 classes only the diagonal is fitted.

    Parameters
    ----------
    off_diagonal, intercept : float, optional
        :math:`\lambda` and :math:`\mu`. None: chosen by cross-validation, with :math:`\delta/K` a
        tenth and :math:`\mu/K` a hundredth of :math:`\lambda/K(K-1)` (for logits over :math:`T`).
    seed : int
        Of the five folds: by class, or by the ``groups`` of the fit, which stay together.

    Attributes
    ----------
    weight_ : (classes, classes) Tensor, or (classes,) if ``is_diagonal_``
    bias_ : (classes,) Tensor
    off_diagonal_, intercept_, on_diagonal_ : scalar Tensor
        :math:`\lambda` (inf when the matrix is diagonal), :math:`\mu` and :math:`\delta`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(5000, 3))
    >>> logits -= logits.mean(-1, keepdims=True)
    >>> truth = logits @ np.array([[4.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 2.0, 0.0]])
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = MatrixScaling().fit(logits, labels)  # sees that two classes were swapped
    >>> fitted.predict_proba(np.array([[4.0, 1.0, 0.0], [0.0, 4.0, 1.0]])).argmax(-1)
    array([0, 2])
    """

    name = "matrix"
    aliases = ("matrix_scaling",)
    summary = "a regularised matrix and an intercept on the logits"


class DirichletCalibration(Regularised):
    r"""A matrix and an intercept on log-probabilities: :math:`\mathrm{softmax}(W \log p + b)`.

    Dirichlet calibration of Kull et al. 2019. It differs from :class:`MatrixScaling`, whose
    parameters and attributes it has, in the shift of each row only: :math:`\log p = z - \log \sum_k
    e^{z_k}` instead of :math:`z - \bar z`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 3 * rng.normal(size=(2000, 3))
    >>> labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = DirichletCalibration().fit(logits, labels)
    >>> fitted.weight_.diagonal().mean()
    tensor(0.5...)
    """

    name = "dirichlet"
    aliases = ("dirichlet_calibration",)
    summary = "the same on log-probabilities"

    def _inputs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)


def too_wide(classes: int) -> list[str]:
    """Note that there are too many classes for a matrix, if there are."""
    if classes <= WIDEST:
        return []
    text = f"{classes:,} classes are too many for a matrix (at most {WIDEST})"
    return [f"{text}: only its diagonal is fitted"]
