"""Cost of measuring, as ratios within one run: machines differ, ratios travel.

One pass is ``torch.logsumexp`` over the same matrix. Prints a table; asserts nothing.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads


import numpy as np
import torch
from support import peak_beyond_logits, seconds

import calibrant as cal

SAMPLES, CLASSES = 20_000, 1000


def predictions(samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(samples, classes, generator=generator)
    labels = torch.where(
        torch.rand(samples, generator=generator) < 0.6,
        logits.argmax(-1),
        torch.randint(classes, (samples,), generator=generator),
    )
    return logits, labels


def peak() -> float:
    small = "cal.evaluate(torch.randn(2000, 10), torch.zeros(2000, dtype=torch.long), level=None)"
    return peak_beyond_logits(small, "cal.evaluate(logits, labels, level=None)", SAMPLES, CLASSES)


def against_torchmetrics(logits: torch.Tensor, labels: torch.Tensor) -> float | None:
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error
    except ImportError:
        return None
    theirs = seconds(lambda: multiclass_calibration_error(logits, labels, CLASSES, n_bins=15))
    return theirs / seconds(lambda: cal.ece(logits, labels))


def main() -> None:
    logits, labels = predictions(SAMPLES, CLASSES)
    one_pass = seconds(lambda: torch.logsumexp(logits, -1))
    whole = seconds(lambda: cal.evaluate(logits, labels, level=None))
    print(f"{SAMPLES} x {CLASSES} float32; one pass of logsumexp {1000 * one_pass:.0f} ms")
    print(f"evaluate without intervals        {whole / one_pass:6.2f} passes")
    print(f"memory beyond the logits          {100 * peak():6.2f} % of them")
    ratio = against_torchmetrics(logits, labels)
    if ratio is not None:
        print(f"ECE, torchmetrics over calibrant  {ratio:6.2f} times as long")

    logits, labels = predictions(50_000, 100)
    bare = seconds(lambda: cal.evaluate(logits, labels, level=None), 3)
    full = seconds(lambda: cal.evaluate(logits, labels), 3)
    print(f"50000 x 100: all intervals and the test add {full - bare:.2f} s to {bare:.2f} s")

    rng = np.random.default_rng(0)
    claimed = rng.random(1_000_000)
    happened = rng.random(claimed.size) < claimed
    for name in ("ece", "ada_ece", "ks", "smooth_ece", "smce", "auroc", "aurc"):
        taken = seconds(lambda name=name: getattr(cal, name)(claimed, happened), 1)
        print(f"{name:<12} of a million pairs     {taken:6.2f} s")


if __name__ == "__main__":
    main()
