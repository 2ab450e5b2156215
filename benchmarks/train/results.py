"""Training runs and their results as rows of a table, before and after calibration."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from benchmarks.train.images import ImageSet, ImageSplit, Pixels, hold_out
from benchmarks.train.recipe import Recipe
from benchmarks.train.trainer import Trainer, write_csv
from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant._core.engines import Progress
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.data import open_dataset, save_predictions
from calibrant.metrics.ranking import ood_auroc
from calibrant.workflows.evaluate import evaluate

FIGURES = ("accuracy", "ece", "ada_ece", "over_ece", "under_ece", "nll", "brier", "auroc")
AFTER = ("none", "ts", "smart")
"""Calibrators, fitted on the validation split, after which the logits of a run are measured."""
RUN = ("data", "digest", "network", "loss", "options", "epochs", "seed", "after")
"""Columns that identify a row."""
COLUMNS = (*RUN, *FIGURES, "ood_auroc", "ood")


def train(
    images: ImageSet,
    recipe: Recipe,
    folder: str | os.PathLike[str],
    *,
    name: str = "images",
    held_out: float = 0.1,
    ood: tuple[str, Pixels] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> list[dict[str, str]]:
    """Train a network, save its predictions, and return the rows of results.

    A stopped run is continued after its last whole epoch; a completed one is not trained again.
    ``folder`` gets ``predictions.npz`` (splits val, test and ood with logits and features, and the
    last layer), ``run.json``, ``log.csv`` and the checkpoints. ``name`` is that of the data in the
    rows, and ``held_out`` the share of the training images by which the checkpoint is chosen and
    calibrators are fitted. There is a row for each of ``AFTER``, and none in all processes but the
    first.
    """
    home = Path(folder)
    splits = hold_out(images, held_out)
    trainer = Trainer(splits, images.classes, recipe, home, device=device)
    trainer.run(progress)
    if not trainer.first:
        return []
    trainer.use_best()
    others = {}
    if ood is not None:
        others["ood"] = ImageSplit(ood[1], np.full(len(ood[1]), IGNORED, np.int64))
    save_predictions(home / "predictions.npz", trainer.predictions(others))
    run = {
        "data": name,
        "digest": images.fingerprint,
        "ood": ood[0] if ood else "",
        "held_out": held_out,
        "processes": trainer.ranks.size,
        "recipe": asdict(recipe),
    }
    with replacing(home / "run.json") as path:
        path.write_text(json.dumps(run, indent=2) + "\n", "utf-8")
    return result_rows(home)


def result_rows(folder: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Measure the predictions of a completed run, as they are and after each calibrator."""
    home = Path(folder)
    run = json.loads((home / "run.json").read_text("utf-8"))
    recipe = Recipe(**run["recipe"])
    shared = {name: str(getattr(recipe, name)) for name in ("network", "loss", "epochs", "seed")}
    shared |= {"data": run["data"], "digest": run["digest"][:16], "ood": run["ood"]}
    shared["options"] = " ".join(f"{k}={v}" for k, v in recipe.loss_options.items())
    rows = []
    for after in AFTER:
        row = {**shared, "after": after, **_figures(home / "predictions.npz", after)}
        rows.append({column: row.get(column, "") for column in COLUMNS})
    return rows


def _figures(path: Path, after: str) -> dict[str, str]:
    file = open_dataset(path)
    val, test = file.split("val"), file.split("test")
    logits = test.read("logits")
    calibrator = CALIBRATORS[after]().fit(val.read("logits"), val.read("labels"))
    calibrated = calibrator(torch.from_numpy(logits))
    evaluation = evaluate(calibrated, test.read("labels"), metrics=FIGURES, level=None)
    figures = {name: evaluation[name].value for name in FIGURES}
    if "ood" in file.splits:
        inputs = (logits, file.split("ood").read("logits"))
        figures["ood_auroc"] = ood_auroc(*(calibrator.predict_proba(x).max(-1) for x in inputs))
    return {name: f"{value:.6f}" for name, value in figures.items()}


def add_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Add rows to a file, in place of earlier ones about the same runs."""
    before = csv.DictReader(path.read_text("utf-8").splitlines()) if path.exists() else ()
    kept = {tuple(row[name] for name in RUN): row for row in (*before, *rows)}
    write_csv(path, COLUMNS, kept.values())


def summary(rows: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Return a table with a heading and a line per row, errors in percent."""
    names = ("loss", "after", "accuracy", "ECE", "AECE", "O-ECE", "U-ECE", "NLL", "OOD AUROC")
    table: list[tuple[str, ...]] = [names]
    for row in rows:
        cells = [f"{100 * float(row[name]):.2f}" for name in FIGURES[:5]]
        ood = f"{100 * float(row['ood_auroc']):.1f}" if row["ood_auroc"] else "-"
        table.append((row["loss"], row["after"], *cells, f"{float(row['nll']):.3f}", ood))
    return table
