"""Files that are replaced as a whole, and locks on them."""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALE = 3600.0  # age in seconds of a temporary file that a killed process left behind


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary name next to ``target`` that takes its place unless an error occurs."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of ``target``, and hold it.

    The operating system locks the file ``.NAME.lock`` beside the target, and unlocks it when the
    process ends, in whatever way. The empty file stays: removing it would let two others lock two
    files. On network file systems this excludes processes of other machines only if the server
    supports such locks, as NFS 4 does.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    with target.with_name(f".{target.name}.lock").open("a") as file:
        _lock(file.fileno())
        yield  # closing the file unlocks it


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        while True:
            with suppress(OSError):  # raised after ten seconds
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_leftovers(target: Path) -> None:
    """Remove temporary files for ``target`` that have not been written to for an hour."""
    # not by process id, which means nothing on a file system that several machines share
    pattern = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{32}")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name):
            with suppress(OSError):  # another process may have removed it
                if time.time() - path.stat().st_mtime > STALE:
                    path.unlink()
