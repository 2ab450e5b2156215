"""Temperatures for groups of examples that are learned from the features."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, warn
from calibrant._core.chunks import Examples
from calibrant._core.options import Count, NonNegative, Seed
from calibrant._core.solve import Objective, minimise
from calibrant.calibrators.base import BOUNDS, Calibrator, Context
from calibrant.calibrators.fit_inputs import _warn_of_constant, folds
from calibrant.calibrators.logpartition import Records, tabulate
from calibrant.calibrators.scaling import best_sharpness

_PRIOR_EXAMPLES = 50.0  # examples that all others together count for in a group or bin


class GroupCalibration(Calibrator):
    r"""Temperatures for groups that are learned from the features, averaged (Yang et al. 2023).

    A partition is a linear layer on standardised features: :math:`f` is in the group with the
    largest entry of :math:`W f`. It is learned as a mixture, by L-BFGS from a random start,

    .. math:: -\frac1n \sum_i \log \sum_g \mathrm{softmax}(W f_i)_g
              \; \mathrm{softmax}(z_i / \tau_g)_{y_i} + \lambda \, \overline{W^2} ,

    then each group gets its best temperature, and the probabilities under all partitions are
    averaged.

    A partition over-fits its own examples. The authors fit temperatures on a second hold-out; here
    half of the partitions are learned on one half of the examples and get their temperatures from
    the other, and vice versa. Each temperature also counts all of its half as 50 examples.

    Parameters
    ----------
    group_count, partitions : int
        Groups of a partition, and number of partitions. (``groups`` of ``fit`` are examples that
        stay in one half.)
    regularisation : float
        :math:`\lambda`.
    seed : int
        Of the halves and of the random starts.

    Attributes
    ----------
    centre_, weight_ : (width,) and (partitions, group_count, width) Tensor
        The weights are those of features minus ``centre_``.
    temperature_ : (partitions, group_count) Tensor

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth, features = 2 * rng.normal(size=(4000, 5)), rng.normal(size=(4000, 3))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> logits = truth * np.where(features[:, :1] > 0, 3, 1)  # too sure on one side
    >>> fitted = GroupCalibration(partitions=2).fit(logits, labels, features=features)
    >>> fitted.temperature_.sort(-1).values.round()
    tensor([[1., 3.],
            [1., 3.]])
    """

    name = "gc"
    aliases = ("group_calibration",)
    summary = "learned groups of the features, a temperature for each"
    keeps_argmax = True
    monotone = True
    needs_features = True
    STEPS: ClassVar[int] = 30  # of L-BFGS, for all starts of a half at once: more learn its noise
    learned_shapes = "centre_ width; weight_ = = width"
    centre_: Tensor
    weight_: Tensor
    temperature_: Tensor

    def __init__(
        self,
        *,
        group_count: Count = 2,
        partitions: Count = 20,
        regularisation: NonNegative = 0.1,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.group_count = group_count
        self.partitions = partitions
        self.regularisation = regularisation
        self.seed = seed
        self._store(
            centre_=torch.zeros(0),
            weight_=torch.zeros(partitions, group_count, 0),
            temperature_=torch.ones(partitions, group_count),
        )

    def size(self, classes: int) -> int:
        """The temperatures; the layers that make groups see other examples, and do not count."""
        return self.partitions * self.group_count

    def _fit(self, examples: Examples, context: Context) -> None:
        records = tabulate(examples)
        features = self._labelled_features(examples, context).cpu()
        _warn_of_constant(type(self).__name__, features)
        start = float(best_sharpness(records, warns=True).x[0])
        centre, scale = features.mean(0), features.std(0, correction=0)
        scale = torch.where(scale > 0, 1 / scale, 0)
        features = (features - centre) * scale
        groups = None if context.groups is None else context.groups[examples.labels != IGNORED]
        rng = np.random.default_rng(self.seed)
        weights, temperatures = [], []
        for (learn, fit), count in self._halves(records.labels, groups):
            weight = self._partitions(records.take(learn), features[learn], count, start, rng)
            group = linear(features[fit], weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
            weights.append(weight)
            member = group.argmax(-1).numpy()
            temperatures.append(_group_temperatures(records.take(fit), member, self.group_count))
        weight_, temperature_ = torch.cat(weights) * scale, np.concatenate(temperatures)
        self._store(centre_=centre, weight_=weight_, temperature_=temperature_)

    def _halves(self, labels: IntArray, groups: Any) -> list[tuple[list[IntArray], int]]:
        """Examples for partitions and for their temperatures, and the number of partitions."""
        halves = folds(labels, 2, groups=groups, seed=self.seed)
        if len(halves) < 2:
            if len(labels) > 1:
                warn(
                    "all examples are of one group, which cannot be cut into halves: partitions "
                    "and temperatures are fitted on the same examples"
                )
            halves = [halves[0], halves[0]]
        counts = (self.partitions - self.partitions // 2, self.partitions // 2)
        turns = zip((halves, halves[::-1]), counts, strict=True)
        return [(turn, count) for turn, count in turns if count]

    def _partitions(
        self,
        records: Records,
        features: Tensor,
        count: int,
        log_sharpness: float,
        rng: np.random.Generator,
    ) -> Tensor:
        """Learn partitions ``(partitions, groups, width)`` of standardised features, at once.

        Temperatures start around the best single one, at most a factor of 1.5 away.
        """
        shape, width, bound = (count, self.group_count), features.shape[1], math.log(BOUNDS[1])
        start = rng.uniform(-1, 1, math.prod(shape) * width) / math.sqrt(width)
        around = log_sharpness + math.log(1.5) * np.linspace(-1, 1, self.group_count)
        v = bound * np.arctanh(np.clip(around, -2.9, 2.9) / bound)
        objective = _mixture_objective(records, features, shape, self.regularisation)
        start = np.concatenate([start, np.tile(v, count)])
        self.solution_ = minimise(objective, start, steps=self.STEPS)
        weight = self.solution_.x[: -math.prod(shape)].reshape(*shape, width)
        return torch.from_numpy(weight).to(features.dtype)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        assert features is not None
        centred = features.to(self.centre_.dtype) - self.centre_
        total: Tensor | None = None
        for weight, temperatures in zip(self.weight_, self.temperature_, strict=True):
            group = linear(centred, weight).argmax(-1, keepdim=True)
            one = (logits / temperatures.to(logits.dtype)[group]).log_softmax(-1)
            # in logarithms, so that no class vanishes whose probability float32 cannot hold
            total = one if total is None else torch.logaddexp(total, one)
        assert total is not None
        return total - total.amax(-1, keepdim=True)


def _mixture_objective(
    records: Records, features: Tensor, shape: tuple[int, int], regularisation: float
) -> Objective:
    r"""Loss of soft groups, summed over several partitions at once, with its gradient.

    With the table, :math:`p_i = \sum_g w_{ig} \exp(-b_g d_{y_i} - A_i(b_g))`. Parameters are the
    layers ``(partitions, groups, width)``, then a number :math:`v` for each group with
    :math:`\log b = h \tanh(v / h)`, which stays within the bounds of temperatures.
    """
    count, groups = shape
    width, bound = features.shape[1], math.log(BOUNDS[1])
    share = records.share
    across = features.T.contiguous()
    dtype = across.numpy().dtype

    def value_and_gradient(x: FloatArray) -> tuple[float, FloatArray]:
        weight, v = x[: -count * groups].reshape(count * groups, width), x[-count * groups :]
        turn = np.tanh(v / bound)
        score = (torch.from_numpy(weight.astype(dtype)) @ across).double()
        part = score.unflatten(0, shape).softmax(1).numpy()  # (partitions, groups, n)
        true, slope = np.empty((2, count * groups, len(records)))
        for i, b in enumerate(np.exp(bound * turn)):
            value, by_log = records.log_partition(float(b))
            true[i], slope[i] = -b * records.own_gap - value, b * records.own_gap + by_log
        joint = part * np.exp(true).reshape(part.shape)
        total = np.maximum(joint.sum(1, keepdims=True), 1e-300)
        joint /= total
        penalty = regularisation / (groups * width)
        loss = -float((np.log(total[:, 0]) @ share).sum()) + penalty * float((weight**2).sum())
        pull = (share * (part - joint)).reshape(count * groups, -1)
        by_weight = (torch.from_numpy(pull.astype(dtype)) @ features).numpy()
        by_v = (joint.reshape(count * groups, -1) * slope) @ share * (1 - turn**2)
        return loss, np.concatenate([(by_weight + 2 * penalty * weight).reshape(-1), by_v])

    return value_and_gradient


def _with_prior(weight: FloatArray, member: BoolArray) -> FloatArray:
    """Weights for the fit of a part: its own examples, and a little of all of them."""
    return np.asarray(weight * member + _PRIOR_EXAMPLES * weight.mean() * weight / weight.sum())


def _group_temperatures(records: Records, group: IntArray, groups: int) -> FloatArray:
    """The best temperature of each group of each partition; ``group`` is ``(n, partitions)``."""
    result = np.empty((group.shape[1], groups))
    for i, g in np.ndindex(*result.shape):
        weight = _with_prior(records.weight, group[:, i] == g)
        result[i, g] = np.exp(-best_sharpness(replace(records, weight=weight)).x[0])
    return result
