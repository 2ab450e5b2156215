"""Keys: the split that an array belongs to, and the name of its column."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from calibrant._core.messages import unknown_name
from calibrant.data.columns import Column, Columns

SCORES = ("logits", "probs")
ARRAY_KEYS = (
    *SCORES,
    "labels",
    "features",
)  # what is read beside columns with a value for each row
HEAD = (("head_weight", "head_bias"), ("weight", "bias"))  # keys of the last linear layer
CLASS_NAMES = "class_names"
LABEL_NAMES = ("labels", "label", "y_true", "y", "target")  # of columns of tables
VAL_NAMES = ("val", "validation", "valid", "dev")  # aliases, if there is only one
NAMED_SPLITS = ("train", "test", *VAL_NAMES)  # files of these names are those splits

_SPLIT_KEY = re.compile(r"(?:(.+)_)?(?:logits|probs|features)")


def split_names(keys: Iterable[str]) -> list[str]:
    """Return the names of the splits among ``keys``; plain arrays are the split ``""``.

    Labels alone make no split: ``coarse_labels`` is a further column more often than not.
    """
    matches = (_SPLIT_KEY.fullmatch(key) for key in keys)
    return list(dict.fromkeys(match[1] or "" for match in matches if match))


def owner(key: str, names: Collection[str]) -> tuple[str, str]:
    """Return the longest of ``names`` that starts ``key``, and the column that remains.

    >>> owner("noise_3_labels", ["noise", "noise_3"]), owner("sample_weight", ["noise"])
    (('noise_3', 'labels'), ('', 'sample_weight'))
    """
    ends = [i for i, character in enumerate(key) if character == "_" and key[:i] in names]
    return (key[: ends[-1]], key[ends[-1] + 1 :]) if ends else ("", key)


def full_key(split: str, column: str) -> str:
    """Return the key of a column of a split, such as ``val_labels``."""
    return f"{split}_{column}" if split else column


def head_columns(arrays: Columns) -> list[Column]:
    """Return weight and bias of the last layer, or weight alone, or nothing.

    Plain ``weight`` is a layer only if it is 2-D: with one value per example it is a column.
    """
    for weight, bias in HEAD:
        if weight in arrays and (weight != "weight" or len(arrays[weight].shape) == 2):
            return [arrays[key] for key in (weight, bias) if key in arrays]
    return []


def columns_by_split(arrays: Columns) -> dict[str, Columns]:
    """Return the columns of each split of a file; single values and the last layer are none."""
    others = [arrays.get(CLASS_NAMES), *head_columns(arrays)]
    columns = {key: c for key, c in arrays.items() if c.shape and c not in others}
    splits: dict[str, Columns] = {name: {} for name in split_names(columns)}
    for key, column in columns.items():
        split, name = owner(key, splits)
        if split in splits:  # further plain arrays belong to no split
            splits[split][name] = column
    return splits


def under_keys(arrays: Columns, keys: Mapping[str, str]) -> Columns:
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


def under_split(arrays: Columns, name: str) -> Columns:
    """Put the plain arrays of a file under the split ``name``."""
    plain = columns_by_split(arrays).get("", {}) if name else {}
    return {full_key(name, key) if key in plain else key: c for key, c in arrays.items()}
