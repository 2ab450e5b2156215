"""Files of questions for a service."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from calibrant.llm.answers.questions import read_questions
from calibrant.llm.endpoints.plans import Asked
from calibrant.llm.heads.reading import parse_lines, read_text

REFERENCES = ("references", "reference", "answers", "answer")
"""Names that right answers go by."""


def read_asked(file: str | os.PathLike[str]) -> list[Asked]:
    """Read questions: ``.jsonl`` or ``.csv`` with a question to a line, or ``.txt``.

    A line has ``question``, or ``messages`` of a chat in ``.jsonl``; and optionally ``references``
    (a list of right answers, or one), ``id`` and ``kind``. A text file has a question, its answer
    and an empty line. Repeated questions are read once.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "questions.jsonl"
    ...     _ = file.write_text('{"question": "Capital of Peru?", "references": ["Lima"]}')
    ...     read_asked(file)[0].references
    ('Lima',)
    """
    path = Path(file)
    if path.suffix == ".txt":
        asked = [Asked(_chat(one.text), one.references) for one in read_questions(path)]
    elif path.suffix in (".jsonl", ".csv"):
        asked = [_asked(row, place) for place, row in _rows(path)]
    else:
        raise ValueError(f"{path} must be .jsonl, .csv or .txt, got the suffix {path.suffix!r}")
    if not asked:
        raise ValueError(f"{path} has no questions")
    distinct: dict[str, Asked] = {}
    for one in asked:
        distinct.setdefault(str(one.messages), one)
    return list(distinct.values())


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    text = read_text(path)
    if path.suffix == ".jsonl":
        yield from parse_lines(text, str(path))
        return
    reader = csv.DictReader(io.StringIO(text, newline=""))
    for row in reader:
        yield f"line {reader.line_num} of {path}", row


def _chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _asked(row: Any, place: str) -> Asked:
    if not isinstance(row, Mapping):
        raise ValueError(f"{place} must be an object with a question, got {row!r:.40}")
    messages, question = row.get("messages"), row.get("question")
    if isinstance(messages, list) and messages:
        chat = [dict(one) for one in messages]
    elif isinstance(question, str) and question.strip():
        chat = _chat(question)
    else:
        raise ValueError(f"{place} must have a question or messages, got {', '.join(row)}")
    right = next((row[name] for name in REFERENCES if row.get(name)), ())
    references = (right,) if isinstance(right, str) else tuple(map(str, right))
    return Asked(chat, references, str(row.get("id") or ""), str(row.get("kind") or ""))
