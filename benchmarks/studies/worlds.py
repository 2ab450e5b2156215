"""What calibration costs and gains in simulated worlds whose truth is known.

    python benchmarks/studies/worlds.py [--repeats 30] [--examples 20 50 100 150] [--kinds ...]

Each world draws logits of 2 to 100 classes, and those that labels follow. Methods are fitted on a
few examples. The table has the mean log loss (x 1000) on fresh examples, in expectation over their
labels, and by how much that of the last method is above the lower one of ``none`` and ``ts``.
``--methods`` names others than ``auto``; ``integral`` is the mean of the predictions of all
temperatures under the posterior of which ``shrunk_ts`` takes the mode.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks.arena

import numpy as np
import torch
from scipy.special import log_softmax, softmax

from benchmarks.arena.methods import OURS
from calibrant._core.checks import FloatArray, IntArray
from calibrant.calibrators.parts import ShrunkTemperature

BASELINES = ("none", "ts")
CLASSES = (2, 3, 5, 10, 30, 100)
FRESH = 2000


def overconfident(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    return logits / rng.uniform(1.5, 4)


def underconfident(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    return logits * rng.uniform(1.3, 2.5)


def calibrated(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    return logits


def rare(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    """The first class is frequent, all others are rare; logits are twice too large."""
    logits[:, 0] += 10  # which the caller sees
    return logits / 2


def separable(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    """Nearly all predictions are right, and far from sure."""
    return 50 * logits


def biased(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    """Some classes are preferred whatever the input."""
    return logits / 1.5 + rng.normal(size=logits.shape[1]) * rng.uniform(0.3, 1.5)


def by_margin(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    """The further the top class leads, the more confident the model is for its accuracy."""
    second, first = np.sort(logits, axis=1)[:, -2:].T
    return logits / (1 + rng.uniform() * (first - second))[:, None]


def mixed(rng: np.random.Generator, logits: FloatArray) -> FloatArray:
    """On some inputs the model knows almost nothing, and does not show it."""
    return logits / np.where(rng.random(len(logits)) < 0.3, 6, 1)[:, None]


ASKED = (overconfident, underconfident, calibrated, rare, separable)
KINDS = {truth.__name__: truth for truth in (*ASKED, biased, by_margin, mixed)}


def integral(logits: FloatArray, labels: IntArray, fresh: FloatArray) -> FloatArray:
    """Log-probabilities: the mean over temperatures, weighted by likelihood and prior."""
    grid = np.linspace(-3, 3, 121)  # logarithms of 1 / T
    own = np.arange(len(labels)), labels
    fit = [log_softmax(np.exp(u) * logits, -1)[own].sum() for u in grid]
    weight = np.array(fit) - np.log1p((grid / ShrunkTemperature.SCALE) ** 2)
    weight = np.exp(weight - weight.max())
    weight /= weight.sum()
    used = np.flatnonzero(weight > 1e-6)
    return np.log(sum(weight[i] * softmax(np.exp(grid[i]) * fresh, -1) for i in used))


def losses(kind: str, count: int, seed: int, methods: Sequence[str]) -> list[float]:
    """Log loss of each method in one world, in thousandths of a nat."""
    rng = np.random.default_rng([list(KINDS).index(kind), count, seed])
    classes = int(rng.choice(CLASSES))
    logits = rng.uniform(0.7, 3) * rng.normal(size=(count + FRESH, classes))
    truth = KINDS[kind](rng, logits)
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)[:count]
    fresh = np.exp(log_softmax(truth[count:], -1))
    result = []
    for name in methods:
        if name == "integral":
            claimed = integral(logits[:count], labels, logits[count:])
        else:
            fitted = OURS[name]().fit(logits[:count], labels)
            claimed = log_softmax(fitted.transform(logits[count:]), -1)
        result.append(-1000 * float((fresh * claimed).sum(-1).mean()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--examples", type=int, nargs="+", default=[20, 50, 100, 150])
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=[truth.__name__ for truth in ASKED]
    )
    parser.add_argument("--methods", nargs="+", default=["auto"])
    given = parser.parse_args()
    methods = [*BASELINES, *given.methods]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| world | examples |", " | ".join(methods), "| above the better | its error |")
    print("|---" * (len(methods) + 4) + "|")
    for kind in given.kinds:
        for count in given.examples:
            found = np.array([losses(kind, count, seed, methods) for seed in range(given.repeats)])
            means = found.mean(0)
            above = found[:, -1] - found[:, int(np.argmin(means[:2]))]
            error = above.std() / np.sqrt(len(above))
            cells = " | ".join(f"{mean:.0f}" for mean in means)
            print(f"| {kind} | {count} | {cells} | {above.mean():.1f} | {error:.1f} |", flush=True)


if __name__ == "__main__":
    main()
