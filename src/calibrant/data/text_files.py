"""Files of text: comma-separated values, and objects of JSON in lines."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from calibrant._core.checks import FloatArray
from calibrant._core.class_names import is_missing
from calibrant._core.messages import comma_separated
from calibrant.data.formats import Array, ArrayHeader, NoArrayError, Reader, TableRows, _rechunked
from calibrant.data.tables import (
    BY_RULES,
    RULES,
    ColumnNames,
    TableLayout,
    TableReader,
    _table_of,
    layout_of,
)

_DELIMITERS = (",", ";", "\t")
MAX_LINE_LENGTH = 1 << 24
"""Characters: rows of half a million classes are shorter, and files without line breaks are not."""
_MAX_FIELDS = 1 << 17
"""Fields of text that are held in memory at one time."""


_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Characters by which the error handler surrogateescape replaces bytes that are no UTF-8."""


class CsvFile(Reader):
    """A ``.csv`` file; the first line names its columns, which are text."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with self._opened() as text:
            first = text.readline(MAX_LINE_LENGTH)
            self._delimiter = next((d for d in _DELIMITERS if d in first), _DELIMITERS[0])
        _, header = next(self._lines(), (1, []))
        names = [name.strip() for name in header]
        self._at = {name: i for i, name in enumerate(names) if name}  # pandas' index has no name
        if len(self._at) < sum(map(bool, names)):
            twice = next(name for name, count in Counter(names).items() if name and count > 1)
            raise self._error(1, f"two columns are called {twice!r}; rename one")
        self._width = len(names)
        self._numeric = self._number_columns(list(self._at))
        rows = sum(1 for _ in self._rows())
        self.headers = {
            name: ArrayHeader((rows,), np.dtype(np.float64 if name in self._numeric else str))
            for name in self._at
        }

    def _number_columns(self, names: Sequence[str]) -> set[str]:
        """Return the names of the columns that are numbers."""
        return set()

    def _opened(self) -> IO[str]:
        """Open the file once more: each array that is read side by side needs its own place."""
        return io.TextIOWrapper(
            self.reopened(), encoding="utf-8-sig", errors="surrogateescape", newline=""
        )

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of every line that is not blank, with its number."""
        with self._opened() as text:
            rows = csv.reader(self._checked(text), delimiter=self._delimiter, strict=True)
            try:
                yield from ((rows.line_num, row) for row in rows if row)
            except csv.Error as problem:
                remedy = "close every quote, and write quotes within a field twice"
                raise self._error(rows.line_num, f"{problem}; {remedy}") from problem

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        width = self._width
        lines = self._lines()
        next(lines)
        for number, row in lines:
            if len(row) != width:
                remedy = (
                    "quote text with commas, and write a decimal point in place of a decimal comma"
                )
                if len(row) < width:
                    remedy = "write all columns; if the file ends here, it is incomplete"
                raise self._error(
                    number, f"{len(row)} fields, but the first line has {width}; {remedy}"
                )
            yield number, row

    def _checked(self, text: IO[str]) -> Iterator[str]:
        """Yield lines of text, and raise for what is none."""
        number = 0
        while line := text.readline(MAX_LINE_LENGTH):
            number += 1
            if len(line) == MAX_LINE_LENGTH:
                raise self._error(number, f"longer than {MAX_LINE_LENGTH:,} characters")
            if "\0" in line:
                remedy = "if a spreadsheet wrote it, save it as CSV in UTF-8"
                raise self._error(number, f"a NUL character, which no text has; {remedy}")
            if not line.isascii() and _NO_UTF8.search(line):
                raise self._error(number, "no UTF-8; save the file in that encoding")
            yield line

    def _error(self, line: int, problem: str) -> ValueError:
        return ValueError(f"{self.path}, line {line}: {problem}")

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of a column at a time."""
        yield from _rechunked((batch.columns[key] for batch in self.batches([key], rows)), rows)

    def batches(self, keys: Sequence[str], rows: int) -> Iterator[TableRows]:
        """Yield at most ``rows`` rows of several columns at a time."""
        size = max(1, min(rows, _MAX_FIELDS // self._width))
        numeric = [key for key in keys if key in self._numeric]
        texts = [key for key in keys if key not in self._numeric]
        numbers_at, texts_at = ([self._at[key] for key in names] for names in (numeric, texts))
        rest = self._rows()
        while True:
            # flat lists: many small ones would keep the garbage collector busy
            lines: list[int] = []
            fields: list[str] = []
            words: list[str] = []
            for line, row in islice(rest, size):
                lines.append(line)
                fields += [row[i] for i in numbers_at]
                words += [row[i].strip() for i in texts_at]
            if not lines:
                return
            columns = dict(zip(numeric, self._numbers(fields, numeric, lines).T, strict=True))
            columns |= {key: np.array(words[i :: len(texts)]) for i, key in enumerate(texts)}
            yield TableRows(columns, "line", lines)

    def _numbers(self, fields: list[str], keys: Sequence[str], lines: Sequence[int]) -> FloatArray:
        """Return fields of rows (lines, keys), or raise for the first that is not a number."""
        try:
            values = np.fromiter(map(float, fields), np.float64, len(fields))
        except ValueError:
            values = np.full(len(fields), math.nan)
        # Python reads 1_0 as 10
        if np.isnan(values).any() or "_" in "".join(fields):
            for i, field in enumerate(fields):
                if problem := _no_number(field):
                    raise self._error(lines[i // len(keys)], f"{keys[i % len(keys)]} {problem}")
        return values.reshape(len(lines), len(keys))


class _CsvTable(CsvFile):
    """A ``.csv`` file with a column per class; columns of scores are numbers."""

    layout: TableLayout

    def __init__(self, path: str, named: ColumnNames = BY_RULES) -> None:
        self._named = named
        super().__init__(path)

    def _number_columns(self, names: Sequence[str]) -> set[str]:
        """Return the names of the columns of scores, labels of tags and features."""
        self.layout = layout_of(names, self.path, self._named)
        if not self.layout.scores:
            shown = comma_separated(f"{name:.40}" for name in names[:50])
            raise ValueError(
                f"{self.path} has no column of logits or probabilities; its first line names "
                f"{shown}: {RULES}"
            )
        return set(chain(*self.layout.stacked.values()))


def _no_number(field: str) -> str:
    """Return why a field is no number, or nothing."""
    text = field.strip()
    try:
        missing = math.isnan(float(text))
    except ValueError:
        missing = is_missing(text)
        comma = "," in text
        remedy = "; write a decimal point in place of the comma" if comma else ""
        if not missing:
            return f"must be a number, got {text[:40]!r}{remedy}"
    if missing:
        return f"must be a number, got {text!r}: drop rows with missing values, or fill them in"
    return f"must be a number, got {text[:40]!r}" if "_" in text else ""


def _csv_reader(path: str, named: ColumnNames = BY_RULES) -> TableReader:
    """Open a ``.csv`` file; a pass over it counts its rows."""
    table = _CsvTable(path, named)
    return TableReader(table, table.layout)


def _write_csv(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as a table with a column per class; numbers keep all of their digits."""
    table = _table_of(arrays, ".csv")
    columns = list(table.values())
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(table)
        size = max(1, _MAX_FIELDS // max(1, len(columns)))
        for start in range(0, len(columns[0]), size):
            texts = (column[start : start + size].astype(str) for column in columns)
            writer.writerows(zip(*texts, strict=True))


_JSON_TYPES: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}


