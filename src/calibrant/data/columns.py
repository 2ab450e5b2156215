"""Columns: the arrays of a dataset, their rows, and the keys that tell what they are.

Rows are read through handles that stay open.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from calibrant._core.checks import Values
from calibrant._core.class_names import as_array
from calibrant._core.messages import unknown_name
from calibrant.data.formats import Array, NoArrayError, Reader, _changed, _damaged
from calibrant.data.storage import Fingerprint

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

    >>> _owner("noise_3_labels", ["noise", "noise_3"]), owner("sample_weight", ["noise"])
    (('noise_3', 'labels'), ('', 'sample_weight'))
    """
    ends = [i for i, character in enumerate(key) if character == "_" and key[:i] in names]
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


def _under_keys(arrays: Columns, keys: Mapping[str, str]) -> Columns:
    """Put arrays of other names under the keys that they stand for, in every split.

    Arrays that have such a key already are left out.
    """
    renamed: Columns = {}
    for name, key in keys.items():
        stored = [each for each in arrays if each == name or each.endswith(f"_{name}")]
        if not stored:
            path = next(iter(arrays.values())).path
            raise ValueError(f"{path}: {unknown_name('array', name, arrays)}")
        renamed |= {each.removesuffix(name) + key: arrays[each] for each in stored}
    used = [*renamed.values()]
    return {key: column for key, column in arrays.items() if column not in used} | renamed


def _under_split(arrays: Columns, name: str) -> Columns:
    """Put the plain arrays of a file under the split ``name``."""
    plain = columns_by_split(arrays).get("", {}) if name else {}
    return {full_key(name, key) if key in plain else key: c for key, c in arrays.items()}
