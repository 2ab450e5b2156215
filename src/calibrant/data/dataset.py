"""Datasets: everything in a prediction file, in shards of it, or in some arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from calibrant._core.checks import IntArray, Values
from calibrant._core.class_names import (
    Frame,
    class_order,
    columns_in_order,
    is_frame,
    numbers_in_order,
)
from calibrant._core.messages import comma_separated, unknown_name
from calibrant._core.showing import one_line
from calibrant.data.columns import Columns, OpenFiles, array_column, read_all
from calibrant.data.files import INPUT_FORMATS, ShardFiles, find_shards, readers_with
from calibrant.data.formats import Array
from calibrant.data.frames import frame_arrays, with_class_names
from calibrant.data.keys import (
    ARRAY_KEYS,
    CLASS_NAMES,
    SCORES,
    VAL_NAMES,
    columns_by_split,
    full_key,
    head_columns,
    under_keys,
    under_split,
)
from calibrant.data.shards import NoGoodShard, Shard, agreeing
from calibrant.data.split import IN_MEMORY, Split
from calibrant.data.tables import BY_RULES, ColumnNames

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Stored: TypeAlias = "str | os.PathLike[str] | Mapping[str, Values] | Dataset"
Data: TypeAlias = "Stored | Frame"

FIT_SPLITS = ("val", "")
TEST_SPLITS = ("test", "")


@dataclass(frozen=True)
class Dataset:
    """Everything in a prediction file, in the shards of a folder or glob, or in some arrays.

    ``files`` has the arrays of each file by key. ``sample_weight``, ``by`` and ``groups`` name the
    columns with weights, with subgroups to report on, and with examples that share a fold. With
    ``multilabel`` the scores are of tags, and probabilities need not sum to one.
    """

    path: str
    files: list[Columns]
    sample_weight: str | None = None
    by: str | None = None
    groups: str | None = None
    multilabel: bool = False
    cache: str | None = None  # folder for the log-partition tables of shards
    skipped: Mapping[str, str] = field(default_factory=dict)  # messages by the paths of bad shards
    named: ColumnNames = BY_RULES  # columns that the user has named

    def __repr__(self) -> str:
        splits = ", ".join(map(repr, self.splits)) or "none"
        return one_line(self, f"{self.path}", f"splits: {splits}")

    @cached_property
    def _by_split(self) -> list[dict[str, Columns]]:
        return list(map(columns_by_split, self.files))

    @cached_property
    def splits(self) -> list[str]:
        """Names of the splits, in the order of the file; ``""`` stands for the plain arrays."""
        return list(dict.fromkeys(name for splits in self._by_split for name in splits))

    def find(self, name: str | None, prefer: Sequence[str] = ("",)) -> str | None:
        """Return the name of a split, or of the first of ``prefer`` that is there, or None."""
        aliases = [split for split in self.splits if split in VAL_NAMES]
        for wanted in prefer if name is None else [name]:
            if wanted in self.splits:
                return wanted
            if wanted in VAL_NAMES and len(aliases) == 1:
                return aliases[0]
        return None

    def split(self, name: str | None = None, prefer: Sequence[str] = ("",)) -> Split:
        """Return the split ``name``, or without a name the first of ``prefer`` that is there.

        The names val, valid, validation and dev stand for each other where only one is there.
        """
        chosen = self.find(name, prefer)
        if chosen is None:
            raise self._no_split(prefer if name is None else [name])
        self._check_files(chosen)
        _ = self.class_names  # which must agree
        shards = [Shard(splits[chosen]) for splits in self._by_split if chosen in splits]
        # An empty shard, as Spark writes them, may not even know its number of classes.
        shards = [shard for shard in shards if shard.rows] or shards[:1]
        first = shards[0]
        for shard in shards:
            if shard.domain != first.domain:
                raise ValueError(
                    f"{first.path} has {first.domain or 'no logits'}, but {shard.path} has "
                    f"{shard.domain or 'no logits'}; all shards of a split need the same"
                )
        for column in ARRAY_KEYS:
            agreeing([shard for shard in shards if column in shard.columns], column)
        starts = np.cumsum([0, *(shard.rows for shard in shards)])
        numbered = [replace(s, first=int(n)) for s, n in zip(shards, starts, strict=False)]
        return Split(self, chosen, numbered)

    def _check_files(self, split: str) -> None:
        """Raise for a file that has labels of a split without its scores, or nothing of use."""
        for arrays, splits in zip(self.files, self._by_split, strict=True):
            labels = full_key(split, "labels")
            orphaned = labels in arrays and split not in splits
            if orphaned or not (splits or head_columns(arrays) or CLASS_NAMES in arrays):
                path = next(column.path for column in arrays.values())
                of = f" of split {split!r}" if split else ""
                raise ValueError(
                    f"{path} has no logits, probs or features{of}, only "
                    f"{comma_separated(arrays)}; write it again, or move it elsewhere"
                )

    @property
    def has_head(self) -> bool:
        """True if the dataset has the last linear layer."""
        return any(map(head_columns, self.files))

    @cached_property
    def head(self) -> tuple[Array, Array] | None:
        """Weight (classes, features) and bias (classes,) of the last linear layer, if stored."""
        head = next(filter(None, map(head_columns, self.files)), None)
        if head is None:
            return None
        shapes = [column.shape for column in head]
        if len(shapes[0]) != 2 or shapes[1:] not in ([], [shapes[0][:1]]):
            raise ValueError(
                f"{head[0].path}: the last layer needs head_weight (classes, features) and "
                f"head_bias (classes,), got {' and '.join(map(str, shapes))}"
            )
        for column in head:
            column.check_dtype(numeric=True)
        weight, *bias = (read_all([column]) for column in head)
        return weight, bias[0] if bias else np.zeros(len(weight), weight.dtype)

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes, stored under ``class_names``; all files must have the same."""
        stored = [arrays[CLASS_NAMES] for arrays in self.files if CLASS_NAMES in arrays]
        names: list[list[str]] = []
        scores = (
            splits[name].get(one) for splits in self._by_split for name in splits for one in SCORES
        )
        counts = {column.shape[-1] if column.shape[1:] else 2 for column in filter(None, scores)}
        for column in stored:
            column.check_dtype(numeric=False)
            if column.shape not in {(count,) for count in counts or {column.shape[0]}}:
                wanted = comma_separated(map(str, sorted(counts)))
                raise ValueError(
                    f"{column.path}: {CLASS_NAMES} must be a list of {wanted} names, one for each "
                    f"class, got an array of shape {column.shape}"
                )
            names.append([str(name) for name in read_all([column])])
            if names[-1] != names[0]:
                raise ValueError(
                    f"{stored[0].path} has the classes {comma_separated(names[0][:20])}, but "
                    f"{column.path} {comma_separated(names[-1][:20])}: write their columns in one "
                    "order"
                )
        return names[0] if names else None

    @property
    def table_names(self) -> dict[str, str]:
        """Names of the columns of its tables by those that they are written with by default.

        There are none for other files, or tables with different columns.
        """
        tables = [next(iter(arrays.values())).table_names for arrays in self.files if arrays]
        return dict(tables[0]) if all(table == tables[0] for table in tables) else {}

    def in_order(self, names: Sequence[str] | None) -> Dataset:
        """Return the dataset with its classes in the order of these names, and labels accordingly.

        Classes without names, here or there, stay where they are. Other names are refused.
        """
        order = class_order(names, self.class_names, self.path)
        if order is None:
            return self
        views = self.views(order)
        names_column = array_column(CLASS_NAMES, np.array(names), self.path)
        files = [
            arrays
            | {
                full_key(split, name): arrays[full_key(split, name)].seen_by(view)
                for split in splits
                for name, view in views.items()
                if name in splits[split]
            }
            | ({CLASS_NAMES: names_column} if CLASS_NAMES in arrays else {})
            for arrays, splits in zip(self.files, self._by_split, strict=True)
        ]
        return replace(self, files=files)

    def views(self, order: IntArray) -> dict[str, Callable[[Array], Array]]:
        """Return by column what brings its classes into another order."""
        columns = partial(columns_in_order, order)
        numbers = columns if self.multilabel else partial(numbers_in_order, order)
        return {**dict.fromkeys(SCORES, columns), "labels": numbers}

    def _no_split(self, wanted: Sequence[str]) -> ValueError:
        named = [name for name in self.splits if name]
        if not self.splits:
            keys = dict.fromkeys(key for arrays in self.files for key in arrays)
            problem = (
                f" has no logits, probs or features, only {comma_separated(keys)}: rename its "
                "scores to logits or probs, or name them (--logits or --probs on the command line)"
            )
        elif named and len(wanted) == 1 and wanted[0]:
            problem = f": {unknown_name('split', wanted[0], named)}"
        else:
            asked = " or ".join(f"split {name!r}" if name else "plain arrays" for name in wanted)
            known = ", only plain arrays"
            if named:
                known = f", only {comma_separated(named)}: name the split to use, as --split does"
            problem = f" has no {asked}{known}"
        return ValueError(self.path + problem)


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
        :func:`calibrant.workflows.shards.open_good_shards` reads their rows as well.
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
        return _of_arrays(frame_arrays(path, {}, named))
    place = os.fspath(path)
    opened = partial(_predictions, OpenFiles(readers_with(named)), named)
    shards, skipped = _opened_shards(place, find_shards(place), opened, skip_bad=skip_bad)
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
            columns = under_keys(columns, named.keys(file))
        arrays |= under_split(columns, key) if key else columns
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
    shards = [{PurePath(place).stem: place}] if alone else find_shards(place, INPUT_FORMATS)
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
        values = frame_arrays(data, values)
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
    return _of_arrays(with_class_names(values), **names)


def _of_arrays(arrays: Mapping[str, Any], **names: Any) -> Dataset:
    columns = {key: array_column(key, values, IN_MEMORY) for key, values in arrays.items()}
    return Dataset(IN_MEMORY, [columns], **names)


def is_data(data: object) -> TypeIs[Stored]:
    """Return True for a path, a mapping or a dataset, False for logits or a data frame."""
    return isinstance(data, (str, os.PathLike, Mapping, Dataset))
