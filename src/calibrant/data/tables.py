"""Tables with a row per example and a column per class: rules that make arrays of their columns.

The same rules hold for ``.csv`` files, ``.parquet`` files and data frames. What is a logit and
what a probability is told by the names of the columns, never by their values.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import IGNORED, IntArray
from calibrant._core.class_names import ClassNumbers, LabelError, as_array, score_column
from calibrant._core.messages import comma_separated, unknown_name
from calibrant.data.arrow_files import joined_columns
from calibrant.data.formats import Array, ArrayHeader, Reader, TableRows, _rechunked
from calibrant.data.metadata import _storable
from calibrant.data.shards import (
    ARRAY_KEYS,
    CLASS_NAMES,
    LABEL_NAMES,
    SCORES,
    _owner,
    _split_names,
    full_key,
)

_FURTHER = re.compile(r"(?P<array>label|feature)s?_(?P<name>.+)", re.IGNORECASE | re.DOTALL)
"""Columns of labels, one for each tag, and of features, numbered from 0."""
_SPLIT = "split"
_MAX_SPLITS = 100
RULES = (
    "name the columns of logits logit_CLASS or those of probabilities prob_CLASS (one column prob "
    "means P(class 1)), and the column of labels label; or say which they are: "
    "--labels truth --probs p_a,p_b or open_dataset(path, labels='truth', probs=['p_a', 'p_b'])"
)


class ColumnNames(NamedTuple):
    """The columns that a user names, where the rules would not find them."""

    labels: str | None = None
    logits: tuple[str, ...] = ()
    probs: tuple[str, ...] = ()

    @property
    def scores(self) -> dict[str, tuple[str, ...]]:
        """The columns of logits and of probabilities, where they are named."""
        return {domain: names for domain in SCORES if (names := getattr(self, domain))}

    @property
    def words(self) -> list[str]:
        """The options that name these columns on the command line."""
        words = [] if self.labels is None else ["--labels", self.labels]
        for domain, names in self.scores.items():
            line = io.StringIO()
            csv.writer(line, lineterminator="").writerow(names)  # names with commas in quotes
            words += [f"--{domain}", line.getvalue()]
        return words

    def keys(self, file: str) -> dict[str, str]:
        """Return the keys of arrays, of a file that is no table, by the names given for them."""
        for domain, names in self.scores.items():
            if len(names) > 1:
                raise ValueError(
                    f"{file}: its {domain} are one array (examples, classes), and several are "
                    f"named, {comma_separated(names)}: name that one"
                )
        named = {names[0]: domain for domain, names in self.scores.items()}
        return named | ({} if self.labels is None else {self.labels: "labels"})

    def check(self, columns: Sequence[str], where: str) -> None:
        """Raise for a name that no column has."""
        wanted = [*self.logits, *self.probs, *([] if self.labels is None else [self.labels])]
        for name in wanted:
            if name not in columns:
                raise ValueError(f"{where}: {unknown_name('column', name, list(columns)[:50])}")
            if wanted.count(name) > 1:
                raise ValueError(f"{where}: {name} is named twice: name a column a class")


BY_RULES = ColumnNames()
"""No column is named: the rules find them."""


@dataclass(frozen=True)
class TableLayout:
    """The columns of a table by their meaning."""

    scores: dict[str, list[str]]  # columns of "logits" or "probs", in the order of the classes
    further: dict[str, list[str]]  # columns of "features", and of "labels" where classes are tags
    names: list[str]  # of the classes; none where one column stands for two classes
    labels: str | None
    split: str | None
    others: list[str]
    columns: list[str]  # all of them, in the order of the table

    @property
    def stacked(self) -> dict[str, list[str]]:
        """The columns that make an array ``(n, columns)``, all of them numbers."""
        return self.scores | self.further

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, unless they are just their numbers."""
        numbers = [str(i) for i in range(len(self.names))]
        return None if self.names == numbers else self.names

    @property
    def table_names(self) -> dict[str, str]:
        """Names of the columns, in their order, by those that :func:`_table_of` gives them."""
        written = {self.labels: "labels", self.split: _SPLIT}
        for array, columns in self.stacked.items():
            names = map(str, range(len(columns))) if array == "features" else self.names or [""]
            written |= {
                column: f"{array}_{name}".removesuffix("_")
                for column, name in zip(columns, names, strict=True)
            }
        return {written.get(column, column): column for column in self.columns}


