"""Calibrate shards one by one, so that an interrupted run goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.calibrators.description import calibrator_fingerprint
from calibrant.data.columns import Columns, array_column
from calibrant.data.dataset import Dataset
from calibrant.data.keys import full_key
from calibrant.data.opening import as_dataset
from calibrant.data.shards import Report
from calibrant.data.storage import output_folder
from calibrant.workflows.apply import Make, calibrated_by, check_fits, scored_splits, write_splits
from calibrant.workflows.receipts import WrittenShards, shard_jobs, warn_of_orphans, write_shards


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
    for split in scored_splits(dataset):
        check_fits(calibrator, split)
        split.warn_if_probs()
        shapes[split.name] = split.shape
    shards = [_with_shapes(one, shapes) for one in _scored_files(dataset, shapes)]
    folder, learned = output_folder(os.fspath(out)), calibrator_fingerprint(calibrator)
    jobs = shard_jobs(dataset, shards, folder, learned, rows=_rows)
    warn_of_orphans(jobs)
    write = partial(_write, calibrated_by(calibrator, dataset.class_names))
    return write_shards(jobs, write)


def _rows(one: Dataset) -> int:
    return sum(split.rows for split in scored_splits(one))


def _scored_files(dataset: Dataset, splits: Container[str]) -> list[Dataset]:
    """Return a dataset for each file that has one of the splits."""
    ones = [replace(dataset, path=_path(file), files=[file]) for file in dataset.files]
    return [one for one in ones if any(name in splits for name in one.splits)]


def _path(file: Columns) -> str:
    """Return the path of the scores of a file, or of anything else in it."""
    scores = [column.path for key, column in file.items() if key.endswith(("logits", "probs"))]
    return next(iter(scores), next(iter(file.values())).path)


def _with_shapes(one: Dataset, shapes: Mapping[str, tuple[int, ...]]) -> Dataset:
    """Give the scores of an empty shard, which may not know it, the shape of the others."""
    (file,) = one.files
    for split in scored_splits(one):
        if split.rows == 0 and split.shape != shapes[split.name]:
            key = full_key(split.name, split.domain)
            empty = np.zeros((0, *shapes[split.name]), np.float32)
            file = {**file, key: array_column(key, empty, one.path)}
    return replace(one, files=[file])


def _write(make: Make, shard: Dataset, target: Path, report: Report) -> None:
    """Write one shard."""
    splits = scored_splits(shard)
    write_splits(shard, splits, target, make)
    report(sum(split.rows for split in splits))
