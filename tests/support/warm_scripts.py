"""Scripts in processes of their own, which have imported torch and calibrant when they start."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path


class Script:
    """A script that runs, with arguments as ``python -c`` takes them.

    It ends like a process of :mod:`multiprocessing`: what Python does at its exit is not tested.
    """

    def __init__(self, code, *arguments, cwd=None, env=None):
        self._folder = tempfile.TemporaryDirectory()
        texts = (textwrap.dedent(code), *map(str, arguments))
        self._process = multiprocessing.get_context("spawn").Process(
            target=_execute, args=(self._folder.name, texts, cwd, env or {})
        )
        self._process.start()

    def result(self, timeout=300):
        """Wait for the end; return the exit code and what was printed."""
        self._process.join(timeout)
        self._process.kill()  # if it hangs
        self._process.join()
        with self._folder as folder:
            out, err = ((Path(folder) / name).read_text("utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess([], self._process.exitcode or 0, out, err)


def run_script(code, *arguments, **options):
    """Run a script to its end."""
    return Script(code, *arguments, **options).result()


def _execute(folder, texts, cwd, env):
    for name, number in (("out", 1), ("err", 2)):
        target = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(target, number)
    code, *arguments = texts
    sys.argv = ["-c", *arguments]
    os.environ |= env
    if cwd is not None:
        os.chdir(cwd)
    try:
        exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.exit(1)