def layout_of(columns: Sequence[str], where: str, named: ColumnNames = BY_RULES) -> TableLayout:
    """Return the layout of a table, without scores if no rule applies; ``where`` is for errors.

    >>> layout = layout_of(["id", "y_true", "prob_cat", "prob_dog"], "the frame")
    >>> layout.scores, layout.names, layout.labels, layout.others
    ({'probs': ['prob_cat', 'prob_dog']}, ['cat', 'dog'], 'y_true', ['id'])
    >>> layout = layout_of(["truth", "score"], "the frame", ColumnNames("truth", probs=("score",)))
    >>> layout.scores, layout.labels
    ({'probs': ['score']}, 'truth')
    """
    named.check(columns, where)
    found = {domain: _by_class(names) for domain, names in named.scores.items()}
    found = found or _scores_by_class(columns, where)
    names: list[str] = []
    for domain in filter(found.get, SCORES):
        ordered = _ordered(found[domain], where)
        if names and sorted(names) != sorted(ordered):
            raise ValueError(
                f"{where} has logits of the classes {comma_separated(names)} and probabilities of "
                f"{comma_separated(ordered)}: rename the columns of one of them"
            )
        names = names or ordered
    scores = {
        domain: [found[domain][name] for name in (names or found[domain])]
        for domain in SCORES
        if domain in found
    }
    used = [column for by_class in scores.values() for column in by_class]
    labels = [c for c in columns if c.lower() in LABEL_NAMES]
    if named.labels is not None:
        labels = [named.labels]
    splits = [c for c in columns if c.lower() == _SPLIT]
    for alike in (labels, splits):
        if len(alike) > 1:
            raise _ambiguous(where, *alike[:2])
    further = _further(columns, names, where, tags=not labels)
    known = {*used, *labels, *splits, *chain.from_iterable(further.values())}
    if named != BY_RULES:  # other columns of these names would be taken for the named ones
        columns = [column for column in columns if column in known or column not in ARRAY_KEYS]
    others = [column for column in columns if column not in known]
    if scores and (confusing := [c for c in others if _split_names([c])]):
        raise ValueError(
            f"{where} has a column {confusing[0]} beside {used[0]}: rename it, since it would be "
            "taken for a split of that name"
        )
    label, split = (next(iter(columns), None) for columns in (labels, splits))
    return TableLayout(scores, further, names, label, split, others, list(columns))


def _by_class(columns: Sequence[str]) -> dict[str, str]:
    """Return named columns by their classes: what is left without the words that all have.

    >>> _by_class(["cat_score", "dog_score"]), _by_class(["p_a", "p_b"]), _by_class(["score"])
    ({'cat': 'cat_score', 'dog': 'dog_score'}, {'a': 'p_a', 'b': 'p_b'}, {'': 'score'})
    """
    if len(columns) == 1:
        return {"": columns[0]}
    words = [name.split("_") for name in columns]
    for end in (0, -1):
        while min(map(len, words)) > 1 and len({each[end] for each in words}) == 1:
            for each in words:
                each.pop(end)
    return {"_".join(each): name for each, name in zip(words, columns, strict=True)}


def _scores_by_class(columns: Sequence[str], where: str) -> dict[str, dict[str, str]]:
    """Return the columns whose names say that they are logits or probabilities, by class."""
    found: dict[str, dict[str, str]] = {}
    prefixes: dict[str, set[str]] = {}
    for column in columns:
        score = score_column(column)
        if score is None:
            continue
        by_class, name = found.setdefault(score.domain, {}), score.class_name
        prefixes.setdefault(score.domain, set()).add(score.prefix)
        if name in by_class or len(prefixes[score.domain]) > 1:
            raise _ambiguous(where, by_class.get(name) or next(iter(by_class.values())), column)
        by_class[name] = column
    return found


def _further(
    columns: Sequence[str], names: Sequence[str], where: str, *, tags: bool
) -> dict[str, list[str]]:
    """Return the columns of features 0, 1, ..., and those of ``tags``: of labels of every class."""
    found: dict[str, dict[str, str]] = {}
    for column in columns:
        if match := _FURTHER.fullmatch(column):
            by_name = found.setdefault(f"{match['array'].lower()}s", {})
            name = match["name"]
            name = str(int(name)) if name.isdecimal() else name
            if name in by_name:
                raise _ambiguous(where, by_name[name], column)
            by_name[name] = column
    features = found.get("features", {})
    wanted = {
        "labels": list(names) if tags else [],
        "features": [str(i) for i in range(len(features))],
    }
    return {
        array: [found[array][name] for name in order]
        for array, order in wanted.items()
        if order and set(found.get(array, ())) == set(order)
    }


