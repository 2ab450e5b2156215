"""Rows per second against workers, and memory against data size, of ``evaluate`` over shards.

    python benchmarks/scale.py                                    # prints, in about five minutes
    python benchmarks/scale.py --out docs/data/scale.csv          # for the documentation
    python benchmarks/scale.py --rows 100000 --repeats 1          # a quick try

A million rows of 1000 logits are made on the fly, by the process that measures them: nothing is on
disk, and no more than a chunk of a shard is in memory. The unit is one pass of ``torch.logsumexp``
on all cores over the same rows in the same run. ``seconds`` are those of ``evaluate`` without
intervals, with all metrics, on workers that have started; ``making`` is what the same walk takes
that only makes the rows, and ``passes`` are the rest in units. Each figure is the least of some
repetitions. ``records`` is the table that fits are made from. Memory is the growth of the process
that adds up, and the peak of the largest worker beyond what it takes for a hundred rows. ``load``
is that of other work before the run: figures of a busy machine are provisional. Linux only.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch

import calibrant as cal
from calibrant import use
from calibrant._core.engines import _WorkerPool
from calibrant.calibrators.records import _tabulated
from calibrant.data.dataset import Dataset, Split
from calibrant.data.shards import Chunk, Column

CLASSES, TOKENS = 1000, 128_256
SHARD = 20_000
NOISE = 4096
COLUMNS = (
    *("kind", "rows", "classes", "workers", "seconds", "making", "unit", "passes", "speedup"),
    *("rows_per_s", "bytes_per_row", "main_mb", "worker_mb", "data_mb", "cores", "load"),
)


@cache
def noise(classes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows that shards share, each with another factor, since drawing them takes longest."""
    rows = min(NOISE, (1 << 23) // classes)
    return np.random.default_rng(0).standard_normal((rows, classes), dtype=np.float32)


@dataclass(frozen=True)
class Made:
    """Logits, or labels, of a shard, made when they are asked for: each row by its number."""

    first: int
    shape: tuple[int, ...]
    classes: int
    labels: bool

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        start, stop, _ = rows.indices(len(self))
        number = np.arange(self.first + start, self.first + stop)
        signal = number * 7919 % self.classes
        scale = 1 + number * 104_729 % 1009 / 1009
        if self.labels:  # the stronger the signal, the likelier the class
            wrong = number * 15_485_863 % 1013 / 1013 < 0.55 - 0.25 * scale
            return np.where(wrong, (signal + 1 + number % 97) % self.classes, signal)
        made = noise(self.classes)[number % len(noise(self.classes))]
        made *= scale.astype(np.float32)[:, None]
        made[np.arange(len(made)), signal] += (6 * scale).astype(np.float32)
        return made


def dataset(rows: int, classes: int, shard: int = SHARD) -> Dataset:
    """Return shards that hold nothing but their size."""
    return Dataset(
        "made", [_shard(i, min(shard, rows - i), classes) for i in range(0, rows, shard)]
    )


def _shard(first: int, rows: int, classes: int) -> dict[str, Column]:
    def column(key: str, shape: tuple[int, ...], dtype: type) -> Column:
        values: Any = Made(first, shape, classes, key == "labels")
        return Column(f"shard {first}", key, shape, np.dtype(dtype), values=values)

    logits = column("logits", (rows, classes), np.float32)
    return {"logits": logits, "labels": column("labels", (rows,), np.int64)}


def only_made(chunks: Iterator[Chunk]) -> int:
    """Make every row, and nothing else."""
    return sum(len(chunk["logits"]) for chunk in chunks)


def records_made(chunks: Iterator[Chunk]) -> int:
    """Make the records of every row, and drop them."""
    return sum(map(len, _tabulated(chunks)))


def walked(split: Split, task: Callable[[Iterator[Chunk]], int]) -> None:
    assert sum(split.walk(task, "logits", "labels")) == split.rows


def one_pass(split: Split) -> float:
    """Seconds of ``torch.logsumexp`` over all rows, on all cores."""
    taken = 0.0
    for shard in split.shards:
        for logits, _ in shard.chunks(split.chunk_rows, ["logits", "labels"]):
            tensor = torch.from_numpy(logits)
            start = time.perf_counter()
            torch.logsumexp(tensor, -1)
            taken += time.perf_counter() - start
    return taken


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def speeds(rows: int, workers: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of workers; the repetitions take turns."""
    data = dataset(rows, CLASSES, shard=min(SHARD, max(1, rows // 40)))
    split, pools = data.split(), {count: _WorkerPool(count) for count in workers}
    for count, pool in pools.items():
        with use(executor=pool):
            cal.evaluate(dataset(200 * count, CLASSES, shard=100), level=None)
    one_pass(dataset(20_000, CLASSES).split())
    units: list[float] = []
    evaluating: dict[int, list[float]] = {count: [] for count in workers}
    making: dict[int, list[float]] = {count: [] for count in workers}
    for _ in range(repeats):
        units.append(one_pass(split))
        for count, pool in pools.items():
            with use(executor=pool):
                making[count].append(timed(partial(walked, split, only_made)))
                evaluating[count].append(timed(partial(cal.evaluate, data, level=None)))
    for pool in pools.values():
        pool.shutdown()
    for count in workers:
        seconds, made, unit = (min(x) for x in (evaluating[count], making[count], units))
        yield {
            **{"kind": "evaluate", "rows": rows, "classes": CLASSES, "workers": count},
            **{"seconds": seconds, "making": made, "unit": unit, "passes": (seconds - made) / unit},
            **{"speedup": min(evaluating[workers[0]]) / seconds, "rows_per_s": rows / seconds},
        }


def records_speed(rows: int, classes: int, repeats: int) -> dict[str, Any]:
    """Return a row about the table of log-partition values, on one worker."""
    split = dataset(rows, classes, shard=max(1, rows // 8)).split()
    with _WorkerPool(1):
        walked(dataset(8, classes).split(), records_made)
        turns = [
            (
                one_pass(split),
                timed(lambda: walked(split, only_made)),
                timed(lambda: walked(split, records_made)),
            )
            for _ in range(repeats)
        ]
    unit, made, seconds = map(min, zip(*turns, strict=True))
    return {
        **{"kind": "records", "rows": rows, "classes": classes, "workers": 1, "seconds": seconds},
        **{"making": made, "unit": unit, "passes": (seconds - made) / unit},
        **{"rows_per_s": rows / (seconds - made), "bytes_per_row": record_bytes(classes)},
    }


def record_bytes(classes: int) -> float:
    """Return the memory of the records of one row."""
    ((made,),) = dataset(4, classes).split().walk(_tabulated, "logits", "labels")
    arrays = [x for x in vars(made).values() if isinstance(x, np.ndarray)]
    return sum(array.nbytes for array in arrays) / len(made)


def memory(rows: int, workers: int) -> dict[str, Any]:
    """Return a row about the peaks of processes that evaluate so many rows."""
    (_, small), (main, large) = (_peaks(count, workers) for count in (100, rows))
    return {
        **{"kind": "memory", "rows": rows, "classes": CLASSES, "workers": workers},
        **{"main_mb": main, "worker_mb": large - small, "data_mb": rows * CLASSES * 4 / 2**20},
    }


def _peaks(rows: int, workers: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--peaks", str(rows), "--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    main, worker = json.loads(done.stdout)
    return main, worker


def print_peaks(rows: int, workers: int) -> None:
    """Print by how much this process grows, and the peak of a worker, in megabytes."""
    with _WorkerPool(workers) as pool:
        with use(executor=pool):
            cal.evaluate(dataset(200, CLASSES, shard=100), level=None)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident("VmRSS")
        with use(executor=pool):
            cal.evaluate(dataset(rows, CLASSES), level=None)
        grown = resident("VmHWM") - before
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps([grown / 1024, worker / 1024]))


def resident(field: str) -> int:
    """Return a size of this process in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="write the figures to this file as well")
    parser.add_argument("--peaks", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    workers = [int(count) for count in given.workers.split(",")]
    if given.peaks:
        print_peaks(given.peaks, workers[-1])
        return
    machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    found = list(speeds(given.rows, workers, given.repeats))
    found.append(records_speed(max(64, given.rows // 20), CLASSES, given.repeats))
    found.append(records_speed(max(64, given.rows // 1000), TOKENS, given.repeats))
    for share in (10, 3, 1):
        found.append(memory(given.rows // share, workers[-1]))
    for row in found:
        print(", ".join(f"{k} {_shown(v)}" for k, v in row.items()))
    if given.out:
        with open(given.out, "w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            for row in found:
                table.writerow({name: _shown(v) for name, v in (row | machine).items()})


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
