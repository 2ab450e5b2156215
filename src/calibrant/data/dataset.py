"""Datasets: everything in a prediction file, opened once and walked in chunks of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from calibrant._core.checks import (
    IGNORED,
    LOOKED_AT,
    SUMS_TO_ONE,
    IntArray,
    Logits,
    Values,
    as_labels,
    as_weight,
    check_some,
    logits_from_probs,
    look_like_probs,
    warn,
)
from calibrant._core.chunks import Progress, examples
from calibrant._core.logpartition import Records, concatenate, tabulate
from calibrant._core.messages import comma_separated, unknown_name
from calibrant.data.columns import CHUNK, Column, OpenFiles, array_column, read_all
from calibrant.data.files import find_shards
from calibrant.data.formats import Array
from calibrant.data.keys import (
    CLASS_NAMES,
    SCORES,
    Arrays,
    check_head,
    check_numbers,
    columns_by_key,
    full_key,
    head_arrays,
    resolve_split,
    split_columns,
    split_names,
    under_split,
)
from calibrant.data.shards import Chunk, Place, Shard, ShardTask, located, over_shards

if TYPE_CHECKING:
    from typing_extensions import TypeIs

T = TypeVar("T")
Data: TypeAlias = "str | os.PathLike[str] | Mapping[str, Values] | Dataset"
"""A prediction file, folder or glob, arrays by the keys they would have in a file, or a dataset."""

FIT_SPLITS = ("val", "")
TEST_SPLITS = ("test", "")
ROLES = ("sample_weight", "by", "groups")
ARRAYS = "the arrays"
"""Stands for the path where there is no file."""


@dataclass(frozen=True)
class Split:
    """The examples under one name, over all shards that have it; the plain arrays are ``""``.

    What is read whole is kept, so that several methods share it.
    """

    dataset: Dataset
    name: str
    shards: list[Shard]

    @property
    def path(self) -> str:
        """Path of the dataset."""
        return self.dataset.path

    @property
    def rows(self) -> int:
        """Number of examples."""
        return sum(shard.rows for shard in self.shards)

    @property
    def keys(self) -> list[str]:
        """Columns that every shard has, as stored: with probs in place of logits, ``"probs"``."""
        first, *others = self.shards
        return [key for key in first.columns if all(key in shard.columns for shard in others)]

    @property
    def domain(self) -> str:
        """``"logits"`` or ``"probs"``; an error if the split has neither."""
        self.shards[0].column("logits")
        return "logits" if "logits" in self.shards[0].columns else "probs"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example's scores: ``(classes,)``, or ``()`` for one logit each."""
        return self.shards[0].column("logits").shape[1:]

    @property
    def classes(self) -> int:
        """Number of classes; one logit per example means two."""
        return self.shape[-1] if self.shape else 2

    @property
    def chunk_rows(self) -> int:
        """Number of rows whose scores make a chunk."""
        return max(1, CHUNK // max(1, math.prod(self.shape)))

    @property
    def has_features(self) -> bool:
        """Whether every shard has features."""
        return "features" in self.keys

    def read(self, column: str) -> Array:
        """Return the whole of a column as stored; a single ``.npy`` file is mapped, not loaded."""
        return read_all(_agreeing(self.shards, column))

    @cached_property
    def labels(self) -> IntArray:
        """Labels of all rows; if the weight is 0, the label is ignored."""
        with located(Place(self.path)):
            labels = as_labels(self.read("labels"))
            if self.weights is None:
                return labels
            weight = as_weight(self.weights, labels.shape).reshape(labels.shape)
            return np.where(weight > 0, labels, IGNORED)

    @cached_property
    def logits(self) -> Array:
        """Logits of all rows; probabilities have become logits."""
        values = self.read("logits")
        if self.domain == "logits":
            return values
        with located(Place(self.path)):
            logits, floored = logits_from_probs(values)
        warn_of_zeros(floored)
        return logits

    @cached_property
    def features(self) -> Array:
        """Features of all rows."""
        return self.read("features")

    @cached_property
    def weights(self) -> Array | None:
        """Weights of the examples, if a column of weights was named."""
        name = self.dataset.sample_weight
        return None if name is None else self.read(name)

    @cached_property
    def groups(self) -> Array | None:
        """Groups that stay together in folds, if a column of groups was named."""
        name = self.dataset.groups
        return None if name is None else self.read(name)

    def with_column(self, name: str, values: Array) -> Split:
        """Return the same rows with a column added or replaced."""
        ends = np.cumsum([shard.rows for shard in self.shards])
        shards = [
            Shard({**shard.columns, name: array_column(name, part, shard.path)})
            for shard, part in zip(self.shards, np.split(values, ends[:-1]), strict=True)
        ]
        return replace(self, shards=shards)

    def walk(
        self,
        task: Callable[[Iterator[Chunk]], T],
        *columns: str,
        rows: int | None = None,
        executor: Executor | None = None,
        progress: Progress | None = None,
    ) -> Iterator[T]:
        """Yield ``task(chunks)`` for every shard, in order.

        Parameters
        ----------
        task : callable
            Is called with an iterator over the chunks of a shard. A ValueError or TypeError that
            it raises is raised again with the file and the row in front.
        *columns : str
            Names of columns. ``"logits"`` are converted from probs where those are stored;
            ``"sample_weight"``, ``"by"`` and ``"groups"`` are the columns that the dataset names
            for these roles, and left out if it names none.
        rows : int, optional
            Rows of a chunk; by default as many as make about four million numbers.
        executor : concurrent.futures.Executor, optional
            Each shard is a task of its own, so ``task`` must be picklable for a process pool.
        progress : callable, optional
            Called with (rows done, rows in all): after each chunk, or each shard of an executor.
        """
        named = {role: getattr(self.dataset, role) for role in ROLES}
        wanted = {name: named.get(name, name) for name in columns}
        stored = {name: column for name, column in wanted.items() if column is not None}
        if rows is None:
            widths = [self.shards[0].column(column).width for column in stored.values()]
            rows = max(1, CHUNK // max(1, sum(widths)))
        converted = "logits" in stored and self.domain == "probs"
        work = ShardTask(task, stored, converted, rows)
        return over_shards(work, self.shards, executor, progress)

    def records(
        self, executor: Executor | None = None, progress: Progress | None = None
    ) -> Records:
        """Return the log-partition table of all labelled rows; logits are never held whole."""
        columns = ("logits", "labels", "sample_weight")
        shards = self.walk(_tabulated, *columns, executor=executor, progress=progress)
        tables = [table for shard in shards for table in shard]
        warn_of_zeros(sum(floored for _, floored in tables))
        records = [table for table, _ in tables if table is not None]
        check_some(len(records))
        return concatenate(records)

    def warn_if_probs(self) -> None:
        """Warn if the logits look like probabilities."""
        if self.domain == "probs":
            return
        rows = -(-LOOKED_AT // max(1, math.prod(self.shape[:-1])))
        for (first,) in self.shards[0].chunks(rows, ["logits"]):
            in_file = self.path != ARRAYS
            remedy = (
                f"save them as {full_key(self.name, 'probs')}" if in_file else "name them probs"
            )
            where = f" of {self.path}" if in_file else ""
            warn_if_probs(first, f"{full_key(self.name, 'logits')}{where}", remedy)
            break


@dataclass(frozen=True)
class Dataset:
    """Everything in a prediction file, in the shards of a folder or glob, or in some arrays.

    Attributes
    ----------
    path : str
    files : list of dict
        The arrays of each file by key.
    sample_weight, by, groups : str, optional
        Names of the columns with weights, with subgroups to report on, and with groups of examples
        that stay together in folds.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> data: Dataset = open_dataset(sample_path())
    >>> data.splits, data.split("test").classes, data.has_head
    (['val', 'test'], 10, True)
    """

    path: str
    files: list[Arrays]
    sample_weight: str | None = None
    by: str | None = None
    groups: str | None = None

    @cached_property
    def splits(self) -> list[str]:
        """Names of the splits, in the order of the file; ``""`` stands for the plain arrays."""
        names = (name for arrays in self.files for name in split_names(columns_by_key(arrays)))
        return list(dict.fromkeys(names))

    def find(self, name: str | None, prefer: Sequence[str] = ("",)) -> str | None:
        """Return the name of a split, or of the first of ``prefer`` that is there, or None."""
        wanted = prefer if name is None else [name]
        resolved = (resolve_split(candidate, self.splits) for candidate in wanted)
        return next((candidate for candidate in resolved if candidate is not None), None)

    def split(self, name: str | None = None, prefer: Sequence[str] = ("",)) -> Split:
        """Return the split ``name``, or without a name the first of ``prefer`` that is there.

        The names val, valid, validation and dev stand for each other where only one is there.
        """
        found = self.find(name, prefer)
        if found is None:
            raise self._no_split(prefer if name is None else [name])
        having = [a for a in self.files if found in split_names(columns_by_key(a))]
        shards = [Shard(split_columns(arrays, found)) for arrays in having]
        # An empty shard, as Spark writes them, may not even know its number of classes.
        shards = [shard for shard in shards if shard.rows] or shards[:1]
        _check_domains(shards)
        for column in (*SCORES, "labels", "features"):
            _agreeing([shard for shard in shards if column in shard.columns], column)
        return Split(self, found, shards)

    @property
    def has_head(self) -> bool:
        """Whether the dataset has the last linear layer."""
        return any(map(head_arrays, self.files))

    @cached_property
    def head(self) -> tuple[Array, Array] | None:
        """Weight (classes, features) and bias (classes,) of the last linear layer, if stored.

        The bias is zero if the layer has none. Shards come from one model: the first one that has
        the layer is used.
        """
        head = next(filter(None, map(head_arrays, self.files)), None)
        if head is None:
            return None
        check_head(head)
        weight, *bias = (read_all([column]) for column in head)
        return weight, bias[0] if bias else np.zeros(len(weight), weight.dtype)

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes, stored under ``class_names``."""
        stored = next((arrays[CLASS_NAMES] for arrays in self.files if CLASS_NAMES in arrays), None)
        if stored is None:
            return None
        check_numbers(stored, numeric=False)
        return [str(name) for name in read_all([stored])]

    def _no_split(self, wanted: Sequence[str]) -> ValueError:
        named = [name for name in self.splits if name]
        if not self.splits:
            keys = dict.fromkeys(key for arrays in self.files for key in arrays)
            problem = f"has no logits, probs or features, only {comma_separated(keys)}"
        elif not named:
            problem = f"has no split {wanted[0]!r}, only plain arrays: name no split"
        elif len(wanted) == 1 and wanted[0]:
            return ValueError(f"{self.path}: {unknown_name('split', wanted[0], named)}")
        else:
            asked = " or ".join(f"split {name!r}" if name else "plain arrays" for name in wanted)
            problem = f"has no {asked}: name one of {comma_separated(named)}"
        return ValueError(f"{self.path} {problem}")


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Open a prediction file; only headers are read.

    Parameters
    ----------
    path
        One of

        - a ``.npz``, ``.safetensors`` or ``.parquet`` file;
        - ``X_logits.npy``, ``X_labels.npy`` or ``logits.npy``: the files that share its prefix
          belong to it. They are plain arrays, unless X is train, val or test;
        - a folder of ``.npy`` files: each stem is a key, numbers in front (``0_logits.npy``)
          count shards;
        - a folder or glob of other files, or a glob of ``*_logits.npy``: shards, whose rows
          follow one another in natural order. Files named train, val or test are those splits.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> data = open_dataset(sample_path())
    >>> data.splits, data.split("val").read("logits").shape
    (['val', 'test'], (5000, 10))
    """
    files = OpenFiles()
    shards = []
    for shard in find_shards(os.fspath(path)):
        arrays: Arrays = {}
        for key, file in shard.paths.items():
            columns = files.columns(str(file))
            arrays |= {key: columns[file.stem]} if file.suffix == ".npy" else columns
        shards.append(under_split(arrays, shard.split))
    return Dataset(os.fspath(path), shards)


def as_dataset(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    features: Values | None = None,
    sample_weight: Values | str | None = None,
    by: Values | str | None = None,
    groups: Values | str | None = None,
) -> Dataset:
    """Return a path, a mapping of arrays or plain arrays as a dataset; a dataset as it is.

    Parameters
    ----------
    data : path, Dataset, mapping, or (..., classes) logits
    labels, probs, features : arrays, optional
        With plain arrays; ``probs`` stand in place of logits.
    sample_weight, by, groups : str or array, optional
        Names of columns or, beside arrays, the values.

    Examples
    --------
    >>> as_dataset({"val_logits": np.zeros((3, 2)), "val_labels": [0, 1, 1]}).splits
    ['val']
    >>> as_dataset(np.zeros((3, 2)), [0, 1, 1], sample_weight=[1, 2, 1]).sample_weight
    'sample_weight'
    """
    values = {"sample_weight": sample_weight, "by": by, "groups": groups}
    roles = {role: value for role, value in values.items() if value is not None}
    names: dict[str, Any] = {
        role: value if isinstance(value, str) else role for role, value in roles.items()
    }
    beside: dict[str, Any] = {r: value for r, value in roles.items() if not isinstance(value, str)}
    plain = {"labels": labels, "probs": probs, "features": features}
    beside |= {key: value for key, value in plain.items() if value is not None}
    if not is_data(data):
        beside |= {} if data is None else {"logits": data}
        return replace(_of_arrays(beside), **names)
    if isinstance(data, Mapping):
        return replace(_of_arrays({**data, **beside}), **names)
    if beside:
        raise TypeError(
            f"{comma_separated(beside)} must be the names of columns where the data are a file, "
            "got arrays"
        )
    dataset = data if isinstance(data, Dataset) else open_dataset(data)
    return replace(dataset, **names) if names else dataset


def is_data(data: object) -> TypeIs[Data]:
    """Whether something is a path, a mapping or a dataset, not an array of logits."""
    return isinstance(data, (str, os.PathLike, Mapping, Dataset))


def _of_arrays(arrays: Mapping[str, Values]) -> Dataset:
    return Dataset(ARRAYS, [{key: array_column(key, values) for key, values in arrays.items()}])


def _check_domains(shards: Sequence[Shard]) -> None:
    first = shards[0]
    for shard in shards:
        if shard.domain != first.domain:
            raise ValueError(
                f"{first.path} has {first.domain or 'no logits'}, but {shard.path} has "
                f"{shard.domain or 'no logits'}; all shards of a split need the same"
            )


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


def _tabulated(chunks: Iterator[Chunk]) -> list[tuple[Records | None, int]]:
    tables: list[tuple[Records | None, int]] = []
    for chunk in chunks:
        checked = examples(chunk.logits, chunk.labels, chunk.get("sample_weight"))
        some = (checked.labels != IGNORED).any()
        tables.append((tabulate(checked) if some else None, chunk.floored))
    return tables


# Warnings about the data.


def warn_of_zeros(count: int) -> None:
    """Warn of probabilities that had to be changed to have a logarithm."""
    if count:
        warn(
            f"{count} probabilities are exactly 0 and were floored: the result depends on the "
            "floor; save logits to avoid it",
            stacklevel=5,
        )


def warn_if_probs(logits: Logits, name: str, remedy: str) -> None:
    """Warn if the first rows of logits look like probabilities."""
    if look_like_probs(logits):
        warn(f"{name} look like probabilities: {SUMS_TO_ONE}; if they are, {remedy}", stacklevel=5)
