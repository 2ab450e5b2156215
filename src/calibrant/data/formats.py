"""Readers and writers of the file formats; rows are read a chunk at a time."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from calibrant._core.messages import comma_separated
from calibrant._core.optional import needed
from calibrant.data.keys import LABEL_NAMES, SCORES, owner, split_names
from calibrant.data.storage import fingerprint, fingerprint_of, is_remote, open_stream

Array: TypeAlias = NDArray[Any]
Order: TypeAlias = Literal["C", "F"]


class Header(NamedTuple):
    """Shape and dtype of a stored array; not exact if the text of other values is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    exact: bool = True

    @property
    def rows(self) -> int:
        """Number of rows; a single value counts as one."""
        return self.shape[0] if self.shape else 1


class Batch(NamedTuple):
    """Rows of several columns of a table, each ``(rows, ...)``."""

    columns: dict[str, Array]
    unit: str  # in which places are counted: "line" or "row"
    numbers: Sequence[int]  # the place of each row in the file

    def place(self, row: int) -> str:
        """Return the place of a row, for messages."""
        return f"{self.unit} {self.numbers[row]}"


class NoArrayError(ValueError):
    """Values that no array can hold, such as lists of different lengths."""


class Reader:
    """An open file.

    Everything is read through one handle: if another file takes the name of this one, reading
    goes on with the old content. A file that is rewritten in place is detected by its fingerprint.
    """

    headers: dict[str, Header]
    table_names: Mapping[str, str] = {}
    """Names of the columns of a table, in their order, by those that are written by default."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.stream = open_stream(path)
        weakref.finalize(self, self.stream.close)
        self.fingerprint = fingerprint(path, self.stream)

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time; the last chunk may be shorter."""
        raise NotImplementedError

    def batches(self, keys: Sequence[str], rows: int) -> Iterator[Batch]:
        """Yield at most ``rows`` rows of several columns of a table at a time."""
        raise NotImplementedError

    def mapped(self) -> Array | None:
        """Return a ``.npy`` file as a copy-on-write map: changes stay out of the file."""
        return None

    def arrow(self, key: str) -> Any:
        """Return a column of a ``.parquet`` file in the types of Arrow; None for other files."""
        return None

    def check_unchanged(self) -> None:
        """Raise if the content of the open file has changed."""
        if fingerprint(self.path, self.stream) != self.fingerprint:
            raise changed(self.path)

    def reopened(self) -> IO[bytes]:
        """Open the file once more, for a place of its own to read from."""
        stream = open_stream(self.path)
        if fingerprint(self.path, stream) != self.fingerprint:
            stream.close()
            raise changed(self.path)
        return stream


def changed(path: str) -> ValueError:
    """Return the error for a file that is no longer the one that was opened."""
    return ValueError(
        f"{path} was replaced or rewritten while it was read; run again when it is complete"
    )


def _rows(
    stream: IO[bytes], path: str, header: Header, start: int, rows: int, order: Order = "C"
) -> Array:
    """Read rows from ``start`` on, which the stream has reached."""
    shape = (min(rows, header.shape[0] - start), *header.shape[1:]) if header.shape else ()
    raw = bytearray(stream.read(math.prod(shape) * header.dtype.itemsize))
    with reading(path, TypeError):  # the buffer is too small
        return np.ndarray(shape, header.dtype, raw, order=order)


def _slices(whole: Array, rows: int) -> Iterator[Array]:
    """Yield copies of runs of rows: they may be changed, and do not keep the whole in memory."""
    for start in range(0, len(whole), rows):
        yield np.array(whole[start : start + rows], order="C")


@contextmanager
def reading(path: str, *damage: type[Exception]) -> Iterator[None]:
    """Turn the errors by which a library reports a damaged file into one."""
    try:
        yield
    except damage as error:
        raise damaged(path, error) from error


def damaged(path: str, problem: object) -> ValueError:
    """Return the error for a file that cannot be read to its end."""
    return ValueError(f"{path} is damaged or incomplete ({problem}); copy or write it again")


# .npy


_NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_PARSING = threading.Lock()
"""Python 3.11 counts the depth of all parsers together: two threads in one raise SystemError."""


