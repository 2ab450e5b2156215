"""Multiple choice of logs: log-probabilities of the options, calibrated and measured again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import FloatArray, IntArray
from calibrant.llm.answers.graded import Row
from calibrant.llm.answers.grading import FEWEST, calibrated_choices
from calibrant.metrics.evaluation import Evaluation
from calibrant.workflows.evaluate import evaluate

METRICS = ("accuracy", "ece", "nll", "brier")


class Options(NamedTuple):
    """Options of questions.

    Attributes
    ----------
    logits : (questions, options)
        Log-probabilities; -inf where a question has fewer options than others.
    labels : (questions,)
        Numbers of the right options.
    """

    logits: FloatArray
    labels: IntArray


class Rescored(NamedTuple):
    """Options of a log before calibration, and after it.

    Attributes
    ----------
    before, after : Evaluation
        Of the probabilities of the options; accuracy is that of the likeliest one.
    probs : (questions, options)
        Calibrated probabilities.
    """

    before: Evaluation
    after: Evaluation
    probs: FloatArray


def option_logits(rows: Sequence[Row]) -> Options | None:
    """Return the options of answers; None unless all have log-probabilities and a right option.

    >>> options = option_logits([{"option_logits": [-0.1, -2.4], "label": 0}])
    >>> options.logits, options.labels
    (array([[-0.1, -2.4]]), array([0]))
    """
    if not rows or any(row.get("label") is None or "option_logits" not in row for row in rows):
        return None
    width = max(len(row["option_logits"]) for row in rows)
    logits = np.full((len(rows), width), -np.inf)
    for i, row in enumerate(rows):
        logits[i, : len(row["option_logits"])] = row["option_logits"]
    return Options(logits, np.array([row["label"] for row in rows], dtype=np.int64))


def save_options(rows: Sequence[Row], file: str | os.PathLike[str]) -> None:
    """Write the options of answers as a prediction file, ``.npz`` with logits and labels."""
    options = option_logits(rows)
    if options is None:
        raise ValueError(
            f"{os.fspath(file)} is for multiple choice, and some answers have no log-probabilities "
            "of options or no right one: write .jsonl or .csv"
        )
    with replacing(Path(file)) as temporary, temporary.open("wb") as stream:
        np.savez(stream, logits=options.logits, labels=options.labels)


def rescore(options: Options, *, level: float | None = 0.9) -> Rescored:
    """Calibrate options and measure them again, each question by a fit on other folds.

    A preference of the model for some options is corrected, so that answers may change
    (:class:`calibrant.Auto` with ``keep_argmax=False``). This takes 100 questions or more.

    Examples
    --------
    ::

        options = option_logits(read_log("samples_arc_easy_2026-01-01T00-00-00.jsonl").answers.rows)
        rescore(options).after["accuracy"]
    """
    if len(options.labels) < FEWEST:
        raise ValueError(
            f"options of {len(options.labels)} questions are too few to calibrate them: {FEWEST} "
            "are needed"
        )
    calibrated = calibrated_choices(*options)
    before, after = (
        evaluate(logits, options.labels, estimand="top_label", metrics=METRICS, level=level)
        for logits in (options.logits, calibrated)
    )
    return Rescored(before, after, np.exp(calibrated))
