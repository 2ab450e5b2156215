"""Documents as token ids, with labels at the tokens that count."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from calibrant._checks import IGNORED, IntArray, as_labels

Document: TypeAlias = "str | Sequence[Any] | Mapping[str, Any]"
"""A text, a chat, a pair (prompt, answer), or ready ids: see :func:`calibrant.llm.collect`."""

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
"""In chat templates that tell which tokens are the assistant's."""


class Encoded(NamedTuple):
    """Token ids of a document and the labels at the same places, each ``(t,)``.

    The token at place t is predicted from those before it, so the first is never a target.
    """

    ids: IntArray
    labels: IntArray

    @property
    def targets(self) -> IntArray:
        """Places of the tokens that count."""
        return np.flatnonzero(self.labels[1:] != IGNORED) + 1


def encoded(documents: Iterable[Document], tokenizer: Any, length: int) -> list[Encoded]:
    """Turn documents into ids and labels, cut at ``length`` tokens."""
    found = []
    for number, document in enumerate(documents):
        ids, labels = _encoded(document, tokenizer, f"document {number}")
        found.append(Encoded(ids[:length], labels[:length]))
    return found


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, with the tokens that the tokenizer puts around texts unless it has them.

    A chat that a template has made a text of has them: it begins with that for a beginning.
    """
    start = tokenizer.bos_token
    rendered = bool(start) and text.startswith(start)
    return list(tokenizer(text, add_special_tokens=not rendered)["input_ids"])


def groups(lengths: Sequence[int], size: int) -> Iterator[slice]:
    """Cut documents into runs that have at most ``size`` tokens when padded, or one that has more.

    >>> list(groups([3, 4, 1, 9, 2], 8))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    start, longest = 0, 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > start and (number - start + 1) * longest > size:
            yield slice(start, number)
            start, longest = number, length
    yield slice(start, len(lengths))


def digest_of(documents: Iterable[Encoded]) -> str:
    """Digest of ids and labels."""
    total = hashlib.sha256()
    for ids, labels in documents:
        total.update(len(ids).to_bytes(8, "little"))
        total.update(ids.astype("<i8").tobytes() + labels.astype("<i8").tobytes())
    return total.hexdigest()[:16]


def _encoded(document: Document, tokenizer: Any, what: str) -> Encoded:
    if isinstance(document, Mapping):
        return _ready(document, what)
    if tokenizer is None:
        raise ValueError(
            f"{what} is text, which needs a tokenizer: pass tokenizer=, the one of the model, or "
            "documents as {'input_ids': ..., 'labels': ...}"
        )
    if isinstance(document, str):
        ids = _ids(token_ids(tokenizer, document), what)
        return Encoded(ids, ids)
    if _is_pair(document):
        return _pair(tokenizer, *document)
    if _is_chat(document):
        return _chat(tokenizer, list(document), what)
    raise TypeError(
        f"{what} must be a string, a chat (a list of {{'role': ..., 'content': ...}}), a pair of "
        f"strings (prompt, answer) or {{'input_ids': ..., 'labels': ...}}, got {document!r:.80}"
    )


def _ids(values: Any, name: str) -> IntArray:
    """Token ids; an empty list, whose kind nobody can tell, has none."""
    return as_labels(values, name) if len(values) else np.empty(0, np.int64)


def _is_pair(document: Any) -> bool:
    listed = isinstance(document, (tuple, list)) and len(document) == 2
    return listed and all(isinstance(part, str) for part in document)


def _is_chat(document: Any) -> bool:
    listed = isinstance(document, (tuple, list)) and len(document) > 0
    return listed and all(
        isinstance(turn, Mapping) and {"role", "content"} <= set(turn) for turn in document
    )


def _ready(document: Mapping[str, Any], what: str) -> Encoded:
    if "input_ids" not in document:
        raise ValueError(f"{what} must have input_ids, got the keys {', '.join(document)}")
    ids = _ids(document["input_ids"], f"input_ids of {what}")
    labels = _ids(document.get("labels", ids), f"labels of {what}")
    if ids.ndim != 1 or ids.shape != labels.shape:
        raise ValueError(
            f"input_ids and labels of {what} must be (t,) both, got {ids.shape} and "
            f"{labels.shape}: one document is one sequence, without padding"
        )
    return Encoded(ids, labels)


def _pair(tokenizer: Any, prompt: str, answer: str) -> Encoded:
    """Prompt and answer are cut into tokens apart, as they are when the answer is generated."""
    before = token_ids(tokenizer, prompt)
    after = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    labels = [IGNORED] * len(before) + after
    return Encoded(np.array(before + after, np.int64), np.array(labels, np.int64))


def _chat(tokenizer: Any, turns: list[Any], what: str) -> Encoded:
    """Only what the assistant says is labelled, with the token that ends its turn."""
    if MARKS_ANSWERS.search(tokenizer.get_chat_template()):
        found = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, said = np.array(found["input_ids"]), np.array(found["assistant_masks"]) == 1
    else:
        ids = _rendered(tokenizer, turns)
        said = np.zeros(len(ids), bool)
        for first, last in _answers(tokenizer, turns, ids):
            said[first:last] = True
    if not said.any():
        raise ValueError(
            f"no turn of the assistant was found in {what}: either it has none, or the chat "
            "template renders the beginning of a chat in another way than the whole; put "
            "{% generation %} around the answers in the template, or pass input_ids and labels"
        )
    return Encoded(ids, np.where(said, ids, IGNORED))


def _answers(tokenizer: Any, turns: list[Any], ids: IntArray) -> list[tuple[int, int]]:
    """First token of each answer and the one after its last, in a chat without marks.

    An answer lies between the chat before it, ready for an answer, and the chat up to it. Where
    one of these is not how the whole chat begins, the model never saw that answer in this
    form (some templates drop the thoughts of earlier turns), and it is left out.
    """
    found = []
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant" or number == 0:
            continue
        before = _rendered(tokenizer, turns[:number], add_generation_prompt=True)
        after = _rendered(tokenizer, turns[: number + 1])
        first = _after_prompt(tokenizer, before, after)
        if _begins(ids, after) and first is not None and first < len(after):
            found.append((first, first + _spoken(tokenizer, after[first:])))
    return found


def _after_prompt(tokenizer: Any, prompt: IntArray, whole: IntArray) -> int | None:
    """Place of the first token after a prompt; None where the whole begins in another way.

    An answer may begin with what the last token of the prompt takes in, such as line breaks. That
    token belongs to both and does not count.
    """
    size = len(prompt)
    if _begins(whole, prompt):
        return size
    merged = len(whole) >= size and _begins(whole, prompt[:-1])
    last, other = (tokenizer.decode(ids[size - 1 : size]) for ids in (prompt, whole))
    return size if merged and other.startswith(last) else None


def _rendered(tokenizer: Any, turns: list[Any], **options: Any) -> IntArray:
    return np.array(tokenizer.apply_chat_template(turns, return_dict=False, **options), np.int64)


def _begins(whole: IntArray, start: IntArray) -> bool:
    return bool(np.array_equal(whole[: len(start)], start))


def _spoken(tokenizer: Any, answer: IntArray) -> int:
    """Length of an answer without the line break that templates put after its end token."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ends = np.flatnonzero(np.isin(answer, list(special | set(tokenizer.all_special_ids))))
    if len(ends) and not tokenizer.decode(answer[ends[-1] + 1 :]).strip():
        return int(ends[-1]) + 1
    return len(answer)
