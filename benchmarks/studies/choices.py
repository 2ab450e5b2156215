"""Multiple choice: what it gains that predictions may change, on real models.

    python benchmarks/studies/choices.py FOLDER

FOLDER has prediction files (.npz) of the options of questions, with the splits val and test. Every
method is fitted on val and measured on test; the means over the files are printed as a table.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

import calibrant as cal
from calibrant.calibrators.base import Calibrator

METHODS: dict[str, Callable[[], Calibrator]] = {
    "none": cal.CALIBRATORS["none"],
    "auto": cal.Auto,
    "sms": cal.CALIBRATORS["sms"],
    "auto, choices": lambda: cal.Auto(keep_argmax=False),
}
FIGURES = ("accuracy", "nll", "ece")


def main(folder: str) -> None:
    files = sorted(Path(folder).glob("*.npz"))
    print("| method |", " | ".join(FIGURES), "|")
    for name, make in METHODS.items():
        measured = []
        for path in files:
            after = cal.effect(
                cal.fit(path, method=make()), path, metrics=FIGURES, level=None
            ).after
            measured.append([after[figure].value for figure in FIGURES])
        means = " | ".join(f"{mean:.4f}" for mean in np.mean(measured, axis=0))
        print(f"| {name} | {means} |", flush=True)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that are never right
        main(*sys.argv[1:])
