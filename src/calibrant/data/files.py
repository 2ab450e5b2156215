"""Ways to a dataset: files by their suffixes, folders, globs, mappings, data frames and arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import Values, as_labels
from calibrant._core.class_names import (
    Frame,
    as_array,
    class_names_of,
    class_order,
    is_frame,
    numbered,
)
from calibrant._core.messages import comma_separated, unknown_name
from calibrant.data.arrow_files import ArrowReader, ParquetReader, write_arrow, write_parquet
from calibrant.data.dataset import IN_MEMORY, Dataset
from calibrant.data.formats import LocalFiles, NpyReader, NpzReader, Reader, _write_npz, storage_of
from calibrant.data.shards import (
    CLASS_NAMES,
    NAMED_SPLITS,
    SCORES,
    Columns,
    NoGoodShard,
    OpenFiles,
    _native,
    _owner,
    _split_names,
    array_column,
    columns_by_split,
    full_key,
)
from calibrant.data.tables import (
    BY_RULES,
    ColumnNames,
    TableReader,
    _frame_arrays,
    _table_of,
    layout_of,
)
from calibrant.data.tensor_files import SafetensorsReader, TorchReader, write_safetensors
from calibrant.data.text_files import CsvFile, JsonLines, _csv_reader, _write_csv

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Stored: TypeAlias = "str | os.PathLike[str] | Mapping[str, Values] | Dataset"
Data: TypeAlias = "Stored | Frame"


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
            got = headers[column].dtype.name if headers[column].exact else "decimals or the like"
            raise ValueError(f"{path}: {column} must be numbers, got {got}: cast it to double")
    reader.optional &= {*layout.others}
    others = [*layout.others, *lists]
    columns = [name for name in headers if name in lists or name in layout.columns]
    return TableReader(reader, replace(layout, others=others, columns=columns))


def _write_arrow(write: _Write, suffix: str, path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as columns of lists, or as a column per class if the classes have names."""
    write(path, _table_of(arrays, suffix) if CLASS_NAMES in arrays else arrays)


_Read: TypeAlias = Callable[..., Reader]
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


_ARRAY_FILE = re.compile(r"(?:(.+)_)?(logits|labels|probs|features)")
_NUMBERED = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")  # names that tell how many shards there are

ShardFiles: TypeAlias = dict[str, str]
"""The ``.npy`` files of a shard by key, or one other file by the split of its plain arrays."""
_Found: TypeAlias = dict[str, PurePath]  # the same as paths in their storage


def save_predictions(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Write ``arrays`` under their keys as ``.npz``, ``.safetensors``, ``.parquet`` or ``.csv``.

    Scores may be data frames with a column for each class, and labels then names of classes. An
    interrupted run leaves the old file or the new one, never a part. Temporary files of killed
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
        key: _native(np.asarray(as_array(values), order="C"))
        for key, values in _with_class_names(arrays).items()
    }
    for split in _split_names(ready):
        if (labels := full_key(split, "labels")) in ready:
            as_labels(ready[labels])
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


