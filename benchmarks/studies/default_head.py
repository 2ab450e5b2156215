"""Which temperature head, with which objective: gains over one temperature, also on other texts.

    python benchmarks/studies/default_head.py TABLES -o docs/data/llm_default.csv
    python benchmarks/studies/default_head.py tables docs/data

TABLES has a folder for each model, with the folders CORPUS-fit and CORPUS-test of ``calibrant llm
collect --prompts`` for some corpora. Every head is trained on each CORPUS-fit with every objective,
and measured on each CORPUS-test of the same model, whether ``fit_head`` would keep it or not; the
column ``kept`` says what it would do. ``--add`` keeps the rows that are there.
"""

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import MISSING, Rows, chosen, read, write_tables

from calibrant import llm
from calibrant.llm.heads import fit
from calibrant.llm.heads.evaluate import paired_gain
from calibrant.llm.heads.fitted import TokenPredictions, predict_rows
from calibrant.llm.heads.tables import TokenTable

CANDIDATES = {
    "linear": ("nll", "bce", "brier"),
    "mlp": ("nll", "bce", "brier"),
    "shape": ("nll", "bce", "brier"),
}
"""Heads that train in seconds, each with its objectives."""
Gains = dict[str, tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--heads", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--add", action="store_true")
    given = parser.parse_args()
    if str(given.folder) == "tables":
        write_tables(given.data, tables(given.data))
        return
    torch.set_num_threads(1)
    vars(fit)["STANDARD_ERRORS"] = -math.inf  # keep every head, to see what it does
    with given.out.open("a" if given.add else "w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for row in measured(given):
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if not given.add:
                    writer.writeheader()
            writer.writerow(row)
            file.flush()


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each head and each table that it is measured on."""
    for folder in sorted(given.folder.iterdir()):
        if given.models and folder.name not in given.models:
            continue
        tests = {path.name[:-5]: llm.open_table(path) for path in sorted(folder.glob("*-test"))}
        for path in sorted(folder.glob("*-fit")):
            table = llm.open_table(path)
            for head in given.heads:
                for objective in CANDIDATES[head]:
                    for seed in range(given.seeds):
                        about = {"model": folder.name, "fit": path.name[:-4], "head": head}
                        about |= {"objective": objective, "seed": seed}
                        yield from trained(table, tests, about)


def trained(
    table: TokenTable, tests: dict[str, TokenTable], about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Train one head, and yield its figures on each table."""
    head, seed = about["head"], about["seed"]
    fitted = llm.fit_head(table, head, about["objective"], seed=seed)
    one = llm.FittedHead.from_temperature(fitted.settings["temperature"], table.fingerprint)
    held = fit.split_documents(table.documents, seed=seed).test
    before, after = (predict_rows(each.head, table, held) for each in (one, fitted))
    score = "nll" if about["objective"] == "nll" else "brier"
    mean, error = gains(before, after, table.documents[held])[score]
    for name, test in tests.items():
        simple, own = (llm.token_predictions(test, each) for each in (one, fitted))
        plain = llm.token_predictions(test)
        row = {**about, "test": name, "documents": len(set(test.documents)), "tokens": len(test)}
        row |= {"kept": int(fitted.settings["epoch"] > 0 and mean > 2 * error)}
        for score, (gain, deviation) in gains(simple, own, test.documents).items():
            row |= {score: f"{gain:.6f}", f"{score}_error": f"{deviation:.6f}"}
        figures = {"before": plain.figures(), "global": simple.figures(), "head": own.figures()}
        row |= {f"ece_{key}": f"{value['ece']:.5f}" for key, value in figures.items()}
        print(row, flush=True)
        yield row


def gains(simple: TokenPredictions, own: TokenPredictions, documents: Any) -> Gains:
    """Gains of a head over one temperature, each with its standard error by documents."""
    found = {}
    for score, values in own.scores().items():
        gain = paired_gain(simple.scores()[score], values, documents, own.weight)
        found[score] = gain.mean, gain.error
    return found


# ----------------------------------------------------------------------------------------- tables


def tables(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Tables of the documentation, by their names."""
    rows = read(folder / "llm_default.csv")
    same = [row for row in rows if row["fit"] == row["test"]]
    other = [row for row in rows if row["fit"] != row["test"]]
    return {"table_llm_default": summary(same, other), "table_llm_default_each": each(rows)}


def summary(same: Rows, other: Rows) -> list[tuple[str, ...]]:
    """Heads by how much they gain, on texts of the kind that they were trained on and on others."""
    names = ("NLL gain", "Brier gain", "ECE %")
    heading = ("head", "objective", "kept", *names, *(f"{name}, other texts" for name in names))
    table: list[tuple[str, ...]] = [heading]
    for objective in ("nll", "brier"):
        pair = [chosen(rows, head="linear", objective=objective) for rows in (same, other)]
        ece = [f"{np.mean([100 * float(row['ece_global']) for row in rows]):.2f}" for rows in pair]
        table.append(("global", objective, "", MISSING, MISSING, ece[0], MISSING, MISSING, ece[1]))
    for head, objectives in CANDIDATES.items():
        for objective in objectives:
            mine, theirs = (chosen(rows, head=head, objective=objective) for rows in (same, other))
            if mine:
                kept = f"{sum(int(row['kept']) for row in mine)} of {len(mine)}"
                table.append((head, objective, kept, *counted(mine), *counted(theirs)))
    return table


def counted(rows: Rows) -> list[str]:
    """Mean gains, with the significant ones counted, and the mean ECE."""
    cells = []
    for score in ("nll", "brier"):
        mean = [float(row[score]) for row in rows]
        error = [float(row[f"{score}_error"]) for row in rows]
        pairs = list(zip(mean, error, strict=True))
        up, down = sum(g > 2 * e for g, e in pairs), sum(g < -2 * e for g, e in pairs)
        cells.append(f"{np.mean(mean):+.4f} ({up} up, {down} down of {len(rows)})")
    ece = [100 * float(row["ece_head"]) for row in rows]
    return [*cells, f"{np.mean(ece):.2f}"]


def each(rows: Rows) -> list[tuple[str, ...]]:
    """Gains of the first seed of some heads, for each model and pair of corpora."""
    shown = (("linear", "nll"), ("linear", "bce"), ("mlp", "nll"), ("shape", "nll"))
    heading = ["model", "trained on", "measured on", "ECE %: as it is", "one temperature"]
    table = [(*heading, *(f"{head} {objective}" for head, objective in shown))]
    first = chosen(rows, seed="0")
    keys = dict.fromkeys((row["model"], row["fit"], row["test"]) for row in first)
    for model, corpus, test in keys:
        own = chosen(first, model=model, fit=corpus, test=test)
        cells = []
        for head, objective in shown:
            (row,) = chosen(own, head=head, objective=objective)
            cells.append(f"{float(row['nll']):+.4f} ± {float(row['nll_error']):.4f}")
        before, one = (f"{100 * float(own[0][f'ece_{k}']):.2f}" for k in ("before", "global"))
        table.append((model, corpus, test, before, one, *cells))
    return table


if __name__ == "__main__":
    main()