def _ordered(by_class: Mapping[str, str], where: str) -> list[str]:
    """Return the names of the classes: numbers by size, others in the order of the columns."""
    names, columns = list(by_class), list(by_class.values())
    if len(names) == 1:  # P(y = 1), under any name but that of class 0
        if names == ["0"]:
            raise ValueError(
                f"{where} has a column {columns[0]} and none for class 1: one column alone must be "
                "that of class 1"
            )
        return []
    if "" in names:
        others = [column for column in columns if column != by_class[""]]
        raise _ambiguous(where, by_class[""], others[0])
    numbers = [name for name in names if name.isdecimal()]
    if numbers and len(numbers) < len(names):
        name = next(name for name in names if name not in numbers)
        raise _ambiguous(where, by_class[numbers[0]], by_class[name])
    return sorted(names, key=int) if numbers else names


def _ambiguous(where: str, first: str, second: str) -> ValueError:
    return ValueError(
        f"{where} has columns {first} and {second}, which do not go together: rename or remove "
        "one, or say which columns count: --labels, --probs or --logits, as of open_dataset"
    )


class TableReader(Reader):
    """The arrays that the rules make of a table, by the keys that they would have in a file.

    The columns of scores are numbers.
    """

    def __init__(self, table: Reader, layout: TableLayout) -> None:
        self.path, self.stream, self.fingerprint = table.path, table.stream, table.fingerprint
        self.table_names = layout.table_names
        self._table, self._layout = table, layout
        self._meaning: dict[str, tuple[str, str]] = {}  # split and column of each key
        self.headers: dict[str, ArrayHeader] = {}
        # whole numbers become floats
        stacked = {
            array: np.result_type(np.float16, *(table.headers[c].dtype for c in columns))
            for array, columns in layout.stacked.items()
        }
        stacked |= {"labels": np.dtype(np.int64)} if "labels" in stacked else {}
        for split, rows in self._rows_by_split().items():
            for array, dtype in stacked.items():
                alone = array in layout.scores and not layout.names  # one column for two classes
                shape = (rows,) if alone else (rows, len(layout.stacked[array]))
                self._add(split, array, ArrayHeader(shape, dtype))
            if layout.labels is not None:
                self._add(split, "labels", ArrayHeader((rows,), np.dtype(np.int64)))
            for other in layout.others:
                header = table.headers[other]
                self._add(split, other, header._replace(shape=(rows, *header.shape[1:])))
        if layout.class_names is not None:
            names = np.array(layout.class_names)
            self.headers[CLASS_NAMES] = ArrayHeader(names.shape, names.dtype)

    def _add(self, split: str, column: str, header: ArrayHeader) -> None:
        key = full_key(split, column)
        self._meaning[key], self.headers[key] = (split, column), header

    def _rows_by_split(self) -> dict[str, int]:
        layout = self._layout
        if layout.split is None:
            return {"": next(header.rows for header in self._table.headers.values())}
        counts: Counter[str] = Counter()
        for batch in self._table.batches([layout.split], 1 << 16):
            counts.update(self._splits(batch).tolist())
            if len(counts) > _MAX_SPLITS:
                raise ValueError(
                    f"{self.path}: {layout.split} must name at most {_MAX_SPLITS} splits, has more "
                    f"before {batch.place(-1)}; rename the column if it is something else"
                )
        return dict(counts)

    def _splits(self, batch: TableRows) -> Array:
        """Return the name of the split of each row."""
        assert self._layout.split is not None
        names = np.char.strip(batch.columns[self._layout.split].astype(str))
        if (missing := np.flatnonzero(names == "")).size:
            place = batch.place(missing[0])
            raise ValueError(f"{self.path}, {place}: {self._layout.split} is missing; fill it in")
        return names

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time."""
        if key == CLASS_NAMES:
            names = np.array(self._layout.class_names)
            yield from (names[i : i + rows] for i in range(0, len(names), rows))
            return
        dtype = self.headers[key].dtype
        yield from _rechunked(self._arrays(*self._meaning[key], rows, dtype), rows)

    def _arrays(self, split: str, column: str, rows: int, dtype: np.dtype[Any]) -> Iterator[Array]:
        layout = self._layout
        numbers = ClassNumbers(layout.names)
        if column == "labels" and layout.labels is not None:
            columns = [layout.labels]
        else:
            columns = layout.stacked.get(column, [column])
        wanted = [*columns, *([] if layout.split is None else [layout.split])]
        for batch in self._table.batches(wanted, rows):
            if column in layout.stacked:
                stacked = np.stack([batch.columns[c] for c in columns], axis=-1)
                if column == "labels":
                    self._check_tags(stacked, batch, columns)
                alone = column in layout.scores and not layout.names
                values = (stacked[:, 0] if alone else stacked).astype(dtype, copy=False)
            elif column == "labels":
                values = self._numbered(numbers, batch, columns[0])
            else:
                values = batch.columns[columns[0]]
            yield values if layout.split is None else values[self._splits(batch) == split]

    def _check_tags(self, labels: Array, batch: TableRows, columns: Sequence[str]) -> None:
        """Raise unless labels of tags are 0, 1 or ignored, before they become whole numbers."""
        wrong = np.argwhere(~np.isin(labels, (0, 1, IGNORED)))
        if wrong.size:
            row, tag = wrong[0]
            raise ValueError(
                f"{self.path}, {batch.place(row)}: {columns[tag]} must be 0, 1 or {IGNORED} "
                f"(unknown), got {labels[row, tag]:g}"
            )

    def _numbered(self, numbers: ClassNumbers, batch: TableRows, column: str) -> IntArray:
        try:
            return numbers(batch.columns[column])
        except LabelError as error:
            place = batch.place(error.row)
            raise ValueError(f"{self.path}, {place}: {column} {error}") from error

    def arrow(self, key: str) -> Any:
        """Return a column that is neither scores nor labels in the types of Arrow."""
        split, column = self._meaning.get(key, ("", ""))
        if column not in self._layout.others:
            return None
        values = self._table.arrow(column)
        if values is None or self._layout.split is None:
            return values
        batches = self._table.batches([self._layout.split], 1 << 16)
        return values.filter(np.concatenate([self._splits(batch) == split for batch in batches]))


def _table_of(arrays: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Return arrays as the columns of a table, from which the rules make the same arrays again.

    ``form`` is that of the file, for errors.

    >>> list(_table_of({"probs": np.ones((1, 2)) / 2, "labels": np.array([0])}, ".csv"))
    ['probs_0', 'probs_1', 'labels']
    """
    stored = arrays.get(CLASS_NAMES)
    splits = _split_names(arrays) or [""]
    tables: list[dict[str, Any]] = []
    for split in splits:
        table: dict[str, Any] = {}
        for key, values in arrays.items():
            part, column = _owner(key, splits)
            if part == split and key != CLASS_NAMES:
                table |= _table_columns(key, column, values, stored, form)
        rows = {len(values) for values in table.values()}
        if len(rows) > 1:
            raise _no_table(form, f"columns of {comma_separated(map(str, sorted(rows)))} rows")
        if splits != [""]:
            table[_SPLIT] = np.full(rows.pop(), split)
        tables.append(table)
    for table in tables[1:]:
        if set(table) != set(tables[0]):
            differing = comma_separated(sorted(set(table) ^ set(tables[0])))
            raise _no_table(form, f"{differing} of one split only")
    return {key: _concatenated([table[key] for table in tables]) for key in tables[0]}


