"""Methods for tags on real predictions, by the number of examples to fit on.

    python benchmarks/studies/multilabel.py FILE > docs/data/multilabel.csv
    python benchmarks/studies/multilabel.py --tables docs/data

FILE has logits and labels ``(n, tags)``, in one split or several, which are put together. Of each
random half, methods are fitted on the first examples and measured on the other half. The second
form writes the table of ``docs/calibrate.md``.

Beside the methods of calibrant, there are two of the usual kind that treat each tag by itself:
Platt's line and isotonic regression.
"""

import argparse
import csv
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rows import Rows, Table, chosen, read, shown, write_tables

import calibrant as cal
from calibrant.data import open_dataset

Array = NDArray[np.float64]
COLUMNS = ("n", "seed", "method", "nll", "ece", "classwise_ece")
SIZES, SEEDS = (100, 200, 500, 1000, 0), 20
"""Numbers of examples to fit on, of which 0 is all of a half, and random halves."""
EACH = {"each tag, Platt": "sigmoid", "each tag, isotonic": "isotonic"}
TITLES = {
    **{"none": "as they are", "each tag, isotonic": "isotonic for each tag"},
    **{"each tag, Platt": "Platt for each tag", "pooled": "`pooled`", "tags": "`tags`"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.tables:
        write_tables(given.tables, tables(given.tables))
        return
    if given.file is None:
        parser.error("a file of predictions is wanted, or --tables FOLDER")
    data = open_dataset(given.file)
    splits = [data.split(name) for name in data.splits]
    logits = np.concatenate([split.logits.astype(np.float64) for split in splits])
    labels = np.concatenate([split.labels for split in splits])
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    warnings.simplefilter("ignore")  # some tags have no positives among the first examples
    for seed in range(SEEDS):
        writer.writerows(one_half(logits, labels, seed))
        sys.stdout.flush()


def one_half(logits: Array, labels: NDArray[np.int64], seed: int) -> Iterator[dict[str, object]]:
    order = np.random.default_rng(seed).permutation(len(logits))
    half, rest = order[: len(order) // 2], order[len(order) // 2 :]
    for n in SIZES:
        rows = half[: n or None]
        for method in TITLES:
            after = calibrated(method, logits[rows], labels[rows], logits[rest])
            names = ("nll", "ece", "classwise_ece")
            figures = cal.evaluate(
                after, labels[rest], estimand="multilabel", metrics=names, level=None
            )
            values = {name: f"{figures[name].value:.6f}" for name in names}
            yield {"n": len(rows), "seed": seed, "method": method, **values}


def calibrated(method: str, logits: Array, labels: NDArray[np.int64], new: Array) -> Array:
    """Logits after a fit of a method."""
    if method in cal.TAG_CALIBRATORS:
        return cal.TAG_CALIBRATORS[method]().fit(logits, labels).transform(new)
    kind = cal.CALIBRATORS[EACH[method]]
    columns = zip(logits.T, labels.T, new.T, strict=True)
    return np.stack([kind().fit(x, y).transform(z) for x, y, z in columns], axis=-1)


# ------------------------------------------------------------------------------------ the table


def tables(folder: Path) -> dict[str, Table]:
    rows = read(folder / "multilabel.csv")
    sizes = sorted({int(row["n"]) for row in rows})
    table: list[tuple[str, ...]] = [
        ("log loss x 1000", *(f"{n:,}" for n in sizes), "ECE %, all"),
        *(_line(rows, method, sizes) for method in TITLES),
    ]
    return {"table_multilabel": table}


def _line(rows: Rows, method: str, sizes: list[int]) -> tuple[str, ...]:
    of = {n: chosen(rows, method=method, n=str(n)) for n in sizes}
    losses = [shown(of[n], "nll", 1000, 2).split("±")[0] for n in sizes]
    return TITLES[method], *losses, shown(of[sizes[-1]], "ece", 100)


if __name__ == "__main__":
    main()
