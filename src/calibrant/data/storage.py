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
