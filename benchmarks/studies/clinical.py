"""How often the intervals of the clinical figures contain the truth, by simulation.

    python benchmarks/studies/clinical.py > docs/data/coverage_clinical.csv
    python benchmarks/studies/clinical.py --losses > docs/data/coverage_losses.csv

Outcomes are drawn from a probability that is a known function of the claimed one, so that the
distances behind ICI, E50 and E90 are known exactly; the other figures are those of half a million
examples. Empty where there is no interval. The second form is about the terms of ``loss_split`` by
a sigmoid: what fits on four fifths of as many examples save of the expected loss, and what they
leave. Each takes some minutes on one core.
"""

import argparse
import csv
import sys

import numpy as np
from scipy.special import expit, logit, ndtri

import calibrant as cal
from calibrant.workflows.loss_split import LossTerms, loss_split

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
    "bent, distances differ": (-1.0, 1.3, lambda z: 0.7 * z + 0.3 + 0.1 * z**2),
}
THRESHOLD = 0.3


def main(repetitions: int) -> None:
    table = csv.writer(sys.stdout)
    titles = [cal.METRICS[name].title if name in cal.METRICS else "net benefit" for name in FIGURES]
    table.writerow(["model", "n", *titles, "z", "HL"])
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


def losses(repetitions: int) -> None:
    table = csv.writer(sys.stdout)
    table.writerow(["model", "n", "loss", *LossTerms._fields])
    for title, case in CASES.items():
        for n in SIZES:
            truth = true_terms(case, n, repetitions)
            hits = {name: np.zeros(3) for name in truth}
            for seed in range(repetitions):
                claimed, outcome, _ = drawn(np.random.default_rng([seed, n]), n, case)
                found = loss_split(logit(claimed), outcome, method="sigmoid", seed=seed)
                for name, terms in found.items():
                    pairs = zip(terms, truth[name], strict=True)
                    hits[name] += [one.low <= true <= one.high for one, true in pairs]
            for name, counts in hits.items():
                shares = (round(100 * count / repetitions) for count in counts)
                table.writerow([title, n, name, *shares])
            sys.stdout.flush()


def true_terms(case, n: int, repetitions: int) -> dict[str, list[float]]:
    """Expected loss, what a fit on four fifths of the examples saves of it, and what is left."""
    mean, deviation, true = case
    z = mean + deviation * ndtri((np.arange(2000) + 0.5) / 2000)  # as if drawn without chance
    claimed, right = expit(z), expit(true(z))
    total, left = expected(claimed, right), np.zeros(2)
    for seed in range(repetitions):
        some, outcome, _ = drawn(np.random.default_rng([seed, n, 1]), round(0.8 * n), case)
        fitted = cal.CALIBRATORS["sigmoid"]().fit(logit(some), outcome)
        left += expected(fitted.predict_proba(logit(claimed)), right) / repetitions
    return {
        name: [total[k], total[k] - left[k], left[k]] for k, name in enumerate(("nll", "brier"))
    }


def expected(claimed, right) -> np.ndarray:
    """NLL and Brier score over both classes, of which outcomes have the chance ``right``."""
    nll = -(right * np.log(claimed) + (1 - right) * np.log1p(-claimed))
    brier = 2 * (right * (1 - claimed) ** 2 + (1 - right) * claimed**2)
    return np.array([nll.mean(), brier.mean()])


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
    parser.add_argument("--losses", action="store_true")
    options = parser.parse_args()
    (losses if options.losses else main)(options.repetitions)
