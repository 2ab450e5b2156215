"""Measure calibrators on many tasks.

    python -m benchmarks.arena
    python -m benchmarks.arena predictions --methods none,ts,auto,sklearn:isotonic --seeds 0 1 2
    python -m benchmarks.arena cv-binary.h5 --methods auto,mine:MyCalibrator -o results.csv

DATA is a folder, all of whose prediction files with a val and a test split are tasks, or an HDF5
file in CalArena's layout; by default a small suite of generated data and a part of the embedded
sample. Rows that the file of results has are not computed again.
"""

import argparse
import os
import sys
from collections.abc import Sequence

# read when numerical libraries are imported, here and in the processes
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks.arena import tasks, views
from benchmarks.arena.methods import read_methods
from benchmarks.arena.results import run


def say(done: int, total: int) -> None:
    print(f"\r{done} of {total} trials", end="", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", metavar="DATA")
    parser.add_argument("--methods", help="with commas between; by default all of calibrant")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="splits")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("-o", "--out", default="arena.csv", help="file of results")
    given = parser.parse_args(arguments)
    methods = read_methods(given.methods)
    chosen, skipped = tasks.find_tasks(given.data) if given.data else (tasks.small_suite(), [])
    for reason in skipped:
        print(f"left out: {reason}", file=sys.stderr)
    options = {"seeds": given.seeds, "workers": given.workers, "progress": say}
    rows = run(chosen, methods, given.out, **options)
    suites, names = sorted({task.suite for task in chosen}), [method.text for method in methods]
    view = views.means(views.scores(rows, suites=suites, methods=names))
    print(f"\nthe rows are in {given.out}", file=sys.stderr)
    print(f"{view.title}\n\n{views.markdown(view)}", end="")


if __name__ == "__main__":
    main()
