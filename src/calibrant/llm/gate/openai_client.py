"""Verdicts of a gate on what the client of OpenAI returns, in this process."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from calibrant.llm.gate.gate import Gate
from calibrant.llm.gate.serving import (
    KIND_HEADER,
    Form,
    Judge,
    async_chunks_with_verdict,
    chunks_with_verdict,
)

Client = TypeVar("Client")


def gated(client: Client, gate: Gate, *, state: str | os.PathLike[str] | None = None) -> Client:
    """Let a client of OpenAI add the verdict of a gate to every answer, and return the client.

    ``chat.completions.create``, ``completions.create`` and ``responses.create`` return what they
    did before, with an attribute ``calibrant``: a dictionary of ``verdict`` ("accept", "verify" or
    "person"), ``confidence``, ``threshold``, ``promise`` and ``reason``. Of a stream, the chunk
    with the end of the answer has it (of responses, the ``response`` of the last event).
    Log-probabilities are requested, and taken out again unless the request asks for them. A request
    may state the kind of its question by ``extra_headers={"X-Calibrant-Kind": ...}``, which is not
    sent on.

    Parameters
    ----------
    client : openai.OpenAI or openai.AsyncOpenAI
        Or another of their kind; it is changed. What ``with_raw_response``, ``parse`` and
        ``stream`` return has no verdict.
    gate : Gate
        For confidences from token probabilities.
    state : path, optional
        File of the drift watch, which ``calibrant llm gate watch --new`` makes.

    Examples
    --------
    ::

        client = gated(OpenAI(), cal.load("gate"))
        answer = client.chat.completions.create(model="my-model", messages=messages)
        if answer.calibrant["verdict"] != "accept":
            ...
    """
    judge = Judge(gate, state)
    found: Any = client
    resources: list[tuple[Any, Form]] = [
        (found.chat.completions, "chat"),
        (found.completions, "completions"),
    ]
    if hasattr(found, "responses"):
        resources.append((found.responses, "responses"))
    for resource, form in resources:
        resource.create = _judged(resource.create, judge, form)
    return client


def _judged(create: Callable[..., Any], judge: Judge, form: Form) -> Callable[..., Any]:
    @wraps(create)
    def judged(**request: Any) -> Any:
        headers = dict(request.get("extra_headers") or {})
        kinds = [headers.pop(name) for name in [*headers] if name.lower() == KIND_HEADER]
        if kinds:
            request["extra_headers"] = headers
        call = judge.call(request, form, kinds[0] if kinds else "")

        def returned(result: Any) -> Any:
            if not request.get("stream"):
                return call.finish(result)
            if hasattr(result, "__aiter__"):
                return AsyncJudgedStream(result, async_chunks_with_verdict(result, call))
            return JudgedStream(result, chunks_with_verdict(result, call))

        async def awaited(result: Any) -> Any:
            return returned(await result)

        result = create(**call.sent)
        return awaited(result) if inspect.isawaitable(result) else returned(result)

    return judged


class JudgedStream:
    """A stream of the client, with the verdict; all else is that of the stream itself."""

    def __init__(self, stream: Any, chunks: Iterator[Any]) -> None:
        self._stream, self._chunks = stream, chunks

    def __iter__(self) -> Iterator[Any]:
        return self._chunks

    def __next__(self) -> Any:
        return next(self._chunks)

    def __enter__(self) -> JudgedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class AsyncJudgedStream:
    """An asynchronous stream of the client, with the verdict."""

    def __init__(self, stream: Any, chunks: AsyncIterator[Any]) -> None:
        self._stream, self._chunks = stream, chunks

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._chunks

    async def __anext__(self) -> Any:
        return await anext(self._chunks)

    async def __aenter__(self) -> AsyncJudgedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
