"""Class-wise calibration error: one binary problem per class, in sums that add."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from calibrant._core.binning import check_bins, uniform_edges
from calibrant._core.checks import FloatArray, check_choice
from calibrant._core.chunks import chunk_slices, has_float64

Average = Literal["mean", "prevalence"]
MOST_CELLS = 2**23
"""Classes times bins of a table: 64 MiB, enough for 500,000 classes."""
MOST_TOGETHER = 64
"""Numbers per row whose covariance is kept, unless there are more bins: four groups of 15."""
MOST_COLLECTED = 2**17
"""Probabilities that are collected before they are put into their bins: three megabytes."""


class _Collected(NamedTuple):
    """Rows of a chunk, and those of their probabilities that are binned one by one."""

    labels: Tensor  # (rows,)
    weight: Tensor | None  # (rows,)
    flat: Tensor  # (n,) row times classes plus class
    claimed: Tensor  # (n,)


@dataclass
class ClassBins:
    """Sums per class and bin, in float64; ``update`` adds probabilities, ``add`` other sums.

    A row of probabilities has fewer than ``bins`` entries above ``1 / bins``, so only those are
    binned one by one. What is left of the column sums belongs to the first bin: the cost is one
    pass over the rows, whatever the number of classes. Entries are collected, and put into their
    bins by ``settle``, since calls for the few of a chunk would cost more than the pass.
    """

    bins: int
    threshold: float
    weight: Tensor  # (classes, bins) sums of weights; counts without them
    claimed: Tensor  # (classes, bins) weighted sums of probabilities
    observed: Tensor  # (classes, bins) weighted sums of labels
    labelled: Tensor  # (classes,) sums of weights of the examples with that label or tag
    squares: Tensor  # (classes, bins) sums of squared weights
    products: Tensor  # (groups * bins,) * 2, see ``_add_products``; (0, 0) if not wanted
    _collected: list[_Collected] = field(default_factory=list, init=False, repr=False)
    _waiting: int = field(default=0, init=False, repr=False)  # entries that were collected

    @classmethod
    def empty(
        cls, classes: int, bins: int, *, threshold: float = 0.0, interval: bool = False
    ) -> ClassBins:
        """Sums of no examples yet, and with ``interval`` those that an interval needs."""
        check_bins(bins)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {threshold}")
        if classes * bins > MOST_CELLS:
            raise ValueError(
                f"classwise_ece takes at most {MOST_CELLS // bins:,} classes with {bins} bins, got "
                f"{classes:,}: leave it out, or pass fewer bins"
            )
        table = (classes, bins)
        together = bins * max(1, min(classes, MOST_TOGETHER // bins)) if interval else 0
        shapes = (table, table, table, (classes,), table, (together, together))
        zeros = partial(torch.zeros, dtype=torch.float64, device="cpu")
        return cls(bins, threshold, *map(zeros, shapes))

    def like(self, device: torch.device | None = None) -> ClassBins:
        """Empty sums of the same form, on a device with float64 or where these are."""
        place = device if device is not None and has_float64(device) else None
        sums = (torch.zeros_like(values, device=place) for values in self.sums())
        return ClassBins(self.bins, self.threshold, *sums)

    def add(self, other: ClassBins) -> None:
        """Add the sums of other examples to these."""
        for mine, theirs in zip(self.sums(), other.sums(), strict=True):
            mine += theirs.to(mine.device)

    def sums(self) -> list[Tensor]:
        """The sums themselves, not copies."""
        return [getattr(self, f.name) for f in fields(self)[2:8]]

    def update(
        self, probs: Tensor, labels: Tensor, weight: Tensor | None, column: Tensor | None = None
    ) -> None:
        """Add probabilities ``(rows, classes)`` with their labels ``(rows,)``.

        With ``column`` ``(rows,)`` each row is a cell of a multi-label problem: its tag.
        """
        home = self.weight.device
        probs, labels = probs.to(home), labels.to(home)
        weight, column = (None if x is None else x.to(home) for x in (weight, column))
        if column is None:
            self._collect(probs, labels, weight)
        else:
            own = labels == 1
            weights = _ones(own) if weight is None else weight
            self.labelled.index_add_(0, column[own], weights[own])
            self._add_entries(column, probs[:, 1], own, weights, moved=False)
        if len(self.products):
            weights = _ones(labels) if weight is None else weight
            for rows in chunk_slices(len(probs)):
                tags = None if column is None else column[rows]
                self._add_products(probs[rows], labels[rows], weights[rows], tags)

    def _collect(self, probs: Tensor, labels: Tensor, weight: Tensor | None) -> None:
        """Put every probability into the first bin of its class, and note those to be moved."""
        if not self.threshold:
            self.claimed[:, 0] += probs.sum(0) if weight is None else weight @ probs
        flat = _places(probs > (self.threshold or 1 / self.bins))
        self._collected.append(_Collected(labels, weight, flat, probs.view(-1)[flat]))
        self._waiting += len(flat)
        if self._waiting > MOST_COLLECTED:
            self.settle()

    def settle(self) -> None:
        """Put what was collected into its bins."""
        if not self._collected:
            return
        parts, self._collected, self._waiting = self._collected, [], 0
        labels = torch.cat([part.labels for part in parts])
        weights = torch.cat([_ones(p.labels) if p.weight is None else p.weight for p in parts])
        self.labelled.index_add_(0, labels, weights)
        if not self.threshold:
            self.weight[:, 0] += weights.sum()
            self.observed[:, 0].index_add_(0, labels, weights)
            self.squares[:, 0] += weights @ weights
        classes = len(self.weight)
        first = np.cumsum([0, *(len(part.labels) for part in parts)]) * classes
        starts = map(int, first)
        flat = torch.cat([p.flat + start for p, start in zip(parts, starts, strict=False)])
        row = torch.div(flat, classes, rounding_mode="floor")
        above = flat - classes * row
        claimed, own = torch.cat([part.claimed for part in parts]), labels[row] == above
        self._add_entries(above, claimed, own, weights[row], moved=not self.threshold)

    def _add_entries(
        self, column: Tensor, claimed: Tensor, own: Tensor, weight: Tensor, *, moved: bool
    ) -> None:
        """Put single entries ``(n,)`` into their bins, or move them there from the first bin."""
        first = column * self.bins
        index = first + self._bin(claimed)
        added = (weight, weight * claimed, weight * own, weight**2)
        tables = (self.weight, self.claimed, self.observed, self.squares)
        for sums, values in zip(tables, added, strict=True):
            sums.view(-1).scatter_add_(0, index, values)
            if moved:
                sums.view(-1).scatter_add_(0, first, -values)

    @property
    def group(self) -> Tensor:
        """Group of each class, ``(classes,)``: those of one group share rows of ``products``."""
        classes, groups = len(self.weight), len(self.products) // self.bins
        return torch.arange(classes, device=self.weight.device) * groups // classes

    def _add_products(
        self, probs: Tensor, labels: Tensor, weight: Tensor, column: Tensor | None
    ) -> None:
        """Add the products of the weighted residuals of each row, summed by group and bin.

        A row has one label, so that its residuals (probability less outcome) move together.
        """
        rows, group = torch.arange(len(probs), device=probs.device), self.group
        table = probs.new_zeros(len(probs), len(self.products) // self.bins, self.bins)
        if column is None:
            table[:, :, 0] = _sums_by(group, probs, table.shape[1])
            table[rows, group[labels], 0] -= 1
            row, above = torch.nonzero(probs > 1 / self.bins, as_tuple=True)
            residual = probs[row, above] - (labels[row] == above).double()
            place = (row * table.shape[1] + group[above]) * self.bins
            table.view(-1).scatter_add_(0, place + self._bin(probs[row, above]), residual)
            table.view(-1).scatter_add_(0, place, -residual)
        else:  # the tags of an example are rows of their own
            claimed = probs[:, 1]
            table[rows, group[column], self._bin(claimed)] = claimed - labels
        flat = weight[:, None] * table.flatten(1)
        self.products += flat.T @ flat

    def _bin(self, claimed: Tensor) -> Tensor:
        edges = torch.tensor(uniform_edges(self.bins), device=claimed.device)
        return (torch.searchsorted(edges, claimed.contiguous()) - 1).clamp_(0, self.bins - 1)

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


def _ones(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.float64, device=rows.device)


def _places(mask: Tensor) -> Tensor:
    """Return the places of True in a flat mask; NumPy is faster where it can."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.view(-1).nonzero()[:, 0]


def _sums_by(group: Tensor, probs: Tensor, groups: int) -> Tensor:
    """Return sums ``(rows, groups)`` over the classes of each group, which follow one another."""
    if probs.device.type == "cpu":
        starts = np.searchsorted(group.numpy(), np.arange(groups))
        return torch.from_numpy(np.add.reduceat(probs.numpy(), starts, 1))
    return probs @ torch.nn.functional.one_hot(group, groups).to(probs)
