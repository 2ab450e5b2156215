"""Workers that check inputs for ever, and the process that watches them."""

import contextlib
import ctypes
import multiprocessing
import queue
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from typing import Any

from tests.fuzz.targets import reproduction, run, summary

MEMORY = 4 << 30
"""Bytes of address space that a process may take beyond what it has after its imports."""
PATIENCE = 120
"""Seconds that an input may take."""
TURN = 2.0
"""Seconds for which a process stays with a target."""
SHOWN = 3
"""Failures of one kind that are printed."""
spawn = multiprocessing.get_context("spawn")


def limit_memory(extra: int) -> None:
    """Let this process take ``extra`` bytes of memory more than it has; Linux only."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))


def work(targets: list[str], first: int, step: int, place: Any, results: Any) -> None:
    """Check inputs for ever: seeds first, first + step and so on, of each target in turn."""
    import torch

    torch.set_num_threads(1)
    for target in targets:  # imports, before memory is limited
        with contextlib.suppress(Exception):
            run(target, first)
    limit_memory(MEMORY)
    seeds = dict.fromkeys(targets, first)
    while True:
        for number, target in enumerate(targets):
            end, count = time.monotonic() + TURN, 0
            while time.monotonic() < end:
                place[:] = number, seeds[target], int(time.time())
                try:
                    run(target, seeds[target])
                except Exception as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    kind = f"{type(error).__name__} at {where.filename}:{where.lineno}"
                    results.put(("failure", target, seeds[target], kind, summary(error)))
                seeds[target] += step
                count += 1
            results.put(("count", target, count))


class Worker:
    """A process, and the input that it is at."""

    def __init__(self, targets: list[str], first: int, step: int, results: Any) -> None:
        self.targets, self.step, self.results = targets, step, results
        self.place = spawn.Array(ctypes.c_int64, [0, first, int(time.time())])
        arguments = (targets, first, step, self.place, results)
        self.process: SpawnProcess = spawn.Process(target=work, args=arguments, daemon=True)
        self.process.start()

    def problem(self) -> str:
        """Return how the process ended or that it hangs; an empty string while it runs."""
        if not self.process.is_alive():
            return f"the process ended with exit code {self.process.exitcode}"
        hangs = time.time() - self.place[2] > PATIENCE
        return f"it takes more than {PATIENCE} seconds" if hangs else ""

    def replaced(self) -> "Worker":
        """Begin anew after the input that ended the process."""
        self.process.kill()
        return Worker(self.targets, self.place[1] + self.step, self.step, self.results)


def watch(workers: list[Worker], results: Any) -> Iterator[tuple[Any, ...]]:
    """Yield what the workers report, and what becomes of them."""
    while True:
        try:
            yield results.get(timeout=1)
        except queue.Empty:
            yield ("nothing",)
        for i, worker in enumerate(workers):
            if problem := worker.problem():
                number, seed, _ = worker.place[:]
                target = worker.targets[number]
                yield "failure", target, seed, f"{target}: {problem}", problem
                workers[i] = worker.replaced()


def fuzz(targets: list[str], first: int, processes: int, minutes: float, inputs: int) -> int:
    """Run the workers and print failures; returns the number of failures."""
    results: Any = spawn.Queue()
    workers = [Worker(targets, first + i, processes, results) for i in range(processes)]
    begin = shown = time.monotonic()
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for event, *details in watch(workers, results):
        if event == "count":
            counts[details[0]] += details[1]
        elif event == "failure":
            target, seed, kind, text = details
            failures[kind] += 1
            if failures[kind] <= SHOWN:
                print(f"\n{reproduction(target, seed)}\n    {text}\n    {kind}", flush=True)
        elapsed = time.monotonic() - begin
        done = elapsed > 60 * minutes or (inputs and counts.total() >= inputs)
        if done or time.monotonic() - shown > 15:
            shown = time.monotonic()
            table = ", ".join(f"{name} {counts[name]:,}" for name in targets)
            state = f"{counts.total():,} inputs, {failures.total():,} failures"
            print(f"{elapsed / 60:.1f} min: {state} ({table})", flush=True)
        if done:
            break
    for worker in workers:
        worker.process.kill()
    for kind, count in failures.most_common():
        print(f"{count:,} times {kind}")
    return failures.total()
