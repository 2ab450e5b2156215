"""HTTP connections that end where a client stops in the middle of a request."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS, BODY = 10.0, 30.0
"""Seconds for all headers of a request, and without a byte of its body."""


class TimedProtocol(H11Protocol):
    """The protocol of uvicorn, which alone would wait for the rest of a request for ever."""

    _awaited: object = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read data, and wait for what they leave open."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        awaited = self.conn.their_state
        if awaited is h11.IDLE and self._awaited is h11.IDLE:
            return  # more of the same headers
        if self._timer is not None:
            self._timer.cancel()
        seconds = {h11.IDLE: HEADERS, h11.SEND_BODY: BODY}.get(awaited)
        self._awaited = awaited
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self.flow.read_paused:  # it is not the client that is behind
            self._watch()
        else:
            self.transport.close()
