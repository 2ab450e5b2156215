"""Class-wise calibration error: one binary problem per class, in sums that add."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._binning import bin_index, uniform_edges
from calibrant._checks import FloatArray

Average = Literal["mean", "prevalence"]


class _Entries(NamedTuple):
    """Single probabilities of a block, each ``(entries,)``."""

    row: Tensor
    column: Tensor
    claimed: Tensor
    outcome: Tensor

    @property
    def residual(self) -> Tensor:
        return self.claimed - self.outcome.double()


@dataclass
class ClassBins:
    """Sums per class and bin; ``update`` adds a block of probabilities, ``add`` other sums.

    A row of probabilities has fewer than ``bins`` entries above ``1 / bins``, so only those are
    binned one by one. What is left of the column sums belongs to the first bin: the cost is one
    pass over the block, whatever the number of classes.

    Attributes
    ----------
    weight : (classes, bins) float64, sums of weights (counts, exact to 2**53, without them)
    claimed, observed : (classes, bins) float64, weighted sums of probabilities and of labels
    noise : (replicates, classes, bins) float64, ``claimed - observed`` with every example
        multiplied by a random number; the spread of these is the sampling noise of the gaps
    shock : (replicates, classes), sums of those random numbers (times the weights)
    """

    bins: int
    threshold: float
    weight: Tensor
    claimed: Tensor
    observed: Tensor
    noise: Tensor
    shock: Tensor

    @classmethod
    def empty(
        cls,
        classes: int,
        bins: int = 15,
        *,
        threshold: float = 0.0,
        replicates: int = 0,
    ) -> ClassBins:
        """Sums of no examples yet."""
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {threshold}")

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        weight, claimed, observed = (zeros(classes, bins) for _ in range(3))
        noise, shock = zeros(replicates, classes, bins), zeros(replicates, classes)
        return cls(bins, threshold, weight, claimed, observed, noise, shock)

    def like(self) -> ClassBins:
        """Empty sums of the same form."""
        classes, bins = self.weight.shape
        return ClassBins.empty(classes, bins, threshold=self.threshold, replicates=len(self.noise))

    def state(self) -> list[Tensor]:
        """Everything that adds, in a fixed order: what is merged and all-reduced."""
        return [self.weight, self.claimed, self.observed, self.noise, self.shock]

    def add(self, other: ClassBins) -> None:
        """Add the sums of other examples to these."""
        for mine, theirs in zip(self.state(), other.state(), strict=True):
            mine += theirs

    def update(
        self, probs: Tensor, labels: Tensor, weight: Tensor | None, column: Tensor | None = None
    ) -> None:
        """Add probabilities ``(rows, classes)`` with their labels ``(rows,)``.

        With ``column`` ``(rows,)`` each row is a binary problem of that one column: the cells
        of a multi-label problem.
        """
        probs, labels = probs.cpu(), labels.cpu()
        weights = torch.ones(len(probs), dtype=torch.float64) if weight is None else weight
        random = _multipliers(len(self.noise), probs, labels)
        if column is None:
            row, column = (probs > (self.threshold or 1 / self.bins)).nonzero(as_tuple=True)
            entries = _Entries(row, column, probs[row, column], labels[row] == column)
            self._add_entries(entries, weights, random)
            if not self.threshold:
                self._add_rest(probs, labels, entries, weights, random)
            self.shock += (random @ weights)[:, None]
        else:
            entries = _Entries(torch.arange(len(probs)), column, probs[:, 1], labels == 1)
            self._add_entries(entries, weights, random)
            self.shock.index_add_(1, column, random * weights)

    def _add_entries(self, at: _Entries, weights: Tensor, random: Tensor) -> None:
        """Bin single entries of the probabilities."""
        index = torch.from_numpy(bin_index(at.claimed.numpy(), uniform_edges(self.bins)))
        flat, weight = at.column * self.bins + index, weights[at.row]

        def total(values: Tensor) -> Tensor:
            return torch.bincount(flat, values, self.weight.numel()).view_as(self.weight)

        self.weight += total(weight)
        self.claimed += total(weight * at.claimed)
        self.observed += total(weight * at.outcome)
        if len(random):
            shaken = random[:, at.row] * (weight * at.residual)
            self.noise.view(len(random), -1).index_add_(1, flat, shaken)

    def _add_rest(
        self, probs: Tensor, labels: Tensor, above: _Entries, weights: Tensor, random: Tensor
    ) -> None:
        """Put what the entries above the first bin leave of each column into the first bin."""
        weight = weights[above.row]

        def rest(total: Tensor, values: Tensor) -> Tensor:
            return total - torch.bincount(above.column, values, probs.shape[1])

        labelled = torch.bincount(labels, weights, probs.shape[1])
        self.weight[:, 0] += rest(weights.sum(), weight)
        self.claimed[:, 0] += rest(weights @ probs, weight * above.claimed)
        self.observed[:, 0] += rest(labelled, weight * above.outcome)
        if len(random):
            shaken, first = random * weights, self.noise[:, :, 0]
            first += shaken @ probs
            first.index_add_(1, labels, -shaken)
            first.index_add_(1, above.column, -shaken[:, above.row] * above.residual)

    def errors(self) -> FloatArray:
        """Calibration error of each class, ``(classes,)``; NaN where nothing was counted."""
        total = self.weight.sum(1)
        gap = (self.claimed - self.observed).abs().sum(1)
        return np.asarray(torch.where(total > 0, gap / total, torch.nan))

    def shares(self, average: Average) -> FloatArray:
        """Weight of each class in the average, ``(classes,)``, summing to one."""
        if average not in ("mean", "prevalence"):
            raise ValueError(f'average must be "mean" or "prevalence", got {average!r}')
        counted = (self.weight.sum(1) > 0).double()
        share = counted if average == "mean" else counted * self.observed.sum(1)
        return np.asarray(share / share.sum())

    def average(self, average: Average = "mean") -> float:
        """Average error over the classes that were counted."""
        return float(np.nansum(self.errors() * self.shares(average)))


def _multipliers(replicates: int, probs: Tensor, labels: Tensor) -> Tensor:
    """Standard normal numbers ``(replicates, rows)``, seeded by the rows themselves.

    Sums of different rows then carry independent noise however they were cut, and every run
    gives the same numbers, without a seed to hand from shard to shard.
    """
    if replicates == 0:
        return probs.new_zeros((0, len(probs)))
    content = labels.numpy().tobytes() + probs[:, 0].contiguous().numpy().tobytes()
    generator = torch.Generator().manual_seed(zlib.crc32(content))
    return torch.randn(replicates, len(probs), dtype=torch.float64, generator=generator)
