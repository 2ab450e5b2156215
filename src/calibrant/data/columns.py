"""Arrays of a dataset: their headers, and rows read through handles that stay open."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from calibrant._core.checks import Values
from calibrant.data.formats import READERS, Array, Fingerprint, NpyReader, Reader, changed

CHUNK = 1 << 22
"""Numbers read at a time: 32 MiB of float64, enough work for every core."""
MOST_OPEN = 64
"""Files of a dataset that are kept open."""


def native(values: Array) -> Array:
    """Return ``values`` in the byte order of this machine, the only one that torch takes."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


class OpenFiles:
    """The files of a dataset that were used last; another process opens them anew."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()

    def reader(self, path: str, fingerprint: Fingerprint | None = None) -> Reader:
        """Return an open file, which must still be the one with the fingerprint."""
        with self._lock:
            reader = self._readers.pop(path, None) or READERS[Path(path).suffix](path)
            self._readers[path] = reader
            if len(self._readers) > MOST_OPEN:
                self._readers.popitem(last=False)  # closed when nobody reads from it any more
        if fingerprint not in (None, reader.fingerprint):
            raise changed(path)
        return reader

    def columns(self, path: str) -> dict[str, Column]:
        """Return the arrays of a file by key."""
        reader = self.reader(path)
        return {
            key: StoredColumn(path, key, *header, self, reader.fingerprint)
            for key, header in reader.headers.items()
        }


@dataclass(frozen=True, eq=False)
class Column:
    """One array of a dataset: ``key`` in the file ``path``, with one row per example."""

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def width(self) -> int:
        """Number of values of a row."""
        return math.prod(self.shape[1:])

    def chunks(self, rows: int | None = None) -> Iterator[Array]:
        """Yield ``rows`` rows at a time, by default a few million numbers."""
        yield from self._chunks(max(1, CHUNK // max(1, self.width)) if rows is None else rows)

    def _chunks(self, rows: int) -> Iterator[Array]:
        raise NotImplementedError

    def mapped(self) -> Array | None:
        """Return the whole array without reading it, where that is possible."""
        return None

    def check_unchanged(self) -> None:
        """Raise if the file has changed since it was opened."""


@dataclass(frozen=True, eq=False)
class StoredColumn(Column):
    """An array in a file."""

    files: OpenFiles = field(repr=False)
    fingerprint: Fingerprint = field(repr=False)

    def _reader(self) -> Reader:
        return self.files.reader(self.path, self.fingerprint)

    def _chunks(self, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows at a time; at the end the file must be unchanged."""
        reader = self._reader()
        try:
            yield from map(native, reader.chunks(self.key, rows))
        except ValueError:  # a file that is being rewritten may look damaged
            reader.check_unchanged()
            raise
        reader.check_unchanged()

    def mapped(self) -> Array | None:
        """Return a ``.npy`` file as a copy-on-write map: changes stay out of the file."""
        reader = self._reader()
        return native(reader.mapped("c")) if isinstance(reader, NpyReader) else None

    def check_unchanged(self) -> None:
        """Raise if the file has changed since it was opened."""
        self._reader().check_unchanged()


@dataclass(frozen=True, eq=False)
class ArrayColumn(Column):
    """An array in memory."""

    values: Array = field(repr=False)

    def _chunks(self, rows: int) -> Iterator[Array]:
        for start in range(0, len(self.values), rows):
            yield self.values[start : start + rows]


def array_column(key: str, values: Values, path: str = "the arrays") -> ArrayColumn:
    """Return an array or tensor as a column; NumPy has no bfloat16, which is widened."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    array = np.asarray(values)
    return ArrayColumn(path, key, array.shape, array.dtype, array)


def read_all(columns: Sequence[Column]) -> Array:
    """Return columns one after another; a single ``.npy`` file is mapped, not loaded."""
    first = columns[0]
    if len(columns) == 1 and (mapped := first.mapped()) is not None:
        return mapped
    dtype = np.result_type(*(column.dtype for column in columns)).newbyteorder("=")
    if not dtype.itemsize:  # text, whose length the header does not tell
        chunks = (chunk for column in columns for chunk in column.chunks())
        return np.concatenate([np.empty(0, dtype), *chunks])
    return fill(
        np.empty((sum(column.shape[0] for column in columns), *first.shape[1:]), dtype), columns
    )


def fill(whole: Array, columns: Sequence[Column]) -> Array:
    """Copy columns into an array, one after another."""
    start = 0
    for column in columns:
        for chunk in column.chunks():
            whole[start : start + len(chunk)] = chunk
            start += len(chunk)
    return whole