def _npy_header(stream: IO[bytes], path: str, key: str, size: int) -> tuple[Header, bool]:
    """Return the header of an array of ``size`` bytes, and whether it is in Fortran order."""
    with reading(path, ValueError, EOFError, SyntaxError, TokenError):
        version = npy.read_magic(stream)
        if version not in _NPY_HEADERS:
            raise ValueError(f".npy versions 1.0 and 2.0 are known, got {version}")
        with _PARSING:
            shape, fortran, dtype = _NPY_HEADERS[version](stream)
    if min(shape, default=0) < 0 or math.prod(filter(None, shape)) > sys.maxsize:
        raise damaged(path, f"{key} has the shape {shape}")
    # no element is without a byte: an array of very many of them would fit any file
    needed = stream.tell() + math.prod(shape) * max(1, dtype.itemsize)
    if size < needed and not dtype.hasobject:  # the length of a pickle is not in its header
        raise damaged(path, f"{key} has {size} bytes of {needed}")
    return Header(shape, dtype), fortran


class NpyReader(Reader):
    """A ``.npy`` file; its key is the stem of its name."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        key = Path(path).stem
        header, self._fortran = _npy_header(self.stream, path, key, self.fingerprint[1])
        self.headers, self._start = {key: header}, self.stream.tell()
        self._lock = threading.Lock()

    def mapped(self) -> Array | None:
        """Return the file as a copy-on-write map; None for an object of a store."""
        if is_remote(self.path):
            return None
        (header,) = self.headers.values()
        order: Order = "F" if self._fortran else "C"
        return np.memmap(self.stream, header.dtype, "c", self._start, header.shape, order)

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time."""
        header = self.headers[key]
        if self._fortran:
            whole = self.mapped()
            if whole is None:
                self.stream.seek(self._start)
                whole = _rows(self.stream, self.path, header, 0, header.rows, "F")
            yield from _slices(whole, rows)
            return
        # Read, not mapped: access to a map of a file that has shrunk ends the process.
        size = math.prod(header.shape[1:]) * header.dtype.itemsize
        for start in range(0, header.rows, rows):
            with self._lock:
                self.stream.seek(self._start + start * size)
                chunk = _rows(self.stream, self.path, header, start, rows)
            yield chunk


# .npz


_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError)


class ThreadedStream:
    """A stream in which every thread has a place of its own.

    From Python 3.12 on, opening an entry of a zip archive moves on from the place of the stream,
    which another thread that reads an entry may just have changed.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._lock, self._own = stream, threading.Lock(), threading.local()

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of this thread."""
        return getattr(self._own, "place", 0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the place of this thread, and return it."""
        with self._lock:
            self._stream.seek(self.tell())
            self._own.place = self._stream.seek(offset, whence)
        return self.tell()

    def read(self, size: int = -1) -> bytes:
        """Return bytes from the place of this thread on."""
        with self._lock:
            self._stream.seek(self.tell())
            content = self._stream.read(size)
        self._own.place = self.tell() + len(content)
        return content


class NpzReader(Reader):
    """A ``.npz`` file; several of its arrays can be read side by side."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with reading(path, *_ZIP_DAMAGE):
            self._archive = zipfile.ZipFile(cast(IO[bytes], ThreadedStream(self.stream)))
            self._sizes = {
                info.filename.removesuffix(".npy"): info.file_size
                for info in self._archive.infolist()
                if info.filename.endswith(".npy")
            }
            self.headers = {key: self._opened(key)[1] for key in self._sizes}

    def _opened(self, key: str) -> tuple[IO[bytes], Header, bool]:
        """Return an array as a stream behind its header, and whether it is in Fortran order."""
        member = self._archive.open(f"{key}.npy")
        return member, *_npy_header(member, self.path, key, self._sizes[key])

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows at a time; only arrays in Fortran order are read whole."""
        with reading(self.path, *_ZIP_DAMAGE):
            member, header, fortran = self._opened(key)
            if fortran:
                whole = _rows(member, self.path, header, 0, header.rows, "F")
                yield from _slices(whole, rows)
            else:
                for start in range(0, header.rows, rows):
                    yield _rows(member, self.path, header, start, rows)
            member.read(1)  # the checksum is compared at the end


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as a ``.npz`` file."""
    with zipfile.ZipFile(path, "w") as archive:
        for key, values in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as stream:
                npy.write_array(stream, values, allow_pickle=False)


# .safetensors


# NumPy has no bfloat16: it is widened, which loses nothing.
SAFETENSORS_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"BF16": "float32", "F16": "float16", "F32": "float32", "F64": "float64"},
}


