"""The work on one file: to look at what it holds, and to fit, report and export."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from calibrant._core.chunks import EstimandChoice
from calibrant._core.engines import use
from calibrant._core.messages import printable
from calibrant.artifacts import save
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.features import Multicalibration
from calibrant.calibrators.registry import calibrators_for
from calibrant.data.dataset import FIT_SPLITS, TEST_SPLITS, Dataset, Split
from calibrant.data.files import open_dataset
from calibrant.deploy.exports import export
from calibrant.show.report.build import PREFER, report
from calibrant.show.report.measure import usual_methods
from calibrant.ui.fit_choices import Choices
from calibrant.workflows.fit import fit_and_measure

NAMES_SHOWN = 12
_FITTED_METRICS = ("accuracy", "ece", "nll", "brier")


# ------------------------------------------------------------------------- looking


def look(path: str, memory: int) -> dict[str, Any]:
    """Return what a prediction file holds and the choices that it allows; only headers are read.

    Its arrays may take ``memory`` bytes at most: a compressed file can hold far more than its size.
    """
    dataset = open_dataset(path)
    columns = [column for arrays in dataset.files for column in arrays.values()]
    size = sum(math.prod(column.shape) * column.dtype.itemsize for column in columns)
    if size > memory:
        raise ValueError(
            f"{path}: its arrays take {size / 1e9:,.1f} GB, and this page reads up to "
            f"{memory / 1e9:,.1f} GB: use the command line, which reads a file in chunks"
        )
    splits = []
    for split in map(dataset.split, dataset.splits):
        if {"logits", "probs"} & set(split.keys) and "labels" in split.keys:
            for column in ("logits", "labels"):
                split.shards[0].column(column)  # which is checked by its header
            splits.append(split)
    if not splits:  # raise the error of a file in which no split has scores and labels
        arrays = dataset.split(None, (*dataset.splits, "")).shards[0]
        arrays.column("logits")
        arrays.column("labels")
    first = splits[0]
    multilabel = (
        first.shards[0].column("labels").shape == (first.rows, *first.shape) != (first.rows,)
    )
    return {
        "splits": [
            {
                "name": split.name,
                "examples": split.rows,
                "domain": split.domain,
                "features": split.shards[0].column("features").width
                if split.has_features
                else None,
            }
            for split in splits
        ],
        "fit_split": dataset.find(None, FIT_SPLITS),
        "test_split": dataset.find(None, TEST_SPLITS),
        "classes": first.classes,
        "multilabel": multilabel,
        "class_names": [printable(name) for name in (dataset.class_names or [])[:NAMES_SHOWN]],
        "methods": list(_methods(dataset, splits, "multilabel" if multilabel else "auto")),
        "onnx": all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))),
    }


def _methods(
    dataset: Dataset, splits: list[Split], estimand: EstimandChoice
) -> Iterator[dict[str, Any]]:
    """Yield the methods that the arrays and the number of classes suffice for, the usual first."""
    known = calibrators_for(estimand)
    usual = known.name("auto")
    features = all(split.has_features for split in splits)
    for name in sorted(known, key=lambda name: name != usual):
        kind = known[name]
        if name == "none" or (kind.two_classes_only and splits[0].classes != 2):
            continue
        if issubclass(kind, Multicalibration):  # the page names no columns for it
            continue
        if kind.needs_features <= features and kind.needs_head <= dataset.has_head:
            yield {"name": name, "title": _title(kind), "summary": _plain_text(kind.summary)}


def _title(kind: type[Calibrator]) -> str:
    """Return the name of a class in words.

    >>> from calibrant.calibrators import SMART, EnsembleTemperatureScaling
    >>> _title(EnsembleTemperatureScaling), _title(SMART)
    ('Ensemble temperature scaling', 'SMART')
    """
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]+", kind.__name__)
    return " ".join([words[0], *(w if w.isupper() else w.lower() for w in words[1:])])


def _plain_text(summary: str) -> str:
    """Return a line of the documentation without its markup.

    >>> _plain_text("[averages](#how) the mean of `smart` and `odds`; see {doc}`smart`")
    'averages the mean of smart and odds'
    """
    text = re.sub(r"; see \{doc\}`\w+`", "", summary)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


# ------------------------------------------------------------------------- running


def run(
    path: str, name: str, out: Path, choices: Choices, send: Callable[..., object]
) -> dict[str, Any]:
    """Fit, report and export into the folder ``out``; ``name`` stands for the path in results.

    ``send`` is called with "step" and its number, and with "progress", what is done and the total.
    """
    dataset = replace(open_dataset(path), path=name)
    progress = partial(send, "progress")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        send("step", 0)
        is_auto = choices.method == "auto" and choices.estimand != "multilabel"
        with use(progress=progress):
            fitted = fit_and_measure(
                dataset,
                method=choices.method,
                split=choices.fit_split,
                options={"keep_argmax": choices.keep_argmax} if is_auto else None,
                estimand=choices.estimand,
                metrics=_FITTED_METRICS,
            )
        save(fitted.calibrator, out / "calibrator.safetensors")
        send("step", 1)
        with use(progress=progress):
            _report(dataset, out, choices)
        send("step", 2)
        tokens, problem = len(dataset.split(fitted.split).shape) == 2, None
        try:
            export(fitted.calibrator, out / "calibrator.onnx", tokens=tokens)
        except Exception as error:  # of many kinds; the report matters more
            problem = printable(str(error))
    messages = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    notes = [message.replace(path, name) for message in messages]
    return {
        "lines": [printable(line) for line in fitted.describe()],
        "notes": [printable(note) for note in dict.fromkeys(notes)],
        "needs_features": bool(fitted.calibrator.needs_features),
        "no_onnx": problem,
    }


def _report(dataset: Dataset, out: Path, choices: Choices) -> None:
    """Write the report, in which the chosen method is among those that are compared."""
    classes = dataset.split(choices.test_split, PREFER).classes
    usual = usual_methods(choices.estimand, classes)
    made = report(
        dataset,
        split=choices.test_split,
        fit_split=choices.fit_split,
        methods=None if choices.method in usual else [*usual, choices.method],
        keep_argmax=choices.keep_argmax,
        estimand=choices.estimand,
    )
    subjects = [
        replace(subject, files=[replace(file, path=dataset.path) for file in subject.files])
        for subject in made.subjects
    ]
    made = replace(made, subjects=subjects)
    for form in ("html", "md", "json"):
        made.save(out / f"report.{form}")
