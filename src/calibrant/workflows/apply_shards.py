"""Calibrate shards one by one, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibrant._core.checks import warn
from calibrant._core.chunks import Progress
from calibrant._core.engines import mapped
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.fingerprint import calibrator_fingerprint
from calibrant.data.columns import Columns, array_column
from calibrant.data.dataset import Dataset, Split, as_dataset
from calibrant.data.keys import full_key
from calibrant.data.outputs import OutputFolder, output_folder
from calibrant.data.readers import WRITERS
from calibrant.data.storage import Fingerprint, is_remote, storage_of
from calibrant.retrain.adapter import as_calibrator
from calibrant.retrain.maccal import MaCCal
from calibrant.workflows.apply import (
    calibrated_by,
    check_fits,
    check_outside_of,
    part_of_input,
    scored_splits,
    write_splits,
)

RECEIPTS = ".calibrant"
"""Folder inside the output with a file for each finished shard: what it was made from."""


@dataclass(frozen=True)
class WrittenShards:
    """Files that a run of :func:`apply_shards` wrote, and those of earlier runs that it kept."""

    written: list[str]
    kept: list[str]
    changed: list[str]  # written again, since the input or the calibrator is another

    def describe(self) -> str:
        """Return a sentence about the run."""
        kept = f", kept {len(self.kept):,} of an earlier run" if self.kept else ""
        again = f" ({len(self.changed):,} of them again, since the input or the calibrator changed)"
        count = len(self.written)
        shards = f"{count:,} shard{'s' * (count != 1)}"
        return f"wrote {shards}{again if self.changed else ''}{kept}"


@dataclass(frozen=True)
class _Job:
    """One shard to calibrate, and the file to write."""

    dataset: Dataset
    out: OutputFolder
    name: str
    made_from: str

    @property
    def path(self) -> str:
        """Path of the input, for messages."""
        return self.dataset.path

    @property
    def target(self) -> str:
        """Path of the output."""
        return self.out.address(self.name)

    @property
    def receipt(self) -> str:
        """Name of the file that tells what the output was made from."""
        return f"{RECEIPTS}/{self.name}.json"

    @property
    def rows(self) -> int:
        """Number of examples."""
        return sum(split.rows for split in scored_splits(self.dataset))

    def earlier(self) -> str | None:
        """Return what the finished output was made from; None if there is none."""
        try:
            known = json.loads(self.out.read(self.receipt))
            whole = self.out.stamp(self.name) == known["output"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return str(known.get("made_from")) if whole else None


def apply_shards(
    calibrator: Calibrator | MaCCal,
    data: str | os.PathLike[str] | Dataset,
    out: str | os.PathLike[str],
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> WrittenShards:
    """Calibrate each shard of a dataset into a file of its own, under the same name.

    The files have the contents that :func:`calibrant.apply` gives for one shard. Each takes its
    name when it is complete. A run that was interrupted is repeated with the same call: finished
    shards are kept as long as the input, the calibrator and the output are unchanged, and the
    others are written. Shards of ``.npy`` files become ``.npz`` files, and what cannot be written
    becomes ``.npz`` as well.

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
    executor : concurrent.futures.Executor, optional
        Each shard becomes a task. A task that is run twice writes the same file again.
    progress : callable, optional
        Called with (examples done, examples in all) after each shard.

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
    module = as_calibrator(calibrator)
    dataset = as_dataset(data, multilabel=module.multilabel)
    shapes = {}
    for split in scored_splits(dataset):
        check_fits(module, split)
        shapes[split.name] = split.shape
    jobs = _jobs(module, dataset, output_folder(os.fspath(out)), shapes)
    _warn_of_orphans(jobs)
    todo = {job.target: earlier for job in jobs if (earlier := job.earlier()) != job.made_from}
    waiting = [job for job in jobs if job.target in todo]
    total = sum(job.rows for job in jobs)
    done = total - sum(job.rows for job in waiting)
    task = partial(_write, module)
    for job, _ in zip(waiting, _results(task, waiting, executor), strict=True):
        done += job.rows
        if progress is not None:
            progress(done, total)
    kept = [job.target for job in jobs if job.target not in todo]
    changed = [target for target, earlier in todo.items() if earlier is not None]
    return WrittenShards(list(todo), kept, changed)


