"""Runs as rows: train, predict, and measure before and after a calibrator."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant.bench.train.images.sets import ImageSet, Part, parts
from calibrant.bench.train.trainer import PAPERS, Recipe, Told, Trainer
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.data import open_dataset, save_predictions
from calibrant.metrics.ranking import ood_auroc
from calibrant.workflows.evaluate import evaluate

FIGURES = ("accuracy", "ece", "ada_ece", "over_ece", "under_ece", "nll", "brier", "auroc")
AFTER = ("none", "ts", "smart")
"""Calibrators that the logits of a run are measured after; fitted on its validation part."""
BY_DATA = ("network", "epochs", "augment")
"""What the command line chooses by the data, so that a command has to say it."""
COLUMNS = (
    *("data", "digest", "network", "loss", "options", "epochs", "seed", "after"),
    *(*FIGURES, "ood_auroc", "ood", "command"),
)
IN_PYTHON_ONLY = ("milestones", "momentum", "decay", "clip")
"""What the command line has no option for."""


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
    file = open_dataset(home / "predictions.npz")
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
        "command": command(recipe, about["data"], about["ood"], about.get("processes", 1)),
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


def command(recipe: Recipe, data: str, ood: str, processes: int = 1) -> str:
    """The command line that makes a run again; empty for a recipe that it has no options for.

    >>> command(Recipe(epochs=60, loss_options={"alpha": 0.1}, loss="ls"), "cifar", "")
    'calibrant bench train cifar --loss ls --set alpha=0.1 --network resnet18 --epochs 60 --augment'
    """
    usual = Recipe()
    if any(getattr(recipe, name) != getattr(usual, name) for name in IN_PYTHON_ONLY):
        return ""
    words = ["calibrant", "bench", "train"]
    if processes > 1:
        words = ["torchrun", "--nproc-per-node", str(processes), "-m", *words]
    words += [data] if data != "digits" else []
    words += ["--loss", recipe.loss]
    for key, value in recipe.loss_options.items():
        if PAPERS.get(recipe.loss, {}).get(key) != value:
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    for field in fields(Recipe):
        value = getattr(recipe, field.name)
        if field.name in ("loss", "loss_options", *IN_PYTHON_ONLY):
            continue
        if field.name not in BY_DATA and value == getattr(usual, field.name):
            continue
        option = "--compile" if field.name == "compiled" else f"--{field.name}"
        words += [f"--no-{field.name}"] if value is False else [option]
        words += [] if isinstance(value, bool) else [str(value)]
    words += ["--ood", ood] if ood else []
    return shlex.join(words)


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
