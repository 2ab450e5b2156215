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
    redrawn : (replicates, classes, bins) float64, ``observed`` with every label drawn anew from
        the claimed probabilities: how much the sums of a calibrated model vary
    scatter : (2, bins) float64, weighted sums of the squared residuals, as they are and as they
        would be on average if the model were calibrated
    """

    bins: int
    threshold: float
    weight: Tensor
    claimed: Tensor
    observed: Tensor
    redrawn: Tensor
    scatter: Tensor

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
        redrawn, scatter = zeros(replicates, classes, bins), zeros(2, bins)
        return cls(bins, threshold, weight, claimed, observed, redrawn, scatter)

    def like(self) -> ClassBins:
        """Empty sums of the same form."""
        classes, bins = self.weight.shape
        return ClassBins.empty(
            classes, bins, threshold=self.threshold, replicates=len(self.redrawn)
        )

    def state(self) -> list[Tensor]:
        """Everything that adds, in a fixed order: what is merged and all-reduced."""
        return [self.weight, self.claimed, self.observed, self.redrawn, self.scatter]

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
        if column is None:
            row, above = (probs > (self.threshold or 1 / self.bins)).nonzero(as_tuple=True)
            entries = _Entries(row, above, probs[row, above], labels[row] == above)
            if not self.threshold:
                self._add_rest(probs, labels, entries, weights)
        else:
            entries = _Entries(torch.arange(len(probs)), column, probs[:, 1], labels == 1)
        self._add_entries(entries, weights)
        if len(self.redrawn):
            self._redraw(probs, labels, weights, column)
            self._add_scatter(probs, labels, weights, entries)

    def _add_entries(self, at: _Entries, weights: Tensor) -> None:
        """Bin single entries of the probabilities."""
        flat, weight = self._cell(at.column, at.claimed), weights[at.row]

        def total(values: Tensor) -> Tensor:
            return torch.bincount(flat, values, self.weight.numel()).view_as(self.weight)

        self.weight += total(weight)
        self.claimed += total(weight * at.claimed)
        self.observed += total(weight * at.outcome)

    def _add_rest(self, probs: Tensor, labels: Tensor, above: _Entries, weights: Tensor) -> None:
        """Put what the entries above the first bin leave of each column into the first bin."""
        weight = weights[above.row]

        def rest(total: Tensor, values: Tensor) -> Tensor:
            return total - torch.bincount(above.column, values, probs.shape[1])

        labelled = torch.bincount(labels, weights, probs.shape[1])
        self.weight[:, 0] += rest(weights.sum(), weight)
        self.claimed[:, 0] += rest(weights @ probs, weight * above.claimed)
        self.observed[:, 0] += rest(labelled, weight * above.outcome)

    def _redraw(
        self, probs: Tensor, labels: Tensor, weights: Tensor, column: Tensor | None
    ) -> None:
        """Draw labels from the probabilities, and bin them as the real ones are."""
        replicates = len(self.redrawn)
        heap = probs.cumsum(-1)
        chance = torch.rand(
            (len(probs), replicates), dtype=torch.float64, generator=_seeded(probs, labels)
        )
        drawn = torch.searchsorted(heap, chance * heap[:, -1:]).clamp_(max=probs.shape[1] - 1)
        claimed = probs.gather(1, drawn)
        if column is None:
            counted, cell = claimed > self.threshold, self._cell(drawn, claimed)
        else:
            counted = drawn == 1
            cell = self._cell(column, probs[:, 1])[:, None].expand_as(drawn)
        flat = cell + self.weight.numel() * torch.arange(replicates)
        share = weights[:, None].expand_as(drawn)
        self.redrawn += torch.bincount(flat[counted], share[counted], self.redrawn.numel()).view_as(
            self.redrawn
        )

    def _add_scatter(self, probs: Tensor, labels: Tensor, weights: Tensor, at: _Entries) -> None:
        """Add squared residuals, and what they would be on average under the claims."""
        index, weight = self._cell(at.column, at.claimed) % self.bins, weights[at.row]
        actual = weight * (at.claimed - at.outcome.double()) ** 2
        expected = weight * at.claimed * (1 - at.claimed)
        binned = torch.stack([torch.bincount(index, x, self.bins) for x in (actual, expected)])
        self.scatter += binned
        if len(at.row) < probs.numel() and not self.threshold and probs.shape[1] > 0:
            squares, own = (probs**2).sum(-1), probs.gather(1, labels[:, None])[:, 0]
            whole = torch.stack([weights @ (1 - 2 * own + squares), weights @ (1 - squares)])
            self.scatter[:, 0] += whole - binned.sum(1)

    def _cell(self, column: Tensor, claimed: Tensor) -> Tensor:
        """Flat index of class and bin."""
        index = torch.from_numpy(bin_index(claimed.numpy(), uniform_edges(self.bins)))
        return column * self.bins + index

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


def _seeded(probs: Tensor, labels: Tensor) -> torch.Generator:
    """Random numbers that are seeded by the rows themselves.

    Sums of different rows then vary independently however they were cut, and every run gives
    the same numbers, without a seed to hand from shard to shard.
    """
    content = labels.numpy().tobytes() + probs[:, 0].contiguous().numpy().tobytes()
    return torch.Generator().manual_seed(zlib.crc32(content))
