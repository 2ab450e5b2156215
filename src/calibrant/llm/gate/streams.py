"""Server-sent events of OpenAI-compatible servers, passed on as they come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from calibrant.llm.gate.judging import CUT
from calibrant.llm.gate.responses import Asked, Collected, without_logprobs

LONGEST = 16_000_000
"""Bytes of one line."""
DONE = b"[DONE]"


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield lines with their ends, which are line feeds: JSON may hold other separators."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
        if len(rest) > LONGEST:
            raise ValueError(f"a line of the upstream is longer than {LONGEST:,} bytes")
    if rest:
        yield rest


def data_of(line: bytes) -> bytes | None:
    r"""Return the data of a line; None for other fields, comments and empty lines.

    >>> data_of(b'data: {"a": 1}\n'), data_of(b": alive\n")
    (b'{"a": 1}', None)
    """
    return line[5:].strip() if line.startswith(b"data:") else None


def event(content: Any) -> bytes:
    """Return content as an event."""
    return f"data: {json.dumps(content)}\n\n".encode()


def error_body(message: str, kind: str = "calibrant_gate") -> dict[str, Any]:
    """Return an error in the form of OpenAI's."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class JudgedStream:
    """A stream of chunks with the verdict in a last chunk, before the end.

    Parameters
    ----------
    asked : Asked
    judge : callable
        Of the collected response and a problem, empty if there is none; returns the verdict.
    """

    def __init__(self, asked: Asked, judge: Callable[[Collected, str], dict[str, Any]]) -> None:
        self.asked, self.judge = asked, judge
        self.collected = Collected()

    async def pass_on(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the lines of the upstream, without log-probabilities unless they were asked for.

        A stream that breaks ends with the verdict "person" and an error, which clients raise.
        """
        done = False
        try:
            async for line in lines(chunks):
                data = data_of(line)
                if data == DONE and not done:
                    done = True
                    yield self._verdict("")
                yield line if data is None else self._passed(line, data)
        except Exception as problem:  # whatever ends a connection, or cannot be read
            yield b"\n\n" + self._verdict(CUT)
            yield event(error_body(f"the stream of the upstream broke: {type(problem).__name__}"))
            return
        if not done:
            yield b"\n\n" + self._verdict("")

    def _passed(self, line: bytes, data: bytes) -> bytes:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return line
        if not isinstance(content, dict):
            return line
        self.collected.add(content)
        if self.asked.wants_logprobs:
            return line
        stripped = without_logprobs(content)
        return line if stripped == content else b"data: " + json.dumps(stripped).encode() + b"\n"

    def _verdict(self, problem: str) -> bytes:
        problem = problem or (CUT if self.collected.cut() else "")
        verdict = self.judge(self.collected, problem)
        return event({**self.collected.about, "choices": [], "calibrant": verdict})
