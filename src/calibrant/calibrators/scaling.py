"""Temperatures that all examples share: none, one, and an ensemble of three."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from calibrant._core import solve
from calibrant._core.checks import IGNORED, FloatArray, as_float64, check_some, warn
from calibrant._core.chunks import Examples, labelled_chunks, on_threads, thread_ranges
from calibrant._core.solve import Solution
from calibrant.calibrators.base import BOUNDS, Context
from calibrant.calibrators.logpartition import Records, _gap_chunks, tabulate
from calibrant.calibrators.objectives import brier, ece, nll, soft_ece
from calibrant.calibrators.records import (
    RecordPredictions,
    RecordsCalibrator,
    TemperatureCalibrator,
)

_NEWTON_FROM = 1 << 21  # numbers in the logits from which on a few passes over them beat the table
_START_ROWS = 1000  # rows, about, at whose optimum they start

TemperatureObjective = Literal["nll", "brier", "ece", "soft_ece"]


class Identity(TemperatureCalibrator):
    """Leave the logits as they are: the baseline of every other method.

    >>> Identity().fit([[2.0, 1.0]], [0]).temperature([[2.0, 1.0]])
    array([1.])
    """

    name = "none"
    aliases = ("identity",)
    summary = "nothing: what the others are compared with"
    parameter_count = 0

    def set_floor(self, floor: float) -> None:
        """Do nothing: probabilities of 0 stay what they are."""

    def _fit_records(self, records: Records) -> None:
        self.solution_ = None

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        return top.new_ones(())

    def _sharpness(self, records: Records) -> float:
        return 1.0


class TemperatureScaling(TemperatureCalibrator):
    r"""One temperature for all: :math:`\mathrm{softmax}(z / T)` (Guo et al. 2017).

    The negative log-likelihood is convex in :math:`1/T`; the other objectives are searched on a
    grid, then within its best cell. Data without an optimum (every prediction right, or worse than
    chance) end at 0.05 or 20, with a warning.

    Parameters
    ----------
    objective : {"nll", "brier", "ece", "soft_ece"}
        ``ece`` has 15 equal-width bins, ``soft_ece`` is its smooth version that SMART uses.

    Attributes
    ----------
    temperature_ : scalar Tensor

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(5000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = TemperatureScaling().fit(3 * truth, labels)
    >>> round(float(fitted.temperature_), 1)
    3.0
    """

    name = "ts"
    aliases = ("temperature", "temperature_scaling")
    summary = "one temperature for all"
    parameter_count = 1
    temperature_: Tensor

    def __init__(self, *, objective: TemperatureObjective = "nll") -> None:
        super().__init__()
        self.objective = objective
        self._store(temperature_=1.0)

    def _fit(self, examples: Examples, context: Context) -> None:
        self._keep(_fitted_sharpness(examples, context, self.objective))

    def _fit_records(self, records: Records) -> None:
        self._keep(best_sharpness(records, self.objective, warns=True))

    def _keep(self, solution: Solution) -> None:
        self.solution_ = solution
        self._store(temperature_=float(np.exp(-solution.x[0])))

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        return self.temperature_.to(top.dtype)

    def _sharpness(self, records: Records) -> float:
        return 1 / float(self.temperature_)


class EnsembleTemperatureScaling(RecordsCalibrator):
    r"""A mixture of the tempered, the raw and the uniform distribution (Zhang et al. 2020).

    .. math:: p = w_1\,\mathrm{softmax}(z / T) + w_2\,\mathrm{softmax}(z) + w_3 / K

    First the temperature minimises the objective, then the weights do, which are not negative and
    sum to one. Masked classes get no share of the uniform part.

    Parameters
    ----------
    objective : {"nll", "brier"}
        The authors' code has the Brier score.

    Attributes
    ----------
    temperature_ : scalar Tensor
    weights_ : (3,) Tensor

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(5000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> labels[::5] = rng.integers(0, 10, 1000)  # a fifth of the labels is noise
    >>> EnsembleTemperatureScaling().fit(truth, labels).weights_[2]
    tensor(0.2...)
    """

    name = "ets"
    aliases = ("ensemble_temperature_scaling",)
    summary = "mixes the tempered, the raw and the uniform distribution"
    parameter_count = 3  # one weight follows from the others
    temperature_: Tensor
    weights_: Tensor

    def __init__(self, *, objective: Literal["nll", "brier"] = "nll") -> None:
        super().__init__()
        self.objective = objective
        self._store(temperature_=1.0, weights_=torch.tensor([1.0, 0.0, 0.0]))

    def _fit_records(self, records: Records) -> None:
        tempered = best_sharpness(records, self.objective, warns=True)
        self._store(temperature_=float(np.exp(-tempered.x[0])))
        true, share = self._true(records), records.weight / records.weight.sum()
        if self.objective == "nll":

            def measure(weights: FloatArray) -> tuple[float, FloatArray]:
                mixed = np.maximum(true @ weights, 1e-300)
                return float(-share @ np.log(mixed)), -(share / mixed) @ true
        else:
            mean, products = share @ true, self._products(records, share)

            def measure(weights: FloatArray) -> tuple[float, FloatArray]:
                pulled = products @ weights
                return float(1 - 2 * mean @ weights + weights @ pulled), 2 * (pulled - mean)

        start, bounds = np.array([1.0, 0.0, 0.0]), [(0.0, 1.0)] * 3
        self.solution_ = solve.minimise_within(measure, start, bounds, total=1.0)
        self._store(weights_=self.solution_.x)

    def _true(self, records: Records) -> FloatArray:
        """Probability of the label under each of the three distributions, ``(n, 3)``."""
        b = 1 / float(self.temperature_)
        gap = records.own_gap
        tempered, raw = (np.exp(-s * gap - records.log_partition(s).value) for s in (b, 1.0))
        return np.stack([tempered, raw, 1 / records.possible], axis=1)

    def _products(self, records: Records, share: FloatArray) -> FloatArray:
        r"""Mean of :math:`\sum_k p_k q_k` of each two of the three distributions, ``(3, 3)``."""
        b = 1 / float(self.temperature_)
        logs = {s: records.log_partition(s).value for s in {b, 1.0, 2 * b, 2.0, b + 1}}

        def product(s: float, t: float) -> float:
            return float(share @ np.exp(logs[s + t] - logs[s] - logs[t]))

        flat, cross = float(share @ (1 / records.possible)), product(b, 1.0)
        first, second = [product(b, b), cross, flat], [cross, product(1.0, 1.0), flat]
        return np.array([first, second, [flat] * 3])

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        weights = as_float64(self.weights_)
        tops = [np.exp(-records.log_partition(s).value) for s in (1 / float(self.temperature_), 1)]
        confidence = np.stack([*tops, 1 / records.possible], axis=1) @ weights
        true = np.maximum(self._true(records) @ weights, 1e-300)
        return RecordPredictions(confidence, -np.log(true))

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        # in logarithms, so that no class vanishes whose probability float32 cannot hold
        weights = self.weights_.to(logits.dtype).log()
        tempered = (logits / self.temperature_.to(logits.dtype)).log_softmax(-1)
        mixed = torch.logaddexp(weights[0] + tempered, weights[1] + logits.log_softmax(-1))
        possible = ~torch.isneginf(logits)
        flat = weights[2] - possible.sum(-1, keepdim=True).log()
        mixed = torch.where(possible, torch.logaddexp(mixed, flat), -torch.inf)
        return mixed - mixed.amax(-1, keepdim=True)


def best_sharpness(records: Records, objective: str = "nll", *, warns: bool = False) -> Solution:
    """The log-sharpness ``log b = -log T`` that minimises an objective over the records.

    It is 0, and not converged, where no temperature makes a difference.
    """
    measure = {"nll": nll, "brier": brier, "ece": ece, "soft_ece": soft_ece}[objective]

    @cache
    def measured(u: float) -> tuple[float, float]:
        value, gradient = measure(records, u)
        return float(value), float(gradient.sum())

    low, high = -math.log(BOUNDS[1]), -math.log(BOUNDS[0])
    values = [measured(u)[0] for u in (low, 0.0, high)]
    if max(values) - min(values) < 1e-6:  # the rounding of the table
        result = Solution(np.zeros(1), values[1], 3, False)
    elif objective == "nll":
        # closer than this the slopes of the table are rounding errors
        result = solve.minimise_convex(lambda u: measured(u)[1], low, high, tolerance=1e-7)
    else:
        result = solve.minimise_scalar(lambda u: measured(u)[0], low, high)
    if warns and not result.converged:
        warn(
            f"no best temperature in [{BOUNDS[0]:g}, {BOUNDS[1]:g}] for these {len(records):,} "
            f"examples; stopped at {np.exp(-result.x[0]):g}. {_explained(result.x[0], records)}"
        )
    return result


def _explained(sharpness: float, records: Records) -> str:
    """Return the reason for a fit without optimum."""
    if sharpness == 0:
        return "A temperature makes no difference to them"
    accuracy, guessing = float(records.share @ records.correct), 1 / records.classes
    right = f"{100 * accuracy:.4g} % of the predictions are right"
    if sharpness > 0 and accuracy > 0.99:
        return f"{right}: if the model was trained on these examples, use held-out ones"
    if sharpness > 0:
        return f"{right}, but the logits hardly differ: multiply them all"
    if accuracy > guessing + 3 * math.sqrt(guessing * (1 - guessing) / len(records)):
        furthest = f"{float(records.own_gap.max()):.3g} below the largest"
        return f"{right}, but the logits of some labels are up to {furthest}: divide them all"
    return (
        f"{right}, no more than by guessing: check that labels are in the order of the logits, "
        "and that both number classes alike"
    )


def _fitted_sharpness(examples: Examples, context: Context, objective: str = "nll") -> Solution:
    """The best log-sharpness: from the logits if they are large and have no table, else from it."""
    large = examples.classes * examples.labels.size >= _NEWTON_FROM
    direct = large and objective == "nll" and context.records is None
    solution = _newton_sharpness(examples) if direct else None
    return solution or best_sharpness(context.table(examples), objective, warns=True)


def _newton_sharpness(examples: Examples) -> Solution | None:
    """The log-sharpness with the least NLL, by steps over the logits; None if they fail.

    Starting at the optimum of some rows, two passes suffice: less work than the table. The steps
    are Halley's, Newton's with a third derivative, each of which leaves the cube of an error.
    """
    rows = np.flatnonzero(examples.labels != IGNORED)
    check_some(len(rows))
    chosen = np.full(examples.labels.size, IGNORED)
    some = rows[:: max(1, len(rows) // _START_ROWS)]
    chosen[some] = examples.labels[some]
    drawn = labelled_chunks(examples._replace(labels=chosen), 0, len(chosen))
    weight = None if examples.weight is None else examples.weight[some]
    try:
        logits = torch.cat([chunk.logits for chunk in drawn])
        sample = Examples(logits, examples.labels[some], weight, "top_label")
        start = best_sharpness(tabulate(sample))
    except ValueError:  # a row without a softmax: the table of all names it
        return None
    if not start.converged:
        return None
    b = math.exp(start.x[0])
    for step in range(1, 6):
        solve.check_time()
        # on threads of their own, which flush denormal numbers
        parts = on_threads(partial(_derivatives, examples, b), thread_ranges(examples), always=True)
        slope, bend, third = np.sum(parts, axis=0)
        move = 2 * slope * bend / max(2 * bend**2 - slope * third, 1e-12) / b
        if abs(move) > 0.5 or not BOUNDS[0] < 1 / (b - b * move) < BOUNDS[1]:
            return None  # far from where few derivatives say enough, or from any optimum
        b *= 1 - move
        if abs(move) < 1e-3:
            return Solution(np.array([math.log(b)]), math.nan, step, True)
    return None


def _derivatives(examples: Examples, b: float, row_range: tuple[int, int]) -> FloatArray:
    """First three derivatives by the sharpness of the summed NLL of a run of rows."""
    torch.set_flush_denormal(True)
    total = np.zeros(3)
    for chunk, _, _, own_gap, gaps, powers in _gap_chunks(examples, row_range):
        torch.mul(gaps, -b, out=powers).exp_()
        mass = powers.sum(-1).double()
        mean, square, cube = (powers.mul_(gaps).sum(-1).double() / mass for _ in range(3))
        third = 3 * mean * square - cube - 2 * mean**3
        terms = torch.stack([own_gap - mean, square - mean**2, third])
        weight = torch.ones_like(mean) if chunk.weight is None else chunk.weight
        total += (terms @ weight).cpu().numpy()
    return total
