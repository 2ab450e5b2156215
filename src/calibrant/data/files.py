"""Prediction files by the suffix of their names: finding, reading and writing them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from calibrant._core.atomic_files import replacing
from calibrant._core.class_names import as_array
from calibrant._core.messages import comma_separated
from calibrant.data.arrow_files import ArrowReader, ParquetReader, write_arrow, write_parquet
from calibrant.data.columns import (
    CLASS_NAMES,
    NAMED_SPLITS,
    _native,
    _owner,
    _split_names,
    full_key,
)
from calibrant.data.formats import NpyReader, NpzReader, Reader, _write_npz
from calibrant.data.storage import LocalFiles, storage_of
from calibrant.data.tables import BY_RULES, ColumnNames, TableReader, _table_of, layout_of
from calibrant.data.tensor_files import SafetensorsReader, TorchReader, write_safetensors
from calibrant.data.text_files import CsvFile, JsonLines, _csv_reader, _write_csv


def _read_arrow(
    kind: type[ParquetReader], path: str, named: ColumnNames = BY_RULES
) -> ParquetReader | TableReader:
    """Open a file of Arrow, with a column per class if the rules of tables find any."""
    reader = kind(path)
    headers = reader.headers
    single = [name for name, header in headers.items() if len(header.shape) == 1]
    lists = [name for name in headers if name not in single]
    pairs = [name for name in _split_names(single) if full_key(name, "labels") in headers]
    if _split_names(lists) or any(pairs) or {*lists} & {*named.logits, *named.probs}:
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


def _write_arrow(write: _Write, suffix: str, path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as columns of lists, or as a column per class if the classes have names."""
    write(path, _table_of(arrays, suffix) if CLASS_NAMES in arrays else arrays)


_Read: TypeAlias = Callable[[str], Reader]
_Write: TypeAlias = Callable[[Path, Mapping[str, Any]], None]

OTHER_FORMATS: dict[str, _Read] = {".csv": _csv_reader, ".pt": TorchReader, ".pth": TorchReader}
"""Formats of many other things: in a folder they count if there are no others."""
READERS: dict[str, _Read] = {
    ".npz": NpzReader,
    ".safetensors": SafetensorsReader,
    ".parquet": partial(_read_arrow, ParquetReader),
    ".arrow": partial(_read_arrow, ArrowReader),
    ".feather": partial(_read_arrow, ArrowReader),
    ".npy": NpyReader,
    **OTHER_FORMATS,
}
INPUT_FORMATS: dict[str, _Read] = {
    ".npz": NpzReader,
    ".safetensors": SafetensorsReader,
    ".parquet": ParquetReader,
    ".arrow": ArrowReader,
    ".feather": ArrowReader,
    ".npy": NpyReader,
    ".csv": CsvFile,
    ".jsonl": JsonLines,
}
"""Formats of inputs of models, whose columns may be anything."""
WRITERS: dict[str, _Write] = {
    ".npz": _write_npz,
    ".safetensors": write_safetensors,
    ".parquet": partial(_write_arrow, write_parquet, ".parquet"),
    ".csv": _write_csv,
    ".arrow": partial(_write_arrow, write_arrow, ".arrow"),
    ".feather": partial(_write_arrow, write_arrow, ".arrow"),
}
ARROW_TYPES = (".parquet", ".arrow", ".feather")
"""Formats that hold whatever Arrow does, such as dates and lists of different lengths."""
TABLES = (".csv", *ARROW_TYPES)
"""Formats of tables, with a column per class."""


def _readers_with(named: ColumnNames) -> dict[str, _Read]:
    """Return the readers, those of tables with the columns that a user names."""
    tables: dict[str, Callable[..., Reader]] = {suffix: READERS[suffix] for suffix in TABLES}
    return READERS | {suffix: partial(read, named=named) for suffix, read in tables.items()}


_ARRAY_FILE = re.compile(r"(?:(.+)_)?(logits|labels|probs|features)")
_NUMBERED = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")  # names that tell how many shards there are

