"""Class-wise calibration error: one binary problem per class, in sums that add."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from calibrant._core.binning import bin_index, check_bins, uniform_edges
from calibrant._core.checks import FloatArray, check_choice

Average = Literal["mean", "prevalence"]
MOST_CELLS = 2**23
"""Classes times bins of a table: 64 MiB, enough for 500,000 classes."""


@dataclass
class ClassBins:
    """Sums per class and bin, in float64; ``update`` adds probabilities, ``add`` other sums.

    A row of probabilities has fewer than ``bins`` entries above ``1 / bins``, so only those are
    binned one by one. What is left of the column sums belongs to the first bin: the cost is one
    pass over the rows, whatever the number of classes.
    """

    bins: int
    threshold: float
    weight: Tensor  # (classes, bins) sums of weights; counts without them
    claimed: Tensor  # (classes, bins) weighted sums of probabilities
    observed: Tensor  # (classes, bins) weighted sums of labels
    labelled: Tensor  # (classes,) sums of weights of the examples with that label or tag
    redrawn: Tensor  # (replicates, classes, bins) observed, of labels drawn from the probabilities
    scatter: Tensor  # (2, bins) sums of squared residuals: actual, and expected if calibrated

    @classmethod
    def empty(
        cls, classes: int, bins: int, *, threshold: float = 0.0, replicates: int = 0
    ) -> ClassBins:
        """Sums of no examples yet."""
        check_bins(bins)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {threshold}")
        if classes * bins > MOST_CELLS:
            raise ValueError(
                f"classwise_ece takes at most {MOST_CELLS // bins:,} classes with {bins} bins, got "
                f"{classes:,}: leave it out, or pass fewer bins"
            )
        table = (classes, bins)
        shapes = (table, table, table, (classes,), (replicates, *table), (2, bins))
        return cls(bins, threshold, *(torch.zeros(s, dtype=torch.float64) for s in shapes))

    def like(self) -> ClassBins:
        """Empty sums of the same form."""
        return ClassBins(self.bins, self.threshold, *map(torch.zeros_like, self.sums()))

    def add(self, other: ClassBins) -> None:
        """Add the sums of other examples to these."""
        for mine, theirs in zip(self.sums(), other.sums(), strict=True):
            mine += theirs

    def sums(self) -> list[Tensor]:
        """The sums themselves, not copies."""
        return [getattr(self, f.name) for f in fields(self)[2:]]

    def update(
        self, probs: Tensor, labels: Tensor, weight: Tensor | None, column: Tensor | None = None
    ) -> None:
        """Add probabilities ``(rows, classes)`` with their labels ``(rows,)``.

        With ``column`` ``(rows,)`` each row is a cell of a multi-label problem: its tag.
        """
        probs, labels = probs.cpu(), labels.cpu()
        weights = torch.ones(len(probs), dtype=torch.float64) if weight is None else weight
        if column is None:
            self.labelled.index_add_(0, labels, weights)
            if not self.threshold:
                self._add_to_first(probs, labels, weights)
            flat = np.flatnonzero(probs.numpy() > (self.threshold or 1 / self.bins))
            row, above = map(torch.from_numpy, np.divmod(flat, probs.shape[1]))
            own = labels[row] == above
            self._add_entries(above, probs[row, above], own, weights[row], not self.threshold)
        else:
            own = labels == 1
            self.labelled.index_add_(0, column[own], weights[own])
            self._add_entries(column, probs[:, 1], own, weights, moved=False)
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

    def _add_entries(
        self, column: Tensor, claimed: Tensor, own: Tensor, weight: Tensor, moved: bool
    ) -> None:
        """Put single entries ``(n,)`` into their bins, or move them there from the first bin."""
        index, outcome = self._bin(claimed), own.double()
        first = column * self.bins
        added = (weight, weight * claimed, weight * outcome)
        for sums, values in zip((self.weight, self.claimed, self.observed), added, strict=True):
            sums.view(-1).scatter_add_(0, first + index, values)
            if moved:
                sums.view(-1).scatter_add_(0, first, -values)
        actual = weight * (claimed - outcome) ** 2
        expected = weight * claimed * (1 - claimed)
        for squares, values in zip(self.scatter, (actual, expected), strict=True):
            squares.scatter_add_(0, index, values)
            if moved:
                squares[0] -= values.sum()

    def _redraw(self, probs: Tensor, labels: Tensor, weight: Tensor, column: Tensor | None) -> None:
        """Draw labels from the probabilities, and bin them as the real ones are."""
        # Seeded by the rows themselves: sums of different rows vary independently, and every run
        # gives the same numbers without passing a seed from shard to shard.
        content = labels.numpy().tobytes() + probs[:, 0].contiguous().numpy().tobytes()
        generator = torch.Generator().manual_seed(zlib.crc32(content))
        replicates, heap = len(self.redrawn), probs.cumsum(-1)
        size = (len(probs), replicates)
        chance = torch.rand(size, dtype=torch.float64, generator=generator)
        drawn = torch.searchsorted(heap, chance * heap[:, -1:]).clamp_(max=probs.shape[1] - 1)
        if column is None:
            claimed = probs.gather(1, drawn)
            counted, cell = claimed > self.threshold, drawn * self.bins + self._bin(claimed)
        else:
            counted = drawn == 1
            cell = (column * self.bins + self._bin(probs[:, 1]))[:, None].expand_as(drawn)
        flat = cell + self.weight.numel() * torch.arange(replicates)
        share = weight[:, None].expand_as(drawn)
        self.redrawn.view(-1).scatter_add_(0, flat[counted], share[counted])

    def _bin(self, claimed: Tensor) -> Tensor:
        return torch.from_numpy(bin_index(claimed.numpy(), uniform_edges(self.bins)))

    def errors(self) -> FloatArray:
        """Calibration error of each class, ``(classes,)``; NaN where nothing was counted."""
        total = self.weight.sum(1)
        gap = (self.claimed - self.observed).abs().sum(1)
        return np.asarray(torch.where(total > 0, gap / total, torch.nan))

    def shares(self, average: Average) -> FloatArray:
        """Weight of each class in the average, ``(classes,)``, summing to one."""
        check_choice("average", average, get_args(Average))
        counted = (self.weight.sum(1) > 0).double()
        share = counted if average == "mean" else counted * self.labelled
        return np.asarray(share / share.sum())

    def average(self, average: Average = "mean") -> float:
        """Average error over the classes that were counted."""
        errors, shares = self.errors(), self.shares(average)
        return float(errors[shares > 0] @ shares[shares > 0]) if (shares > 0).any() else math.nan
