"""SMART: the margin of an example gives its temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import FloatArray, Values, as_values, warn
from calibrant._core.chunks import Examples, labelled_chunks
from calibrant._core.logpartition import Records
from calibrant._core.options import Count, NonNegative, Seed
from calibrant._core.torch_models import two_largest
from calibrant.calibrators import objectives
from calibrant.calibrators.base import Context
from calibrant.calibrators.network import NetworkTemperature


class Indicator(NamedTuple):
    """A description of an example, from records, or from logits less their ``top``."""

    of_records: Callable[[Records], FloatArray]
    of_logits: Callable[[Tensor, Tensor], Tensor]


def _margin(logits: Tensor, top: Tensor) -> Tensor:
    first, second = two_largest(logits)
    return first - second


def _mean_gap(logits: Tensor, top: Tensor) -> Tensor:
    possible = ~torch.isneginf(logits)
    total = torch.where(possible, logits, 0).sum(-1, keepdim=True)
    return -total / possible.sum(-1, keepdim=True)


def _entropy(logits: Tensor, top: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    terms = torch.where(torch.isneginf(logits), 0, log_probs.exp() * log_probs)
    return -terms.sum(-1, keepdim=True)


INDICATORS: dict[str, Indicator] = {
    "margin": Indicator(lambda r: r.margin[:, None], _margin),
    "entropy": Indicator(lambda r: np.subtract(*r.log_partition(1.0))[:, None], _entropy),
    "confidence": Indicator(
        lambda r: np.exp(-r.log_partition(1.0).value)[:, None],
        lambda logits, top: (-logits.logsumexp(-1, keepdim=True)).exp(),
    ),
    "max_logit": Indicator(lambda r: r.top[:, None], lambda logits, top: top),
    "max_minus_mean": Indicator(lambda r: r.mean_gap[:, None], _mean_gap),
}
"""Descriptions of an example, as in SMART's table 4; the option ``all`` takes the logits."""

SmartObjective = Literal["charbonnier", "soft_ece", "nll", "brier", "mse", "ls", "pointwise"]
SmartIndicator = Literal["margin", "entropy", "confidence", "max_logit", "max_minus_mean", "all"]


