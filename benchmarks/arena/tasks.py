"""Tasks of the arena: predictions to fit a calibrator on, and others to measure it on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from calibrant._core.checks import IGNORED, FloatArray, IntArray
from calibrant._core.messages import comma_separated, printable
from calibrant.data import Split, open_dataset, sample_path
from calibrant.data.files import OTHER_FORMATS, READERS, natural_order
from calibrant.data.formats import Array

HDF5 = (".h5", ".hdf5")
ARRAYS = ("probas_cal", "labels_cal", "probas_test", "labels_test")
"""Arrays of a task in CalArena's files, in groups ``dataset/model``."""
FLOOR = float(np.finfo(np.float32).tiny)
"""Least probability that is taken for what it says; smaller ones, as zeros, are raised to it."""


class Examples(NamedTuple):
    """Labelled examples: logits (n, classes), labels (n,), and features (n, width) if known."""

    logits: Array
    labels: IntArray
    features: Array | None = None

    def at(self, rows: IntArray) -> Examples:
        return Examples(*(None if array is None else array[rows] for array in self))  # type: ignore[arg-type]

    def joined(self, other: Examples) -> Examples:
        features = None
        if self.features is not None and other.features is not None:
            features = np.concatenate([self.features, other.features])
        logits = np.concatenate([self.logits, other.logits])
        return Examples(logits, np.concatenate([self.labels, other.labels]), features)


