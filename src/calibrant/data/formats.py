"""Readers and writers of the file formats; rows are read a chunk at a time."""

from __future__ import annotations

import math
import os
import threading
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from calibrant._core.messages import comma_separated

Array: TypeAlias = NDArray[Any]
Fingerprint: TypeAlias = tuple[int, int, int, int]
"""Device, inode, size and time of the last change of a file."""

PARQUET_BUFFER = 2**18
"""Bytes of a parquet file that are read at once."""


class Header(NamedTuple):
    """Shape and dtype of a stored array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Reader:
    """An open file.

    Everything is read through one handle: if another file takes the name of this one, reading
    goes on with the old content. A file that is rewritten in place is detected by its fingerprint.
    """

    headers: dict[str, Header]

    def __init__(self, path: str) -> None:
        self.path = path
        self.stream = open(path, "rb")  # noqa: SIM115  # closed with the reader
        weakref.finalize(self, self.stream.close)
        self.fingerprint = _fingerprint(os.fstat(self.stream.fileno()))

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time; the last chunk may be shorter."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raise if the content of the open file has changed."""
        if _fingerprint(os.fstat(self.stream.fileno())) != self.fingerprint:
            raise changed(self.path)


def changed(path: str) -> ValueError:
    """Return the error for a file that is no longer the one that was opened."""
    return ValueError(
        f"{path} was replaced or rewritten while it was read; run again when it is complete"
    )


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _counts(header: Header, rows: int) -> Iterator[int]:
    """Yield the number of rows of each chunk."""
    for start in range(0, header.shape[0], rows):
        yield min(rows, header.shape[0] - start)


def _rows(
    stream: IO[bytes], path: str, header: Header, rows: int, order: Literal["C", "F"] = "C"
) -> Array:
    """Read the next rows of a stream."""
    shape = (rows, *header.shape[1:])
    raw = bytearray(stream.read(math.prod(shape) * header.dtype.itemsize))
    with _reading(path, TypeError):  # the buffer is too small
        return np.ndarray(shape, header.dtype, raw, order=order)


def _slices(whole: Array, rows: int) -> Iterator[Array]:
    """Yield copies of runs of rows: they may be changed, and do not keep the whole in memory."""
    for start in range(0, len(whole), rows):
        yield np.array(whole[start : start + rows], order="C")


@contextmanager
def _reading(path: str, *damage: type[Exception]) -> Iterator[None]:
    """Turn the errors by which a library reports a damaged file into one error."""
    try:
        yield
    except damage as error:
        raise _damaged(path, error) from error


def _damaged(path: str, problem: object) -> ValueError:
    return ValueError(f"{path} is damaged or incomplete ({problem}); copy or write it again")


# .npy


def _npy_header(stream: IO[bytes], path: str, key: str, size: int) -> tuple[Header, bool]:
    """Return the header of an array of ``size`` bytes, and whether it is in Fortran order."""
    with _reading(path, ValueError, EOFError, TokenError):
        version = npy.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = npy.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(stream)
        else:
            raise ValueError(f".npy versions 1.0 and 2.0 are known, got {version}")
    needed = stream.tell() + math.prod(shape) * dtype.itemsize
    if size < needed and not dtype.hasobject:  # the length of a pickle is not in its header
        raise _damaged(path, f"{key} has {size} bytes of {needed}")
    return Header(shape, dtype), fortran


class NpyReader(Reader):
    """A ``.npy`` file, which is mapped into memory; its key is the stem of its name."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        key = Path(path).stem
        header, self._fortran = _npy_header(self.stream, path, key, self.fingerprint[2])
        self.headers, self._start = {key: header}, self.stream.tell()
        self._lock = threading.Lock()

    def mapped(self, mode: Literal["r", "c"]) -> Array:
        """Map the array, read-only or copy-on-write."""
        ((shape, dtype),) = self.headers.values()
        order: Literal["F", "C"] = "F" if self._fortran else "C"
        return np.memmap(self.stream, dtype, mode, self._start, shape, order)

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows at a time."""
        if self._fortran:
            yield from _slices(self.mapped("r"), rows)
            return
        # Read, not mapped: access to a map of a file that has shrunk ends the process.
        header, place = self.headers[key], self._start
        for count in _counts(header, rows):
            with self._lock:
                self.stream.seek(place)
                chunk = _rows(self.stream, self.path, header, count)
            place += chunk.nbytes
            yield chunk


