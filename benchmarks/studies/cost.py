"""What fitting and predicting cost at 20,000 examples of 1000 classes, method by method.

    python benchmarks/studies/cost.py > docs/data/cost.csv

Each method runs in a process of its own. Memory is the peak beyond the logits, as a multiple of
them (80 MB); features are 512 wide and count as memory that was there before. ``passes`` is the
time as a multiple of one ``torch.logsumexp`` over the logits in the same process, which travels
from machine to machine better than seconds do. Linux only.
"""

import argparse
import csv
import ctypes
import os
import subprocess
import sys
import time
import warnings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

import calibrant as cal

SAMPLES, CLASSES, WIDTH = 20_000, 1000, 512
COLUMNS = ("method", "fit_s", "predict_s", "passes", "fit_memory", "memory")


def main() -> None:
    parser = argparse.ArgumentParser()
    usual = (name for name, kind in cal.CALIBRATORS.items() if not kind.two_classes_only)
    parser.add_argument("--methods", default=",".join(usual))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        csv.writer(sys.stdout, lineterminator="\n").writerow(measured(given.one))
        return
    print(",".join(COLUMNS), flush=True)
    for method in given.methods.split(","):
        command = [sys.executable, __file__, "--one", method]
        print(subprocess.run(command, capture_output=True, text=True, check=True).stdout, end="")
        sys.stdout.flush()


def measured(method: str) -> tuple[str, ...]:
    warnings.simplefilter("ignore")
    use(method, *examples(method, 2000, 10))  # imports and thread pools are not what is measured
    logits, labels, beside = examples(method, SAMPLES, CLASSES)
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, or it would hide what is used
    one_pass = min(timed(lambda: torch.logsumexp(logits, -1)) for _ in range(5))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before, unit = memory("VmRSS"), logits.numel() * 4 / 1024
    calibrator = cal.CALIBRATORS[method]()
    fit = timed(lambda: calibrator.fit(logits, labels, **beside))
    peak = memory("VmHWM")
    predict = timed(lambda: calibrator.predict_proba(logits, beside.get("features")))
    return (
        method,
        f"{fit:.1f}",
        f"{predict:.1f}",
        f"{(fit + predict) / one_pass:.0f}",
        f"{(peak - before) / unit:.2f}",
        f"{(memory('VmHWM') - before) / unit:.2f}",
    )


def use(method: str, logits: torch.Tensor, labels: torch.Tensor, beside: dict) -> None:
    fitted = cal.CALIBRATORS[method]().fit(logits, labels, **beside)
    fitted.predict_proba(logits, beside.get("features"))


def examples(method: str, samples: int, classes: int):
    """Logits of temperature 2; those of a last layer where features are needed."""
    random = torch.Generator().manual_seed(0)
    if cal.CALIBRATORS[method]().needs_features:
        features = torch.randn(samples, WIDTH, generator=random).relu()
        weight = 0.2 * torch.randn(classes, WIDTH, generator=random)
        logits = features @ weight.T
        beside = {"features": features, "head": (weight, torch.zeros(classes))}
    else:
        logits, beside = 3 * torch.randn(samples, classes, generator=random), {}
    draws = (
        torch.softmax(part / 2, -1).multinomial(1, generator=random) for part in logits.split(1000)
    )
    return logits, torch.cat(list(draws))[:, 0], beside


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def memory(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


if __name__ == "__main__":
    main()