class SafetensorsReader(Reader):
    """A ``.safetensors`` file, which its library maps into memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._file = self._opened("np")
        self._stored, self.headers = {}, {}
        for key in self._file.keys():  # noqa: SIM118
            view = self._file.get_slice(key)
            dtype = self._stored[key] = view.get_dtype()
            if dtype not in SAFETENSORS_DTYPES:
                raise ValueError(f"{path}: {key} is {dtype}; save it again as float32")
            shape = tuple(view.get_shape())
            self.headers[key] = Header(shape, np.dtype(SAFETENSORS_DTYPES[dtype]))
        self._torch_file = self._opened("pt") if "BF16" in self._stored.values() else self._file

    def _opened(self, framework: str) -> Any:
        from safetensors import SafetensorError, safe_open

        with reading(self.path, SafetensorError):
            file = safe_open(self.path, framework)
        # The library opens by name: make sure that it mapped the file that we hold.
        if fingerprint_of(os.stat(self.path)) != self.fingerprint:
            raise changed(self.path)
        return file

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time."""
        header, widened = self.headers[key], self._stored[key] == "BF16"
        file = self._torch_file if widened else self._file
        view = file.get_slice(key) if header.shape else file.get_tensor(key)[None]
        for start in range(0, header.rows, rows):
            chunk = view[start : min(start + rows, header.rows)]
            chunk = chunk if header.shape else chunk[0]
            yield chunk.float().numpy() if widened else chunk


def write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as a ``.safetensors`` file."""
    from safetensors.numpy import save_file

    for key, values in arrays.items():
        if values.dtype.name not in SAFETENSORS_DTYPES.values():
            kind = values.dtype.name
            raise ValueError(f".safetensors cannot hold {key}, which is {kind}; write .npz")
    save_file(dict(arrays), path)


# .parquet


def load_pyarrow() -> Any:
    """Return pyarrow with its modules for files, or raise with the name of the extra."""
    with needed("parquet and arrow files need pyarrow", "'calibrant[data]'"):
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    return pyarrow


class ParquetReader(Reader):
    """A ``.parquet`` file; a row is an example, and a list holds its logits.

    Values of ``optional`` columns may be missing: numbers with a point are then NaN, and other
    columns are read as text, which is empty there.
    """

    optional: set[str]

    def __init__(self, path: str) -> None:
        load_pyarrow()
        super().__init__(path)
        with self._reading():
            self._file = self._open_table()
            self.headers = {
                field.name: _parquet_header(self._file, field) for field in self._file.schema_arrow
            }
        self.optional = _optional(self.headers)

    def _open_table(self) -> Any:
        pa = load_pyarrow()
        # Two options keep it from holding a row group, which may be the whole file, in memory.
        return pa.parquet.ParquetFile(
            pa.PythonFile(self.stream, mode="r"),
            pre_buffer=False,
            buffer_size=2**18,
            page_checksum_verification=True,
        )

    def _reading(self) -> Any:
        return reading(self.path, load_pyarrow().ArrowException, OSError)

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield exactly ``rows`` rows at a time, across row groups."""
        with self._reading():
            batches = self._batches([key], rows)
            yield from rechunked((self._values(key, batch.column(0)) for batch in batches), rows)

    def batches(self, keys: Sequence[str], rows: int) -> Iterator[Batch]:
        """Yield at most ``rows`` rows of several columns at a time."""
        start = 0
        with self._reading():
            for batch in self._batches(keys, rows):
                columns = {key: self._values(key, batch.column(key)) for key in keys}
                yield Batch(columns, "row", range(start, start + batch.num_rows))
                start += batch.num_rows

    def _batches(self, keys: Sequence[str], rows: int) -> Iterator[Any]:
        """Yield batches, and raise if they have more or fewer rows than the footer says."""
        count, declared = 0, self._file.metadata.num_rows
        for batch in self._file.iter_batches(rows, columns=list(keys)):
            count += batch.num_rows
            yield batch
        if count != declared:
            raise damaged(self.path, f"{count} rows of {declared}")

    def arrow(self, key: str) -> Any:
        """Return a column in the types of Arrow."""
        with self._reading():
            return self._file.read(columns=[key]).column(key)

    def _values(self, key: str, column: Any) -> Array:
        header, values = self.headers[key], column
        if len(header.shape) == 2:
            lengths = load_pyarrow().compute.list_value_length(column).fill_null(0).to_numpy()
            if (lengths != header.shape[1]).any():
                raise NoArrayError(
                    f"{self.path}: the rows of {key} must have one length, got lists of "
                    f"{lengths.min()} to {lengths.max()} values; write every class of every row"
                )
            values = column.flatten()
        if values.null_count and key not in self.optional:
            raise NoArrayError(f"{self.path}: {key} has missing values; drop or fill those rows")
        if header.dtype.kind == "U" or (header.dtype.kind in "biu" and values.null_count):
            texts = ["" if value is None else value for value in values.to_pylist()]
            flat = np.array(texts, dtype=str)
            if header.dtype.kind == "U" and header.exact and flat.tolist() != texts:
                raise NoArrayError(f"{self.path}: {key} has text that ends with a NUL; remove it")
        else:
            flat = np.asarray(values.to_numpy(zero_copy_only=False))  # NaN where they are missing
        return flat.reshape(len(column), *header.shape[1:])


