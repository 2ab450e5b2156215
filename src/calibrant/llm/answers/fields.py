r"""Confidence for each field of a structured answer, from the probabilities of its tokens.

The confidence of a value in JSON, a *leaf*, is the probability with which the model writes exactly
this value at this place: the product over its tokens, end included. Where a service shows the
likeliest tokens (``top_logprobs``),

- the token in which a value ends counts with all others that end it in the same way, such as
  ``",`` and ``"}`` of a text, and that of a number with all that do not go on with a digit;
- of a field with allowed values, the probability of the value is divided by that of all allowed
  ones. A token other than the one written leads to the allowed values that begin with it, and is
  taken to arrive at one of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import FloatArray, warn
from calibrant.llm.answers.logprobs import top_of_position
from calibrant.llm.answers.logs.reading import Log
from calibrant.llm.answers.rows import (
    SOURCE_KEYS,
    WRONG_FORM,
    AnswerRows,
    Row,
    _grade_of,
    _stated_number,
    _token_probs_of,
    _unpacked_cell,
)
from calibrant.llm.heads.documents import BadDocument
from calibrant.llm.heads.reading import _counted, _refusal

_DIGITS = frozenset("0123456789.eE+-")


class _Leaf(NamedTuple):
    """A value in JSON that is no object or list, or an empty one, and its place in the text."""

    path: tuple[str | int, ...]
    value: Any
    start: int
    end: int

    @property
    def pointer(self) -> str:
        """The path as a JSON pointer, such as ``/items/0/price``."""
        return "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in self.path)

    @property
    def kind(self) -> str:
        """The path with ``*`` for positions in lists, such as ``items/*/price``."""
        return "/".join("*" if isinstance(key, int) else key for key in self.path)

    @property
    def is_number(self) -> bool:
        """True for a number, whose end only the next character shows."""
        return type(self.value) in (int, float)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _json_leaves(text: str) -> list[_Leaf]:
    """Return the leaves of the first JSON object or list in a text."""
    first = re.search(r"[{\[]", text)
    if first is None:
        raise ValueError("there is no object")
    leaves: list[_Leaf] = []
    try:
        _walk(text, first.start(), (), leaves)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return leaves


def _walk(text: str, at: int, path: tuple[str | int, ...], leaves: list[_Leaf]) -> int:
    """Add the leaves of the value that begins at a place, and return the place after it."""
    value, end = _DECODER.raw_decode(text, at)
    if not isinstance(value, (dict, list)) or not value:
        leaves.append(_Leaf(path, value, at, end))
        return end
    at += 1
    for key in value if isinstance(value, dict) else range(len(value)):
        if isinstance(key, str):
            at = _DECODER.raw_decode(text, _begin(text, at))[1]
        at = _walk(text, _begin(text, at), (*path, key), leaves)
    return end


def _begin(text: str, at: int) -> int:
    """Return where the next key or value begins."""
    while text[at] in " \t\r\n,:":
        at += 1
    return at


class Tokens(NamedTuple):
    """Tokens of an answer: texts, where each ends, its probability, and those shown beside it."""

    texts: list[str]
    ends: list[int]
    probs: FloatArray
    top: list[dict[str, float]]

    @classmethod
    def of(cls, row: Row, place: str) -> Tokens:
        """Return the tokens of a row of answers; raise unless they spell the answer."""
        try:
            texts = _unpacked_cell(row.get("tokens", row.get("token_texts")))
            if not texts or "token_probs" not in row:
                raise BadDocument(place, "has no tokens with token_probs: request logprobs")
            texts, probs = [str(one) for one in texts], _token_probs_of(row, place)
            shown = _unpacked_cell(row.get("top_logprobs")) or []
            logs = [top_of_position(one, number, place) for number, one in enumerate(shown)]
            top = [{token: math.exp(min(v, 0.0)) for token, v in one.items()} for one in logs]
        except BadDocument:
            raise
        except WRONG_FORM as error:
            raise BadDocument(place, f"has tokens that cannot be used: {error}") from error
        if len(texts) != len(probs) or (top and len(top) != len(texts)):
            raise BadDocument(place, "does not have one probability for each of its tokens")
        if str(row.get("answer", "")).strip() not in "".join(texts):
            raise BadDocument(place, "has tokens that spell another text than its answer")
        return cls(texts, np.cumsum([*map(len, texts)]).tolist(), probs, top)

    def start(self, number: int) -> int:
        """Return where a token begins."""
        return self.ends[number] - len(self.texts[number])

    def span(self, leaf: _Leaf) -> range:
        """Return the numbers of the tokens that hold some of a leaf.

        A token without text is a part of the character that a later one completes.
        """
        first = int(np.searchsorted(self.ends, leaf.start, side="right"))
        while first and not self.texts[first - 1]:
            first -= 1
        return range(first, int(np.searchsorted(self.ends, leaf.end)) + 1)

    def shown(self, number: int) -> dict[str, float]:
        """Return the probabilities that are known at a position, by the texts of tokens."""
        return {**(self.top[number] if self.top else {}), self.texts[number]: self.probs[number]}


def _leaf_probs(tokens: Tokens, leaf: _Leaf) -> list[float]:
    """Return the probabilities of the tokens of a leaf, the last with all others that end it so.

    The token after a number that ends with a token says that no further digit comes.
    """

    def ending(number: int) -> float:
        rest = tokens.texts[number][: max(leaf.end - tokens.start(number), 0)]
        return sum(
            float(prob)
            for text, prob in tokens.shown(number).items()
            if text.startswith(rest) and not (leaf.is_number and text[len(rest) :][:1] in _DIGITS)
        )

    *before, last = tokens.span(leaf)
    probs = [*(float(tokens.probs[number]) for number in before), ending(last)]
    if leaf.is_number and tokens.ends[last] == leaf.end and last + 1 < len(tokens.texts):
        probs.append(ending(last + 1))
    return [min(prob, 1.0) for prob in probs]


def _allowed_prob(tokens: Tokens, leaf: _Leaf, allowed: Sequence[Any]) -> float:
    """Return the probability of a leaf among its allowed values; 0 if it is not one of them.

    A token that was not written, and leads both to the value and to others, is left out.
    """
    different = [one for one in allowed if not _same_value(leaf.value, one)]
    if len(different) == len(allowed):
        return 0.0
    span, text = tokens.span(leaf), "".join(tokens.texts)
    origin = tokens.start(span[0])
    own = text[origin : leaf.end]
    others = [text[origin : leaf.start] + json.dumps(v, ensure_ascii=False) for v in different]
    path, mine, theirs = 1.0, 0.0, 0.0
    for number in span:
        before = text[origin : tokens.start(number)]
        for token, prob in tokens.shown(number).items():
            if not token or token == tokens.texts[number]:
                continue
            to_own = _leads(before + token, own)
            to_other = any(_leads(before + token, other) for other in others)
            mine += path * prob * (to_own and not to_other)
            theirs += path * prob * (to_other and not to_own)
        path *= float(tokens.probs[number])
    return (path + mine) / (path + mine + theirs)


def _leads(text: str, value: str) -> bool:
    """Return True if a text is the beginning of a value, or the value and what follows it."""
    goes_on = value[-1] in _DIGITS and text[len(value) : len(value) + 1] in _DIGITS
    return value.startswith(text) or (text.startswith(value) and not goes_on)


def _same_value(one: Any, other: Any) -> bool:
    """Return True for equal values of JSON: 12 equals 12.0, but true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def field_rows(
    answer: Row,
    *,
    kinds: Mapping[str, Sequence[Any] | None] | None = None,
    place: str = "the answer",
) -> list[Row]:
    """Return a row for each field of a structured answer, with its confidence.

    Parameters
    ----------
    answer : dict
        Row of an answer, as :func:`~calibrant.llm.read_log` makes them: ``tokens`` that spell JSON,
        their ``token_probs`` and, if the service shows them, ``top_logprobs``. ``id`` names the
        document. With ``truth``, the right values in the form of the answer, rows are graded:
        ``correct`` is true for equal values, and for null where there is none, and ``missing``
        counts the values that the answer lacks.
    kinds : dict, optional
        The kinds of fields that answers may have, such as ``items/*/price``, each with its allowed
        values or None.
    place : str
        Of the answer, for errors: that it is not JSON, or lacks probabilities that it needs.

    Examples
    --------
    >>> tokens = ['{"', "to", '": "', "Li", 'ma"', "}"]
    >>> answer = {"id": "7", "answer": '{"to": "Lima"}', "tokens": tokens, "truth": {"to": "Lima"}}
    >>> (row,) = field_rows({**answer, "token_probs": [1, 1, 1, 0.9, 0.8, 1]})
    >>> row["kind"], row["answer"], round(row["confidence"], 2), row["correct"]
    ('to', '"Lima"', 0.72, True)
    """
    tokens = Tokens.of(answer, place)
    try:
        leaves = _json_leaves("".join(tokens.texts))
    except ValueError as error:
        raise BadDocument(place, f"is not JSON: {error}") from error
    names = answer.get("id"), answer.get("question"), place
    document = next(str(name) for name in names if name not in (None, ""))
    source = {key: answer[key] for key in SOURCE_KEYS.values() if answer.get(key)}
    source["source"] = "field product"  # not that of the answer
    known, rows = kinds or {}, []
    for leaf in leaves:
        probs, allowed = _leaf_probs(tokens, leaf), known.get(leaf.kind)
        confidence = math.prod(probs)
        if allowed is not None:
            if not tokens.top:
                raise BadDocument(place, "has no top_logprobs, which allowed values need")
            confidence = _allowed_prob(tokens, leaf, allowed)
        row: Row = {"question": document, "conversation": document, "kind": leaf.kind}
        row |= {"field": leaf.pointer, "answer": json.dumps(leaf.value, ensure_ascii=False)}
        row |= {"token_probs": probs, "confidence": confidence, **source}
        # a kind that answers may have is a signal of every row: maps refuse unknown ones
        signals = {f"kind:{kind}": None for kind in known} | {f"kind:{leaf.kind}": confidence}
        rows.append({**row, "signals": signals})
    try:
        truth = _unpacked_cell(answer.get("truth"))
    except (ValueError, RecursionError) as error:
        raise BadDocument(place, f"has a truth that is not JSON: {error}") from error
    if truth is None:
        return rows
    wanted = dict(_flat(truth))
    present = {leaf.path for leaf in leaves}
    missing = sum(value is not None and path not in present for path, value in wanted.items())
    return [
        {**row, "correct": _same_value(leaf.value, wanted.get(leaf.path)), "missing": missing}
        for row, leaf in zip(rows, leaves, strict=True)
    ]


def _flat(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the leaves of a value, by their paths."""
    if isinstance(value, (Mapping, list)) and value:
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(one, (*path, key))
    else:
        yield path, value


