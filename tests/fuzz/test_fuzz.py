"""A short run of the fuzzer, with the same inputs every time."""

import queue
import signal
from typing import Any

import numpy as np
import pytest

from tests.fuzz import runner, targets
from tests.fuzz.__main__ import main
from tests.fuzz.targets import TARGETS, reproduction, run, summary


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_inputs_of_every_target(target):
    for seed in range(TARGETS[target]):
        try:
            run(target, seed)
        except Exception as error:
            pytest.fail(f"{reproduction(target, seed)}\n{summary(error)}")


def test_an_input_is_determined_by_its_seed(monkeypatch):
    drawn = []
    monkeypatch.setattr(targets, "check_of", lambda target: lambda rng: drawn.append(rng.random()))
    for seed in (1, 2, 1):
        run("metrics", seed)
    assert drawn[0] == drawn[2] != drawn[1]


def test_what_libraries_warn_of_is_a_failure(monkeypatch):
    monkeypatch.setattr(targets, "check_of", lambda target: lambda rng: np.ones(1) / np.zeros(1))
    with pytest.raises(RuntimeWarning, match="divide by zero"):
        run("metrics", 0)


class Worker:
    """In place of a process."""

    def __init__(self, target, first, step, results):
        self.targets, self.place, self.alive = target, [0, 7, 0], True
        self.process = self

    def problem(self):
        was, self.alive = self.alive, True
        return "" if was else f"the process ended with exit code {-signal.SIGABRT}"

    def replaced(self):
        return self

    def kill(self):
        pass


def test_failures_are_printed_as_commands(monkeypatch, capsys):
    events = [
        ("count", "readers", 5),
        ("failure", "readers", 12, "ValueError at x.py:1", "ValueError: odd"),
        *[("failure", "readers", n, "KeyError at y.py:2", "KeyError: 'a'") for n in range(20, 30)],
        ("count", "readers", 5),
    ]
    monkeypatch.setattr(runner, "Worker", Worker)
    monkeypatch.setattr(runner, "watch", lambda workers, results: iter(events))
    assert runner.fuzz(["readers"], 0, 1, minutes=1, inputs=10) == 11
    printed = capsys.readouterr().out
    assert "python -m tests.fuzz --target readers --seed 12\n    ValueError: odd\n" in printed
    assert printed.count("KeyError: 'a'") == 3
    assert "10 inputs, 11 failures (readers 10)" in printed
    assert "10 times KeyError at y.py:2" in printed


def test_an_input_that_ends_its_process_is_reported():
    worker: Any = Worker(["readers"], 0, 1, None)
    worker.alive = False

    class Nothing:
        def get(self, timeout):
            raise queue.Empty

    events = runner.watch([worker], Nothing())
    assert next(events) == ("nothing",)
    event, target, seed, *_, problem = next(events)
    assert (event, target, seed) == ("failure", "readers", 7)
    assert problem == "the process ended with exit code -6"


def test_one_input_again(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "--target", "metrics", "--seed", "3"])
    assert main() == 0
    assert capsys.readouterr().out == "metrics 3: nothing is wrong\n"
