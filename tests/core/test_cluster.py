"""The executor of a cluster, on a client that is made up; the real one is in test_cluster.py of
workflows."""

import time
from typing import Any

import pytest

from calibrant._core import engines
from calibrant._core.engines import _ClusterExecutor

dask = pytest.importorskip("dask")


class Task:
    """A task that is done at once, or never."""

    def __init__(self, value, done=True):
        self.value, self.finished = value, done

    def done(self):
        return self.finished

    def result(self, timeout=None):
        if not self.finished:
            time.sleep(timeout)
            raise TimeoutError
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Client:
    """A client of a cluster with so many workers at each look; the last number stays."""

    def __init__(self, tasks, workers=(2,)):
        self.tasks, self.workers, self.cancelled = tasks, list(workers), None

    def map(self, fn, items, pure):
        assert not pure  # else a task that was done before is not run again
        return self.tasks

    def scheduler_info(self, n_workers):
        count = self.workers.pop(0) if len(self.workers) > 1 else self.workers[0]
        return {"workers": dict.fromkeys(range(count))}

    def cancel(self, tasks):
        self.cancelled = tasks


def executor(client: Any, patience=0.05):
    return _ClusterExecutor(client, patience)


def test_results_are_in_order():
    client = Client([Task(3), Task(1), Task(2)])
    assert list(executor(client).map(abs, [0, 0, 0])) == [3, 1, 2]
    assert client.cancelled == []


def test_a_cluster_without_workers_is_given_up():
    client = Client([Task(3), Task(1, done=False), Task(2)], workers=[1, 0])
    results = executor(client).map(abs, [0, 0, 0])
    assert next(results) == 3
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=r"no workers for 0\.05 s: start some .*TIMEOUT sets"):
        next(results)
    assert 0.05 < time.monotonic() - start < 5
    assert client.cancelled == client.tasks[1:]


def test_workers_that_come_back_are_waited_for(monkeypatch):
    """The time begins again with each look that finds a worker."""
    monkeypatch.setattr(engines, "_LOOK_SECONDS", 0.02)
    slow = Task(1, done=False)

    class Returning(Client):
        def scheduler_info(self, n_workers):
            found = super().scheduler_info(n_workers)
            slow.finished = not self.workers[1:]
            return found

    client = Returning([slow], workers=[*[0, 0, 1] * 8, 1])
    assert list(executor(client, patience=0.2).map(abs, [0])) == [1]


def test_the_timeout_of_a_task_is_its_own():
    client = Client([Task(TimeoutError("the store does not answer"))], workers=[0])
    with pytest.raises(TimeoutError, match="the store does not answer"):
        list(executor(client).map(abs, [0]))


def test_the_configuration_of_dask_sets_the_time():
    assert _ClusterExecutor(None).patience == 300
    with dask.config.set({engines._PATIENCE_SETTING: "2 minutes"}):
        assert _ClusterExecutor(None).patience == 120
