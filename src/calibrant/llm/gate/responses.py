"""Answers in the responses of OpenAI-compatible servers, whole or in chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from calibrant.llm.answers.graded import Row

ROUNDING = 1e-3
"""Excess over 0 of log-probabilities that were computed in half precision."""


class Asked(NamedTuple):
    """What of a request matters for its answers.

    Attributes
    ----------
    question : str
        The last message of the user, or the prompt.
    turn : int
        Number of the answer in its conversation, from 1.
    wants_logprobs : bool
        True if the client asked for log-probabilities.
    streams : bool
    echoes : bool
        True if the answer begins with the prompt.
    """

    question: str = ""
    turn: int = 1
    wants_logprobs: bool = False
    streams: bool = False
    echoes: bool = False


def read_request(content: Mapping[str, Any], *, chat: bool) -> tuple[Asked, dict[str, Any]]:
    """Return what a request asks for, and the request with log-probabilities asked for, too.

    >>> asked, sent = read_request({"messages": [{"role": "user", "content": "Hi"}]}, chat=True)
    >>> asked.question, asked.wants_logprobs, sent["logprobs"]
    ('Hi', False, True)
    """
    wanted = content.get("logprobs")
    asks = bool(wanted) if chat else wanted is not None and wanted is not False
    added = {} if asks else {"logprobs": True if chat else 1}
    streams, echoes = bool(content.get("stream")), bool(content.get("echo"))
    if not chat:
        question = _text(content.get("prompt"))
        return Asked(question, 1, asks, streams, echoes), {**content, **added}
    messages = content.get("messages")
    said = [m for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    questions = [_text(m.get("content")) for m in said if m.get("role") == "user"]
    turn = 1 + sum(m.get("role") == "assistant" for m in said)
    question = questions[-1] if questions else ""
    return Asked(question, turn, asks, streams), {**content, **added}


@dataclass
class Choice:
    """One of the answers to a request, as far as it has come."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: str = ""
    calls_tool: bool = False
    refuses: bool = False

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add a choice of a response, or of a chunk of one."""
        said = choice.get("message") or choice.get("delta") or {}
        if not isinstance(said, Mapping):
            said = {}
        self.text += _text(said.get("content")) + _text(choice.get("text"))
        self.calls_tool |= bool(said.get("tool_calls") or said.get("function_call"))
        self.refuses |= bool(said.get("refusal"))
        self.finish = str(choice.get("finish_reason") or self.finish)
        self.logprobs += _logprobs(choice.get("logprobs"))

    def problem(self) -> str:
        """Return why the answer has no confidence; empty if it has one."""
        if self.calls_tool:
            return "it is a tool call, not an answer"
        if self.refuses:
            return "the model refused to answer"
        if self.finish == "content_filter":
            return "a content filter removed a part of the answer"
        if not self.text.strip():
            return "the answer is empty"
        if not self.logprobs:
            return "the upstream returned no log-probabilities"
        if not all(_is_number(value) for value in self.logprobs):
            return "some log-probabilities of the upstream are no numbers"
        if max(self.logprobs) > ROUNDING:
            return "some log-probabilities of the upstream are above 0"
        return ""

    def row(self, asked: Asked, model: str, kind: str) -> Row:
        """Return the answer as a row for a gate."""
        probs = [math.exp(min(value, 0.0)) for value in self.logprobs]
        return {
            "question": asked.question,
            "answer": self.text,
            "token_probs": probs,
            "model": model,
            "kind": kind,
            "turn": asked.turn,
        }


class Collected:
    """The choices of a response, by their numbers, and what else identifies it."""

    def __init__(self) -> None:
        self.choices: dict[int, Choice] = {}
        self.about: dict[str, Any] = {}

    def add(self, content: Mapping[str, Any]) -> None:
        """Add a response, or a chunk of one."""
        for name in ("id", "object", "created", "model"):
            if content.get(name) is not None:
                self.about.setdefault(name, content[name])
        for place, choice in enumerate(_choices(content)):
            index = choice.get("index")
            number = index if isinstance(index, int) else place
            self.choices.setdefault(number, Choice()).add(choice)

    def cut(self) -> bool:
        """Return True if an answer has no end."""
        return any(not choice.finish for choice in self.choices.values())


def without_logprobs(content: dict[str, Any]) -> dict[str, Any]:
    """Return a response as for a client that asked for no log-probabilities."""
    choices = content.get("choices")
    if not isinstance(choices, list):
        return content
    stripped = [
        {**one, "logprobs": None} if isinstance(one, Mapping) and "logprobs" in one else one
        for one in choices
    ]
    return {**content, "choices": stripped}


def _choices(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = content.get("choices")
    return [c for c in choices if isinstance(c, Mapping)] if isinstance(choices, list) else []


def _text(value: Any) -> str:
    """Return a text, or the texts among the parts of a message."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    return "".join(_text(part.get("text")) for part in parts if isinstance(part, Mapping))


def _logprobs(value: Any) -> list[Any]:
    """Return the log-probabilities of the tokens of a chat or a completion."""
    if not isinstance(value, Mapping):
        return []
    tokens = value.get("content")
    if isinstance(tokens, list):
        return [one.get("logprob") if isinstance(one, Mapping) else None for one in tokens]
    flat = value.get("token_logprobs")
    return list(flat) if isinstance(flat, list) else []


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and not math.isnan(value)
