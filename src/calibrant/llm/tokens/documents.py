"""Documents as token ids, with labels at the tokens that count."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from calibrant._core.checks import IGNORED, IntArray, as_labels

Document: TypeAlias = "str | Sequence[Any] | Mapping[str, Any]"
"""A text, a chat, a pair (prompt, answer), or ready ids: see :func:`calibrant.llm.collect`."""

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
"""In chat templates that tell which tokens are the assistant's."""
SEAM = "\ue000calibrant\ue000"
"""Put where an answer begins or ends, to see where that is in a chat; letters of no language."""


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
    if isinstance(documents, str):
        raise TypeError(
            f"documents must be a list, got the text {documents!r:.40}: put it into a list, or "
            "read_documents of a file first"
        )
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


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that goes on: without the tokens that the tokenizer puts after texts."""
    ids = token_ids(tokenizer, text)
    return ids[: len(ids) - _ending(tokenizer)] if len(ids) > len(_bare(tokenizer, text)) else ids


def _ending(tokenizer: Any) -> int:
    """Number of tokens that a tokenizer puts after a text."""
    whole, bare = token_ids(tokenizer, "a"), _bare(tokenizer, "a")
    before = next((n for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare), None)
    return 0 if before is None else len(whole) - len(bare) - before


def _bare(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, and of nothing around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


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
    before, after = prompt_ids(tokenizer, prompt), _bare(tokenizer, answer)
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
        whole = _rendered(tokenizer, turns)
        ids = np.array(_bare(tokenizer, whole), np.int64)
        said = np.zeros(len(ids), bool)
        for first, last in _answers(tokenizer, turns, whole, ids):
            said[first:last] = True
    if not said.any():
        raise ValueError(
            f"no turn of the assistant was found in {what}: either it has none, or the chat "
            "template renders the beginning of a chat in another way than the whole; put "
            "{% generation %} around the answers in the template, or pass input_ids and labels"
        )
    return Encoded(ids, np.where(said, ids, IGNORED))


def _answers(
    tokenizer: Any, turns: list[Any], whole: str, ids: IntArray
) -> Iterator[tuple[int, int]]:
    """First token of each answer and the one after its last, in a chat without marks.

    An answer begins after the chat before it, made ready for an answer, and ends where the whole
    chat has the token that ends its turn. Where the chat up to it is written in another way than
    in the whole, the model never saw that answer in this form (some templates drop the thoughts of
    earlier turns), and it is left out.
    """
    special = _special(tokenizer)
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        start = _start(tokenizer, turns, number, whole)
        end = _end(tokenizer, turns, number, whole, special)
        if start is not None and end is not None:
            first = _after_prompt(tokenizer, np.array(_bare(tokenizer, whole[:start]), int), ids)
            last = _shared(_bare(tokenizer, whole[:end]), ids.tolist())
            if first is not None and first < last:
                yield first, last


def _start(tokenizer: Any, turns: list[Any], number: int, whole: str) -> int | None:
    """Where an answer begins in a chat; None where the chat has it in another way."""
    if number:
        prompt = _part(tokenizer, turns[:number], add_generation_prompt=True)
    else:  # nothing before it could be made ready; a blank belongs to the word after it
        before = _around(tokenizer, turns, number, SEAM, "")[0]
        prompt = before and before.rstrip(" ")
    return len(prompt) if prompt is not None and whole.startswith(prompt) else None


def _end(tokenizer: Any, turns: list[Any], number: int, whole: str, special: str) -> int | None:
    """Where an answer ends in a chat, after its end token; None where the chat has it otherwise.

    Templates may write more at the end of a chat, such as the end of all text, or the beginning of
    the next answer. It is no part of this one, and is not there when the chat goes on.
    """
    until = _part(tokenizer, turns[: number + 1])
    if until is None:
        return None
    same = _shared(until, whole)
    rest = _around(tokenizer, turns, number, "", SEAM)[1]
    known = rest is not None and whole.endswith(rest)
    said = len(whole) - len(rest or "")
    closing = re.compile(rf"\s*(?:{special})").match(whole, said) if known else None
    if closing and closing.end() <= same:
        return closing.end()
    if same == len(until):  # without the line break that templates put after an end token
        last = re.search(rf"(?:{special})(\s*)\Z", until)
        return last.start(1) if last else same
    return said if known and said <= same else None


def _around(
    tokenizer: Any, turns: list[Any], number: int, before: str, after: str
) -> tuple[str | None, str | None]:
    """What a chat has before and after a seam at the content of a turn; None if that is unclear.

    Turns may have more to say than a content, such as calls of tools, which may follow it.
    """
    turn = turns[number]
    more = {name for name, value in turn.items() if value} - {"role", "content"}
    if more or not isinstance(turn["content"], str):
        return None, None
    seamed = {**turn, "content": f"{before}{turn['content']}{after}"}
    text = _part(tokenizer, [*turns[:number], seamed, *turns[number + 1 :]])
    parts = (text or "").split(SEAM)
    return (parts[0], parts[1]) if len(parts) == 2 else (None, None)


def _special(tokenizer: Any) -> str:
    """Pattern of the special tokens of a tokenizer."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    return "|".join(map(re.escape, names)) or "(?!)"


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


def _rendered(tokenizer: Any, turns: list[Any], **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    return text


def _part(tokenizer: Any, turns: list[Any], **options: Any) -> str | None:
    """Some turns of a chat; None where the template wants others, such as one of the user first."""
    from jinja2 import TemplateError

    try:
        return _rendered(tokenizer, turns, **options)
    except TemplateError:
        return None


def _begins(whole: IntArray, start: IntArray) -> bool:
    return bool(np.array_equal(whole[: len(start)], start))


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of what two texts, or two lists of ids, begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
