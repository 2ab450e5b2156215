"""Methods for tags on real predictions, by the number of examples to fit on.

    python benchmarks/studies/multilabel.py FILE -o docs/data
    python benchmarks/studies/multilabel.py --tables docs/data

FILE has logits and labels ``(n, tags)``, in one split or several, which are put together. Of each
random half, methods are fitted on the first examples and measured on the other half. Thresholds
with a recall for each tag are found on samples that are drawn from all examples with replacement,
so that these are the population. The second form writes the tables of ``docs/calibrate.md``,
``docs/smart.md`` and ``docs/guarantees.md``.

Beside the methods of calibrant, there are two of the usual kind that treat each tag by itself,
Platt's line and isotonic regression, and four ways to use SMART, which is made for exclusive
classes: on the log-odds of all tags together, on those of each tag, and behind ``tags``, where
``auto`` shows what another second map does.
"""

import argparse
import csv
import os
import statistics
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rows import MISSING, Rows, Table, chosen, read, shown, write_tables
from scipy.special import expit

import calibrant as cal
from calibrant.data import open_dataset
from calibrant.decide import thresholds

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
FIGURES = ("nll", "ece", "classwise_ece", "brier")
COLUMNS = ("n", "seed", "method", *FIGURES)
SIZES, SEEDS, SMART_SEEDS, FOLDS = (100, 200, 500, 1000, 0), 20, 5, 5
"""Numbers of examples to fit on, of which 0 is all of a half, and random halves.

On the first halves there are also the ways to use SMART, which are slow, and the Brier score.
"""
EACH = {"each tag, Platt": "sigmoid", "each tag, isotonic": "isotonic", "each tag, smart": "smart"}
TITLES = {
    **{"none": "as they are", "each tag, isotonic": "isotonic for each tag"},
    **{"each tag, Platt": "Platt for each tag", "pooled": "`pooled`", "tags": "`tags`"},
}
SMART_TITLES = {
    **{"ts": "`ts`, all tags together", "smart": "SMART, all tags together"},
    **{"each tag, smart": "SMART for each tag", "tags, smart": "SMART behind `tags`"},
    "tags, smart, held out": "SMART behind `tags`, fitted on held-out folds",
    "tags, auto": "`auto` behind `tags`",
}
SAMPLES, SAMPLE_SIZES, RECALLS, CERTAINTY = 200, (1000, 5000, 20_000), (0.8, 0.9), 0.95
RECALL_COLUMNS = ("recall", "n", "tag", "samples", "below", "limited", "flagged")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.tables:
        write_tables(given.tables, tables(given.tables))
        return
    if given.file is None or given.out is None:
        parser.error("a file of predictions and -o FOLDER are wanted, or --tables FOLDER")
    data = open_dataset(given.file)
    splits = [data.split(name) for name in data.splits]
    logits = np.concatenate([split.logits.astype(np.float64) for split in splits])
    labels = np.concatenate([split.labels for split in splits])
    warnings.simplefilter("ignore")  # some tags have no positives among the first examples
    with (given.out / "multilabel_recall.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, RECALL_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(recall_rows(logits, labels))
    with (given.out / "multilabel.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for seed in range(SEEDS):
            writer.writerows(one_half(logits, labels, seed))
            file.flush()
    write_tables(given.out, tables(given.out))


def one_half(logits: Array, labels: Labels, seed: int) -> Iterator[dict[str, object]]:
    order = np.random.default_rng(seed).permutation(len(logits))
    half, rest = order[: len(order) // 2], order[len(order) // 2 :]
    for n in SIZES:
        rows = half[: n or None]
        first = seed < SMART_SEEDS
        names = FIGURES if first else FIGURES[:-1]
        for method in (*TITLES, *(SMART_TITLES if first else ())):
            after = calibrated(method, logits[rows], labels[rows], logits[rest])
            figures = cal.evaluate(
                after, labels[rest], estimand="multilabel", metrics=names, level=None
            )
            values = {name: f"{figures[name].value:.6f}" for name in names}
            yield {"n": len(rows), "seed": seed, "method": method, **values}


def calibrated(method: str, logits: Array, labels: Labels, new: Array) -> Array:
    """Logits after a fit of a method."""
    if method in ("none", "pooled", "tags"):
        return cal.TAG_CALIBRATORS[method]().fit(logits, labels).transform(new)
    if method in EACH:
        kind = cal.CALIBRATORS[EACH[method]]
        columns = zip(logits.T, labels.T, new.T, strict=True)
        return np.stack([kind().fit(x, y).transform(z) for x, y, z in columns], axis=-1)
    if method.startswith("tags, "):
        second, by_folds = (
            method.removeprefix("tags, ").removesuffix(", held out"),
            "held" in method,
        )
        before = held_out(logits, labels) if by_folds else fitted_tags(logits, labels, logits)
        return calibrated(second, before, labels, fitted_tags(logits, labels, new))
    pooled = cal.CALIBRATORS[method]().fit(logits.ravel(), labels.ravel())
    return pooled.transform(new.ravel()).reshape(new.shape)


def held_out(logits: Array, labels: Labels) -> Array:
    """Logits of each fold after a fit of ``tags`` on the others."""
    after, fold = np.empty_like(logits), np.arange(len(logits)) % FOLDS
    for k in range(FOLDS):
        others = fold != k
        after[~others] = fitted_tags(logits[others], labels[others], logits[~others])
    return after


def fitted_tags(logits: Array, labels: Labels, new: Array) -> Array:
    return calibrated("tags", logits, labels, new)


def recall_rows(logits: Array, labels: Labels) -> Iterator[dict[str, object]]:
    """Thresholds that hold for all tags at once, of each tag and of any.

    In how many samples the recall in the population is below, in how many there is a threshold that
    flags not everything, and the share of examples that it flags.
    """
    probs = expit(logits)
    for recall, n in product(RECALLS, SAMPLE_SIZES):
        below, limited, flagged = np.zeros((3, SAMPLES, logits.shape[1]))
        for i in range(SAMPLES):
            rows = np.random.default_rng([i, n]).integers(len(logits), size=n)
            found = thresholds(logits[rows], labels[rows], recall=recall, certainty=CERTAINTY)
            for tag, one in found.items():
                over = probs[:, tag] >= one.threshold
                below[i, tag] = over[labels[:, tag] == 1].mean() < recall
                limited[i, tag] = one.threshold > 0
                flagged[i, tag] = over.mean() if one.threshold > 0 else 0
        row = {"recall": recall, "n": n, "samples": SAMPLES}
        for tag in range(logits.shape[1]):
            sums = below[:, tag].sum(), limited[:, tag].sum(), flagged[:, tag].sum()
            yield row | {"tag": tag} | _counts(*sums)
        yield row | {"tag": "any"} | _counts(below.any(1).sum(), limited.sum(), flagged.sum())


def _counts(below: float, limited: float, flagged: float) -> dict[str, object]:
    share = f"{flagged / limited:.4f}" if limited else ""
    return {"below": int(below), "limited": int(limited), "flagged": share}


# ----------------------------------------------------------------------------------- the tables


def tables(folder: Path) -> dict[str, Table]:
    rows = read(folder / "multilabel.csv")
    sizes = sorted({int(row["n"]) for row in rows})
    table: list[tuple[str, ...]] = [
        ("log loss x 1000", *(f"{n:,}" for n in sizes), "ECE %, all"),
        *(_line(rows, method, sizes) for method in TITLES),
    ]
    return {
        "table_multilabel": table,
        "table_multilabel_smart": _smart_table(rows, sizes),
        "table_multilabel_recall": _recall_table(read(folder / "multilabel_recall.csv")),
    }


def _line(rows: Rows, method: str, sizes: list[int]) -> tuple[str, ...]:
    of = {n: chosen(rows, method=method, n=str(n)) for n in sizes}
    losses = [shown(of[n], "nll", 1000, 2).split("±")[0] for n in sizes]
    return TITLES[method], *losses, shown(of[sizes[-1]], "ece", 100)


def _smart_table(rows: Rows, sizes: list[int]) -> Table:
    """Log loss beside that of ``tags`` on the same halves, and the errors after most labels."""
    rows = [row for row in rows if int(row["seed"]) < SMART_SEEDS]
    base = {(row["n"], row["seed"]): float(row["nll"]) for row in chosen(rows, method="tags")}
    head = [*(f"{n:,}" for n in sizes), "ECE %, all", "Brier score x 1000, all"]
    table = [["log loss x 1000, less that of `tags`", *head]]
    for method, title in {"pooled": "`pooled`", **SMART_TITLES, "tags": "`tags`"}.items():
        own = chosen(rows, method=method)
        cells = [title]
        for n in map(str, sizes):
            gaps = [float(row["nll"]) - base[n, row["seed"]] for row in chosen(own, n=n)]
            cells.append(_with_error(gaps, 1000, 2) if any(gaps) else "0")
        last = chosen(own, n=str(sizes[-1]))
        for figure, scale in (("ece", 100), ("brier", 1000)):
            cells.append(_with_error([float(row[figure]) for row in last], scale, 2))
        table.append(cells)
    return table


def _with_error(values: list[float], scale: float, digits: int) -> str:
    """Return the mean with its standard error over the halves."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{scale * statistics.fmean(values):.{digits}f} ± {scale * error:.{digits}f}"


def _recall_table(rows: Rows) -> Table:
    """How often some tag or the worst tag misses its recall, and what is flagged."""
    table = [["recall", "examples", "samples with a tag below, %", "worst tag below, %"]]
    table[0] += ["tags with a threshold", "flagged %, those tags"]
    for recall, n in product(map(str, RECALLS), map(str, SAMPLE_SIZES)):
        *tags, both = chosen(rows, recall=recall, n=n)
        samples = int(both["samples"])
        below = int(both["below"]), max(int(row["below"]) for row in tags)
        table.append(
            [
                *(recall, f"{int(n):,}", *(f"{100 * count / samples:.1f}" for count in below)),
                f"{int(both['limited']) / samples:.1f} of {len(tags)}",
                f"{100 * float(both['flagged']):.1f}" if both["flagged"] else MISSING,
            ]
        )
    return table


if __name__ == "__main__":
    main()
