"""Calibrate prediction files: into one file, or shard by shard."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from calibrant._core.atomic_files import temporary_folder
from calibrant._core.class_names import class_order
from calibrant._core.engines import current_work, use
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.calibrators.description import calibrator_fingerprint
from calibrant.data.arrow_files import joined_columns
from calibrant.data.dataset import Dataset, Split
from calibrant.data.files import ARROW_TYPES, Data, as_dataset, check_writable, write_arrays
from calibrant.data.formats import Array, NoArrayError, OutputFolder
from calibrant.data.shards import (
    SCORES,
    Chunk,
    Column,
    Report,
    array_column,
    full_key,
    joint_header,
    located,
    read_all,
)
from calibrant.workflows.effect import _check_inputs
from calibrant.workflows.receipts import (
    WrittenShards,
    _check_outside,
    shard_jobs,
    warn_of_orphans,
    write_shards,
)


def apply(
    calibrator: Calibrator,
    data: Data,
    out: str | os.PathLike[str],
) -> None:
    """Calibrate every split of a prediction file, and write the result as one file.

    Logits become calibrated logits (float32), ``probs`` calibrated probabilities (float32 or
    wider). All other arrays are written as they are, but for ``probs`` beside logits; the rows of
    shards follow one another. Columns of ``.parquet`` files keep their types in a ``.parquet``
    file. A warning names what cannot be kept, before anything is written: Python objects, values
    that shards do not agree on, and in other formats what is no array, such as dates, lists of
    different lengths and missing values.

    Chunks are gathered in a temporary folder beside ``out``, of the size of the result; the
    writers of ``.safetensors`` and ``.parquet`` hold it in memory. An interrupted run leaves the
    old ``out`` or the new one, and perhaps that folder, whose name starts with a dot; the next
    run removes it when nothing was written to it for an hour.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    data : path, Dataset, or mapping
        A prediction file, a folder, a glob, or arrays by their keys in a file.
    out : path
        File to write, in the format of its suffix. It may not be part of the input.

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.calibrators import TemperatureScaling
    >>> from calibrant.data import open_dataset, sample_path
    >>> data = open_dataset(sample_path())
    >>> fitted = TemperatureScaling().fit(data.split("val").logits, data.split("val").labels)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "calibrated.npz")
    ...     apply(fitted, data, out)
    ...     calibrated = open_dataset(out).split("test").logits
    >>> calibrated.shape, float(calibrated.max())
    ((10000, 10), 0.0)
    """
    check_calibrator(calibrator)
    dataset = as_dataset(data, multilabel=calibrator.multilabel)

    splits = _scored_splits(dataset)
    for split in splits:
        check_fits(calibrator, split)
        split.warn_of_mistakes(copies=False)
    make = partial(_calibrated, calibrator, dataset.class_names)
    _write_splits(dataset, splits, Path(out), make)


def apply_shards(
    calibrator: Calibrator,
    data: str | os.PathLike[str] | Dataset,
    out: str | os.PathLike[str],
) -> WrittenShards:
    """Calibrate each shard of a dataset into a file of its own, under the same name.

    The files have the contents that :func:`calibrant.apply` gives for one shard. Each takes its
    name when it is complete. A run that was interrupted is repeated with the same call: finished
    shards are kept as long as the input, the calibrator and the output are unchanged, and the
    others are written. A task that an executor runs twice writes the same file again. Shards of
    ``.npy`` files become ``.npz`` files, and what cannot be written becomes ``.npz`` as well.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    data : path or Dataset
        A folder or a glob of shards, or a file.
    out : path
        A folder, created where its parent exists, or an address such as ``s3://bucket/calibrated``,
        to which whole files are copied. It may not hold the input. Folders of the input below the
        one that all shards share are made there as well.

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.calibrators import TemperatureScaling
    >>> from calibrant.data import save_predictions
    >>> shard = {"logits": np.eye(3), "labels": np.array([0, 1, 1])}
    >>> fitted = TemperatureScaling().fit(2 * np.eye(3)[[0, 1, 1, 2] * 9], [0, 1, 2, 2] * 9)
    >>> with tempfile.TemporaryDirectory() as home:
    ...     os.mkdir(f"{home}/raw")
    ...     for i in range(2):
    ...         save_predictions(f"{home}/raw/{i}.npz", shard)
    ...     first = apply_shards(fitted, f"{home}/raw", f"{home}/calibrated")
    ...     second = apply_shards(fitted, f"{home}/raw", f"{home}/calibrated")
    >>> first.describe(), second.describe()
    ('wrote 2 shards', 'wrote 0 shards, kept 2 of an earlier run')
    """
    check_calibrator(calibrator)
    dataset = as_dataset(data, multilabel=calibrator.multilabel)
    shapes = {}
    for split in _scored_splits(dataset):
        check_fits(calibrator, split)
        split.warn_of_mistakes(copies=False)
        shapes[split.name] = split.shape
    folder, learned = OutputFolder(os.fspath(out)), calibrator_fingerprint(calibrator)
    shards = _scored_shards(dataset, shapes)
    jobs = shard_jobs(dataset, shards, folder, learned, rows=_scored_rows)
    warn_of_orphans(jobs)
    make = partial(_calibrated, calibrator, dataset.class_names)
    return write_shards(jobs, partial(_write_shard, make))


def _scored_rows(one: Dataset) -> int:
    return sum(split.rows for split in _scored_splits(one))


def _scored_shards(dataset: Dataset, shapes: Mapping[str, tuple[int, ...]]) -> list[Dataset]:
    """Return a dataset for each file that has scores, of these shapes by split.

    An empty shard may not know the shape of its scores, and gets that of the others.
    """
    shards = []
    for file in dataset.files:
        scores = [column.path for key, column in file.items() if key.endswith(SCORES)]
        path = next(iter(scores), next(iter(file.values())).path)
        one = replace(dataset, path=path, files=[file])
        if shapes.keys().isdisjoint(one.splits):
            continue
        arrays = dict(file)
        for split in _scored_splits(one):
            if split.rows == 0 and split.shape != shapes[split.name]:
                key = full_key(split.name, split.domain)
                empty = np.zeros((0, *shapes[split.name]), np.float32)
                arrays[key] = array_column(key, empty, path)
        shards.append(replace(one, files=[arrays]))
    return shards


def _write_shard(make: Make, shard: Dataset, target: Path, report: Report) -> None:
    """Write one shard."""
    _write_splits(shard, _scored_splits(shard), target, make)
    report(_scored_rows(shard))


def _scored_splits(dataset: Dataset) -> list[Split]:
    """Return the splits that have logits or probs; an error if there are none."""
    splits = [dataset.split(name) for name in dataset.splits]
    scored = [split for split in splits if split.shards[0].domain]
    if not scored:
        raise ValueError(f"{dataset.path} has no logits or probs to calibrate or decide on")
    return scored


Make: TypeAlias = Callable[[Split, Path], Mapping[str, Array]]
"""Makes columns of a split, by name; a folder is for files that hold them meanwhile."""


def _write_splits(
    dataset: Dataset,
    splits: Sequence[Split],
    target: Path,
    make: Make,
    *,
    left_out: Sequence[str] = (),
) -> None:
    """Write the columns that ``make`` returns for each split, and all others but the scores.

    Columns ``left_out`` are not written.
    """

    def made(folder: Path) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for split in splits:
            with _part_of(splits, split):
                for name, values in make(split, folder).items():
                    arrays[full_key(split.name, name)] = values
        return arrays

    write_columns(dataset, target, made, left_out=left_out)


def write_columns(
    dataset: Dataset,
    target: Path,
    make: Callable[[Path], Mapping[str, Array]],
    *,
    left_out: Sequence[str] = (),
) -> None:
    """Write the arrays that ``make`` returns by key, and all others but the scores.

    ``make`` is called with a folder for files that hold arrays meanwhile. A warning names what
    cannot be kept.
    """
    _check_target(dataset, target)
    arrays: dict[str, Any] = {}
    problems = []
    with temporary_folder(target) as folder:
        for key, columns in _others(dataset, left_out).items():
            try:
                arrays[key] = _copied(columns, folder, target.suffix)
            except NoArrayError as problem:
                problems.append(f"{key} ({problem})")
        if problems:
            warnings.warn(f"left out: {comma_separated(problems)}", stacklevel=4)
        arrays |= make(folder)
        order = [key for files in dataset.files for key in files if key in arrays]
        ordered = {key: arrays[key] for key in dict.fromkeys([*order, *arrays])}
        write_arrays(target, ordered, dataset.table_names)


@contextmanager
def _part_of(splits: Sequence[Split], split: Split) -> Iterator[None]:
    """Report the progress of passes over one of some splits as that over all of them."""
    progress, total = current_work().progress, sum(one.rows for one in splits)
    before = sum(one.rows for one in takewhile(lambda one: one is not split, splits))
    if progress is None:
        yield
        return
    with use(progress=lambda done, _: progress(before + done, total)):
        yield


def _check_target(dataset: Dataset, target: Path) -> None:
    """Raise unless ``target`` can be written, and is not part of the input."""
    check_writable(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    _check_outside(dataset, str(target))


def check_fits(calibrator: Calibrator, split: Split) -> None:
    """Raise unless a calibrator takes the classes, scores and features of a split."""
    class_order(calibrator.class_names_, split.dataset.class_names, split.path)
    check_shape(calibrator, split.shape, split.path)
    _check_inputs(calibrator, split)
    if calibrator.input_columns == ("features",):
        width = split.shards[0].column("features").shape[1:]
        with located(split.path):
            calibrator.check_features(torch.empty(1, *width), (1, *split.shape[:-1]))


def check_shape(calibrator: Calibrator, shape: tuple[int, ...], where: str) -> None:
    """Raise unless a calibrator takes rows of scores of a shape."""
    calibrator.check_logits(torch.zeros(1, *shape, device=calibrator.device))
    if calibrator.one_logit and shape:
        kind = type(calibrator).__name__
        if shape == (1,):
            remedy = "write one column of them as (n,), with squeeze(-1)"
            raise ValueError(f"{where} has scores (n, 1), but {kind} takes (n,): {remedy}")
        raise ValueError(
            f"{where} has {math.prod(shape)} scores per row, but this {kind} was fitted on one "
            "logit per row"
        )


def _others(dataset: Dataset, left_out: Sequence[str]) -> dict[str, list[Column]]:
    """Return everything but the scores by key; no columns where shards do not agree."""
    others: dict[str, list[Column]] = {}
    known = set()
    for split in map(dataset.split, dataset.splits):
        for name in dict.fromkeys(name for shard in split.shards for name in shard.columns):
            having = [shard for shard in split.shards if name in shard.columns]
            columns = [shard.columns[name] for shard in having]
            known |= {(column.path, column.key) for column in columns}
            per_row = all(c.shape[:1] == (s.rows,) for c, s in zip(columns, having, strict=True))
            complete = columns if len(having) == len(split.shards) else []
            if name not in (*SCORES, *left_out):
                others[full_key(split.name, name)] = complete if per_row else _agreed(columns)
    single: dict[str, list[Column]] = {}  # class names, the last layer, single values
    for arrays in dataset.files:
        for key, column in arrays.items():
            if (column.path, column.key) not in known and key not in (*others, *left_out):
                single.setdefault(key, []).append(column)
    return others | {key: _agreed(columns) for key, columns in single.items()}


def _agreed(columns: Sequence[Column]) -> list[Column]:
    """Return the first of some arrays that are the same, bit by bit, or else nothing."""
    first, *others = columns
    if first.dtype.hasobject or not others:
        return [first]
    values = read_all([first])
    for column in others:
        if (column.dtype, column.shape) != (first.dtype, first.shape):
            return []
        if read_all([column]).tobytes() != values.tobytes():
            return []
    return [first]


def empty_array(folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in a mapped file, whose pages leave memory when that is short."""
    if not math.prod(shape) or not dtype.itemsize:
        return np.empty(shape, dtype)
    path = folder / f"{len(os.listdir(folder))}.npy"
    whole = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # else a full disk ends the process when it writes a page
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return whole