# .npz


_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError)


class NpzReader(Reader):
    """A ``.npz`` file; several of its arrays can be read side by side."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with _reading(path, *_ZIP_DAMAGE):
            self._archive = zipfile.ZipFile(self.stream)
            names = {info.filename: info.file_size for info in self._archive.infolist()}
            self.headers = {
                name.removesuffix(".npy"): self._header(name, size)
                for name, size in names.items()
                if name.endswith(".npy")
            }

    def _header(self, name: str, size: int) -> Header:
        with self._archive.open(name) as member:
            return _npy_header(member, self.path, name.removesuffix(".npy"), size)[0]

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows at a time; only arrays in Fortran order are read whole."""
        name, header = f"{key}.npy", self.headers[key]
        with _reading(self.path, *_ZIP_DAMAGE), self._archive.open(name) as member:
            size = self._archive.getinfo(name).file_size
            _, fortran = _npy_header(member, self.path, key, size)
            if fortran:
                whole = _rows(member, self.path, header, header.shape[0], "F")
                yield from _slices(whole, rows)
            else:
                for count in _counts(header, rows):
                    yield _rows(member, self.path, header, count)
            member.read(1)  # the checksum is compared at the end


def _write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as ``numpy.savez`` does, under any keys."""
    with zipfile.ZipFile(path, "w") as archive:
        for key, values in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as stream:
                npy.write_array(stream, values, allow_pickle=False)


# .safetensors


# NumPy has no bfloat16: it is widened, which loses nothing.
_SAFETENSORS_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"BF16": "float32", "F16": "float16", "F32": "float32", "F64": "float64"},
}


class SafetensorsReader(Reader):
    """A ``.safetensors`` file, which its library maps into memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._file = self._opened("np")
        views = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118
        self._stored = {key: view.get_dtype() for key, view in views.items()}
        for key, dtype in self._stored.items():
            if dtype not in _SAFETENSORS_DTYPES:
                raise ValueError(f"{path}: {key} is {dtype}; save it again as float32")
        self.headers = {
            key: Header(tuple(view.get_shape()), np.dtype(_SAFETENSORS_DTYPES[self._stored[key]]))
            for key, view in views.items()
        }
        self._torch_file = self._opened("pt") if "BF16" in self._stored.values() else self._file

    def _opened(self, framework: str) -> Any:
        from safetensors import SafetensorError, safe_open

        with _reading(self.path, SafetensorError):
            file = safe_open(self.path, framework)
        # The library opens by name: make sure that it mapped the file that we hold.
        if _fingerprint(os.stat(self.path)) != self.fingerprint:
            raise changed(self.path)
        return file

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows at a time."""
        widened, count = self._stored[key] == "BF16", self.headers[key].shape[0]
        view = (self._torch_file if widened else self._file).get_slice(key)
        for start in range(0, count, rows):
            chunk = view[start : min(start + rows, count)]
            yield chunk.float().numpy() if widened else chunk


def _write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write numbers; there is no dtype for text."""
    from safetensors.numpy import save_file

    for key, values in arrays.items():
        if values.dtype.name not in _SAFETENSORS_DTYPES.values():
            kind = values.dtype.name
            raise ValueError(f".safetensors cannot hold {key}, which is {kind}; write .npz")
    save_file(dict(arrays), path)


# .parquet


def _pyarrow() -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "parquet files need pyarrow: pip install 'calibrant[data]'", name="pyarrow"
        ) from error
    return pyarrow


