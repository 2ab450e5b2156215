"""Cost of fitting, as ratios within one run: machines differ, ratios travel.

One pass is ``torch.logsumexp`` over the same matrix. Prints a table; asserts nothing. Needs
scikit-learn; probmetrics is measured too where it is installed.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import warnings

import numpy as np
import torch
from support import peak_beyond_logits, seconds

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate

SAMPLES, CLASSES = 20_000, 1000


def main() -> None:
    warnings.simplefilter("ignore")
    logits, labels = predictions(SAMPLES, CLASSES)
    one_pass = seconds(lambda: torch.logsumexp(logits, -1), 9)
    print(
        f"{SAMPLES} x {CLASSES} float32, {torch.get_num_threads()} threads; "
        f"one pass of logsumexp: {1000 * one_pass:.0f} ms\n"
    )
    print(f"{'fit':<36}{'passes':>8}{'temperature':>14}")
    peers(logits, labels, one_pass)
    line(
        "calibrant: the table alone", seconds(lambda: tabulate(examples(logits, labels))), one_pass
    )
    for name in ("ts", "ets", "pts", "smart", "odds", "blend", "auto"):
        fit = cal.CALIBRATORS[name]
        line(f"calibrant: {name}", seconds(lambda fit=fit: fit().fit(logits, labels), 3), one_pass)
    found = float(cal.TemperatureScaling().fit(logits, labels).temperature_)
    print(f"{'calibrant: temperature found':<44}{found:>14.5f}")
    print("\nafter the table, seconds at K=10000 over K=100 (the same samples count):")
    growth()
    print(f"\npeak memory of a SMART fit beyond the logits: {peak():.0%} of them")


def predictions(samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of temperature 2: labels are drawn from the softmax of their halves."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((samples, classes), dtype=np.float32)
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def line(name: str, taken: float, one_pass: float, temperature: float | None = None) -> None:
    shown = "" if temperature is None else f"{temperature:.5f}"
    print(f"{name:<36}{taken / one_pass:>8.1f}{shown:>14}", flush=True)


def peers(logits: torch.Tensor, labels: torch.Tensor, one_pass: float) -> None:
    for name, fit in {"scikit-learn": sklearn_fit, "probmetrics": probmetrics_fit}.items():
        try:
            temperature = fit(logits, labels)
        except ImportError as problem:
            print(f"{name:<36}{'-':>8}  not installed: {problem}")
            continue
        line(name, seconds(lambda fit=fit: fit(logits, labels), 1), one_pass, temperature)


def sklearn_fit(logits: torch.Tensor, labels: torch.Tensor) -> float:
    # the solver that CalibratedClassifierCV(method="temperature") calls, without its wrapping
    from sklearn.calibration import _TemperatureScaling

    return 1 / float(_TemperatureScaling().fit(logits.numpy(), labels.numpy()).beta_)


def probmetrics_fit(logits: torch.Tensor, labels: torch.Tensor) -> float:
    from probmetrics.calibrators import get_calibrator
    from probmetrics.distributions import CategoricalLogits

    found = get_calibrator("temp-scaling")
    found.fit_torch(CategoricalLogits(logits), labels)
    return 1 / float(found.invtemp_)


def growth() -> None:
    tables = {k: tabulate(examples(*predictions(4000, k))) for k in (100, 10_000)}
    for name in ("ts", "smart", "odds"):
        fit = cal.CALIBRATORS[name]
        few, many = (
            seconds(lambda fit=fit, table=table: fit().fit_records(table), 3)
            for table in tables.values()
        )
        print(f"  {name:<8}{many / few:>6.2f}")


def peak() -> float:
    small = "cal.SMART(steps=3).fit(torch.randn(2000, 10), torch.randint(10, (2000,)))"
    return peak_beyond_logits(small, "cal.SMART(steps=20).fit(logits, labels)", SAMPLES, CLASSES)


if __name__ == "__main__":
    main()
