"""Read documents from files: chats, prompts with answers, and plain texts."""

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
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
}
"""Roles in chats, by the speakers of ShareGPT conversations."""


def read_documents(path: str | os.PathLike[str]) -> list[Any]:
    """Read documents for :func:`collect`.

    A file is ``.jsonl``, or ``.json`` with a list. Each row is a chat (``messages`` with role and
    content; ``conversations`` of strings in turn, or of ShareGPT's from and value), ``instruction``
    with ``output`` and optionally ``input`` (a chat of two turns), ``prompt`` with ``answer``, or
    ``text``; all values must be strings. Or it is ``.txt``, with an empty line between documents.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "documents.jsonl"
    ...     _ = file.write_text('{"prompt": "2 + 2 =", "answer": " 4"}')
    ...     read_documents(file)
    [('2 + 2 =', ' 4')]
    """
    file = Path(path)
    content = read_text(file)
    if file.suffix == ".txt":
        rows: Any = [text.strip() for text in re.split(r"\n\s*\n", content) if text.strip()]
    elif file.suffix == ".jsonl":
        rows = [row for _, row in parse_lines(content, str(file))]
    elif file.suffix == ".json":
        rows = _parsed(content, str(file))
    else:
        raise ValueError(f"{file} must be .jsonl, .json or .txt, got the suffix {file.suffix!r}")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{file} must hold a list of one document or more, got {rows!r:.60}")
    return [_document(row, f"{file}, document {n}") for n, row in enumerate(rows)]


def read_text(file: Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark."""
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error})") from error


def parse_lines(content: str, name: str) -> list[tuple[str, Any]]:
    """Parse JSON lines; each comes with its place, for errors."""
    # only "\n" ends a line: strings of JSON may hold the other breaks of splitlines
    lines = enumerate(content.split("\n"), start=1)
    placed = [(f"line {number} of {name}", line) for number, line in lines if line.strip()]
    return [(place, _parsed(line, place)) for place, line in placed]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _document(row: Any, where: str) -> Any:
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        if "messages" in row:
            for place, turn in _placed(row["messages"], where):
                for name in ("role", "content"):
                    _text(turn, name, place)
            return list(row["messages"])
        if "conversations" in row:
            return _conversation(row["conversations"], where)
        if "instruction" in row and "output" in row:
            more = "" if row.get("input") is None else _text(row, "input", where)
            question = [text for text in (_text(row, "instruction", where), more) if text]
            return _chat("\n\n".join(question), _text(row, "output", where))
        if "prompt" in row and "answer" in row:
            return _text(row, "prompt", where), _text(row, "answer", where)
        if "text" in row:
            return _text(row, "text", where)
    got = f"the keys {', '.join(row)}" if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(f"{where} must be one of {FORMS}, got {got}")


def _conversation(turns: Any, where: str) -> list[dict[str, str]]:
    placed = _placed(turns, where)
    if all(isinstance(turn, str) for turn in turns):
        return _chat(*turns)
    chat = []
    for place, turn in placed:
        speaker = _text(turn, "from", place)
        if speaker not in ROLES:
            raise ValueError(f"{place} must be from one of {', '.join(ROLES)}, got {speaker!r}")
        chat.append({"role": ROLES[speaker], "content": _text(turn, "value", place)})
    return chat


def _placed(turns: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where} must have a list of turns, got {turns!r:.60}; see {FORMS}")
    return [(f"{where}, turn {n}", turn) for n, turn in enumerate(turns)]


def _text(row: Any, name: str, where: str) -> str:
    # a template would render any other value as Python shows it
    value = row.get(name) if isinstance(row, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(f"{where} must have a string as its {name!r}, got {row!r:.60}")
    return value


def _chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
