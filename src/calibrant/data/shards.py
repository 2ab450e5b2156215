"""Shards of a split, and the walk over their chunks, here or over an executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import torch

from calibrant._core.checks import logits_from_probs
from calibrant._core.chunks import Progress
from calibrant._core.messages import comma_separated
from calibrant.data.columns import Column
from calibrant.data.formats import Array
from calibrant.data.keys import SCORES, check_numbers

T = TypeVar("T")
Report: TypeAlias = Callable[[int], object]
"""Called with the number of rows of each chunk when it is done."""


@dataclass(frozen=True)
class Chunk:
    """Rows that are held in memory at one time, by column; ``"logits"`` are never probabilities.

    ``floored`` counts the probabilities of zero that were floored to have a logarithm.
    """

    columns: dict[str, Array]
    floored: int = 0

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


@dataclass(frozen=True)
class Shard:
    """One file's share of a split: headers only, so that it travels to other processes.

    ``columns`` has the arrays by their name within the split: ``logits``, ``labels`` and so on.
    """

    columns: Mapping[str, Column]

    @property
    def domain(self) -> str | None:
        """``"logits"`` or ``"probs"``, logits first; None if the shard has neither."""
        return next((name for name in SCORES if name in self.columns), None)

    @property
    def path(self) -> str:
        """File of the scores, or of the features if there are no scores."""
        return self._main.path

    @property
    def rows(self) -> int:
        """Number of examples."""
        return self._main.shape[0]

    @property
    def _main(self) -> Column:
        return self.columns[self.domain or "features"]

    def column(self, name: str) -> Column:
        """Return a column, checked; ``"logits"`` stands for probs if the domain is probs."""
        stored = self.domain if name == "logits" else name
        if stored is None or stored not in self.columns:
            wanted = "logits or probs" if name == "logits" else name
            raise ValueError(
                f"{self.path} has no {wanted} in this split; found {comma_separated(self.columns)}"
            )
        column = self.columns[stored]
        check_numbers(column, stored in (*SCORES, "features"))
        if column.shape[0] != self.rows:
            raise ValueError(
                f"{column.path}: {column.key} has {column.shape[0]} rows, but {self._main.key} has "
                f"{self.rows}; every column of a split needs one row per example"
            )
        return column

    def chunks(self, rows: int, columns: Sequence[str]) -> Iterator[tuple[Array, ...]]:
        """Yield ``rows`` rows of ``columns`` at a time, side by side and as they are stored."""
        if rows < 1:
            raise ValueError(f"a chunk must have at least 1 row, got rows={rows}")
        yield from zip(*(self.column(name).chunks(rows) for name in columns), strict=True)

    def check_unchanged(self) -> None:
        """Raise if a file of the shard has changed since it was opened."""
        for column in self.columns.values():
            column.check_unchanged()


def _nothing(*_: object) -> None:
    """Do nothing."""


@dataclass
class Place:
    """The place of an error: a file, and the first row of the chunk that is worked on."""

    path: str
    row: int = 0
    reading: bool = False  # errors of readers name the file themselves
    check: Callable[[], object] = _nothing  # raises if a change of the file explains the error


@contextmanager
def located(place: Place) -> Iterator[None]:
    """Put the file, and the row after which the input was wrong, in front of an error."""
    try:
        yield
    except (TypeError, ValueError) as problem:
        if place.reading:
            raise
        place.check()
        where = f"{place.path}, counting from row {place.row}" if place.row else place.path
        kind = TypeError if isinstance(problem, TypeError) else ValueError
        raise kind(f"{where}: {problem}") from problem


@dataclass(frozen=True)
class ShardTask(Generic[T]):
    """The work on every shard; travels to other processes."""

    task: Callable[[Iterator[Chunk]], T]
    columns: Mapping[str, str]
    converted: bool
    rows: int

    def __call__(self, shard: Shard, report: Report) -> T:
        """Return the result of one shard."""
        place = Place(shard.path, check=shard.check_unchanged)
        with located(place):
            return self.task(self._chunks(shard, place, report))

    def _chunks(self, shard: Shard, place: Place, report: Report) -> Iterator[Chunk]:
        place.reading = True
        for values in shard.chunks(self.rows, list(self.columns.values())):
            place.reading = False
            count = len(values[0])
            yield self._chunk(dict(zip(self.columns, values, strict=True)))
            del values  # else this chunk would stay in memory while the next one is read
            place.row += count
            report(count)
            place.reading = True
        place.reading = False

    def _chunk(self, columns: dict[str, Array]) -> Chunk:
        if not self.converted:
            return Chunk(columns)
        logits, floored = logits_from_probs(columns["logits"])
        return Chunk({**columns, "logits": logits}, floored)


def over_shards(
    work: ShardTask[T],
    shards: Sequence[Shard],
    executor: Executor | None,
    progress: Progress | None,
) -> Iterator[T]:
    """Yield the result of every shard, in order."""
    total, done = sum(shard.rows for shard in shards), 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    if executor is None:
        for shard in shards:
            yield work(shard, report)
        return
    alone = partial(_in_worker, work, os.getpid())
    for shard, result in zip(shards, executor.map(alone, shards), strict=True):
        report(shard.rows)
        yield result


def _in_worker(work: ShardTask[T], home: int, shard: Shard) -> T:
    """Work on a shard; in a process of its own on one thread, since the pool uses the cores."""
    if os.getpid() != home:
        torch.set_num_threads(1)
    return work(shard, _nothing)  # progress cannot be reported from another process
