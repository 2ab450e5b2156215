"""Tasks for workers in other processes, which import them from here."""

import os
import signal
import time
from pathlib import Path


def square(x):
    return x * x


def die(x):
    os.kill(os.getpid(), signal.SIGKILL)


def square_or_die(marker, fatal, x):
    """Square a number; the process that gets ``fatal`` first is killed."""
    if x == fatal and not Path(marker).exists():
        Path(marker).touch()
        die(x)
    return x * x


def square_unless(fatal, x):
    """Square a number; every process that gets ``fatal`` is killed."""
    return die(x) if x == fatal else x * x


def rows_after_a_kill(folder, chunks):
    """Number of rows and sum of labels of a shard, noted in a file; the first worker is killed."""
    rows = total = 0
    for chunk in chunks:
        rows, total = rows + len(chunk["labels"]), total + int(chunk["labels"].sum())
    (Path(folder) / f"ran-{total}-{time.monotonic_ns()}").touch()
    marker = Path(folder) / "killed"
    if not marker.exists():
        marker.touch()
        die(rows)
    return rows, total


def killed_always(chunks):
    die(chunks)


def slow_rows(chunks):
    time.sleep(0.5)
    return sum(len(chunk["labels"]) for chunk in chunks)
