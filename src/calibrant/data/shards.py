"""Columns of files, shards of a split, and the walk over their chunks, here or over an executor."""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    Values,
    as_labels,
    as_weight,
    known_rows,
)
from calibrant._core.class_names import as_array
from calibrant._core.engines import current_work, mapped
from calibrant._core.messages import comma_separated, did_you_mean, printable
from calibrant.data.formats import Array, Fingerprint, NoArrayError, Reader, _changed, _damaged

T = TypeVar("T")
CHUNK = 1 << 22  # numbers read at a time: 32 MiB of float64, enough work for every core
MAX_OPEN_FILES = 64  # files of a dataset that are kept open

SCORES = ("logits", "probs")
ARRAY_KEYS = (
    *SCORES,
    "labels",
    "features",
)  # what is read beside columns with a value for each row
HEAD = (("head_weight", "head_bias"), ("weight", "bias"))  # keys of the last linear layer
CLASS_NAMES = "class_names"
LABEL_NAMES = ("labels", "label", "y_true", "y", "target")  # of columns of tables
VAL_NAMES = ("val", "validation", "valid", "dev")  # aliases, if there is only one
NAMED_SPLITS = ("train", "test", *VAL_NAMES)  # files of these names are those splits

USUAL_LABELS = ("label", "labels", "truth", "target", "y", "y_true", "outcome", "answer", "class")
"""Names of columns that an error proposes as labels."""
Report: TypeAlias = Callable[[int], object]  # called with the number of rows of each chunk

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SPLIT_KEY = re.compile(r"(?:(.+)_)?(?:logits|probs|features)")


class OpenFiles:
    """The files of a dataset that were used last; another process opens them anew."""

    def __init__(self, formats: Mapping[str, Callable[[str], Reader]]) -> None:
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._formats, self._lock = formats, threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self._formats,)

    def reader(self, path: str, fingerprint: Fingerprint | None = None) -> Reader:
        """Return an open file, which must still be the one with the fingerprint."""
        with self._lock:
            reader = self._readers.pop(path, None) or self._formats[Path(path).suffix](path)
            self._readers[path] = reader
            if len(self._readers) > MAX_OPEN_FILES:
                self._readers.popitem(last=False)  # closed when nobody reads from it any more
        if fingerprint not in (None, reader.fingerprint):
            raise _changed(path)
        return reader

    def columns(self, path: str) -> dict[str, Column]:
        """Return the arrays of a file by key."""
        reader = self.reader(path)
        return {
            key: Column(path, key, *header, files=self, fingerprint=reader.fingerprint)
            for key, header in reader.headers.items()
        }


