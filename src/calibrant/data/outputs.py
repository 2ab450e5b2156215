"""Folders that shards are written to, on this machine or in an object store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from calibrant._core.atomic_files import replacing
from calibrant.data.storage import filesystem, is_remote, without_scheme


class OutputFolder:
    """A folder of this machine; names of files in it are relative, with ``/`` between folders."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(without_scheme(folder))

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


class RemoteFolder(OutputFolder):
    """A prefix of an object store, where an object appears when all of it is there."""

    def __init__(self, address: str) -> None:
        self.root, (self._files, place) = address.rstrip("/"), filesystem(address)
        self._place = place.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFolder, (self.root,)

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
    return RemoteFolder(path) if is_remote(path) else OutputFolder(path)
