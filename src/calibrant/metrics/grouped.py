"""Sums per group of examples that depend on each other, and the noise that follows from them.

The pixels of an image and the tokens of a document are not independent. Groups are: the noise of a
figure is what it varies by when other groups are drawn, by a bootstrap of whole groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtrit

from calibrant._core import checks
from calibrant._core.binning import Bins, bin_index
from calibrant._core.checks import FloatArray
from calibrant.metrics.reductions import Reduced
from calibrant.metrics.summary import SCORES, Moments

RUN = 100
"""Bootstrap samples that are drawn at a time."""


class GroupSums:
    """Sums of weights, scores and residuals per bin for each group; they add up by its name."""

    def __init__(self) -> None:
        self.sums: dict[Any, FloatArray] = {}

    def add(
        self,
        groups: checks.Values,
        labelled: checks.BoolArray,
        reduced: Reduced,
        weight: FloatArray | None,
        edges: FloatArray,
    ) -> None:
        """Add reduced examples; ``groups`` go with the leading dimensions of ``labelled``."""
        keys = checks.as_keys(groups)
        checks.spread(keys, labelled.shape, "groups")  # refuses other shapes
        names, index = np.unique(keys, return_inverse=True)
        group = checks.spread(index.reshape(keys.shape), labelled.shape, "groups")[labelled]
        mass = np.ones(reduced.nll.size) if weight is None else weight
        scores = [mass, *(mass * getattr(reduced, name) for name in SCORES)]
        columns = [np.bincount(group, values, len(names)) for values in scores]
        bins = edges.size - 1
        place = group * bins + bin_index(reduced.confidence, edges)
        residual = np.bincount(
            place, mass * (reduced.confidence - reduced.outcome), len(names) * bins
        )
        table = np.column_stack([*columns, residual.reshape(-1, bins)])
        for name, row in zip(names.tolist(), table, strict=True):
            if row[0] > 0:
                self.sums[name] = self.sums[name] + row if name in self.sums else row

    def merge(self, other: GroupSums) -> None:
        """Add what others have seen."""
        for name, row in other.sums.items():
            self.sums[name] = self.sums[name] + row if name in self.sums else row

    def noise(self, level: float) -> _GroupNoise:
        """Return what the figures vary by, in intervals of this coverage."""
        count = len(self.sums)
        # few groups tell their own spread badly: Student's quantiles in place of normal ones
        wider = float(stdtrit(count - 1, (1 + level) / 2) / ndtri((1 + level) / 2))
        return _GroupNoise(
            np.stack(list(self.sums.values())), wider * math.sqrt(count / (count - 1))
        )


@dataclass(frozen=True, eq=False)
class _GroupNoise:
    """Sums ``(groups, 1 + scores + bins)``, and by how much their spread is widened."""

    table: FloatArray
    stretch: float

    def moments(self, moments: Moments) -> _GroupedMoments:
        """Return moments whose standard errors are those over groups."""
        return _GroupedMoments(
            moments.count, moments.weight, moments.first, moments.powers, self.table, self.stretch
        )

    def influence(self, filled: Bins) -> FloatArray:
        """Return what each group adds to the gaps, less its share of them, ``(groups, bins)``."""
        residual = self.table[:, 1 + len(SCORES) :]
        return np.asarray((residual - filled.gap * self.table[:, :1]) / filled.total)

    def widened(self, filled: Bins) -> Bins:
        """Return bins whose examples are worth as many independent ones, or as they are."""
        variance = (self.influence(filled) ** 2).sum(0) * self.stretch**2
        squares = filled.squares.sum()
        alone = np.maximum(filled.spread - filled.gap**2 * squares, 0) / filled.total**2
        effect = np.divide(variance, alone, out=np.ones_like(alone), where=alone > 0).clip(1.0)
        wide = filled.squares * effect
        spread = alone * effect * filled.total**2 + filled.gap**2 * wide.sum()
        return replace(filled, squares=wide, spread=spread)

    def drawn(self, filled: Bins, replicates: int, seed: int) -> FloatArray:
        """Return the noise of the gaps in bootstrap samples of groups, ``(replicates, bins)``."""
        influence = self.stretch * self.influence(filled)
        count, rng = len(influence), np.random.default_rng([seed, 3])
        chance = np.full(count, 1 / count)
        runs = [min(RUN, replicates - first) for first in range(0, replicates, RUN)]
        return np.concatenate([rng.multinomial(count, chance, run) @ influence for run in runs])


@dataclass(frozen=True)
class _GroupedMoments(Moments):
    """Moments of examples in groups that are independent of each other."""

    table: FloatArray
    stretch: float

    def deviation(self, name: str) -> float:
        """Standard error of a mean over groups."""
        sums = self.table[:, 1 + SCORES.index(name)]
        off = sums - self.mean(name) * self.table[:, 0]
        return self.stretch * float(np.sqrt((off**2).sum())) / self.weight

    @property
    def worth(self) -> float:
        """Number of independent examples whose accuracy would vary as much."""
        accuracy, deviation = self.mean("correct"), self.deviation("correct")
        return accuracy * (1 - accuracy) / deviation**2 if deviation > 0 else float(len(self.table))
