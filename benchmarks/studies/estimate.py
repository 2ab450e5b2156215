"""How far estimates without labels are off, how often intervals hold, and what withdraws them.

    python benchmarks/studies/estimate.py make DATA TASKS
    python benchmarks/studies/estimate_cbpe.py TASKS             # with nannyml installed
    python benchmarks/studies/estimate.py run TASKS docs/data
    python benchmarks/studies/estimate.py simulate docs/data
    python benchmarks/studies/estimate.py tables docs/data

``make`` plants shifts in predictions of real models below DATA (folders with ``predictions.npz``
and ``shift.npz``, and ``tabular``) and writes batches to the folder TASKS, to which
``estimate_cbpe.py --bundled`` adds the datasets that nannyml brings. ``run`` estimates the accuracy
of every batch and writes ``estimate.csv`` and ``estimate_labels.csv``. ``simulate`` measures
coverage where calibration holds (``estimate_coverage.csv``), where it does not and labels show it
(``estimate_hidden.csv``), and which shifts are seen (``estimate_seen.csv``). ``tables`` makes the
tables and the figure of ``docs/guarantees.md``. All of it takes about an hour.

A task has raw probabilities: ``fit_probs`` with ``fit_labels`` for calibrators, a labelled
reference, and batches by the name of their shift. nannyml calibrates by itself, on both
labelled sets.
"""

import argparse
import csv
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rows import MISSING, Rows, Table, chosen, read, write_tables
from scipy.special import expit, softmax

import calibrant as cal
from calibrant.estimate import PerformanceEstimate, PerformanceEstimator, choose_labels
from calibrant.metrics import Estimate
from calibrant.show.figures import estimate_plot, save_figure

Array = NDArray[Any]
BATCH, REPEATS = 1000, 4
BUDGETS = (50, 100, 200, 500)
DRAWS = 20
"""Of labels, for each budget."""
TABULAR = ("default", "credit_data", "hpc_data", "chile", "cells", "leaf_id_flavia")
WRONG = (0.01, 0.03, 0.05)
SIZES = (
    (1500, 300, 100),
    (1500, 1000, 300),
    (1500, 1000, 1000),
    (5000, 5000, 100),
    (5000, 5000, 1000),
)
"""Batch, reference and labels of simulations."""
RARE = 0.03
"""Share of the rare class."""
HIDDEN: dict[str, dict[str, float]] = {
    "none": {},
    "labels: 5 % random": {"noise": 0.05},
    "labels: 10 % random": {"noise": 0.1},
    "labels: 20 % random": {"noise": 0.2},
    "over-confidence": {"too_large": 1.5},
    "prevalence 3 to 15 %": {"positive": 0.15},
}
"""What is wrong in a batch, as arguments of ``drawn``."""
UNSEEN = ("tables: concept", "tables: more errors")
"""Shifts of labels given the inputs, which predictions do not show."""