def _copied(columns: Sequence[Column], folder: Path, suffix: str) -> Any:
    """Return columns one after another, or raise NoArrayError."""
    if any(column.dtype.hasobject for column in columns):
        raise NoArrayError("Python objects")
    stored = [column.arrow() for column in columns] if suffix in ARROW_TYPES else []
    if (values := joined_columns(stored)) is not None:
        return values
    if len({column.shape[1:] for column in columns}) != 1:
        raise NoArrayError("shards differ")
    if not all(column.exact for column in columns):
        raise NoArrayError("only .parquet holds its type")
    shape, dtype = joint_header(columns)
    if not dtype.itemsize or (len(columns) == 1 and columns[0].mapped() is not None):
        return read_all(columns)  # text, whose length is unknown, or mapped already
    return read_all(columns, empty_array(folder, shape, dtype))


def probs_of(calibrator: Calibrator, calibrated: Array) -> Array:
    """Return the probabilities of calibrated logits, in double precision."""
    wide = torch.from_numpy(calibrated).double()
    each = wide.ndim == 1 or calibrator.multilabel
    return (wide.sigmoid() if each else wide.softmax(-1)).numpy()


def _calibrated(
    calibrator: Calibrator, names: Sequence[str] | None, split: Split, folder: Path
) -> dict[str, Array]:
    """Return the calibrated scores of a split whose classes have these names."""
    order = class_order(calibrator.class_names_, names, "the dataset")
    places = slice(None) if order is None else order  # of the classes of the fit
    stored = split.shards[0].column("logits")
    probs = split.domain == "probs"
    dtype = np.promote_types(stored.dtype, np.float32) if probs else np.dtype(np.float32)
    whole = empty_array(folder, (split.rows, *split.shape), dtype)
    start = 0

    def use(chunk: Chunk) -> None:
        nonlocal start
        logits = chunk["logits"][..., places]
        values = calibrator.transform(logits, calibrator.input_features(chunk))
        if probs:
            values = probs_of(calibrator, values)
        whole[start : start + len(values)][..., places] = values
        start += len(values)

    list(split.map(use, "logits", *calibrator.input_columns))
    return {split.domain: whole}
