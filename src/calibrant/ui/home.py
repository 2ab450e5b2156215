"""The temporary folder of a server, which is removed when it ends, or else by a later server."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from calibrant._core.atomic_files import locked

PREFIX = "calibrant-ui-"
LOCKED = "server"
"""Name that a server locks in its folder; the system unlocks it when the process is gone."""


@contextmanager
def temporary_home() -> Iterator[Path]:
    """Yield a folder that only this user can read, and remove it at the end.

    Folders of servers that were killed are removed first.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/.{LOCKED}.lock"):
        with suppress(OSError):  # in use, or removed by another server
            _remove_abandoned(lock.parent)
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as home,
        locked(Path(home) / LOCKED),
    ):
        yield Path(home)


def _remove_abandoned(folder: Path) -> None:
    if not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid():
        with locked(folder / LOCKED, wait=False):
            shutil.rmtree(folder, ignore_errors=True)  # of a link it removes nothing
