"""Cost of fitting, as ratios within one run: machines differ, ratios travel.

One pass is ``torch.logsumexp`` over the same matrix. Prints a table; asserts nothing. Needs
scikit-learn; probmetrics is measured too where it is installed.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import math
import warnings

import numpy as np
import torch
from support import fastest, peak_beyond_logits, seconds

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate

SAMPLES, CLASSES = 20_000, 1000
SIZES = ((SAMPLES, CLASSES), (50_000, 100))
METHODS = ("ts", "ets", "pts", "smart", "odds", "blend", "rank_gaps", "auto")
ROUNDS = 3


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"passes of logsumexp in float32 with {torch.get_num_threads()} threads\n")
    columns = [passes(*predictions(*size)) for size in SIZES]
    heads = [f"{samples} x {classes}" for samples, classes in SIZES]
    print(f"{'fit':<36}" + "".join(f"{head:>14}" for head in heads))
    for name in columns[0]:
        print(f"{name:<36}" + "".join(f"{column[name]:>14.1f}" for column in columns))
    print(f"\nthe temperature of {SAMPLES} x {CLASSES}, and passes to it:")
    peers(*predictions(SAMPLES, CLASSES))
    print("\nafter the table, seconds at K=10000 over K=100 (the same samples count):")
    growth()
    print(f"\npeak memory of a SMART fit beyond the logits: {peak():.0%} of them")


def passes(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Least time of each fit over the least time of one pass, from rounds of all of them."""
    work = {"the table alone": lambda: tabulate(examples(logits, labels))}
    for name in METHODS:
        work[name] = lambda fit=cal.CALIBRATORS[name]: fit().fit(logits, labels)
    one_pass, least = math.inf, dict.fromkeys(work, math.inf)
    for _ in range(ROUNDS):  # a busy machine then slows all of them
        for name, call in work.items():
            one_pass = min(one_pass, fastest(lambda: torch.logsumexp(logits, -1), 5))
            least[name] = min(least[name], fastest(call, 1))
    return {name: taken / one_pass for name, taken in least.items()}


def predictions(samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of temperature 2: labels are drawn from the softmax of their halves."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((samples, classes), dtype=np.float32)
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def peers(logits: torch.Tensor, labels: torch.Tensor) -> None:
    one_pass = fastest(lambda: torch.logsumexp(logits, -1), 9)
    fits = {"calibrant": calibrant_fit, "scikit-learn": sklearn_fit, "probmetrics": probmetrics_fit}
    for name, fit in fits.items():
        try:
            temperature = fit(logits, labels)
        except ImportError as problem:
            print(f"  {name:<16}{'-':>8}  not installed: {problem}")
            continue
        taken = fastest(lambda fit=fit: fit(logits, labels), 2)
        print(f"  {name:<16}{temperature:>8.5f}{taken / one_pass:>8.1f}", flush=True)


def calibrant_fit(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(cal.TemperatureScaling().fit(logits, labels).temperature_)


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
