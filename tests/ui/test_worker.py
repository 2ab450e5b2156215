"""The process that works: its results, its failures, its end."""

import errno
import os
import signal
import threading
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace

import pytest

from calibrant.ui import tasks, worker
from calibrant.ui.fit_choices import Choices
from calibrant.ui.worker import DIED, FitTask, LookTask, Worker


@pytest.fixture
def path(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the worker changes its folder
    (tmp_path / "a1b2.npz").write_bytes(content)
    return tmp_path / "a1b2.npz"


def outcome(task):
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        return worker._outcome(task, theirs)


def test_a_task_that_succeeds(path):
    kind, found = outcome(LookTask(path, "x.npz", 10**6))
    assert (kind, found["classes"]) == ("done", 3)


def test_errors_have_the_name_that_the_user_knows_and_no_path(path):
    path.write_bytes(path.read_bytes()[:500])
    kind, error = outcome(LookTask(path, "mine\u202e.npz", 10**6))
    assert kind == "failed"
    assert error.startswith("mine\\u202e.npz is damaged or incomplete")
    assert str(path.parent) not in error


def test_a_bug_is_told_as_one_and_shown_in_the_terminal(path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "look", lambda *_: dict[str, int]()["nothing"])
    kind, error = outcome(LookTask(path, "x.npz", 10**6))
    assert kind == "failed"
    assert "bug in calibrant (KeyError)" in error
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_no_bug(path, monkeypatch):
    def look(*_):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise AttributeError("'Stream' object has no attribute 'pos'")

    monkeypatch.setattr(tasks, "look", look)
    kind, error = outcome(LookTask(path, "x.npz", 10**6))
    assert kind == "failed"
    assert error.startswith("No space left on device: make room")


def test_steps_are_sent_at_once_and_progress_at_intervals():
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        send = worker._throttled(theirs)
        for done in range(1000):
            send("progress", done, 1000)
        send("step", 1)
        send("progress", 0, 5)
        theirs.close()
        received = []
        with suppress(EOFError):
            while True:
                received.append(ours.recv())
    assert received[0] == ("progress", (0, 1000))
    assert received[-2:] == [("step", (1,)), ("progress", (0, 5))]
    assert len(received) < 100


def test_a_process_can_be_killed_while_it_starts(monkeypatch):
    """A job may be stopped in the moment in which its process is made."""
    one = Worker()

    class Starting(SpawnProcess):
        def start(self):
            one.kill()

    context = SimpleNamespace(Pipe=Pipe, Process=Starting)
    monkeypatch.setattr(worker, "get_context", lambda _: context)
    with closing(one.start()):
        pass


def pid(one):
    """Return the number of a process that runs, or 0."""
    process = one._process
    return process.pid if process is not None and process.is_alive() else 0


@pytest.mark.slow
def test_a_process_works_is_killed_and_starts_again(path):
    one = Worker()
    task = LookTask(path, "x.npz", 10**6)
    try:
        assert list(one.updates(task))[-1][0] == "done"
        first = pid(one)
        assert list(one.updates(task))[-1][0] == "done"
        assert pid(one) == first  # it stays warm
        os.kill(first, signal.SIGKILL)  # as the system does when memory runs out
        assert list(one.updates(task))[-1] in [("failed", DIED), ("done", outcome(task)[1])]
        updates = one.updates(FitTask(path, "x.npz", path.parent, Choices("auto")))
        assert next(updates) == ("step", (0,))
        threading.Timer(0.1, one.kill).start()
        assert list(updates)[-1] == ("failed", DIED)
        assert pid(one) == 0
    finally:
        one.kill()
