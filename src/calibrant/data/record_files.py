"""Log-partition tables of shards, and files that keep them for later fits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from calibrant._core import logpartition
from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant._core.chunks import examples
from calibrant._core.logpartition import Records, concatenate, tabulate
from calibrant.data.columns import Column
from calibrant.data.formats import write_safetensors
from calibrant.data.shards import Chunk
from calibrant.data.storage import is_remote

FORMAT = 1
SETTINGS = ("LOWEST", "OCTAVES", "TOP", "LARGEST_GAP", "LEAST_REST")
"""Constants of the table: a file that was written with others is of no use."""


def tabulated(chunks: Iterator[Chunk]) -> list[Records]:
    """Return the table of a shard; none without labels."""
    tables = []
    for chunk in chunks:
        checked = examples(chunk.logits, chunk.labels, chunk.get("sample_weight"))
        if (checked.labels != IGNORED).any():
            tables.append(tabulate(checked))
    return [concatenate(tables)] if tables else []


class RecordFiles:
    """A folder with the tables of shards, under names that tell what they were made from."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, about: Any, columns: dict[str, Column]) -> Path:
        """Return the file for the columns of a shard, read in a way that ``about`` describes."""
        settings = [FORMAT, *(getattr(logpartition, name) for name in SETTINGS)]
        sources = {name: _identity(column) for name, column in columns.items()}
        key = json.dumps([settings, about, sources], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"

    def load(self, path: Path) -> list[Records] | None:
        """Return what :meth:`save` wrote; None if there is no file, or if it is damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(path)
            classes = int(arrays.pop("classes"))
            return [Records(**arrays, classes=classes)] if classes else []
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def save(self, path: Path, shard: list[Records]) -> None:
        """Write the table of a shard, at once; no classes stand for no table."""
        arrays: dict[str, Any] = {"classes": np.array(0)}
        for records in shard:
            values = {field.name: getattr(records, field.name) for field in fields(Records)}
            arrays |= {name: np.asarray(value) for name, value in values.items()}
        with replacing(path) as temporary:
            write_safetensors(temporary, arrays)


def _identity(column: Column) -> list[Any]:
    """Return what tells a column from others: the file as it is now, or the values themselves."""
    if column.values is None:
        path = column.path if is_remote(column.path) else os.path.abspath(column.path)
        return [path, column.key, list(column.fingerprint or ())]
    values = np.ascontiguousarray(column.values)
    return [values.dtype.str, list(values.shape), hashlib.sha256(values.tobytes()).hexdigest()]
