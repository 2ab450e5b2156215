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

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

import calibrant as cal
from calibrant._solve import time_limit

FIGURES = ("ece", "ada_ece", "nll", "brier", "auroc", "accuracy")
LIMIT = 120.0
"""Seconds that a fit may take."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+")
    parser.add_argument("--methods", default=",".join(cal.CALIBRATORS))
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


def rows(path: str, split: int, methods: list[str]):
    fit, test = parts(path, split)
    name = Path(path).parent.name if Path(path).stem == "predictions" else Path(path).stem
    for method in methods:
        print(name, split, method, file=sys.stderr)
        calibrator, seconds = fitted(method, *fit)
        if calibrator is None:
            continue
        after = np.asarray(calibrator.predict_proba(test[0].astype(np.float32)))
        found = cal.evaluate(probs=after, labels=test[1], metrics=FIGURES, level=None)
        changed = int((after.argmax(-1) != test[0].argmax(-1)).sum())
        figures = [f"{found[figure].value:.6f}" for figure in FIGURES]
        about = (name, test[0].shape[1], len(fit[1]), len(test[1]), split, method)
        yield (*about, *figures, changed, f"{seconds:.3f}")


def parts(path: str, split: int):
    file = cal.open_predictions(path)
    logits, labels = (
        [file.split(name).read(column) for name in ("val", "test")]
        for column in ("logits", "labels")
    )
    if split == 0:
        return (logits[0], labels[0]), (logits[1], labels[1])
    order = np.random.default_rng(split).permutation(sum(map(len, labels)))
    whole, names = np.concatenate(logits), np.concatenate(labels)
    cut = len(labels[0])
    return tuple((whole[rows], names[rows]) for rows in (order[:cut], order[cut:]))


def fitted(method: str, logits, labels):
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(), time_limit(LIMIT):
            warnings.simplefilter("ignore")
            return cal.CALIBRATORS[method]().fit(logits, labels), time.perf_counter() - start
    except TimeoutError:
        return None, LIMIT


if __name__ == "__main__":
    main()
