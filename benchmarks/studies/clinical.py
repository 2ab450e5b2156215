"""How often the intervals of the clinical figures contain the truth, by simulation.

    python benchmarks/studies/clinical.py > docs/data/coverage_clinical.csv

Outcomes are drawn from a probability that is a known function of the claimed one, so that the
distances behind ICI, E50 and E90 are known exactly; the other figures are those of half a million
examples. Empty where there is no interval. Takes about ten minutes on one core.
"""

import argparse
import csv
import sys

import numpy as np
from scipy.special import expit, logit

import calibrant as cal

FIGURES = (
    *("calibration_slope", "calibration_intercept", "citl"),
    *("ici", "e50", "e90", "brier_skill", "net_benefit"),
)
SIZES = (200, 2000)
CASES = {  # mean and deviation of the log-odds that are claimed, and the true log-odds
    "calibrated": (0.0, 1.5, lambda z: z),
    "calibrated, 5 % events": (-3.4, 1.0, lambda z: z),
    "slope 0.6": (0.0, 1.5, lambda z: 0.6 * z),
    "slope 1.4, too low": (-1.0, 1.0, lambda z: 1.4 * z + 0.5),
    "too high, 5 % events": (-2.5, 1.0, lambda z: z - 0.8),
    "no logistic curve": (0.0, 1.5, lambda z: logit(0.1 + 0.7 * expit(z) ** 2)),
}
THRESHOLD = 0.3


def main(repetitions: int) -> None:
    table = csv.writer(sys.stdout)
    table.writerow(["model", "n", *(name.replace("_", " ") for name in FIGURES), "z", "HL"])
    for title, case in CASES.items():
        truth = true_figures(case)
        for n in SIZES:
            hits = {name: list[bool]() for name in FIGURES}
            rejected = {"spiegelhalter_p": 0, "hosmer_lemeshow_p": 0}
            for seed in range(repetitions):
                claimed, outcome, _ = drawn(np.random.default_rng([seed, n]), n, case)
                names = [*FIGURES[:-1], *rejected]
                found = cal.evaluate(logit(claimed), outcome, metrics=names, seed=seed)
                for name in rejected:
                    rejected[name] += found[name].value <= 0.05
                curve = decisions(claimed, outcome)
                ends = {name: found[name][1:] for name in FIGURES[:-1]}
                ends["net_benefit"] = (float(curve.low[0]), float(curve.high[0]))
                for name, (low, high) in ends.items():
                    if not np.isnan(low):
                        hits[name].append(low - 1e-12 <= truth[name] <= high + 1e-12)
            shares = [round(100 * np.mean(some)) if some else "" for some in hits.values()]
            tests = [round(100 * count / repetitions) for count in rejected.values()]
            table.writerow([title, n, *shares, *tests])
            sys.stdout.flush()


def drawn(rng, n, case):
    """Claimed probabilities, outcomes, and the probabilities from which these were drawn."""
    mean, deviation, true = case
    z = rng.normal(mean, deviation, n)
    right = expit(true(z))
    return expit(z), (rng.random(n) < right).astype(int), right


def true_figures(case) -> dict[str, float]:
    claimed, outcome, right = drawn(np.random.default_rng(1), 500_000, case)
    off = np.abs(claimed - right)
    exact = {"ici": off.mean(), "e50": np.quantile(off, 0.5), "e90": np.quantile(off, 0.9)}
    exact["net_benefit"] = decisions(claimed, outcome).net_benefit[0]
    others = {name: cal.METRICS[name].compute for name in FIGURES if name not in exact}
    z = logit(claimed)
    return {name: float(v) for name, v in exact.items()} | {
        name: figure(z, outcome) for name, figure in others.items()
    }


def decisions(claimed, outcome):
    return cal.metrics.decision_curve(confidence=claimed, outcome=outcome, thresholds=[THRESHOLD])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=200)
    main(parser.parse_args().repetitions)
