"""How often reports on few examples are right: verdicts and advice on simulated models.

    python benchmarks/studies/small_reports.py docs/data [--models 100] [--methods none,ts]

Draws models of two and of four classes whose labels follow their probabilities, and the same models
with logits that are too large, and makes a report on each from one split alone. Writes
``small_reports.csv``: how many reports give each answer, say that calibration helps (CAL014) or
that no method clearly helps (CAL019), or have an answer above a finding that contradicts it. A last
case per number of classes has as many examples as a yes is said to need.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import csv
import re
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rows import Rows, Table, read, write_tables

import calibrant as cal
from calibrant.show.report.findings import _miscalibrated

CLASSES, SPREAD = (2, 4), 2.0
"""Classes, and the standard deviation of the true logits."""
ROWS, FACTORS = 150, (1.5, 2.0, 3.0)
"""Examples of a model, and how much too large the logits of those that are off are."""
ANSWERS = ("Yes", "Too few examples to tell", "Not quite", "No")
COLUMNS = (
    *("classes", "factor", "rows", "models", *ANSWERS, "CAL014", "CAL019", "contradicted"),
    *("needed", "methods"),
)


class Outcome(NamedTuple):
    """What a report says of one model."""

    answer: str
    codes: frozenset[str]
    contradicted: bool
    needed: int | None
    """Examples that a yes is said to need."""


def drawn(rows: int, classes: int, factor: float, seed: int) -> dict[str, Any]:
    """Return logits that are ``factor`` times those that the labels follow."""
    rng = np.random.default_rng(seed)
    if classes == 2:
        honest = SPREAD * rng.normal(size=rows)
        labels = (honest + rng.logistic(size=rows) > 0).astype(int)
    else:
        honest = SPREAD * rng.normal(size=(rows, classes))
        labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    return {"logits": factor * honest, "labels": labels}


def outcome(
    seed: int, rows: int, classes: int, factor: float, methods: list[str] | None = None
) -> Outcome:
    """Make a report on one simulated model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = cal.report(drawn(rows, classes, factor, seed), methods=methods)
    codes = frozenset(finding.code for finding in made.findings)
    answer, said = made.verdict.answer, made.verdict.sentence
    is_calm, wrong = answer in ANSWERS[:2], bool(_miscalibrated(made.findings))
    contradicted = wrong if is_calm else "CAL015" in codes
    needed = re.search(r"A yes needs about ([\d,]+)", said)
    count = int(needed[1].replace(",", "")) if needed else None
    return Outcome(answer, codes, contradicted, count)


def case(
    pool: ProcessPoolExecutor,
    models: int,
    rows: int,
    classes: int,
    factor: float,
    methods: list[str] | None,
) -> dict[str, object]:
    """Return a row of figures about so many models."""
    task = partial(outcome, rows=rows, classes=classes, factor=factor, methods=methods)
    made = list(pool.map(task, range(models)))
    answers = Counter(each.answer for each in made)
    needed = [each.needed for each in made if each.needed is not None]
    return {
        **{"classes": classes, "factor": factor, "rows": rows, "models": models},
        **{answer: answers[answer] for answer in ANSWERS},
        **{code: sum(code in each.codes for each in made) for code in ("CAL014", "CAL019")},
        "contradicted": sum(each.contradicted for each in made),
        "needed": round(median(needed)) if needed else "",
        "methods": ",".join(methods or ()) if methods is not None else "usual",
    }


def simulate(out: Path, models: int, workers: int, methods: list[str] | None) -> None:
    with (
        (out / "small_reports.csv").open("w", newline="") as file,
        ProcessPoolExecutor(workers, get_context("spawn")) as pool,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()

        def write(row: dict[str, object]) -> None:
            writer.writerow(row)
            file.flush()

        for classes in CLASSES:
            calibrated: dict[str, Any] = case(pool, models, ROWS, classes, 1.0, methods)
            write(calibrated)
            for factor in FACTORS:
                write(case(pool, models, ROWS, classes, factor, methods))
            write(case(pool, models, calibrated["needed"], classes, 1.0, []))


def tables(folder: Path) -> dict[str, Table]:
    return {"table_small_reports": by_case(read(folder / "small_reports.csv"))}


def by_case(rows: Rows) -> Table:
    headings = ("classes", "logits", "rows", "yes", "too few", "not quite", "no")
    lines = [(*headings, "calibration helps", "none clearly helps")]
    for row in rows:
        factor = float(row["factor"])
        logits = "calibrated" if factor == 1 else f"{factor:g} times too large"
        advice = (row["CAL014"], row["CAL019"]) if row["methods"] else ("", "")
        answers = (row[answer] for answer in ANSWERS)
        lines.append((row["classes"], logits, f"{int(row['rows']):,}", *answers, *advice))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--methods", help="Methods that reports try, by commas; the usual ones.")
    given = parser.parse_args()
    methods = given.methods.split(",") if given.methods else None
    simulate(given.folder, given.models, given.workers, methods)
    write_tables(given.folder, tables(given.folder))


if __name__ == "__main__":
    main()
