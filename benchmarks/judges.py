"""How often intervals of success rates contain the truth, and how much a judge narrows them.

    python benchmarks/judges.py > docs/data/judges.csv

A system is right at a known rate, and a judge errs in a known way. Of 2,000 answers, 20 to 500 have
labels. Each cell has the share of 1,000 simulated data sets whose 90 % interval contains the rate
and, in brackets, the length of the intervals in that of intervals from the labels alone. The last
lines are differences of two systems, and labels that are not drawn at random but with known
probabilities or within strata.
"""

import csv
import os
import sys
import warnings
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from calibrant.estimate.success_rate import rate_difference, success_rate
from calibrant.metrics.intervals import Estimate

ANSWERS = 2000
LABELS = (20, 50, 100, 500)
RATES = (0.02, 0.1, 0.5, 0.9, 0.98)
Array = np.ndarray
Draw = Callable[[np.random.Generator, Array], Array]
Result = tuple[Estimate, Estimate]
"""An interval, and one without the judge."""


def flipped(rng: np.random.Generator, right: Array, wrong: float, missed: float) -> Array:
    """Votes of a judge that errs on a share of the wrong, and of the right answers."""
    return right ^ (rng.random(right.size) < np.where(right, missed, wrong))


def score(rng: np.random.Generator, right: Array) -> Array:
    return np.clip(np.round(5.5 + 3 * (right - 0.5) + 2 * rng.normal(size=right.size)), 1, 10)


JUDGES: dict[str, Draw] = {
    "useless": lambda rng, right: rng.random(right.size) < 0.7,
    "errs on 10 %": lambda rng, right: flipped(rng, right, 0.1, 0.1),
    "errs on 13 % of the wrong": lambda rng, right: flipped(rng, right, 0.13, 0.0),
    "errs on 10 % of the right": lambda rng, right: flipped(rng, right, 0.0, 0.1),
    "never errs": lambda rng, right: right,
    "score of 1 to 10": score,
}


def at_random(rng: np.random.Generator, rate: float, judge: Draw, labels: int) -> Result:
    right = rng.random(ANSWERS) < rate
    found = success_rate(judge(rng, right), np.where(np.arange(ANSWERS) < labels, right, np.nan))
    return found.rate, found.labels_alone


def by_probability(rng: np.random.Generator, rate: float, judge: Draw, labels: int) -> Result:
    """Answers that the judge calls wrong are labelled three times as often."""
    right = rng.random(ANSWERS) < rate
    votes = judge(rng, right)
    chance = np.where(votes, 1.0, 3.0)
    chance *= labels / chance.sum()
    human = np.where(rng.random(ANSWERS) < chance, right, np.nan)
    found = success_rate(votes, human, probability=np.minimum(chance, 1))
    return found.rate, found.labels_alone


def by_strata(rng: np.random.Generator, rate: float, judge: Draw, labels: int) -> Result:
    """Half of the labels are for answers that the judge calls right, half for the others."""
    right = rng.random(ANSWERS) < rate
    votes = judge(rng, right)
    human = np.full(ANSWERS, np.nan)
    for vote in (False, True):
        some = np.flatnonzero(votes == vote)[: labels // 2]
        human[some] = right[some]
    found = success_rate(votes, human, strata=votes)
    return found.rate, found.labels_alone


def difference(rng: np.random.Generator, rate: float, judge: Draw, labels: int) -> Result:
    """The second system is right where the first is, and on a fifth of the other questions."""
    first = rng.random(ANSWERS) < rate
    second = first | (rng.random(ANSWERS) < 0.2)
    rates = [
        success_rate(judge(rng, each), np.where(np.arange(ANSWERS) < labels, each, np.nan))
        for each in (first, second)
    ]
    same = np.arange(ANSWERS)
    return rate_difference(*rates, questions=(same, same)), rate_difference(*rates)


def cell(draw: Callable[..., Result], rate: float, truth: float, name: str, labels: int) -> str:
    hits, lengths = [], []
    for seed in range(1000):
        rng = np.random.default_rng([seed, labels])
        found, other = draw(rng, rate, JUDGES[name], labels)
        hits.append(found.low <= truth <= found.high)
        lengths.append([found.high - found.low, other.high - other.low])
    ours, alone = np.mean(lengths, axis=0)
    return f"{100 * np.mean(hits):.0f} ({ours / alone:.2f})"


def main() -> None:
    table = csv.writer(sys.stdout)
    table.writerow(["judge", "rate %", *(f"{labels} labels" for labels in LABELS)])
    lines = [(name, at_random, name, rate, rate) for name in JUDGES for rate in RATES]
    judge = "errs on 10 %"
    for rate in (0.1, 0.5, 0.9):
        lines.append((f"{judge}; known probabilities", by_probability, judge, rate, rate))
        lines.append((f"{judge}; strata by verdict", by_strata, judge, rate, rate))
        more = 0.2 * (1 - rate)
        lines.append((f"{judge}; paired difference", difference, judge, rate, more))
    for title, draw, name, rate, truth in lines:
        cells = [cell(draw, rate, truth, name, labels) for labels in LABELS]
        table.writerow([title, f"{100 * rate:g}", *cells])
        sys.stdout.flush()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of labels that are all equal
        main()
