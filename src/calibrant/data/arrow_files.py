"""Arrow IPC files, which are read like ``.parquet`` files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from calibrant.data.formats import Array, ParquetReader, arrow_table, load_pyarrow


class ArrowReader(ParquetReader):
    """A ``.arrow`` or ``.feather`` file; a row is an example, and a list holds its logits."""

    def _open_table(self) -> Any:
        return _ArrowTable(load_pyarrow(), self.stream)


class _ArrowTable:
    """The methods of a ``ParquetFile`` that its reader uses, for an Arrow IPC file."""

    def __init__(self, pa: Any, stream: Any) -> None:
        self._pa, self._source = (
            pa,
            pa.PythonFile(stream, mode="r"),
        )  # one: it has the lock of the stream
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
    pa, table = load_pyarrow(), arrow_table(arrays, ".arrow")
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=1 << 12)  # readers hold a chunk in memory
