"""Executors: results in order, nothing lost when a process is killed, and errors in a sentence."""

import os
import sys
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from calibrant._core import engines
from calibrant._core.engines import _WorkerPool, current_work, mapped, silently, steps, use
from tests.support.shard_tasks import square, square_or_die, square_unless


@pytest.mark.slow
def test_a_pool_survives_the_end_of_a_process(tmp_path):
    task = partial(square_or_die, tmp_path / "marker", 5)
    with _WorkerPool(1) as pool:
        assert list(pool.map(task, range(9))) == [x * x for x in range(9)]
        assert (tmp_path / "marker").exists()
        # results that nobody takes do not hold it up
        results: Any = pool.map(square, range(100))
        assert next(results) == 0
        results.close()
        assert list(pool.map(square, [3])) == [9]


@pytest.mark.slow
def test_a_task_that_kills_every_process_is_named(monkeypatch):
    monkeypatch.setattr(engines, "_ATTEMPTS", 1)
    with _WorkerPool(2) as pool:
        results = pool.map(partial(square_unless, 2), range(4))
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ChildProcessError, match=r"worked on 2, most often for lack of memory"):
            next(results)


def test_a_pool_does_not_run_far_ahead(monkeypatch):
    submitted = []
    with _WorkerPool(2) as pool, ThreadPoolExecutor(1) as threads:

        def submit(fn, *args):
            submitted.append(args)
            return threads.submit(fn, *args)

        monkeypatch.setattr(pool._pool, "submit", submit)
        results = pool.map(square, range(100))
        assert next(results) == 0
        assert len(submitted) == 2 * engines._AHEAD + 1
        assert list(results) == [x * x for x in range(1, 100)]
        assert submitted == [(x,) for x in range(100)]


def test_results_of_any_executor_are_in_order():
    with ThreadPoolExecutor(2) as pool:
        assert list(mapped(pool, square, range(5))) == [0, 1, 4, 9, 16]


class KilledWorker(Exception):
    """The error of dask when workers were lost."""


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (CancelledError(), ConnectionError, "connection to the scheduler was lost"),
        (KilledWorker(), ChildProcessError, "while they worked on 7"),
        (ValueError("bad rows"), ValueError, "^bad rows$"),
    ],
)
def test_failures_are_explained(raised, error, message):
    def fail(x):
        raise raised

    with ThreadPoolExecutor(1) as pool, pytest.raises(error, match=message):
        list(mapped(pool, fail, [7]))


def test_engines():
    with use() as work:
        assert work == current_work() == (None, None, "", "")
    with use(workers=0) as work:
        assert isinstance(work.executor, _WorkerPool)
        assert work.executor.workers == engines._available_cores()
    with use(workers=1) as work:
        assert work.description == "1 worker"
    with use(executor=Here()) as work:
        assert isinstance(work.executor, Here)


def test_progress_is_that_of_the_outermost_steps():
    told: list[tuple[int, int]] = []
    with use(executor=Here(), progress=lambda *step: told.append(step)) as work:
        with use(progress=None):
            assert current_work() == work  # what is left out stays
        with steps(2) as step:
            assert current_work() == work._replace(progress=None)
            step()
        with pytest.raises(KeyError), silently():
            raise KeyError
        assert current_work() == work
    assert told == [(0, 2), (1, 2)]
    assert current_work() == (None, None, "", "")


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match=r"workers must be at least 1, got -1"):
        _WorkerPool(-1)
    with pytest.raises(ValueError, match="name one of them"), use(workers=2, executor=Here()):
        pass
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(ImportError, match=r"pip install 'calibrant\[dask\]'"),
        use(workers="tcp://here"),
    ):
        pass


def test_the_number_of_torch_threads_stays_in_the_home_process(threads):
    threads(3)
    assert list(mapped(Here(), lambda _: torch.get_num_threads(), [None])) == [3]


def test_a_task_in_another_process_runs_on_one_torch_thread(threads):
    threads(3)
    assert engines._in_worker(lambda _: torch.get_num_threads(), os.getpid() + 1, None) == 1


class Here(Executor):
    """Runs tasks in the calling thread."""

    def map(self, fn, *iterables, **_):
        return map(fn, *iterables)
