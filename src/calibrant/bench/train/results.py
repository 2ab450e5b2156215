"""Runs as rows: train, predict, and measure before and after a calibrator."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant.bench.train.images.sets import ImageSet, Part, parts
from calibrant.bench.train.trainer import Recipe, Told, Trainer
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.data import open_predictions, save_predictions
from calibrant.metrics.ranking import ood_auroc
from calibrant.workflows.evaluate import evaluate

FIGURES = ("accuracy", "ece", "ada_ece", "over_ece", "under_ece", "nll", "brier", "auroc")
AFTER = ("none", "ts", "smart")
"""Calibrators that the logits of a run are measured after; fitted on its validation part."""
COLUMNS = (
    *("data", "digest", "network", "loss", "options", "epochs", "seed", "after"),
    *(*FIGURES, "ood_auroc", "ood"),
)


def train(
    images: ImageSet,
    recipe: Recipe,
    folder: str | os.PathLike[str],
    *,
    name: str = "images",
    held_out: float = 0.1,
    ood: tuple[str, np.ndarray[Any, Any]] | None = None,
    device: str | None = None,
    tensorboard: bool = False,
    progress: Told | None = None,
) -> list[dict[str, str]]:
    """Train a network to the end, write what it predicts, and return the rows about it.

    A run that was stopped goes on after its last whole epoch; one that had ended is not trained
    again.

    Parameters
    ----------
    images : ImageSet
    recipe : Recipe
    folder : path
        Gets ``predictions.npz`` (splits val, test and ood with logits and features, and the last
        layer), ``run.json``, ``log.csv`` and the checkpoints.
    name : str
        Of the data, as the rows are to have it.
    held_out : float
        Share of the training part that the checkpoint is chosen on, and calibrators are fitted on.
    ood : (name, images), optional
        Images of no known class, in the shape of the others.
    device : str, optional
    tensorboard : bool
    progress : callable, optional

    Returns
    -------
    list of dict
        One row for each of ``AFTER``; empty in all processes but the first.
    """
    home = Path(folder)
    trainer = Trainer(
        parts(images, held_out),
        images.classes,
        recipe,
        home,
        device=device,
        tensorboard=tensorboard,
    )
    trainer.run(progress)
    if not trainer.first:
        return []
    trainer.use_best()
    others = {}
    if ood is not None:
        others["ood"] = Part(ood[1], np.full(len(ood[1]), IGNORED, np.int64))
    save_predictions(home / "predictions.npz", trainer.predictions(others))
    about = {
        "data": name,
        "digest": images.digest,
        "ood": ood[0] if ood else "",
        "held_out": held_out,
        "processes": trainer.ranks.size,
        "recipe": asdict(recipe),
    }
    with replacing(home / "run.json") as path:
        path.write_text(json.dumps(about, indent=2) + "\n")
    return rows(home)


def rows(folder: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Rows about a run that has ended: its figures as it is, and after other calibrators."""
    home = Path(folder)
    if not (home / "run.json").exists():
        raise FileNotFoundError(
            f"{home} holds no run that has ended (no run.json): let calibrant bench train end it"
        )
    about = json.loads((home / "run.json").read_text())
    recipe = Recipe(**about["recipe"])
    file = open_predictions(home / "predictions.npz")
    val, test = file.split("val"), file.split("test")
    foreign = file.split("ood").read("logits") if "ood" in file.splits else None
    shared = {
        "data": about["data"],
        "digest": about["digest"][:16],
        "network": recipe.network,
        "loss": recipe.loss,
        "options": " ".join(f"{k}={v}" for k, v in recipe.loss_options.items()),
        "epochs": str(recipe.epochs),
        "seed": str(recipe.seed),
        "ood": about["ood"],
    }
    found = []
    for after in AFTER:
        fitted = CALIBRATORS[after]().fit(val.read("logits"), val.read("labels"))
        logits = fitted(torch.from_numpy(test.read("logits")))
        measured = evaluate(logits, test.read("labels"), metrics=FIGURES, level=None)
        figures = {name: f"{measured[name].value:.6f}" for name in FIGURES}
        if foreign is not None:
            sure = (fitted.predict_proba(x).max(-1) for x in (test.read("logits"), foreign))
            figures["ood_auroc"] = f"{ood_auroc(*sure):.6f}"
        row = {**shared, "after": after, **figures}
        found.append({column: row.get(column, "") for column in COLUMNS})
    return found


def summary(found: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """A table for people: one line a run and calibrator, errors in percent."""
    table: list[tuple[str, ...]] = [
        ("loss", "after", "accuracy", "ECE", "AECE", "O-ECE", "U-ECE", "NLL", "OOD AUROC")
    ]
    percent: Sequence[str] = ("accuracy", "ece", "ada_ece", "over_ece", "under_ece")
    for row in found:
        cells = [f"{100 * float(row[name]):.2f}" for name in percent]
        away = f"{100 * float(row['ood_auroc']):.1f}" if row["ood_auroc"] else "-"
        table.append((row["loss"], row["after"], *cells, f"{float(row['nll']):.3f}", away))
    return table
