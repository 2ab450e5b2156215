"""Shards of inputs of models: arrays, or text and other columns, in files that are not predictions.

They are opened as datasets. Rules by which prediction files find scores and splits do not apply.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import PurePath

from calibrant._core.messages import comma_separated
from calibrant.data import formats
from calibrant.data.arrow_files import ArrowReader
from calibrant.data.columns import Columns, OpenFiles
from calibrant.data.csv_files import CsvFile
from calibrant.data.dataset import Dataset, opened_shards
from calibrant.data.files import ShardFiles, find_shards
from calibrant.data.formats import Reader
from calibrant.data.json_lines import JsonLines
from calibrant.data.readers import safetensors_reader

INPUT_FORMATS: dict[str, Callable[[str], Reader]] = {
    ".npz": formats.NpzReader,
    ".safetensors": safetensors_reader,
    ".parquet": formats.ParquetReader,
    ".arrow": ArrowReader,
    ".feather": ArrowReader,
    ".npy": formats.NpyReader,
    ".csv": CsvFile,
    ".jsonl": JsonLines,
}


def open_inputs(path: str | os.PathLike[str], *, skip_bad: bool = False) -> Dataset:
    """Open a file, folder or glob of inputs; only headers are read.

    Files of text (``.csv``, ``.jsonl``) are read once, to count their rows.

    Parameters
    ----------
    path
        A file, a folder or a glob of shards, in natural order. Stems of ``.npy`` files are keys,
        with the number of a shard in front, such as ``0_inputs.npy`` and ``0_labels.npy``.
    skip_bad : bool
        Leave out files that cannot be opened; ``skipped`` of the dataset has their errors by path.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "texts.jsonl")
    ...     with open(path, "w") as file:
    ...         _ = file.write('{"text": "good", "label": 1}')
    ...     [*open_inputs(path).files[0]]
    ['text', 'label']
    """
    place, files = os.fspath(path), OpenFiles(INPUT_FORMATS)
    if os.path.isfile(place) and PurePath(place).suffix not in INPUT_FORMATS:
        suffixes = comma_separated(INPUT_FORMATS)
        raise ValueError(f"{place} holds no inputs: the suffix must be one of {suffixes}")
    alone = place.endswith(".npy") and not re.search(r"[*?[]", place)
    shards = [{PurePath(place).stem: place}] if alone else find_shards(place, INPUT_FORMATS)
    arrays, skipped = opened_shards(place, shards, partial(_opened, files), skip_bad=skip_bad)
    return Dataset(place, arrays, skipped=skipped)


def _opened(files: OpenFiles, shard: ShardFiles) -> Columns:
    """Return the arrays of a shard by key."""
    arrays: Columns = {}
    for key, file in shard.items():
        columns = files.columns(file)
        arrays |= {key: next(iter(columns.values()))} if file.endswith(".npy") else columns
    return arrays
