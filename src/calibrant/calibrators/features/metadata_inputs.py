"""Metadata columns of any type as the numbers and codes that trees split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibrant._core.checks import IGNORED, FloatArray, Values, as_labels, as_weight
from calibrant._core.class_names import is_frame
from calibrant._core.messages import comma_separated
from calibrant.data.dataset import ROLES
from calibrant.data.metadata import (
    NO_METADATA,
    MetadataColumn,
    as_metadata,
    learn_column,
    learn_numbers,
)

BINS = 32
"""Bins of a column of numbers."""
_MAX_VALUES = 20
"""Values of a text that trees tell apart; rarer ones share a code."""


def check_columns(columns: Sequence[str | int]) -> None:
    """Raise unless names or numbers of columns are different, and those of metadata."""
    if not columns or "" in columns or len({*map(str, columns)}) < len(columns):
        raise ValueError(
            f"columns must be different names (or numbers) of metadata columns, got {columns!r}: "
            'pass columns=["age", "site"], say'
        )
    if taken := [name for name in columns if name in (*NO_METADATA, *ROLES)]:
        raise ValueError(
            f"columns must be metadata, got {comma_separated(taken)}, which has another meaning in "
            "prediction files: leave it out, or rename the column"
        )


def metadata_arrays(features: object, columns: Sequence[str | int]) -> dict[str, Any]:
    """Return the metadata columns of a frame, a mapping or an array, by name."""
    if isinstance(features, Mapping) or is_frame(features):
        known = as_metadata(features)
    else:
        table = np.asarray(features)
        width = table.shape[1] if table.ndim == 2 else 0
        numbers = [c for c in columns if isinstance(c, int) and -width <= c < width]
        known = {str(c): table[:, c] for c in numbers}
    names = [str(column) for column in columns]
    if lacking := [name for name in names if name not in known]:
        raise ValueError(
            f"Multicalibration reads the metadata columns {comma_separated(names)}, but features= "
            f"has no {comma_separated(lacking)}: pass a data frame or a mapping of arrays with them"
        )
    return {name: known[name] for name in names}


def _learned_columns(
    arrays: Mapping[str, Any], labels: Values, sample_weight: Values | None
) -> list[MetadataColumn]:
    """Learn the codes of metadata columns from the examples that count."""
    targets = as_labels(labels)
    if targets.ndim != 1 or any(len(values) != len(targets) for values in arrays.values()):
        sizes = [f"{len(values):,} of {name}" for name, values in arrays.items()]
        raise ValueError(
            "metadata columns must have one value for each of the labels (n,), got "
            f"{comma_separated(sizes)} for labels of shape {targets.shape}"
        )
    counts = targets != IGNORED
    if sample_weight is not None:
        counts &= as_weight(sample_weight, targets.shape) > 0
    return [
        learn_column(name, values[counts], bins=BINS, most=_MAX_VALUES) or _constant(name)
        for name, values in arrays.items()
    ]


def _learned_numbers(features: FloatArray) -> list[MetadataColumn]:
    """Return the columns of numbers ``(n, width)``."""
    names = [f"feature {i}" for i in range(features.shape[1])]
    return [
        learn_numbers(name, values, bins=BINS) or _constant(name)
        for name, values in zip(names, features.T, strict=True)
    ]


def _constant(name: str) -> MetadataColumn:
    """Return a column that tells no examples apart, but for missing ones."""
    return MetadataColumn(name, "number")