@dataclass(frozen=True, eq=False)
class Column:
    """One array of a dataset: ``key`` in the file ``path``, or ``values`` in memory."""

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    exact: bool = True  # False if the text of other values is read
    values: Array | None = field(default=None, repr=False)
    files: OpenFiles | None = field(default=None, repr=False)
    fingerprint: Fingerprint | None = field(default=None, repr=False)
    view: Callable[[Array], Array] | None = field(default=None, repr=False)  # of rows that are read

    @property
    def width(self) -> int:
        """Number of values of a row."""
        return math.prod(self.shape[1:])

    def chunks(self, rows: int | None = None) -> Iterator[Array]:
        """Yield ``rows`` rows at a time, by default a few million numbers."""
        rows = rows or max(1, CHUNK // max(1, self.width))
        if self.values is not None:
            parts = (self.values[i : i + rows] for i in range(0, len(self.values), rows))
            stored = parts if self.shape else iter([self.values])
            yield from stored if self.view is None else map(self.view, stored)
            return
        reader = self._reader()
        try:
            stored = map(_native, reader.chunks(self.key, rows))
            yield from stored if self.view is None else map(self.view, stored)
        except ValueError:  # a file that is being rewritten may look damaged
            reader.check_unchanged()
            raise
        reader.check_unchanged()

    def seen_by(self, view: Callable[[Array], Array]) -> Column:
        """Return the column with a view of whatever is read, after the one it may have."""
        return replace(self, view=view if self.view is None else partial(_both, self.view, view))

    def mapped(self) -> Array | None:
        """Return a ``.npy`` file without reading it, as a copy-on-write map."""
        values = None if self.values is not None or self.view else self._reader().mapped()
        return None if values is None else _native(values)

    def arrow(self) -> Any:
        """Return a column of a ``.parquet`` file in the types of Arrow; None for other arrays."""
        return None if self.values is not None else self._reader().arrow(self.key)

    @property
    def table_names(self) -> Mapping[str, str]:
        """Names of the columns of its table; nothing if it is of no table."""
        return {} if self.values is not None else self._reader().table_names

    def check_unchanged(self) -> None:
        """Raise if the file has changed since it was opened."""
        if self.values is None:
            self._reader().check_unchanged()

    def check_dtype(self, numeric: bool) -> None:
        """Raise if there are pickled objects or, where numbers are needed, something else."""
        if self.dtype.hasobject:
            raise ValueError(
                f"{self.path}: {self.key} was saved as a pickle, which is never loaded since it "
                "could run any code; save it again as numbers: numpy.asarray(x, dtype='float32')"
            )
        if numeric and self.dtype.kind not in "biuf":
            raise ValueError(f"{self.path}: {self.key} must be numbers, got {self.dtype.name}")

    def _reader(self) -> Reader:
        assert self.files is not None
        return self.files.reader(self.path, self.fingerprint)


def _both(first: Callable[[Array], Array], second: Callable[[Array], Array], rows: Array) -> Array:
    return second(first(rows))


Columns: TypeAlias = dict[str, Column]  # of one file, or of a shard's .npy files, by key


def _seen_columns(
    columns: Mapping[str, Column], views: Mapping[str, Callable[[Array], Array]]
) -> Columns:
    """Return columns of which some are seen by a view, both by their keys."""
    return {
        key: column.seen_by(views[key]) if key in views else column
        for key, column in columns.items()
    }


def _native(values: Array) -> Array:
    """Return ``values`` in the byte order of this machine, the only one that torch takes."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def array_column(key: str, values: Values, path: str) -> Column:
    """Return an array or tensor as a column."""
    array = as_array(values)
    return Column(path, key, array.shape, array.dtype, values=array)


def read_all(columns: Sequence[Column], whole: Array | None = None) -> Array:
    """Return columns one after another, in ``whole``, in a new array, or as a mapped file.

    Missing values turn a new array of whole numbers into text.
    """
    given = whole is not None
    if whole is None:
        if len(columns) == 1 and (mapped := columns[0].mapped()) is not None:
            return mapped
        shape, dtype = joint_header(columns)
        if not dtype.itemsize:  # text, whose length the header does not tell
            chunks = (chunk for column in columns for chunk in column.chunks())
            return np.concatenate([np.empty(0, dtype), *chunks])
        try:
            whole = np.empty(shape, dtype)
        except MemoryError as error:
            key, path = columns[0].key, columns[0].path
            raise ValueError(
                f"{path}: {key} of shape {shape} needs more memory than there is; if the shape is "
                "wrong, the file is damaged"
            ) from error
    if not whole.shape:
        (whole[...],) = columns[0].chunks()
        return whole
    start = 0
    for column in columns:
        for chunk in column.chunks():
            if not np.can_cast(chunk.dtype, whole.dtype):
                if given:
                    raise NoArrayError("numbers beside text or missing values")
                whole = whole.astype(np.result_type(chunk, whole))
            whole[start : start + len(chunk)] = chunk
            start += len(chunk)
    if start != len(whole):
        raise _damaged(columns[0].path, f"{start} rows of {len(whole)} in {columns[0].key}")
    return whole


def joint_header(columns: Sequence[Column]) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Return shape and dtype of columns one after another."""
    dtype = np.result_type(*(column.dtype for column in columns)).newbyteorder("=")
    shape = columns[0].shape
    return (sum(column.shape[0] for column in columns), *shape[1:]) if shape else (), dtype


def _split_names(keys: Iterable[str]) -> list[str]:
    """Return the names of the splits among ``keys``; plain arrays are the split ``""``.

    Labels alone make no split: ``coarse_labels`` is a further column more often than not.
    """
    matches = (_SPLIT_KEY.fullmatch(key) for key in keys)
    return list(dict.fromkeys(match[1] or "" for match in matches if match))


def _owner(key: str, names: Collection[str]) -> tuple[str, str]:
    """Return the longest of ``names`` that starts ``key``, and the column that remains.

    >>> _owner("noise_3_labels", ["noise", "noise_3"]), _owner("_id", ["", "noise"])
    (('noise_3', 'labels'), ('', '_id'))
    """
    ends = [i for i in range(1, len(key)) if key[i] == "_" and key[:i] in names]
    return (key[: ends[-1]], key[ends[-1] + 1 :]) if ends else ("", key)


def full_key(split: str, column: str) -> str:
    """Return the key of a column of a split, such as ``val_labels``."""
    return f"{split}_{column}" if split else column


def _head_columns(arrays: Columns) -> list[Column]:
    """Return weight and bias of the last layer, or weight alone, or nothing.

    Plain ``weight`` is a layer only if it is 2-D: with one value per example it is a column.
    """
    for weight, bias in HEAD:
        if weight in arrays and (weight != "weight" or len(arrays[weight].shape) == 2):
            return [arrays[key] for key in (weight, bias) if key in arrays]
    return []


def columns_by_split(arrays: Columns) -> dict[str, Columns]:
    """Return the columns of each split of a file; single values and the last layer are none."""
    others = [arrays.get(CLASS_NAMES), *_head_columns(arrays)]
    columns = {key: c for key, c in arrays.items() if c.shape and c not in others}
    splits: dict[str, Columns] = {name: {} for name in _split_names(columns)}
    for key, column in columns.items():
        split, name = _owner(key, splits)
        if split in splits:  # further plain arrays belong to no split
            splits[split][name] = column
    return splits


class Sample(NamedTuple):
    """A share of all rows, each kept or not by its own number and a seed.

    Samples of one seed are disjoint if the ranges from ``start`` to ``start + share`` are.
    """

    share: float
    seed: int = 0
    start: float = 0.0

    def keeps(self, first: int, count: int) -> BoolArray:
        """Return which of ``count`` rows from number ``first`` on are in the sample.

        >>> sample = Sample(0.5)
        >>> whole = sample.keeps(0, 10_000)
        >>> bool((whole[300:400] == sample.keeps(300, 100)).all()), round(float(whole.mean()), 1)
        (True, 0.5)
        """
        place = uniform(self.seed, first, count)
        return np.asarray((place >= self.start) & (place < self.start + self.share))


def uniform(seed: int, first: int, count: int) -> FloatArray:
    """Return numbers in [0, 1) that belong to the rows from ``first`` on."""
    rows = np.arange(first, first + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed], np.uint64) + _GOLDEN)
        mixed = _mixed(start + (rows + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return pseudo-random numbers of consecutive ones by SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


Chunk: TypeAlias = dict[str, Array]
"""Rows that are held in memory at one time, by column; ``"logits"`` are never probabilities."""


def counted(chunk: Chunk) -> BoolArray:
    """Return where the labels of a chunk count; the other rows may hold anything."""
    labels, weight = as_labels(chunk["labels"]), chunk.get("sample_weight")
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
            hint, remedy = "", ""
            if name not in ("logits", "labels"):
                hint = did_you_mean(name, keys)
            if name == "labels":
                usual = next((key for key in keys if key.lower() in USUAL_LABELS), "COLUMN")
                remedy = f"; name it: --labels {usual}, or labels={usual!r} of open_dataset"
            there = f"{hint}found {comma_separated(keys)}{remedy}"
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
            yield named
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