# ------------------------------------------------------------------------------------------- tasks
def make(data: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in sorted(data.glob("*/shift.npz")):
        np.savez_compressed(folder / f"{path.parent.name}.npz", **corrupted(path))
    for path in sorted((data / "tabular").glob("*.npz")):
        if path.name.startswith(TABULAR):
            np.savez_compressed(folder / path.name, **planted(path))


def as_probs(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    if wide.ndim == 1:
        return np.stack([1 - expit(wide), expit(wide)], 1)
    return np.asarray(softmax(wide, 1))


def corrupted(path: Path) -> dict[str, Array]:
    """The last images of the test set, clean and under corruptions."""
    clean, shifted = np.load(path.with_name("predictions.npz")), np.load(path)
    rng = np.random.default_rng(0)
    probs = {"none": as_probs(clean["test_logits"])}
    probs |= {
        key.removesuffix("_logits"): as_probs(shifted[key])
        for key in shifted.files
        if key.endswith("_logits")
    }
    task = {
        "fit_probs": as_probs(clean["val_logits"]),
        "fit_labels": clean["val_labels"],
        "reference_probs": probs["none"][:5000],
        "reference_labels": clean["test_labels"][:5000],
    }
    for name, scores in probs.items():
        for i in range(REPEATS):
            rows = rng.choice(np.arange(5000, 10_000), BATCH, replace=False)
            task[f"batch_{name}.{i}_probs"] = scores[rows]
            task[f"batch_{name}.{i}_labels"] = clean["test_labels"][rows]
    return task


def planted(path: Path) -> dict[str, Array]:
    """Half of a test set as a reference, and batches from the rest, with planted shifts."""
    file, rng = np.load(path), np.random.default_rng(0)
    probs, labels = as_probs(file["test_logits"]), file["test_labels"]
    order = rng.permutation(len(labels))
    reference, pool = np.split(order, [len(order) // 2])
    task = {
        "fit_probs": as_probs(file["val_logits"]),
        "fit_labels": file["val_labels"],
        "reference_probs": probs[reference],
        "reference_labels": labels[reference],
    }
    for i in range(REPEATS):
        for name in ("none", "covariate", "label", "concept", "errors"):
            rows, known = shifted_rows(name, probs[pool], labels[pool], rng)
            task[f"batch_{name}.{i}_probs"] = probs[pool][rows]
            task[f"batch_{name}.{i}_labels"] = known
    return task


def shifted_rows(
    shift: str, probs: Array, labels: Array, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Rows of a batch of a third of the pool, and their labels."""
    n, known = len(labels), labels.copy()
    confidence, right = probs.max(1), probs.argmax(1) == labels
    rank = confidence.argsort().argsort() / n
    weight = np.ones(n)
    if shift == "covariate":  # doubtful examples are more frequent
        weight = 1.05 - rank
    elif shift == "label":  # the most frequent class becomes rare
        weight = np.where(labels == np.bincount(labels).argmax(), 0.25, 1)
    elif shift == "concept":  # an eighth of the labels mean something else
        moved = rng.random(n) < 0.125
        known = np.where(moved, (labels + 1) % probs.shape[1], labels)
    elif shift == "errors":  # examples on which the model errs are twice as frequent
        weight = np.where(right, 0.5, 1)
    rows = rng.choice(n, n // 3, replace=False, p=weight / weight.sum())
    return rows, known[rows]


# --------------------------------------------------------------------------------------- estimates
def run(folder: Path, out: Path) -> None:
    rows: list[dict[str, object]] = []
    for path in sorted(folder.glob("*.npz")):
        print(path.stem, flush=True)
        rows += estimates(path)
    write(out / "estimate.csv", rows)
    labelled = [row for path in sorted(folder.glob("cifar10*.npz")) for row in labelling(path)]
    write(out / "estimate_labels.csv", labelled)


def batches(task: Any) -> Iterator[tuple[str, Array, Array, Array | None]]:
    for key in task.files:
        if key.startswith("batch_") and key.endswith("_probs"):
            stem = key.removesuffix("_probs")
            features = task[f"{stem}_features"] if f"{stem}_features" in task.files else None
            yield stem.removeprefix("batch_"), task[key], task[f"{stem}_labels"], features


def fitted(task: Any) -> tuple[cal.Calibrator, dict[str, Array]]:
    """A calibrator that keeps the predictions, and the reference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = np.log(np.maximum(task["fit_probs"], 1e-12))
        calibrator = cal.Auto().fit(logits, task["fit_labels"])
    reference = {"logits": np.log(np.maximum(task["reference_probs"], 1e-12))}
    reference["labels"] = task["reference_labels"]
    if "reference_features" in task.files:
        reference["features"] = task["reference_features"]
    return calibrator, reference


def estimates(path: Path) -> Iterator[dict[str, object]]:
    task = np.load(path)
    calibrator, reference = fitted(task)
    try:
        estimator = PerformanceEstimator(reference, calibrator=calibrator)
    except ValueError as refused:
        print(f"  {refused}")
        return
    cbpe = {row["batch"]: row for row in read(path.with_suffix(".csv"))}
    for name, probs, labels, features in batches(task):
        logits = np.log(np.maximum(probs, 1e-12))
        after = calibrator.predict_proba(logits)
        truth = (after.argmax(1) == labels).mean()
        result = estimator.estimate(logits, features=features)
        ours, other = result["accuracy"], cbpe[name]
        yield {
            "task": path.stem,
            "shift": name.rpartition(".")[0],
            "n": len(labels),
            "classes": probs.shape[1],
            "truth": f"{truth:.5f}",
            "estimate": f"{ours.value:.5f}",
            "low": f"{ours.low:.5f}",
            "high": f"{ours.high:.5f}",
            "status": result.status,
            "widening": f"{result.widening:.4f}",
            "confidence": f"{after.max(1).mean():.5f}",
            "raw_truth": f"{(probs.argmax(1) == labels).mean():.5f}",
            "raw_confidence": f"{probs.max(1).mean():.5f}",
            "cbpe": other["value"],
            "cbpe_low": other["low"],
            "cbpe_high": other["high"],
        }


def labelling(path: Path) -> Iterator[dict[str, object]]:
    """Errors of the accuracy with some labels, chosen here or at random."""
    task = np.load(path)
    calibrator, _ = fitted(task)
    for name, probs, labels, _ in batches(task):
        shift, _, number = name.rpartition(".")
        if number != "0" or shift not in ("none", "contrast_3", "noise_1", "pixelate_1"):
            continue
        after = calibrator.predict_proba(np.log(np.maximum(probs, 1e-12)))
        for budget in BUDGETS:
            for seed in range(DRAWS):
                shared = {"task": path.stem, "shift": shift, "budget": budget}
                yield from labelled_errors(shared, after, labels, seed)


def labelled_errors(
    shared: dict[str, object], probs: Array, labels: Array, seed: int
) -> Iterator[dict[str, object]]:
    right, budget = probs.argmax(1) == labels, int(str(shared["budget"]))
    shared = {**shared, "truth": f"{right.mean():.5f}"}
    sample = choose_labels(probs=probs, budget=budget, seed=seed)
    at_random = np.random.default_rng(seed).choice(len(labels), budget, replace=False)
    mean = right[at_random].mean()
    yield {**shared, "method": "mean of labels at random", "estimate": f"{mean:.5f}"}
    for method, rows, chance in (
        ("labels at random", at_random, np.full(budget, budget / len(labels))),
        ("chosen labels", sample.row, sample.inclusion),
    ):
        known, inclusion = np.full(len(labels), -100), np.ones(len(labels))
        known[rows], inclusion[rows] = labels[rows], chance
        result = cal.estimate_performance(probs=probs, labels=known, inclusion=inclusion)
        value, low, high = (f"{x:.5f}" for x in result["accuracy"])
        yield {**shared, "method": method, "estimate": value, "low": low, "high": high}


# -------------------------------------------------------------------------------------- simulation
def simulate(out: Path, repeats: int) -> None:
    rows, sizes = [], ((20, 1000), (200, 300), (2000, 1000), (5000, 5000), (300, 5000))
    for kind in ("two classes", "two classes, sure", "five classes"):
        for n, m in sizes:
            print(kind, n, m, flush=True)
            rows += coverage(kind, n, m, repeats)
    write(out / "estimate_coverage.csv", rows)
    write(out / "estimate_seen.csv", list(seen(repeats)))
    write(out / "estimate_hidden.csv", list(hidden(repeats // 2)))


def drawn(
    kind: str,
    n: int,
    rng: np.random.Generator,
    *,
    noise: float = 0.0,
    too_large: float = 1.0,
    positive: float = RARE,
) -> tuple[Array, Array]:
    """Logits and labels; some of these are random, or from logits that are ``too_large`` times."""
    if kind == "five classes":
        logits = 2.5 * rng.normal(size=(n, 5))
        labels = (logits / too_large + rng.gumbel(size=logits.shape)).argmax(1)
    elif kind == "rare class":
        labels = (rng.random(n) < positive).astype(int)
        logits = 2 * (rng.normal(size=n) + 2 * labels) - 2 + np.log(RARE / (1 - RARE))
    else:
        logits = rng.normal(*((5, 2) if "sure" in kind else (-1, 2)), n)
        labels = (rng.random(n) < expit(logits / too_large)).astype(int)
    classes = logits.shape[1] if logits.ndim > 1 else 2
    return logits, np.where(rng.random(n) < noise, rng.integers(0, classes, n), labels)


def coverage(kind: str, n: int, m: int, repeats: int) -> Iterator[dict[str, object]]:
    held: dict[str, list[bool]] = {}
    shifts = 0
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        reference = dict(zip(("logits", "labels"), drawn(kind, m, rng), strict=True))
        logits, labels = drawn(kind, n, rng)
        result = cal.estimate_performance(logits, reference, threshold=0.9, seed=10**6 + seed)
        shifts += result.status != "holds"
        for name, value in measured(logits, labels).items():
            low, high = result[name][1:]
            if not np.isnan(value):
                held.setdefault(name, []).append(bool(low - 1e-6 <= value <= high + 1e-6))
    for name, hits in held.items():
        shared = {"data": kind, "n": n, "reference": m, "metric": name, "batches": len(hits)}
        seen = f"{100 * shifts / repeats:.1f}"
        yield {**shared, "held": f"{100 * np.mean(hits):.1f}", "shifts_seen": seen}


def hidden(repeats: int) -> Iterator[dict[str, object]]:
    """Coverage of batches in which calibration does not hold, with some labels and without."""
    for kind in ("two classes", "five classes", "rare class"):
        for shift, wrong in HIDDEN.items():
            if (kind == "rare class") != ("positive" in wrong) and wrong:
                continue
            for n, m, budget in SIZES:
                print(kind, shift, n, m, budget, flush=True)
                batches = [wrong_batch(kind, wrong, n, m, budget, s) for s in range(repeats)]
                shared = {"data": kind, "shift": shift, "n": n, "reference": m, "labels": budget}
                status = np.array([with_labels.status for with_labels, _, _ in batches])
                shared["contradicted"] = f"{100 * (status == 'contradicted').mean():.1f}"
                yield from ({**shared, **row} for row in held(batches))


def wrong_batch(
    kind: str, wrong: dict[str, float], n: int, m: int, budget: int, seed: int
) -> tuple[PerformanceEstimate, PerformanceEstimate, dict[str, float]]:
    """Estimates with labels and by the reference alone, and what is measured.

    Labels of every second batch are chosen, others are drawn at random.
    """
    rng = np.random.default_rng(seed)
    reference = dict(zip(("logits", "labels"), drawn(kind, m, rng), strict=True))
    estimator = PerformanceEstimator(reference, threshold=0.9, seed=10**6 + seed)
    logits, labels = drawn(kind, n, rng, **wrong)
    if seed % 2:
        rows, chance = rng.choice(n, budget, replace=False), np.full(budget, budget / n)
    else:
        sample = choose_labels(logits, budget, seed=seed)
        rows, chance = sample.row, sample.inclusion
    known, inclusion = np.full(n, -100), np.ones(n)
    known[rows], inclusion[rows] = labels[rows], chance
    with_labels = estimator.estimate(logits, labels=known, inclusion=inclusion)
    return with_labels, estimator.estimate(logits), measured(logits, labels)


def held(
    batches: list[tuple[PerformanceEstimate, PerformanceEstimate, dict[str, float]]],
) -> Iterator[dict[str, object]]:
    """Share of the intervals that hold the measured metric, and their mean width."""
    for metric in batches[0][2]:
        row: dict[str, object] = {"metric": metric}
        for i, prefix in enumerate(("", "reference_")):
            pairs = [(batch[i][metric], batch[2][metric]) for batch in batches]
            some = [(e, x) for e, x in pairs if not np.isnan(x) and not np.isnan(e.low)]
            inside = [e.low - 1e-6 <= x <= e.high + 1e-6 for e, x in some]
            widths = [e.high - e.low for e, _ in some]
            row[f"{prefix}batches"] = len(some)
            row[f"{prefix}held"] = f"{100 * np.mean(inside):.1f}" if some else ""
            row[f"{prefix}width"] = f"{np.mean(widths):.4f}" if some else ""
        yield row


def seen(repeats: int) -> Iterator[dict[str, object]]:
    """How often a change of the prevalence is seen, and what it does where it is not."""
    for positive in (0.06, 0.1, 0.15):
        for n in (200, 1000, 5000):
            for m in (300, 1000, 5000):
                print("prevalence", positive, n, m, flush=True)
                results = [prevalence(positive, n, m, seed) for seed in range(repeats)]
                unseen = [(e, x) for e, x in results if e.status == "holds"]
                inside = [e["accuracy"].low <= x <= e["accuracy"].high for e, x in unseen]
                errors = [abs(e["accuracy"].value - x) for e, x in unseen]
                yield {
                    "prevalence": f"{100 * positive:g}",
                    "n": n,
                    "reference": m,
                    "seen": f"{100 * (1 - len(unseen) / repeats):.1f}",
                    "unseen": len(unseen),
                    "held": f"{100 * np.mean(inside):.1f}" if unseen else "",
                    "error": f"{100 * np.mean(errors):.2f}" if unseen else "",
                    "stated": f"{100 * np.mean([e.unseen for e, _ in unseen]):.2f}"
                    if unseen
                    else "",
                }


def prevalence(positive: float, n: int, m: int, seed: int) -> tuple[PerformanceEstimate, float]:
    rng = np.random.default_rng(seed)
    reference = dict(zip(("logits", "labels"), drawn("rare class", m, rng), strict=True))
    logits, labels = drawn("rare class", n, rng, positive=positive)
    result = cal.estimate_performance(logits, reference, seed=10**6 + seed)
    return result, float(((logits > 0) == labels).mean())


def measured(logits: Array, labels: Array) -> dict[str, float]:
    probs = as_probs(logits)
    predicted, sure = probs.argmax(1), probs.max(1) >= 0.9
    wrong = predicted != labels
    values = {
        "accuracy": float(1 - wrong.mean()),
        "accepted_error": float(wrong[sure].mean()) if sure.any() else np.nan,
        "brier": cal.brier(logits, labels),
        "nll": cal.nll(logits, labels),
    }
    if probs.shape[1] == 2:
        hits, found, there = ((predicted & labels).sum(), predicted.sum(), labels.sum())
        ranks = logits.argsort().argsort() + 1
        pairs = there * (len(labels) - there)
        above = ranks[labels == 1].sum() - there * (there + 1) / 2
        values["precision"] = hits / found if found else np.nan
        values["f1"] = 2 * hits / (found + there) if found + there else np.nan
        values["recall"] = hits / there if there else np.nan
        values["auroc"] = above / pairs if pairs else np.nan
    return values


def write(path: Path, rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# ------------------------------------------------------------------------------------------ tables
def family(row: dict[str, str]) -> str:
    return (
        row["task"].split("_")[0] if row["task"].startswith(("cifar10", "nannyml")) else "tabular"
    )


def kind(row: dict[str, str]) -> str:
    """Group of a shift: corruptions by what they do to the accuracy, others by name."""
    source = family(row)
    if source == "tabular":
        names = {"none": "no shift", "errors": "more errors"}
        return f"tables: {names.get(row['shift'], row['shift'])}"
    if source == "nannyml":
        return row["task"].removeprefix("nannyml_").replace("_", " ")
    severity = row["shift"][-1]
    return "images: no shift" if row["shift"] == "none" else f"images: severity {severity}"


def show(folder: Path) -> None:
    """Write the tables, and the figure beside them."""
    write_tables(folder, tables(folder))
    draw(read(folder / "estimate.csv"), folder.parent / "_static" / "estimate.svg")


def tables(folder: Path) -> dict[str, Table]:
    rows = read(folder / "estimate.csv")
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(kind(row), []).append(row)
    groups = {name: groups[name] for name in sorted(groups, key=group_order)}
    heading = ("batches", "number", "raw confidence", "calibrated confidence", "CBPE", "calibrant")
    errors = [(name, str(len(some)), *mean_errors(some)) for name, some in groups.items()]
    promise = ("batches", "withdrawn %", "widened %", "held %", "width", "CBPE held %", "width")
    promises = [(name, *promised(some)) for name, some in groups.items()]
    caught = ("wrong by more than", "batches", "withdrawn %", "inside the interval %", "neither %")
    visible = [row for row in rows if kind(row) not in UNSEEN]
    broken = [
        (group, *warned(some, limit))
        for group, some in (("all", rows), ("shift of inputs", visible))
        for limit in WRONG
    ]
    needless = ("right within", "batches", "withdrawn %", "widened %", "neither %")
    return {
        "table_estimate_errors": [heading, *errors],
        "table_estimate_promises": [promise, *promises],
        "table_estimate_broken": [("source", *caught), *broken],
        "table_estimate_kept": [needless, *(spared(rows, limit) for limit in WRONG)],
        "table_estimate_labels": labels_table(read(folder / "estimate_labels.csv")),
        "table_estimate_coverage": coverage_table(read(folder / "estimate_coverage.csv")),
        "table_estimate_hidden": hidden_table(read(folder / "estimate_hidden.csv")),
        "table_estimate_seen": seen_table(read(folder / "estimate_seen.csv")),
    }


def draw(rows: Rows, path: Path) -> None:
    """Draw the first batch of each corruption, the most accurate first."""
    first = {row["shift"]: row for row in reversed(chosen(rows, task="cifar10_resnet50"))}
    ordered = dict(sorted(first.items(), key=lambda item: -float(item[1]["truth"])))
    batches = {
        name.replace("_", " ").replace("none", "clean"): row for name, row in ordered.items()
    }
    results = {
        name: SimpleNamespace(
            metrics={"accuracy": Estimate(*(float(row[k]) for k in ("estimate", "low", "high")))},
            status=row["status"],
            level=0.9,
        )
        for name, row in batches.items()
    }
    measured = {name: float(row["truth"]) for name, row in batches.items()}
    save_figure(estimate_plot(results, measured=measured), path)


def group_order(name: str) -> tuple[int, str]:
    head = name.split(":")[0]
    return ("images", "tables").index(head) if head in ("images", "tables") else 2, name


def number(rows: Rows, name: str) -> Array:
    return np.array([float(row[name]) for row in rows])


def mean_errors(rows: Rows) -> list[str]:
    """Mean absolute error in points, of each method."""
    pairs = (
        ("raw_confidence", "raw_truth"),
        ("confidence", "truth"),
        ("cbpe", "raw_truth"),
        ("estimate", "truth"),
    )
    return [f"{100 * np.abs(number(rows, a) - number(rows, b)).mean():.1f}" for a, b in pairs]


def promised(rows: Rows) -> list[str]:
    status = np.array([row["status"] for row in rows])
    low, high, truth = (number(rows, name) for name in ("low", "high", "truth"))
    kept = status != "withdrawn"
    inside = (low <= truth) & (truth <= high)
    raw, bottom, top = (number(rows, name) for name in ("raw_truth", "cbpe_low", "cbpe_high"))
    within = (bottom <= raw) & (raw <= top)
    held = [share(inside[kept]), points((high - low)[kept])]
    return [share(~kept), share(status == "widened"), *held, share(within), points(top - bottom)]


def warned(rows: Rows, limit: float) -> list[str]:
    """What was said of estimates that are wrong by more than a limit."""
    wrong = [row for row in rows if abs(float(row["estimate"]) - float(row["truth"])) > limit]
    withdrawn = np.array([row["status"] == "withdrawn" for row in wrong])
    inside = np.array([float(r["low"]) <= float(r["truth"]) <= float(r["high"]) for r in wrong])
    said = [share(withdrawn), share(inside & ~withdrawn), share(~inside & ~withdrawn)]
    return [f"{100 * limit:g} points", str(len(wrong)), *said]


def spared(rows: Rows, limit: float) -> list[str]:
    """What was said of estimates that are right within a limit."""
    right = [row for row in rows if abs(float(row["estimate"]) - float(row["truth"])) <= limit]
    status = np.array([row["status"] for row in right])
    said = [share(status == name) for name in ("withdrawn", "widened", "holds")]
    return [f"{100 * limit:g} points", str(len(right)), *said]


def share(hits: Array) -> str:
    return f"{100 * hits.mean():.0f}" if hits.size else MISSING


def points(widths: Array) -> str:
    return f"{100 * widths.mean():.1f}" if widths.size else MISSING


def labels_table(rows: Rows) -> list[tuple[str, ...]]:
    methods = ("mean of labels at random", "labels at random", "chosen labels")
    table = [("labels", *(f"{m}: RMS error" for m in methods), "interval held %", "width")]
    for budget in map(str, BUDGETS):
        some = {m: chosen(rows, budget=budget, method=m) for m in methods}
        gaps = (number(x, "estimate") - number(x, "truth") for x in some.values())
        ours = some["chosen labels"]
        low, high, truth = (number(ours, name) for name in ("low", "high", "truth"))
        held = share((low <= truth) & (truth <= high)), points(high - low)
        errors = (f"{100 * np.sqrt((gap**2).mean()):.2f}" for gap in gaps)
        table.append((budget, *errors, *held))
    return table


def coverage_table(rows: Rows) -> list[tuple[str, ...]]:
    metrics = ("accuracy", "accepted_error", "brier", "nll", "recall", "f1", "auroc")
    table = [("data", "batch", "reference", *metrics, "shift seen %")]
    for key in dict.fromkeys((row["data"], row["n"], row["reference"]) for row in rows):
        some = chosen(rows, data=key[0], n=key[1], reference=key[2])
        held = {row["metric"]: row["held"] for row in some}
        shown = (held.get(name, MISSING) for name in metrics)
        table.append((*key, *shown, some[0]["shifts_seen"]))
    return table


def hidden_table(rows: Rows) -> list[tuple[str, ...]]:
    """Means over the kinds of data; the lowest is of any metric of any of them."""
    alone = ("reference alone: held %", "width")
    held = ("accuracy held %", "width", "others held %", "lowest", *alone, "contradicted %")
    table = [("wrong", "batch", "reference", "labels", *held)]
    for shift in HIDDEN:
        for n, m, budget in SIZES:
            size = tuple(map(str, (n, m, budget)))
            some = chosen(rows, shift=shift, n=size[0], reference=size[1], labels=size[2])
            first = chosen(some, metric="accuracy")
            others = number([row for row in some if row["metric"] != "accuracy"], "held")
            shares = f"{number(first, 'held').mean():.0f}", points(number(first, "width"))
            lowest = f"{others.mean():.0f}", f"{number(some, 'held').min():.0f}"
            promised = [row for row in first if row["reference_held"]]
            beside = (
                f"{number(promised, 'reference_held').mean():.0f}",
                points(number(promised, "reference_width")),
            )
            contradicted = f"{number(first, 'contradicted').mean():.0f}"
            table.append((shift, *size, *shares, *lowest, *beside, contradicted))
    return table


def seen_table(rows: Rows) -> list[tuple[str, ...]]:
    names = ("seen %", "held if unseen %", "error if unseen", "stated")
    table = [("prevalence 3 % to", "batch", "reference", *names)]
    for row in rows:
        size = f"{row['prevalence']} %", row["n"], row["reference"]
        shares = (f"{float(row[name]):.0f}" if row[name] else MISSING for name in ("seen", "held"))
        ends = (f"{float(row[name]):.1f}" if row[name] else MISSING for name in ("error", "stated"))
        table.append((*size, *shares, *ends))
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("make", "run", "simulate", "tables"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=500)
    options = parser.parse_args()
    if options.step == "simulate":
        simulate(*options.folders, options.repeats)
    else:
        {"make": make, "run": run, "tables": show}[options.step](*options.folders)
