"""Class-wise calibration error: one binary problem per class, in sums that add, with an interval.

The interval follows the method of :mod:`calibrant.metrics.gaps`, with the noise of each class and
bin in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from scipy.special import betainc, gammaincinv, ndtri
from torch import Tensor

from calibrant._core.binning import check_bins, uniform_edges
from calibrant._core.checks import FloatArray, IntArray, check_choice
from calibrant._core.chunks import chunk_slices, has_float64
from calibrant.metrics.intervals import SMALLEST, Estimate, _first_root, _lower_tail

Average = Literal["mean", "prevalence"]
MOST_CELLS = 2**23
"""Classes times bins of a table: 64 MiB, enough for 500,000 classes."""
MOST_TOGETHER = 64
"""Numbers per row whose covariance is kept, unless there are more bins: four groups of 15."""
INPUTS = 1.1
"""Factor on the deviation of the class-wise error: the sizes of its cells vary with the inputs,
too, which in simulation added up to a tenth."""
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
            # every probability is in the first bin of its class until it is moved
            if not self.threshold:
                self.claimed[:, 0] += probs.sum(0) if weight is None else weight @ probs
            above = probs > (self.threshold or 1 / self.bins)
            if home.type == "cpu":  # where NumPy is faster
                flat = torch.from_numpy(np.flatnonzero(above.numpy()))
            else:
                flat = above.view(-1).nonzero()[:, 0]
            self._collected.append(_Collected(labels, weight, flat, probs.view(-1)[flat]))
            self._waiting += len(flat)
            if self._waiting > MOST_COLLECTED:
                self.settle()
        else:
            own = labels == 1
            weights = _ones(own) if weight is None else weight
            self.labelled.index_add_(0, column[own], weights[own])
            self._add_entries(column, probs[:, 1], own, weights, moved=False)
        if len(self.products):
            weights = _ones(labels) if weight is None else weight
            for rows in chunk_slices(probs):
                tags = None if column is None else column[rows]
                self._add_products(probs[rows], labels[rows], weights[rows], tags)

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
            if probs.device.type == "cpu":  # classes of a group follow one another
                starts = np.searchsorted(group.numpy(), np.arange(table.shape[1]))
                summed = torch.from_numpy(np.add.reduceat(probs.numpy(), starts, 1))
            else:
                summed = probs @ torch.nn.functional.one_hot(group, table.shape[1]).to(probs)
            table[:, :, 0] = summed
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


def classwise_estimate(sums: ClassBins | None, level: float | None) -> Estimate:
    """Class-wise error, and its interval by inverting tests along the shape of its gaps.

    The noise of the error may be so large that all compatible truths lie below it. The upper end is
    then that of what other samples of this size would show, since the value is in its interval.
    """
    value = math.nan if sums is None else sums.average()
    if level is None or sums is None:
        return Estimate(value)
    cells, alpha = _class_cells_of(sums), 1 - level
    floor, _ = cells.noisy(0.0)

    def quantile(scale: float, share: float) -> float:
        mean, deviation = cells.noisy(scale)
        if deviation == 0:
            return mean
        few = (deviation / mean) ** 2  # a sum of few absolute values is skewed, as a gamma variable
        return float(gammaincinv(1 / few, share)) * few * mean

    def lowest(scale: float) -> float:
        """Highest error that a candidate is likely to show, less the observed one."""
        return quantile(scale, 1 - _lower_tail(cells.error(scale), floor, alpha)) - value

    low, high = _first_root(lowest), _first_root(lambda scale: quantile(scale, alpha / 2) - value)
    reach = float(ndtri(1 - alpha / 2)) * cells.noisy(high)[1]
    highest = max(cells.error(high), value + reach)
    return Estimate(value, min(cells.error(low), value), min(highest, 1.0))


@dataclass(frozen=True, eq=False)
class _ClassCells:
    """Bins of classes, whose hits are binomial variables. Arrays are ``(cells,)``.

    The class-wise error is the sum over cells of ``unit`` times the absolute sum of their gaps.
    """

    unit: FloatArray
    mass: FloatArray  # weight of an example, effectively
    size: FloatArray  # examples, effectively
    claimed: FloatArray  # mean confidence
    shape: FloatArray  # mean gap of the candidates at s = 1
    group: IntArray  # the row of the covariance that holds this cell
    covariance: FloatArray  # (groups, groups) of sums of gaps

    def accuracy(self, scale: float) -> FloatArray:
        """True accuracy of a candidate."""
        return np.clip(self.claimed - scale * self.shape, 0, 1 - SMALLEST)

    def error(self, scale: float) -> float:
        """True class-wise error of a candidate."""
        gap = np.abs(self.claimed - self.accuracy(scale))
        return float((self.unit * self.mass * self.size) @ gap)

    def noisy(self, scale: float) -> tuple[float, float]:
        """Mean and standard deviation of the error in samples of this size from a candidate."""
        right, claimed = self.accuracy(scale), self.size * self.claimed
        expected, variance = self.size * right, self.size * right * (1 - right)
        # P(hits <= claimed), and the same with one trial less, give the mean absolute deviation
        whole = np.floor(claimed + SMALLEST)  # also where rounding left a sum just below
        rest = np.maximum(self.size - whole, SMALLEST)
        slope = np.asarray(2 * betainc(rest, whole + 1, 1 - right) - 1, dtype=np.float64)
        fewer = betainc(rest, np.maximum(whole, SMALLEST), 1 - right)
        absolute = claimed * slope - expected * (2 * fewer - 1)
        # a part of each deviation follows the noise of its cell with that slope, a part does not
        alone = (claimed - expected) ** 2 + variance * (1 - slope**2) - absolute**2
        scaled = self.unit * self.mass
        spread = float(scaled**2 @ np.maximum(alone, 0))
        # the noise of the cells moves together within a group
        gap, variance = (claimed - expected) * self.mass, variance * self.mass**2
        variance = np.maximum(variance, SMALLEST * variance.max() + 1e-100)
        summed = self._grouped(variance)
        slope, summed = self.unit * slope, np.where(summed > 0, summed, 1.0)
        common = self._grouped(slope * variance) / summed
        apart = (slope - common[self.group]) ** 2 @ variance
        # absolute values whose slopes cancel still vary together: the next term of the expansion
        bell = np.exp(-np.minimum(gap**2 / variance, 1000) / 2) * math.sqrt(2 / math.pi)
        bend = self._grouped(self.unit * bell * variance**1.5) / summed**2
        squared = self.covariance**2
        np.fill_diagonal(squared, 0.0)
        together = common @ self.covariance @ common + bend @ squared @ bend / 2
        spread += float(apart + together)
        return float(scaled @ absolute), INPUTS * math.sqrt(max(spread, 0.0))

    def _grouped(self, values: FloatArray) -> FloatArray:
        return np.bincount(self.group, values, len(self.covariance)).astype(np.float64, copy=False)


def _class_cells_of(sums: ClassBins) -> _ClassCells:
    """Make cells from the sums per class and bin, and candidates from their gaps."""
    # only ratios of weights matter, and powers of huge or tiny ones leave the range of numbers
    scale = float(sums.weight.sum(1).max()) or 1.0
    tables = (sums.weight, sums.claimed, sums.observed)
    weight, claimed, observed = (x.numpy() / scale for x in tables)
    squares, products = (x.numpy() / scale / scale for x in (sums.squares, sums.products))
    total = weight.sum(1, keepdims=True)
    # a first bin from which everything was moved is off by rounding
    held = (weight > SMALLEST * np.maximum(total, 1.0)) & (squares > 0)
    weight, squares = np.where(held, weight, 1.0), np.where(held, squares, 1.0)
    size = np.maximum(weight**2 / squares, 1.0)
    confidence = np.where(held, np.clip(claimed / weight, 0, 1), 0.0)
    gap = np.where(held, confidence - np.clip(observed / weight, 0, 1), 0.0)
    unit = sums.shares("mean")[:, None] / np.where(total > 0, total, 1.0)
    share = np.where(held, unit * weight, 0.0)
    # gaps are shrunk to the common one of their bin as far as noise explains that they differ
    common = (share * gap).sum(0) / np.where(held.any(0), share.sum(0), 1.0)
    right = np.clip(confidence - common, 0, 1)
    noise = (share**2 * right * (1 - right) / size).sum(0)
    spread = (share**2 * (gap - common) ** 2).sum(0)
    left = np.divide(spread - noise, spread, out=np.zeros_like(spread), where=spread > noise)
    shape = common + np.sqrt(left) * (gap - common)
    group = sums.group.numpy()[:, None] * sums.bins + np.arange(sums.bins)
    unit = np.broadcast_to(unit, held.shape)
    group = np.broadcast_to(group, held.shape)
    return _ClassCells(
        unit=unit[held],
        mass=(weight / size)[held],
        size=size[held],
        claimed=confidence[held],
        shape=shape[held],
        group=group[held],
        covariance=products,
    )
