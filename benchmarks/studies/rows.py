"""Rows of the studies, as their csv files have them, and the tables that are made of them."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = list[dict[str, str]]
Table = Sequence[Sequence[str]]
MISSING = "\N{EN DASH}"


def read(path: Path) -> Rows:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def chosen(rows: Rows, **wanted: str) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def shown(rows: Rows, figure: str, scale: float = 1.0, digits: int = 2) -> str:
    """The mean over the seeds, and their standard deviation."""
    values = [scale * float(row[figure]) for row in rows if row[figure]]
    if not values:
        return MISSING
    spread = f"±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def write_tables(folder: Path, tables: Mapping[str, Table]) -> None:
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
