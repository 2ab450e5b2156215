"""Files of this machine and of object stores: lists, streams and fingerprints of both.

An address such as ``s3://bucket/run/*.parquet`` is read through fsspec, which the extra ``cloud``
installs; each store needs its own library beside it (s3fs, gcsfs, adlfs).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, TypeAlias, cast

from calibrant._core.optional import needed

Fingerprint: TypeAlias = tuple[int, ...]  # inode (0 of an object), size, time or digest

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::.+)?://")  # drives of Windows have one letter
_LOCAL = ("file://", "local://")


def is_remote(path: str) -> bool:
    """Return True for an address that fsspec opens.

    >>> is_remote("s3://bucket/a.npz"), is_remote("file:///a.npz"), is_remote("C:/a.npz")
    (True, False, False)
    """
    return bool(_ADDRESS.match(path)) and not path.startswith(_LOCAL)


def without_scheme(path: str) -> str:
    """Return the path of a ``file://`` address; others as they are."""
    for scheme in _LOCAL:
        path = path.removeprefix(scheme)
    return path


def filesystem(address: str) -> tuple[Any, str]:
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

    def path(self, place: str) -> PurePath:
        """Return a place as a path, for its name, suffix and parent."""
        return Path(place)

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


class RemoteFiles(LocalFiles):
    """Objects of a store."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def path(self, place: str) -> PurePath:
        """Return a place as a path, for its name, suffix and parent."""
        return PurePosixPath(place)

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


def storage_of(path: str) -> tuple[LocalFiles, str]:
    """Return the storage that a path or an address is in, and the place in it."""
    if not is_remote(path):
        return LocalFiles(), without_scheme(path)
    files, place = filesystem(path)
    return RemoteFiles(files), place


def open_stream(path: str) -> IO[bytes]:
    """Open a file or an object."""
    if not is_remote(path):
        return open(path, "rb")
    files, place = filesystem(path)
    return cast(IO[bytes], files.open(place, "rb"))


def fingerprint_of(status: os.stat_result) -> Fingerprint:
    """Return the fingerprint of a file of this machine."""
    # not the device: machines that share a file system number it differently
    return status.st_ino, status.st_size, status.st_mtime_ns


def fingerprint(path: str, stream: IO[bytes]) -> Fingerprint:
    """Return the fingerprint of an open file, or of an object as it is now."""
    if not is_remote(path):
        return fingerprint_of(os.fstat(stream.fileno()))
    files, place = filesystem(path)
    files.invalidate_cache(str(PurePosixPath(place).parent))  # lists are kept for a while
    return 0, int(files.info(place)["size"]), int(files.ukey(place), 16)
