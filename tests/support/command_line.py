"""The command line as a process, and what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import calibrant

ROWS = 400
"""Examples of the file that the tests of the verbs share."""


def in_shell(*arguments, **options):
    """Run the command as a process of its own."""
    command = [sys.executable, "-m", "calibrant", *map(str, arguments)]
    options.setdefault("stdout", subprocess.PIPE)
    env = {**os.environ, "PYTHONPATH": str(Path(calibrant.__file__).parents[1])}
    env |= options.pop("env", {})
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, env=env, **options)


def set_clock(monkeypatch, now):
    """Let the progress bar read the time from a list.

    Not the clock of the module time: servers of other tests run in threads, and one that computes
    how long to sleep by another clock does not wake up again.
    """
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("calibrant.cli.shared.time", clock)


def figures(out):
    """Rows of a printed table: first words, then the value, then the interval."""
    pattern = re.compile(r"^(\S.*?) {2,}([\d.]+)( %)?(?: +\[([\d.]+), ([\d.]+)\])?\s*$", re.M)
    return {m[1]: (float(m[2]), bool(m[3]), m[4] and float(m[4])) for m in pattern.finditer(out)}