class ParquetReader(Reader):
    """A ``.parquet`` file; a row is an example, and a list holds its logits."""

    def __init__(self, path: str) -> None:
        pa = _pyarrow()
        super().__init__(path)
        with self._reading():
            # Both options keep it from holding a row group, which may be the whole file, in memory.
            self._file = pa.parquet.ParquetFile(
                pa.PythonFile(self.stream), pre_buffer=False, buffer_size=PARQUET_BUFFER
            )
            rows = self._file.metadata.num_rows
            self.headers = {
                field.name: Header(
                    (rows, *_row_shape(self._file.metadata, field)), _parquet_dtype(field.type)
                )
                for field in self._file.schema_arrow
            }

    def _reading(self) -> Any:
        return _reading(self.path, _pyarrow().ArrowInvalid, OSError)

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield exactly ``rows`` rows at a time, across row groups."""
        with self._reading():
            batches = self._file.iter_batches(rows, columns=[key])
            yield from _rechunked((self._values(key, batch.column(0)) for batch in batches), rows)

    def _values(self, key: str, column: Any) -> Array:
        if not _is_list(column.type):
            return self._flat(key, column)
        width = self.headers[key].shape[1]
        lengths = _pyarrow().compute.list_value_length(column).fill_null(0).to_numpy()
        if (lengths != width).any():
            raise ValueError(
                f"{self.path}: the rows of {key} must have one length, got "
                f"{lengths[lengths != width][0]} values where the mean is {width}; write every "
                "class of every row"
            )
        return self._flat(key, column.flatten()).reshape(len(column), width)

    def _flat(self, key: str, values: Any) -> Array:
        if values.null_count:
            raise ValueError(f"{self.path}: {key} has missing values; drop or fill those rows")
        if self.headers[key].dtype.kind == "U":
            return np.array(values.to_pylist(), dtype=str)
        return np.asarray(values.to_numpy(zero_copy_only=False))


def _write_parquet(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write columns of equal length."""
    pa = _pyarrow()
    _check_table(arrays)
    table = pa.table({key: _parquet_column(values) for key, values in arrays.items()})
    pa.parquet.write_table(table, path)


def _is_list(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _row_shape(metadata: Any, field: Any) -> tuple[int, ...]:
    """Return the shape of a row; for lists, from the number of values in the footer."""
    if not _is_list(field.type):
        return ()
    if _pyarrow().types.is_fixed_size_list(field.type):
        return (field.type.list_size,)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    leaf = next(i for i, path in enumerate(paths) if path.startswith(f"{field.name}."))
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    values = sum(group.column(leaf).num_values for group in groups)
    return (values // max(1, metadata.num_rows),)


def _parquet_dtype(kind: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of numbers, or of a list's values; all else is read as text."""
    types = _pyarrow().types
    values = kind.value_type if _is_list(kind) else kind
    numeric = types.is_integer(values) or types.is_floating(values) or types.is_boolean(values)
    return np.dtype(values.to_pandas_dtype() if numeric else str)


def _rechunked(batches: Iterable[Array], rows: int) -> Iterator[Array]:
    """Yield chunks of exactly ``rows`` rows: a batch may end early, with its row group."""
    held: list[Array] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= rows:  # a batch has at most ``rows``: one chunk is full
            joined = np.concatenate(held)
            yield joined[:rows]
            held = [joined[rows:]]
    if sum(map(len, held)):
        yield np.concatenate(held)


def _check_table(arrays: Mapping[str, Array]) -> None:
    for key, values in arrays.items():
        if values.ndim not in (1, 2):
            raise ValueError(
                f"a .parquet file cannot hold {key} of shape {values.shape}, only (rows,) and "
                "(rows, classes); write .npz or .safetensors"
            )
    rows = {key: len(values) for key, values in arrays.items()}
    if len(set(rows.values())) > 1:
        counts = comma_separated(f"{key} {count}" for key, count in rows.items())
        raise ValueError(
            f"the columns of a .parquet file must have as many rows each, got {counts}; "
            "write a file per split, or .npz"
        )


def _parquet_column(values: Array) -> Any:
    pa = _pyarrow()
    flat = pa.array(values.reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


READERS: dict[str, type[Reader]] = {
    ".npz": NpzReader,
    ".safetensors": SafetensorsReader,
    ".parquet": ParquetReader,
    ".npy": NpyReader,
}
WRITERS = {".npz": _write_npz, ".safetensors": _write_safetensors, ".parquet": _write_parquet}