def _concatenated(parts: Sequence[Any]) -> Any:
    """Return columns one after another, those of Arrow in its types."""
    if len(parts) == 1:
        return parts[0]
    in_arrow = joined_columns([None if isinstance(part, np.ndarray) else part for part in parts])
    return np.concatenate(parts) if in_arrow is None else in_arrow


def _table_columns(
    key: str, column: str, values: Any, names: Array | None, form: str
) -> dict[str, Any]:
    if not isinstance(values, np.ndarray):
        return {column: values}
    if column in ARRAY_KEYS and values.ndim == 2:
        numbers = range(values.shape[1])
        classes = numbers if names is None or column == "features" else names
        return {f"{column}_{name}": values[:, i] for i, name in enumerate(classes)}
    if values.ndim > (2 if form == ".parquet" else 1) or not values.ndim:  # parquet has lists
        raise _no_table(form, f"{key} of shape {values.shape}")
    if column == "labels" and names is not None:
        known = (values >= 0) & (values < len(names))
        return {column: np.where(known, names[np.where(known, values, 0)], values.astype(str))}
    return {column: values}


def _no_table(form: str, what: str) -> ValueError:
    return ValueError(f"a {form} file with a column per class cannot hold {what}; write .npz")


_FRAME = "the data frame"  # in place of a path


class _FrameReader(Reader):
    """The columns of a data frame, and further ones beside it."""

    def __init__(self, frame: Any, beside: Mapping[str, object]) -> None:
        self.path, self.stream, self.fingerprint = _FRAME, io.BytesIO(), ()
        names = [str(name) for name in frame.columns]
        columns = {str(name): _storable(as_array(frame[name])) for name in frame.columns}
        columns |= {name: as_array(values) for name, values in beside.items()}
        if len(set(names)) < len(names):
            raise ValueError(f"{_FRAME} has two columns of one name among {comma_separated(names)}")
        self.columns: dict[str, Array] = columns
        self.headers = {name: ArrayHeader(c.shape, c.dtype) for name, c in columns.items()}

    def batches(self, keys: Sequence[str], rows: int) -> Iterator[TableRows]:
        """Yield all rows of some columns at once."""
        del rows
        columns = {key: self.columns[key] for key in keys}
        yield TableRows(columns, "row", range(len(next(iter(columns.values())))))


def _frame_arrays(
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
