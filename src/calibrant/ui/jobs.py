"""Jobs: a bounded queue of tasks that run one at a time, and their results."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from calibrant.ui.worker import LAST, Task, Worker

MAX_WAITING = 4
"""Jobs that may wait for the one that runs."""
MAX_JOBS = 24
"""Jobs whose results are kept."""


def _new_id() -> str:
    """Return an id that nobody can guess."""
    return secrets.token_hex(8)


@dataclass
class Job:
    """A task, its progress, and its result."""

    task: Task
    titles: Sequence[str] = ()
    state: str = "waiting"  # then "running", and "done", "failed" or "stopped" in the end
    step: int = -1
    progress: tuple[int, int] | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    began: float | None = None
    ended: float | None = None
    id: str = field(default_factory=_new_id)

    @property
    def is_over(self) -> bool:
        """Return True if nothing more will happen."""
        return self.state in ("done", "failed", "stopped")

    def end(
        self, state: str, *, result: dict[str, Any] | None = None, error: str | None = None
    ) -> None:
        """Set the final state."""
        self.result, self.error, self.ended = result, error, time.monotonic()
        self.state = state  # last: who sees the state sees the rest

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        seconds = None if self.began is None else (self.ended or time.monotonic()) - self.began
        return {
            "id": self.id,
            "name": self.task.name,
            "state": self.state,
            "steps": list(self.titles),
            "step": self.step,
            "progress": self.progress,
            "seconds": seconds,
            "error": self.error,
            "result": self.result,
        }


class Jobs:
    """Runs jobs in a thread that talks to the worker; the results of each are in its folder."""

    def __init__(self, home: Path, worker: Worker | None = None) -> None:
        self.home = home
        self._worker = worker or Worker()
        self._jobs: dict[str, Job] = {}
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def folder(self, key: str) -> Path:
        """Return the folder of the results of a job."""
        return self.home / key

    def check_room(self) -> None:
        """Raise if no job can be added."""
        if len(self._queue) >= MAX_WAITING:
            raise HTTPException(
                429, f"{MAX_WAITING} jobs are waiting already: stop one, or wait for one to end"
            )

    def add(self, job: Job) -> Job:
        """Queue a job and forget the oldest that are over, with their results."""
        with self._change:
            self.check_room()
            over = [old for old in self._jobs.values() if old.is_over]
            for old in over[: max(0, len(self._jobs) + 1 - MAX_JOBS)]:
                del self._jobs[old.id]
                shutil.rmtree(self.folder(old.id), ignore_errors=True)
            self.folder(job.id).mkdir(exist_ok=True)
            self._jobs[job.id] = job
            self._queue.append(job)
            self._change.notify()
        return job

    def get(self, key: str) -> Job | None:
        """Return a job by its id."""
        return self._jobs.get(key)

    def stop(self, job: Job) -> None:
        """End a job that waits or runs; one that is over stays as it is."""
        with self._change:
            if job in self._queue:
                self._queue.remove(job)
                job.end("stopped")
            elif job is self._running:
                job.end("stopped")
                self._worker.kill()

    def close(self) -> None:
        """End the running job, the worker and the thread."""
        with self._change:
            self._closed = True
            self._change.notify()
            self._worker.kill()
        self._thread.join()
        self._worker.kill()  # again, since the thread may have started it meanwhile

    def _loop(self) -> None:
        self._worker.start()
        while True:
            with self._change:
                self._running = None
                self._change.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                job = self._running = self._queue.popleft()
                job.state, job.began = "running", time.monotonic()
            for kind, content in self._worker.updates(job.task):
                with self._change:
                    if job.is_over or self._closed:
                        if kind not in LAST:  # it was stopped before the worker had it
                            self._worker.kill()
                    elif kind == "step":
                        job.step, job.progress = content[0], None
                    elif kind == "progress":
                        job.progress = content
                    elif kind == "done":
                        job.end("done", result=content)
                    else:
                        job.end("failed", error=content)
