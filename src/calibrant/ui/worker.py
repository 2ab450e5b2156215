"""A process that works on files, so that the page answers meanwhile and jobs can be stopped."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from calibrant._core.messages import failure_text, printable
from calibrant.ui.fit_choices import Choices

_BUG = "this is a bug in calibrant ({}): please report it with what the terminal shows"
DIED = (
    "the process that worked on the file ended, perhaps because there was not enough memory: use "
    "fewer classes or examples, or the command line, which reads a file in chunks"
)
_PAUSE = 0.1
"""Seconds between two messages on progress."""
_Update: TypeAlias = tuple[str, Any]
LAST = ("done", "failed")
"""Kinds of the last update of a task."""


@dataclass(frozen=True)
class LookTask:
    """Look at a file whose arrays take at most ``memory`` bytes."""

    path: Path
    name: str  # of the file, as the user knows it
    memory: int

    def __call__(self, send: Callable[..., object]) -> dict[str, Any]:
        """Return what the file holds."""
        from calibrant.ui.tasks import look

        return look(self.path.name, self.memory)


@dataclass(frozen=True)
class FitTask:
    """Fit, report and export into a folder."""

    path: Path
    name: str  # of the file, as the user knows it
    out: Path
    choices: Choices

    def __call__(self, send: Callable[..., object]) -> dict[str, Any]:
        """Return what is shown beside the files."""
        from calibrant.ui.tasks import run

        return run(self.path.name, self.name, self.out, self.choices, send)


Task: TypeAlias = LookTask | FitTask


def _work(connection: Connection) -> None:
    """Do one task after another until the server closes the connection."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the server, which then ends this process
    import_module("calibrant.ui.tasks")  # takes seconds, while the user chooses a file
    with suppress(EOFError, BrokenPipeError):
        while True:
            task: Task = connection.recv()
            connection.send(_outcome(task, connection))


def _outcome(task: Task, connection: Connection) -> _Update:
    """Do a task and return its result or the reason of its failure."""
    try:
        os.chdir(task.path.parent)  # so that messages have the name alone, which is replaced
        return "done", task(_throttled(connection))
    except Exception as problem:
        text = failure_text(problem)
        if text is None:
            traceback.print_exc()
            return "failed", _BUG.format(type(problem).__name__)
        return "failed", printable(text.replace(task.path.name, task.name))


def _throttled(connection: Connection) -> Callable[..., object]:
    """Return a function that sends steps at once and progress at a limited rate."""
    last = 0.0

    def send(kind: str, *content: int) -> None:
        nonlocal last
        now = time.monotonic()
        if kind != "progress" or now - last > _PAUSE:
            last = now if kind == "progress" else 0.0
            connection.send((kind, content))

    return send


class Worker:
    """The process as the server sees it; it is started when needed, and again after its end."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> Connection:
        """Return the connection to a process that runs."""
        if self._connection is None or self._process is None or not self._process.is_alive():
            context = get_context("spawn")  # a fork would copy locks that threads hold
            self._connection, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self._process = process  # only now: another thread may kill what it finds here
            theirs.close()
        return self._connection

    def updates(self, task: Task) -> Iterator[_Update]:
        """Do a task; yield its steps, its progress and last its result or failure."""
        try:
            connection = self.start()
            connection.send(task)
            while True:
                update: _Update = connection.recv()
                yield update
                if update[0] in LAST:
                    return
        except (EOFError, OSError):
            self.kill()
            yield "failed", DIED

    def kill(self) -> None:
        """End the process, whatever it does; other threads may call this method alone."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
