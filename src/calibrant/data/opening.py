"""Ways to a dataset: files, folders and globs, mappings, data frames and plain arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

from calibrant._core.checks import Values
from calibrant._core.class_names import Frame, class_names_of, class_order, is_frame, numbered
from calibrant._core.messages import comma_separated
from calibrant.data.columns import (
    CLASS_NAMES,
    SCORES,
    Columns,
    OpenFiles,
    _split_names,
    _under_keys,
    _under_split,
    array_column,
    full_key,
)
from calibrant.data.dataset import IN_MEMORY, Dataset
from calibrant.data.files import INPUT_FORMATS, ShardFiles, _find_shards, _readers_with
from calibrant.data.shards import NoGoodShard
from calibrant.data.tables import BY_RULES, ColumnNames, _frame_arrays

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Stored: TypeAlias = "str | os.PathLike[str] | Mapping[str, Values] | Dataset"
Data: TypeAlias = "Stored | Frame"


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
        A ``.npz``, ``.safetensors``, ``.parquet``, ``.csv`` or ``.pt`` file; ``X_logits.npy``, with
        the files that share its prefix; a folder of ``.npy`` files, whose stems are keys, with the
        number of a shard in front; or a folder or glob of shards, in natural order. Plain arrays of
        files named train, val or test are those splits. A ``.csv`` file is read once, to count its
        rows. An address such as ``s3://bucket/run/*.parquet`` is read through fsspec (``pip install
        'calibrant[cloud]'``). A data frame is taken as well.
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
    opened = partial(_predictions, OpenFiles(_readers_with(named)), named)
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
    """Return the arrays of a shard of predictions by key."""
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
        arrays |= _under_split(columns, key) if key else columns
    return arrays


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
