"""Locks: one process at a time, and none that outlives its process."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import calibrant
from calibrant._core.atomic_files import locked

HOLD = """
    import sys, time
    from pathlib import Path
    from calibrant._core.atomic_files import locked

    with locked(Path(sys.argv[1])):
        print("locked", flush=True)
        time.sleep(float(sys.argv[2]))
        Path(sys.argv[1]).write_text("written by the other")
"""


def other_process(target, seconds):
    """Start a process that holds the lock for some seconds, and then writes the file."""
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(target), str(seconds)]
    env = {"PYTHONPATH": str(Path(calibrant.__file__).parents[1])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_lock_is_waited_for(tmp_path):
    with other_process(tmp_path / "state.json", 1), locked(tmp_path / "state.json"):
        assert (tmp_path / "state.json").read_text() == "written by the other"


def test_a_lock_that_is_not_waited_for(tmp_path):
    with locked(tmp_path / "state.json"), pytest.raises(BlockingIOError):
        locked(tmp_path / "state.json", wait=False).__enter__()
    with locked(tmp_path / "state.json", wait=False):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    with other_process(tmp_path / "state.json", 600) as process:
        process.kill()
        process.wait()
        begin = time.monotonic()
        with locked(tmp_path / "state.json"):
            assert time.monotonic() - begin < 10


def test_other_files_are_not_locked(tmp_path):
    with other_process(tmp_path / "state.json", 600) as process, locked(tmp_path / "other.json"):
        process.kill()
    assert not (tmp_path / "state.json").exists()


def test_a_lock_needs_its_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder .*gone does not exist"):
        locked(tmp_path / "gone" / "state.json").__enter__()
