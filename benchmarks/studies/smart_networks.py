"""SMART on the networks of table 2 of its paper, as its authors run it and by default.

    python benchmarks/studies/smart_networks.py FOLDER > docs/data/smart_networks.csv

The folder has the logits of the networks that Mukhoti et al. (2020) published, trained with the
Brier score and with the focal loss FLSD-53, one file each. Every fit is on val, every figure from
test; the seeds are those of the first weights.
"""

import csv
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate

PAPER = {
    "mukhoti_brier_cifar10_resnet50": (1.81, 0.96),
    "mukhoti_brier_cifar10_resnet110": (2.56, 0.60),
    "mukhoti_brier_cifar10_densenet121": (1.52, 0.31),
    "mukhoti_brier_cifar10_wide_resnet": (1.25, 0.38),
    "mukhoti_flsd53_cifar10_resnet50": (1.56, 0.42),
    "mukhoti_flsd53_cifar10_resnet110": (1.87, 0.45),
    "mukhoti_flsd53_cifar10_densenet121": (1.23, 0.62),
    "mukhoti_flsd53_cifar10_wide_resnet": (1.58, 0.39),
    "mukhoti_brier_cifar100_resnet50": (6.54, 1.01),
    "mukhoti_brier_cifar100_resnet110": (7.87, 0.87),
    "mukhoti_brier_cifar100_densenet121": (5.22, 0.59),
    "mukhoti_brier_cifar100_wide_resnet": (4.35, 1.00),
}
"""ECE in percent before and after SMART, as the paper's table 2 has them."""
SEEDS = range(1, 6)


def main(folder: str) -> None:
    out = csv.writer(sys.stdout)
    out.writerow(("file", "method", "seed", "ece", "nll"))
    for name, (before, after) in PAPER.items():
        out.writerow((name, "paper, none", "", f"{before / 100:.4f}", ""))
        out.writerow((name, "paper, smart", "", f"{after / 100:.4f}", ""))
        file = cal.open_dataset(Path(folder) / f"{name}.npz")
        val, test = (
            tabulate(examples(split.read("logits"), split.read("labels")))
            for split in (file.split("val"), file.split("test"))
        )
        methods = [("none", "", cal.calibrators.Identity()), ("ts", "", cal.TemperatureScaling())]
        methods += [("smart", seed, cal.SMART(seed=seed)) for seed in SEEDS]
        methods += [("smart_paper", seed, cal.SMART.paper(seed=seed)) for seed in SEEDS]
        for method, seed, calibrator in methods:
            found = calibrator.fit_records(val).predict_records(test)
            ece = cal.ece(confidence=np.minimum(found.confidence, 1), outcome=test.correct)
            out.writerow((name, method, seed, f"{ece:.6f}", f"{found.nll.mean():.6f}"))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
