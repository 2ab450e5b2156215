"""Rows of files with their places, some of which cannot be used, and what services write in them.

Everything that reads answers, questions or logs line by line reads them by :func:`placed_rows`.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from calibrant.llm.heads.documents import BadDocument

Row: TypeAlias = dict[str, Any]
Item: TypeAlias = "tuple[str, Any]"
"""A place in a log and what stands there, or a BadDocument that says why it cannot be used."""
WRONG_FORM = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors of values that are not what a log has in their place."""
CUT_OFF = "is cut off, as by a run that was killed"


def converted(items: Iterable[Item], convert: Callable[[Any, str], Row]) -> Iterator[Item]:
    """Apply a function to each item and its place; its errors take the place of rows."""
    for place, item in items:
        if isinstance(item, BadDocument):
            yield place, item
            continue
        try:
            yield place, convert(item, place)
        except BadDocument as error:
            yield place, error
        except WRONG_FORM as error:
            told = f"{type(error).__name__}: {error}"
            yield place, BadDocument(place, f"does not have the form of this log ({told:.120})")


def placed_rows(file: Path) -> Iterator[Item]:
    """Yield the rows of a file of JSON lines, or of CSV with a line of names; empty cells lack."""
    if file.suffix != ".csv":
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f"line {number} of {file}"
                    yield place, parsed(line, place, is_whole=line.endswith(b"\n"))
        return
    with file.open(encoding="utf-8-sig", newline="") as stream:
        try:
            yield from _cells(stream, file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error})") from error


def _cells(stream: IO[str], file: Path) -> Iterator[Item]:
    reader = csv.DictReader(stream)
    for row in reader:
        place = f"line {reader.line_num} of {file}"
        if None in row or None in row.values():
            yield place, BadDocument(place, "must have as many cells as the first line has names")
        else:
            yield place, {name: value for name, value in row.items() if value != ""}


def usable(items: Iterable[Item]) -> Iterator[tuple[str, Row]]:
    """Yield the rows; raise the error of the first that cannot be used."""
    for place, item in items:
        if isinstance(item, BadDocument):
            raise item
        yield place, dict(item)


def parsed(text: bytes, place: str, *, is_whole: bool = True) -> Any:
    """Return an object of JSON, or the error that it is none."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return BadDocument(place, f"is not valid JSON: {error}" if is_whole else CUT_OFF)
    if not isinstance(value, Mapping):
        return BadDocument(place, f"must be an object, got {value!r:.40}")
    return value


def _probability(logprob: Any, what: str, place: str) -> float:
    """Return the probability of a logarithm that a log has; raise unless it is one."""
    try:
        value = float(logprob)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not value <= 1e-6:  # NaN too
        raise BadDocument(
            place, f"has a log-probability of {what} that is no number up to 0, got {logprob!r:.30}"
        )
    return math.exp(min(value, 0.0))


def token_material(logprobs: Any, place: str) -> Row:
    """Return ``tokens``, their ``token_probs`` and ``top_logprobs`` that a service returned.

    ``logprobs`` has ``content``, a list of ``{"token", "logprob", "top_logprobs"}``, or is that
    list, or has the lists ``tokens`` and ``token_logprobs``; nothing comes of null.
    """
    content = logprobs
    if isinstance(logprobs, Mapping):
        content = logprobs.get("content") or [
            {"token": token, "logprob": value}
            for token, value in zip(
                logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True
            )
        ]
    if not content:
        return {}
    probs = [
        _probability(one.get("logprob"), f"token {n} ({one.get('token', '')!r:.20})", place)
        for n, one in enumerate(content, start=1)
    ]
    row: Row = {"tokens": token_texts(content), "token_probs": probs}
    shown = [
        {each["token"]: each["logprob"] for each in one.get("top_logprobs") or ()}
        for one in content
    ]
    return {**row, "top_logprobs": shown} if any(shown) else row


def token_texts(content: Sequence[Mapping[str, Any]]) -> list[str]:
    r"""Return the texts of tokens; a character of several tokens comes with the last of them.

    >>> token_texts([{"token": "a\\xc3", "bytes": [97, 195]}, {"token": "\\xa9", "bytes": [169]}])
    ['a', 'é']
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [
        decoder.decode(bytes(one["bytes"]))
        if isinstance(one.get("bytes"), list)
        else str(one.get("token", ""))
        for one in content
    ]


def text_of(content: Any) -> str:
    """Return the text of a message, whose content is a string or a list of parts.

    >>> text_of([{"type": "text", "text": "Li"}, {"type": "text", "text": "ma"}])
    'Lima'
    """
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(p.get("text") or "") for p in parts if isinstance(p, Mapping))


def question_of(messages: Any) -> str:
    """Return the last thing that a user said in a chat, or the text itself.

    >>> question_of([{"role": "user", "content": "Capital of Peru?"}])
    'Capital of Peru?'
    """
    if not isinstance(messages, list):
        return text_of(messages)
    said = [one for one in messages if isinstance(one, Mapping) and one.get("role") == "user"]
    return text_of(said[-1].get("content")) if said else ""
