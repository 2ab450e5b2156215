"""Gradient boosting with small trees over codes of columns, for corrections of predictions.

Columns of metadata or numbers are learned as codes first, which trees split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from calibrant._core.checks import (
    IGNORED,
    FloatArray,
    IntArray,
    Values,
    as_labels,
    as_weight,
)
from calibrant._core.messages import comma_separated
from calibrant._core.solve import check_time
from calibrant.calibrators.features.correctable import _Correctable
from calibrant.calibrators.piecewise import BEYOND
from calibrant.data.metadata import (
    Condition,
    MetadataColumn,
    conjunction_text,
    learn_column,
    learn_numbers,
)

_Codes: TypeAlias = NDArray[np.int16]

BINS = 32
"""Bins of a column of numbers."""
_MAX_VALUES = 20
"""Values of a text that trees tell apart; rarer ones share a code."""
_MAX_LEAF = 2.0
"""Largest value of a leaf before shrinkage, for data without an optimum."""
_MIN_GAIN = 4.0
"""Gain that a split needs: without any effect, gains are like squares of normal numbers."""
_PATIENCE = 10
"""Rounds without a lower held-out loss after which no more are tried."""
_CLEAR = 2.0
"""Standard errors by which corrections must lower the held-out loss."""
_SCALES = (0.5, 2.0)
"""Factors of corrections, between which the best is looked for."""
_MAX_SHOWN, _LOOKED_AT = 5, 1 << 14
"""Number of subgroups that a description names, and of examples that they are measured on."""


def _learned_columns(
    arrays: Mapping[str, Any], labels: Values, sample_weight: Values | None
) -> list[MetadataColumn]:
    """Learn the codes of metadata columns from the examples that count."""
    targets = as_labels(labels)
    if targets.ndim != 1 or any(len(values) != len(targets) for values in arrays.values()):
        sizes = [f"{len(values):,} of {name}" for name, values in arrays.items()]
        raise ValueError(
            "metadata columns must have one value for each of the labels (n,), got "
            f"{comma_separated(sizes)} for labels of shape {targets.shape}"
        )
    counts = targets != IGNORED
    if sample_weight is not None:
        counts &= as_weight(sample_weight, targets.shape) > 0
    return [
        learn_column(name, values[counts], bins=BINS, most=_MAX_VALUES) or _constant(name)
        for name, values in arrays.items()
    ]


def _learned_numbers(features: FloatArray) -> list[MetadataColumn]:
    """Return the columns of numbers ``(n, width)``."""
    names = [f"feature {i}" for i in range(features.shape[1])]
    return [
        learn_numbers(name, values, bins=BINS) or _constant(name)
        for name, values in zip(names, features.T, strict=True)
    ]


def _constant(name: str) -> MetadataColumn:
    """Return a column that tells no examples apart, but for missing ones."""
    return MetadataColumn(name, "number")


class _Tree(NamedTuple):
    """A tree of fixed depth: at each node, examples in a range of codes go right.

    Node ``i`` has the children ``2 i + 1`` and ``2 i + 2``. A node without a split has an empty
    range, which sends all examples left.
    """

    column: IntArray  # (nodes,)
    low: IntArray  # (nodes,)
    high: IntArray  # (nodes,)
    leaf: FloatArray  # (leaves, outputs)

    def conditions(self, leaf: int, columns: Sequence[MetadataColumn]) -> list[Condition]:
        """Return the conditions of a leaf that are ranges of codes, from the root on.

        The left side of a split is one if the range of the right side begins or ends the codes.
        """
        result, node = [], leaf + len(self.column)
        while node:
            parent, right = (node - 1) // 2, node % 2 == 0
            column, low, high = (int(x[parent]) for x in (self.column, self.low, self.high))
            node, last = parent, columns[column].size - 1  # the code of missing values
            if right:
                result.append(Condition(column, low, high))
            elif low < high and columns[column].kind != "category":
                result += [Condition(column, 0, low)] if high == last else []
                result += [Condition(column, high, last)] if low == 0 else []
        return result[::-1]


@dataclass
class _TreeLearner:
    r"""Learns trees from histograms of slopes and curvatures over the codes of columns.

    The value of a leaf is a Newton step with a penalty :math:`\lambda`, times a rate:
    :math:`-\eta\, G / (H + \lambda)`, with the sums :math:`G, H` of slopes and curvatures. A
    split gains :math:`\sum G^2 / (H + \lambda)` over both sides, less that of the node. Outputs in
    ``doubt`` gain only what is above it, and their steps are smaller.
    """

    columns: Sequence[MetadataColumn]
    depth: int
    rate: float
    penalty: float
    fewest: float  # least sum of weights in a leaf
    doubt: FloatArray  # (outputs,) gains that each output must exceed, and is shrunken by

    def __post_init__(self) -> None:
        sizes = [column.size for column in self.columns]
        self._first = np.cumsum([0, *sizes])  # places of the columns among all codes
        every = [c for i, column in enumerate(self.columns) for c in column.conditions(i)]
        self._ranges = np.array(every, np.int64).reshape(-1, 3)
        self._low, self._high = self._first[self._ranges[:, 0]] + self._ranges[:, 1:].T

    def learn(
        self, codes: _Codes, slope: FloatArray, curvature: FloatArray, weight: FloatArray
    ) -> tuple[_Tree, IntArray]:
        """Return a tree and the leaf of each example ``(n,)``.

        ``codes`` are ``(columns, n)``; slopes and curvatures ``(n, outputs)`` have been multiplied
        by the weights ``(n,)``.
        """
        nodes = 2**self.depth - 1
        split = np.zeros((nodes, 3), np.int64)
        place = np.zeros(codes.shape[1], np.int64)  # number of the node within its level
        values = [*slope.T, *curvature.T, weight]
        for level in range(self.depth):
            below = self._sums(codes, place, 2**level, values)
            for i, sums in enumerate(below):
                split[2**level - 1 + i] = self._best(sums)
            column, low, high = split[place + 2**level - 1].T
            code = codes[column, np.arange(codes.shape[1])]
            place = 2 * place + ((code >= low) & (code < high))
        totals = np.array([np.bincount(place, v, nodes + 1) for v in values], np.float64)
        outputs = slope.shape[1]
        step = -totals[:outputs] / (totals[outputs:-1] + self.penalty)
        # a part of the step that falls with the doubt, down to nothing
        sure = np.maximum(1 - self.doubt[:, None] / np.maximum(self._gains(totals), 1e-300), 0)
        leaf = np.asarray(self.rate * (sure * np.clip(step, -_MAX_LEAF, _MAX_LEAF)).T)
        column, low, high = split.T
        return _Tree(column, low, high, leaf), place

    def _sums(
        self, codes: _Codes, place: IntArray, nodes: int, values: Sequence[FloatArray]
    ) -> FloatArray:
        """Return sums of the values over the codes below each: ``(nodes, values, codes + 1)``."""
        total = int(self._first[-1])
        result = np.zeros((nodes, len(values), total + 1))
        for first, column, row in zip(self._first, self.columns, codes, strict=False):
            key, size = place * column.size + row, column.size
            for i, value in enumerate(values):
                sums = np.bincount(key, value, nodes * size).reshape(nodes, size)
                result[:, i, first + 1 : first + 1 + size] = sums
        return np.cumsum(result, axis=-1, out=result)

    def _best(self, sums: FloatArray) -> IntArray:
        """Return column, low and high of the best split of a node; zeros if none has a gain."""
        if not len(self._ranges):
            return np.zeros(3, np.int64)
        inside = sums[:, self._high] - sums[:, self._low]
        total = sums[:, [self._first[1]]]  # every column has every example once
        outside = total - inside
        gain = self._score(inside) + self._score(outside) - self._score(total)
        enough = np.minimum(inside[-1], outside[-1]) >= self.fewest
        gain = np.where(enough, gain, 0.0)
        # the first of those that differ by rounding, such as both sides of one cut
        best = int((gain >= (1 - 1e-9) * gain.max()).argmax())
        return self._ranges[best] if gain[best] > _MIN_GAIN else np.zeros(3, np.int64)

    def _score(self, sums: FloatArray) -> FloatArray:
        """Return the gain of leaves with some sums ``(2 outputs + 1, ...)`` over no correction."""
        return np.asarray(np.maximum(self._gains(sums) - self.doubt[:, None], 0).sum(0))

    def _gains(self, sums: FloatArray) -> FloatArray:
        """Return the gain of each output ``(outputs, ...)``."""
        outputs = len(sums) // 2
        slope, curvature = sums[:outputs], np.maximum(sums[outputs:-1], 0)
        return np.asarray(slope**2 / (curvature + self.penalty))


def _number_splits(
    trees: Sequence[_Tree], columns: Sequence[MetadataColumn], nodes: int
) -> tuple[IntArray, FloatArray, FloatArray, IntArray]:
    """Return the splits of trees by the numbers of columns instead of their codes.

    Column, low and high number, and 1 where missing numbers go right, are ``(trees, nodes)``.
    """
    splits = np.array([tree[:3] for tree in trees], np.int64).reshape(-1, 3, nodes)
    column, low, high = splits.swapaxes(0, 1)
    # where each code begins; that of missing values has no numbers
    edges = [np.array([-BEYOND, *_cuts_of(c), BEYOND, BEYOND]) for c in columns]
    flat, first = np.concatenate([*edges, []]), np.cumsum([0, *map(len, edges)])
    missing = np.array([c.size - 1 for c in columns] or [0])[column]
    places = first[column]
    return column, flat[places + low], flat[places + high], (high > missing).astype(np.int64)


def _cuts_of(column: MetadataColumn) -> NDArray[np.float32]:
    """Return the numbers at which codes but the first begin; categories are their places."""
    categories = np.arange(1, len(column.values) + 1)
    return np.asarray(categories if column.kind == "category" else column.cuts, np.float32)


def _codes_of(column: MetadataColumn, numbers: NDArray[np.float32]) -> _Codes:
    """Return the codes of numbers in single precision, in which predictions compare them."""
    codes = np.searchsorted(_cuts_of(column), numbers, side="right")
    return np.where(np.isnan(numbers), column.size - 1, codes).astype(np.int16)


@dataclass
class _Boosting:
    """Corrections of examples, one tree after another.

    ``codes`` ``(columns, n)`` are those of the learner's columns; the last one is of the current
    prediction, and written anew before each tree.
    """

    predictions: _Correctable
    learner: _TreeLearner
    codes: _Codes
    weight: FloatArray
    correction: FloatArray = field(init=False)
    trees: list[_Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.correction = np.zeros((self.codes.shape[1], self.predictions.outputs))

    def step(self) -> None:
        """Add a tree."""
        check_time()
        last = self.learner.columns[-1]
        self.codes[-1] = last.codes(self.predictions.odds(self.correction))
        slope, curvature = self.predictions.derivatives(self.correction)
        weight = self.weight[:, None]
        tree, leaf = self.learner.learn(self.codes, weight * slope, weight * curvature, self.weight)
        self.trees.append(tree)
        self.correction += tree.leaf[leaf]

    def take(self, which: IntArray) -> _Boosting:
        """Return the same for some examples, without its trees."""
        kept = self.predictions.take(which)
        return _Boosting(kept, self.learner, self.codes[:, which], self.weight[which])

    def without(self, part: IntArray) -> _Boosting:
        """Return the same without weight on some examples, and without its trees."""
        weight = self.weight.copy()
        weight[part] = 0
        return _Boosting(self.predictions, self.learner, self.codes, weight)


def _held_out_corrections(run: _Boosting, parts: Sequence[IntArray]) -> Iterator[FloatArray]:
    """Yield corrections ``(n, outputs)`` after 0, 1, ... trees, learned without an example's part.

    The array is that of the next round as well: copy what is to be kept.
    """
    runs = [run.without(part) for part in parts]
    corrections = np.zeros_like(run.correction)
    while True:
        yield corrections
        for one, part in zip(runs, parts, strict=True):
            one.step()
            corrections[part] = one.correction[part]


class _Choice(NamedTuple):
    """Number of rounds with the lowest held-out loss, a factor, and what they gain.

    Shrunken corrections are too small if rounds end before all is corrected: the ``scale`` by which
    they are multiplied makes the held-out loss lowest. ``gain`` is that without the factor, and
    ``error`` its standard error.
    """

    rounds: int
    scale: float
    before: float
    gain: float
    error: float

    @property
    def clear(self) -> bool:
        """True if the gain is more than noise."""
        return self.gain > _CLEAR * self.error


def _best_rounds(
    run: _Boosting, parts: Sequence[IntArray], most: int, groups: NDArray[Any] | None
) -> _Choice:
    """Return the number of rounds with the lowest held-out loss.

    The standard error is that of the mean over examples or, if there are any, groups.
    """
    share = run.weight / run.weight.sum()
    rounds, lowest, best = 0, math.inf, run.correction
    for number, correction in enumerate(islice(_held_out_corrections(run, parts), most + 1)):
        mean = float(share @ run.predictions.losses(correction))
        if mean < lowest:
            rounds, lowest, best = number, mean, correction.copy()
        if number - rounds >= _PATIENCE:
            break
    first = run.predictions.losses(np.zeros_like(best))

    def loss(scale: float) -> float:
        return float(share @ run.predictions.losses(scale * best))

    scale = float(minimize_scalar(loss, bounds=_SCALES, method="bounded").x) if rounds else 1.0
    # without the factor, which makes noise larger as well
    gains = first - run.predictions.losses(best)
    gain = float(share @ gains)
    off = share * (gains - gain)
    if groups is not None:
        off = np.bincount(np.unique(groups, return_inverse=True)[1].reshape(-1), off)
    return _Choice(rounds, scale, float(share @ first), gain, float(np.sqrt(off @ off)))


class Correction(NamedTuple):
    """The mean correction of a subgroup, one number or one per class, and its share of examples."""

    subgroup: str
    mean: list[float]
    share: float


def _largest_corrections(run: _Boosting, scale: float) -> list[Correction]:
    """Return subgroups of leaves with the largest mean corrections, times a scale.

    They are those of metadata alone. Larger subgroups come before smaller ones that are corrected
    as much. Of subgroups that are much the same, one is returned.
    """
    seen = np.arange(0, len(run.weight), -(-len(run.weight) // _LOOKED_AT))
    predictions, correction = run.predictions.take(seen), scale * run.correction[seen]
    codes, share = run.codes[:, seen].T.astype(np.int64), run.weight[seen] / run.weight[seen].sum()
    columns, found = run.learner.columns, []
    # conditions on metadata: each of a column in use, and all of each leaf
    current = len(columns) - 1
    used = {int(i) for tree in run.trees for i in tree.column[tree.low < tree.high]} - {current}
    single = [condition for i in sorted(used) for condition in columns[i].conditions(i)]
    subgroups: dict[tuple[Condition, ...], None] = {(condition,): None for condition in single}
    for tree in run.trees:
        for leaf in range(len(tree.leaf)):
            conditions = [c for c in tree.conditions(leaf, columns) if c.column != current]
            if conditions:
                subgroups[tuple(sorted(conditions))] = None
    for subgroup in subgroups:
        member = np.logical_and.reduce([condition.holds(codes) for condition in subgroup])
        size = float(share @ member)
        if not size:
            continue
        mean = predictions.mean(correction, share * member)
        found.append((math.sqrt(size) * float(np.linalg.norm(mean)), subgroup, member, mean, size))
    kept: list[Any] = []
    for one in sorted(found, key=lambda each: -each[0]):
        if len(kept) < _MAX_SHOWN and not any(_alike(one[2], other[2]) for other in kept):
            kept.append(one)
    return [
        Correction(conjunction_text(columns, subgroup), mean.tolist(), size)
        for _, subgroup, _, mean, size in kept
    ]


def _alike(member: NDArray[np.bool_], other: NDArray[np.bool_]) -> bool:
    """Return True if two subgroups share more than half of what they have together."""
    return bool(2 * (member & other).sum() > (member | other).sum())
