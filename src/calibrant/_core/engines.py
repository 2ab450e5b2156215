"""Executors for shards: the cores of this machine, or the workers of a dask cluster.

Everything that walks over shards takes an :class:`concurrent.futures.Executor` and uses nothing but
its ``map``, so that any other one serves as well.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from calibrant._core.cluster import ClusterExecutor
from calibrant._core.messages import printable

S = TypeVar("S")
T = TypeVar("T")

AHEAD = 2  # tasks that wait for each worker of a pool, so that none is idle
ATTEMPTS = 3
"""Worker processes that may end during one task, for lack of memory say, before it fails."""
ENGINE_FAILURES = (ConnectionError, ChildProcessError)
"""Errors of the engine, not of a task: another task would fail as well."""
CONNECT = 10.0  # seconds to wait for a scheduler
DASK = "a dask cluster needs dask.distributed: pip install 'calibrant[dask]'"


class Engine(NamedTuple):
    """An executor, None for this process, with a description and the page that shows its work."""

    executor: Executor | None = None
    description: str = ""
    dashboard: str | None = None


@contextmanager
def open_engine(workers: int | None = None, dask: str | None = None) -> Iterator[Engine]:
    """Yield the engine for a number of processes on this machine, or for a dask scheduler.

    Parameters
    ----------
    workers : int, optional
        Processes; 0 stands for one on each core.
    dask : str, optional
        Address of a scheduler, such as ``"tcp://10.0.0.1:8786"``.

    Examples
    --------
    >>> with open_engine() as engine:
    ...     engine.executor is None
    True
    """
    if workers is not None and dask is not None:
        raise ValueError("workers and dask are two engines, got both: name one of them")
    if dask is not None:
        with _dask_engine(dask) as engine:
            yield engine
    elif workers is not None:
        with WorkerPool(workers or available_cores()) as pool:
            yield Engine(pool, f"{pool.workers} worker{'s' * (pool.workers != 1)}")
    else:
        yield Engine()


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _dask_engine(address: str) -> Iterator[Engine]:
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError(DASK, name="distributed") from error
    try:
        client = Client(address, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError) as problem:
        raise ConnectionError(
            f"no dask scheduler answers at {address} ({problem}); check the address that "
            "'dask scheduler' prints when it starts"
        ) from problem
    with client:
        count = len(client.scheduler_info(n_workers=-1)["workers"])
        workers = f"{count} dask worker{'s' * (count != 1)} of {address}"
        yield Engine(ClusterExecutor(client), workers, client.dashboard_link)


class WorkerPool(Executor):
    """A pool of processes that survives the end of some of them.

    ``map`` keeps a few tasks ahead of the results that were taken, so that results do not pile up.
    When a process is killed, the tasks that were not finished are run again in new ones, the next
    one alone: a task during which three processes ended is an error.

    Parameters
    ----------
    workers : int
        Number of processes. They are spawned: a script that uses a pool does so below
        ``if __name__ == "__main__":``.

    Examples
    --------
    >>> with WorkerPool(2) as pool:  # processes start with the first task
    ...     pool.workers
    2
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.workers = workers
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        return ProcessPoolExecutor(self.workers, context, _prepare)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call in the pool, once."""
        return self._pool.submit(fn, *args, **kwargs)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Yield the results of calls in their order; ``timeout`` and ``chunksize`` are not used."""
        return self._results(fn, list(zip(*iterables, strict=False)))

    def _results(self, fn: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        waiting: deque[Future[T]] = deque()
        failures = 0
        try:
            for i in range(len(calls)):
                while True:
                    # after a failure the next task is alone, so that the blame is certain
                    ahead = 1 if failures else AHEAD * self.workers + 1
                    try:
                        for call in calls[i + len(waiting) : i + ahead]:
                            waiting.append(self.submit(fn, *call))
                        result = waiting[0].result()
                        break
                    except BrokenExecutor as problem:
                        failures += 1
                        waiting.clear()
                        self._restart()
                        if failures > ATTEMPTS:
                            raise ended_early(calls[i][-1]) from problem
                waiting.popleft()
                failures = 0
                yield result
        finally:
            for future in waiting:
                future.cancel()

    def _restart(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._started()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _prepare() -> None:
    """Prepare a process of the pool, before it imports torch."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin would take cores from others


def mapped(executor: Executor, task: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Yield the results of an executor in order; its own failures are explained in a sentence."""
    results = executor.map(partial(in_worker, task, os.getpid()), items)
    for item in items:
        try:
            yield next(results)
        except CancelledError as problem:
            raise ConnectionError(
                "the connection to the scheduler was lost, and results with it: start it again, "
                "and run the same command once more"
            ) from problem
        except Exception as problem:
            if type(problem).__name__ == "KilledWorker":  # of dask, after some attempts
                raise ended_early(item) from problem
            raise


def in_worker(task: Callable[[S], T], home: int, item: S) -> T:
    """Call a task; in a process of its own on one thread, since the executor uses the cores."""
    if os.getpid() != home:
        import torch

        torch.set_num_threads(1)
    return task(item)


def ended_early(item: object) -> ChildProcessError:
    """Return the error for a task during which one worker after another came to its end."""
    name = printable(str(getattr(item, "path", item)))
    return ChildProcessError(
        f"worker processes ended without a result while they worked on {name}, most often for "
        "lack of memory: start fewer workers, or give them more memory"
    )
