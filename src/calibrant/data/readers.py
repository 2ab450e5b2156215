"""Readers and writers of prediction files by the suffix of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from calibrant.data import arrow_files, formats
from calibrant.data.arrow_files import ArrowReader
from calibrant.data.csv_files import csv_reader, write_csv
from calibrant.data.formats import Reader
from calibrant.data.keys import CLASS_NAMES, full_key, split_names
from calibrant.data.safetensors_stream import SafetensorsStream
from calibrant.data.storage import is_remote
from calibrant.data.tables import BY_RULES, ColumnNames, TableReader, layout_of, table_of
from calibrant.data.torch_files import TorchReader


def arrow_reader(path: str, named: ColumnNames = BY_RULES) -> Reader:
    """Open a ``.arrow`` or ``.feather`` file, as a ``.parquet`` file."""
    return _with_layout(ArrowReader(path), named)


def parquet_reader(path: str, named: ColumnNames = BY_RULES) -> Reader:
    """Open a ``.parquet`` file, with a column per class if the rules of tables find any."""
    return _with_layout(formats.ParquetReader(path), named)


def _with_layout(reader: formats.ParquetReader, named: ColumnNames) -> Reader:
    path = reader.path
    headers = reader.headers
    single = [name for name, header in headers.items() if len(header.shape) == 1]
    lists = [name for name in headers if name not in single]
    pairs = [name for name in split_names(single) if full_key(name, "labels") in headers]
    if split_names(lists) or any(pairs) or {*lists} & {*named.logits, *named.probs}:
        return reader  # arrays under the keys of other formats
    layout = layout_of(single, path, named)
    if not layout.scores:
        return reader
    for column in chain.from_iterable(layout.stacked.values()):
        if headers[column].dtype.kind not in "biuf":
            raise ValueError(f"{path}: {column} must be numbers, got {headers[column].dtype.name}")
    reader.optional &= {*layout.others}
    others = [*layout.others, *lists]
    columns = [name for name in headers if name in lists or name in layout.columns]
    return TableReader(reader, replace(layout, others=others, columns=columns))


def safetensors_reader(path: str) -> Reader:
    """Open a ``.safetensors`` file: mapped or, from an object store, through its stream."""
    return SafetensorsStream(path) if is_remote(path) else formats.SafetensorsReader(path)


def write_parquet(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as columns, or as a column per class if the classes have names."""
    named = CLASS_NAMES in arrays
    formats.write_parquet(path, table_of(arrays, ".parquet") if named else arrays)


def write_arrow(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as columns, or as a column per class if the classes have names."""
    named = CLASS_NAMES in arrays
    arrow_files.write_arrow(path, table_of(arrays, ".arrow") if named else arrays)


ARRAY_FORMATS: dict[str, Callable[[str], Reader]] = {
    ".npz": formats.NpzReader,
    ".safetensors": safetensors_reader,
    ".parquet": parquet_reader,
    ".arrow": arrow_reader,
    ".feather": arrow_reader,
    ".npy": formats.NpyReader,
}
OTHER_FORMATS: dict[str, Callable[[str], Reader]] = {
    ".csv": csv_reader,
    ".pt": TorchReader,
    ".pth": TorchReader,
}
"""Formats of many other things: in a folder they count if there are no others."""
READERS = ARRAY_FORMATS | OTHER_FORMATS


def readers_with(named: ColumnNames) -> dict[str, Callable[[str], Reader]]:
    """Return the readers, those of tables with the columns that a user names."""
    tables = {".csv": csv_reader, ".parquet": parquet_reader}
    tables |= dict.fromkeys((".arrow", ".feather"), arrow_reader)
    return READERS | {suffix: partial(read, named=named) for suffix, read in tables.items()}


WRITERS: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    ".npz": formats.write_npz,
    ".safetensors": formats.write_safetensors,
    ".parquet": write_parquet,
    ".csv": write_csv,
    ".arrow": write_arrow,
    ".feather": write_arrow,
}
ARROW_TYPES = (".parquet", ".arrow", ".feather")
"""Formats that hold whatever Arrow does, such as dates and lists of different lengths."""
TABLES = (".csv", *ARROW_TYPES)
"""Formats of tables, with a column per class."""
