"""Temperatures for groups of examples that are learned from the features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from calibrant._core.checks import IGNORED, FloatArray, IntArray, check_whole, warn
from calibrant._core.chunks import Examples
from calibrant._core.logpartition import Records, tabulate
from calibrant._core.solve import Objective, Solution, minimise
from calibrant.calibrators.base import BOUNDS, Calibrator, Context
from calibrant.calibrators.features.shared import warn_of_constant, with_prior
from calibrant.calibrators.folds import folds
from calibrant.calibrators.scaling import best_sharpness, warn_of_bound


class GroupCalibration(Calibrator):
    r"""Temperatures for groups that are learned from the features, averaged (Yang et al. 2023).

    A partition is a linear layer without bias on standardised features: :math:`f` is in the group
    with the largest entry of :math:`W f`. It is learned as a mixture, by L-BFGS from a random
    start,

    .. math:: -\frac1n \sum_i \log \sum_g \mathrm{softmax}(W f_i)_g
              \; \mathrm{softmax}(z_i / \tau_g)_{y_i} + \lambda \, \overline{W^2} ,

    then each group gets its best temperature, and the probabilities under all partitions are
    averaged.

    Temperatures must be fitted on other examples than the partition, which over-fits its own. The
    authors use a second hold-out; here half of the partitions are learned on one half of the
    examples and get their temperatures from the other, and vice versa. A temperature also counts
    all examples of its half with the weight of 50, so that those of small groups end near the
    best single one.

    Parameters
    ----------
    group_count : int
        Groups of a partition. (``groups`` of ``fit`` are examples that stay in one half.)
    partitions : int
    regularisation : float
        :math:`\lambda`.
    seed : int
        Of the halves and of the random starts.

    Attributes
    ----------
    centre_ : (width,) Tensor
    weight_ : (partitions, group_count, width) Tensor
        Of features minus ``centre_``.
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
    STEPS: ClassVar[int] = 30
    """Of L-BFGS, for all starts of a half at once: more learn its noise."""

    centre_: Tensor
    weight_: Tensor
    temperature_: Tensor
    learned_shapes = "centre_ width; weight_ = = width"

    def __init__(
        self,
        *,
        group_count: int = 2,
        partitions: int = 20,
        regularisation: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_whole("group_count", group_count)
        check_whole("partitions", partitions)
        if not 0 <= regularisation < math.inf:
            raise ValueError(f"regularisation must be at least 0, got {regularisation}")
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
        warn_of_constant(type(self).__name__, features)
        single = best_sharpness(records)
        if not single.converged:
            warn_of_bound(float(np.exp(-single.x[0])), len(records))
        centre, scale = features.mean(0), features.std(0, correction=0)
        scale = torch.where(scale > 0, 1 / scale, 0)
        features = (features - centre) * scale
        groups = None if context.groups is None else context.groups[examples.labels != IGNORED]
        rng = np.random.default_rng(self.seed)
        weights, temperatures = [], []
        for (learn, fit), count in self._halves(records.labels, groups):
            weight, self.solution_ = learned_partitions(
                records.take(learn),
                features[learn],
                (count, self.group_count),
                self.regularisation,
                float(single.x[0]),
                rng,
                self.STEPS,
            )
            weights.append(weight)
            group = linear(features[fit], weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
            temperatures.append(
                group_temperatures(records.take(fit), group.argmax(-1).numpy(), self.group_count)
            )
        self._store(
            centre_=centre,
            weight_=torch.cat(weights) * scale,
            temperature_=np.concatenate(temperatures),
        )

    def _halves(
        self, labels: IntArray, groups: Any
    ) -> Iterator[tuple[tuple[IntArray, IntArray], int]]:
        """Examples to learn partitions on, examples for their temperatures, and how many."""
        halves = folds(labels, 2, groups=groups, seed=self.seed)
        if len(halves) < 2:
            if len(labels) > 1:
                warn(
                    "all examples are of one group, which cannot be cut into halves: partitions "
                    "and temperatures are fitted on the same examples"
                )
            halves = [halves[0], halves[0]]
        counts = (self.partitions - self.partitions // 2, self.partitions // 2)
        for turn, count in zip((halves, halves[::-1]), counts, strict=True):
            if count:
                yield (turn[0], turn[1]), count

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


def mixture_objective(
    records: Records, features: Tensor, shape: tuple[int, int], regularisation: float
) -> Objective:
    r"""Loss of soft groups, summed over several partitions at once, with its gradient.

    With the table, :math:`p_i = \sum_g w_{ig} \exp(-b_g d_{y_i} - A_i(b_g))`. Parameters are the
    layers ``(partitions, groups, width)``, then a number :math:`v` for each group with
    :math:`\log b = h \tanh(v / h)`, which stays within the bounds of temperatures.
    """
    count, groups = shape
    width, bound = features.shape[1], math.log(BOUNDS[1])
    share = records.weight / records.weight.sum()
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


def learned_partitions(
    records: Records,
    features: Tensor,
    shape: tuple[int, int],
    regularisation: float,
    log_sharpness: float,
    rng: np.random.Generator,
    steps: int,
) -> tuple[Tensor, Solution]:
    """Partitions ``(partitions, groups, width)`` of standardised features.

    Their losses do not depend on each other, so that one search serves all. The temperatures of
    groups start around the best single one, at most a factor of 1.5 away.
    """
    count, groups = shape
    width, bound = features.shape[1], math.log(BOUNDS[1])
    start = rng.uniform(-1, 1, count * groups * width) / math.sqrt(width)
    around = np.clip(log_sharpness + math.log(1.5) * np.linspace(-1, 1, groups), -2.9, 2.9)
    v = bound * np.arctanh(around / bound)
    objective = mixture_objective(records, features, shape, regularisation)
    solution = minimise(objective, np.concatenate([start, np.tile(v, count)]), steps=steps)
    result = solution.x[: -count * groups].reshape(*shape, width)
    return torch.from_numpy(result).to(features.dtype), solution


def group_temperatures(records: Records, group: IntArray, groups: int) -> FloatArray:
    """The best temperature of each group of each partition; ``group`` is ``(n, partitions)``."""
    result = np.empty((group.shape[1], groups))
    for i, g in np.ndindex(*result.shape):
        weight = with_prior(records.weight, group[:, i] == g)
        result[i, g] = np.exp(-best_sharpness(replace(records, weight=weight)).x[0])
    return result