class JsonLines(Reader):
    """A ``.jsonl`` file; its columns are the keys of the objects.

    A column is of numbers, of truth values or of text if every line has one. What else it holds,
    such as lists and missing values, is no array.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        kinds: dict[str, set[type]] = {}
        counts: Counter[str] = Counter()
        rows = 0
        for _, line in self._objects():
            rows += 1
            for key, value in line.items():
                large = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
                kinds.setdefault(key, set()).add(object if large else type(value))
                counts[key] += 1
        self.headers = {}
        for key, found in kinds.items():
            kind, *others = {float} if found == {int, float} else found
            exact = not others and kind in _JSON_TYPES and counts[key] == rows
            dtype = np.dtype(_JSON_TYPES[kind] if exact else str)
            self.headers[key] = ArrayHeader((rows,), dtype, exact)

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the object of every line that is not blank, with the number of the line."""
        with self.reopened() as stream:
            for number in count(1):
                line = stream.readline(MAX_LINE_LENGTH)
                if not line:
                    return
                if line.strip():
                    yield number, self._object(number, line)

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            content = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise self._error(number, "no UTF-8; save the file in that encoding") from error
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"no JSON ({error})") from error
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise self._error(number, f'an object such as {{"text": ...}} is wanted, got a {kind}')
        return content

    def _error(self, line: int, problem: str) -> ValueError:
        return ValueError(f"{self.path}, line {line}: {problem}")

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of a column at a time."""
        header, values = self.headers[key], (line.get(key) for _, line in self._objects())
        if not header.exact:
            raise NoArrayError(
                f"{self.path}: {key} must be text, or numbers, in every line; fill or drop others"
            )
        while chunk := list(islice(values, rows)):
            yield np.array(chunk, header.dtype)
