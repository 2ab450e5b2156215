"""Walking the parts of a data set, here or over an executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import torch

from calibrant.data import Part

T = TypeVar("T")
Report = Callable[[int], object]
"""Told the number of rows of each block when it is done."""


def over_parts(
    task: Callable[[Part, Report], T],
    parts: Sequence[Part],
    executor: Executor | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[T]:
    """Yield ``task(part, report)`` for every part, in order.

    With an executor each part is one task of its own, which must be picklable. ``progress`` is
    called with (rows done, rows in all): after each block here, after each part there.
    """
    total, done = sum(part.rows for part in parts), 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    if executor is None:
        for part in parts:
            yield task(part, report)
        return
    alone = partial(_alone, task, os.getpid())
    for part, found in zip(parts, executor.map(alone, parts), strict=True):
        report(part.rows)
        yield found


def _alone(task: Callable[[Part, Report], T], home: int, part: Part) -> T:
    """Run a task; in a process of its own on one thread, since the pool uses the cores."""
    if os.getpid() != home:
        torch.set_num_threads(1)
    return task(part, _silent)


def _silent(rows: int) -> None:
    """Report nothing: progress inside another process has no one to tell."""


BLOCK = 1 << 22
"""Numbers read at a time: 32 MiB of float64, enough work for every core."""