def open_dataset(
    path: str | os.PathLike[str] | Frame,
    *,
    labels: str | None = None,
    logits: str | Sequence[str] | None = None,
    probs: str | Sequence[str] | None = None,
    skip_bad: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Open a prediction file; only headers are read.

    Parameters
    ----------
    path
        A ``.npz``, ``.safetensors``, ``.parquet``, ``.arrow``, ``.feather``, ``.csv`` or ``.pt``
        file; ``X_logits.npy``, with the files that share its prefix; a folder of ``.npy`` files,
        whose stems are keys, with the number of a shard in front; or a folder or glob of shards, in
        natural order. Plain arrays of files named train, val or test are those splits. A ``.csv``
        file is read once, to count its rows. An address such as ``s3://bucket/run/*.parquet`` is
        read through fsspec (``pip install 'calibrant[cloud]'``). A data frame is taken as well.
    labels, logits, probs : str or list of str, optional
        Columns of a table of any names: that of the labels, and one of scores for each class, or
        one alone for P(class 1). Of other files they are arrays, without the split in front.
    skip_bad : bool
        Leave out files that cannot be opened; ``skipped`` of the dataset has their errors by path.
        :func:`calibrant.workflows.large.open_good_shards` reads their rows as well.
    cache : path, optional
        Folder for the log-partition tables of the shards, some hundred bytes for each example. Fits
        read them in place of the logits as long as the files are unchanged.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> data = open_dataset(sample_path())
    >>> data.splits, data.split("val").read("logits").shape, data.has_head
    (['val', 'test'], (5000, 10), True)
    """
    scores = (
        (names,) if isinstance(names, str) else tuple(names or ()) for names in (logits, probs)
    )
    named = ColumnNames(labels, *scores)
    if is_frame(path):
        return _of_arrays(_frame_arrays(path, {}, named))
    place = os.fspath(path)
    tables: dict[str, Any] = {suffix: partial(READERS[suffix], named=named) for suffix in TABLES}
    opened = partial(_predictions, OpenFiles(READERS | tables), named)
    shards, skipped = _opened_shards(place, _find_shards(place), opened, skip_bad=skip_bad)
    kept = None if cache is None else os.fspath(cache)
    return Dataset(place, shards, cache=kept, skipped=skipped, named=named)


def _opened_shards(
    path: str,
    shards: Sequence[ShardFiles],
    opened: Callable[[ShardFiles], Columns],
    *,
    skip_bad: bool,
) -> tuple[list[Columns], dict[str, str]]:
    """Return the arrays of each shard, and with ``skip_bad`` the errors of others by path."""
    arrays: list[Columns] = []
    skipped: dict[str, str] = {}
    for shard in shards:
        try:
            arrays.append(opened(shard))
        except (ValueError, OSError) as problem:
            if not skip_bad:
                raise
            skipped[next(iter(shard.values()))] = str(problem)
    if not arrays:
        raise NoGoodShard(path, next(iter(skipped.values())))
    return arrays, skipped


def _predictions(files: OpenFiles, named: ColumnNames, shard: ShardFiles) -> Columns:
    """Return the arrays of a shard of predictions by key.

    Plain arrays of a file that has the name of a split are those of this split.
    """
    arrays: Columns = {}
    for key, file in shard.items():
        columns = files.columns(file)
        if not columns:
            raise ValueError(f"{file} holds no arrays; write it again, or remove it")
        if file.endswith(".npy"):
            arrays[key] = columns[PurePath(file).stem]
            continue
        if named != BY_RULES and not files.reader(file).table_names:
            columns = _under_keys(columns, named.keys(file))
        plain = columns_by_split(columns).get("", {}) if key else {}
        arrays |= {full_key(key, name) if name in plain else name: c for name, c in columns.items()}
    return arrays


def _under_keys(arrays: Columns, keys: Mapping[str, str]) -> Columns:
    """Put arrays of other names under the keys that they stand for, in every split.

    Arrays that have such a key already are left out.
    """
    renamed: Columns = {}
    for name, key in keys.items():
        stored = [each for each in arrays if each == name or each.endswith(f"_{name}")]
        if not stored:
            path = next(iter(arrays.values())).path
            raise ValueError(f"{path}: {unknown_name('array', name, arrays)}")
        renamed |= {each.removesuffix(name) + key: arrays[each] for each in stored}
    used = [*renamed.values()]
    return {key: column for key, column in arrays.items() if column not in used} | renamed


def _inputs(files: OpenFiles, shard: ShardFiles) -> Columns:
    """Return the arrays of a shard of inputs by key."""
    arrays: Columns = {}
    for key, file in shard.items():
        columns = files.columns(file)
        arrays |= {key: next(iter(columns.values()))} if file.endswith(".npy") else columns
    return arrays


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
    shards = [{PurePath(place).stem: place}] if alone else _find_shards(place, INPUT_FORMATS)
    arrays, skipped = _opened_shards(place, shards, partial(_inputs, files), skip_bad=skip_bad)
    return Dataset(place, arrays, skipped=skipped)


def as_dataset(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    features: Values | None = None,
    sample_weight: Values | str | None = None,
    by: Values | str | None = None,
    groups: Values | str | None = None,
    multilabel: bool = False,
) -> Dataset:
    """Return a path, a mapping, a data frame or plain arrays as a dataset; a dataset as it is.

    ``sample_weight``, ``by`` and ``groups`` are names of columns or, beside arrays, the values;
    ``multilabel`` says that columns of scores are tags.

    Examples
    --------
    >>> import numpy as np
    >>> as_dataset({"val_logits": np.zeros((3, 2)), "val_labels": [0, 1, 1]}).splits
    ['val']
    """
    if labels is not None and is_data(data):
        raise TypeError(
            "labels go with logits, and a file, dataset or mapping has its own: leave them out, "
            "and pass other arguments by name, as in methods=..."
        )
    roles = {"sample_weight": sample_weight, "by": by, "groups": groups}
    used = {role: v for role, v in roles.items() if v is not None}
    names: dict[str, Any] = {role: v if isinstance(v, str) else role for role, v in used.items()}
    names |= {"multilabel": True} if multilabel else {}
    arrays = {"labels": labels, "probs": probs, "features": features, **roles}
    values: dict[str, Any] = {
        key: v for key, v in arrays.items() if v is not None and not isinstance(v, str)
    }
    if isinstance(data, Mapping):
        values = {**data, **values}
    elif is_frame(data) and labels is None:
        values = _frame_arrays(data, values)
    elif not is_data(data):
        if data is not None and labels is None:
            raise TypeError(
                "a path, a dataset, a data frame or a mapping of arrays is wanted, got a "
                f"{type(data).__name__}: pass {{'logits': logits, 'labels': labels}}"
            )
        values |= {} if data is None else {"logits": data}
    elif values:
        raise TypeError(
            f"{comma_separated(values)} must be the names of columns where the data are a file, "
            "got arrays"
        )
    else:
        dataset = data if isinstance(data, Dataset) else open_dataset(data)
        return replace(dataset, **names) if names else dataset
    return _of_arrays(_with_class_names(values), **names)


def _of_arrays(arrays: Mapping[str, Any], **names: Any) -> Dataset:
    columns = {key: array_column(key, values, IN_MEMORY) for key, values in arrays.items()}
    return Dataset(IN_MEMORY, [columns], **names)


def is_data(data: object) -> TypeIs[Stored]:
    """Return True for a path, a mapping or a dataset, False for logits or a data frame."""
    return isinstance(data, (str, os.PathLike, Mapping, Dataset))


def _with_class_names(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays with the names and numbers of the classes of those that are data frames.

    Frames whose columns are in another order than those of the first are brought into its order.
    """
    result = dict(arrays)
    for split in _split_names(arrays):
        for key in (full_key(split, column) for column in SCORES):
            names = class_names_of(arrays.get(key))
            if names is None:
                continue
            known = result.setdefault(CLASS_NAMES, names)
            if (order := class_order(known, names, key)) is not None:
                result[key] = arrays[key][[arrays[key].columns[k] for k in order]]
        if (key := full_key(split, "labels")) in arrays:
            scores = (result.get(full_key(split, column)) for column in SCORES)
            result[key] = numbered(arrays[key], *scores)
    return result
