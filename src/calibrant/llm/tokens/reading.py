"""Documents from files: chats, questions with answers, and plain texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMS = (
    '{"messages": [{"role", "content"}, ...]}, {"conversations": [...]} of texts in turn or of '
    '{"from", "value"}, {"instruction", "output"}, {"prompt", "answer"} or {"text"}'
)
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
}
"""Roles in chats, by who speaks in conversations of ShareGPT."""


def read_documents(path: str | os.PathLike[str]) -> list[Any]:
    """Read documents for :func:`collect`.

    Parameters
    ----------
    path : path
        ``.jsonl``, or ``.json`` with a list. A row is a chat (``messages`` as dictionaries with
        role and content, ``conversations`` as strings in turn, or those of ShareGPT as
        dictionaries with from and value, where human or user, gpt, assistant, chatgpt or model,
        and system speak), ``instruction`` with ``output`` and perhaps ``input`` (a chat of two
        turns), ``prompt`` with ``answer``, or ``text``; what they hold must be strings. Or
        ``.txt``, with an empty line between documents.

    Returns
    -------
    list
        Of strings, pairs and chats.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "documents.jsonl"
    ...     _ = file.write_text('{"prompt": "2 + 2 =", "answer": " 4"}')
    ...     read_documents(file)
    [('2 + 2 =', ' 4')]
    """
    file = Path(path)
    content = text_of(file)
    if file.suffix == ".txt":
        found: list[Any] = [part.strip() for part in re.split(r"\n\s*\n", content) if part.strip()]
    elif file.suffix in (".json", ".jsonl"):
        rows = _rows(file, content)
        found = [_document(row, f"{file}, document {n}") for n, row in enumerate(rows)]
    else:
        raise ValueError(f"{file} must be .jsonl, .json or .txt, got the suffix {file.suffix!r}")
    if not found:
        raise ValueError(f"{file} must have a document at least, got none")
    return found


def text_of(file: Path) -> str:
    """A file of UTF-8, with or without the mark that some editors put first."""
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error}): save it as such") from error


def _rows(file: Path, content: str) -> list[Any]:
    if file.suffix == ".jsonl":
        # only "\n" ends a line: strings of JSON may hold the other breaks of splitlines
        lines = enumerate(content.split("\n"), start=1)
        return [_parsed(line, f"line {n} of {file}") for n, line in lines if line.strip()]
    rows = _parsed(content, str(file))
    if not isinstance(rows, list):
        raise ValueError(f"{file} must hold a list of documents, got a {type(rows).__name__}")
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _document(row: Any, where: str) -> Any:
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        if "messages" in row:
            return _messages(row["messages"], where)
        if "conversations" in row:
            return _conversation(row["conversations"], where)
        if "instruction" in row and "output" in row:
            more = "" if row.get("input") is None else _text(row, "input", where)
            asked = "\n\n".join(part for part in (_text(row, "instruction", where), more) if part)
            return _chat(asked, _text(row, "output", where))
        if "prompt" in row and "answer" in row:
            return _text(row, "prompt", where), _text(row, "answer", where)
        if "text" in row:
            return _text(row, "text", where)
    told = f"the keys {', '.join(row)}" if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(f"{where} must be one of {FORMS}, got {told}")


def _messages(turns: Any, where: str) -> list[Any]:
    for place, turn in _placed(turns, where):
        for name in ("role", "content"):
            _text(turn, name, place)
    return list(turns)


def _conversation(turns: Any, where: str) -> list[dict[str, str]]:
    placed = _placed(turns, where)
    if all(isinstance(turn, str) for turn in turns):
        return _chat(*turns)
    return [
        {"role": _role(_text(turn, "from", place), place), "content": _text(turn, "value", place)}
        for place, turn in placed
    ]


def _placed(turns: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where} must have a list of turns, got {turns!r:.60}; see {FORMS}")
    return [(f"{where}, turn {n}", turn) for n, turn in enumerate(turns)]


def _role(speaker: str, where: str) -> str:
    if speaker not in SPEAKERS:
        raise ValueError(
            f"{where} must be from one of {', '.join(SPEAKERS)}, got {speaker!r}: leave such "
            "conversations out, or write them as messages"
        )
    return SPEAKERS[speaker]


def _text(part: Any, name: str, where: str) -> str:
    # a template would write any other value as Python shows it
    value = part.get(name) if isinstance(part, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(
            f"{where} must have a string as its {name!r}, got {part!r:.60}: write it as text, or "
            "leave the document out"
        )
    return value


def _chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
