"""Jobs run one at a time, in order, bounded in number, and can be stopped."""

import queue
import threading
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from calibrant.ui import jobs as module
from calibrant.ui.jobs import Job, Jobs
from calibrant.ui.worker import DIED, LookTask


class SlowWorker:
    """Passes on what the test tells it to; a kill ends the task that it has."""

    def __init__(self):
        self.told: queue.Queue = queue.Queue()
        self.started: queue.Queue = queue.Queue()
        self.kills = 0

    def start(self):
        pass

    def updates(self, task):
        self.started.put(task.name)
        while True:
            update = self.told.get(timeout=20)
            yield update
            if update[0] in ("done", "failed"):
                return

    def kill(self):
        self.kills += 1
        self.told.put(("failed", DIED))


@pytest.fixture
def worker():
    return SlowWorker()


@pytest.fixture
def jobs(tmp_path, worker):
    made = Jobs(tmp_path, worker)
    yield made
    made.close()


def job(name="x"):
    return Job(LookTask(Path("x.npz"), name, 1), ("one", "two"))


def wait_until(condition):
    tick = threading.Event()
    for _ in range(1000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("nothing happened")


def test_a_job_tells_its_steps_progress_and_result(jobs, worker):
    one = jobs.add(job())
    worker.started.get(timeout=20)
    assert one.state == "running"
    worker.told.put(("step", (1,)))
    worker.told.put(("progress", (3, 7)))
    wait_until(lambda: one.progress == (3, 7))
    assert (one.to_dict()["step"], one.to_dict()["steps"]) == (1, ["one", "two"])
    worker.told.put(("step", (2,)))
    wait_until(lambda: one.step == 2)
    assert one.progress is None
    worker.told.put(("done", {"a": 1}))
    wait_until(lambda: one.is_over)
    assert (one.state, one.result, one.error) == ("done", {"a": 1}, None)


def test_jobs_run_one_at_a_time_in_order(jobs, worker):
    added = [jobs.add(job(name)) for name in "abc"]
    for name, one in zip("abc", added, strict=True):
        assert worker.started.get(timeout=20) == name
        assert worker.started.empty()
        worker.told.put(("failed", f"no {name}"))
        wait_until(lambda one=one: one.is_over)
        assert (one.state, one.error) == ("failed", f"no {name}")


def test_a_job_that_waits_is_stopped_without_a_kill(jobs, worker):
    first, second = jobs.add(job("a")), jobs.add(job("b"))
    worker.started.get(timeout=20)
    jobs.stop(second)
    assert (second.state, worker.kills) == ("stopped", 0)
    worker.told.put(("done", {}))
    wait_until(lambda: first.state == "done")
    assert worker.started.empty()


def test_a_running_job_is_stopped_by_a_kill_and_the_next_one_runs(jobs, worker):
    first, second = jobs.add(job("a")), jobs.add(job("b"))
    worker.started.get(timeout=20)
    jobs.stop(first)
    assert worker.started.get(timeout=20) == "b"
    assert (first.state, first.error, worker.kills) == ("stopped", None, 1)
    worker.told.put(("done", {}))
    wait_until(lambda: second.state == "done")
    jobs.stop(second)
    assert second.state == "done"


def test_a_stop_that_comes_before_the_worker_has_the_job_still_ends_it(jobs, worker):
    one = jobs.add(job())
    worker.started.get(timeout=20)
    worker.kill = lambda: None  # as if there were no process yet
    jobs.stop(one)
    del worker.kill
    worker.told.put(("step", (0,)))
    wait_until(lambda: worker.kills == 1)
    assert one.state == "stopped"


def test_the_number_of_waiting_jobs_is_bounded(jobs, worker):
    jobs.add(job())
    worker.started.get(timeout=20)
    for _ in range(module.MAX_WAITING):
        jobs.add(job())
    with pytest.raises(HTTPException, match="waiting already"):
        jobs.add(job())


def test_the_oldest_results_make_room(jobs, worker, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_JOBS", 2)
    added = []
    for name in "abc":
        added.append(jobs.add(job(name)))
        worker.told.put(("done", {}))
        wait_until(lambda: added[-1].is_over)
    assert jobs.get(added[0].id) is None
    assert {path.name for path in tmp_path.iterdir()} == {one.id for one in added[1:]}
