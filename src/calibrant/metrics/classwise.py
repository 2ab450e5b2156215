"""Class-wise calibration error: one binary problem per class, in sums that add."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core.binning import bin_index, check_bins, uniform_edges
from calibrant._core.checks import FloatArray

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
    labelled : (classes,) float64, sums of weights of the examples with that label or tag
    scatter : (2, bins) float64, weighted sums of the squared residuals, as they are and as they
        would be on average if the model were calibrated
    """

    bins: int
    threshold: float
    weight: Tensor
    claimed: Tensor
    observed: Tensor
    labelled: Tensor
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
        check_bins(bins)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {threshold}")

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        weight, claimed, observed = (zeros(classes, bins) for _ in range(3))
        redrawn, scatter = zeros(replicates, classes, bins), zeros(2, bins)
        return cls(bins, threshold, weight, claimed, observed, zeros(classes), redrawn, scatter)

    def like(self) -> ClassBins:
        """Empty sums of the same form."""
        classes, bins = self.weight.shape
        return ClassBins.empty(
            classes, bins, threshold=self.threshold, replicates=len(self.redrawn)
        )

    def state(self) -> list[Tensor]:
        """Everything that adds, in a fixed order, for merging and all-reducing."""
        return [getattr(self, f.name) for f in fields(self)[2:]]

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
        own = labels if column is None else column[labels == 1]
        self.labelled.index_add_(0, own, weights if column is None else weights[labels == 1])
        if column is None:
            row, above = self._above(probs)
            entries = _Entries(row, above, probs[row, above], (labels[row] == above).double())
            if not self.threshold:
                self._add_to_first(probs, labels, weights)
        else:
            rows = torch.arange(len(probs))
            entries = _Entries(rows, column, probs[:, 1], (labels == 1).double())
        self._add_entries(
            entries, weights[entries.row], moved=column is None and not self.threshold
        )
        if len(self.redrawn):
            self._redraw(probs, labels, weights, column)

    def _add_to_first(self, probs: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Put every entry into the first bin of its class; some are moved out afterwards."""
        self.weight[:, 0] += weights.sum()
        self.claimed[:, 0] += weights @ probs
        self.observed[:, 0].index_add_(0, labels, weights)
        squares = torch.linalg.vector_norm(probs, dim=-1) ** 2
        own = probs.gather(1, labels[:, None])[:, 0]
        self.scatter[0, 0] += weights @ (1 - 2 * own + squares)
        self.scatter[1, 0] += weights @ (1 - squares)

    def _add_entries(self, at: _Entries, weight: Tensor, *, moved: bool) -> None:
        """Put single entries into their bins, or move them there from the first bin."""
        index = self._bin(at.claimed)
        cell, first = at.column * self.bins + index, at.column * self.bins
        for sums, values in (
            (self.weight, weight),
            (self.claimed, weight * at.claimed),
            (self.observed, weight * at.outcome),
        ):
            sums.view(-1).scatter_add_(0, cell, values)
            if moved:
                sums.view(-1).scatter_add_(0, first, -values)
        actual = weight * (at.claimed - at.outcome) ** 2
        expected = weight * at.claimed * (1 - at.claimed)
        for squares, values in zip(self.scatter, (actual, expected), strict=True):
            squares.scatter_add_(0, index, values)
            if moved:
                squares[0] -= values.sum()

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
        if column is None:
            claimed = probs.gather(1, drawn)
            counted, cell = claimed > self.threshold, drawn * self.bins + self._bin(claimed)
        else:
            counted = drawn == 1
            cell = (column * self.bins + self._bin(probs[:, 1]))[:, None].expand_as(drawn)
        flat = cell + self.weight.numel() * torch.arange(replicates)
        share = weights[:, None].expand_as(drawn)
        self.redrawn.view(-1).scatter_add_(0, flat[counted], share[counted])

    def _above(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the rows and classes of the entries that are binned one by one."""
        flat = np.flatnonzero(probs.numpy() > (self.threshold or 1 / self.bins))
        row, column = np.divmod(flat, probs.shape[1])
        return torch.from_numpy(row), torch.from_numpy(column)

    def _bin(self, claimed: Tensor) -> Tensor:
        return torch.from_numpy(bin_index(claimed.numpy(), uniform_edges(self.bins)))

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
        share = counted if average == "mean" else counted * self.labelled
        return np.asarray(share / share.sum())

    def average(self, average: Average = "mean") -> float:
        """Average error over the classes that were counted."""
        errors, shares = self.errors(), self.shares(average)
        return float(errors[shares > 0] @ shares[shares > 0]) if (shares > 0).any() else math.nan


def _seeded(probs: Tensor, labels: Tensor) -> torch.Generator:
    """Random numbers seeded by the rows themselves.

    Sums of different rows then vary independently however they were cut, and every run gives
    the same numbers without passing a seed from shard to shard.
    """
    content = labels.numpy().tobytes() + probs[:, 0].contiguous().numpy().tobytes()
    return torch.Generator().manual_seed(zlib.crc32(content))
