"""How much code a command runs through, and how much there is to read.

    python benchmarks/walkthrough.py [FILE]

Runs evaluate, fit, compare, apply and report on a prediction file, by default the sample that
comes with the package, and a report on simulated answers. Counts the functions of calibrant that
each calls, the source files that they are in, and how often the prediction file is opened. To look
at another checkout, put its ``src`` first in PYTHONPATH.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import ast
import inspect
import io
import json
import statistics
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import calibrant
from calibrant.cli import main as command_line

PACKAGE = Path(calibrant.__file__).resolve().parent
PATHS = (str, bytes, os.PathLike)
OPENER = "open_dataset"
"""The function that reads the headers of a prediction file."""


# What a command does.


@dataclass
class Trace:
    """What was seen while a command ran."""

    path: str
    codes: set[CodeType] = field(default_factory=set)
    file_opens: int = 0
    header_reads: int = 0
    running: bool = False

    def saw_call(self, frame: FrameType, event: str, _: Any) -> None:
        """For ``sys.setprofile``."""
        if event != "call" or not frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            return
        self.codes.add(frame.f_code)
        self.header_reads += frame.f_code.co_name == OPENER

    def saw_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """For ``sys.addaudithook``: open, io.open and os.open all raise the event open."""
        if self.running and event == "open" and isinstance(arguments[0], PATHS):
            self.file_opens += os.path.realpath(os.fsdecode(arguments[0])) == self.path

    def functions(self) -> set[CodeType]:
        """Functions of modules and methods of classes."""
        return {code for code in self.codes if is_function(code) and not is_nested(code)}

    def nested(self) -> set[CodeType]:
        """Functions inside functions, lambdas and comprehensions."""
        return {code for code in self.codes if is_function(code) and is_nested(code)}

    def sources(self) -> set[str]:
        return {code.co_filename for code in self.codes if is_function(code)}


def is_function(code: CodeType) -> bool:
    """Whether it is no body of a module or of a class, which run when they are imported."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def is_nested(code: CodeType) -> bool:
    return code.co_name.startswith("<") or code.co_flags & inspect.CO_NESTED != 0


@contextmanager
def traced(path: Path) -> Iterator[Trace]:
    trace = Trace(os.path.realpath(path))
    sys.addaudithook(trace.saw_event)  # cannot be removed, so it looks at running
    threading.setprofile(trace.saw_call)
    sys.setprofile(trace.saw_call)
    trace.running = True
    try:
        yield trace
    finally:
        trace.running = False
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed wants a function


def run(*arguments: str) -> None:
    """Run a command line in this process, without its output."""
    out, err, failed = io.StringIO(), io.StringIO(), False
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", ["calibrant", *arguments]),
        mock.patch.object(warnings, "showwarning", warnings.showwarning),  # main replaces it
    ):
        try:
            command_line()
        except SystemExit as stopped:
            failed = bool(stopped.code)
    if failed:
        raise RuntimeError(f"calibrant {' '.join(arguments)} failed: {err.getvalue()}")


def commands(path: Path, folder: Path) -> dict[str, tuple[str, ...]]:
    """Commands by what they are called in the table; apply needs the fit before it."""
    fitted, out = str(folder / "fitted"), str(folder / "applied.npz")
    answers, page = folder / "answers.jsonl", str(folder / "report.html")
    answers.write_text("".join(json.dumps(row) + "\n" for row in simulated_answers()))
    return {
        "evaluate FILE": ("evaluate", str(path)),
        "fit FILE --method smart": ("fit", str(path), "--method", "smart", "-o", fitted),
        "compare FILE --methods none,ts": ("compare", str(path), "--methods", "none,ts"),
        "apply DIR FILE": ("apply", fitted, str(path), "-o", out),
        "report FILE": ("report", str(path), "-o", page),
        "llm answers report LOG": (
            *("llm", "answers", "report", str(answers)),
            *("-o", str(folder / "answers")),
        ),
    }


def simulated_answers() -> Iterator[dict[str, Any]]:
    """Yield answers with the probabilities of their tokens, which are somewhat too high."""
    rng = np.random.default_rng(0)
    for i in range(600):
        probs = rng.beta(4, 0.4, size=rng.integers(2, 6))
        correct = bool(rng.random() < np.exp(np.log(probs).mean()) ** 1.5)
        yield {"question": f"question {i}", "token_probs": probs.tolist(), "correct": correct}


def print_commands(path: Path) -> None:
    headings = ("functions", "nested", "files", "opened", "headers")
    print(f"{'command':<34}{''.join(f'{heading:>11}' for heading in headings)}")
    with tempfile.TemporaryDirectory() as folder:
        for title, arguments in commands(path, Path(folder)).items():
            seen = trace_of(path, arguments)
            counts = (len(seen.functions()), len(seen.nested()), len(seen.sources()))
            counts += (seen.file_opens, seen.header_reads)
            print(f"{title:<34}{''.join(f'{count:>11}' for count in counts)}", flush=True)
    print("functions: of modules and classes; nested: functions in functions, lambdas and")
    print("comprehensions; files: sources that they are in; opened: times that the prediction")
    print(f"file was; headers: calls of {OPENER}\n")


def trace_of(path: Path, arguments: tuple[str, ...]) -> Trace:
    run(*arguments)  # imports everything, so that only the work itself is seen below
    with traced(path) as trace:
        run(*arguments)
    return trace


# What there is to read.


class Body(NamedTuple):
    """A function and the number of lines in it, without its docstring."""

    lines: int
    name: str
    place: str


def print_sizes(root: Path) -> None:
    print(f"lines in src: {lines_in(PACKAGE):,}, in tests: {lines_in(root / 'tests'):,}")
    found = sorted(bodies(PACKAGE))
    lines = [body.lines for body in found]
    ninth = statistics.quantiles(lines, n=10)[-1]
    print(
        f"functions in src: {len(found):,}; lines in a body: median "
        f"{statistics.median(lines):g}, 90 % have at most {ninth:g}, longest {lines[-1]} "
        f"({found[-1].name} in {found[-1].place})"
    )
    print(f"source files: {sum(1 for _ in PACKAGE.rglob('*.py'))}")
    print(f"public names: {len(calibrant.__all__)}")


def lines_in(folder: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def bodies(folder: Path) -> Iterator[Body]:
    """Of every function; those that are a docstring alone have none."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and (lines := body_lines(node)):
                yield Body(lines, node.name, str(path.relative_to(folder)))


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path(calibrant.sample_path()))
    given = parser.parse_args()
    print(f"{PACKAGE}, {given.file.name}\n")
    print_commands(given.file)
    print_sizes(PACKAGE.parents[1])


if __name__ == "__main__":
    main()
