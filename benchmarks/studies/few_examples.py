"""What calibration costs with few examples, in simulated worlds whose truth is known.

    python benchmarks/studies/few_examples.py [REPEATS] > few_examples.csv

The cost is the mean divergence of the calibrated probabilities from the true ones, in thousandths
of a nat, on fresh examples. Calibrated worlds have no cost to begin with: what a method costs there
is its own. `left` is the share of fits that change nothing.
"""

import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import numpy as np
import torch
from scipy.special import log_softmax

import calibrant as cal

CLASSES, SCALES = (2, 3, 10, 30), (1.0, 2.0, 4.0)
TEMPERATURES = (1.0, 1.5)  # of calibrated and of over-confident logits
COUNTS = (50, 100, 200)
METHODS = ("none", "ts", "auto")
FRESH = 4000


def costs(world: tuple[int, float, float, int, int]) -> list[float]:
    """Cost of each method in one world, and whether ``auto`` changed nothing."""
    torch.set_num_threads(1)
    classes, scale, temperature, count, seed = world
    rng = np.random.default_rng(seed)
    truth = scale * rng.normal(size=(count + FRESH, classes))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)[:count]
    fresh = log_softmax(truth[count:], -1)
    result = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in METHODS:
            fitted = cal.CALIBRATORS[name]().fit(temperature * truth[:count], labels)
            found = log_softmax(fitted.transform(temperature * truth[count:]), -1)
            result.append(1000 * float((np.exp(fresh) * (fresh - found)).sum(-1).mean()))
    return [*result, float(fitted.chosen_.name == "none")]


def main(repeats: int) -> None:
    print("temperature,classes,examples,none,ts,auto,auto less ts,its error,left")
    with ProcessPoolExecutor() as pool:
        for temperature, classes, count in product(TEMPERATURES, CLASSES, COUNTS):
            settings = product([classes], SCALES, [temperature], [count], range(repeats))
            found = np.array(list(pool.map(costs, settings)))
            none, ts, auto, left = found.mean(0)
            more = found[:, 2] - found[:, 1]
            error = more.std() / np.sqrt(len(more))
            figures = [none, ts, auto, more.mean(), error]
            row = ",".join(f"{figure:.2f}" for figure in [*figures, left])
            print(f"{temperature:g},{classes},{count},{row}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
