"""Verdicts of a gate on what the client of OpenAI returns, in this process."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from copy import copy
from functools import wraps
from typing import Any, TypeVar, cast, get_args

from calibrant._core.messages import comma_separated
from calibrant.llm.gate.gate import Gate
from calibrant.llm.gate.serving import (
    KIND_HEADER,
    Call,
    Form,
    LiveGate,
    _async_chunks_with_verdict,
    _chunks_with_verdict,
)

Client = TypeVar("Client")
_FORMS = get_args(Form)
_RAW_HEADER = "x-stainless-raw-response"
"""Header by which ``with_raw_response`` asks the client for a response as it came."""


def gated(client: Client, gate: Gate, *, state: str | os.PathLike[str] | None = None) -> Client:
    """Return a copy of a client of OpenAI that adds the verdict of a gate to every answer.

    ``chat.completions.create``, ``completions.create`` and ``responses.create`` return what they
    did before, with an attribute ``calibrant``: a dictionary of ``verdict`` ("accept", "verify" or
    "person"), ``calibrated``, ``threshold``, ``promise`` and ``reason``. Of a stream, the chunk
    with the end of the answer has it (of responses, the ``response`` of the last event).
    Log-probabilities are requested, and taken out again unless the request asks for them. A request
    may state the kind of its question by ``extra_headers={"X-Calibrant-Kind": ...}``, which is not
    sent on.

    Parameters
    ----------
    client : openai.OpenAI or openai.AsyncOpenAI
        Or another of their kind that has one or more of ``chat.completions``, ``completions`` and
        ``responses``. The copy shares its connections. What ``parse`` and ``stream`` return has no
        verdict, nor what ``with_raw_response`` and ``with_options`` lead to.
    gate : Gate
        For confidences from token probabilities.
    state : path, optional
        File of the drift watch, which ``calibrant llm gate watch --new`` makes.
    """
    made: Any = copy(client)
    forms = [form for form in _FORMS if hasattr(client, form)]
    if not forms:
        raise TypeError(f"the client must have {comma_separated(_FORMS)}, got {client!r:.60}")
    live = LiveGate(gate, state)
    for form in forms:
        resource = copy(getattr(made, form))
        setattr(made, form, resource)
        if form == "chat":
            resource.completions = resource = copy(resource.completions)
        resource.create = _with_verdict(resource.create, live, form)
    return cast(Client, made)


def _with_verdict(create: Callable[..., Any], live: LiveGate, form: Form) -> Callable[..., Any]:
    @wraps(create)
    def answered(**request: Any) -> Any:
        headers = dict(request.get("extra_headers") or {})
        own = {name: value for name, value in headers.items() if name.lower() != KIND_HEADER}
        if own != headers:
            request["extra_headers"] = own
        if _RAW_HEADER in map(str.lower, own):
            return create(**request)
        call = Call(live, request, form, headers)

        def returned(result: Any) -> Any:
            if not request.get("stream"):
                return call.finish(result)
            is_async = hasattr(result, "__aiter__")
            chunks = _async_chunks_with_verdict if is_async else _chunks_with_verdict
            return _StreamWithVerdict(result, chunks(result, call))

        async def awaited(result: Any) -> Any:
            return returned(await result)

        result = create(**call.sent)
        return awaited(result) if inspect.isawaitable(result) else returned(result)

    return answered


class _StreamWithVerdict:
    """A stream of the client, or an asynchronous one, with the verdict; all else is its own."""

    def __init__(self, stream: Any, chunks: Any) -> None:
        self._stream, self._chunks = stream, chunks

    def __iter__(self) -> Iterator[Any]:
        return iter(self._chunks)

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._chunks)

    def __next__(self) -> Any:
        return next(self._chunks)

    async def __anext__(self) -> Any:
        return await anext(self._chunks)

    def __enter__(self) -> _StreamWithVerdict:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    async def __aenter__(self) -> _StreamWithVerdict:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
