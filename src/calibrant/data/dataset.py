"""Rows of prediction files for calibrators: read whole, or walked in blocks of bounded size."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import (
    IGNORED,
    IntArray,
    Values,
    as_labels,
    as_weight,
    check_some,
    logits_from_probs,
)
from calibrant._core.chunks import examples
from calibrant._core.logpartition import Records, concatenate, tabulate
from calibrant.data import Part, PredictionFile, Split, Stored, open_predictions
from calibrant.data.shards import BLOCK, Report, over_parts

T = TypeVar("T")
Array: TypeAlias = NDArray[Any]
Progress: TypeAlias = Callable[[int, int], object]
"""Told (examples done, examples in all)."""
Data: TypeAlias = "str | os.PathLike[str] | Mapping[str, Values]"
"""A prediction file, or arrays under the names that they would have in one."""


@dataclass(frozen=True, eq=False)
class _Held(Stored):
    """An array in memory that is read like a stored one."""

    values: Array = field(repr=False)

    @property
    def suffix(self) -> str:
        """None: there is no file to open."""
        return ""

    def blocks(self, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows at a time."""
        for start in range(0, len(self.values), rows):
            yield self.values[start : start + rows]


def _held(key: str, values: Values, path: str = "the arrays") -> _Held:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    array = np.asarray(values)
    return _Held(path, key, array.shape, array.dtype, array)


def opened(data: Data) -> PredictionFile:
    """Open a prediction file, or take arrays for one.

    >>> opened({"val_logits": np.zeros((3, 2)), "val_labels": [0, 1, 1]}).splits
    ['val']
    """
    if not isinstance(data, Mapping):
        return open_predictions(data)
    return PredictionFile("the arrays", [{key: _held(key, data[key]) for key in data}])


class Block(NamedTuple):
    """Some rows of a split, side by side; probabilities have become logits."""

    logits: Array
    labels: Any = None
    weight: Array | None = None
    features: Array | None = None
    fold: Array | None = None
    floored: int = 0


@dataclass
class Source:
    """Rows to fit on or to measure: a split and the columns of it that matter.

    What is read whole is kept, so that several methods share it.
    """

    file: PredictionFile
    split: Split
    weight: str | None = None
    groups: str | None = None

    def walk(
        self,
        use: Callable[[Block], T],
        *columns: str,
        executor: Executor | None = None,
        progress: Progress | None = None,
    ) -> list[T]:
        """Return ``use(block)`` of blocks of bounded size; ``use`` travels to the executor."""
        wanted = {name: name for name in ("logits", *columns)}
        wanted |= {"weight": self.weight} if self.weight and "labels" in columns else {}
        shapes = [self.split.parts[0].stored(column).shape[1:] for column in wanted.values()]
        rows = max(1, BLOCK // max(1, sum(map(math.prod, shapes))))
        task = partial(_over_blocks, _Reading(use, wanted, self.split.domain, rows))
        parts = over_parts(task, self.split.parts, executor, progress)
        return [found for part in parts for found in part]

    def records(
        self, executor: Executor | None = None, progress: Progress | None = None
    ) -> Records:
        """The log-partition table of all labelled rows; logits are never held whole."""
        found = self.walk(_tabulated, "labels", executor=executor, progress=progress)
        warn_of_zeros(sum(floored for _, floored in found))
        parts = [records for records, _ in found if records is not None]
        check_some(len(parts))
        return concatenate(parts)

    @cached_property
    def labels(self) -> IntArray:
        """Labels of all rows; where the weight is 0, the label is ignored."""
        with placed(self.file.path):
            labels = as_labels(self.split.read("labels"))
            if self.weight is None:
                return labels
            weight = as_weight(self.split.read(self.weight), labels.shape)
            return np.where(weight.reshape(labels.shape) > 0, labels, IGNORED)

    @cached_property
    def logits(self) -> Array:
        """All logits at once."""
        values = self.split.read("logits")
        if self.split.domain == "logits":
            return values
        with placed(self.file.path):
            logits, floored = logits_from_probs(values)
        warn_of_zeros(floored)
        return logits

    @cached_property
    def features(self) -> Array:
        """All features at once."""
        return self.split.read("features")

    @cached_property
    def group_values(self) -> Array | None:
        """The group of each row."""
        return None if self.groups is None else self.split.read(self.groups)

    @property
    def has_features(self) -> bool:
        """Whether every shard has features."""
        return "features" in self.split.keys

    @property
    def has_head(self) -> bool:
        """Whether the file has the last linear layer; a column of that name is none."""
        found = next((shard["weight"] for shard in self.file.shards if "weight" in shard), None)
        return found is not None and len(found.shape) == 2

    def with_column(self, name: str, values: Array) -> Source:
        """The same rows with a column added, or another in its place."""
        ends = np.cumsum([part.rows for part in self.split.parts])
        pieces = np.split(values, ends[:-1])
        parts = [
            Part({**part.columns, name: _held(name, piece, part.path)})
            for part, piece in zip(self.split.parts, pieces, strict=True)
        ]
        return Source(self.file, replace(self.split, parts=parts), self.weight, self.groups)


@dataclass(frozen=True)
class _Reading:
    """What is done with every block; travels to other processes."""

    use: Callable[[Block], Any]
    columns: Mapping[str, str]
    domain: str
    rows: int

    def block(self, values: Sequence[Array]) -> Block:
        """Name the columns of a block."""
        named: dict[str, Any] = dict(zip(self.columns, values, strict=True))
        found = Block(**named)
        if self.domain == "logits":
            return found
        logits, floored = logits_from_probs(found.logits)
        return found._replace(logits=logits, floored=floored)


def _over_blocks(task: _Reading, part: Part, report: Report) -> list[Any]:
    found, done = [], 0
    for values in part.blocks(task.rows, list(task.columns.values())):
        with placed(part.path, done):
            found.append(task.use(task.block(values)))
        done += len(values[0])
        report(len(values[0]))
    return found


@contextmanager
def placed(path: str, row: int = 0) -> Iterator[None]:
    """Say in which file, and after which row, the input was wrong."""
    try:
        yield
    except (TypeError, ValueError) as problem:
        where = f"{path}, counting from row {row}" if row else path
        kind = TypeError if isinstance(problem, TypeError) else ValueError
        raise kind(f"{where}: {problem}") from problem


def _tabulated(block: Block) -> tuple[Records | None, int]:
    given = examples(block.logits, block.labels, block.weight)
    some = (given.labels != IGNORED).any()
    return tabulate(given) if some else None, block.floored


def warn_of_zeros(count: int) -> None:
    """Warn of probabilities that had to be changed to have a logarithm."""
    if count:
        warnings.warn(
            f"{count} probabilities are exactly 0 and were floored: the result depends on the "
            "floor; save logits to avoid it",
            stacklevel=4,
        )
