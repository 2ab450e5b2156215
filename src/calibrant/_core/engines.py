"""Executors for shards: the cores of this machine, or the workers of a dask cluster.

The verbs find the executor and the callback for progress here, so that they need not be passed
through every function on the way. Of an executor nothing is used but its ``map``.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from calibrant._core.messages import needed, printable

if TYPE_CHECKING:
    from distributed import Client

S = TypeVar("S")
T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], object]
"""Called with (done, total) in a long task."""

_AHEAD = 2  # tasks that wait for each worker of a pool, so that none is idle
_ATTEMPTS = 3
"""Worker processes that may end during one task, for lack of memory say, before it fails."""
ENGINE_FAILURES = (ConnectionError, ChildProcessError)
"""Errors of the engine, not of a task: another task would fail as well."""
_CONNECT_SECONDS = 10.0  # seconds to wait for a scheduler
_LOOK_SECONDS = 1.0  # seconds between two looks at the number of workers of a cluster
_PATIENCE_SETTING, _PATIENCE = "calibrant.no-workers-timeout", "5 minutes"
"""Setting of dask for the time that a cluster may be without workers, such as one that starts them
when there is work, and its default."""


class Work(NamedTuple):
    """Where the verbs process shards at present, and how they report progress.

    Attributes
    ----------
    executor : Executor or None
        Runs each shard as a task of its own; None stands for this process.
    progress : callable or None
        Called with (done, total), in examples unless a verb counts steps of its own.
    description, dashboard : str
        Name of the engine, and address of the page that shows its work; empty without one.
    """

    executor: Executor | None = None
    progress: Progress | None = None
    description: str = ""
    dashboard: str = ""


_work: ContextVar[Work] = ContextVar("work", default=Work())  # noqa: B039  # never changed


def current_work() -> Work:
    """Return the executor and the callback that :func:`use` has set."""
    return _work.get()


@contextmanager
def use(
    *,
    workers: int | str | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Iterator[Work]:
    """Process shards in several processes, and report progress, inside a ``with`` block.

    Parameters
    ----------
    workers : int or str, optional
        Number of processes of this machine, 0 for one on each core; or the address of the scheduler
        of a dask cluster, such as ``"tcp://10.0.0.1:8786"``.
    executor : concurrent.futures.Executor, optional
        Any other executor, used through its ``map`` alone.
    progress : callable, optional
        Called with (examples done, examples in all) after each chunk or shard.

    Examples
    --------
    >>> from calibrant import evaluate
    >>> from calibrant.data import sample_path
    >>> seen = []
    >>> with use(progress=lambda done, total: seen.append(f"{done} of {total}")):
    ...     result = evaluate(sample_path(), level=None)
    >>> seen
    ['10000 of 10000']
    """
    if workers is not None and executor is not None:
        raise ValueError("workers and executor are different engines: name one of them")
    work = current_work()
    if progress is not None:
        work = work._replace(progress=progress)
    with ExitStack() as stack:
        if executor is not None:
            work = work._replace(executor=executor)
        elif isinstance(workers, str):
            client = stack.enter_context(_dask_client(workers))
            count = len(client.scheduler_info(n_workers=-1)["workers"])
            text = f"{count} dask worker{'s' * (count != 1)} of {workers}"
            page = client.dashboard_link or ""
            work = Work(_ClusterExecutor(client), work.progress, text, page)
        elif workers is not None:
            pool = stack.enter_context(_WorkerPool(workers or _available_cores()))
            text = f"{pool.workers} worker{'s' * (pool.workers != 1)}"
            work = Work(pool, work.progress, text)
        stack.enter_context(_set(work))
        yield work


@contextmanager
def _set(work: Work) -> Iterator[None]:
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def report(done: int, total: int) -> None:
    """Tell the callback that :func:`use` has set, if there is one, how much is done."""
    if (progress := current_work().progress) is not None:
        progress(done, total)


def silently() -> AbstractContextManager[None]:
    """Report no progress inside a ``with`` block, for steps that are details."""
    return _set(current_work()._replace(progress=None))


@contextmanager
def steps(total: int) -> Iterator[Callable[[], None]]:
    """Yield what reports that one more of some steps is done; passes within a step are silent."""
    progress, done = current_work().progress, -1

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    step()
    with silently():
        yield step


def _available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _dask_client(address: str) -> Iterator[Any]:
    """Yield the client of a scheduler."""
    with needed("a dask cluster needs dask.distributed", "'calibrant[dask]'"):
        from distributed import Client
    try:
        client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as problem:
        raise ConnectionError(
            f"no dask scheduler answers at {address} ({problem}); check the address that "
            "'dask scheduler' prints when it starts"
        ) from problem
    with client:
        yield client


class _WorkerPool(Executor):
    """A pool of processes that goes on when some of them are killed.

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
    >>> with _WorkerPool(2) as pool:  # processes start with the first task
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

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Yield the results of calls in their order; ``timeout`` and ``chunksize`` are not used."""
        calls = list(zip(*iterables, strict=False))
        waiting: deque[Future[T]] = deque()
        failures = 0
        try:
            for i in range(len(calls)):
                while True:
                    # after a failure the next task is alone, so that the blame is certain
                    ahead = 1 if failures else _AHEAD * self.workers + 1
                    try:
                        for call in calls[i + len(waiting) : i + ahead]:
                            waiting.append(self._pool.submit(fn, *call))
                        result = waiting[0].result()
                        break
                    except BrokenExecutor as problem:
                        failures += 1
                        waiting.clear()
                        self.shutdown(wait=False, cancel_futures=True)
                        self._pool = self._started()
                        if failures > _ATTEMPTS:
                            raise _ended_early(calls[i][-1]) from problem
                waiting.popleft()
                failures = 0
                yield result
        finally:
            for future in waiting:
                future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _prepare() -> None:
    """Prepare a process of the pool, before it imports torch."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin would take cores from others


