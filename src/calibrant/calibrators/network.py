r"""Small networks that give each example a temperature, and the method PTS, which trains one.

The network of SMART and of PTS is

.. math:: T = \mathrm{softplus}(f(\hat x)) + 0.1

with ReLU layers :math:`f` and inputs :math:`\hat x` that are standardised with the mean and
deviation of the fit. They are held within the range that was seen there: beyond it the network
would only extrapolate.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional as F

from calibrant._core.checks import FloatArray
from calibrant._core.chunks import chunk_slices, namespace
from calibrant._core.options import Count, Seed
from calibrant._core.solve import Objective, Solution, adam
from calibrant.calibrators import objectives
from calibrant.calibrators.logpartition import TOP, Records, _softplus
from calibrant.calibrators.records import TemperatureCalibrator
from calibrant.calibrators.scaling import best_sharpness

_Layers: TypeAlias = list[tuple[FloatArray, FloatArray]]
_MAX_POINTS = 1000  # inputs of one column at which the CPU computes a network at most
_MIN_TEMPERATURE = 0.1  # least temperature of a network: T = softplus(...) + 0.1
_RATE = 5e-3  # of Adam


def _untrained(width: int, hidden: Sequence[int]) -> dict[str, Tensor]:
    """Buffers of a network with so many inputs, by name, to be stored before any fit."""
    values = {name: torch.zeros(width) for name in ("mean_", "low_", "high_")}
    values["deviation_"] = torch.ones(width)
    for i, (fan_in, fan_out) in enumerate(pairwise((width, *hidden, 1))):
        values |= {f"weight{i}_": torch.zeros(fan_in, fan_out), f"bias{i}_": torch.zeros(fan_out)}
    return values


def _parameter_count(width: int, hidden: Sequence[int]) -> int:
    """Number of weights and biases."""
    return sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise((width, *hidden, 1)))


def trained(
    records: Records,
    inputs: FloatArray,
    objective: objectives.Objective,
    *,
    hidden: Sequence[int],
    start: str = "ts",
    steps: int,
    patience: int,
    seed: int,
    device: torch.device,
) -> tuple[dict[str, FloatArray], Solution]:
    """Train a network of inputs ``(n, width)`` by Adam on all examples, computed on a device.

    It starts at one temperature for all, the best one or 1 for ``start="identity"``, or at that of
    random weights. It ends after ``steps``, or after as many without progress as its ``patience``.
    Returns the values of the buffers of :func:`_untrained`, and the result of the search.
    """
    # A margin is infinite where one class is possible: no temperature matters there.
    finite = np.where(np.isfinite(inputs), inputs, np.nan)
    usable = np.isfinite(inputs).any(0)
    low, high = (
        np.where(usable, end(np.where(np.isnan(finite), other, finite), axis=0), 0.0)
        for end, other in ((np.min, np.inf), (np.max, -np.inf))
    )
    held = np.clip(inputs, low, high)
    share = records.weight / records.weight.sum()
    mean = share @ held
    deviation = np.where(high > low, np.sqrt(share @ (held - mean) ** 2) + 1e-8, 1.0)
    values = {"mean_": mean, "deviation_": deviation, "low_": low, "high_": high}

    there = records.on(device)
    scaled: Any = np.asarray((held - mean) / deviation)
    if isinstance(there.own_gap, Tensor):
        scaled = torch.from_numpy(scaled).to(device)
    best = best_sharpness(there, warns=True).x[0]
    first = {"ts": float(np.exp(-best)), "identity": 1.0, "random": None}[start]
    widths = (inputs.shape[1], *hidden, 1)
    solution = adam(
        _network_objective(scaled, widths, partial(objective, there)),
        _initial(widths, first, seed),
        steps=steps,
        rate=_RATE,
        patience=patience,
    )
    for i, (weight, bias) in enumerate(_layers(solution.x, widths)):
        values |= {f"weight{i}_": weight, f"bias{i}_": bias}
    return values, solution


def _temperatures(calibrator: Any, inputs: Tensor) -> Tensor:
    """Temperatures ``(..., 1)`` of inputs ``(..., width)`` by the network of a calibrator."""
    names, last = ["low_", "high_", "mean_", "deviation_"], len(calibrator.hidden)
    names += [name for i in range(last + 1) for name in (f"weight{i}_", f"bias{i}_")]
    values: list[Tensor] = [getattr(calibrator, name) for name in names]
    if inputs.dtype != torch.float32:  # that of what is learned: conversions take their time
        values = [v.to(inputs.dtype) for v in values]
    low, high, mean, deviation, *layers = values
    x = (inputs.clamp(low, high) - mean) / deviation
    for i in range(last + 1):
        x = x @ layers[2 * i] + layers[2 * i + 1]
        x = x.relu() if i < last else x
    return F.softplus(x) + _MIN_TEMPERATURE


def _initial(widths: Sequence[int], temperature: float | None, seed: int) -> FloatArray:
    """Parameters of a network that gives every example one temperature, or random ones for None."""
    rng = np.random.default_rng(seed)
    layers = []
    for fan_in, fan_out in pairwise(widths):  # drawn as torch draws them
        bound = 1 / math.sqrt(fan_in)
        layers += [rng.uniform(-bound, bound, size) for size in (fan_in * fan_out, fan_out)]
    if temperature is not None:  # the last layer is zero but for its bias
        above_floor = max(temperature - _MIN_TEMPERATURE, 1e-3)
        layers[-2:] = [np.zeros(widths[-2]), np.array([math.log(math.expm1(above_floor))])]
    return np.concatenate(layers)


def _layers(parameters: FloatArray, widths: Sequence[int]) -> _Layers:
    """Weight ``(in, out)`` and bias ``(out,)`` of each layer, as views of the parameters."""
    layers, at = [], 0
    for fan_in, fan_out in pairwise(widths):
        weight = parameters[at : at + fan_in * fan_out].reshape(fan_in, fan_out)
        at += fan_in * fan_out
        layers.append((weight, parameters[at : at + fan_out]))
        at += fan_out
    return layers


def _network_objective(
    inputs: FloatArray, widths: Sequence[int], measure: Callable[[FloatArray], objectives.Measured]
) -> Objective:
    """Value and gradient by the parameters, of a measure of log-sharpness ``(n,)``."""
    # NumPy, or torch on a device; autograd takes a fifth longer and rounds differently
    points: Any = inputs
    xp, join = namespace(inputs), None
    if xp is np and inputs.shape[1] == 1 and len(inputs) > _MAX_POINTS:
        # Of one input the log-sharpness is smooth but for a few kinks, so straight lines join its
        # values at some: half of them are quantiles, half lie in equal steps.
        values = inputs[:, 0]
        steps = np.linspace(0, 1, _MAX_POINTS // 2)
        low, high = values.min(), values.max()
        x = np.unique([np.quantile(values, steps), low + (high - low) * steps])
        left = np.clip(np.searchsorted(x, values, "right") - 1, 0, max(len(x) - 2, 0))
        right = np.minimum(left + 1, len(x) - 1)
        width = x[right] - x[left]
        share = np.divide(values - x[left], width, out=np.zeros(len(values)), where=width > 0)
        weights, places = np.stack([1 - share, share], 1), np.stack([left, right], 1)
        ends = np.arange(0, weights.size + 1, 2)
        points = x[:, None]
        join = csr_array((weights.ravel(), places.ravel(), ends), (len(values), len(x)))
    split = None if join is None else join.T.tocsr()
    runs = chunk_slices(points)
    columns = [points[run].T.copy() if xp is np else points[run].T.contiguous() for run in runs]

    def value_and_gradient(parameters: FloatArray) -> tuple[float, FloatArray]:
        there: Any = parameters
        if xp is torch:
            there = torch.from_numpy(parameters).to(points.device)
        layers = _layers(there, widths)
        values = [_activations(layers, each) for each in columns]
        outputs = [output[0] for *_, output in values]
        above_floor, rise = _softplus(outputs[0] if len(runs) == 1 else xp.concatenate(outputs))
        temperature = above_floor + _MIN_TEMPERATURE
        log_sharpness = -xp.log(temperature)
        measured: Any = measure(log_sharpness if join is None else join @ log_sharpness)
        value, slope = measured
        back = -(slope if split is None else split @ slope) * rise / temperature
        parts = [_back(layers, v, back[None, run]) for v, run in zip(values, runs, strict=True)]
        gradient: Any = reduce(operator.add, parts)
        if xp is np:
            return float(value), gradient
        found = torch.cat([value[None], gradient]).cpu().numpy()  # the only wait
        return float(found[0]), found[1:]

    return value_and_gradient


def _activations(layers: _Layers, inputs: FloatArray) -> list[FloatArray]:
    """Inputs of each layer ``(in, points)``, then the output ``(1, points)``."""
    values = [inputs]
    for weight, bias in layers:
        values.append(_product(weight.T, values[-1]))
        values[-1] += bias[:, None]
        if len(values) <= len(layers):
            _rectify(values[-1])
    return values


def _rectify(values: FloatArray) -> None:
    """Overwrite negative values by 0."""
    values.relu_() if isinstance(values, Tensor) else np.maximum(values, 0, out=values)


def _back(layers: _Layers, values: list[FloatArray], back: FloatArray) -> FloatArray:
    """Gradient by the parameters, from the activations and that by the output ``(1, points)``."""
    gradients = [back.sum(1), (values[-2] @ back.T).ravel()]
    for (weight, _), above, below in zip(
        layers[:0:-1], values[-2::-1], values[-3::-1], strict=False
    ):
        back = _product(weight, back)
        back *= above > 0
        gradients += [back.sum(1), (below @ back.T).ravel()]
    return namespace(back).concatenate(gradients[::-1])  # type: ignore[no-any-return]


def _product(left: FloatArray, right: FloatArray) -> FloatArray:
    """The matrix product, which takes BLAS three times as long as broadcasts for one column."""
    return left * right if left.shape[1] == 1 else left @ right


class ParametrizedTemperatureScaling(TemperatureCalibrator):
    """The ten leading log-probabilities of an example give its temperature (Tomani et al. 2022).

    The paper's network (two layers of 5, 91 parameters) and loss (squared error), on sorted
    log-probabilities instead of raw logits, so that a constant added to all logits changes
    nothing; standardised, and fitted in 100 steps on the whole data from the best single
    temperature instead of 100 000 small batches. More steps fit the noise of few examples.

    ``objective`` is "brier" or "nll"; the other options are those of SMART.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(2000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = ParametrizedTemperatureScaling().fit(3 * truth, labels)
    >>> float(fitted.temperature(3 * truth).mean().round())
    3.0
    """

    name = "pts"
    aliases = ("parametrized_temperature_scaling",)
    summary = "the ten top log-probabilities give each its temperature"

    def __init__(
        self,
        *,
        objective: Literal["brier", "nll"] = "brier",
        hidden: Sequence[Count] = (5, 5),
        steps: Count = 100,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.objective = objective
        self.hidden = hidden
        self.steps = steps
        self.seed = seed
        self._store(**_untrained(TOP, hidden))

    def size(self, classes: int) -> int:
        """Weights and biases: 91 by default."""
        return _parameter_count(TOP, self.hidden)

    def _fit_records(self, records: Records) -> None:
        values, self.solution_ = trained(
            records,
            self._leading_of(records),
            objectives.PROPER[self.objective],
            hidden=self.hidden,
            steps=self.steps,
            patience=100,
            seed=self.seed,
            device=self.device,
        )
        self._store(**values)

    def _sharpness(self, records: Records) -> FloatArray:
        inputs = self._tensor(self._leading_of(records))
        return np.asarray(1 / _temperatures(self, inputs)[:, 0].cpu().numpy())

    def _leading_of(self, records: Records) -> FloatArray:
        value, _ = records.log_partition(1.0)
        return np.asarray(np.maximum(-records.gaps.astype(np.float64) - value[:, None], -100.0))

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        # log-probabilities of the leading classes, in order, down to -100
        count = min(TOP, logits.shape[-1])
        leading = logits.log_softmax(-1).topk(count, dim=-1).values
        padded = F.pad(leading, (0, TOP - count), value=-100.0)
        return _temperatures(self, padded.clamp(min=-100.0))
