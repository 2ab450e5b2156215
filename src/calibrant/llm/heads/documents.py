"""Documents as token ids, with labels at the tokens that count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import IGNORED, IntArray, as_labels

Document: TypeAlias = "str | Sequence[Any] | Mapping[str, Any]"
"""A text, a chat, a pair (prompt, answer), or token ids: see :func:`calibrant.llm.collect`."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")
_PROBE = "\ue000calibrant\ue000"
"""Placeholder for the first answer of a chat, to find it when rendered; private-use characters."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_THOUGHT = "</think>"
"""End of the thoughts before an answer."""


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


class BadDocument(ValueError):
    """A document cannot be used; others may be."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place} {reason}")
        self.place, self.reason = place, reason


def _encode_documents(documents: Iterable[Document], tokenizer: Any, length: int) -> list[Encoded]:
    """Turn documents into ids and labels, truncated to ``length`` tokens."""
    if isinstance(documents, str):
        raise TypeError(
            f"documents must be a list, got {documents!r:.40}: of a path pass read_documents(path)"
        )
    return [
        _encode_document(document, f"documents[{n}]", tokenizer, length)
        for n, document in enumerate(documents)
    ]


def _encode_document(document: Any, name: str, tokenizer: Any, length: int) -> Encoded:
    """Turn a document into ids and labels; errors call it ``name``."""
    if isinstance(document, Encoded):
        ids, labels = document
    elif isinstance(document, Mapping):
        ids, labels = _from_ids(document, name)
    elif tokenizer is None:
        raise ValueError(f"{name} is text, which needs a tokenizer: pass tokenizer=, or token ids")
    else:
        _check_unicode(document, name)
        match document:
            case str():
                ids = labels = np.array(_token_ids(tokenizer, document), np.int64)
            case [str(prompt), str(answer)]:
                # encoded separately, as they are when the answer is generated
                before, after = _prompt_ids(tokenizer, prompt), _bare_ids(tokenizer, answer)
                ids = np.array(before + after, np.int64)
                labels = np.array([IGNORED] * len(before) + after, np.int64)
            case [_, *_] if all(
                isinstance(t, Mapping) and {"role", "content"} <= {*t} for t in document
            ):
                ids, labels = _from_chat(list(document), name, tokenizer)
            case _:
                raise TypeError(
                    f"{name} must be a string, a chat (a list of {{'role': ..., 'content': ...}}), "
                    "a pair of strings (prompt, answer) or {'input_ids': ..., 'labels': ...}, got "
                    f"{document!r:.80}"
                )
    return Encoded(ids[:length], labels[:length])


def _from_ids(document: Mapping[str, Any], name: str) -> tuple[IntArray, IntArray]:
    def checked(values: Any, what: str) -> IntArray:
        return as_labels(values, f"{what} of {name}") if len(values) else np.empty(0, np.int64)

    if "input_ids" not in document:
        raise ValueError(f"{name} must have input_ids, got the keys {', '.join(document)}")
    ids = checked(document["input_ids"], "input_ids")
    labels = checked(document.get("labels", ids), "labels")
    if ids.ndim != 1 or ids.shape != labels.shape:
        raise ValueError(
            f"input_ids and labels of {name} must both be (t,), got {ids.shape} and {labels.shape}"
        )
    return ids, labels


def _check_unicode(document: Any, name: str) -> None:
    """Refuse lone surrogates, which JSON can have and no tokenizer takes."""
    turns = [document] if isinstance(document, str) else document
    for turn in turns if isinstance(turns, Sequence) else ():
        text = turn.get("content") if isinstance(turn, Mapping) else turn
        half = _SURROGATE.search(text) if isinstance(text, str) else None
        if half:
            raise BadDocument(
                name,
                f"has half of a character, {half[0]!r}, at position {half.start()} of a text: "
                "write whole characters, for instance with errors='replace'",
            )


def _padded(rows: Sequence[IntArray]) -> tuple[Tensor, Tensor]:
    """Return token ids ``(n, longest)``, and a mask of those that are not padding, on the right."""
    longest = max(map(len, rows))
    ids = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    mask = np.arange(longest) < np.array([len(row) for row in rows])[:, None]
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))


