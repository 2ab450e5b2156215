"""Files of this machine and of object stores: lists, streams, fingerprints, folders to write to.

An address such as ``s3://bucket/run/*.parquet`` is read through fsspec, which the extra ``cloud``
installs; each store needs its own library beside it (s3fs, gcsfs, adlfs).
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, TypeAlias, cast

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import needed

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


def open_stream(path: str) -> IO[bytes]:
    """Open a file or an object."""
    if not is_remote(path):
        return open(path, "rb")
    files, place = _filesystem(path)
    return cast(IO[bytes], files.open(place, "rb"))


def fingerprint(path: str, stream: IO[bytes] | None = None) -> Fingerprint:
    """Return the fingerprint of an open file, or of a file or object as it is now."""
    if not is_remote(path):
        status = os.stat(path) if stream is None else os.fstat(stream.fileno())
        # not the device: machines that share a file system number it differently
        return status.st_ino, status.st_size, status.st_mtime_ns
    files, place = _filesystem(path)
    files.invalidate_cache(str(PurePosixPath(place).parent))  # lists are kept for a while
    return 0, int(files.info(place)["size"]), int(files.ukey(place), 16)


class OutputFolder:
    """A folder of this machine; names of files in it are relative, with ``/`` between folders."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(_LOCAL.sub("", folder, count=1))

    def address(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.folder / name)

    def create(self) -> None:
        """Create the folder, whose parent must exist."""
        self.folder.mkdir(exist_ok=True)

    def exists(self, name: str) -> bool:
        """Return True if there is such a file."""
        return (self.folder / name).exists()

    def names(self, folder: str) -> list[str]:
        """Return the files below a folder in this one, sorted."""
        files = (path for path in (self.folder / folder).rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def stamp(self, name: str) -> list[int]:
        """Return numbers that change with a file, and that other machines see alike."""
        status = (self.folder / name).stat()
        return [status.st_size, status.st_mtime_ns]

    def read(self, name: str) -> str:
        """Return the text of a file."""
        return (self.folder / name).read_text(encoding="utf-8")

    def write(self, name: str, text: str) -> None:
        """Write a text, at once."""
        with self.file(name) as target, replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Yield the path of a file, which the caller replaces as a whole."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target


class _RemoteFolder(OutputFolder):
    """A prefix of an object store, where an object appears when all of it is there."""

    def __init__(self, address: str) -> None:
        self.root, (self._files, place) = address.rstrip("/"), _filesystem(address)
        self._place = place.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return _RemoteFolder, (self.root,)

    def address(self, name: str) -> str:
        """Return the address of an object."""
        return f"{self.root}/{name}"

    def create(self) -> None:
        """Do nothing: prefixes need not exist."""

    def exists(self, name: str) -> bool:
        """Return True if there is such an object."""
        return bool(self._files.exists(self._at(name)))

    def names(self, folder: str) -> list[str]:
        """Return the objects below a folder in this one, sorted."""
        found = self._files.find(self._at(folder))
        return sorted(str(PurePosixPath(path).relative_to(self._place)) for path in found)

    def stamp(self, name: str) -> list[int]:
        """Return numbers that change with an object."""
        self._files.invalidate_cache(str(PurePosixPath(self._at(name)).parent))
        size = int(self._files.info(self._at(name))["size"])
        return [size, int(self._files.ukey(self._at(name)), 16)]

    def read(self, name: str) -> str:
        """Return the text of an object."""
        return bytes(self._files.cat_file(self._at(name))).decode()

    def write(self, name: str, text: str) -> None:
        """Write a text, at once."""
        self._files.pipe_file(self._at(name), text.encode())

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Yield the path of a file of this machine, which is then copied to the store."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / PurePosixPath(name).name
            yield target
            self._files.put_file(os.fspath(target), self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._place}/{name}"


def output_folder(path: str) -> OutputFolder:
    """Return the folder of a path or an address."""
    return _RemoteFolder(path) if is_remote(path) else OutputFolder(path)