@dataclass(frozen=True)
class Predictions:
    """Predictions of one model: examples to fit on, and others to measure on."""

    fit: Examples
    test: Examples
    head: tuple[Array, Array] | None = None

    @property
    def classes(self) -> int:
        return int(self.fit.logits.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the arrays: 16 hexadecimal digits."""
        return digest(array for examples in (self.fit, self.test) for array in examples)

    def redrawn(self, seed: int) -> Predictions:
        """Return these predictions with another split: seed 0 is their own.

        Others draw as many examples for each side from the union of both, by class.
        """
        if seed == 0:
            return self
        both = self.fit.joined(self.test)
        chosen = stratified(both.labels, len(self.fit.labels), seed)
        others = np.setdiff1d(np.arange(len(both.labels)), chosen)
        return Predictions(both.at(chosen), both.at(others), self.head)


def stratified(labels: IntArray, count: int, seed: int) -> IntArray:
    """Return the sorted rows of a random draw in which every class has its share, within one."""
    random = np.random.default_rng(seed).random(len(labels))
    order = np.lexsort((random, labels))
    # along the classes in turn, take a row whenever the share of the rows passed reaches a whole
    due = np.arange(len(labels) + 1) * count // len(labels)
    return np.sort(order[np.diff(due) > 0])


def digest(arrays: Iterable[Array | None]) -> str:
    """Return 16 hexadecimal digits that identify arrays by their values, shapes and types."""
    total = hashlib.sha256()
    for array in arrays:
        if array is not None:
            total.update(f"{array.dtype.str}{array.shape}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """Predictions by name. Tasks of one data set are not independent of each other."""

    suite: str
    name: str
    dataset: str
    reader: Callable[..., Predictions]
    source: tuple[Any, ...]

    def read(self) -> Predictions:
        return self.reader(*self.source)


def read_file(path: str) -> Predictions:
    """Read the splits val and test of a prediction file."""
    data = open_dataset(path)
    splits = [data.split(name) for name in ("val", "test")]
    features = all(split.has_features for split in splits)
    fit, test = (_examples_of(split, features) for split in splits)
    return Predictions(fit, test, data.head if features else None)


def read_hdf5(path: str, name: str) -> Predictions:
    """Read a group ``dataset/model`` of a file in CalArena's layout."""
    import h5py

    with h5py.File(path, "r") as file:
        probs, labels, test_probs, test_labels = (file[name][key][()] for key in ARRAYS)
    return Predictions(
        _labelled(logits_of(probs), labels), _labelled(logits_of(test_probs), test_labels)
    )


class Found(NamedTuple):
    """Tasks of a folder or file, and what was left out with the reason."""

    tasks: list[Task]
    skipped: list[str]


def find_tasks(path: str | os.PathLike[str]) -> Found:
    """Return the tasks in a folder tree, a prediction file, or a file in CalArena's layout.

    The suite of a prediction file is its folder, with ``-binary`` or ``-multiclass`` after it, and
    that of an HDF5 file its name. A file ``predictions`` is known by its folder, as the runs of
    ``benchmarks.train`` are.
    """
    root = Path(path).resolve()
    if not root.exists():
        raise FileNotFoundError(f"{path} does not exist: name a folder, a prediction file or HDF5")
    found = Found([], [])
    for file in _files(root) if root.is_dir() else [root]:
        try:
            found.tasks.extend(_hdf5_tasks(file) if file.suffix in HDF5 else [_task_of(file, root)])
        except (ValueError, TypeError, OSError) as problem:
            found.skipped.append(str(problem))
    if not found.tasks:
        reasons = comma_separated(found.skipped[:3])
        raise ValueError(f"{path} has no file with the splits val and test: {reasons}")
    return found


def _files(root: Path) -> list[Path]:
    """Return files, and the folders that hold arrays as ``.npy`` files, in natural order."""
    known = {*READERS, *HDF5} - {*OTHER_FORMATS}
    files = [file for file in root.rglob("*") if file.suffix in known]
    return sorted({f.parent if f.suffix == ".npy" else f for f in files}, key=natural_order)


def _task_of(file: Path, root: Path) -> Task:
    data = open_dataset(file)
    val, test = data.split("val"), data.split("test")
    labels = test.read("labels")
    if labels.ndim >= max(2, len(test.shape) + 1):
        raise ValueError(f"{file} is multi-label: the arena has tasks with exclusive classes")
    place = file.parent if file.stem == "predictions" else file
    nested = place.parent != root and place.parent.is_relative_to(root)
    folder = place.parent.relative_to(root).as_posix() if nested else place.parent.name
    kind = "binary" if val.classes == 2 else "multiclass"
    name = place.stem if place.is_file() else place.name
    # models that were tested on the same examples share their data set
    dataset = digest([labels.astype(np.int64)])
    # names as they are written: Unicode, and one line
    return Task(printable(f"{folder}-{kind}"), printable(name), dataset, read_file, (str(file),))


def _hdf5_tasks(file: Path) -> Iterator[Task]:
    import h5py

    with h5py.File(file, "r") as groups:
        for dataset, models in groups.items():
            for model, arrays in models.items():
                name = f"{dataset}/{model}"
                missing = [key for key in ARRAYS if key not in arrays]
                if missing:
                    raise ValueError(f"{file}: {name} has no {comma_separated(missing)}")
                yield Task(file.stem, name, dataset, read_hdf5, (str(file), name))


def _examples_of(split: Split, features: bool) -> Examples:
    stored = split.read(split.domain)
    if split.domain == "probs":
        logits: Array = logits_of(stored)
    else:  # log-odds (n,) are two classes
        logits = np.stack([np.zeros_like(stored), stored], -1) if stored.ndim == 1 else stored
    return _labelled(logits, split.labels, split.features if features else None)


def _labelled(logits: Array, labels: NDArray[Any], features: Array | None = None) -> Examples:
    """Return rows with a label; tokens and pixels become rows."""
    flat = labels.reshape(-1).astype(np.int64)
    features = None if features is None else features.reshape(len(flat), -1)
    whole = Examples(logits.reshape(len(flat), -1), flat, features)
    return whole.at(np.flatnonzero(flat != IGNORED))


def logits_of(probs: Array) -> FloatArray:
    """Return log-probabilities (n, classes) of probabilities, or of P(1), (n,) or (n, 1)."""
    exact = np.asarray(probs, np.float64)
    if exact.ndim == 1 or exact.shape[-1] == 1:
        exact = np.stack([1 - exact.reshape(-1), exact.reshape(-1)], -1)
    if not ((exact >= 0) & (exact <= 1 + 1e-4)).all():
        raise ValueError("probabilities must be in [0, 1], got NaN, negative or larger values")
    return np.asarray(np.log(np.maximum(exact, FLOOR)))


# The small suite: generated data with known faults, and a part of the embedded sample.

Drawn = tuple[FloatArray, IntArray]


def shifted_binary(rng: np.random.Generator, n: int) -> Drawn:
    """Log-odds that are too high by 2, as after training on balanced classes."""
    logits = 2 * rng.normal(size=n)
    return _columns(logits), (rng.random(n) < expit(logits - 2)).astype(np.int64)


def curved_binary(rng: np.random.Generator, n: int) -> Drawn:
    """Log-odds that are too extreme on one side only, as of a naive Bayes classifier."""
    truth = 2 * rng.normal(size=n)
    labels = (rng.random(n) < expit(truth)).astype(np.int64)
    return _columns(np.where(truth > 0, 4, 1) * truth), labels


def calibrated(rng: np.random.Generator, n: int) -> Drawn:
    """Ten classes with honest logits, where the best is to do nothing."""
    return _drawn(rng, 2 * rng.normal(size=(n, 10)))


def over_confident(rng: np.random.Generator, n: int) -> Drawn:
    """A hundred classes with logits that are twice too large."""
    logits, labels = _drawn(rng, 3 * rng.normal(size=(n, 100)))
    return 2 * logits, labels


def biased_choices(rng: np.random.Generator, n: int) -> Drawn:
    """Four options of which the model prefers the first, whatever it stands for."""
    logits, labels = _drawn(rng, 1.5 * rng.normal(size=(n, 4)))
    return 1.5 * logits + np.array([1.5, 0, 0, -0.5]), labels


def _columns(log_odds: FloatArray) -> FloatArray:
    return np.stack([np.zeros_like(log_odds), log_odds], -1)


def _drawn(rng: np.random.Generator, logits: FloatArray) -> Drawn:
    """Return logits with labels drawn from their softmax."""
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


def generate(draw: Callable[..., Drawn], n_fit: int, n_test: int) -> Predictions:
    """Draw examples from a world whose truth is known, always the same ones."""
    rng = np.random.default_rng(17)
    fit, test = (Examples(*draw(rng, n)) for n in (n_fit, n_test))
    return Predictions(fit, test)


def read_sample(n_fit: int, n_test: int) -> Predictions:
    """Read examples of the embedded sample, always the same ones."""
    whole = read_file(str(sample_path()))
    fit, test = (
        Examples(side.logits, side.labels).at(stratified(side.labels, n, 17))
        for side, n in ((whole.fit, n_fit), (whole.test, n_test))
    )
    return Predictions(fit, test)


def small_suite() -> list[Task]:
    """Return the tasks of the small suite, which takes half a minute for all methods."""
    worlds = [
        *((shifted_binary, 200, 4000), (shifted_binary, 2000, 4000), (curved_binary, 1000, 4000)),
        *((calibrated, 100, 4000), (calibrated, 1000, 4000)),
        *((over_confident, 2000, 2000), (biased_choices, 1000, 4000)),
    ]
    tasks = [
        Task("small", f"{draw.__name__}_{n_fit}", draw.__name__, generate, (draw, n_fit, n_test))
        for draw, n_fit, n_test in worlds
    ]
    sample = Task("small", "cifar10_resnet50_1000", "cifar10", read_sample, (1000, 4000))
    return [*tasks, sample]