def _optional(headers: Mapping[str, Header]) -> set[str]:
    """Return columns with one value per example that are no scores, labels or features."""
    names = split_names(headers)
    roles = (*SCORES, *LABEL_NAMES, "features")
    return {
        key
        for key, header in headers.items()
        if len(header.shape) == 1 and owner(key, names)[1] not in roles
    }


def write_parquet(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays, or columns of Arrow, as a ``.parquet`` file with lists for rows."""
    table = arrow_table(arrays, ".parquet")
    load_pyarrow().parquet.write_table(table, path, write_page_checksum=True)


def arrow_table(arrays: Mapping[str, Array], suffix: str) -> Any:
    """Return arrays, or columns of Arrow, as a table with lists for rows."""
    pa, columns = load_pyarrow(), {}
    for key, values in arrays.items():
        if not isinstance(values, np.ndarray):
            columns[key] = values
            continue
        if values.ndim not in (1, 2):
            raise ValueError(
                f"a {suffix} file cannot hold {key} of shape {values.shape}, only (rows,) and "
                "(rows, classes); write .npz or .safetensors"
            )
        flat = _arrow_values(key, values.reshape(-1))
        lists = pa.FixedSizeListArray.from_arrays
        columns[key] = flat if values.ndim == 1 else lists(flat, values.shape[1])
    rows = {key: len(values) for key, values in arrays.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"the columns of a {suffix} file must have as many rows each, got "
            f"{comma_separated(f'{key} {n}' for key, n in rows.items())}; write a file per split"
        )
    return pa.table(columns)


def joined(columns: Sequence[Any]) -> Any:
    """Return columns of Arrow one after another; None without them, or if their types differ."""
    if not columns or any(c is None or c.type != columns[0].type for c in columns):
        return None
    chunks = [chunk for column in columns for chunk in column.chunks]
    return load_pyarrow().chunked_array(chunks, columns[0].type)


def _arrow_values(key: str, values: Array) -> Any:
    """Return values in the types of Arrow, which would cut the text of an array at a NUL."""
    pa = load_pyarrow()
    if values.dtype.kind in "US":
        return pa.array(values.tolist(), pa.string() if values.dtype.kind == "U" else pa.binary())
    try:
        return pa.array(values)
    except pa.ArrowNotImplementedError as error:
        kind = values.dtype.name
        raise ValueError(f".parquet cannot hold {key}, which is {kind}; write .npz") from error


def _parquet_header(file: Any, field: Any) -> Header:
    """Return the header of a column; what is no number is read as text."""
    pa, values = load_pyarrow(), field.type
    shape: tuple[int, ...] = (file.metadata.num_rows,)
    if isinstance(values, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        values, shape = values.value_type, (*shape, _list_size(file, field))
    types = pa.types
    if types.is_integer(values) or types.is_floating(values) or types.is_boolean(values):
        # to_pandas_dtype needs pandas in early versions
        return Header(shape, pa.array([], values).to_numpy(zero_copy_only=False).dtype)
    text = values.value_type if types.is_dictionary(values) else values
    return Header(shape, np.dtype(str), types.is_string(text) or types.is_large_string(text))


def _list_size(file: Any, field: Any) -> int:
    """Return the length of the lists of a column: that of the first row, if there is one.

    A damaged type may declare any length, and damaged metadata of a column end the process.
    """
    first = next(file.iter_batches(1, columns=[field.name]), None)
    if first is None or not first.num_rows:
        return int(getattr(field.type, "list_size", 0))
    return int(load_pyarrow().compute.list_value_length(first.column(0))[0].as_py() or 0)


def rechunked(batches: Iterable[Array], rows: int) -> Iterator[Array]:
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