class _ClusterExecutor(Executor):
    """The workers behind a dask client.

    The executor that a client has itself waits for a result without end if all workers are lost.

    Parameters
    ----------
    client : distributed.Client
    patience : float, optional
        Seconds without workers after which the wait for a result ends with a ConnectionError. The
        default is ``calibrant.no-workers-timeout`` of dask's configuration, or else five minutes.
    """

    def __init__(self, client: Client, patience: float | None = None) -> None:
        import dask
        from dask.utils import parse_timedelta

        self.client = client
        setting = dask.config.get(_PATIENCE_SETTING, _PATIENCE)
        self.patience = float(parse_timedelta(setting)) if patience is None else patience

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Yield the results of calls in their order; ``timeout`` and ``chunksize`` are not used."""
        futures = deque(self.client.map(fn, *map(list, iterables), pure=False))
        try:
            while futures:
                yield self._result(futures[0])
                futures.popleft()  # which frees the memory of a worker
        finally:
            self.client.cancel(list(futures))

    def _result(self, future: Any) -> Any:
        seen = time.monotonic()
        while not future.done():
            try:
                return future.result(timeout=min(_LOOK_SECONDS, self.patience))
            except TimeoutError:  # of the wait, unless the task is done
                pass
            if self.client.scheduler_info(n_workers=-1)["workers"]:
                seen = time.monotonic()
            elif time.monotonic() - seen > self.patience:
                raise ConnectionError(
                    f"the dask cluster has had no workers for {self.patience:g} s: start some with "
                    "'dask worker', and run the same command once more; "
                    "DASK_CALIBRANT__NO_WORKERS_TIMEOUT sets another time, such as 1h"
                )
        return future.result()


def mapped(executor: Executor, task: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Yield the results of an executor in order; its own failures are explained in a sentence."""
    results = executor.map(partial(_in_worker, task, os.getpid()), items)
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
                raise _ended_early(item) from problem
            raise


def _in_worker(task: Callable[[S], T], home: int, item: S) -> T:
    """Call a task; in a process of its own on one thread, since the executor uses the cores."""
    if os.getpid() != home:
        import torch

        torch.set_num_threads(1)
    return task(item)


def _ended_early(item: object) -> ChildProcessError:
    """Return the error for a task during which one worker after another came to its end."""
    name = printable(str(getattr(item, "path", item)))
    return ChildProcessError(
        f"worker processes ended without a result while they worked on {name}, most often for "
        "lack of memory: start fewer workers, or give them more memory"
    )
