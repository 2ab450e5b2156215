"""Names of arrays: which split an array belongs to, and which column of it it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from calibrant.data.columns import Column

Arrays: TypeAlias = dict[str, Column]
"""The arrays of one file, or of the ``.npy`` files that belong together, by key."""

SCORES = ("logits", "probs")
HEAD = (("head_weight", "head_bias"), ("weight", "bias"))
"""Keys of the last linear layer, weight (classes, features) and bias (classes,)."""
CLASS_NAMES = "class_names"

VAL_NAMES = ("val", "validation", "valid", "dev")
"""Names of the validation split: each stands for the others where there is only one of them."""
NAMED_SPLITS = ("train", "test", *VAL_NAMES)
"""Names of files that say which split the file is, even if the names of its arrays do not."""

_SPLIT_KEY = re.compile(r"(?:(.+)_)?(?:logits|probs|features)")


def split_names(keys: Iterable[str]) -> list[str]:
    """Return the names of the splits among ``keys``; plain arrays are the split ``""``.

    Labels alone make no split: ``coarse_labels`` is a further column more often than not.
    """
    matches = (_SPLIT_KEY.fullmatch(key) for key in keys)
    return list(dict.fromkeys(match[1] or "" for match in matches if match))


def owner(key: str, names: Iterable[str]) -> tuple[str, str]:
    """Return the longest of ``names`` that starts ``key``, and the column that remains.

    >>> owner("noise_3_labels", ["noise", "noise_3"])
    ('noise_3', 'labels')
    >>> owner("sample_weight", ["noise", "noise_3"])
    ('', 'sample_weight')
    """
    known = set(names)
    ends = [i for i, character in enumerate(key) if character == "_" and key[:i] in known]
    return (key[: ends[-1]], key[ends[-1] + 1 :]) if ends else ("", key)


def full_key(split: str, column: str) -> str:
    """Return the key of a column of a split.

    >>> full_key("val", "labels"), full_key("", "labels")
    ('val_labels', 'labels')
    """
    return f"{split}_{column}" if split else column


def head_arrays(arrays: Arrays) -> list[Column]:
    """Return weight and bias of the last layer, or weight alone, or nothing.

    Plain ``weight`` is a layer only if it is 2-D: with one value per example it is a column.
    """
    for weight, bias in HEAD:
        if weight in arrays and (weight != "weight" or len(arrays[weight].shape) == 2):
            return [arrays[key] for key in (weight, bias) if key in arrays]
    return []


def columns_by_key(arrays: Arrays) -> Arrays:
    """Leave out what is no column: single values, the last layer, names of the classes."""
    head = head_arrays(arrays)
    return {
        key: column
        for key, column in arrays.items()
        if column.shape and column not in head and key != CLASS_NAMES
    }


def split_columns(arrays: Arrays, name: str) -> Arrays:
    """Return the arrays of the split ``name``, by the names of the columns."""
    columns = columns_by_key(arrays)
    names = split_names(columns)
    owned = ((*owner(key, names), column) for key, column in columns.items())
    return {column: found for split, column, found in owned if split == name}


def under_split(arrays: Arrays, name: str) -> Arrays:
    """Put the plain arrays of a file under the split ``name``."""
    plain = split_columns(arrays, "") if name else {}
    return {full_key(name, key) if key in plain else key: c for key, c in arrays.items()}


def resolve_split(name: str, known: Sequence[str]) -> str | None:
    """Return the split that a name stands for, or None.

    >>> resolve_split("valid", ["train", "val"]), resolve_split("val", ["dev", "test"])
    ('val', 'dev')
    """
    if name in known:
        return name
    same = [other for other in known if other in VAL_NAMES]
    return same[0] if name in VAL_NAMES and len(same) == 1 else None


def check_numbers(column: Column, numeric: bool) -> None:
    """Raise if a column holds pickled objects or, where it must be numbers, something else."""
    if column.dtype.hasobject:
        raise ValueError(
            f"{column.path}: {column.key} was saved as a pickle of Python objects, which is never "
            "loaded because it could run any code; save it again as numbers, for example "
            "numpy.savez(path, logits=numpy.asarray(logits, dtype='float32'))"
        )
    if numeric and column.dtype.kind not in "biuf":
        raise ValueError(f"{column.path}: {column.key} must be numbers, got {column.dtype.name}")


def check_head(head: Sequence[Column]) -> None:
    """Raise unless weight is (classes, features) and bias (classes,)."""
    for column in head:
        check_numbers(column, numeric=True)
    shapes = [column.shape for column in head]
    if len(shapes[0]) != 2 or shapes[1:] not in ([], [shapes[0][:1]]):
        raise ValueError(
            f"{head[0].path}: the last layer needs head_weight (classes, features) and head_bias "
            f"(classes,), got {' and '.join(map(str, shapes))}"
        )
