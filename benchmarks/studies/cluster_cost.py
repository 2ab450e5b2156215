"""Time and cost of very large jobs on a cluster, from the rates that benchmarks/scale.py measured.

    python benchmarks/scale.py --out docs/data/scale.csv     # on a quiet machine
    python benchmarks/studies/cluster_cost.py docs/data

Reads ``scale.csv`` and writes the tables of docs/scale.md beside it. Reading and computing take
turns in a worker, so that their times add. A core is taken to be as fast as one of the machine that
was measured, with all cores of that machine at work.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from rows import MISSING, Rows, chosen, read, write_tables

NODES, CORES = 16, 64
READ = 1.5e9
"""Bytes per second that a node reads from an object store: 12 of the 25 Gbit/s of its network."""
PRICE = 0.05
"""Dollars for an hour of a core, as general-purpose machines of large clouds cost on demand."""
ENOUGH = 1 << 22
"""Examples of which a fit holds the records; of more it takes a random sample."""


class Job(NamedTuple):
    title: str
    rows: float
    classes: int
    rate: float  # rows per second of a core
    stored: float  # bytes per row that are read
    kept: float = 0.0  # bytes per row of the result

    def row(self) -> list[str]:
        computing = self.rows / self.rate / (NODES * CORES)
        reading = self.rows * self.stored / (NODES * READ)
        hours = (computing + reading) / 3600
        return [
            self.title,
            size(self.rows * self.stored) if self.stored else MISSING,
            duration(reading) if self.stored else MISSING,
            duration(computing),
            duration(3600 * hours),
            f"{hours * NODES * CORES * PRICE:,.2f}",
            size(self.rows * self.kept) if self.kept else MISSING,
        ]


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(30), duration(600), duration(7200)
    ('30 s', '10 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = min(len(units) - 1, max(0, (len(str(int(count))) - 1) // 3))
    return f"{count / 1000**power:.3g} {units[power]}"


def jobs(measured: Rows) -> list[Job]:
    rows = chosen(measured, kind="evaluate")
    most = max(rows, key=lambda row: int(row["workers"]))
    net = float(most["seconds"]) - float(most["making"])
    evaluated = float(most["rows"]) / net / int(most["workers"])
    records = {int(row["classes"]): row for row in chosen(measured, kind="records")}
    few, tokens = (records[k] for k in sorted(records))
    rates = [float(row["rows_per_s"]) for row in (few, tokens)]
    kept = [float(row["bytes_per_row"]) for row in (few, tokens)]
    return [
        Job("evaluate 10^9 predictions, float32", 1e9, 1000, evaluated, 4000),
        Job("evaluate 10^9 predictions, float16", 1e9, 1000, evaluated, 2000),
        Job("records of 10^9 predictions, float16", 1e9, 1000, rates[0], 2000, kept[0]),
        Job("records of 10^10 tokens", 1e10, 128_256, rates[1], 0, kept[1]),
        Job(f"records of {ENOUGH:,} tokens", ENOUGH, 128_256, rates[1], 0, kept[1]),
    ]


def speeds(measured: Rows) -> list[list[str]]:
    headings = ["rows", "workers", "seconds", "of these making rows", "rows per second", "ratio"]
    table = [[*headings, "passes", "cores", "load of other work"]]
    for row in chosen(measured, kind="evaluate"):
        figures = [f"{float(row[k]):.2f}" for k in ("seconds", "making")]
        counts, rate = [f"{int(row['rows']):,}", row["workers"]], f"{float(row['rows_per_s']):,.0f}"
        ratios = [f"{float(row[k]):.2f}" for k in ("speedup", "passes")]
        machine = [row["cores"], f"{float(row['load']):.1f}"]
        table.append([*counts, *figures, rate, *ratios, *machine])
    return table


def peaks(measured: Rows) -> list[list[str]]:
    table = [["rows", "logits, MB", "adding process, MB", "largest worker, MB"]]
    for row in chosen(measured, kind="memory"):
        figures = (row["data_mb"], row["main_mb"], row["worker_mb"])
        table.append([f"{int(row['rows']):,}", *(f"{float(x):,.0f}" for x in figures)])
    return table


def tables(folder: Path) -> dict[str, list[list[str]]]:
    measured = read(folder / "scale.csv")
    headings = ["job", "read", "reading", "computing", "together", "dollars", "written"]
    return {
        "table_scale_speed": speeds(measured),
        "table_scale_memory": peaks(measured),
        "table_cluster": [headings, *(job.row() for job in jobs(measured))],
    }


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]), tables(Path(sys.argv[1])))
