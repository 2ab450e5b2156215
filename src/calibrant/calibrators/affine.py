"""Affine maps of the logits: a factor for each class or a matrix, and an intercept.

The penalties that keep a matrix near a diagonal are options, or chosen by cross-validation; the
structured methods know theirs from the numbers of classes and of examples.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import IGNORED, FloatArray, as_float64
from calibrant._core.chunks import Examples
from calibrant._core.options import NonNegative, Seed
from calibrant._core.solve import Solution
from calibrant.calibrators import affine_fit as fit
from calibrant.calibrators.affine_fit import RIDGE, _Penalties
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.fit_inputs import (
    Passes,
    _absent_classes,
    _missing_classes,
    _warn_together,
)
from calibrant.calibrators.scaling import _fitted_sharpness

MAX_MATRIX_CLASSES = 200  # above, only the diagonal of a matrix is fitted
GRID = 10.0 ** np.arange(2, -5.25, -0.5)
"""Penalties that cross-validation tries, from strong to weak: of each entry off the diagonal,
for logits divided by their best temperature."""
ON_DIAGONAL, OF_INTERCEPT = 0.1, 0.01  # penalties of these entries, relative to those of GRID
FADE = "the fit makes them improbable, as far as its penalties let it"


class _Affine(Calibrator):
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
        return fit._centred(logits)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        weight, bias = self.weight_.to(logits.dtype), self.bias_.to(logits.dtype)
        return fit._applied(self._inputs(logits), weight, bias)

    def _penalty(self) -> FloatArray:
        """Penalty of each parameter, as in the last fit."""
        raise NotImplementedError

    def refine(self, passes: Passes) -> None:
        """Learn from all examples, with the penalties of a fit on some of them."""
        start = as_float64(torch.cat([self.weight_.reshape(-1), self.bias_]))
        result = fit._refined(passes, self._inputs, self._penalty(), start)
        notes = _absent_classes(passes.sums(fit._class_counts)[0], FADE)
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
        _warn_together(self, notes)


class VectorScaling(_Affine):
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
        data = fit._gather(examples, self._inputs)
        result = fit._solve_all(data, np.full(self.size(examples.classes), RIDGE))
        notes = _missing_classes(examples, FADE)
        away = result.x - fit._tempered(examples.classes, data.sharpness, result.x.size)
        if RIDGE * float(away @ away) > 0.1 * result.value:
            notes.append(
                f"it can tell the {len(data.labels):,} examples apart almost without error, so "
                "that only a ridge bounds its parameters: fit it on more examples"
            )
        self._keep(result, examples.classes, notes)


class _Regularised(_Affine):
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
        self._used(_Penalties(math.nan, math.nan, math.nan))

    @property
    def is_diagonal_(self) -> bool:
        """True if there were too many classes for a matrix."""
        return self.weight_.ndim == 1

    def size(self, classes: int) -> int:
        """A matrix and an intercept; above 200 classes a diagonal and an intercept."""
        return (classes if classes <= MAX_MATRIX_CLASSES else 1) * classes + classes

    def _fit(self, examples: Examples, context: Context) -> None:
        chosen = self.off_diagonal is not None and self.intercept is not None
        fold = None if chosen else fit._dealt(examples, context.groups, self.seed)
        data = fit._gather(examples, self._inputs, fold)
        candidates = self._candidates(examples.classes, data.sharpness)
        vectors = [fit._penalty_vector(examples.classes, each) for each in candidates]
        best = fit._cross_validated(data, vectors)
        self._used(candidates[best])
        result = fit._solve_all(data, vectors[best])
        notes = _missing_classes(examples, FADE)
        self._keep(result, examples.classes, [*self._limits(examples.classes), *notes])

    def _limits(self, classes: int) -> list[str]:
        return _too_wide(classes)

    def _penalty(self) -> FloatArray:
        used = (self.off_diagonal_, self.intercept_, self.on_diagonal_)
        return fit._penalty_vector(len(self.bias_), _Penalties(*map(float, used)))

    def _used(self, penalties: _Penalties) -> None:
        off_diagonal, intercept, diagonal = penalties
        self._store(off_diagonal_=off_diagonal, intercept_=intercept, on_diagonal_=diagonal)

    def _candidates(self, classes: int, sharpness: float) -> list[_Penalties]:
        """Penalties to choose from, from strong to weak; one where none is to be chosen."""
        result = []
        # a diagonal has few parameters and many rows are slow: every other penalty will do
        for each in GRID[:: 1 if classes <= MAX_MATRIX_CLASSES else 2].tolist():
            # of entries that multiply logits, not tempered ones
            entry = each / sharpness**2
            off, diagonal = self.off_diagonal, 0.0
            if off is None:
                off, diagonal = entry * classes * (classes - 1), ON_DIAGONAL * entry * classes
            bias = OF_INTERCEPT * each * classes if self.intercept is None else self.intercept
            result.append(
                _Penalties(off if classes <= MAX_MATRIX_CLASSES else math.inf, bias, diagonal)
            )
        return list(dict.fromkeys(result))


class MatrixScaling(_Regularised):
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


class DirichletCalibration(_Regularised):
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
    summary = "a regularised matrix and an intercept on log-probabilities"

    def _inputs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)


class Structured(_Affine):
    """A correction of tempered log-probabilities, held near none by known penalties."""

    accepts_masked = True  # the share of the uniform distribution keeps the inputs finite
    temperature_: Tensor
    uniform_: Tensor

    def __init__(self, *, penalty: NonNegative = 1.0) -> None:
        super().__init__()
        self.penalty = penalty
        self._store(temperature_=torch.tensor(1.0), uniform_=torch.tensor(0.5))

    def _inputs(self, logits: Tensor) -> Tensor:
        tempered = (logits / self.temperature_.to(logits)).log_softmax(-1)
        share = self.uniform_.to(logits)
        return torch.logaddexp(tempered + (1 - share).log(), (share / logits.shape[-1]).log())

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        result = super()._transform(logits, top, features)
        return torch.where(torch.isneginf(logits), logits, result)

    def _penalties(self, classes: int, count: float) -> _Penalties:
        """Penalties of sums over entries; an infinite one leaves only the diagonal."""
        pairs = classes * (classes - 1)
        of_class = self.penalty * classes**2 / count
        of_pairs = self.penalty * pairs**2 / count
        return _Penalties(
            of_pairs if classes <= MAX_MATRIX_CLASSES else math.inf, of_class, of_class
        )

    def effective_size(self, classes: int) -> int:
        """One for each class: the penalties let few examples say little more."""
        return classes

    def _notes(self, examples: Examples) -> list[str]:
        return _missing_classes(examples, FADE)

    def _fit(self, examples: Examples, context: Context) -> None:
        sharpness = math.exp(_fitted_sharpness(examples, context).x[0])
        weight = examples.labelled_weight()
        count = float((examples.labels != IGNORED).sum() if weight is None else weight.sum())
        self._store(temperature_=1 / sharpness, uniform_=1 / (count + 1))
        data = fit._gather(examples, self._inputs, sharpness=1.0)  # as they are tempered already
        penalties = self._penalties(examples.classes, count)
        vector = fit._penalty_vector(examples.classes, penalties)
        # the loss ends 1e-8 above its minimum at most, far less than the noise of examples
        result = fit._solve_all(data, vector, tolerance=1e-5)
        self._keep(result, examples.classes, self._notes(examples))


class StructuredMatrixScaling(Structured):
    r"""Temperature scaling, then a penalised matrix and intercept for what it leaves.

    Structured matrix scaling of Berta et al. 2026. The temperature :math:`T` with the least
    negative log-likelihood gives log-probabilities

    .. math:: x = \log((1 - \epsilon)\,\mathrm{softmax}(z / T) + \epsilon / K) , \quad
              \epsilon = \frac1{n + 1} ,

    with a share of the uniform distribution as of one more example, so that no class is less
    probable than the examples can tell. They are corrected to :math:`\mathrm{softmax}(x + Dx + b)`
    by the minimum of

    .. math:: \frac{\sum_i s_i \, \mathrm{NLL}_i}{\sum_i s_i}
              + \frac{K}{n} (\sum_k b_k^2 + \sum_k D_{kk}^2)
              + \frac{K (K - 1)}{n} \sum_{i \ne j} D_{ij}^2 .

    :math:`K` is the number of classes and :math:`n` that of labelled examples. The fewer they are,
    the nearer the result stays to temperature scaling, so that it needs no cross-validation.
    Only the ratios of the weights :math:`s_i` matter. Above 200 classes only the diagonal of
    :math:`D` is fitted, as in :class:`StructuredVectorScaling`. The predicted class may change.

    Parameters
    ----------
    penalty : float
        A factor of both penalties, 1 as published. :class:`Auto` chooses it by cross-validation.

    Attributes
    ----------
    temperature_ : scalar Tensor
        :math:`T`.
    uniform_ : scalar Tensor
        :math:`\epsilon`.
    weight_ : (classes, classes) Tensor, or (classes,) if ``is_diagonal_``
        :math:`I + D`.
    bias_ : (classes,) Tensor
        :math:`b`.

    References
    ----------
    Berta, Holzmüller, Jordan and Bach: Structured matrix scaling for multi-class calibration,
    AISTATS 2026.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(4000, 4))
    >>> truth = logits + [1.0, 0.0, 0.0, -1.0]  # the model prefers the last option to the first
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = StructuredMatrixScaling().fit(logits, labels)
    >>> [round(float(b)) for b in fitted.bias_]
    [1, 0, 0, -1]
    """

    name = "sms"
    aliases = ("structured_matrix", "structured_matrix_scaling")
    summary = "a matrix that shrinks toward one temperature with little data"

    @property
    def is_diagonal_(self) -> bool:
        """True if there were too many classes for a matrix."""
        return self.weight_.ndim == 1

    def size(self, classes: int) -> int:
        """A temperature, a matrix and an intercept; above 200 classes a diagonal of it."""
        return 1 + (classes if classes <= MAX_MATRIX_CLASSES else 1) * classes + classes

    def _notes(self, examples: Examples) -> list[str]:
        return [*_too_wide(examples.classes), *super()._notes(examples)]


class StructuredVectorScaling(Structured):
    r"""Temperature scaling, then a penalised factor and intercept for each class.

    Structured vector scaling of Berta et al. 2026: :class:`StructuredMatrixScaling` with a diagonal
    :math:`D`. With the same log-probabilities :math:`x`, the result
    :math:`\mathrm{softmax}(x + d \odot x + b)` minimises

    .. math:: \frac{\sum_i s_i \, \mathrm{NLL}_i}{\sum_i s_i}
              + \frac{K}{n} \sum_k (b_k^2 + d_k^2) .

    Parameters
    ----------
    penalty : float
        A factor of the penalty, 1 as published. :class:`Auto` chooses it by cross-validation.

    Attributes
    ----------
    temperature_ : scalar Tensor
        :math:`T`.
    uniform_ : scalar Tensor
        :math:`\epsilon`.
    weight_ : (classes,) Tensor
        :math:`1 + d`.
    bias_ : (classes,) Tensor
        :math:`b`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(4000, 4))
    >>> truth = logits + [1.0, 0.0, 0.0, -1.0]
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = StructuredVectorScaling().fit(logits, labels)
    >>> fitted.predict_proba(np.zeros(4)).round(1)
    array([0.5, 0.2, 0.2, 0.1])
    """

    name = "svs"
    aliases = ("structured_vector", "structured_vector_scaling")
    summary = "a factor for each class that shrinks toward one temperature"

    def size(self, classes: int) -> int:
        """A temperature, and a factor and an intercept for each class."""
        return 1 + 2 * classes

    def _penalties(self, classes: int, count: float) -> _Penalties:
        return super()._penalties(classes, count)._replace(off_diagonal=math.inf)


def _too_wide(classes: int) -> list[str]:
    """Note that there are too many classes for a matrix, if there are."""
    if classes <= MAX_MATRIX_CLASSES:
        return []
    text = f"{classes:,} classes are too many for a matrix (at most {MAX_MATRIX_CLASSES})"
    return [f"{text}: only its diagonal is fitted"]
