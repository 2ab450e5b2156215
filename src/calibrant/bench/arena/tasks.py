"""Tasks of the arena: predictions to fit a calibrator on, and others to measure it on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import IGNORED, FloatArray, IntArray
from calibrant._core.messages import comma_separated, printable
from calibrant.data import Split, open_dataset
from calibrant.data.files import natural_order
from calibrant.data.formats import Array
from calibrant.data.readers import ARRAY_FORMATS

if TYPE_CHECKING:
    import h5py

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
        """Return the examples in some rows."""
        features = None if self.features is None else self.features[rows]
        return Examples(self.logits[rows], self.labels[rows], features)

    def joined(self, other: Examples) -> Examples:
        """Return these examples, then the others."""
        logits = np.concatenate([self.logits, other.logits])
        labels = np.concatenate([self.labels, other.labels])
        if self.features is None or other.features is None:
            return Examples(logits, labels)
        return Examples(logits, labels, np.concatenate([self.features, other.features]))


@dataclass(frozen=True)
class Predictions:
    """Predictions of one model: examples to fit on, and others to measure on."""

    fit: Examples
    test: Examples
    head: tuple[Array, Array] | None = None

    @property
    def classes(self) -> int:
        """Number of classes."""
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
    """Return the sorted rows of a random draw in which every class has its share, within one.

    >>> stratified(np.array([0] * 6 + [1] * 3), 3, seed=1).size
    3
    """
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


class Task(Protocol):
    """A source of predictions. Tasks of one data set are not independent of each other."""

    @property
    def suite(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dataset(self) -> str: ...  # noqa: D102
    def read(self) -> Predictions: ...  # noqa: D102
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class FileTask:
    """A prediction file with the splits val and test.

    The data set is known by the labels of its test split: models that were tested on the same
    examples share it.
    """

    path: str
    suite: str
    name: str
    dataset: str

    def read(self) -> Predictions:
        """Return the labelled examples of both splits."""
        data = open_dataset(self.path)
        splits = [data.split(name) for name in ("val", "test")]
        features = all(split.has_features for split in splits)
        fit, test = (_examples_of(split, features) for split in splits)
        return Predictions(fit, test, data.head if features else None)


@dataclass(frozen=True)
class HDF5Task:
    """A group ``dataset/model`` of a file in CalArena's layout."""

    path: str
    suite: str
    name: str

    @property
    def dataset(self) -> str:
        """Name of the data set."""
        return self.name.partition("/")[0]

    def read(self) -> Predictions:
        """Return the examples for calibration and those for the test."""
        with _open_hdf5(self.path) as file:
            probs, labels, test_probs, test_labels = (file[self.name][key][()] for key in ARRAYS)
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
    ``calibrant bench train`` are.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> [(task.suite, task.name) for task in find_tasks(sample_path()).tasks]
    [('sample-multiclass', 'cifar10_resnet50')]
    """
    root = Path(path).resolve()
    if not root.exists():
        raise FileNotFoundError(
            f"{path} does not exist; expected a folder, a prediction file or HDF5"
        )
    found = Found([], [])
    for file in _files(root) if root.is_dir() else [root]:
        try:
            found.tasks.extend(_tasks_of(file, root))
        except (ValueError, TypeError, OSError) as problem:
            found.skipped.append(str(problem))
    if not found.tasks:
        reasons = comma_separated(found.skipped[:3])
        raise ValueError(f"{path} has no file with the splits val and test: {reasons}")
    return found


def _files(root: Path) -> list[Path]:
    """Return files, and the folders that hold arrays as ``.npy`` files, in natural order."""
    files = [file for file in root.rglob("*") if file.suffix in (*ARRAY_FORMATS, *HDF5)]
    return sorted({f.parent if f.suffix == ".npy" else f for f in files}, key=natural_order)


def _tasks_of(file: Path, root: Path) -> Iterator[Task]:
    if file.suffix in HDF5:
        yield from _hdf5_tasks(file)
        return
    data = open_dataset(file)
    val, test = data.split("val"), data.split("test")
    if test.read("labels").ndim >= max(2, len(test.shape) + 1):
        raise ValueError(f"{file} is multi-label: the arena has tasks with exclusive classes")
    kind = "binary" if val.classes == 2 else "multiclass"
    place = file.parent if file.stem == "predictions" else file
    name = place.stem if place.is_file() else place.name
    yield FileTask(
        str(file),
        printable(f"{_folder(place, root)}-{kind}"),  # as they are written: Unicode, and one line
        printable(name),
        digest([test.read("labels").astype(np.int64)]),
    )


def _folder(file: Path, root: Path) -> str:
    parent = file.parent
    nested = parent != root and parent.is_relative_to(root)
    return parent.relative_to(root).as_posix() if nested else parent.name


def _hdf5_tasks(file: Path) -> Iterator[HDF5Task]:
    with _open_hdf5(file) as groups:
        for dataset, models in groups.items():
            for model, arrays in models.items():
                missing = [key for key in ARRAYS if key not in arrays]
                if missing:
                    raise ValueError(f"{file}: {dataset}/{model} has no {comma_separated(missing)}")
                yield HDF5Task(str(file), file.stem, f"{dataset}/{model}")


def _open_hdf5(path: str | os.PathLike[str]) -> h5py.File:
    try:
        import h5py
    except ImportError as error:
        message = f"HDF5 files need h5py ({error}): pip install 'calibrant[arena]'"
        raise ImportError(message) from error
    return h5py.File(path, "r")


def _examples_of(split: Split, features: bool) -> Examples:
    stored = split.read(split.domain)
    logits = logits_of(stored) if split.domain == "probs" else _two_columns(stored)
    return _labelled(logits, split.labels, split.features if features else None)


def _labelled(logits: Array, labels: NDArray[Any], features: Array | None = None) -> Examples:
    """Return rows with a label; tokens and pixels become rows."""
    flat = labels.reshape(-1).astype(np.int64)
    rows = np.flatnonzero(flat != IGNORED)
    features = None if features is None else features.reshape(len(flat), -1)
    return Examples(logits.reshape(len(flat), -1), flat, features).at(rows)


def _two_columns(logits: Array) -> Array:
    """Return logits (n, 2) of log-odds (n,), and others as they are."""
    return np.stack([np.zeros_like(logits), logits], -1) if logits.ndim == 1 else logits


def logits_of(probs: Array) -> FloatArray:
    """Return log-probabilities (n, classes) of probabilities, or of P(1), (n,) or (n, 1).

    >>> logits_of(np.array([0.0, 0.5])).round(1).tolist()
    [[0.0, -87.3], [-0.7, -0.7]]
    """
    exact = np.asarray(probs, np.float64)
    if exact.ndim == 1 or exact.shape[-1] == 1:
        exact = np.stack([1 - exact.reshape(-1), exact.reshape(-1)], -1)
    if not ((exact >= 0) & (exact <= 1 + 1e-4)).all():
        raise ValueError("probabilities must be in [0, 1], got NaN, negative or larger values")
    return np.asarray(np.log(np.maximum(exact, FLOOR)))
