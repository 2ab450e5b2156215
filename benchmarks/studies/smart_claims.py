"""Where the claims of the SMART paper hold: objectives, indicators, few samples, shift.

    python benchmarks/studies/smart_claims.py DATA_FOLDER > docs/data/smart_claims.csv

Reads ``*/predictions.npz``, ``zoo/*.npz`` and ``*/shift.npz`` of a folder. Every fit is on val,
every figure from test (or the shifted test sets); few samples are drawn from val
ten times, on four of the files. All methods but auto are fitted on records of the logits.
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
    count = len(tables(path)[0])
    for size in (size for size in SIZES if size <= count):
        for repetition in range(10):
            chosen = np.sort(np.random.default_rng(repetition).permutation(count)[:size])
            for name in ("none", "ts", "smart", "odds", "auto"):
                yield "samples", label(path), size, name, *measured(VARIANTS[name](), path, chosen)


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


def measured(calibrator, path: Path, chosen=None):
    """The figures of test after a fit on val, or on chosen examples of it."""
    val, test = tables(path)
    chosen = np.arange(len(val)) if chosen is None else chosen
    if isinstance(calibrator, cal.Auto):  # some of its candidates need the logits
        (logits, labels), others = arrays(path)
        data = calibrator.fit(logits[chosen], labels[chosen]).transform(others[0]), others[1]
        return texts(cal.ece(*data), cal.nll(*data), cal.auroc(*data))
    return figures(calibrator.fit_records(val.take(chosen)).predict_records(test), test)


def figures(claims, table):
    data = {"confidence": np.clip(claims.confidence, 0, 1), "outcome": table.correct}
    return texts(cal.ece(**data), claims.nll.mean(), cal.auroc(**data))


def texts(*values: float):
    return [f"{value:.6f}" for value in values]


@cache
def arrays(path: Path):
    """Logits and labels of val and of test."""
    file = cal.open_dataset(path)
    parts = [file.split(name) for name in ("val", "test")]
    return [(part.read("logits"), part.read("labels")) for part in parts]


@cache
def tables(path: Path):
    return [tabulate(examples(*part)) for part in arrays(path)]


def label(path: Path) -> str:
    return path.stem if path.parent.name == "zoo" else path.parent.name


if __name__ == "__main__":
    main(sys.argv[1])
