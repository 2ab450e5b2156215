"""``.parquet`` files and Arrow IPC files, through pyarrow."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from calibrant._core.checks import IGNORED
from calibrant._core.messages import comma_separated, needed
from calibrant.data.formats import (
    Array,
    ArrayHeader,
    NoArrayError,
    Reader,
    TableRows,
    _damaged,
    _reading,
    _rechunked,
)
from calibrant.data.shards import ARRAY_KEYS, LABEL_NAMES, _owner, _split_names


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
        splits, counted = _split_names(self.headers), (*ARRAY_KEYS, *LABEL_NAMES)
        self.optional = {
            key
            for key, header in self.headers.items()
            if len(header.shape) == 1 and _owner(key, splits)[1] not in counted
        }

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
        return _reading(self.path, load_pyarrow().ArrowException, OSError)

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield exactly ``rows`` rows at a time, across row groups."""
        with self._reading():
            batches = self._batches([key], rows)
            yield from _rechunked((self._values(key, batch.column(0)) for batch in batches), rows)

    def batches(self, keys: Sequence[str], rows: int) -> Iterator[TableRows]:
        """Yield at most ``rows`` rows of several columns at a time."""
        start = 0
        with self._reading():
            for batch in self._batches(keys, rows):
                columns = {key: self._values(key, batch.column(key)) for key in keys}
                yield TableRows(columns, "row", range(start, start + batch.num_rows))
                start += batch.num_rows

    def _batches(self, keys: Sequence[str], rows: int) -> Iterator[Any]:
        """Yield batches, and raise if they have more or fewer rows than the footer says."""
        count, declared = 0, self._file.metadata.num_rows
        for batch in self._file.iter_batches(rows, columns=list(keys)):
            count += batch.num_rows
            yield batch
        if count != declared:
            raise _damaged(self.path, f"{count} rows of {declared}")

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
            remedy = f"drop or fill those rows, labels with {IGNORED}"
            raise NoArrayError(f"{self.path}: {key} has missing values; {remedy}")
        if header.dtype.kind == "U" or (header.dtype.kind in "biu" and values.null_count):
            texts = ["" if value is None else value for value in values.to_pylist()]
            flat = np.array(texts, dtype=str)
            if header.dtype.kind == "U" and header.exact and flat.tolist() != texts:
                raise NoArrayError(f"{self.path}: {key} has text that ends with a NUL; remove it")
        else:
            flat = np.asarray(values.to_numpy(zero_copy_only=False))  # NaN where they are missing
        return flat.reshape(len(column), *header.shape[1:])


def write_parquet(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays, or columns of Arrow, as a ``.parquet`` file with lists for rows."""
    table = _table_of_arrays(arrays, ".parquet")
    load_pyarrow().parquet.write_table(table, path, write_page_checksum=True)


def _table_of_arrays(arrays: Mapping[str, Array], suffix: str) -> Any:
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


def joined_columns(columns: Sequence[Any]) -> Any:
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


def _parquet_header(file: Any, field: Any) -> ArrayHeader:
    """Return the header of a column; what is no number is read as text."""
    pa, values = load_pyarrow(), field.type
    shape: tuple[int, ...] = (file.metadata.num_rows,)
    if isinstance(values, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        # the length of the first list: a damaged type may declare any, and damaged metadata of a
        # column end the process
        first = next(file.iter_batches(1, columns=[field.name]), None)
        length = int(getattr(values, "list_size", 0))
        if first is not None and first.num_rows:
            length = int(pa.compute.list_value_length(first.column(0))[0].as_py() or 0)
        values, shape = values.value_type, (*shape, length)
    types = pa.types
    if types.is_integer(values) or types.is_floating(values) or types.is_boolean(values):
        # to_pandas_dtype needs pandas in early versions
        return ArrayHeader(shape, pa.array([], values).to_numpy(zero_copy_only=False).dtype)
    text = values.value_type if types.is_dictionary(values) else values
    return ArrayHeader(shape, np.dtype(str), types.is_string(text) or types.is_large_string(text))


class ArrowReader(ParquetReader):
    """A ``.arrow`` or ``.feather`` file; a row is an example, and a list holds its logits."""

    def _open_table(self) -> Any:
        return _ArrowTable(load_pyarrow(), self.stream)


class _ArrowTable:
    """The methods of a ``ParquetFile`` that its reader uses, for an Arrow IPC file."""

    def __init__(self, pa: Any, stream: Any) -> None:
        # one for all readings: it has the lock of the stream
        self._pa, self._source = pa, pa.PythonFile(stream, mode="r")
        self.schema_arrow = self._opened().schema
        self.metadata = SimpleNamespace(num_rows=self._count_rows())

    def _opened(self, columns: Sequence[str] = ()) -> Any:
        """Open the file anew, to read some columns only."""
        numbers = [self.schema_arrow.get_field_index(name) for name in columns]
        options = self._pa.ipc.IpcReadOptions(included_fields=numbers)
        return self._pa.ipc.open_file(self._source, options=options)

    def _count_rows(self) -> int:
        """Count the rows; early versions of pyarrow have to read a column for this."""
        file = self._opened()
        if hasattr(file, "count_rows"):
            return int(file.count_rows())
        nested = self._pa.types.is_nested
        names = sorted(
            self.schema_arrow.names, key=lambda n: nested(self.schema_arrow.field(n).type)
        )
        return sum(batch.num_rows for batch in self.iter_batches(sys.maxsize, columns=names[:1]))

    def iter_batches(self, rows: int, *, columns: Sequence[str]) -> Iterator[Any]:
        """Yield at most ``rows`` rows at a time; a batch of the file is in memory as a whole."""
        file = self._opened(columns)
        for i in range(file.num_record_batches):
            batch = file.get_batch(i)
            batch.validate(full=True)  # damaged lengths could end the process
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)

    def read(self, columns: Sequence[str]) -> Any:
        """Return whole columns."""
        return self._opened(columns).read_all()


def write_arrow(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays, or columns of Arrow, as an Arrow IPC file with lists for rows."""
    pa, table = load_pyarrow(), _table_of_arrays(arrays, ".arrow")
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=1 << 12)  # readers hold a chunk in memory
