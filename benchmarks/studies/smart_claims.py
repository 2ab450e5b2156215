"""Where the claims of the SMART paper hold: objectives, indicators, few samples, shift.

    python benchmarks/studies/smart_claims.py DATA_FOLDER > docs/data/smart_claims.csv

Reads ``*/predictions.npz``, ``zoo/*.npz`` and ``*/shift.npz`` of a folder. Every fit is on val,
every figure from test (or the shifted test sets); few samples are drawn from val
ten times, on four of the files.
"""

import csv
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import get_args

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.smart import SmartIndicator, SmartObjective

SIZES = (50, 100, 200, 500, 1000, 2000, 5000)
FEW = ("cifar10_resnet50", "cifar10_vgg19_bn", "cifar100_vgg16_bn", "cifar100_wideresnet16x4")
"""Files that the study of few samples takes, to end within half an hour."""
VARIANTS = {
    "none": cal.calibrators.Identity,
    "ts": cal.TemperatureScaling,
    "smart": cal.SMART,
    "smart_paper": cal.SMART.paper,
    "smart, no likelihood": lambda: cal.SMART(likelihood=0.0),
    "smart from identity": lambda: cal.SMART(start="identity"),
    "odds": cal.calibrators.OddsScaling,
    "blend": cal.calibrators.Blend,
    "auto": cal.Auto,
}


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    out = csv.writer(sys.stdout)
    out.writerow(("study", "file", "setting", "method", "ece", "nll", "auroc"))
    paths = sorted([*Path(folder).glob("*/predictions.npz"), *Path(folder).glob("zoo/*.npz")])
    for path in paths:
        for study in (variants, objectives, indicators, few_samples):
            for row in study(path):
                out.writerow(row)
            sys.stdout.flush()
    for path in sorted(Path(folder).glob("*/shift.npz")):
        out.writerows(shifted(path))


def variants(path: Path):
    for name, make in VARIANTS.items():
        yield "variant", label(path), "", name, *measured(make(), path)


def objectives(path: Path):
    for objective in get_args(SmartObjective):
        yield (
            "objective",
            label(path),
            objective,
            "smart",
            *measured(cal.SMART(objective=objective, likelihood=0.0), path),
        )


def indicators(path: Path):
    for indicator in get_args(SmartIndicator):
        if indicator != "all":  # needs the logits; its network grows with the classes
            yield (
                "indicator",
                label(path),
                indicator,
                "smart",
                *measured(cal.SMART(indicator=indicator), path),
            )


def few_samples(path: Path):
    if label(path) not in FEW:
        return
    val, test = tables(path)
    for size in (size for size in SIZES if size <= len(val)):
        for repetition in range(10):
            chosen = np.random.default_rng(repetition).permutation(len(val))[:size]
            for name in ("none", "ts", "smart", "odds", "auto"):
                fitted = VARIANTS[name]().fit_records(val.take(np.sort(chosen)))
                yield (
                    "samples",
                    label(path),
                    size,
                    name,
                    *figures(fitted.predict_records(test), test),
                )


def shifted(path: Path):
    clean = path.with_name("predictions.npz")
    val, _ = tables(clean)
    file = cal.open_dataset(path)
    for name in ("none", "ts", "smart", "odds", "blend"):
        fitted = VARIANTS[name]().fit_records(val)
        for split in file.splits:
            part = file.split(split)
            table = tabulate(examples(part.read("logits"), part.read("labels")))
            yield "shift", label(path), split, name, *figures(fitted.predict_records(table), table)


def measured(calibrator, path: Path):
    val, test = tables(path)
    return figures(calibrator.fit_records(val).predict_records(test), test)


def figures(claims, table):
    confidence = np.clip(claims.confidence, 0, 1)
    ranked = cal.auroc(confidence=confidence, outcome=table.correct)
    found = cal.ece(confidence=confidence, outcome=table.correct), claims.nll.mean(), ranked
    return tuple(f"{value:.6f}" for value in found)


@cache
def tables(path: Path):
    file = cal.open_dataset(path)
    parts = [file.split(name) for name in ("val", "test")]
    return [tabulate(examples(part.read("logits"), part.read("labels"))) for part in parts]


def label(path: Path) -> str:
    return path.stem if path.parent.name == "zoo" else path.parent.name


if __name__ == "__main__":
    main(sys.argv[1])
