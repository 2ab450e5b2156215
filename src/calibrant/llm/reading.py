"""Documents from files: chats, questions with answers, and plain texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMS = (
    '{"messages": [...]}, {"conversations": [...]}, {"instruction", "output"}, '
    '{"prompt", "answer"} or {"text"}'
)


def read_documents(path: str | os.PathLike[str]) -> list[Any]:
    """Read documents for :func:`collect`.

    Parameters
    ----------
    path : path
        ``.jsonl``, or ``.json`` with a list. A row is a chat (``messages`` as dictionaries with
        role and content, or ``conversations`` as strings in turn), ``instruction`` with
        ``output`` and perhaps ``input`` (a chat of two turns), ``prompt`` with ``answer``, or
        ``text``. Or ``.txt``, with an empty line between documents.

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
    content = file.read_text("utf-8")
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


def _rows(file: Path, content: str) -> list[Any]:
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in content.splitlines() if line.strip()]
        rows = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file} must hold a list of documents, got a {type(rows).__name__}")
    return rows


def _document(row: Any, where: str) -> Any:
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        if "messages" in row:
            return list(row["messages"])
        if "conversations" in row:
            return _chat(*row["conversations"])
        if "instruction" in row and "output" in row:
            asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
            return _chat(asked, row["output"])
        if "prompt" in row and "answer" in row:
            return row["prompt"], row["answer"]
        if "text" in row:
            return row["text"]
    told = f"the keys {', '.join(row)}" if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(f"{where} must be one of {FORMS}, got {told}")


def _chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
