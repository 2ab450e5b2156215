"""How often limits of thresholds are broken, and what sets cover, by simulation.

    python benchmarks/studies/decisions.py -o docs/data
    python benchmarks/studies/decisions.py --tables docs/data

Labels are drawn from populations of which every rate is known at every threshold: scores that are
calibrated, over-confident, tied at six values, or unrelated to the label in the upper half. Tags
are three such problems, and classes have scores with the same faults. Sets are of four classes, one
rare, for easy rows and for hard ones with half the sharpness. The second form writes the tables of
``docs/guarantees.md`` from the rows.
"""

import argparse
import csv
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rows import Table, chosen, read, write_tables
from scipy.special import expit, softmax

from calibrant.decide import Threshold, conformal, thresholds

Array = NDArray[np.float64]
RUNS, SIZES, CERTAINTY = 1000, (100, 400, 1600), 0.95
COSTS = np.array([[0.0, 1.0], [8.0, 0.5]])
LIMITS: dict[str, dict[str, Any]] = {
    "wrong answers ≤ 0.15": {"max_error": 0.15},
    "precision ≥ 0.6": {"precision": 0.6},
    "recall ≥ 0.9": {"recall": 0.9},
    "misses ≤ 0.2": {"max_fnr": 0.2},
    "false positives ≤ 0.1": {"max_fpr": 0.1},
    "mean cost ≤ 1.2": {"max_cost": 1.2, "cost": COSTS},
    "recall ≥ 0.9, cheapest": {"recall": 0.9, "cost": COSTS},
    "precision ≥ 0.45, recall ≥ 0.6": {"precision": 0.45, "recall": 0.6},
    "recall ≥ 0.8, three groups at once": {"recall": 0.8},
    "recall ≥ 0.8, three tags at once": {"recall": 0.8},
    "false positives ≤ 0.1, three classes at once": {"max_fpr": 0.1},
}
SET_COLUMNS = ("sets", "score", "all", "rare", "hard", "shifted", "size", "runs")
SET_RUNS, COVERAGE, HARD, HARD_LATER = 300, 0.9, 0.3, 0.7
MANY = 20  # classes, of which raps leaves out the improbable ones
COLUMNS = ("limit", "population", "n", "runs", "broken", "reached", "flagged")


def populations() -> dict[str, tuple[Array, Array]]:
    """Log-odds of equally likely cells, and the chance of a positive label in each."""
    grid = np.linspace(-5, 3, 60)
    tied = np.repeat(np.linspace(-3, 2, 6), 10)
    return {
        "calibrated": (grid, expit(grid)),
        "over-confident": (grid, expit(0.5 * grid - 0.5)),
        "tied": (tied, expit(tied)),
        "flat above": (grid, np.where(grid < -1, expit(grid), 0.4499)),
    }


