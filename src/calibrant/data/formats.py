"""Files of this machine and of object stores, and the readers of their formats.

Rows are read a chunk at a time. An address such as ``s3://bucket/run/*.parquet`` is read through
fsspec, which the extra ``cloud`` installs; each store needs its own library beside it (s3fs, gcsfs,
adlfs).
"""

from __future__ import annotations

import glob
import math
import os
import re
import sys
import tempfile
import threading
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from tokenize import TokenError
from typing import IO, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import needed

Array: TypeAlias = NDArray[Any]
Order: TypeAlias = Literal["C", "F"]
Fingerprint: TypeAlias = tuple[int, ...]  # inode (0 of an object), size, time or digest

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::.+)?://")  # drives of Windows have one letter
_LOCAL = re.compile(r"(?:file|local)://")


def is_remote(path: str) -> bool:
    """Return True for an address that fsspec opens.

    >>> is_remote("s3://bucket/a.npz"), is_remote("file:///a.npz"), is_remote("C:/a.npz")
    (True, False, False)
    """
    return bool(_ADDRESS.match(path)) and not _LOCAL.match(path)


def _filesystem(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    with needed(f"{address} needs fsspec", "'calibrant[cloud]', and the library of the store"):
        import fsspec
    try:
        files, path = fsspec.core.url_to_fs(address)
    except ValueError as problem:
        raise ValueError(f"{address} cannot be opened: {problem}") from problem
    return files, cast(str, path)


class LocalFiles:
    """Files of this machine."""

    def address(self, path: PurePath) -> str:
        """Return the text by which a file is opened."""
        return str(path)

    def matches(self, pattern: str) -> Iterator[PurePath]:
        """Yield what matches a pattern."""
        return map(Path, glob.glob(pattern, recursive=True))

    def children(self, folder: PurePath) -> Iterator[PurePath]:
        """Yield what is in a folder."""
        return self.matches(os.path.join(glob.escape(str(folder)), "*"))

    def below(self, folder: PurePath) -> Iterator[PurePath]:
        """Yield all files in a folder and in those within it."""
        return (path for path in Path(folder).rglob("*") if path.is_file())

    def is_file(self, path: PurePath) -> bool:
        """Return True for a file."""
        return Path(path).is_file()

    def is_folder(self, path: PurePath) -> bool:
        """Return True for a folder."""
        return Path(path).is_dir()

    def exists(self, path: PurePath) -> bool:
        """Return True for anything that is there."""
        return Path(path).exists()


class _RemoteFiles(LocalFiles):
    """Objects of a store."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def address(self, path: PurePath) -> str:
        """Return the text by which a file is opened."""
        return str(self.files.unstrip_protocol(str(path)))

    def matches(self, pattern: str) -> Iterator[PurePath]:
        """Yield what matches a pattern."""
        return map(PurePosixPath, self.files.glob(pattern))

    def children(self, folder: PurePath) -> Iterator[PurePath]:
        """Yield what is in a folder, hidden names left out."""
        names = map(PurePosixPath, self.files.ls(str(folder), detail=False))
        return (path for path in names if not path.name.startswith("."))

    def below(self, folder: PurePath) -> Iterator[PurePath]:
        """Yield all objects with a prefix."""
        return map(PurePosixPath, self.files.find(str(folder)))

    def is_file(self, path: PurePath) -> bool:
        """Return True for an object."""
        return bool(self.files.isfile(str(path)))

    def is_folder(self, path: PurePath) -> bool:
        """Return True if there are objects below the path."""
        return bool(self.files.isdir(str(path)))

    def exists(self, path: PurePath) -> bool:
        """Return True for anything that is there."""
        return bool(self.files.exists(str(path)))


def storage_of(path: str) -> tuple[LocalFiles, PurePath]:
    """Return the storage that a path or an address is in, and the place in it."""
    if not is_remote(path):
        return LocalFiles(), Path(_LOCAL.sub("", path, count=1))
    files, place = _filesystem(path)
    return _RemoteFiles(files), PurePosixPath(place)


def _open_stream(path: str) -> IO[bytes]:
    """Open a file or an object."""
    if not is_remote(path):
        return open(path, "rb")
    files, place = _filesystem(path)
    return cast(IO[bytes], files.open(place, "rb"))


def _fingerprint(path: str, stream: IO[bytes] | None = None) -> Fingerprint:
    """Return the fingerprint of an open file, or of a file or object as it is now."""
    if not is_remote(path):
        status = os.stat(path) if stream is None else os.fstat(stream.fileno())
        # not the device: machines that share a file system number it differently
        return status.st_ino, status.st_size, status.st_mtime_ns
    files, place = _filesystem(path)
    files.invalidate_cache(str(PurePosixPath(place).parent))  # lists are kept for a while
    return 0, int(files.info(place)["size"]), int(files.ukey(place), 16)


class OutputFolder:
    """A folder of this machine, or a prefix of a store, where an object appears when it is whole.

    Names of files in it are relative, with ``/`` between folders.
    """

    def __init__(self, path: str) -> None:
        self.remote = is_remote(path)
        self.root = path.rstrip("/") if self.remote else _LOCAL.sub("", path, count=1)

    def address(self, name: str) -> str:
        """Return the path or the address of a file."""
        return f"{self.root}/{name}" if self.remote else os.path.join(self.root, name)

    def create(self) -> None:
        """Create the folder, whose parent must exist; prefixes of a store need not be created."""
        if not self.remote:
            Path(self.root).mkdir(exist_ok=True)

    def exists(self, name: str) -> bool:
        """Return True if there is such a file."""
        files, place = storage_of(self.address(name))
        return files.exists(place)

    def names(self, folder: str) -> list[str]:
        """Return the files below a folder in this one, sorted."""
        files, home = storage_of(self.root)
        return sorted(path.relative_to(home).as_posix() for path in files.below(home / folder))

    def stamp(self, name: str) -> list[int]:
        """Return numbers that change with a file, and that other machines see alike."""
        _, *stamp = _fingerprint(self.address(name))
        return stamp

    def read(self, name: str) -> str:
        """Return the text of a file."""
        with _open_stream(self.address(name)) as stream:
            return stream.read().decode()

    def write(self, name: str, text: str) -> None:
        """Write a text, at once."""
        with self.file(name) as target, replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Yield a path of this machine; the caller replaces the file, which a store then gets."""
        if not self.remote:
            target = Path(self.address(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            yield target
            return
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / PurePosixPath(name).name
            yield target
            files, place = _filesystem(self.address(name))
            files.put_file(os.fspath(target), place)


class ArrayHeader(NamedTuple):
    """Shape and dtype of a stored array; not exact if the text of other values is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    exact: bool = True

    @property
    def rows(self) -> int:
        """Number of rows; a single value counts as one."""
        return self.shape[0] if self.shape else 1


class TableRows(NamedTuple):
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

    headers: dict[str, ArrayHeader]
    table_names: Mapping[str, str] = {}
    """Names of the columns of a table, in their order, by those that are written by default."""

    def __init__(self, path: str) -> None:
        self.path, self.lock = path, threading.Lock()  # of the place in the stream
        self.stream = _open_stream(path)
        weakref.finalize(self, self.stream.close)
        self.fingerprint = _fingerprint(path, self.stream)

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time; the last chunk may be shorter."""
        raise NotImplementedError

    def batches(self, keys: Sequence[str], rows: int) -> Iterator[TableRows]:
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
        if _fingerprint(self.path, self.stream) != self.fingerprint:
            raise _changed(self.path)

    def reopened(self) -> IO[bytes]:
        """Open the file once more, for a place of its own to read from."""
        stream = _open_stream(self.path)
        if _fingerprint(self.path, stream) != self.fingerprint:
            stream.close()
            raise _changed(self.path)
        return stream


def _changed(path: str) -> ValueError:
    """Return the error for a file that is no longer the one that was opened."""
    return ValueError(
        f"{path} was replaced or rewritten while it was read; run again when it is complete"
    )


def _rows(
    stream: IO[bytes], path: str, header: ArrayHeader, start: int, rows: int, order: Order = "C"
) -> Array:
    """Read rows from ``start`` on, which the stream has reached."""
    shape = (min(rows, header.shape[0] - start), *header.shape[1:]) if header.shape else ()
    raw = bytearray(stream.read(math.prod(shape) * header.dtype.itemsize))
    with _reading(path, TypeError):  # the buffer is too small
        return np.ndarray(shape, header.dtype, raw, order=order)


def _slices(whole: Array, rows: int) -> Iterator[Array]:
    """Yield copies of runs of rows: they may be changed, and do not keep the whole in memory."""
    for start in range(0, len(whole), rows):
        yield np.array(whole[start : start + rows], order="C")


@contextmanager
def _reading(path: str, *damage: type[Exception]) -> Iterator[None]:
    """Turn the errors by which a library reports a damaged file into one."""
    try:
        yield
    except damage as error:
        raise _damaged(path, error) from error


def _damaged(path: str, problem: object) -> ValueError:
    """Return the error for a file that cannot be read to its end."""
    return ValueError(f"{path} is damaged or incomplete ({problem}); copy or write it again")


# .npy


_NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_PARSING = threading.Lock()
"""Python 3.11 counts the depth of all parsers together: two threads in one raise SystemError."""


def _npy_header(stream: IO[bytes], path: str, key: str, size: int) -> tuple[ArrayHeader, bool]:
    """Return the header of an array of ``size`` bytes, and whether it is in Fortran order."""
    with _reading(path, ValueError, EOFError, SyntaxError, TokenError):
        version = npy.read_magic(stream)
        if version not in _NPY_HEADERS:
            raise ValueError(f".npy versions 1.0 and 2.0 are known, got {version}")
        with _PARSING:
            shape, fortran, dtype = _NPY_HEADERS[version](stream)
    if min(shape, default=0) < 0 or math.prod(filter(None, shape)) > sys.maxsize:
        raise _damaged(path, f"{key} has the shape {shape}")
    # no element is without a byte: an array of very many of them would fit any file
    needed = stream.tell() + math.prod(shape) * max(1, dtype.itemsize)
    if size < needed and not dtype.hasobject:  # the length of a pickle is not in its header
        raise _damaged(path, f"{key} has {size} bytes of {needed}")
    return ArrayHeader(shape, dtype), fortran


class NpyReader(Reader):
    """A ``.npy`` file; its key is the stem of its name."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        key = Path(path).stem
        header, self._fortran = _npy_header(self.stream, path, key, self.fingerprint[1])
        self.headers, self._start = {key: header}, self.stream.tell()

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
            with self.lock:
                self.stream.seek(self._start + start * size)
                chunk = _rows(self.stream, self.path, header, start, rows)
            yield chunk


# .npz


_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError)


class NpzReader(Reader):
    """A ``.npz`` file; several of its arrays can be read side by side, a chunk of one at a time.

    From Python 3.12 on, opening an entry of a zip archive moves on from the place of the stream,
    which another thread that reads an entry would change.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with _reading(path, *_ZIP_DAMAGE):
            self._archive = zipfile.ZipFile(self.stream)
            self._sizes = {
                info.filename.removesuffix(".npy"): info.file_size
                for info in self._archive.infolist()
                if info.filename.endswith(".npy")
            }
            self.headers = {key: self._opened(key)[1] for key in self._sizes}

    def _opened(self, key: str) -> tuple[IO[bytes], ArrayHeader, bool]:
        """Return an array as a stream behind its header, and whether it is in Fortran order."""
        with self.lock:
            member = self._archive.open(f"{key}.npy")
            return member, *_npy_header(member, self.path, key, self._sizes[key])

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows at a time; only arrays in Fortran order are read whole."""
        with _reading(self.path, *_ZIP_DAMAGE):
            member, header, fortran = self._opened(key)
            if fortran:
                with self.lock:
                    whole = _rows(member, self.path, header, 0, header.rows, "F")
                yield from _slices(whole, rows)
            else:
                for start in range(0, header.rows, rows):
                    with self.lock:
                        chunk = _rows(member, self.path, header, start, rows)
                    yield chunk
            with self.lock:
                member.read(1)  # the checksum is compared at the end


def _write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as a ``.npz`` file."""
    with zipfile.ZipFile(path, "w") as archive:
        for key, values in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as stream:
                npy.write_array(stream, values, allow_pickle=False)


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
