"""Read documents from files: chats, prompts with answers, and plain texts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from calibrant._core.checks import warn
from calibrant.llm.heads.documents import BadDocument

T = TypeVar("T")

_SUFFIXES = (".jsonl", ".json", ".txt")
_FORMS = (
    '{"messages": [{"role", "content"}, ...]}, {"conversations": [...]} of texts in turn or of '
    '{"from", "value"}, {"instruction", "output"}, {"question", "answer"}, {"prompt", "answer"}, '
    '{"prompt", "completion"} or {"text"}'
)
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
}
"""Roles in chats, by the speakers of ShareGPT conversations."""
_MAX_REASONS, _MAX_PLACES = 10, 20
"""Reasons why documents cannot be used, and places of each, that an error lists."""


def read_documents(
    path: str | os.PathLike[str], *, limit: int | None = None, skip_bad: bool = False
) -> list[Any]:
    """Read documents for :func:`collect`.

    A file is ``.jsonl``, ``.json`` with a list, or ``.txt`` with an empty line between documents.
    Rows are chats, instructions with outputs, questions or prompts with answers, or texts; the
    guide to language models lists the forms.

    Parameters
    ----------
    path : path
    limit : int, optional
        Read only the first documents. Of ``.jsonl`` and ``.txt`` the rest is not read at all.
    skip_bad : bool
        Leave out documents in another form, with a warning that lists them. By default they are
        an error, which lists them too.
    """
    return _convert_documents(path, lambda document, _: document, limit, skip_bad)


def _check_document_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file of documents; raise if it has another suffix or is not there."""
    file = Path(path)
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"{path} must be .jsonl, .json or .txt, got the suffix {file.suffix!r}")
    file.open("rb").close()
    return file


def _convert_documents(
    path: str | os.PathLike[str],
    function: Callable[[Any, str], T],
    limit: int | None = None,
    skip_bad: bool = False,
) -> list[T]:
    """Apply a function to each document of a file and its place there, one after the other."""
    file = _check_document_file(path)
    results, bad = [], []
    for place, row in islice(_rows(file), limit):
        try:
            results.append(function(_document(row, place), place))
        except BadDocument as error:
            bad.append(error)
    if not results and not bad:
        raise ValueError(f"{file} must hold one document or more, got none")
    if bad and not (skip_bad and results):
        raise ValueError(_refusal(bad, len(results), file))
    if bad:
        warn(f"left out {_counted(bad, len(results), file)}")
    return results


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row and its place; lines of JSON as bytes."""
    if file.suffix == ".txt":
        yield from _paragraphs(file)
    elif file.suffix == ".json":
        rows = _parsed(file.read_bytes(), str(file))
        if not isinstance(rows, list):
            raise ValueError(f"{file} must hold a list of documents, got {rows!r:.60}")
        yield from ((f"document {n} of {file}", row) for n, row in enumerate(rows, start=1))
    else:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"line {number} of {file}", line


def _paragraphs(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts between empty lines, each with the place of its first line."""
    lines: list[str] = []
    try:
        with file.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(chain(stream, [""]), start=1):
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield f"line {number - len(lines)} of {file}", "".join(lines).strip()
                    lines = []
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error})") from error


def _refusal(bad: Sequence[BadDocument], usable: int, file: Path, counts: str = "documents") -> str:
    """Return the message of an error about what cannot be used in a file."""
    remedy = "correct it" if len(bad) == 1 else "correct them"
    remedy += " or pass skip_bad" if usable else ""
    told = str(bad[0]) if len(bad) == 1 else f"cannot use {_counted(bad, usable, file, counts)}"
    return f"{told}; {remedy}" if len(bad) == 1 else f"{told}\n{remedy}"


def _counted(bad: Sequence[BadDocument], usable: int, file: Path, counts: str = "documents") -> str:
    """Count and list bad documents, those with the same reason together."""
    places: dict[str, list[str]] = {}
    for error in bad:
        # the path of another file in a folder stays
        where = error.place.replace(f" of {file},", ",", 1).removesuffix(f" of {file}")
        places.setdefault(error.reason, []).append(where)
    lines = []
    for reason, listed in places.items():
        rest = f" and {len(listed) - _MAX_PLACES} more" if len(listed) > _MAX_PLACES else ""
        lines.append(f"{', '.join(listed[:_MAX_PLACES])}{rest}: {reason}")
    if len(lines) > _MAX_REASONS:
        lines[_MAX_REASONS:] = [f"and {len(lines) - _MAX_REASONS} more reasons"]
    title = f"{len(bad)} of {len(bad) + usable} {counts} of {file}:"
    return "\n  ".join([title, *lines])


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadDocument(where, f"is not UTF-8 text ({error})") from error
    except (ValueError, RecursionError) as error:
        raise BadDocument(where, f"is not valid JSON: {error}") from error


def _document(row: Any, where: str) -> Any:
    """Return a row as a document: a text, a pair of prompt and answer, or a chat."""
    row = _parsed(row, where) if isinstance(row, bytes) else row
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        if "messages" in row:
            return _messages(row["messages"], where)
        if "conversations" in row:
            return _conversation(row["conversations"], where)
        if "instruction" in row and "output" in row:
            more = "" if row.get("input") is None else _text(row, "input", where)
            question = [text for text in (_text(row, "instruction", where), more) if text]
            return _chat("\n\n".join(question), _text(row, "output", where))
        if "question" in row and "answer" in row:
            return _chat(_text(row, "question", where), _text(row, "answer", where))
        answer = next((name for name in ("answer", "completion") if name in row), None)
        if "prompt" in row and answer:
            if isinstance(row["prompt"], list) and isinstance(row[answer], list):
                return _messages(row["prompt"] + row[answer], where)
            return _text(row, "prompt", where), _text(row, answer, where)
        if "text" in row:
            return _text(row, "text", where)
    got = f"the keys {', '.join(row)}" if isinstance(row, Mapping) else type(row).__name__
    raise BadDocument(where, f"must be one of {_FORMS}, got {got}")


def _messages(turns: Any, where: str) -> list[dict[str, Any]]:
    chat = []
    for place, turn in _placed(turns, where):
        _text(turn, "role", place)
        parts = turn.get("content")
        if isinstance(parts, list) and all(
            isinstance(part, Mapping)
            and part.get("type", "text") == "text"
            and isinstance(part.get("text"), str)
            for part in parts
        ):
            turn = {**turn, "content": "".join(part["text"] for part in parts)}
        _text(turn, "content", place)
        chat.append(dict(turn))
    return chat


def _conversation(turns: Any, where: str) -> list[dict[str, str]]:
    placed = _placed(turns, where)
    if all(isinstance(turn, str) for turn in turns):
        return _chat(*turns)
    chat = []
    for place, turn in placed:
        speaker = _text(turn, "from", place)
        if speaker not in _ROLES:
            raise BadDocument(place, f"must be from one of {', '.join(_ROLES)}, got {speaker!r}")
        chat.append({"role": _ROLES[speaker], "content": _text(turn, "value", place)})
    return chat


def _placed(turns: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise BadDocument(where, f"must have a list of turns, got {turns!r:.60}; see {_FORMS}")
    return [(f"{where}, turn {n}", turn) for n, turn in enumerate(turns, start=1)]


def _text(row: Any, name: str, where: str) -> str:
    # a template would render any other value as Python shows it
    value = row.get(name) if isinstance(row, Mapping) else None
    if not isinstance(value, str):
        raise BadDocument(where, f"must have a string as its {name!r}, got {row!r:.60}")
    return value


def _chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
