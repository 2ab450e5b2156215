"""The log-partition table of a split, from its shards or from files that keep it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrant._core import checks
from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant._core.chunks import examples
from calibrant._core.rows import Sample
from calibrant.calibrators import logpartition
from calibrant.calibrators.logpartition import Records, concatenate, tabulate
from calibrant.data.columns import Column
from calibrant.data.dataset import Split
from calibrant.data.shards import Chunk, Shard
from calibrant.data.storage import is_remote
from calibrant.data.tensor_files import write_safetensors

MAX_EXAMPLES = 1 << 22
"""Examples whose table is held in memory, some gigabytes. Of more, a fit uses a random sample."""
FORMAT = 1
_SETTINGS = ("LOWEST", "OCTAVES", "TOP", "LARGEST_GAP", "LEAST_REST")
"""Constants of the table: a file that was written with others is of no use."""


def records_of(split: Split) -> Records:
    """Return the table of all labelled rows of a split; logits are never held whole.

    If the dataset has a cache, the table of each shard is kept there, and read the next time.
    """
    if split.dataset.cache is None:
        shards = split.walk(_tabulated, "logits", "labels", "sample_weight")
    else:
        shards = iter(_cached(split, Path(split.dataset.cache)))
    tables = [table for shard in shards for table in shard]
    checks.check_some(len(tables))
    return concatenate(tables)


def _tabulated(chunks: Iterator[Chunk]) -> list[Records]:
    """Return the table of a shard; none without labels."""
    tables = []
    for chunk in chunks:
        checked = examples(chunk.logits, chunk.labels, chunk.get("sample_weight"))
        if (checked.labels != IGNORED).any():
            tables.append(tabulate(checked))
    return [concatenate(tables)] if tables else []


def bounded(split: Split, seed: int = 0, most: int | None = None) -> Split:
    """Return a split with a random sample of its labels, if it has more than ``most`` rows."""
    most = MAX_EXAMPLES if most is None else most
    if split.rows <= most:
        return split
    return replace(split, sample=Sample(most / split.rows, seed))


def _cached(split: Split, folder: Path) -> list[list[Records]]:
    """Return the table of each shard: from the folder, or else made and written to it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / _file_name(split, shard) for shard in split.shards]
    found = {path: known for path in paths if (known := _load(path)) is not None}
    missing = {p: s for p, s in zip(paths, split.shards, strict=True) if p not in found}
    rest = replace(split, shards=list(missing.values()))
    made = rest.walk(_tabulated, "logits", "labels", "sample_weight") if missing else ()
    for path, shard in zip(missing, made, strict=True):
        _save(path, shard)  # at once, so that a killed run goes on from here
        found[path] = shard
    return [found[path] for path in paths]


def _file_name(split: Split, shard: Shard) -> str:
    """Return the name of the file of a shard's table: a digest of all that it is made from."""
    settings = [FORMAT, *(getattr(logpartition, name) for name in _SETTINGS)]
    sampled = [] if split.sample is None else [*split.sample, shard.first]
    about = [split.domain, split.floor, split.dataset.multilabel, *sampled]
    names = {"logits": "logits", "labels": "labels", "weight": split.dataset.sample_weight}
    sources = {name: _identity(shard.column(stored)) for name, stored in names.items() if stored}
    key = json.dumps([settings, about, sources], sort_keys=True)
    return f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"


def _identity(column: Column) -> list[Any]:
    """Return what tells a column from others: the file as it is now, or the values themselves."""
    if column.values is None:
        path = column.path if is_remote(column.path) else os.path.abspath(column.path)
        return [path, column.key, list(column.fingerprint or ())]
    values = np.ascontiguousarray(column.values)
    return [values.dtype.str, list(values.shape), hashlib.sha256(values.tobytes()).hexdigest()]


def _load(path: Path) -> list[Records] | None:
    """Return what :func:`_save` wrote; None if there is no file, or if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
        classes = int(arrays.pop("classes"))
        return [Records(**arrays, classes=classes)] if classes else []
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _save(path: Path, shard: list[Records]) -> None:
    """Write the table of a shard, at once; no classes stand for no table."""
    arrays: dict[str, Any] = {"classes": np.array(0)}
    for records in shard:
        values = {field.name: getattr(records, field.name) for field in fields(Records)}
        arrays |= {name: np.asarray(value) for name, value in values.items()}
    with replacing(path) as temporary:
        write_safetensors(temporary, arrays)
