"""JSON lines: files with an object to a line, such as a text and its label."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from calibrant.data.formats import Array, Header, NoArrayError, Reader

LONGEST_LINE = 1 << 24
KINDS: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}


class JsonLines(Reader):
    """A ``.jsonl`` file; its columns are the keys of the objects.

    A column is of numbers, of truth values or of text if every line has one. What else it holds,
    such as lists and missing values, is no array.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        kinds: dict[str, set[type]] = {}
        counts: dict[str, int] = {}
        rows = 0
        for _, line in self._objects():
            rows += 1
            for key, value in line.items():
                kinds.setdefault(key, set()).add(_kind(value))
                counts[key] = counts.get(key, 0) + 1
        self.headers = {
            key: _header(rows, {*found, *([type(None)] if counts[key] < rows else [])})
            for key, found in kinds.items()
        }

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the object of every line that is not blank, with the number of the line."""
        with self.reopened() as stream:
            for number in itertools.count(1):
                line = stream.readline(LONGEST_LINE)
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
        while chunk := list(itertools.islice(values, rows)):
            yield np.array(chunk, header.dtype)


def _kind(value: object) -> type:
    large = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
    return object if large else type(value)


def _header(rows: int, kinds: set[type]) -> Header:
    """Return the header of a column of values of some types."""
    if kinds == {int, float}:
        kinds = {float}
    (kind, *others) = kinds
    exact = not others and kind in KINDS
    return Header((rows,), np.dtype(KINDS[kind] if exact else str), exact)