class SMART(NetworkTemperature):
    r"""The margin of an example gives its temperature (Guo et al. 2026).

    With the margin :math:`m = z_{(1)} - z_{(2)}` of the two largest logits, standardised,

    .. math:: T = \mathrm{softplus}(W_2\,\mathrm{ReLU}(W_1 \hat m + b_1) + b_2) + 0.1

    has 49 parameters. They minimise the soft-binned calibration error under a Charbonnier penalty
    (:func:`calibrant.calibrators.objectives.soft_ece`) by Adam on the whole data.

    The defaults were chosen on held-out data and are gentler than the paper's: the search starts
    at the best single temperature, takes 250 steps, and minds the likelihood. The paper's form is
    ``SMART(start="identity", likelihood=0, steps=2000)``.

    Parameters
    ----------
    objective : str
        ``charbonnier``, or another of the paper's table 3: ``soft_ece`` (absolute values), ``nll``,
        ``brier``, ``mse``, ``ls`` (label smoothing 0.05), ``pointwise`` (equation 6 to the letter,
        which does not calibrate).
    indicator : str
        ``margin``, or another of the paper's table 4: ``entropy``, ``confidence``, ``max_logit``
        (which depends on a constant added to all logits), ``max_minus_mean``, ``all`` logits.
    hidden : sequence of int
        Widths of the hidden layers. The authors' code has (16, 16): 321 parameters.
    likelihood : float
        Weight of the negative log-likelihood that is added to the binned objectives.
    start : {"ts", "identity"}
        Temperature of all examples at the first step: the best single one, or 1.
    steps, seed : int
        Largest number of steps, and the seed of the first weights.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(2000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = SMART().fit(3 * truth, labels)
    >>> float(fitted.temperature(3 * truth).mean().round())
    3.0
    """

    name = "smart"
    summary = "the margin gives each example its temperature; see {doc}`smart`"

    def __init__(
        self,
        *,
        objective: SmartObjective = "charbonnier",
        indicator: SmartIndicator = "margin",
        hidden: Sequence[Count] = (16,),
        likelihood: NonNegative = 0.3,
        start: Literal["ts", "identity"] = "ts",
        steps: Count = 250,
        seed: Seed = 0,
    ) -> None:
        super().__init__(objective, hidden, steps, seed)
        self.indicator = indicator
        self.likelihood = likelihood
        self.start = start
        self.fits_records = indicator != "all"  # only the logits themselves are not in the records
        if indicator == "all":
            each = "mean_ classes; low_ classes; high_ classes; deviation_ classes"
            self.learned_shapes = f"{each}; weight0_ classes ="

    def size(self, classes: int) -> int:
        """Weights and biases: 49 by default."""
        return self._count(classes if self.indicator == "all" else 1)

    def _fit(self, examples: Examples, context: Context) -> None:
        if self.fits_records:
            super()._fit(examples, context)
        else:
            self._fit_inputs(context.table(examples), _all_logits(examples))

    def curve(self) -> tuple[FloatArray, FloatArray]:
        """Return values of the indicator within the range of the fit, and their temperatures.

        Both are empty before a fit and for ``indicator="all"``.
        """
        low, high = self.low_.tolist(), self.high_.tolist()
        if not self.classes or len(low) != 1:
            return np.zeros(0), np.zeros(0)
        values = np.linspace(low[0], high[0], 100)
        inputs = self._tensor(values)[:, None]
        return values, self._network(inputs)[:, 0].cpu().numpy()

    def key_values(self) -> dict[str, str]:
        """Return the range of the temperatures."""
        temperature = self.curve()[1]
        if not temperature.size:
            return {}
        return {"temperature": f"{temperature.min():.4g}..{temperature.max():.4g}"}

    def _inputs(self, records: Records) -> FloatArray:
        if not self.fits_records:
            raise ValueError('indicator "all" needs the logits: use fit(logits, labels)')
        return INDICATORS[self.indicator].of_records(records)

    def _objective(self) -> objectives.Objective:
        if self.objective == "pointwise":
            warn(
                'objective "pointwise" (equation 6 of the paper) pushes confidence to 1 where most '
                'answers are right: it does not calibrate, use "charbonnier"'
            )
        soft: dict[str, Callable[..., objectives.Measured]] = {
            "charbonnier": partial(objectives.soft_ece, delta=1e-3),
            "soft_ece": objectives.soft_ece,
            "pointwise": objectives.pointwise,
        }
        if self.objective in soft:
            return partial(objectives.with_likelihood, soft[self.objective], self.likelihood)
        return super()._objective()

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        if self.indicator == "all":
            return self._network(logits)
        return self._network(INDICATORS[self.indicator].of_logits(logits, top))


def _all_logits(examples: Examples) -> FloatArray:
    chunks = labelled_chunks(examples, 0, examples.labels.size)
    logits = torch.cat([chunk.logits.double() for chunk in chunks])
    result = (logits - logits.amax(-1, keepdim=True)).cpu().numpy()
    if np.isneginf(result).any():
        raise ValueError('indicator "all" needs finite logits, got -inf: use "margin"')
    return np.asarray(result)


class TemperatureBounds(NamedTuple):
    """Least and largest temperature, each of the shape of the margins."""

    low: FloatArray
    high: FloatArray


def margin_bounds(margin: Values, confidence: Values, classes: int) -> TemperatureBounds:
    r"""Temperatures that can give an example of known margin a wanted confidence.

    .. math::
        \frac{m}{\log\frac{K - 1}{S}} \le T \le \frac{m}{-\log S}, \qquad S = \frac1p - 1

    (SMART, appendix A.1): the other classes are at least :math:`m` below the top. There is no
    upper bound for :math:`p \le 1/2`. ``confidence`` is between ``1 / classes`` and 1.

    >>> margin_bounds([1.0, 10.0], 0.8, classes=10)
    TemperatureBounds(low=array([0.279..., 2.790...]), high=array([0.721..., 7.213...]))
    """
    gaps = as_values(margin, "margin")
    wanted = np.broadcast_to(np.asarray(confidence, dtype=np.float64), gaps.shape)
    if (gaps < 0).any():
        raise ValueError(f"margin must not be negative, got {float(gaps.min()):g}")
    if not ((wanted > 1 / classes) & (wanted < 1)).all():
        got = f"{float(wanted.min()):g} to {float(wanted.max()):g}"
        raise ValueError(f"confidence must lie between 1/{classes} and 1, got {got}")
    odds = 1 / wanted - 1
    bounded = odds < 1
    high = np.full(gaps.shape, np.inf)
    np.divide(gaps, -np.log(odds), out=high, where=bounded)
    return TemperatureBounds(gaps / np.log((classes - 1) / odds), high)
