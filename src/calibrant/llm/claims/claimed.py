"""Answers with claims: sentences or other parts of them, whose confidence comes from tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.display.results import one_line
from calibrant.llm.answers.confidence import Aggregator, answer_confidence
from calibrant.llm.answers.graded import AnswerRows, Row, grade_of, read_rows, token_probs
from calibrant.llm.answers.sources import Source
from calibrant.llm.claims.spans import Span, sentences, token_spans, tokens_within


class ClaimedAnswer(NamedTuple):
    """An answer and its claims.

    Attributes
    ----------
    text : str
        The whole text of the tokens.
    offset : int
        Place of the answer in it; spans of claims count from there.
    token_texts : list of str
    token_probs : (tokens,)
    spans : list of (int, int)
        Of the claims, in ``text``.
    correct : list of bool or None
        None where a claim has no grade.
    """

    text: str
    offset: int
    token_texts: list[str]
    token_probs: FloatArray
    spans: list[Span]
    correct: list[bool | None]

    def tokens(self) -> list[FloatArray]:
        """Return the probabilities of the tokens of each claim."""
        places = token_spans(self.token_texts)
        return [self.token_probs[tokens_within(places, span)] for span in self.spans]


class ClaimedAnswers(NamedTuple):
    """Answers with claims, of one source."""

    answers: list[ClaimedAnswer]
    source: Source

    def __repr__(self) -> str:
        count = sum(len(answer.spans) for answer in self.answers)
        return one_line(self, f"{count:,} claims of {len(self.answers):,} answers")

    def confidence(self, aggregate: Aggregator = "geometric") -> FloatArray:
        """Return the confidence of each claim of each answer in turn, ``(claims,)``."""
        parts = [probs for answer in self.answers for probs in answer.tokens()]
        return answer_confidence(parts, aggregate) if parts else np.empty(0)

    def numbers(self) -> IntArray:
        """Return the number of the answer of each claim, ``(claims,)``."""
        counts = [len(answer.spans) for answer in self.answers]
        return np.repeat(np.arange(len(counts)), counts)

    def graded(self) -> BoolArray:
        """Return True for claims that have a grade, ``(claims,)``."""
        grades = [grade for answer in self.answers for grade in answer.correct]
        return np.array([grade is not None for grade in grades], dtype=bool)

    def correct(self) -> BoolArray:
        """Return the grades of the claims that have one."""
        grades = [grade for answer in self.answers for grade in answer.correct]
        return np.array([grade for grade in grades if grade is not None], dtype=bool)


def read_claims(file: str | os.PathLike[str]) -> ClaimedAnswers:
    """Read answers with claims from JSON lines or a CSV file.

    Each row has ``token_texts`` and ``token_probs``, lists of the same length. ``claims`` is a list
    of objects with ``text``, which stands in the answer, or ``span``, the places of its first
    character and of the one after its last; graded ones have ``correct``. Without ``claims``, they
    are the sentences of the answer. ``answer`` is the text that spans count in, by default that of
    all tokens.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> row = {
    ...     "token_texts": ["Lima", ".", " Or", " Quito", "."],
    ...     "token_probs": [0.9, 0.9, 0.5, 0.2, 0.8],
    ...     "claims": [{"text": "Lima.", "correct": True}, {"span": [6, 15], "correct": False}],
    ... }
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "claims.jsonl"
    ...     _ = file.write_text(json.dumps(row))
    ...     claims = read_claims(file)
    >>> claims.confidence("product").round(3), claims.correct()
    (array([0.81, 0.08]), array([ True, False]))
    """
    return claimed_answers(read_rows(file))


def claimed_answers(answers: AnswerRows) -> ClaimedAnswers:
    """Return the claims of rows; see :func:`read_claims`."""
    placed = zip(answers.rows, answers.places, strict=True)
    return ClaimedAnswers([_answer(row, place) for row, place in placed], answers.source())


def _answer(row: Row, place: str) -> ClaimedAnswer:
    texts = _texts(row, place)
    whole, probs = "".join(texts), token_probs(row, place)
    if len(probs) != len(texts):
        raise ValueError(
            f"{place} must have a probability for each of {len(texts)} token_texts, got "
            f"{len(probs)} token_probs"
        )
    offset = whole.find(str(row.get("answer", whole)))
    if offset < 0:
        raise ValueError(f"the answer of {place} does not stand in the text of its token_texts")
    answer = ClaimedAnswer(whole, offset, texts, probs, [], [])
    if "claims" not in row:
        spans = [(offset + a, offset + b) for a, b in sentences(whole[offset:])]
        return _checked(answer._replace(spans=spans, correct=[None] * len(spans)), place)
    claims, spans = _listed(row["claims"], "claims", place), list[Span]()
    for claim in claims:
        spans.append(_span(claim, answer, spans[-1][1] if spans else offset, place))
    grades = [grade_of(claim, place) if "correct" in claim else None for claim in claims]
    return _checked(answer._replace(spans=spans, correct=grades), place)


def _checked(answer: ClaimedAnswer, place: str) -> ClaimedAnswer:
    """Return the answer; raise if a claim has no token."""
    for span, probs in zip(answer.spans, answer.tokens(), strict=True):
        if not probs.size:
            text = answer.text[slice(*span)]
            raise ValueError(f"claim {text!r:.60} of {place} has no visible character: drop it")
    return answer


def _span(claim: Any, answer: ClaimedAnswer, after: int, place: str) -> Span:
    """Return the place of a claim; texts that occur several times are those after the last."""
    match claim:
        case {"span": [int(start), int(end)]} if 0 <= start < end <= len(answer.text):
            return answer.offset + start, answer.offset + end
        case {"text": str(text)} if text.strip():
            start = answer.text.find(text, after)
            start = answer.text.find(text, answer.offset) if start < 0 else start
            if start >= 0:
                return start, start + len(text)
            raise ValueError(
                f"claim {text!r:.60} of {place} does not stand in the answer word for word: give "
                "its span, the places of its first character and of the one after its last"
            )
    raise ValueError(
        f"claims of {place} must have a text, or a span within the answer, got {claim!r:.60}"
    )


def _texts(row: Row, place: str) -> list[str]:
    if "token_texts" not in row:
        raise ValueError(f"{place} has no token_texts: claims need the tokens of each answer")
    texts = _listed(row["token_texts"], "token_texts", place)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"token_texts of {place} must be texts, one or more, got {texts!r:.60}")
    return texts


def _listed(value: Any, name: str, place: str) -> list[Any]:
    """Return a list, or that of JSON in a cell."""
    try:
        values = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list):
        raise ValueError(f"{name} of {place} must be a list, got {value!r:.60}")
    return values


def claim_rows(answers: AnswerRows, columns: Mapping[str, FloatArray]) -> list[Row]:
    """Add the claims of each answer to its row, with their text, span and further values.

    ``columns`` have a value for each claim of all answers, by name.
    """
    claimed, rows, at = claimed_answers(answers).answers, [], 0
    for row, answer in zip(answers.rows, claimed, strict=True):
        given = _listed(row.get("claims", [{}] * len(answer.spans)), "claims", "")
        claims = []
        for claim, (start, end) in zip(given, answer.spans, strict=True):
            place = [start - answer.offset, end - answer.offset]
            values = {name: float(column[at]) for name, column in columns.items()}
            claims.append({**claim, "text": answer.text[start:end], "span": place, **values})
            at += 1
        rows.append({**row, "claims": claims})
    return rows
