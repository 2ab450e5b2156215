"""The tokens of a chat that the assistant wrote.

Templates with ``{% generation %}`` mark them. For other templates they are inferred: an answer
begins after the chat before it, rendered with a generation prompt, and ends with the token that
ends its turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, IntArray

GENERATION = re.compile(r"\{%-?\s*generation\b")
PROBE = "\ue000calibrant\ue000"
"""Inserted around an answer to find it in the rendered chat; private-use characters."""


def assistant_tokens(tokenizer: Any, turns: list[Any]) -> tuple[IntArray, BoolArray]:
    """Return the token ids of a chat, and a mask of those that the assistant wrote.

    The mask includes the token that ends a turn. An answer is left out if the chat up to it is
    rendered differently from the whole (some templates drop the thoughts of earlier turns): the
    model never wrote it in this form.
    """
    if GENERATION.search(tokenizer.get_chat_template()):
        encoded = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        return np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"]) == 1
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    chat = _Chat(tokenizer, turns, text, bare_ids(tokenizer, text))
    mask = np.zeros(len(chat.ids), bool)
    for first, last in chat.answers():
        mask[first:last] = True
    return np.array(chat.ids, np.int64), mask


def bare_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class _Chat(NamedTuple):
    """A chat whose template does not mark the answers."""

    tokenizer: Any
    turns: list[Any]
    text: str  # the whole chat, rendered
    ids: list[int]

    def answers(self) -> Iterator[tuple[int, int]]:
        """Yield the first token of each answer and the one after its last."""
        special = _special_tokens(self.tokenizer)
        for number, turn in enumerate(self.turns):
            if turn["role"] != "assistant":
                continue
            start, end = self._start(number), self._end(number, special)
            if start is not None and end is not None:
                first = self._first_token(bare_ids(self.tokenizer, self.text[:start]))
                last = _common_prefix(bare_ids(self.tokenizer, self.text[:end]), self.ids)
                if first is not None and first < last:
                    yield first, last

    def _start(self, number: int) -> int | None:
        """Return where an answer begins in the text, or None if it is not rendered there."""
        if number:
            prompt = self._rendered(self.turns[:number], add_generation_prompt=True)
        else:  # no chat before it to render; a space belongs to the word after it
            before = self._around_content(number, PROBE, "")[0]
            prompt = before and before.rstrip(" ")
        return len(prompt) if prompt is not None and self.text.startswith(prompt) else None

    def _end(self, number: int, special: str) -> int | None:
        """Return where an answer ends in the text, after its end token, or None.

        Templates may add an end of text, or the beginning of the next answer, at the end of a
        chat. That is not part of the answer, and is not there when the chat goes on.
        """
        until = self._rendered(self.turns[: number + 1])
        if until is None:
            return None
        same = _common_prefix(until, self.text)
        rest = self._around_content(number, "", PROBE)[1]
        known = rest is not None and self.text.endswith(rest)
        content_end = len(self.text) - len(rest or "")
        closing = re.compile(rf"\s*(?:{special})").match(self.text, content_end) if known else None
        if closing and closing.end() <= same:
            return closing.end()
        if same == len(until):  # without the line break that templates put after an end token
            last = re.search(rf"(?:{special})(\s*)\Z", until)
            return last.start(1) if last else same
        return content_end if known and content_end <= same else None

    def _around_content(self, number: int, before: str, after: str) -> tuple[str | None, ...]:
        """Return the text on both sides of a probe at the content of a turn.

        None for both if a turn has more than its content, such as tool calls, which may follow it.
        """
        turn = self.turns[number]
        more = {name for name, value in turn.items() if value} - {"role", "content"}
        if more or not isinstance(turn["content"], str):
            return None, None
        probed = {**turn, "content": f"{before}{turn['content']}{after}"}
        text = self._rendered([*self.turns[:number], probed, *self.turns[number + 1 :]])
        sides = tuple((text or "").split(PROBE))
        return sides if len(sides) == 2 else (None, None)

    def _first_token(self, prompt: list[int]) -> int | None:
        """Return the number of the first token after a prompt; None if the ids differ before it.

        The last token of the prompt may have merged with the beginning of the answer, such as its
        line breaks. It belongs to both and does not count.
        """
        size, same = len(prompt), _common_prefix(prompt, self.ids)
        if same < size - 1 or len(self.ids) < size:
            return None
        if same == size:
            return size
        own, merged = (self.tokenizer.decode(ids[size - 1 : size]) for ids in (prompt, self.ids))
        return size if merged.startswith(own) else None

    def _rendered(self, turns: list[Any], **options: Any) -> str | None:
        """Render some turns; None if the template refuses them, for want of a user for instance."""
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except TemplateError:
            return None
        return text


def _special_tokens(tokenizer: Any) -> str:
    """Return a pattern of the special tokens of a tokenizer."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    return "|".join(map(re.escape, names)) or "(?!)"


def _common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
