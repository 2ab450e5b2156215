"""How the arrays of each file format are read, a block of rows at a time, and written."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from calibrant._core.messages import comma_separated

Array: TypeAlias = NDArray[Any]

READ_BYTES = 2**24
"""Size of the blocks in which a whole array is gathered."""

PARQUET_BUFFER = 2**18
"""Bytes of a parquet file that are read at once."""


@dataclass(frozen=True)
class Stored:
    """Where an array lies and what its header says; ``key`` is its name inside the file."""

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def suffix(self) -> str:
        """Suffix of the file, which decides how it is read."""
        return Path(self.path).suffix

    def blocks(self, rows: int) -> Iterator[Array]:
        """Yield the array in blocks of ``rows`` rows; the last one may be shorter."""
        for block in FORMATS[self.suffix].blocks(self, rows):
            yield native(block)


Shard: TypeAlias = dict[str, Stored]
"""The arrays of one file, or of the ``.npy`` files that belong together, by key."""


# How a whole array and its blocks are made.


def native(block: Array) -> Array:
    """Return ``block`` in the byte order of this machine, the only one that torch takes."""
    return block.astype(block.dtype.newbyteorder("="), copy=False)


def gathered(pieces: Sequence[Stored]) -> Array:
    """Return the arrays one after another; a single ``.npy`` file is mapped, not loaded."""
    first = pieces[0]
    if len(pieces) == 1 and first.suffix == ".npy":
        # Copy-on-write: the array may be changed, as any other, and the file stays as it is.
        return native(np.load(first.path, mmap_mode="c", allow_pickle=False))
    blocks = (block for piece in pieces for block in piece.blocks(_rows_at_once(piece)))
    dtype = np.result_type(*(piece.dtype for piece in pieces)).newbyteorder("=")
    if not dtype.itemsize:  # strings, whose length the header does not tell
        return np.concatenate([np.empty(0, dtype), *blocks])
    return _filled((sum(piece.shape[0] for piece in pieces), *first.shape[1:]), dtype, blocks)


def _rows_at_once(piece: Stored) -> int:
    row_bytes = math.prod(piece.shape[1:]) * piece.dtype.itemsize
    return max(1, READ_BYTES // max(1, row_bytes))


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[Array]) -> Array:
    whole = np.empty(shape, dtype)
    start = 0
    for block in blocks:
        whole[start : start + len(block)] = block
        start += len(block)
    return whole


def _sliced(whole: Array, rows: int) -> Iterator[Array]:
    """Yield copies: a block may be changed, and keeps no more than itself in memory."""
    for start in range(0, len(whole), rows):
        yield np.array(whole[start : start + rows], order="C")


@contextmanager
def _reading(path: str | Path, *damage: type[Exception]) -> Iterator[None]:
    """Turn the errors by which a library reports a damaged file into one that says so."""
    try:
        yield
    except damage as error:
        raise ValueError(
            f"{path} is damaged or incomplete ({error}); copy or write it again"
        ) from error


# .npy


_HEADER_DAMAGE = (ValueError, EOFError, TokenError)


def _npy_headers(path: Path) -> Shard:
    with path.open("rb") as stream:
        return {path.stem: _npy_header(stream, path, path.stem, path.stat().st_size)}


def _npy_header(stream: IO[bytes], path: Path, key: str, size: int) -> Stored:
    """Read the header of an array that is said to take ``size`` bytes with its header."""
    shape, _, dtype = _array_header(stream, path)
    needed = stream.tell() + math.prod(shape) * dtype.itemsize
    if size < needed and not dtype.hasobject:  # the length of a pickle is not in its header
        raise ValueError(
            f"{path} is damaged or incomplete ({key} has {size} bytes of {needed}); "
            "copy or write it again"
        )
    return Stored(str(path), key, shape, dtype)


def _array_header(
    stream: IO[bytes], path: str | Path
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether the order is Fortran's, and dtype."""
    with _reading(path, *_HEADER_DAMAGE):
        version = npy.read_magic(stream)
        if version == (1, 0):
            return npy.read_array_header_1_0(stream)
        if version == (2, 0):
            return npy.read_array_header_2_0(stream)
        raise ValueError(f".npy versions 1.0 and 2.0 are known, got {version}")


def _npy_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _reading(stored.path, *_HEADER_DAMAGE):
        mapped = np.load(stored.path, mmap_mode="r", allow_pickle=False)
    yield from _sliced(mapped, rows)


# .npz


_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError)


@contextmanager
def _archive(path: str | Path) -> Iterator[zipfile.ZipFile]:
    # Opened apart from the rest: a file that may not be read is no damaged file.
    with open(path, "rb") as source, _reading(path, *_ZIP_DAMAGE):
        yield zipfile.ZipFile(source)


