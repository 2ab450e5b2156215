"""Atomic replacement of files, temporary folders, and locks between processes."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALE_SECONDS = 3600.0  # age in seconds of a temporary file that a killed process left behind
_MAX_NAME_BYTES = 255  # bytes of a name that common file systems take


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary name next to ``target`` that takes its place unless an error occurs.

    If ``target`` is a link, what it points to is replaced, as by ``open``. A file that is replaced
    keeps its permissions, and nobody else reads the new one meanwhile. What killed writers left
    there is removed when nothing was written to it for an hour.
    """
    target = _behind_link(target)
    temporary = _temporary_name(target)
    try:
        if target.is_file():
            temporary.touch(0o600)
        yield temporary
        if target.is_file():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder next to ``target``, which is removed at the end."""
    folder = _temporary_name(target)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _behind_link(target: Path) -> Path:
    # other paths stay as they are, so that messages name them as the user does
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _hidden(target: Path, ending: str) -> Path:
    """Return a name next to ``target`` with a dot in front, as long as a name may be."""
    kept = os.fsencode(target.name)[: _MAX_NAME_BYTES - len(f".{ending}")]
    return target.with_name(f".{kept.decode(errors='ignore')}{ending}")


def _temporary_name(target: Path) -> Path:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    temporary = _hidden(target, f".{uuid.uuid4().hex}")
    # Old temporary files of the same target are removed: not by process id, which means nothing on
    # a file system that several machines share.
    pattern = re.compile(re.escape(temporary.name[:-32]) + "[0-9a-f]{32}")
    for path in temporary.parent.iterdir():
        if pattern.fullmatch(path.name):
            with suppress(OSError):  # another process may have removed it
                written = max(p.stat().st_mtime for p in (path, *path.glob("*")))
                if time.time() - written > STALE_SECONDS:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return temporary


@contextmanager
def locked(target: Path, *, wait: bool = True) -> Iterator[None]:
    """Wait until no other process holds the lock of ``target``, and hold it.

    If ``target`` is a link, the lock is that of what it points to. Unless ``wait``, a lock that
    another process holds raises BlockingIOError.

    The operating system locks the file ``.NAME.lock`` beside the target, and unlocks it when the
    process ends, in whatever way. The empty file stays: removing it would let two others lock two
    files. On network file systems this excludes processes of other machines only if the server
    supports such locks, as NFS 4 does.
    """
    target = _behind_link(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    with _hidden(target, ".lock").open("a") as file:
        _lock(file.fileno(), wait)
        yield  # closing the file unlocks it


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int, wait: bool) -> None:
        while True:
            try:  # LK_LOCK gives up after ten seconds
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except OSError as error:
                if not wait:
                    raise BlockingIOError(*error.args) from error
            else:
                return
else:
    import fcntl

    def _lock(descriptor: int, wait: bool) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
