"""How often the intervals of dense predictions contain the truth: by pixel, and by image.

    python benchmarks/studies/dense.py > docs/data/coverage_dense.csv

The pixels of an image share an effect: how far its labels are softer or sharper than what the model
claims, and which classes are more frequent than it claims. The truth is the value on four thousand
images. Takes a few minutes on one core.
"""

import argparse
import csv
import sys

import numpy as np

import calibrant as cal

FIGURES = ("accuracy", "nll", "brier", "ece", "over_ece", "under_ece", "mce")
CASES = {  # logarithm of the mean temperature, its deviation over images, and that of class shifts
    "independent pixels": (0.4, 0.0, 0.0),
    "images differ": (0.0, 0.3, 0.5),
    "images differ, over-confident": (0.4, 0.3, 0.5),
    "images differ much, over-confident": (0.4, 0.6, 1.5),
}
IMAGES = (20, 100)
SIDE, CLASSES = 20, 4


def main(repetitions: int) -> None:
    table = csv.writer(sys.stdout)
    table.writerow(["model", "images", "intervals by", *(n.replace("_", " ") for n in FIGURES)])
    for title, case in CASES.items():
        large = cal.evaluate(*drawn(np.random.default_rng(1), 4000, case), class_dim=1, level=None)
        truth = {name: large[name].value for name in FIGURES}
        for images in IMAGES:
            for unit, groups in (("pixel", None), ("image", np.arange(images))):
                hits = {name: 0 for name in FIGURES}
                for seed in range(repetitions):
                    data = drawn(np.random.default_rng([seed, images]), images, case)
                    found = cal.evaluate(
                        *data, class_dim=1, groups=groups, metrics=FIGURES, seed=seed
                    )
                    for name, (_, low, high) in found.items():
                        hits[name] += low - 1e-12 <= truth[name] <= high + 1e-12
                shares = [round(100 * count / repetitions) for count in hits.values()]
                table.writerow([title, images, unit, *shares])
                sys.stdout.flush()


def drawn(rng, images, case):
    """Logits ``(images, classes, height, width)`` and labels ``(images, height, width)``."""
    mean, deviation, shift = case
    logits = 2 * rng.normal(size=(images, CLASSES, SIDE, SIDE))
    temperature = np.exp(mean + deviation * rng.normal(size=(images, 1, 1, 1)))
    true = logits / temperature + shift * rng.normal(size=(images, CLASSES, 1, 1))
    return logits, (true + rng.gumbel(size=true.shape)).argmax(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=100)
    main(parser.parse_args().repetitions)
