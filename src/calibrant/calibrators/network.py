"""Temperatures that differ between samples: a small network of an indicator gives each its own.

The network is fitted on the log-partition table, with value and gradient in closed form, so a
step costs the same whatever the number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor
from torch.nn import functional as F

from calibrant._core.checks import FloatArray, Values, as_values, check_choice, check_whole, warn
from calibrant._core.chunks import Examples, blocks, runs
from calibrant._core.logpartition import TOP, Records, tabulate
from calibrant._core.solve import Objective, adam
from calibrant.calibrators import objectives
from calibrant.calibrators.base import Context, TemperatureCalibrator
from calibrant.calibrators.scaling import best_sharpness, warn_of_bound

FLOOR = 0.1
"""Least temperature of a network: T = softplus(...) + 0.1."""


class Indicator(NamedTuple):
    """A description of a sample, from the table ``(n, width)`` and from logits ``(..., width)``.

    ``of_logits`` takes logits whose largest is 0 and what the largest was, ``(..., 1)``.
    """

    of_records: Callable[[Records], FloatArray]
    of_logits: Callable[[Tensor, Tensor], Tensor]


def _margin(logits: Tensor, top: Tensor) -> Tensor:
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return (first - second)[..., None]


def _mean_gap(logits: Tensor, top: Tensor) -> Tensor:
    possible = ~torch.isneginf(logits)
    total = torch.where(possible, logits, 0).sum(-1, keepdim=True)
    return -total / possible.sum(-1, keepdim=True)


def _entropy(logits: Tensor, top: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    terms = torch.where(torch.isneginf(logits), 0, log_probs.exp() * log_probs)
    return -terms.sum(-1, keepdim=True)


def _confidence(logits: Tensor, top: Tensor) -> Tensor:
    return (-logits.logsumexp(-1, keepdim=True)).exp()


def _leading(logits: Tensor, top: Tensor) -> Tensor:
    """Log-probabilities of the leading classes, in order, down to -100."""
    count = min(TOP, logits.shape[-1])
    found = logits.log_softmax(-1).topk(count, dim=-1).values
    return F.pad(found, (0, TOP - count), value=-100.0).clamp(min=-100.0)


INDICATORS: dict[str, Indicator] = {
    "margin": Indicator(lambda r: r.margin[:, None], _margin),
    "entropy": Indicator(lambda r: np.subtract(*r.log_partition(1.0))[:, None], _entropy),
    "confidence": Indicator(lambda r: np.exp(-r.log_partition(1.0).value)[:, None], _confidence),
    "max_logit": Indicator(lambda r: r.top[:, None], lambda logits, top: top),
    "max_minus_mean": Indicator(lambda r: r.mean_gap[:, None], _mean_gap),
}
"""What may tell an easy sample from a hard one (SMART's table 4); ``all`` logits come besides."""


class NetworkTemperature(TemperatureCalibrator):
    r""":math:`T = \mathrm{softplus}(f(\hat x)) + 0.1`, with a ReLU network of an indicator.

    Indicators are standardised with the mean and deviation of the fit, and held within the
    range that was seen there: beyond it the network would only extrapolate.
    """

    mean_: Tensor
    deviation_: Tensor
    low_: Tensor
    high_: Tensor

    hidden: tuple[int, ...]
    start: str
    steps: int
    patience: int
    rate: float
    seed: int

    def _declare(self, width: int) -> None:
        """Check the options of the search and name the learned values, before any fit."""
        check_whole("steps", self.steps)
        check_whole("patience", self.patience)
        self._learned(**{name: torch.zeros(width) for name in ("mean_", "low_", "high_")})
        self._learned(deviation_=torch.ones(width))
        for i, (fan_in, fan_out) in enumerate(pairwise(self._widths(width))):
            weight, bias = torch.zeros(fan_in, fan_out), torch.zeros(fan_out)
            self._learned(**{f"weight{i}_": weight, f"bias{i}_": bias})

    def _widths(self, width: int) -> tuple[int, ...]:
        return (width, *self.hidden, 1)

    def _store(self, parameters: FloatArray, width: int) -> None:
        for i, (weight, bias) in enumerate(_layers(parameters, self._widths(width))):
            self._learned(**{f"weight{i}_": weight, f"bias{i}_": bias})

    def _fit_inputs(
        self, records: Records, inputs: FloatArray, objective: objectives.Objective
    ) -> None:
        """Fit the network of inputs ``(n, width)`` to the records."""
        standard = self._standardise(inputs, records.weight)
        tempered = best_sharpness(records)
        if not tempered.converged:
            warn_of_bound(float(np.exp(-tempered.x[0])), len(records))
        sharpness = tempered.x[0] if self.start == "ts" else 0.0
        widths = self._widths(inputs.shape[1])
        self.solution_ = adam(
            _network_objective(standard, widths, partial(objective, records)),
            _initial(widths, float(np.exp(-sharpness)), self.seed),
            steps=self.steps,
            rate=self.rate,
            patience=self.patience,
        )
        self._store(self.solution_.x, inputs.shape[1])

    def _standardise(self, inputs: FloatArray, weight: FloatArray) -> FloatArray:
        # A margin is infinite where one class is possible: no temperature matters there.
        finite = np.where(np.isfinite(inputs), inputs, np.nan)
        usable = np.isfinite(inputs).any(0)
        low, high = (
            np.where(usable, end(np.where(np.isnan(finite), other, finite), axis=0), 0.0)
            for end, other in ((np.min, np.inf), (np.max, -np.inf))
        )
        held = np.clip(inputs, low, high)
        share = weight / weight.sum()
        mean = share @ held
        deviation = np.where(high > low, np.sqrt(share @ (held - mean) ** 2) + 1e-8, 1.0)
        self._learned(mean_=mean, deviation_=deviation, low_=low, high_=high)
        return np.asarray((held - mean) / deviation)

    def _inputs(self, records: Records) -> FloatArray:
        """Inputs of the network ``(n, width)`` from the table."""
        raise NotImplementedError

    def _sharpness(self, records: Records) -> FloatArray:
        inputs = torch.from_numpy(self._inputs(records)).to(self.mean_.device)
        return np.asarray(1 / self._network(inputs)[:, 0].cpu().numpy())

    def _network(self, inputs: Tensor) -> Tensor:
        """Temperatures ``(..., 1)`` of inputs ``(..., width)``."""
        values = [self.low_, self.high_, self.mean_, self.deviation_]
        low, high, mean, deviation = (v.to(inputs.dtype) for v in values)
        x = (inputs.clamp(low, high) - mean) / deviation
        last = len(self.hidden)
        for i in range(last + 1):
            weight, bias = getattr(self, f"weight{i}_"), getattr(self, f"bias{i}_")
            x = x @ weight.to(x.dtype) + bias.to(x.dtype)
            x = x.relu() if i < last else x
        return F.softplus(x) + FLOOR


def _as_widths(hidden: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(hidden, Sequence) or isinstance(hidden, str):
        raise TypeError(f"hidden must be a list of widths, [16] for one layer, got {hidden!r}")
    for width in hidden:
        check_whole("each width in hidden", width)
    return tuple(hidden)


def _initial(widths: Sequence[int], temperature: float, seed: int) -> FloatArray:
    """Parameters of a network that gives every sample one temperature.

    Hidden layers are drawn as torch draws them; the last one is zero but for its bias.
    """
    rng = np.random.default_rng(seed)
    layers = []
    for fan_in, fan_out in pairwise(widths[:-1]):
        bound = 1 / math.sqrt(fan_in)
        layers += [
            rng.uniform(-bound, bound, fan_in * fan_out),
            rng.uniform(-bound, bound, fan_out),
        ]
    above_floor = max(temperature - FLOOR, 1e-3)
    return np.concatenate([*layers, np.zeros(widths[-2]), [math.log(math.expm1(above_floor))]])


def _layers(parameters: FloatArray, widths: Sequence[int]) -> list[tuple[FloatArray, FloatArray]]:
    """Weight ``(in, out)`` and bias ``(out,)`` of each layer, as views of the parameters."""
    layers, at = [], 0
    for fan_in, fan_out in pairwise(widths):
        weight = parameters[at : at + fan_in * fan_out].reshape(fan_in, fan_out)
        at += fan_in * fan_out
        layers.append((weight, parameters[at : at + fan_out]))
        at += fan_out
    return layers


def _network_objective(
    inputs: FloatArray,
    widths: Sequence[int],
    measure: Callable[[FloatArray], objectives.Measured],
) -> Objective:
    """Value and gradient by the parameters, of a measure of log-sharpness ``(n,)``."""
    pieces = runs(len(inputs))

    def value_and_gradient(parameters: FloatArray) -> tuple[float, FloatArray]:
        layers = _layers(parameters, widths)
        raw = np.concatenate([_activations(layers, inputs[run])[-1][:, 0] for run in pieces])
        temperature = np.logaddexp(0, raw) + FLOOR
        value, by_log_sharpness = measure(-np.log(temperature))
        back = -by_log_sharpness * expit(raw) / temperature
        parts = [_back(layers, inputs[run], back[run, None]) for run in pieces]
        return value, np.sum(parts, axis=0)

    return value_and_gradient


Layers = list[tuple[FloatArray, FloatArray]]


def _activations(layers: Layers, inputs: FloatArray) -> list[FloatArray]:
    """Inputs of each layer ``(rows, in)``, then the output ``(rows, 1)``."""
    values = [inputs]
    for weight, bias in layers[:-1]:
        values.append(np.maximum(values[-1] @ weight + bias, 0))
    return [*values, values[-1] @ layers[-1][0] + layers[-1][1]]


def _back(layers: Layers, inputs: FloatArray, back: FloatArray) -> FloatArray:
    """Gradient by the parameters, from that by the output ``(rows, 1)``."""
    gradients = []
    values = _activations(layers, inputs)[:-1]
    for (weight, _), below in zip(layers[::-1], values[::-1], strict=True):
        gradients += [back.sum(0), (below.T @ back).ravel()]
        back = (back @ weight.T) * (below > 0)
    return np.concatenate(gradients[::-1])


SmartObjective = Literal["charbonnier", "soft_ece", "nll", "brier", "mse", "ls", "pointwise"]
SmartIndicator = Literal["margin", "entropy", "confidence", "max_logit", "max_minus_mean", "all"]


class SMART(NetworkTemperature):
    r"""The margin of a sample gives its temperature (Guo et al. 2026).

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
    sigma, delta : float
        Width of the soft bins and scale of the penalty.
    likelihood : float
        Weight of the negative log-likelihood that is added to the binned objectives. It keeps
        the network from buying bins with likelihood, and costs no calibration on held-out data.
    start : {"ts", "identity"}
        Temperature of all samples at the first step: the best single one, or 1.
    steps, patience : int
        Most steps, and steps without progress after which the search ends.
    rate : float
        Learning rate of Adam.
    seed : int
        Of the first weights.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(2000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = SMART().fit(3 * truth, labels)
    >>> float(fitted.temperature(3 * truth).mean().round())
    3.0
    """

    def __init__(
        self,
        *,
        objective: SmartObjective = "charbonnier",
        indicator: SmartIndicator = "margin",
        hidden: Sequence[int] = (16,),
        sigma: float = 0.05,
        delta: float = 1e-3,
        likelihood: float = 0.3,
        start: Literal["ts", "identity"] = "ts",
        steps: int = 250,
        patience: int = 250,
        rate: float = 5e-3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("objective", objective, get_args(SmartObjective))
        check_choice("indicator", indicator, get_args(SmartIndicator))
        check_choice("start", start, ("ts", "identity"))
        self.objective = objective
        self.indicator = indicator
        self.hidden = _as_widths(hidden)
        self.sigma = sigma
        self.delta = delta
        self.likelihood = likelihood
        self.start = start
        self.steps = steps
        self.patience = patience
        self.rate = rate
        self.seed = seed
        self._declare(1)

    @property
    def learned_shapes(self) -> str:  # type: ignore[override]
        """Shapes by the number of inputs: all logits, or one number."""
        by_class = "mean_ classes; low_ classes; high_ classes; deviation_ classes"
        return f"{by_class}; weight0_ classes =" if self.indicator == "all" else ""

    @property
    def fits_records(self) -> bool:
        """Whether the table suffices: all indicators but the logits themselves are in it."""
        return self.indicator != "all"

    def size(self, classes: int) -> int:
        """Weights and biases: 49 by default."""
        widths = self._widths(classes if self.indicator == "all" else 1)
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(widths))

    def _fit(self, given: Examples, context: Context) -> None:
        if self.fits_records:
            super()._fit(given, context)
        else:
            self._fit_inputs(tabulate(given), _all_logits(given), self._objective())

    def _fit_records(self, records: Records) -> None:
        self._fit_inputs(records, self._inputs(records), self._objective())

    def _inputs(self, records: Records) -> FloatArray:
        if not self.fits_records:
            raise ValueError('indicator "all" needs the logits: use fit(logits, labels)')
        return INDICATORS[self.indicator].of_records(records)

    def _objective(self) -> objectives.Objective:
        if self.objective == "pointwise":
            warn(
                'objective "pointwise" (equation 6 of the paper) pushes confidence to 1 wherever '
                "more than half of the answers are right: it does not calibrate, use "
                '"charbonnier"'
            )
        soft = {
            "charbonnier": partial(objectives.soft_ece, sigma=self.sigma, delta=self.delta),
            "soft_ece": partial(objectives.soft_ece, sigma=self.sigma),
            "pointwise": partial(objectives.pointwise, sigma=self.sigma, delta=self.delta),
        }
        if self.objective in soft:
            return partial(objectives.with_likelihood, soft[self.objective], self.likelihood)
        return objectives.PROPER[self.objective]

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        if self.indicator == "all":
            return self._network(logits)
        return self._network(INDICATORS[self.indicator].of_logits(logits, top))


class ParametrizedTemperatureScaling(NetworkTemperature):
    """The ten leading log-probabilities of a sample give its temperature (Tomani et al. 2022).

    The paper's network (two layers of 5, 91 parameters) and loss (squared error), on sorted
    log-probabilities instead of raw logits, so that a constant added to all logits changes
    nothing; standardised, and fitted in 100 steps on the whole data from the best single
    temperature instead of 100 000 small batches. More steps fit the noise of few samples.

    Parameters
    ----------
    objective : {"brier", "nll"}
    hidden : sequence of int
    steps, patience, rate, seed
        As in :class:`SMART`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(2000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = ParametrizedTemperatureScaling().fit(3 * truth, labels)
    >>> float(fitted.temperature(3 * truth).mean().round())
    3.0
    """

    start = "ts"

    def __init__(
        self,
        *,
        objective: Literal["brier", "nll"] = "brier",
        hidden: Sequence[int] = (5, 5),
        steps: int = 100,
        patience: int = 100,
        rate: float = 5e-3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("objective", objective, ("brier", "nll"))
        self.objective = objective
        self.hidden = _as_widths(hidden)
        self.steps = steps
        self.patience = patience
        self.rate = rate
        self.seed = seed
        self._declare(TOP)

    def size(self, classes: int) -> int:
        """Weights and biases: 91 by default."""
        widths = self._widths(TOP)
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(widths))

    def _fit_records(self, records: Records) -> None:
        objective = objectives.PROPER[self.objective]
        self._fit_inputs(records, self._inputs(records), objective)

    def _inputs(self, records: Records) -> FloatArray:
        value, _ = records.log_partition(1.0)
        return np.asarray(np.maximum(-records.gaps.astype(np.float64) - value[:, None], -100.0))

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        return self._network(_leading(logits, top))


def _all_logits(given: Examples) -> FloatArray:
    rows = [block.logits.double() for block in blocks(given, 0, given.labels.size)]
    logits = torch.cat(rows)
    found = (logits - logits.amax(-1, keepdim=True)).cpu().numpy()
    if np.isneginf(found).any():
        raise ValueError(
            'indicator "all" needs finite logits, got -inf for masked classes: use "margin"'
        )
    return np.asarray(found)


class TemperatureBounds(NamedTuple):
    """Least and largest temperature, each of the shape of the margins."""

    low: FloatArray
    high: FloatArray


def margin_bounds(margin: Values, confidence: Values, classes: int) -> TemperatureBounds:
    r"""Temperatures that can give a sample of known margin a wanted confidence.

    .. math::
        \frac{m}{\log\frac{K - 1}{S}} \le T \le \frac{m}{-\log S}, \qquad S = \frac1p - 1

    (SMART, appendix A.1): the other classes are at least :math:`m` below the top. There is no
    upper bound for :math:`p \le 1/2`. Both bounds grow with the margin, and so does their
    distance; only their ratio does not depend on it.

    Parameters
    ----------
    margin : (n,)
        Largest logit minus the second.
    confidence : (n,) or scalar
        Wanted probability of the top class, between ``1 / classes`` and 1.
    classes : int

    Examples
    --------
    >>> margin_bounds([1.0, 10.0], 0.8, classes=10)
    TemperatureBounds(low=array([0.279..., 2.790...]), high=array([0.721..., 7.213...]))
    """
    gaps = as_values(margin, "margin")
    wanted = np.broadcast_to(np.asarray(confidence, dtype=np.float64), gaps.shape)
    if (gaps < 0).any():
        raise ValueError(f"margin must not be negative, got {float(gaps.min()):g}")
    if not ((wanted > 1 / classes) & (wanted < 1)).all():
        raise ValueError(
            f"confidence must lie between 1/{classes} and 1, got {float(wanted.min()):g} to "
            f"{float(wanted.max()):g}: no temperature gives the top class less or more"
        )
    odds = 1 / wanted - 1
    bounded = odds < 1
    high = np.full(gaps.shape, np.inf)
    np.divide(gaps, -np.log(odds), out=high, where=bounded)
    return TemperatureBounds(gaps / np.log((classes - 1) / odds), high)
