"""The log-partition table of a split, from its shards or from files that keep it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibrant._core import checks
from calibrant._core.logpartition import Records, concatenate
from calibrant._core.sampling import Sample
from calibrant.data.dataset import Split
from calibrant.data.record_files import RecordFiles, tabulated
from calibrant.data.shards import Shard

MOST = 1 << 22
"""Examples whose table is held in memory, some gigabytes. Of more, a fit uses a random sample."""
COLUMNS = ("logits", "labels", "sample_weight")


def records_of(split: Split) -> Records:
    """Return the table of all labelled rows of a split; logits are never held whole.

    If the dataset has a cache, the table of each shard is kept there, and read the next time.
    """
    tables = [table for shard in _walked(split) for table in shard]
    checks.check_some(len(tables))
    return concatenate(tables)


def bounded(split: Split, seed: int = 0, most: int | None = None) -> Split:
    """Return a split with a random sample of its labels, if it has more than ``most`` rows."""
    most = MOST if most is None else most
    if split.rows <= most:
        return split
    return replace(split, sample=Sample(most / split.rows, seed))


def _walked(split: Split) -> list[list[Records]]:
    if split.dataset.cache is None:
        return list(split.walk(tabulated, *COLUMNS))
    files = RecordFiles(split.dataset.cache)
    paths = [_path(files, split, shard) for shard in split.shards]
    found = {path: known for path in paths if (known := files.load(path)) is not None}
    missing = {p: s for p, s in zip(paths, split.shards, strict=True) if p not in found}
    rest = replace(split, shards=list(missing.values()))
    walked = rest.walk(tabulated, *COLUMNS) if missing else ()
    for path, shard in zip(missing, walked, strict=True):
        files.save(path, shard)  # at once, so that a killed run goes on from here
        found[path] = shard
    return [found[path] for path in paths]


def _path(files: RecordFiles, split: Split, shard: Shard) -> Path:
    """Return the file of a shard's table, named by all that it is made from."""
    names = {"logits": "logits", "labels": "labels", "weight": split.dataset.sample_weight}
    columns = {name: shard.column(stored) for name, stored in names.items() if stored}
    sampled = [] if split.sample is None else [*split.sample, shard.first]
    return files.path([split.domain, split.floor, split.dataset.multilabel, *sampled], columns)
