"""Every calibrator on real models: fitted on val, measured on test, over five splits.

    python benchmarks/studies/real_models.py DATA... > docs/data/real_models.csv

DATA are prediction files with val and test. Split 0 is the file's own; in the others val and
test are shuffled together and cut anew at the same sizes. One row for each file, split and
method. ``--methods`` and ``--splits`` make it shorter: matrices of a hundred classes take a minute
each.
"""

import argparse
import csv
import os
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

import calibrant as cal
from calibrant._core.solve import time_limit
from calibrant.calibrators.registry import make_calibrator

FIGURES = ("ece", "ada_ece", "nll", "brier", "auroc", "accuracy")
LIMIT = 120.0
"""Seconds that a fit may take."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+")
    parser.add_argument("--methods", default=",".join((*cal.CALIBRATORS, "odds", "blend")))
    parser.add_argument("--splits", type=int, default=5)
    given = parser.parse_args()
    out = csv.writer(sys.stdout)
    columns = (
        "file",
        "classes",
        "fitted",
        "measured",
        "split",
        "method",
        *FIGURES,
        "changed",
        "seconds",
    )
    out.writerow(columns)
    for path in given.data:
        for split in range(given.splits):
            for row in rows(path, split, given.methods.split(",")):
                out.writerow(row)
                sys.stdout.flush()


class Part(NamedTuple):
    """Examples to fit on or to measure; features where the file has them."""

    logits: np.ndarray
    labels: np.ndarray
    features: np.ndarray | None


def rows(path: str, split: int, methods: list[str]):
    fit, test, head = parts(path, split)
    name = Path(path).parent.name if Path(path).stem == "predictions" else Path(path).stem
    for method in methods:
        calibrator = make_calibrator(method)
        if calibrator.needs_features and fit.features is None:
            continue
        print(name, split, method, file=sys.stderr)
        seconds = fitted(calibrator, fit, head)
        if seconds is None:
            continue
        after = calibrator.predict_proba(test.logits.astype(np.float32), test.features)
        found = cal.evaluate(probs=after, labels=test.labels, metrics=FIGURES, level=None)
        changed = int((after.argmax(-1) != test.logits.argmax(-1)).sum())
        figures = [f"{found[figure].value:.6f}" for figure in FIGURES]
        about = (name, test.logits.shape[1], len(fit.labels), len(test.labels), split, method)
        yield (*about, *figures, changed, f"{seconds:.3f}")


def parts(path: str, split: int) -> tuple[Part, Part, tuple[np.ndarray, np.ndarray] | None]:
    file = cal.open_dataset(path)
    own = [file.split(name) for name in ("val", "test")]
    known = all("features" in one.keys for one in own)
    columns = ("logits", "labels", "features") if known else ("logits", "labels")
    read = [[one.read(column) for one in own] for column in columns]
    cut, total = len(read[1][0]), sum(map(len, read[1]))
    order = np.arange(total)
    if split:
        order = np.random.default_rng(split).permutation(total)
    whole = [np.concatenate(values) for values in read] + ([] if known else [None])
    taken = [
        Part(*(None if values is None else values[which] for values in whole))
        for which in (order[:cut], order[cut:])
    ]
    return taken[0], taken[1], file.head if known else None


def fitted(calibrator: cal.Calibrator, fit: Part, head: tuple | None) -> float | None:
    """Seconds that the fit took; None if they were too many."""
    start = time.perf_counter()
    uses = calibrator.needs_features
    given = {"features": fit.features, "head": head} if uses else {}
    try:
        with warnings.catch_warnings(), time_limit(LIMIT):
            warnings.simplefilter("ignore")
            calibrator.fit(fit.logits, fit.labels, **given)
            return time.perf_counter() - start
    except TimeoutError:
        return None


if __name__ == "__main__":
    main()
