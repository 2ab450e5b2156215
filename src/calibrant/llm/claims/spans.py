"""Sentences of a text, and the tokens of a part of it, by their places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from calibrant._core.checks import IntArray

Span: TypeAlias = tuple[int, int]
"""First character of a part of a text, and the one after its last."""

LONGEST = 20
"""Characters before a period among which an abbreviation is looked for."""
# Signs that end a sentence, with quotes and brackets that close after them; or a line break.
_END = re.compile(r"[.!?\u2026]+[\"'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f]|\n+")
# A period after these goes on: titles, Latin abbreviations, initials, numbers of a list.
_GOES_ON = re.compile(
    r"(?:\b(?:Dr|Mr|Mrs|Ms|Prof|St|Jr|Sr|vs|etc|cf|ca|approx|No|Fig|Eq|Vol|e\.g|i\.e|a\.m|p\.m)"
    r"|\b[A-Z]|(?:^|\n)\s*\d+)\.$"
)


def sentences(text: str) -> list[Span]:
    """Return the places of the sentences of a text, without the blanks between them.

    A sentence ends at a period, a question or exclamation mark before a blank, or at a line break.
    Periods of usual abbreviations, initials and numbers of lists do not end one.

    >>> text = "Dr. Ruiz lives in Lima. Since 1996? Yes!"
    >>> [text[start:end] for start, end in sentences(text)]
    ['Dr. Ruiz lives in Lima.', 'Since 1996?', 'Yes!']
    """
    spans, start = [], 0
    ends = [match.end() for match in _END.finditer(text) if not _goes_on(text, match)]
    for end in [*ends, len(text)]:
        part = text[start:end]
        if part.strip():
            left = start + len(part) - len(part.lstrip())
            spans.append((left, start + len(part.rstrip())))
        start = end
    return spans


def _goes_on(text: str, match: re.Match[str]) -> bool:
    """Return True for a period that ends no sentence."""
    nearby = max(0, match.end() - LONGEST), match.end()
    return match[0] == "." and bool(_GOES_ON.search(text, *nearby))


def token_spans(token_texts: Sequence[str]) -> IntArray:
    """Return the places ``(tokens, 2)`` of the visible characters of tokens in their whole text.

    A token that adds no visible character, such as a part of one, has an empty place.

    >>> token_spans(["The", " sea", ".", " "]).tolist()
    [[0, 3], [4, 7], [7, 8], [9, 9]]
    """
    places, start = [], 0
    for text in token_texts:
        end = start + len(text)
        left = end - len(text.lstrip())
        places.append((left, max(left, start + len(text.rstrip()))))
        start = end
    return np.array(places, np.int64).reshape(-1, 2)


def tokens_within(places: IntArray, span: Span) -> IntArray:
    """Return the numbers of the tokens of which a visible character is within a span.

    ``places`` come from :func:`token_spans`. A token across the end of a part belongs to both.
    Tokens without a visible character belong to the next one that has some: bytes of a character
    come before the last of them.
    """
    empty = places[:, 0] == places[:, 1]
    visible = np.flatnonzero(~empty)
    following = np.searchsorted(visible, np.arange(len(places)))
    owner = np.append(visible, -1)[np.minimum(following, len(visible))]
    ends = places[owner]
    inside = (owner >= 0) & (ends[:, 0] < span[1]) & (ends[:, 1] > span[0])
    return np.flatnonzero(inside)
