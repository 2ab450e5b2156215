"""A user's program, run with the installed wheel and checked by ``mypy --strict`` against it.

A comment that ignores an error is itself one where mypy finds nothing to ignore.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import calibrant as cal
from calibrant.decide import ConformalSets, Threshold
from calibrant.metrics import Estimate

PACKAGES = (cal.calibrators, cal.data, cal.decide, cal.deploy, cal.losses, cal.metrics)


def main(expected: str) -> None:
    """Measure, fit, decide and save, as the README does."""
    assert cal.__version__ == version("calibrant") == expected
    assert cal.__file__ is not None
    assert cal.__file__.startswith(sys.prefix), cal.__file__

    result = cal.evaluate(cal.sample_path(), metrics=["ece"], level=None)
    estimate = assert_type(result["ece"], Estimate)
    assert round(assert_type(estimate.value, float), 4) == 0.0424

    with np.load(cal.sample_path()) as arrays:
        logits: NDArray[Any] = arrays["val_logits"].astype(float)
        labels: NDArray[Any] = arrays["val_labels"]
    calibrator = assert_type(cal.SMART().fit(logits, labels), cal.SMART)
    probs = assert_type(calibrator.predict_proba(logits), NDArray[Any])
    assert_type(calibrator.predict_proba(torch.from_numpy(logits)), torch.Tensor)
    assert assert_type(cal.ece(probs=probs, labels=labels), float) < 0.02
    assert_type(cal.fit(cal.sample_path(), method="ts"), cal.Calibrator)

    chosen = assert_type(cal.threshold(probs=probs, labels=labels, max_error=0.05), Threshold)
    sets = assert_type(cal.conformal(probs=probs, labels=labels), ConformalSets)
    assert sets.sets(probs=probs).shape == probs.shape
    cal.save(chosen, "threshold.json")
    assert assert_type(cal.load("threshold.json", Threshold), Threshold) == chosen


def refused() -> None:
    """Never run: what a type checker has to find."""
    cal.eec([[1.0, 0.0]], [0])  # type: ignore[attr-defined]
    cal.ece([[1.0, 0.0]], [0], 20)  # type: ignore[call-arg]
    cal.evaluate([[1.0, 0.0]], [0], estimand="top")  # type: ignore[arg-type]
    cal.threshold([[1.0, 0.0]], [0], recall="all")  # type: ignore[arg-type]
    cal.SMART().fit([[1.0, 0.0]], [0], [1.0])  # type: ignore[call-arg]
    cal.calibrated("model", cal.SMART())  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