def classes() -> dict[str, tuple[Array, Array]]:
    """Logits ``(cells, 3)`` of equally likely cells, and the chance of each class in them."""
    logits = 1.5 * np.random.default_rng(1).normal(size=(60, 3)) - [0.0, 0.5, 1.0]
    tied = logits.round()
    calibrated = softmax(logits, -1)
    return {
        "calibrated": (logits, calibrated),
        "over-confident": (logits, softmax(0.5 * logits, -1)),
        "tied": (tied, softmax(tied, -1)),
        "flat above": (
            logits,
            np.where(calibrated.max(-1, keepdims=True) > 0.6, 1 / 3, calibrated),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.out:
        with (given.out / "thresholds.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for row in threshold_rows():
                writer.writerow(row)
                file.flush()
        with (given.out / "sets.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, SET_COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(set_rows())
    folder = given.tables or given.out
    if folder is None:
        parser.error("name -o FOLDER, or --tables FOLDER")
    write_tables(folder, tables(folder))


def threshold_rows() -> Iterator[dict[str, object]]:
    warnings.simplefilter("ignore")  # limits that few examples do not show
    for limit, wanted in LIMITS.items():
        for name, population in (classes() if "classes" in limit else populations()).items():
            for n in SIZES:
                rng = np.random.default_rng(n)
                found = [one_run(rng, *population, n, limit, wanted) for _ in range(RUNS)]
                broken, reached, flagged = np.mean(found, 0)
                row = {"limit": limit, "population": name, "n": n, "runs": RUNS}
                yield row | {"broken": broken, "reached": reached, "flagged": round(flagged, 4)}


def one_run(
    rng: np.random.Generator, logits: Array, chance: Array, n: int, limit: str, wanted: Any
) -> tuple[bool, bool, float]:
    """Whether a limit is broken, whether it was shown, and the share that is flagged."""
    if "classes" in limit or "tags" in limit:
        made, claimed, chance = several(rng, logits, chance, n, limit, wanted)
    else:
        groups = 3 if "groups" in limit else 1
        group, at = rng.integers(groups, size=n), rng.integers(len(logits), size=n)
        labels = (rng.random(n) < chance[at]).astype(int)
        found = thresholds(logits[at], labels, by=group, **wanted, certainty=CERTAINTY)
        made = [*found.values()]
        claimed = np.tile(expit(logits)[:, None], len(made))
        chance = np.tile(chance[:, None], len(made))
    if "max_error" in wanted:  # an answer is flagged if it is accepted, and positive if right
        claimed, chance = (
            np.maximum(claimed, 1 - claimed),
            np.where(claimed > 0.5, chance, 1 - chance),
        )
    flags = [claimed[:, k] >= one.threshold for k, one in enumerate(made)]
    wrong = any(not kept(chance[:, k], flag, wanted) for k, flag in enumerate(flags))
    shown = all(one.more_labels == 0 for one in made)
    return wrong, shown, float(np.mean(flags))


def several(
    rng: np.random.Generator, logits: Array, chance: Array, n: int, limit: str, wanted: Any
) -> tuple[list[Threshold], Array, Array]:
    """Thresholds of tags or classes; probabilities and chances ``(cells, thresholds)`` of each."""
    if "tags" in limit:
        at = rng.integers(len(logits), size=(n, 3))
        labels = (rng.random((n, 3)) < chance[at]).astype(int)
        found = thresholds(logits[at], labels, **wanted, certainty=CERTAINTY)
        claimed, chance = (np.tile(x[:, None], 3) for x in (expit(logits), chance))
        return [*found.values()], claimed, chance
    at = rng.integers(len(logits), size=n)
    labels = (rng.random((n, 1)) > chance[at].cumsum(-1)).sum(-1)
    found = thresholds(logits[at], labels, **wanted, certainty=CERTAINTY)
    return [*found.values()], softmax(logits, -1), chance


def kept(chance: Array, flagged: NDArray[np.bool_], wanted: Any) -> bool:
    """Whether a threshold that flags these cells keeps its limits in the population."""
    tp, fn = chance[flagged].sum(), chance[~flagged].sum()
    fp, tn = (1 - chance)[flagged].sum(), (1 - chance)[~flagged].sum()
    cost = float(np.array([tn, fp, fn, tp]) @ COSTS.ravel()) / len(chance)
    rates = {
        "max_error": -fp / (tp + fp) if flagged.any() else 0.0,
        "max_fnr": -fn / (tp + fn),
        "precision": tp / (tp + fp) if flagged.any() else math.inf,
        "recall": tp / (tp + fn),
        "max_fpr": -fp / (fp + tn),
        "max_cost": -cost if flagged.any() else 0.0,  # nothing was promised for none
    }
    limits = {k: -v if k.startswith("max") else v for k, v in wanted.items() if k != "cost"}
    # a recall that is not reached flags all, a precision that is not reached nothing
    nothing = not flagged.any() and "precision" in wanted
    return nothing or all(rates[k] >= v - 1e-12 for k, v in limits.items())


def set_rows() -> Iterator[dict[str, object]]:
    for kind in ("plain", "by class", "by group", "weighted"):
        for score, k in (("lac", 4), ("aps", 4), ("ordered", 4), ("raps", MANY)):
            rng = np.random.default_rng(0)
            runs = [set_run(rng, kind, score, k) for _ in range(SET_RUNS)]
            figures = np.mean(runs, 0)
            cells = dict(zip(SET_COLUMNS[2:7], (f"{x:.4f}" for x in figures), strict=True))
            name = kind if k < MANY else f"{kind}, {k} classes"
            yield {"sets": name, "score": score, **cells, "runs": SET_RUNS}


def set_run(rng: np.random.Generator, kind: str, score: Any, k: int) -> tuple[float, ...]:
    """Coverage of all rows, of the rare class, of hard rows and of a mix with more of these."""
    logits, labels, hard = draw_rows(rng, 1000, HARD, k)
    new, truth, now = draw_rows(rng, 2000, HARD, k)
    later, later_truth, later_hard = draw_rows(rng, 2000, HARD_LATER, k)
    by: Any = {"by class": "class", "by group": hard}.get(kind)
    ratio = ratios(hard) if kind == "weighted" else None
    fitted = conformal(logits, labels, coverage=COVERAGE, score=score, by=by, weight=ratio)

    def hits(rows: Array, targets: NDArray[np.int64], group: NDArray[np.bool_]) -> Any:
        options: Any = {"group": group} if kind == "by group" else {}
        options |= {"weight": ratios(group)} if kind == "weighted" else {}
        return fitted.sets(rows, **options)[np.arange(len(rows)), targets]

    own, shifted = hits(new, truth, now), hits(later, later_truth, later_hard)
    return own.mean(), own[truth == k - 1].mean(), own[now].mean(), shifted.mean(), fitted.mean_size


def ratios(hard: NDArray[np.bool_]) -> Array:
    """Densities after the shift over those before."""
    return np.where(hard, HARD_LATER / HARD, (1 - HARD_LATER) / (1 - HARD))


def draw_rows(
    rng: np.random.Generator, n: int, share: float, k: int
) -> tuple[Array, NDArray[np.int64], NDArray[np.bool_]]:
    """Logits, labels, and which rows are hard."""
    hard = rng.random(n) < share
    logits = 2 * rng.normal(size=(n, k)) - [*[0] * (k - 1), 2]
    sharpness = np.where(hard, 0.5, 1.0)[:, None]
    return logits, (logits * sharpness + rng.gumbel(size=logits.shape)).argmax(-1), hard


def tables(folder: Path) -> dict[str, Table]:
    """Shares of broken limits and how often they are reached; coverage of sets."""
    rows = read(folder / "thresholds.csv")
    made: list[list[str]] = [["limit", "broken, at most %", "in the mean %"]]
    made[0] += [f"shown with {int(n):,} labels, %" for n in SIZES]
    for limit in LIMITS:
        own = chosen(rows, limit=limit)
        broken = [100 * float(row["broken"]) for row in own]
        shown = [
            np.mean([100 * float(row["reached"]) for row in chosen(own, n=str(n))]) for n in SIZES
        ]
        cells = [f"{max(broken):.1f}", f"{np.mean(broken):.1f}", *(f"{x:.0f}" for x in shown)]
        made.append([limit, *cells])
    sets = [
        ["sets", "score", "all rows", "rare class", "hard rows", "after the shift", "mean size"]
    ]
    for row in read(folder / "sets.csv"):
        shares = (f"{100 * float(row[name]):.1f}" for name in SET_COLUMNS[2:6])
        sets.append([row["sets"], f"`{row['score']}`", *shares, f"{float(row['size']):.2f}"])
    return {"table_thresholds": made, "table_sets": sets}


if __name__ == "__main__":
    main()
