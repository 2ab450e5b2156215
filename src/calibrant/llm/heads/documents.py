"""Documents as token ids, with labels at the tokens that count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from calibrant._core.checks import IGNORED, BoolArray, IntArray, as_labels

Document: TypeAlias = "str | Sequence[Any] | Mapping[str, Any]"
"""A text, a chat, a pair (prompt, answer), or token ids: see :func:`calibrant.llm.collect`."""
GENERATION = re.compile(r"\{%-?\s*generation\b")
PROBE = "\ue000calibrant\ue000"
"""Stands for a first answer, to find it in the rendered chat; private-use characters."""
SURROGATE = re.compile("[\ud800-\udfff]")
THOUGHT = "</think>"
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
    """One document cannot be used, whatever the others are."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place} {reason}")
        self.place, self.reason = place, reason


def encode_documents(documents: Iterable[Document], tokenizer: Any, length: int) -> list[Encoded]:
    """Turn documents into ids and labels, truncated to ``length`` tokens."""
    if isinstance(documents, str):
        raise TypeError(
            f"documents must be a list, got {documents!r:.40}: of a path pass read_documents(path)"
        )
    encode = DocumentEncoder(tokenizer, length)
    return [encode(document, f"documents[{n}]") for n, document in enumerate(documents)]


class DocumentEncoder:
    """Turns documents into ids and labels, truncated to ``length`` tokens."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length

    def __call__(self, document: Any, name: str) -> Encoded:
        """Encode one document; ``name`` says in errors which it is."""
        ids, labels = self._encoded(document, name)
        return Encoded(ids[: self.length], labels[: self.length])

    def _encoded(self, document: Any, name: str) -> Encoded:
        if isinstance(document, Encoded):
            return document
        if isinstance(document, Mapping):
            return _from_ids(document, name)
        if self.tokenizer is None:
            raise ValueError(
                f"{name} is text, which needs a tokenizer: pass tokenizer=, or token ids"
            )
        _check_unicode(document, name)
        match document:
            case str():
                ids = _ids(token_ids(self.tokenizer, document), name)
                return Encoded(ids, ids)
            case [str(prompt), str(answer)]:
                return self._pair(prompt, answer)
            case [_, *_] if all(
                isinstance(t, Mapping) and {"role", "content"} <= {*t} for t in document
            ):
                return self._chat(list(document), name)
        raise TypeError(
            f"{name} must be a string, a chat (a list of {{'role': ..., 'content': ...}}), a pair "
            f"of strings (prompt, answer) or {{'input_ids': ..., 'labels': ...}}, got "
            f"{document!r:.80}"
        )

    def _pair(self, prompt: str, answer: str) -> Encoded:
        # encoded separately, as they are when the answer is generated
        before, after = prompt_ids(self.tokenizer, prompt), _bare_ids(self.tokenizer, answer)
        labels = [IGNORED] * len(before) + after
        return Encoded(np.array(before + after, np.int64), np.array(labels, np.int64))

    def _chat(self, turns: list[Any], name: str) -> Encoded:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{name} is a chat, and the tokenizer has no chat template: use a model that was "
                "tuned for chats, set tokenizer.chat_template, or write the documents as prompts "
                "with answers or as texts"
            )
        from jinja2 import TemplateError

        try:
            ids, mask = self._assistant_tokens(turns)
        except TemplateError as error:
            raise BadDocument(name, f"is refused by the chat template: {error}") from error
        if not mask.any():
            raise BadDocument(
                name,
                "has no turn of the assistant, or none that was found: if it has one, put "
                "{% generation %} around the answers in the chat template, or pass token ids",
            )
        return Encoded(ids, np.where(mask, ids, IGNORED))

    def _assistant_tokens(self, turns: list[Any]) -> tuple[IntArray, BoolArray]:
        """Return the token ids of a chat, and a mask of those that the assistant wrote.

        Templates with ``{% generation %}`` mark them. Otherwise an answer begins after the chat
        before it, rendered with a generation prompt, and ends with the token that ends its turn. A
        token that also covers the end of the prompt does not count.
        """
        tokenizer = self.tokenizer
        if GENERATION.search(tokenizer.get_chat_template()):
            encoded = tokenizer.apply_chat_template(
                turns, return_dict=True, return_assistant_tokens_mask=True
            )
            return np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"]) == 1
        chat = _Chat.of(tokenizer, turns)
        if not getattr(tokenizer, "is_fast", False):
            return _without_offsets(tokenizer, chat)
        encoded = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)
        begin, end = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
        mask = np.zeros(len(begin), bool)
        for first, last in chat.answers():
            mask |= (begin >= first) & (end <= last)
        return np.array(encoded["input_ids"], np.int64), mask


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
    if len(ids) == len(_bare_ids(tokenizer, text)):
        return ids
    whole, bare = token_ids(tokenizer, "a"), _bare_ids(tokenizer, "a")
    ends = (n + len(bare) for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare)
    return ids[: len(ids) - len(whole) + next(ends, len(whole))]


def _bare_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_unicode(document: Any, name: str) -> None:
    """Refuse halves of characters, which JSON can have and no tokenizer takes."""
    turns = [document] if isinstance(document, str) else document
    for turn in turns if isinstance(turns, Sequence) else ():
        text = turn.get("content") if isinstance(turn, Mapping) else turn
        half = SURROGATE.search(text) if isinstance(text, str) else None
        if half:
            raise BadDocument(
                name,
                f"has half of a character, {half[0]!r}, at position {half.start()} of a text: "
                "write whole characters, for instance with errors='replace'",
            )


def _ids(values: Any, name: str) -> IntArray:
    return as_labels(values, name) if len(values) else np.empty(0, np.int64)


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


def _without_offsets(tokenizer: Any, chat: _Chat) -> tuple[IntArray, BoolArray]:
    """Do the same with a tokenizer that does not say where its tokens are, from ids of prefixes."""
    ids = _bare_ids(tokenizer, chat.text)
    mask = np.zeros(len(ids), bool)
    for first, last in chat.answers():
        prompt, until = (_bare_ids(tokenizer, chat.text[:n]) for n in (first, last))
        mask[_after_prompt(tokenizer, prompt, ids) : _common_prefix(until, ids)] = True
    return np.array(ids, np.int64), mask


def _after_prompt(tokenizer: Any, prompt: list[int], ids: list[int]) -> int:
    """Return the number of the first token after a prompt; that of no token if it is not clear.

    The last token of the prompt may have merged with the beginning of the answer.
    """
    size, same = len(prompt), _common_prefix(prompt, ids)
    if same == size:
        return size
    own, merged = (tokenizer.decode(tokens[size - 1 : size]) for tokens in (prompt, ids))
    return size if same == size - 1 and merged.startswith(own) else len(ids)


def _common_prefix(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning of two lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


class _Chat(NamedTuple):
    """A chat whose template does not mark the answers."""

    tokenizer: Any
    turns: list[Any]
    text: str  # the whole chat, rendered
    special: str  # pattern of the special tokens

    @classmethod
    def of(cls, tokenizer: Any, turns: list[Any]) -> _Chat:
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        return cls(tokenizer, turns, text, "|".join(map(re.escape, names)) or "(?!)")

    def answers(self) -> Iterator[tuple[int, int]]:
        """Yield where each answer begins in the text, and where it ends."""
        for number, turn in enumerate(self.turns):
            start = self._start(number) if turn["role"] == "assistant" else None
            if start is not None:
                yield start, self._end(number, start)

    def _start(self, number: int) -> int | None:
        """Return where an answer begins in the text, or None if it is not rendered there."""
        if number:
            prompt = self._rendered(self.turns[:number], add_generation_prompt=True)
        else:  # no chat before it to render
            probed = [{**self.turns[0], "content": PROBE}, *self.turns[1:]]
            before, probe, _ = (self._rendered(probed) or "").partition(PROBE)
            prompt = before.rstrip(" ") if probe else None  # a space belongs to the word after it
        return len(prompt) if prompt is not None and self.text.startswith(prompt) else None

    def _end(self, number: int, start: int) -> int:
        """Return where an answer ends in the text, after its end token; 0 if it is left out.

        Templates may add an end of text, or the beginning of the next answer, at the end of a
        chat. That is not part of the answer. Some drop the thoughts of earlier turns: the model
        never wrote such an answer in this form, so it is left out.
        """
        turn, until = self.turns[number], self._rendered(self.turns[: number + 1])
        if until is None:
            return 0
        content_end, closing = 0, None
        more = {name for name, value in turn.items() if value} - {"role", "content"}
        if isinstance(turn["content"], str) and not more:  # tool calls may follow the content
            # thoughts may be dropped or changed, and may contain the words that follow them
            content = turn["content"].split(THOUGHT)[-1].strip()
            thought = self.text.rfind(THOUGHT, start, len(until))
            after = start if thought < 0 else thought + len(THOUGHT)
            place = self.text.find(content, after, max(after, len(until)))
            if place >= 0:
                content_end = place + len(content)
                closing = re.compile(rf"\s*(?:{self.special})").match(self.text, content_end)
        ends = [closing.end()] if closing else []
        if self.text.startswith(until):  # without the line break that follows an end token
            last = re.search(rf"(?:{self.special})(\s*)\Z", until)
            ends.append(last.start(1) if last else len(until))
        return next((n for n in (*ends, content_end) if until.startswith(self.text[:n])), 0)

    def _rendered(self, turns: list[Any], **options: Any) -> str | None:
        """Render some turns; None if the template refuses them, for instance without a user."""
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except TemplateError:
            return None
        return text