def fields_of(
    log: Log, *, kinds: Mapping[str, Sequence[Any] | None] | None = None, skip_bad: bool = False
) -> AnswerRows:
    """Return the rows of all fields of structured answers.

    ``log`` is of :func:`~calibrant.llm.read_log`, ``kinds`` as for :func:`field_rows`. With
    ``skip_bad``, answers of which it makes none are left out, with a warning that lists them; by
    default they are an error.
    """
    fields, bad = AnswerRows([], []), list[BadDocument]()
    for place, answer in zip(*log.answers, strict=True):
        try:
            rows = field_rows(answer, kinds=kinds, place=place)
        except BadDocument as error:
            bad.append(error)
            continue
        fields.rows.extend(rows)
        fields.places.extend(f"{row['field']} of {place}" for row in rows)
    about: Any = bad, len(log.answers.rows) - len(bad), Path(log.path), "answers"
    if bad and not (skip_bad and fields.rows):
        raise ValueError(_refusal(*about))
    if bad:
        warn(f"left out {_counted(*about)}")
    return fields


def documents_of(fields: AnswerRows) -> AnswerRows:
    """Return a row for each document, whose confidence is the product of those of its fields.

    The chances ``calibrated`` are taken if fields have them, else their ``confidence``. A document
    is right if all of its fields are, and none is missing. Fields of a document depend on each
    other, so that the product is not yet the chance of this: a map of documents learns it.

    >>> fields = [{"question": "7", "calibrated": p, "correct": True} for p in (0.5, 0.8)]
    >>> (row,) = documents_of(AnswerRows.of(fields)).rows
    >>> row["confidence"], row["correct"]
    (0.4, True)
    """
    key = "calibrated" if any("calibrated" in row for row in fields.rows) else "confidence"
    documents: dict[str, list[tuple[str, Row]]] = {}
    for place, row in zip(*fields, strict=True):
        if row.get("question") in (None, ""):
            raise ValueError(f"{place} has no question, which names the document of a field")
        documents.setdefault(str(row["question"]), []).append((place, row))
    rows = []
    for name, members in documents.items():
        chances = [_stated_number({"confidence": row.get(key)}, place) for place, row in members]
        first = members[0][1]
        row = {"question": name, "answer": f"{len(members)} fields"}
        row |= {part: first[part] for part in SOURCE_KEYS.values() if first.get(part)}
        row |= {"source": f"product of {key}", "confidence": math.prod(chances)}
        if "correct" in first:
            right = all(_grade_of(one, place) for place, one in members)
            row["correct"] = right and not int(first.get("missing") or 0)
        rows.append(row)
    return AnswerRows([f"document {name}" for name in documents], rows)
