"""Shards of a split, and the walk over their chunks, here or over an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from calibrant._core.checks import IGNORED, BoolArray, as_labels, as_weight, known_rows
from calibrant._core.engines import current_work, mapped
from calibrant._core.messages import comma_separated, printable
from calibrant._core.rows import Sample
from calibrant.data.columns import SCORES, Column
from calibrant.data.formats import Array

T = TypeVar("T")
USUAL_LABELS = ("label", "labels", "truth", "target", "y", "y_true", "outcome", "answer", "class")
"""Names of columns that an error proposes as labels."""
Report: TypeAlias = Callable[[int], object]  # called with the number of rows of each chunk


@dataclass(frozen=True)
class Chunk:
    """Rows that are held in memory at one time, by column; ``"logits"`` are never probabilities."""

    columns: dict[str, Array]

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    @property
    def logits(self) -> Array:
        """Logits of the rows."""
        return self.columns["logits"]

    @property
    def labels(self) -> Array:
        """Labels of the rows."""
        return self.columns["labels"]

    def get(self, column: str) -> Array | None:
        """Return a column, or None if the walk has none of that name."""
        return self.columns.get(column)

    @property
    def counted(self) -> BoolArray:
        """True where labels count; the other rows may hold anything."""
        labels, weight = as_labels(self.labels), self.get("sample_weight")
        kept = labels != IGNORED
        if weight is not None:
            kept &= as_weight(weight, labels.shape).reshape(labels.shape) > 0
        return np.asarray(kept)


@dataclass(frozen=True)
class Shard:
    """One file's share of a split: headers only, so that it travels to other processes."""

    columns: Mapping[str, Column]  # by their names within the split, such as logits
    first: int = 0  # number of its first row in the split

    @property
    def domain(self) -> str | None:
        """``"logits"`` or ``"probs"``, logits first; None if the shard has neither."""
        return next((name for name in SCORES if name in self.columns), None)

    @property
    def main(self) -> Column:
        """The scores, or the features if there are no scores."""
        return self.columns[self.domain or "features"]

    @property
    def path(self) -> str:
        """File of the scores or features."""
        return self.main.path

    @property
    def rows(self) -> int:
        """Number of examples."""
        return self.main.shape[0]

    def column(self, name: str) -> Column:
        """Return a column, checked; ``"logits"`` stands for probs if the domain is probs."""
        stored = self.domain if name == "logits" else name
        if stored is None or stored not in self.columns:
            wanted = "logits or probs" if name == "logits" else name
            keys = [key for key in self.columns if key == key.strip()]
            remedy = ""
            if name == "labels":
                usual = next((key for key in keys if key.lower() in USUAL_LABELS), "COLUMN")
                remedy = f"; name it: --labels {usual}, or labels={usual!r} of open_dataset"
            there = f"found {comma_separated(keys)}{remedy}"
            raise ValueError(f"{self.path} has no {wanted} in this split; {there}")
        column = self.columns[stored]
        column.check_dtype(numeric=stored in (*SCORES, "features"))
        if column.shape[0] != self.rows:
            raise ValueError(
                f"{column.path}: {column.key} has {column.shape[0]} rows, but {self.main.key} has "
                f"{self.rows}; every column of a split needs one row per example"
            )
        return column

    def chunks(self, rows: int, columns: Sequence[str]) -> Iterator[tuple[Array, ...]]:
        """Yield ``rows`` rows of ``columns`` at a time, side by side and as they are stored."""
        if rows < 1:
            raise ValueError(f"a chunk must have at least 1 row, got rows={rows}")
        yield from zip(*(self.column(name).chunks(rows) for name in columns), strict=True)


def _agreeing(shards: Sequence[Shard], name: str) -> list[Column]:
    """Return a column of all shards, which may differ in the number of rows only."""
    columns = [shard.column(name) for shard in shards]
    for column in columns:
        if column.shape[1:] != columns[0].shape[1:]:
            raise ValueError(
                f"{columns[0].path} has {name} of shape {columns[0].shape}, but {column.path} has "
                f"{column.shape}; shards of a split may differ in the number of rows only"
            )
    return columns


@dataclass
class Place:
    """The first row of the chunk that is worked on."""

    row: int = 0
    reading: bool = False  # errors of readers name the file themselves


@contextmanager
def located(path: str, shard: Shard | None = None) -> Iterator[Place]:
    """Put the file, and the row after which the input was wrong, in front of an error."""
    place = Place()
    try:
        yield place
    except (TypeError, ValueError) as problem:
        if place.reading:
            raise
        if shard is not None:
            for column in shard.columns.values():
                column.check_unchanged()  # a change of the file may explain the error
        where = f"{path}, counting from row {place.row}" if place.row else path
        kind = TypeError if isinstance(problem, TypeError) else ValueError
        raise kind(printable(f"{where}: {problem}")) from problem


def _run_shard(
    task: Callable[[Iterator[Chunk]], T],
    columns: Mapping[str, str],
    convert: Callable[[Array], Array] | None,
    rows: int,
    sample: Sample | None,
    shard: Shard,
    report: Report,
) -> T:
    """Return ``task(chunks)`` of one shard; ``convert`` makes logits of what is stored.

    Labels of rows that are not in a sample are ignored.
    """

    def chunks(place: Place) -> Iterator[Chunk]:
        place.reading = True
        for values in shard.chunks(rows, list(columns.values())):
            place.reading = False
            count = len(values[0])
            named = dict(zip(columns, values, strict=True))
            if convert is not None:
                named["logits"] = convert(named["logits"])
            if sample is not None and "labels" in named:
                kept = sample.keeps(shard.first + place.row, count)
                named["labels"] = _sampled_labels(named["labels"], kept)
            yield Chunk(named)
            del values, named  # else they would stay in memory while the next chunk is read
            place.row += count
            report(count)
            place.reading = True
        place.reading = False

    with located(shard.path, shard) as place, known_rows():
        return task(chunks(place))


def _sampled_labels(labels: Array, kept: BoolArray) -> Array:
    """Return labels ``(rows, ...)``, ignored in the rows that are not kept."""
    each = kept.reshape(-1, *[1] * (labels.ndim - 1))
    return np.where(each, labels, np.array(IGNORED, np.promote_types(labels.dtype, np.int16)))


class NoGoodShard(ValueError):
    """Every shard of a dataset is bad; the message has the first reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"every shard of {path} is bad; the first: {reason}")


@dataclass(frozen=True)
class BadShard:
    """The message of the error that a shard ended with."""

    message: str


def _run_or_refuse(
    work: Callable[[Shard, Report], T], shard: Shard, report: Report
) -> T | BadShard:
    """Work on a shard; return the message if it cannot be read, or has bad rows."""
    try:
        return work(shard, report)
    except (TypeError, ValueError, OSError) as problem:
        return BadShard(str(problem))


def run_all(work: Callable[[Any, Report], T], items: Sequence[Any], report: Report) -> Iterator[T]:
    """Yield the result of each item, which has ``rows``, in order, here or from an executor."""
    executor = current_work().executor
    if executor is None:
        yield from (work(item, report) for item in items)
        return
    results = mapped(executor, partial(_unreported, work), items)
    for item, result in zip(items, results, strict=True):
        report(item.rows)
        yield result


def _unreported(work: Callable[[Any, Report], T], item: object) -> T:
    """Work on an item without progress, which cannot be reported from another process."""
    return work(item, lambda rows: None)
