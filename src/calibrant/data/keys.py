"""Keys: the split that an array belongs to, and the name of its column."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

SCORES = ("logits", "probs")
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
