import functools
import importlib
import logging
import multiprocessing.context
import multiprocessing.forkserver
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from calibrant import cli
from calibrant._core import chunks as _walk
from tests.support.json_page import check_output

IMPORTED = [
    *(
        "distributed",
        "calibrant.cli",
        "calibrant.llm",
        "calibrant.monitor",
        "calibrant.show.report",
    ),
    *("calibrant.ui.worker", "calibrant.workflows.apply"),
]
"""Modules of the processes that tests start."""

settings.register_profile("calibrant", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("calibrant")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)


@pytest.fixture(scope="session", autouse=True)
def warm_processes():
    """Let processes start as forks of one that has imported everything, which saves seconds each.

    They would be spawned, which is as safe: the one that forks has no threads either.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        yield
        return
    contexts: Any = multiprocessing.context
    server: Any = multiprocessing.forkserver
    warm = multiprocessing.get_context("forkserver")
    warm.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(contexts._concrete_contexts, "spawn", warm)
        yield
    server._forkserver._stop()


@pytest.fixture(autouse=True)
def same_draws():
    """Draw the weights of networks alike in every order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def closed_figures():
    """Close the figures of a test: pyplot keeps them, and warns of many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def threads():
    """Set the number of torch threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a dozen numbers: a few rows each, and every input is worth several threads."""
    monkeypatch.setitem(_walk.CHUNK_SIZE, "cpu", 12)


@pytest.fixture(scope="session")
def operators_read_once():
    """Let torch read its operators and those of ONNX once, and not for each export."""
    registration = importlib.import_module("torch.onnx._internal.exporter._registration")
    utils = importlib.import_module("torch._export.utils")
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(registration.ONNXRegistry.from_torchlib)
        patch.setattr(registration.ONNXRegistry, "from_torchlib", staticmethod(read))
        once = functools.cache(utils._materialize_cpp_cia_ops)
        patch.setattr(utils, "_materialize_cpp_cia_ops", once)
        # which would write down every graph, since pytest listens to all loggers
        patch.setattr("torch._logging._internal.trace_log", logging.Logger("silent"))
        yield


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command in this process; returns exit code, stdout and stderr.

    JSON is compared with the page that describes it.
    """
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["calibrant", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        if "--json" in arguments and out:
            check_output([*map(str, arguments)], out)
        return stopped.value.code, out, err

    return call
