"""Write a file for each shard, with receipts by which an interrupted run goes on where it was."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from calibrant._core.checks import warn
from calibrant._core.engines import current_work, silently
from calibrant._core.messages import comma_separated
from calibrant.data.dataset import Dataset
from calibrant.data.files import WRITERS
from calibrant.data.formats import OutputFolder, is_remote, storage_of
from calibrant.data.shards import BadShard, Report, run_all

RECEIPTS = ".calibrant"
"""Folder inside the output with a file for each finished shard: what it was made from."""


@dataclass(frozen=True)
class WrittenShards:
    """Files that a run wrote, those of earlier runs that it kept, and errors of bad shards."""

    written: list[str]
    kept: list[str]
    changed: list[str]  # written again, since the input or the maker is another
    maker: str = "calibrator"
    skipped: Mapping[str, str] = field(default_factory=dict)  # messages by the paths of inputs

    def describe(self) -> str:
        """Return a sentence about the run."""
        kept = f", kept {len(self.kept):,} of an earlier run" if self.kept else ""
        cause = f"the input or the {self.maker} changed"
        again = f" ({len(self.changed):,} of them again, since {cause})" if self.changed else ""
        count = len(self.written)
        return f"wrote {count:,} shard{'s' * (count != 1)}{again}{kept}"


@dataclass(frozen=True)
class _ShardJob:
    """One shard to make a file from, and its name in the output."""

    dataset: Dataset
    out: OutputFolder
    name: str
    made_from: str
    rows: int

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

    def noted(self) -> dict[str, Any]:
        """Return the content of the receipt; empty if there is none."""
        try:
            known = json.loads(self.out.read(self.receipt))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def earlier(self) -> str | None:
        """Return what the finished output was made from; None if there is none."""
        known = self.noted()
        try:
            whole = "output" in known and self.out.stamp(self.name) == known["output"]
        except OSError:
            return None
        return str(known.get("made_from")) if whole else None


Write: TypeAlias = Callable[[Dataset, Path, Report], None]
"""Makes a file from a shard, and reports its rows as they are done."""


def shard_jobs(
    dataset: Dataset,
    shards: Sequence[Dataset],
    out: OutputFolder,
    maker: str,
    *,
    rows: Callable[[Dataset], int],
    formats: Iterable[str] = WRITERS,
) -> list[_ShardJob]:
    """Return a job for each shard of a dataset, and create the folder of the output.

    Outputs have the names of their inputs, and folders below the one that all shards share. The
    suffix becomes ``.npz`` if it is none of ``formats``. ``maker`` is the fingerprint of what makes
    the files.
    """
    places = [_place(shard.path) for shard in shards]
    home = os.path.commonpath(map(os.path.dirname, places))
    jobs = []
    for shard, place in zip(shards, places, strict=True):
        files = {_place(c.path): c.fingerprint for c in shard.files[0].values()}
        made_from = hashlib.sha256(json.dumps([maker, sorted(files.items())]).encode()).hexdigest()
        stem, suffix = os.path.splitext(os.path.relpath(place, home))
        name = Path(stem + (suffix if suffix in formats else ".npz")).as_posix()
        jobs.append(_ShardJob(shard, out, name, made_from, rows(shard)))
    for job in jobs:
        _check_outside(dataset, job.target)
    out.create()
    return jobs


def write_shards(
    jobs: Sequence[_ShardJob],
    write: Write,
    *,
    maker: str = "calibrator",
    skip_bad: bool = False,
) -> WrittenShards:
    """Write the files that are not finished, or were made from something else.

    With ``skip_bad`` the errors of shards that cannot be used are returned, not raised.
    """
    earlier = {job.target: job.earlier() for job in jobs}
    waiting = [job for job in jobs if earlier[job.target] != job.made_from]
    total = sum(job.rows for job in jobs)
    done = total - sum(job.rows for job in waiting)
    progress = current_work().progress

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    written, skipped = [], {}
    with silently():  # of shards: rows are reported when they are written
        results = list(run_all(partial(_finish, write, skip_bad), waiting, report))
    for job, problem in zip(waiting, results, strict=True):
        if problem is None:
            written.append(job.target)
        else:
            skipped[job.path] = problem.message
            if earlier[job.target] is not None:
                warn(f"{job.target} was made from an earlier version of its input: remove it")
    kept = [job.target for job in jobs if earlier[job.target] == job.made_from]
    changed = [target for target in written if earlier[target] is not None]
    _check_alone([job for job in jobs if job.path not in skipped])
    return WrittenShards(written, kept, changed, maker, skipped)


def _check_alone(jobs: Iterable[_ShardJob]) -> None:
    """Raise if another run, with another calibrator or input, has written to the same folder.

    Locks would not do: processes of one run write side by side, and object stores have none.
    """
    others = [job.target for job in jobs if job.noted().get("made_from") != job.made_from]
    if others:
        names = comma_separated(others[:5]) + (" ..." if len(others) > 5 else "")
        raise ValueError(
            f"another run has written {names} meanwhile: let it end, and run the same again, into "
            "another folder if both results are wanted"
        )


def _finish(write: Write, skip_bad: bool, job: _ShardJob, report: Report) -> BadShard | None:
    """Write one shard, and then its receipt."""
    try:
        with job.out.file(job.name) as target:
            write(job.dataset, target, report)
        source = job.path if is_remote(job.path) else os.path.abspath(job.path)
        output = job.out.stamp(job.name)
        content = {"input": source, "made_from": job.made_from, "output": output}
        job.out.write(job.receipt, json.dumps(content))
    except OSError as problem:
        message = (
            f"{job.target} was not written ({problem.strerror or problem}); finished shards are "
            "kept: remove the cause, and run the same again"
        )
        raise OSError(*filter(None, [problem.errno]), message) from problem
    except (TypeError, ValueError) as problem:
        if not skip_bad:
            raise
        return BadShard(str(problem))
    return None


def warn_of_orphans(jobs: Sequence[_ShardJob]) -> None:
    """Warn of shards of earlier runs whose input is gone: they would still be counted."""
    out, ours, orphans = jobs[0].out, {job.receipt for job in jobs}, []
    for receipt in out.names(RECEIPTS):
        name = receipt.removeprefix(f"{RECEIPTS}/").removesuffix(".json")
        if receipt in ours or not out.exists(name):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            storage, place = storage_of(json.loads(out.read(receipt))["input"])
            if not storage.exists(place):
                orphans.append(out.address(name))
    if orphans:
        names = comma_separated(orphans[:5]) + (" ..." if len(orphans) > 5 else "")
        warn(f"the input of {names} is gone: remove what is not wanted any more")


def _place(path: str) -> str:
    """Return the place of a file in its storage, from the root on."""
    return (
        os.path.join(os.sep, str(storage_of(path)[1])) if is_remote(path) else os.path.abspath(path)
    )


def _check_outside(dataset: Dataset, target: str) -> None:
    """Raise if a file to be written is part of the input, or would be read with it."""
    inputs = {column.path for arrays in dataset.files for column in arrays.values()}
    if is_remote(target):
        inside = target in inputs
    else:
        place, source = os.path.realpath(target), os.path.realpath(dataset.path)
        beside = os.path.dirname(place) == source
        is_glob = not os.path.exists(dataset.path)
        inside = fnmatch.fnmatch(place, source) if is_glob else beside
        inside |= place in map(os.path.realpath, inputs)
    if inside:
        raise ValueError(f"{target} is part of the input {dataset.path}: write to another place")
