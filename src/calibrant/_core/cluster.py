"""An executor for the workers of a dask cluster, which ends if all of them are lost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")

LOOK = 1.0  # seconds between two looks at the number of workers
PATIENCE = "5 minutes"
"""Time that a cluster may be without workers, such as one that starts them when there is work."""
SETTING = "calibrant.no-workers-timeout"
"""Name of another time in the configuration of dask."""


class ClusterExecutor(Executor):
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
        self.client = client
        self.patience = _configured() if patience is None else patience

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call on a worker."""
        future: Future[T] = self.client.get_executor(pure=False).submit(fn, *args, **kwargs)
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Yield the results of calls in their order; ``timeout`` and ``chunksize`` are not used."""
        return self._results(deque(self.client.map(fn, *map(list, iterables), pure=False)))

    def _results(self, futures: deque[Any]) -> Iterator[Any]:
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
                return future.result(timeout=min(LOOK, self.patience))
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


def _configured() -> float:
    import dask
    from dask.utils import parse_timedelta

    return float(parse_timedelta(dask.config.get(SETTING, PATIENCE)))
