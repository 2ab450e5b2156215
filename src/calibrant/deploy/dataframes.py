"""Calibrated probabilities as new columns of a table of pandas, polars or Arrow.

The one function works on tables of pandas, polars and Arrow and on mappings of arrays, so that it
runs inside of Spark, Ray Data, DuckDB and polars, a batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from calibrant._core.checks import (
    BoolArray,
    Features,
    IntArray,
    warnings_at_caller,
)
from calibrant._core.class_names import class_order, is_frame
from calibrant._core.messages import comma_separated
from calibrant._core.probs import logits_from_probs
from calibrant.calibrators.base import Calibrator, check_calibrator, feature_rows
from calibrant.data.arrow_files import load_pyarrow
from calibrant.data.formats import Array
from calibrant.data.shards import CHUNK, SCORES
from calibrant.data.tables import RULES, layout_of
from calibrant.workflows.apply import check_shape, probs_of

T = TypeVar("T")
_TABLE = "the table"  # in messages that name a path for files


@warnings_at_caller()
def calibrate_table(table: T, calibrator: Calibrator, *, prefix: str = "calibrated") -> T:
    """Return a table with calibrated probabilities as further columns.

    Scores are found by their names, as in files: a column per class, such as ``logit_cat`` and
    ``logit_dog`` or ``prob_cat`` and ``prob_dog``, or lists in a column ``logits`` or ``probs``.
    Columns of classes that the calibrator knows by name may be in any order; lists have that of the
    fit. Rows, their order and all other columns stay as
    they are; where a score is missing, the probabilities are missing too.

    Parameters
    ----------
    table : data frame, Arrow table or record batch, or mapping of arrays
        Of pandas, polars or pyarrow, or as Ray Data passes them. NaN is a missing value in pandas,
        and an error elsewhere.
    calibrator : Calibrator
        Fitted. Features that it needs are in a column ``features`` of lists, or in ``feature_0``,
        ``feature_1`` and so on.
    prefix : str
        New columns are ``calibrated_cat`` and ``calibrated_dog``, or ``calibrated`` for lists and
        for one column of two classes. They have the types of the scores, and at least single
        precision.

    Examples
    --------
    >>> import pandas as pd
    >>> from calibrant.calibrators import TemperatureScaling
    >>> predicted, labels = [0, 1, 1, 0, 0, 1, 1, 0] * 9, [0, 1, 1, 1, 0, 0, 1, 0] * 9
    >>> fitted = TemperatureScaling().fit(4 * np.eye(2)[predicted], labels)
    >>> frame = pd.DataFrame({"id": ["a", "b"], "logit_no": [4.0, None], "logit_yes": [0.0, 1.0]})
    >>> calibrate_table(frame, fitted).round(3)
      id  logit_no  logit_yes  calibrated_no  calibrated_yes
    0  a       4.0        0.0           0.75            0.25
    1  b       NaN        1.0            NaN             NaN
    """
    check_calibrator(calibrator)
    form = _Form(_columns_of(table))
    scores = _scores(form, prefix, calibrator.class_names_)
    if taken := [name for name in scores.new if name in form.columns]:
        raise ValueError(
            f"{_TABLE} has a column {taken[0]} already: pass another prefix, or drop it"
        )
    result: T = _extended(table, _calibrated(form, scores, calibrator))
    return result


# ------------------------------------------------------------------------------------------- forms


@dataclass(frozen=True)
class _Form:
    """The columns of a table in the types of Arrow, by what reads them."""

    columns: Mapping[str, Callable[[], Any]]

    def read(self, name: str) -> Any:
        """Return a column as one array."""
        column = self.columns[name]()
        return column.combine_chunks() if hasattr(column, "combine_chunks") else column

    def is_list(self, name: str) -> bool:
        """Return True if a column is there, and holds lists."""
        return name in self.columns and _is_list(self.columns[name]().type)


def _columns_of(table: Any) -> Mapping[str, Callable[[], Any]]:
    pa = load_pyarrow()
    if isinstance(table, Mapping):
        return {name: cache(partial(_from_array, values)) for name, values in table.items()}
    if isinstance(table, (pa.Table, pa.RecordBatch)):
        return _unique(list(table.schema.names), table.column)
    if hasattr(type(table), "__array__") and is_frame(
        table
    ):  # a lazy frame would warn if asked itself
        frame: Any = table
        if hasattr(frame, "with_columns"):
            return _unique(list(frame.columns), lambda name: frame[name].to_arrow())
        return _unique(list(frame.columns), lambda name: pa.array(frame[name], from_pandas=True))
    raise TypeError(
        "a table of pandas, polars or Arrow or a mapping of arrays is wanted, got a "
        f"{type(table).__name__}: lazy frames are collected first, or take it in map_batches"
    )


def _unique(names: Sequence[Any], read: Callable[[Any], Any]) -> Mapping[str, Callable[[], Any]]:
    columns = {str(name): cache(partial(read, name)) for name in names}
    if len(columns) < len(names):
        raise ValueError(f"{_TABLE} has two columns of one name among {comma_separated(columns)}")
    return columns


def _from_array(values: Any) -> Any:
    pa, array = load_pyarrow(), np.asarray(values)
    if array.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
    return pa.array(array.tolist() if array.dtype == object else array)


def _extended(table: Any, new: dict[str, Any]) -> Any:
    """Return a table with further columns, which are in the types of Arrow."""
    if isinstance(table, Mapping):
        return {**table, **{name: _as_array(values) for name, values in new.items()}}
    if hasattr(table, "append_column"):  # of Arrow
        for name, values in new.items():
            table = table.append_column(name, values)
        return table
    if hasattr(table, "with_columns"):
        import polars

        return table.with_columns(**{name: polars.from_arrow(x) for name, x in new.items()})
    return table.assign(**{name: values.to_pandas().to_numpy() for name, values in new.items()})


def _as_array(values: Any) -> Array:
    """Return a column as ``(rows,)``, or lists without missing ones as ``(rows, classes)``."""
    if not _is_list(values.type) or values.null_count:
        return np.asarray(values.to_numpy(zero_copy_only=False))
    flat = np.asarray(values.flatten().to_numpy(zero_copy_only=False))
    return flat.reshape(len(values), -1) if len(values) else flat.reshape(0, 0)


def _is_list(kind: Any) -> bool:
    types = load_pyarrow().types
    return any(
        test(kind) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    )


# ------------------------------------------------------------------------------------------ scores


@dataclass(frozen=True)
class _Scores:
    """The columns of scores, those of features, and the names of new ones."""

    domain: str
    columns: list[str]  # one of lists, or one for each class
    features: list[str]
    new: list[str]
    places: IntArray | None = None  # of the classes of the fit among the columns


def _scores(form: _Form, prefix: str, known: Sequence[str] | None) -> _Scores:
    """Find the columns of scores and features by their names, in the order of the classes."""
    lists = [name for name in (*SCORES, "features") if form.is_list(name)]
    layout = layout_of([name for name in form.columns if name not in lists], _TABLE)
    features = ["features"] if "features" in lists else layout.further.get("features", [])
    for domain in SCORES:
        if domain in lists:
            return _Scores(domain, [domain], features, [prefix])
        if domain in layout.scores:
            new = [f"{prefix}_{name}" for name in layout.names] or [prefix]
            places = class_order(known, layout.class_names, _TABLE)
            return _Scores(domain, layout.scores[domain], features, new, places)
    found = comma_separated([*form.columns][:50])
    raise ValueError(
        f"{_TABLE} has no column of logits or probabilities, only {found}: {RULES}; or lists in a "
        "column logits or probs"
    )


def _calibrated(form: _Form, scores: _Scores, calibrator: Calibrator) -> dict[str, Any]:
    """Return the new columns, in the types of Arrow."""
    columns = [form.read(name) for name in scores.columns]
    read = [*columns]
    by_name = calibrator.input_columns not in ((), ("features",))
    if calibrator.needs_features and not by_name:
        if not scores.features:
            name = type(calibrator).__name__
            raise ValueError(f"{name} needs features: add a column of lists to {_TABLE}")
        read += [form.read(name) for name in scores.features]
    valid = np.logical_and.reduce([column.is_valid().to_numpy(False) for column in read])
    types = [
        _target_type(column, name) for column, name in zip(columns, scores.columns, strict=True)
    ]
    if not valid.any():  # lists without rows may leave the number of classes open
        nulls = load_pyarrow().nulls
        return {n: nulls(len(valid), kind) for n, kind in zip(scores.new, types, strict=True)}
    values = _matrix(columns, valid, scores.columns)
    features: Any = None
    if by_name:
        features = _metadata(form, calibrator, valid)
    elif calibrator.needs_features:
        features = _matrix(read[len(columns) :], valid, scores.features)
    if scores.places is not None:
        values = values[:, scores.places]
    probs = _probs(calibrator, values, features, scores.domain)
    if scores.places is not None:
        probs = probs[:, np.argsort(scores.places)]
    return dict(zip(scores.new, _columns(probs, valid, types), strict=True))


def _metadata(form: _Form, calibrator: Calibrator, valid: BoolArray) -> Features | None:
    """Return the metadata columns that a calibrator reads, whose values may be missing."""
    if lacking := [name for name in calibrator.input_columns if name not in form.columns]:
        raise ValueError(
            f"{type(calibrator).__name__} reads metadata columns: {_TABLE} has no "
            f"{comma_separated(lacking)}, only {comma_separated([*form.columns][:50])}"
        )
    arrays = {n: form.read(n).to_numpy(zero_copy_only=False) for n in calibrator.input_columns}
    return calibrator.input_features(arrays, valid)


def _matrix(columns: Sequence[Any], valid: BoolArray, names: Sequence[str]) -> Array:
    """Return the rows that have all values, ``(rows, classes)`` or ``(rows,)``."""
    pa = load_pyarrow()
    kept = [column.filter(pa.array(valid)) for column in columns]
    if not _is_list(kept[0].type):
        arrays = [_numbers(column, name) for column, name in zip(kept, names, strict=True)]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)
    lengths = pa.compute.list_value_length(kept[0]).to_numpy()
    if (lengths != lengths[0]).any():
        raise ValueError(
            f"{_TABLE}: the rows of {names[0]} must have one length, got lists of {lengths.min()} "
            f"to {lengths.max()} values; write every class of every row"
        )
    return _numbers(kept[0].flatten(), names[0]).reshape(len(lengths), -1)


def _numbers(column: Any, name: str) -> Array:
    if column.null_count:
        raise ValueError(f"{_TABLE}: lists of {name} have missing values; drop or fill those rows")
    pa = load_pyarrow()
    column = column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _target_type(column: Any, name: str) -> Any:
    """Return the type of the probabilities: that of the scores, if they are floats."""
    pa = load_pyarrow()
    kind, types = column.type, pa.types
    values = kind.value_type if _is_list(column.type) else kind
    numbers = (types.is_floating, types.is_integer, types.is_decimal)
    if not any(test(values) for test in numbers):
        raise ValueError(f"{_TABLE}: {name} must be numbers, got {values}")
    half_or_single = types.is_float16(values) or types.is_float32(values)
    values = pa.float32() if half_or_single else pa.float64()
    if types.is_fixed_size_list(kind):
        return pa.list_(values, kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(values)
    return pa.list_(values) if types.is_list(kind) else values


def _probs(calibrator: Calibrator, values: Array, features: Features | None, domain: str) -> Array:
    """Return the calibrated probabilities of rows, some of them at a time."""
    check_shape(calibrator, values.shape[1:], _TABLE)
    rows = max(1, CHUNK // max(1, values[0].size))
    parts = []
    for start in range(0, len(values), rows):
        chunk = values[start : start + rows]
        if domain == "probs":
            chunk = logits_from_probs(chunk, tags=calibrator.multilabel)
        inputs = feature_rows(features, slice(start, start + rows))
        parts.append(probs_of(calibrator, calibrator.transform(chunk, inputs)))
    return np.concatenate(parts)


def _columns(probs: Array, valid: BoolArray, types: Sequence[Any]) -> Iterator[Any]:
    """Yield columns of probabilities, missing in the rows that have no scores."""
    pa = load_pyarrow()
    places = pa.array(np.cumsum(valid) - 1, mask=~valid)
    if _is_list(types[0]):
        flat = pa.array(probs.reshape(-1))
        lists = pa.FixedSizeListArray.from_arrays(flat, probs.shape[1])
        yield lists.take(places).cast(types[0])
        return
    for values, kind in zip(probs.reshape(len(probs), -1).T, types, strict=True):
        yield pa.array(values).cast(kind).take(places)