def _results(task: Any, jobs: list[_Job], executor: Executor | None) -> Iterator[None]:
    return map(task, jobs) if executor is None else mapped(executor, task, jobs)


def _jobs(
    calibrator: Calibrator,
    dataset: Dataset,
    out: OutputFolder,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[_Job]:
    """Return a job for each file with scores, and create the folder."""
    learned, jobs = calibrator_fingerprint(calibrator), []
    ones = [replace(dataset, path=_path(file), files=[file]) for file in dataset.files]
    scored = [one for one in ones if any(name in shapes for name in one.splits)]
    places = [_place(one.path) for one in scored]
    home = os.path.commonpath(map(os.path.dirname, places))
    for one, place in zip(scored, places, strict=True):
        stem, suffix = os.path.splitext(os.path.relpath(place, home))
        name = Path(stem + (suffix if suffix in WRITERS else ".npz")).as_posix()
        jobs.append(_Job(_with_shapes(one, shapes), out, name, _made_from(one, learned)))
    check_outside(dataset, [job.target for job in jobs])
    out.create()
    return jobs


def _place(path: str) -> str:
    """Return the place of a file in its storage, from the root on."""
    return os.path.join(os.sep, storage_of(path)[1]) if is_remote(path) else os.path.abspath(path)


def check_outside(dataset: Dataset, targets: Iterable[str]) -> None:
    """Raise if a file to be written is part of the input."""
    for target in targets:
        if not is_remote(target):
            check_outside_of(dataset, Path(target))
        elif target in {c.path for arrays in dataset.files for c in arrays.values()}:
            raise part_of_input(target, dataset)


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


def _made_from(one: Dataset, learned: str) -> str:
    """Return a digest of the fingerprints of the files of a shard and of the calibrator."""
    files: dict[str, Fingerprint | None] = {
        _place(c.path): c.fingerprint for c in one.files[0].values()
    }
    return hashlib.sha256(json.dumps([learned, sorted(files.items())]).encode()).hexdigest()


def _warn_of_orphans(jobs: list[_Job]) -> None:
    """Warn of shards of earlier runs whose input is gone: they would still be counted."""
    out, ours, orphans = jobs[0].out, {job.receipt for job in jobs}, []
    for receipt in out.names(RECEIPTS):
        name = receipt.removeprefix(f"{RECEIPTS}/").removesuffix(".json")
        if receipt in ours or not out.exists(name):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            storage, place = storage_of(json.loads(out.read(receipt))["input"])
            if not storage.exists(storage.path(place)):
                orphans.append(out.address(name))
    if orphans:
        names = comma_separated(orphans[:5]) + (" ..." if len(orphans) > 5 else "")
        warn(f"the input of {names} is gone: remove what is not wanted any more")


def _write(calibrator: Calibrator, job: _Job) -> None:
    """Write one shard, and then its receipt."""
    splits: list[Split] = scored_splits(job.dataset)
    try:
        with job.out.file(job.name) as target:
            write_splits(job.dataset, splits, target, calibrated_by(calibrator))
        source = job.path if is_remote(job.path) else os.path.abspath(job.path)
        output = job.out.stamp(job.name)
        content = {"input": source, "made_from": job.made_from, "output": output}
        job.out.write(job.receipt, json.dumps(content))
    except OSError as problem:
        raise OSError(
            problem.errno,
            f"{job.target} was not written ({problem.strerror or problem}); finished shards are "
            "kept: remove the cause, and run the same again",
        ) from problem