def _npz_headers(path: Path) -> Shard:
    with _archive(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        found = [_npz_header(archive, info, path) for info in members]
    return {stored.key: stored for stored in found}


def _npz_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Stored:
    with archive.open(info) as stream:
        return _npy_header(stream, path, info.filename.removesuffix(".npy"), info.file_size)


def _npz_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _archive(stored.path) as archive, archive.open(f"{stored.key}.npy") as stream:
        _, fortran, _ = _array_header(stream, stored.path)
        if fortran:  # column by column: no row is complete before the end
            yield from _sliced(_taken(stream, stored, stored.shape[0], "F"), rows)
        else:
            for start in range(0, stored.shape[0], rows):
                yield _taken(stream, stored, min(rows, stored.shape[0] - start), "C")
        stream.read(1)  # the checksum is compared when the end is reached


def _taken(stream: IO[bytes], stored: Stored, rows: int, order: Literal["C", "F"]) -> Array:
    shape = (rows, *stored.shape[1:])
    raw = bytearray(stream.read(math.prod(shape) * stored.dtype.itemsize))
    with _reading(stored.path, TypeError):  # the buffer is too small
        return np.ndarray(shape, stored.dtype, raw, order=order)


def _write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
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


@contextmanager
def _safetensors(path: str | Path, framework: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    with _reading(path, SafetensorError), safe_open(path, framework) as file:
        yield file


def _safetensors_headers(path: Path) -> Shard:
    with _safetensors(path, "np") as file:
        return {key: _safetensors_header(file, path, key) for key in file.keys()}  # noqa: SIM118


def _safetensors_header(file: Any, path: Path, key: str) -> Stored:
    view = file.get_slice(key)
    if view.get_dtype() not in _SAFETENSORS_DTYPES:
        raise ValueError(f"{path}: {key} is {view.get_dtype()}; save it again as float32")
    dtype = np.dtype(_SAFETENSORS_DTYPES[view.get_dtype()])
    return Stored(str(path), key, tuple(view.get_shape()), dtype)


def _safetensors_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _safetensors(stored.path, "np") as file:
        widened = file.get_slice(stored.key).get_dtype() == "BF16"
    with _safetensors(stored.path, "pt" if widened else "np") as file:
        view = file.get_slice(stored.key)
        for start in range(0, stored.shape[0], rows):
            block = view[start : min(start + rows, stored.shape[0])]
            yield block.float().numpy() if widened else block


def _write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    from safetensors.numpy import save_file

    for key, values in arrays.items():
        if values.dtype.name not in _SAFETENSORS_DTYPES.values():
            raise ValueError(
                f"a .safetensors file cannot hold {key}, which is {values.dtype.name}; write .npz"
            )
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


@contextmanager
def _parquet(path: str | Path) -> Iterator[Any]:
    pa = _pyarrow()
    # Opened apart from the rest, as in _archive.
    with pa.OSFile(str(path), "rb") as source, _reading(path, pa.ArrowInvalid, OSError):
        # Both options keep it from holding a row group, which may be the whole file, in memory.
        yield pa.parquet.ParquetFile(source, pre_buffer=False, buffer_size=PARQUET_BUFFER)


def _parquet_headers(path: Path) -> Shard:
    with _parquet(path) as file:
        rows, schema = file.metadata.num_rows, file.schema_arrow
        return {
            field.name: Stored(
                str(path),
                field.name,
                (rows, *_row_shape(file.metadata, field)),
                _parquet_dtype(field.type),
            )
            for field in schema
        }


def _is_list(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _row_shape(metadata: Any, field: Any) -> tuple[int, ...]:
    """Shape of one row. The footer counts values, which tells the length of lists of one length."""
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
    """NumPy's type for numbers, of a list for its values; everything else is read as text."""
    types = _pyarrow().types
    values = kind.value_type if _is_list(kind) else kind
    numeric = types.is_integer(values) or types.is_floating(values) or types.is_boolean(values)
    return np.dtype(values.to_pandas_dtype() if numeric else str)


def _parquet_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _parquet(stored.path) as file:
        batches = file.iter_batches(rows, columns=[stored.key])
        yield from _reblocked((_parquet_values(stored, batch.column(0)) for batch in batches), rows)


def _reblocked(chunks: Iterable[Array], rows: int) -> Iterator[Array]:
    """Yield blocks of exactly ``rows`` rows: a batch may end early, with its row group."""
    held: list[Array] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held)) >= rows:  # a batch has at most ``rows``: one block is full
            joined = np.concatenate(held)
            yield joined[:rows]
            held = [joined[rows:]]
    if sum(map(len, held)):
        yield np.concatenate(held)


def _parquet_values(stored: Stored, column: Any) -> Array:
    if not _is_list(column.type):
        return _parquet_flat(stored, column)
    _check_lengths(stored, column)
    return _parquet_flat(stored, column.flatten()).reshape(len(column), *stored.shape[1:])


def _parquet_flat(stored: Stored, values: Any) -> Array:
    if values.null_count:
        raise ValueError(f"{stored.path}: {stored.key} has missing values; drop or fill those rows")
    if stored.dtype.kind == "U":
        return np.array(values.to_pylist(), dtype=str)
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _check_lengths(stored: Stored, column: Any) -> None:
    lengths = _pyarrow().compute.list_value_length(column).fill_null(0).to_numpy()
    wrong = lengths[lengths != stored.shape[1]]
    if len(wrong):
        raise ValueError(
            f"{stored.path}: the rows of {stored.key} must have one length, got {wrong[0]} values "
            f"where the mean is {stored.shape[1]}; write every class of every row"
        )


def _write_parquet(path: Path, arrays: Mapping[str, Array]) -> None:
    pa = _pyarrow()
    _check_table(arrays)
    table = pa.table({key: _parquet_column(values) for key, values in arrays.items()})
    pa.parquet.write_table(table, path)


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
    if values.ndim == 1:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


# The formats, and how a file is replaced.


class Format(NamedTuple):
    """How files with one suffix are read and, where one file holds several arrays, written."""

    headers: Callable[[Path], Shard]
    blocks: Callable[[Stored, int], Iterator[Array]]
    write: Callable[[Path, Mapping[str, Array]], None] | None


FORMATS = {
    ".npz": Format(_npz_headers, _npz_blocks, _write_npz),
    ".safetensors": Format(_safetensors_headers, _safetensors_blocks, _write_safetensors),
    ".parquet": Format(_parquet_headers, _parquet_blocks, _write_parquet),
    ".npy": Format(_npy_headers, _npy_blocks, None),
}