def _padded_batches(lengths: Sequence[int], size: int) -> Iterator[slice]:
    """Cut documents into runs of at most ``size`` tokens with padding, but at least one document.

    >>> list(_padded_batches([3, 4, 1, 9, 2], 8))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    start, longest = 0, 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > start and (number - start + 1) * longest > size:
            yield slice(start, number)
            start, longest = number, length
    yield slice(start, len(lengths))


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text with the tokenizer's special tokens around it.

    A rendered chat, which begins with the beginning-of-text token, has them already.
    """
    start = tokenizer.bos_token
    rendered = bool(start) and text.startswith(start)
    return list(tokenizer(text, add_special_tokens=not rendered)["input_ids"])


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text to be continued: without special tokens after it."""
    ids = _token_ids(tokenizer, text)
    if len(ids) == len(_bare_ids(tokenizer, text)):
        return ids
    whole, bare = _token_ids(tokenizer, "a"), _bare_ids(tokenizer, "a")
    ends = (n + len(bare) for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare)
    return ids[: len(ids) - len(whole) + next(ends, len(whole))]


def _bare_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _from_chat(turns: list[Any], name: str, tokenizer: Any) -> tuple[IntArray, IntArray]:
    """Return the token ids of a chat, and labels at those that the assistant wrote.

    Templates with ``{% generation %}`` mark them. Otherwise an answer begins after the chat before
    it, rendered with a generation prompt, and ends with the token that ends its turn. A token that
    also covers the end of the prompt does not count.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name} is a chat, and the tokenizer has no chat template: use a model that was "
            "tuned for chats, set tokenizer.chat_template, or write the documents as prompts "
            "with answers or as texts"
        )
    from jinja2 import TemplateError

    try:
        if _GENERATION.search(tokenizer.get_chat_template()):
            encoded = tokenizer.apply_chat_template(
                turns, return_dict=True, return_assistant_tokens_mask=True
            )
            mask = np.array(encoded["assistant_masks"]) == 1
        else:
            if not getattr(tokenizer, "is_fast", False):
                raise ValueError(
                    f"{name} is a chat, and {type(tokenizer).__name__} does not say where its "
                    "tokens are in the text: put {% generation %} around the answers in the chat "
                    "template, or pass token ids"
                )
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            begin, end = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
            mask = np.zeros(len(begin), bool)
            for first, last in _answers(tokenizer, turns, text):
                mask |= (begin >= first) & (end <= last)
    except TemplateError as error:
        raise BadDocument(name, f"is refused by the chat template: {error}") from error
    if not mask.any():
        raise BadDocument(
            name,
            "has no turn of the assistant, or none that was found: if it has one, put "
            "{% generation %} around the answers in the chat template, or pass token ids",
        )
    ids = np.array(encoded["input_ids"], np.int64)
    return ids, np.where(mask, ids, IGNORED)


def _answers(tokenizer: Any, turns: list[Any], text: str) -> Iterator[tuple[int, int]]:
    """Yield where each answer begins and ends in a rendered chat."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    special = "|".join(map(re.escape, names)) or "(?!)"
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        if number:
            prompt = _rendered(tokenizer, turns[:number], add_generation_prompt=True)
        else:  # no chat before it to render
            probed = [{**turn, "content": _PROBE}, *turns[1:]]
            before, probe, _ = (_rendered(tokenizer, probed) or "").partition(_PROBE)
            prompt = before.rstrip(" ") if probe else None  # a space belongs to the word after it
        until = _rendered(tokenizer, turns[: number + 1])
        if prompt is not None and until is not None and text.startswith(prompt):
            yield len(prompt), _answer_end(turn, text, len(prompt), until, special)


def _answer_end(turn: Mapping[str, Any], text: str, start: int, until: str, special: str) -> int:
    """Return where an answer ends in a chat, after its end token; 0 if it is left out.

    ``until`` is the chat up to this turn. Templates may add an end of text, or the beginning of the
    next answer, at the end of a chat. That is not part of the answer. Some drop the thoughts of
    earlier turns: the model never wrote such an answer in this form, so it is left out.
    """
    ends, content_end = [], 0
    more = {name for name, value in turn.items() if value} - {"role", "content"}
    if isinstance(turn["content"], str) and not more:  # tool calls may follow the content
        # thoughts may be dropped or changed, and may contain the words that follow them
        content = turn["content"].split(_THOUGHT)[-1].strip()
        thought = text.rfind(_THOUGHT, start, len(until))
        after = start if thought < 0 else thought + len(_THOUGHT)
        place = text.find(content, after, max(after, len(until)))
        if place >= 0:
            content_end = place + len(content)
            closing = re.compile(rf"\s*(?:{special})").match(text, content_end)
            ends = [closing.end()] if closing else []
    if text.startswith(until):  # without the line break that follows an end token
        last = re.search(rf"(?:{special})(\s*)\Z", until)
        ends.append(last.start(1) if last else len(until))
    return next(n for n in (*ends, content_end, 0) if until.startswith(text[:n]))


def _rendered(tokenizer: Any, turns: list[Any], **options: Any) -> str | None:
    """Render some turns; None if the template refuses them, for instance without a user."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except TemplateError:
        return None
    return text
