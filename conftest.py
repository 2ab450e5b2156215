"""Set-up of every test: those in tests/, the doctests of src/, the fences of docs/ and README."""

import contextlib
import gc
import os
import sys
import tempfile
import zlib

import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

# Both are read when torch and matplotlib are first imported, so they stand before any test module.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MPLBACKEND", "Agg")

# Modules whose classes derive from those of a large library; without them there are no doctests.
large = ("huggingface", "inspect", "lightning", "vllm")
callbacks = [f"src/calibrant/integrations/{name}.py" for name in large]
callbacks.append("src/calibrant/llm/gate/litellm_callback.py")
collect_ignore = ["docs/conf.py", "docs/generate.py", *callbacks]


def pytest_addoption(parser):
    parser.addoption("--part", type=int, choices=(1, 2), help="Run one of two halves of the files.")


def pytest_ignore_collect(collection_path, config):
    """Leave the files of the other half to another process; of folders, both look at all."""
    part = config.getoption("part")
    if part is None or collection_path.is_dir():
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    return True if zlib.crc32(name.encode()) % 2 + 1 != part else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Search no imported library for garbage, neither now nor in the tests: it is all in use.

    What tests import themselves, such as the exporter, is searched rarely.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)
    return result


def close_figures():
    """Close what tests and pages have drawn: matplotlib warns of more than 20 figures."""
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")


def enter_empty_folder(namespace):
    """Let the examples of one page share an empty working folder."""
    close_figures()
    stack = namespace["_folder"] = contextlib.ExitStack()
    home = os.getcwd()
    os.chdir(stack.enter_context(tempfile.TemporaryDirectory()))
    stack.callback(os.chdir, home)


def leave_folder(namespace):
    close_figures()
    namespace["_folder"].close()
    namespace.clear()  # else what the page made would live to the end of the run


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "benchmarks/arena/README.md"],
    setup=enter_empty_folder,
    teardown=leave_folder,
).pytest()
