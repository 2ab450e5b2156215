"""Documents as token ids, with labels at the tokens that count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from calibrant._core.checks import IGNORED, IntArray, as_labels
from calibrant.llm.tokens.chats import assistant_tokens, bare_ids

Document: TypeAlias = "str | Sequence[Any] | Mapping[str, Any]"
"""A text, a chat, a pair (prompt, answer), or token ids: see :func:`calibrant.llm.collect`."""


class Encoded(NamedTuple):
    """Token ids of a document and the labels at the same positions, each ``(t,)``.

    A token is predicted from those before it, so the first one is never a target.
    """

    ids: IntArray
    labels: IntArray

    @property
    def targets(self) -> IntArray:
        """Positions of the tokens that count."""
        return np.flatnonzero(self.labels[1:] != IGNORED) + 1


def encode_documents(documents: Iterable[Document], tokenizer: Any, length: int) -> list[Encoded]:
    """Turn documents into ids and labels, truncated to ``length`` tokens."""
    if isinstance(documents, str):
        raise TypeError(
            f"documents must be a list, got {documents!r:.40}: of a path pass read_documents(path)"
        )
    encoded = []
    for number, document in enumerate(documents):
        ids, labels = _encode(document, tokenizer, f"document {number}")
        encoded.append(Encoded(ids[:length], labels[:length]))
    return encoded


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text with the tokenizer's special tokens around it.

    A rendered chat, which begins with the beginning-of-text token, has them already.
    """
    start = tokenizer.bos_token
    rendered = bool(start) and text.startswith(start)
    return list(tokenizer(text, add_special_tokens=not rendered)["input_ids"])


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text to be continued: without special tokens after it."""
    ids = token_ids(tokenizer, text)
    if len(ids) > len(bare_ids(tokenizer, text)):
        return ids[: len(ids) - _tokens_after(tokenizer)]
    return ids


def _tokens_after(tokenizer: Any) -> int:
    """Return the number of special tokens that a tokenizer puts after a text."""
    whole, bare = token_ids(tokenizer, "a"), bare_ids(tokenizer, "a")
    before = next((n for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare), None)
    return 0 if before is None else len(whole) - len(bare) - before


def padded_batches(lengths: Sequence[int], size: int) -> Iterator[slice]:
    """Cut documents into runs of at most ``size`` tokens with padding, but at least one document.

    >>> list(padded_batches([3, 4, 1, 9, 2], 8))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    start, longest = 0, 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > start and (number - start + 1) * longest > size:
            yield slice(start, number)
            start, longest = number, length
    yield slice(start, len(lengths))


def documents_digest(documents: Iterable[Encoded]) -> str:
    """Hash ids and labels."""
    total = hashlib.sha256()
    for ids, labels in documents:
        total.update(len(ids).to_bytes(8, "little"))
        total.update(ids.astype("<i8").tobytes() + labels.astype("<i8").tobytes())
    return total.hexdigest()[:16]


def _encode(document: Document, tokenizer: Any, name: str) -> Encoded:
    if isinstance(document, Mapping):
        return _from_ids(document, name)
    if tokenizer is None:
        raise ValueError(
            f"{name} is text, which needs a tokenizer: pass tokenizer=, or documents as "
            "{'input_ids': ..., 'labels': ...}"
        )
    if isinstance(document, str):
        ids = _ids(token_ids(tokenizer, document), name)
        return Encoded(ids, ids)
    if _is_pair(document):
        return _from_pair(tokenizer, *document)
    if _is_chat(document):
        return _from_chat(tokenizer, list(document), name)
    raise TypeError(
        f"{name} must be a string, a chat (a list of {{'role': ..., 'content': ...}}), a pair of "
        f"strings (prompt, answer) or {{'input_ids': ..., 'labels': ...}}, got {document!r:.80}"
    )


def _ids(values: Any, name: str) -> IntArray:
    return as_labels(values, name) if len(values) else np.empty(0, np.int64)


def _is_pair(document: Any) -> bool:
    listed = isinstance(document, (tuple, list)) and len(document) == 2
    return listed and all(isinstance(part, str) for part in document)


def _is_chat(document: Any) -> bool:
    listed = isinstance(document, (tuple, list)) and len(document) > 0
    return listed and all(
        isinstance(turn, Mapping) and {"role", "content"} <= set(turn) for turn in document
    )


def _from_ids(document: Mapping[str, Any], name: str) -> Encoded:
    if "input_ids" not in document:
        raise ValueError(f"{name} must have input_ids, got the keys {', '.join(document)}")
    ids = _ids(document["input_ids"], f"input_ids of {name}")
    labels = _ids(document.get("labels", ids), f"labels of {name}")
    if ids.ndim != 1 or ids.shape != labels.shape:
        raise ValueError(
            f"input_ids and labels of {name} must both be (t,), got {ids.shape} and {labels.shape}"
        )
    return Encoded(ids, labels)


def _from_pair(tokenizer: Any, prompt: str, answer: str) -> Encoded:
    """Encode prompt and answer separately, as they are when the answer is generated."""
    before, after = prompt_ids(tokenizer, prompt), bare_ids(tokenizer, answer)
    labels = [IGNORED] * len(before) + after
    return Encoded(np.array(before + after, np.int64), np.array(labels, np.int64))


def _from_chat(tokenizer: Any, turns: list[Any], name: str) -> Encoded:
    ids, mask = assistant_tokens(tokenizer, turns)
    if not mask.any():
        raise ValueError(
            f"no turn of the assistant was found in {name}: if it has one, put {{% generation %}} "
            "around the answers in the chat template, or pass input_ids and labels"
        )
    return Encoded(ids, np.where(mask, ids, IGNORED))
