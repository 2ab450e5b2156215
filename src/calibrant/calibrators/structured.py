"""Affine maps that correct temperature scaling, with penalties that fade as examples grow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from calibrant._core.checks import IGNORED
from calibrant._core.chunks import Examples
from calibrant.calibrators import affine_fit as fit
from calibrant.calibrators.affine import FADE, WIDEST, Affine, too_wide
from calibrant.calibrators.affine_fit import Penalties
from calibrant.calibrators.base import Context
from calibrant.calibrators.data_checks import missing_classes
from calibrant.calibrators.scaling import fitted_sharpness


class Structured(Affine):
    """A correction of tempered log-probabilities, held near none by known penalties."""

    accepts_masked = True  # the share of the uniform distribution keeps the inputs finite
    temperature_: Tensor
    uniform_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._store(temperature_=torch.tensor(1.0), uniform_=torch.tensor(0.5))

    def _inputs(self, logits: Tensor) -> Tensor:
        tempered = (logits / self.temperature_.to(logits)).log_softmax(-1)
        share = self.uniform_.to(logits)
        return torch.logaddexp(tempered + (1 - share).log(), (share / logits.shape[-1]).log())

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        result = super()._transform(logits, top, features)
        return torch.where(torch.isneginf(logits), logits, result)

    def _penalties(self, classes: int, count: float) -> Penalties:
        """Penalties of sums over entries; an infinite one leaves only the diagonal."""
        pairs = classes * (classes - 1)
        of_class = classes**2 / count
        return Penalties(pairs**2 / count if classes <= WIDEST else math.inf, of_class, of_class)

    def effective_size(self, classes: int) -> int:
        """One for each class: the penalties let few examples say little more."""
        return classes

    def _notes(self, examples: Examples) -> list[str]:
        return missing_classes(examples, FADE)

    def _fit(self, examples: Examples, context: Context) -> None:
        sharpness = math.exp(fitted_sharpness(examples, context).x[0])
        weight = examples.labelled_weight()
        count = float((examples.labels != IGNORED).sum() if weight is None else weight.sum())
        self._store(temperature_=1 / sharpness, uniform_=1 / (count + 1))
        data = fit.gather(examples, self._inputs, sharpness=1.0)  # as they are tempered already
        penalties = self._penalties(examples.classes, count)
        vector = fit.penalty_vector(examples.classes, penalties)
        # the loss ends 1e-8 above its minimum at most, far less than the noise of examples
        result = fit.solve_all(data, vector, tolerance=1e-5)
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
    >>> import numpy as np
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
    summary = "a temperature, then a matrix and an intercept, nearer to none the fewer the examples"

    @property
    def is_diagonal_(self) -> bool:
        """True if there were too many classes for a matrix."""
        return self.weight_.ndim == 1

    def size(self, classes: int) -> int:
        """A temperature, a matrix and an intercept; above 200 classes a diagonal of it."""
        return 1 + (classes if classes <= WIDEST else 1) * classes + classes

    def _notes(self, examples: Examples) -> list[str]:
        return [*too_wide(examples.classes), *super()._notes(examples)]


class StructuredVectorScaling(Structured):
    r"""Temperature scaling, then a penalised factor and intercept for each class.

    Structured vector scaling of Berta et al. 2026: :class:`StructuredMatrixScaling` with a diagonal
    :math:`D`. With the same log-probabilities :math:`x`, the result
    :math:`\mathrm{softmax}(x + d \odot x + b)` minimises

    .. math:: \frac{\sum_i s_i \, \mathrm{NLL}_i}{\sum_i s_i}
              + \frac{K}{n} \sum_k (b_k^2 + d_k^2) .

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
    >>> import numpy as np
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
    summary = "the same with a factor for each class instead of a matrix"

    def size(self, classes: int) -> int:
        """A temperature, and a factor and an intercept for each class."""
        return 1 + 2 * classes

    def _penalties(self, classes: int, count: float) -> Penalties:
        return super()._penalties(classes, count)._replace(off_diagonal=math.inf)
