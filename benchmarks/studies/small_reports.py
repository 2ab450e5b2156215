"""How often reports on few examples are right: verdicts and advice on simulated models.

    python benchmarks/studies/small_reports.py [--models 100] [--rows 150] [--workers 2]

Draws models of four classes whose labels follow their probabilities, and the same models with
logits three times too large, and makes a report on each from one split alone. Prints how many
reports give each answer, say that calibration helps (CAL014), or have an answer above a finding
that contradicts it, and how the number of examples that a yes is said to need turns out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import re
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import calibrant as cal
from calibrant.show.report.findings import _miscalibrated

CLASSES, SPREAD, FACTOR = 4, 2.0, 3.0
"""Classes, standard deviation of the true logits, and how much too large those that are off are."""


class Outcome(NamedTuple):
    """What a report says of one model."""

    answer: str
    helps: bool
    contradicted: bool
    needed: int | None
    """Examples that a yes is said to need."""
    found: tuple[str, ...]
    """Warnings of miscalibration."""


def drawn(rows: int, factor: float, seed: int) -> dict[str, Any]:
    """Return logits that are ``factor`` times those that the labels follow."""
    rng = np.random.default_rng(seed)
    honest = SPREAD * rng.normal(size=(rows, CLASSES))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    return {"logits": factor * honest, "labels": labels}


def outcome(seed: int, rows: int, factor: float, methods: list[str] | None = None) -> Outcome:
    """Make a report on one simulated model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = cal.report(drawn(rows, factor, seed), methods=methods)
    codes = {finding.code: finding for finding in made.findings}
    wrong = [finding.code for finding in _miscalibrated(made.findings)]
    answer, said = made.verdict.answer, made.verdict.sentence
    is_calm = answer in ("Yes", "Too few examples to tell")
    contradicted = (is_calm and bool(wrong)) or (not is_calm and "CAL015" in codes)
    needed = re.search(r"A yes needs about ([\d,]+)", said)
    count = int(needed[1].replace(",", "")) if needed else None
    return Outcome(answer, "CAL014" in codes, contradicted, count, tuple(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--methods", help="Methods that reports try, by commas; the usual ones.")
    given = parser.parse_args()
    methods = None if given.methods is None else [m for m in given.methods.split(",") if m]
    answers = ("Yes", "Too few examples to tell", "Not quite", "No")
    print(f"| models | {' | '.join(answers)} | CAL014 | contradictions |")
    print(f"|---|{'--:|' * (len(answers) + 2)}")

    def row(title: str, rows: int, factor: float, methods: list[str] | None) -> list[Outcome]:
        task = partial(outcome, rows=rows, factor=factor, methods=methods)
        with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
            made = list(pool.map(task, range(given.models)))
        counts = Counter(each.answer for each in made)
        cells = [counts[answer] for answer in answers]
        cells += [sum(each.helps for each in made), sum(each.contradicted for each in made)]
        print(f"| {title}, {rows:,} rows | {' | '.join(map(str, cells))} |", flush=True)
        found = Counter(code for each in made for code in each.found)
        if found:
            print("   warnings:", ", ".join(f"{c} {n}" for c, n in found.most_common()), flush=True)
        return made

    calibrated = row("calibrated", given.rows, 1.0, methods)
    row("logits three times too large", given.rows, FACTOR, methods)
    needed = [each.needed for each in calibrated if each.needed is not None]
    if needed:
        enough = int(median(needed))
        print(f"\nA yes is said to need about {enough:,} examples (the median). With so many:\n")
        row("calibrated", enough, 1.0, [])


if __name__ == "__main__":
    main()
