"""Uploaded prediction files, under names that the server chooses, in a temporary folder."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from starlette.exceptions import HTTPException

from calibrant._core.atomic_files import locked
from calibrant._core.messages import comma_separated, printable

SUFFIXES = (".npz", ".safetensors", ".parquet", ".csv")
_SAVE = "save the arrays with numpy.savez(path, logits=..., labels=...)"
_REASONS = {
    **dict.fromkeys(
        (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"),
        f"it is a pickle, which could run any code when it is opened; {_SAVE}",
    ),
    ".npy": f"a .npy file holds one array, and labels belong to the logits; {_SAVE}",
}
"""Why files of some kinds are refused."""
MAX_FILES = 6
"""Files that are kept, more than there are jobs; those unused for longest make room for others."""
MAX_NAME = 120
"""Characters of a name that are shown."""
PREFIX = "calibrant-ui-"
_LOCKED = "server"
"""Name that a server locks in its folder; the system unlocks it when the process is gone."""


@dataclass(frozen=True)
class Upload:
    """A file on the disk, and its name as the user knows it, which is only shown."""

    name: str
    folder: Path
    suffix: str

    @property
    def path(self) -> Path:
        """The file: neither folder nor name come from the client."""
        return self.folder / f"{self.folder.name}{self.suffix}"


def _shown_name(name: str) -> str:
    r"""Return the last part of a client's path, fit to be shown.

    >>> _shown_name("C:\\data\\val.npz"), _shown_name("../../etc/passwd")
    ('val.npz', 'passwd')
    """
    last = PurePosixPath(name.replace("\\", "/")).name
    return printable(last)[-MAX_NAME:] or "unnamed"


def _suffix_of(name: str) -> str:
    """Return the suffix of a file that can be read here, or raise with the reason why not."""
    suffix = PurePosixPath(_shown_name(name)).suffix.lower()
    if suffix in SUFFIXES:
        return suffix
    reason = _REASONS.get(suffix, _SAVE)
    raise ValueError(
        f"{_shown_name(name)} cannot be read here: {reason} (read are {comma_separated(SUFFIXES)})"
    )


@dataclass(frozen=True)
class Uploads:
    """The files by their ids; each has a folder of its own in ``home``."""

    home: Path
    limit: int  # bytes of one file
    files: dict[str, Upload] = field(default_factory=dict)

    async def receive(self, name: str, chunks: AsyncIterator[bytes]) -> str:
        """Write a file as it comes in and return its id; a file that fails leaves nothing."""
        upload = self._new(_shown_name(name), _suffix_of(name))
        size = 0
        try:
            with upload.path.open("wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    self.check_size(size)
                    file.write(chunk)
            if not size:
                raise ValueError(f"{upload.name} is empty: choose another file")
        except BaseException:
            shutil.rmtree(upload.folder)
            raise
        return self._keep(upload)

    def check_size(self, size: int) -> None:
        """Raise if a file of this size, in bytes, is too large."""
        if size > self.limit:
            raise HTTPException(
                413,
                f"the file has more than {self.limit / 1e6:,.0f} MB, the limit of this page: start "
                "it with a larger --max-upload, or use calibrant report and calibrant fit",
            )

    def add_sample(self) -> str:
        """Add the predictions that come with calibrant and return their id."""
        from calibrant.data.files import sample_path  # imports torch, which the server does without

        upload = self._new(sample_path().name, sample_path().suffix)
        shutil.copyfile(sample_path(), upload.path)
        return self._keep(upload)

    def get(self, key: object) -> Upload | None:
        """Return a file, which then counts as used last."""
        upload = self.files.pop(str(key), None)
        if upload is not None:
            self.files[str(key)] = upload
        return upload

    def _new(self, name: str, suffix: str) -> Upload:
        folder = self.home / secrets.token_hex(8)
        folder.mkdir()
        return Upload(name, folder, suffix)

    def _keep(self, upload: Upload) -> str:
        while len(self.files) >= MAX_FILES:
            oldest = self.files.pop(next(iter(self.files)))
            shutil.rmtree(oldest.folder, ignore_errors=True)
        self.files[upload.folder.name] = upload
        return upload.folder.name


@contextmanager
def _temporary_home() -> Iterator[Path]:
    """Yield a folder that only this user can read, and remove it at the end.

    Folders of servers that were killed are removed first.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/.{_LOCKED}.lock"):
        folder = lock.parent
        with suppress(OSError):  # in use, or removed by another server
            if not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid():
                with locked(folder / _LOCKED, wait=False):
                    shutil.rmtree(folder, ignore_errors=True)  # of a link it removes nothing
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as home,
        locked(Path(home) / _LOCKED),
    ):
        yield Path(home)
