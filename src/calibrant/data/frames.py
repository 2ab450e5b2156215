"""Data frames as datasets, by the rules of tables."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calibrant._core.class_names import as_array, class_names_of, class_order, numbered
from calibrant._core.messages import comma_separated
from calibrant.data.formats import Array, Batch, Header, Reader
from calibrant.data.keys import CLASS_NAMES, SCORES, full_key, split_names
from calibrant.data.metadata import storable
from calibrant.data.tables import BY_RULES, RULES, ColumnNames, TableReader, layout_of

_FRAME = "the data frame"  # in place of a path


class _FrameReader(Reader):
    """The columns of a data frame, and further ones beside it."""

    def __init__(self, frame: Any, beside: Mapping[str, object]) -> None:
        self.path, self.stream, self.fingerprint = _FRAME, io.BytesIO(), ()
        names = [str(name) for name in frame.columns]
        columns = {str(name): storable(as_array(frame[name])) for name in frame.columns}
        columns |= {name: as_array(values) for name, values in beside.items()}
        if len(set(names)) < len(names):
            raise ValueError(f"{_FRAME} has two columns of one name among {comma_separated(names)}")
        self.columns: dict[str, Array] = columns
        self.headers = {name: Header(c.shape, c.dtype) for name, c in columns.items()}

    def batches(self, keys: Sequence[str], rows: int) -> Iterator[Batch]:
        """Yield all rows of some columns at once."""
        del rows
        columns = {key: self.columns[key] for key in keys}
        yield Batch(columns, "row", range(len(next(iter(columns.values())))))


def frame_arrays(
    frame: Any, beside: Mapping[str, object], named: ColumnNames = BY_RULES
) -> dict[str, Array]:
    """Return the arrays that a data frame holds, and those ``beside`` it, by their keys."""
    table = _FrameReader(frame, beside)
    layout = layout_of(list(table.columns), _FRAME, named)
    if not layout.scores:
        found = comma_separated(list(table.columns)[:50])
        raise ValueError(
            f"{_FRAME} has no column of logits or probabilities, only {found}: {RULES}; or pass "
            "the columns of logits first and then the labels"
        )
    arrays = TableReader(table, layout)
    rows = max(1, len(frame))
    return {
        key: np.concatenate([np.empty(header.shape, header.dtype)[:0], *arrays.chunks(key, rows)])
        for key, header in arrays.headers.items()
    }


def with_class_names(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays with the names and numbers of the classes of those that are data frames.

    Frames whose columns are in another order than those of the first are brought into its order.
    """
    result = dict(arrays)
    for split in split_names(arrays):
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
