"""How often the intervals of ``evaluate`` contain the truth, by simulation.

    python benchmarks/studies/interval_coverage.py > docs/data/coverage.csv
    python benchmarks/studies/interval_coverage.py --pooled > docs/data/coverage_pooled.csv

Labels are drawn from softmax(u); the model under test says softmax of something else: u times a
temperature, or of logits that are wrong only at some margins or for some classes. Two models are
almost never and always right, whatever they claim. The truth is the value on a million examples
(a fifth of that for 100 classes), or 0 for the errors of a calibrated model. Empty where there is
no interval, as of the ranking of answers that are all right. Takes the better part of an hour.

``--pooled`` pools the pairs in fine bins, as ``evaluate`` does with more than 2^18
examples, and measures the metrics that depend on it, in a few minutes.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import calibrant as cal
from calibrant.metrics import summary

SIZES = (500, 5000)
CASES = {
    "calibrated, 10 classes": (10, 1.0),
    "calibrated, 2 classes": (2, 1.0),
    "calibrated, 100 classes": (100, 1.0),
    "logits x 1.1": (10, 1.1),
    "logits x 1.5": (10, 1.5),
    "logits x 0.7": (10, 0.7),
    "logits x 2, 2 classes": (2, 2.0),
    "logits x 1.5, 100 classes": (100, 1.5),
    "wrong at some margins": (10, "margins"),
    "over and under": (10, "mixed"),
    "shifted classes": (10, "classes"),
    "right once in 200": (10, "wrong"),
    "always right": (10, "right"),
}


def drawn(rng: np.random.Generator, n: int, classes: int, kind: float | str):
    true = rng.normal(size=(n, classes))
    true[np.arange(n), rng.integers(classes, size=n)] += rng.gamma(2, 2.0, size=n)
    labels = (true + rng.gumbel(size=true.shape)).argmax(-1)
    if kind in ("wrong", "right"):
        other = kind == "wrong" and rng.random(n) > 0.005
        return true, (true.argmax(-1) + other * rng.integers(1, classes, size=n)) % classes
    if kind == "classes":
        return true + np.linspace(-1, 1, classes), labels
    margin = np.diff(np.sort(true)[:, -2:])
    if kind == "margins":
        return true * np.where((margin > 1) & (margin < 2), 1.8, 1.0), labels
    if kind == "mixed":
        return true * np.where(margin < 2, 1.5, 0.7), labels
    return true * kind, labels


def truth(classes: int, kind: float | str) -> dict[str, float]:
    size = 1_000_000 if classes <= 10 else 200_000
    found = cal.evaluate(*drawn(np.random.default_rng(1), size, classes, kind), level=None)
    values = {name: estimate.value for name, estimate in found.items()}
    values["debiased_ece"] = values["ece"]
    if kind == 1.0:
        values |= {name: 0.0 for name in values if "ece" in name or name in ("mce", "ks", "smce")}
    return values


def main(
    cases: Iterable[str] = CASES,
    repetitions: int = 100,
    metrics: Sequence[str] = tuple(
        name for name, metric in cal.METRICS.items() if not metric.on_request
    ),
    most_pairs: int = summary.MOST_PAIRS,
) -> None:
    table, usual = csv.writer(sys.stdout), summary.MOST_PAIRS
    table.writerow(["model", "n", *metrics, "test rejects"])
    for title in cases:
        classes, kind = CASES[title]
        values = truth(classes, kind)
        chosen = [m for m in metrics if classes == 2 or not cal.METRICS[m].two_classes_only]
        summary.MOST_PAIRS = most_pairs
        for n in SIZES:
            hits, rejected = {name: list[bool]() for name in metrics}, 0
            for seed in range(repetitions):
                data = drawn(np.random.default_rng([seed, n]), n, classes, kind)
                found = cal.evaluate(*data, seed=seed, metrics=chosen)
                rejected += found.test.p_value <= 0.05
                for name, (_, low, high) in found.items():
                    if not np.isnan(low):
                        hits[name].append(low - 1e-12 <= values[name] <= high + 1e-12)
            shares = [round(100 * np.mean(some)) if some else "" for some in hits.values()]
            table.writerow([title, n, *shares, round(100 * rejected / repetitions)])
            sys.stdout.flush()
        summary.MOST_PAIRS = usual


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pooled", action="store_true")
    if parser.parse_args().pooled:
        few = ("calibrated, 10 classes", "logits x 1.5", "logits x 2, 2 classes", "over and under")
        main(few, metrics=["ada_ece", "ks", "auroc", "roc_auc", "aurc"], most_pairs=0)
    else:
        main()