ShardFiles: TypeAlias = dict[str, str]
"""The ``.npy`` files of a shard by key, or one other file by the split of its plain arrays."""
_Found: TypeAlias = dict[str, PurePath]  # the same as paths in their storage


def save_predictions(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Write ``arrays`` under their keys as ``.npz``, ``.safetensors``, ``.parquet`` or ``.csv``.

    An interrupted run leaves the old file or the new one, never a part. Temporary files of killed
    runs are removed when they are an hour old.

    Examples
    --------
    >>> import os, tempfile
    >>> from calibrant.data import open_dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "predictions.npz")
    ...     save_predictions(path, {"logits": np.zeros((5, 3)), "labels": np.zeros(5, int)})
    ...     open_dataset(path).split().rows
    5
    """
    target = Path(path)
    check_writable(target)
    ready = {
        key: _native(np.asarray(as_array(values), order="C")) for key, values in arrays.items()
    }
    for key, values in ready.items():
        if values.dtype.hasobject:
            raise ValueError(f"cannot write {key}: it holds Python objects; pass numbers or text")
    write_arrays(target, ready)


def write_arrays(
    target: Path, arrays: Mapping[str, Any], table_names: Mapping[str, str] | None = None
) -> None:
    """Write arrays as they are; a ``.parquet`` file takes those of Arrow too.

    With the names of the columns of a table, a table is written with these, in their order.
    """
    if table_names and target.suffix in TABLES:
        table = _table_of(arrays, target.suffix)
        first = {name: table.pop(key) for key, name in table_names.items() if key in table}
        arrays = {**first, **table}
    with replacing(target) as temporary:
        WRITERS[target.suffix](temporary, arrays)


def check_writable(target: Path) -> None:
    """Raise unless the suffix names a format that holds several arrays."""
    if target.suffix not in WRITERS:
        suffixes = comma_separated(WRITERS)
        raise ValueError(f"cannot write {target}: the suffix must be one of {suffixes}")


def sample_path() -> Path:
    """Path of the real predictions that come with the package.

    They are those of a ResNet-50 that this project trained on CIFAR-10: logits (float16) and
    labels of 5,000 held-out images (val) and 10,000 test images, and the last layer.

    >>> sample_path().name
    'cifar10_resnet50.npz'
    """
    return Path(__file__).parents[1] / "sample" / "cifar10_resnet50.npz"


def _find_shards(path: str, formats: Collection[str] = tuple(READERS)) -> list[ShardFiles]:
    """Return the shards of a file, folder or glob with some suffixes, in natural order."""
    storage, place = storage_of(path)
    if not storage.is_file(place):
        found = _of_folder(storage, path, place, formats)
    elif place.suffix not in formats:
        raise ValueError(
            f"{place} is not a prediction file: the suffix must be one of "
            f"{comma_separated(formats)}; numpy.savez(path, logits=..., labels=...) writes one"
        )
    elif place.suffix != ".npy":
        found = [{"": place}]
    elif not _ARRAY_FILE.fullmatch(place.stem):
        raise ValueError(
            f"{place} does not say what it holds; rename it to NAME_logits.npy, NAME_labels.npy, "
            "NAME_probs.npy or NAME_features.npy"
        )
    else:
        found = _with_partners(storage, [place])
    return [{key: storage.address(file) for key, file in shard.items()} for shard in found]


def _of_folder(
    storage: LocalFiles, path: str, place: PurePath, formats: Collection[str]
) -> list[_Found]:
    """Return the shards of a folder or a glob."""
    known, is_folder = comma_separated(formats), storage.is_folder(place)
    if not is_folder and not re.search(r"[*?[]", str(place)):
        expected = "expected a prediction file, folder or glob"
        raise FileNotFoundError(f"{path} does not exist; {expected}")
    paths = storage.children(place) if is_folder else storage.matches(str(place))
    files = _readable(paths, formats)
    if is_folder:  # a table of results or the weights of a model beside predictions are no shards
        files = [file for file in files if file.suffix not in OTHER_FORMATS] or files
    if not files:
        problem = f"folder {path} holds no prediction file; expected {known}"
        raise FileNotFoundError(problem if is_folder else f"no file in {known} matches {path}")
    _check_complete(storage, files, formats)
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1:  # they may hold the same rows twice
        folder = files[0].parent
        raise ValueError(
            f"{folder} mixes {comma_separated(suffixes)} files; choose one kind, for example "
            f"with the pattern '{folder / ('*' + suffixes[0])}'"
        )
    if suffixes != [".npy"]:
        # val.npz is that split, so that it never mixes with test.npz
        return [{f.stem if f.stem in NAMED_SPLITS else "": f} for f in files]
    columns = {match[2] if (match := _ARRAY_FILE.fullmatch(f.stem)) else None for f in files}
    one_column = len(columns) == 1 and None not in columns
    if one_column and not is_folder:
        return _with_partners(storage, files)
    return _by_stem(files)


def _readable(paths: Iterable[PurePath], formats: Collection[str]) -> list[PurePath]:
    """Return files in natural order, and whatever else has the suffix of one."""
    return sorted((p for p in paths if p.suffix.lower() in formats), key=natural_order)


def _check_complete(
    storage: LocalFiles, files: Sequence[PurePath], formats: Collection[str]
) -> None:
    """Raise if a shard cannot be read, or is missing among names such as 00001-of-00005."""
    for file in files:
        if not storage.is_file(file):
            what = "a link to a file that does not exist"
            what = "a folder" if storage.is_folder(file) else what
            raise FileNotFoundError(f"{file} is {what}: replace it by the shard, or remove it")
        if file.suffix not in formats:
            raise ValueError(f"{file} has its suffix in capitals: rename it to lower case")
    matches = ((file.parent, _NUMBERED.fullmatch(file.name)) for file in files)
    series = {(folder, m[1], len(m[2]), m[3], m[4]) for folder, m in matches if m}
    for folder, front, digits, total, rest in series:
        name = partial("{}{:0{}}-of-{}{}".format, front)
        first = not storage.exists(folder / name(0, digits, total, rest))  # some count from one
        for i in range(first, first + int(total)):
            shard = folder / name(i, digits, total, rest)
            if not storage.exists(shard):
                remedy = "copy or write it, or rename the others"
                raise FileNotFoundError(f"{shard} is missing among {int(total)} shards: {remedy}")


def natural_order(path: PurePath) -> tuple[list[str | int], str]:
    """Sort key in which 2 comes before 10; the name itself decides between 1 and 01."""
    # A pattern with a group splits into text and digits in turn: like is compared with like.
    runs = re.split(r"(\d+)", str(path))
    return [int(run) if i % 2 else run for i, run in enumerate(runs)], str(path)


def _by_stem(files: Sequence[PurePath]) -> list[_Found]:
    """Take stems of ``.npy`` files for keys; a number in front is the number of a shard."""
    shards: dict[tuple[PurePath, str], _Found] = {}
    for file in files:
        numbered = re.match(r"\d+_", file.stem)
        number = numbered[0] if numbered else ""
        shards.setdefault((file.parent, number), {})[file.stem.removeprefix(number)] = file
    return list(shards.values())


def _with_partners(storage: LocalFiles, files: Sequence[PurePath]) -> list[_Found]:
    """Make each file a shard, with the ``.npy`` files of its folder that have the same prefix."""
    shards: dict[tuple[PurePath, str], _Found] = {
        (file.parent, file.stem.rpartition("_")[0]): {} for file in files
    }
    for folder in dict.fromkeys(file.parent for file in files):
        partners = _readable((p for p in storage.children(folder) if p.suffix == ".npy"), [".npy"])
        # Prefixes that nobody asked for count too: val_noise_logits is no column of val.
        known = {prefix for place, prefix in shards if place == folder}
        known |= set(_split_names(file.stem for file in partners))
        for file in partners:
            prefix, column = _owner(file.stem, known)
            if (folder, prefix) in shards:
                key = file.stem if prefix in NAMED_SPLITS else column
                shards[folder, prefix][key] = file
    return list(shards.values())
