"""An OpenAI-compatible proxy that adds the verdict of a gate to each response."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from calibrant._core.addresses import from_this_origin, is_loopback, names_server
from calibrant.llm.gate.judging import Judge
from calibrant.llm.gate.responses import Asked, Collected, read_request, without_logprobs
from calibrant.llm.gate.streams import JudgedStream, error_body

TOKEN_HEADER, KIND_HEADER = "x-calibrant-token", "x-calibrant-kind"
VERDICT_HEADER = "x-calibrant-verdict"
PENDING = "pending"
"""In the header of a stream, whose verdict comes at its end."""
PERIOD = 5.0
"""Seconds between two updates of the state."""
CONNECT = 10.0
"""Seconds to reach the upstream."""
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "content-length", "content-encoding", "host"),
    *("accept-encoding", "expect", "cookie", "set-cookie", "server", "date", "origin", "referer"),
}
"""Headers that belong to one connection or to a browser."""


@dataclass(frozen=True)
class Settings:
    """Where a proxy listens, and what it talks to.

    Attributes
    ----------
    upstream : str
        Address of the server with the model, as for a client: ``http://127.0.0.1:8000/v1``.
    host, port
        The own address.
    token : str
        What requests must have as ``X-Calibrant-Token``; empty if only this machine can send any.
    timeout : float
        Seconds without a byte from the upstream after which it is given up.
    max_body : int
        Bytes of the largest request.
    """

    upstream: str
    host: str
    port: int
    token: str = field(default="", repr=False)
    timeout: float = 600.0
    max_body: int = 20_000_000

    def refusal(self, headers: Mapping[str, str]) -> str:
        """Return the reason to refuse a request; empty if there is none."""
        host = headers.get("host", "")
        if self.token:
            given = headers.get(TOKEN_HEADER, "")
            right = secrets.compare_digest(given.encode(), self.token.encode())
            return "" if right else "the request lacks the token of this gate as X-Calibrant-Token"
        # any site that is open in a browser here can send requests to this machine
        if not names_server(host, self.host, self.port):
            return "this server does not answer to that host name"
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if not from_this_origin(site, origin, host):
            return "this request comes from a web site, which may not use this gate"
        return ""


def check_upstream(address: str) -> str:
    """Return the address of an upstream without a slash at the end; raise if it is none.

    >>> check_upstream("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000/v1'
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ValueError(
            "the upstream must be an address such as http://127.0.0.1:8000/v1, without a key or a "
            f"question mark, got {address}"
        )
    return address.rstrip("/")


def make_proxy(judge: Judge, settings: Settings) -> Starlette:
    """Return the application."""
    proxy = Proxy(judge, settings)
    routes = [
        Route("/v1/chat/completions", proxy.chat, methods=["POST"]),
        Route("/v1/completions", proxy.complete, methods=["POST"]),
        Route("/v1/models", proxy.models),
        Route("/v1/models/{name:path}", proxy.models),
    ]
    return Starlette(
        routes=routes,
        lifespan=proxy.lifespan,
        exception_handlers={404: _not_served, 405: _not_served},
    )


@dataclass
class Proxy:
    """What requests share."""

    judge: Judge
    settings: Settings
    client: httpx.AsyncClient = field(init=False)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Keep connections to the upstream and update the state while the server runs."""
        timeout = httpx.Timeout(self.settings.timeout, connect=CONNECT, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        # the settings of a web proxy in the environment are not for servers on this machine
        trusts = not is_loopback(urlsplit(self.settings.upstream).hostname or "")
        options: Any = {"timeout": timeout, "limits": limits, "trust_env": trusts}
        async with httpx.AsyncClient(**options) as self.client:
            task = asyncio.create_task(self._keep_state())
            try:
                yield
            finally:
                task.cancel()
                await run_in_threadpool(self.judge.flush)

    async def _keep_state(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            with suppress(OSError, ValueError):  # notes stay in memory until it can be written
                await run_in_threadpool(self.judge.flush)

    async def models(self, request: Request) -> Response:
        """Pass on a request about models."""
        if reason := self.settings.refusal(request.headers):
            return _error(403, reason)
        name = request.path_params.get("name", "")
        if {".", ".."} & {*name.split("/")}:  # which could lead to another path of the upstream
            return _error(404, "there is no such model")
        path = f"/models/{quote(name)}" if name else "/models"
        return await self._answered("GET", path, request, b"", None)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._judged("/chat/completions", request, chat=True)

    async def complete(self, request: Request) -> Response:
        """Complete a prompt."""
        return await self._judged("/completions", request, chat=False)

    async def _judged(self, path: str, request: Request, *, chat: bool) -> Response:
        if reason := self.settings.refusal(request.headers):
            return _error(403, reason)
        try:
            body = await _body(request, self.settings.max_body)
            content = json.loads(body)
        except ClientDisconnect:
            return Response(status_code=499)
        except TooLargeError:
            return _error(413, f"the request is larger than {self.settings.max_body:,} bytes")
        except (ValueError, RecursionError):
            return _error(400, "the request must be JSON")
        if not isinstance(content, dict):
            return _error(400, "the request must be a JSON object")
        asked, sent = read_request(content, chat=chat)
        return await self._answered("POST", path, request, json.dumps(sent).encode(), asked)

    async def _answered(
        self, method: str, path: str, request: Request, body: bytes, asked: Asked | None
    ) -> Response:
        """Send a request to the upstream, and return its response, judged if one was asked for."""
        headers = _passed_headers(request.headers)
        address = self.settings.upstream + path
        sent = self.client.build_request(method, address, headers=headers, content=body)
        sent.headers["accept-encoding"] = "identity"
        try:
            reply = await self.client.send(sent, stream=True)
        except httpx.TimeoutException:
            return _error(504, "the upstream did not answer in time")
        except httpx.HTTPError as problem:
            return _error(502, f"the upstream cannot be reached: {type(problem).__name__}")
        kind = request.headers.get(KIND_HEADER, "")
        is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
        if asked is not None and reply.is_success and is_stream:
            return self._streamed(reply, asked, kind)
        return await self._whole(reply, asked, kind)

    async def _whole(self, reply: httpx.Response, asked: Asked | None, kind: str) -> Response:
        headers = _passed_headers(reply.headers)
        try:
            body = await reply.aread()
        except httpx.TimeoutException:
            return _error(504, "the upstream did not finish its answer in time")
        except httpx.HTTPError as problem:
            return _error(502, f"the upstream broke off its answer: {type(problem).__name__}")
        finally:
            await reply.aclose()
        if asked is None or not reply.is_success:
            return Response(body, reply.status_code, headers)
        collected, content = Collected(), _parsed(body)
        collected.add(content or {})
        verdict = self.judge.judge(collected, asked, kind)
        headers[VERDICT_HEADER] = verdict["verdict"]
        if content is None:  # there is no place for the verdict but the header
            return Response(body, reply.status_code, headers)
        shown = content if asked.wants_logprobs else without_logprobs(content)
        body = json.dumps({**shown, "calibrant": verdict}).encode()
        return Response(body, reply.status_code, headers)

    def _streamed(self, reply: httpx.Response, asked: Asked, kind: str) -> Response:
        stream = JudgedStream(
            asked, lambda collected, problem: self.judge.judge(collected, asked, kind, problem)
        )

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in stream.pass_on(reply.aiter_bytes()):
                    yield chunk
            finally:  # also when the client has gone
                await reply.aclose()

        headers = {**_passed_headers(reply.headers), VERDICT_HEADER: PENDING}
        return StreamingResponse(chunks(), reply.status_code, headers)


class TooLargeError(ValueError):
    """A request beyond the limit."""


async def _body(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLargeError
        parts.append(part)
    return b"".join(parts)


def _passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that are passed on, in either direction."""
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in HOP_BY_HOP and not name.lower().startswith(("x-calibrant", "sec-"))
    }


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(error_body(message), status)


async def _not_served(request: Request, problem: Exception) -> Response:
    served = "/v1/chat/completions, /v1/completions and /v1/models"
    return _error(getattr(problem, "status_code", 404), f"this gate serves {served} only")
