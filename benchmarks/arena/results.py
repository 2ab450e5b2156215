"""Runs of the arena: every method on every task, as rows of a csv file."""

from __future__ import annotations

import csv
import io
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import log_softmax

from benchmarks.arena.methods import Method
from benchmarks.arena.tasks import FLOOR, Predictions, Task
from calibrant import __version__
from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.engines import Progress
from calibrant._core.messages import comma_separated
from calibrant.data.formats import Array
from calibrant.metrics.binned import ece
from calibrant.metrics.reductions import positive_class, top_label
from calibrant.metrics.scores import accuracy, brier, nll

FIGURES = ("nll", "brier", "ece", "kuiper", "accuracy")
"""Metrics before and after calibration; the Kuiper statistic of two classes only."""
KEY = ("suite", "task", "fingerprint", "seed", "method", "version")
"""Columns that identify a row."""
COLUMNS = (
    *KEY,
    *("dataset", "classes", "n_fit", "n_test"),
    *(f"{name}_before" for name in FIGURES),
    *FIGURES,
    *("fit_seconds", "apply_seconds", "calibrant", "error"),
)


class Trial(NamedTuple):
    """One method on one split of one task: a row of the results."""

    task: Task
    fingerprint: str
    seed: int
    method: Method

    @property
    def key(self) -> tuple[str, ...]:
        """The values of the columns ``KEY``."""
        names = self.task.suite, self.task.name, self.fingerprint, str(self.seed)
        return (*names, self.method.text, self.method.version)


def run(
    tasks: Sequence[Task],
    methods: Sequence[Method],
    path: str | os.PathLike[str],
    *,
    seeds: Sequence[int] = (0,),
    workers: int = 1,
    progress: Progress | None = None,
) -> list[dict[str, str]]:
    """Run the trials that a file of results does not have yet, and return all its rows.

    Each row is appended to the file as soon as it is there, so that a stopped run goes on from
    there. A method that fails has a row with its error. Seed 0 is the split of the data, others
    draw both sides anew; each of the ``workers`` processes computes on one thread.
    """
    target = Path(path)
    if read_rows(target):  # a killed run may have left a part of a row
        os.truncate(target, target.read_bytes().rfind(b"\n") + 1)
    known = {tuple(row[name] for name in KEY) for row in read_rows(target)}
    trials = [trial for trial in _trials(tasks, methods, seeds) if trial.key not in known]
    for done, row in enumerate(_rows(trials, workers), 1):
        append_row(target, row)
        if progress is not None:
            progress(done, len(trials))
    return read_rows(target)


def _trials(
    tasks: Sequence[Task], methods: Sequence[Method], seeds: Sequence[int]
) -> Iterator[Trial]:
    for task in tasks:
        try:
            fingerprint = _predictions(task).fingerprint
        except (ValueError, TypeError, OSError):
            fingerprint = ""  # the trial fails as well, and writes the reason into its row
        yield from (Trial(task, fingerprint, seed, m) for seed in seeds for m in methods)


def _rows(trials: Sequence[Trial], workers: int) -> Iterator[dict[str, str]]:
    if min(workers, len(trials)) <= 1:
        yield from map(trial_row, trials)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(trial_row, trial) for trial in trials]):
            yield future.result()


@lru_cache(maxsize=1)
def _predictions(task: Task, seed: int = 0) -> Predictions:
    """Read a task; the methods of one task follow each other, so that one is remembered."""
    return task.read().redrawn(seed)


def trial_row(trial: Trial) -> dict[str, str]:
    """Fit and measure a method; an error is written down, since others must not suffer from it."""
    torch.set_num_threads(1)
    row = dict(zip(KEY, trial.key, strict=True))
    row |= {"dataset": trial.task.dataset, "calibrant": __version__}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predictions = _predictions(trial.task, trial.seed)
            test = predictions.test
            sizes = {"n_fit": len(predictions.fit.labels), "n_test": len(test.labels)}
            row |= {name: str(n) for name, n in (*sizes.items(), ("classes", predictions.classes))}
            row |= _texts(figures(test.logits, test.labels), "_before")
            calibrated, seconds = _calibrated(trial.method, predictions)
        row |= _texts(figures(calibrated, test.labels)) | seconds
    except Exception as problem:
        row["error"] = " ".join(f"{type(problem).__name__}: {problem}".split())
    return {column: row.get(column, "") for column in COLUMNS}


def _calibrated(method: Method, predictions: Predictions) -> tuple[Array, dict[str, str]]:
    """Return calibrated logits of the test examples, and the seconds of both steps."""
    start = time.perf_counter()
    entrant = method.make()
    entrant.fit(predictions)
    fitted = time.perf_counter()
    logits = entrant.predict(predictions.test)
    applied = time.perf_counter()
    wanted = predictions.test.logits.shape
    if logits.shape != wanted:
        raise ValueError(f"probabilities must be of shape {wanted}, got {logits.shape}")
    seconds = {"fit_seconds": fitted - start, "apply_seconds": applied - fitted}
    return logits, {name: f"{taken:.4f}" for name, taken in seconds.items()}


def figures(logits: Array, labels: IntArray) -> dict[str, float]:
    """Return the metrics of logits (n, classes); ECE and Kuiper of two classes are those of P(1).

    Probabilities below the smallest normal number of float32 are raised to it, as in probmetrics,
    so that a zero at the label costs 87 nats and is not infinite.
    """
    logs = np.maximum(log_softmax(logits.astype(np.float64), -1), np.log(FLOOR))
    binary = logs.shape[1] == 2
    confidence, outcome = (positive_class if binary else top_label)(logs, labels)[:2]
    result = {"nll": nll(logs, labels), "brier": brier(logs, labels)}
    result["ece"] = ece(confidence=confidence, outcome=outcome)
    if binary:
        result["kuiper"] = kuiper(confidence, outcome.astype(np.float64))
    return {**result, "accuracy": accuracy(logs, labels)}


def kuiper(confidence: FloatArray, outcome: FloatArray) -> float:
    r"""Range of the cumulative differences of outcomes and probabilities, sorted by probability.

    .. math:: \max_k C_k - \min_k C_k, \quad C_k = \frac1n \sum_{i \le k} (y_i - p_i), \quad C_0 = 0

    (Arrieta-Ibarra et al. 2022, ECCE-R; a column of CalArena's results for two classes).
    """
    order = np.argsort(confidence, kind="stable")
    walk = np.cumsum((outcome - confidence)[order]) / len(order)
    return float(max(walk.max(), 0) - min(walk.min(), 0))


def _texts(values: Mapping[str, float], suffix: str = "") -> dict[str, str]:
    return {name + suffix: f"{value:.8g}" for name, value in values.items()}


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Return the rows of a file of results; none if there is no file."""
    if not Path(path).exists():
        return []
    reader = csv.DictReader(Path(path).read_text("utf-8").splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{path} is no file of the arena: it has no {comma_separated(missing)}")
    return list(reader)


def append_row(path: Path, row: Mapping[str, str]) -> None:
    """Add a row in one step, so that two runs may write to one file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerow(row)
    with path.open("ab", buffering=0) as file:
        file.write(text.getvalue().encode())
