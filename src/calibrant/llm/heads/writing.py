"""Writing token tables: one process at a time, shard by shard, rows in any order."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrant._core.atomic_files import locked, temporary_folder
from calibrant._core.checks import BoolArray, IntArray
from calibrant.llm.heads.tables import HEADER, shard_folder

PutRows: TypeAlias = "Callable[[IntArray, Mapping[str, NDArray[Any]], int], None]"
"""Writes rows of columns; the last argument is the number of all rows of these columns."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a table; what a killed one left is removed."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / HEADER, wait=False))
        except BlockingIOError as error:
            raise ValueError(
                f"{folder} is being written by another process: wait until it ends, or use "
                "another folder"
            ) from error
        for leftover in folder.glob(".shard-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextmanager
def new_shard(folder: Path, number: int) -> Iterator[PutRows]:
    """Yield a function that writes rows; the shard gets its name when every row was written.

    The columns are files from the start, so memory does not grow with the shard. They are not
    memory-mapped: on a full disk, writing to a mapped file kills the process.
    """
    target = shard_folder(folder, number)
    files: dict[str, _ColumnFile] = {}
    with temporary_folder(target) as temporary, ExitStack() as stack:

        def put(rows: IntArray, columns: Mapping[str, NDArray[Any]], total: int) -> None:
            for name, values in columns.items():
                if name not in files:
                    path = temporary / f"{name}.npy"
                    files[name] = stack.enter_context(_ColumnFile.new(path, values, total))
                files[name].put(rows, values)

        try:
            yield put
            for file in files.values():
                file.finish()
            stack.close()
            os.replace(temporary, target)
        except OSError as error:
            message = (
                f"{target} could not be written ({error.strerror or error}); complete shards are "
                "kept: make room if the disk is full, and start again to continue"
            )
            raise OSError(error.errno, message) from error


class _ColumnFile(NamedTuple):
    """A ``.npy`` file whose rows are written in any order."""

    stream: Any
    start: int  # of the rows in the file
    written: BoolArray  # (rows,)

    @classmethod
    @contextmanager
    def new(cls, path: Path, like: NDArray[Any], rows: int) -> Iterator[_ColumnFile]:
        """Create a file for rows of the shape and type of ``like``."""
        # without a buffer, which would be written, and fail again, when the file is closed
        with path.open("wb", buffering=0) as stream:
            header = np.lib.format.header_data_from_array_1_0(np.empty(0, like.dtype))
            np.lib.format.write_array_header_1_0(
                stream, {**header, "shape": (rows, *like.shape[1:])}
            )
            yield cls(stream, stream.tell(), np.zeros(rows, bool))

    def put(self, rows: IntArray, values: NDArray[Any]) -> None:
        """Write rows, consecutive ones together."""
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        for run in np.split(np.arange(len(rows)), starts[1:]):
            self.stream.seek(self.start + int(rows[run[0]]) * values[:1].nbytes)
            rest = np.ascontiguousarray(values[run]).data.cast("B")
            while rest:
                rest = rest[self.stream.write(rest) :]
        self.written[rows] = True

    def finish(self) -> None:
        """Store the file on disk; raise if a row is missing."""
        if not self.written.all():
            missing = np.count_nonzero(~self.written)
            raise RuntimeError(f"{missing} rows of {self.stream.name} were not written")
        os.fsync(self.stream.fileno())
