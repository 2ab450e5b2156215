"""The server of the page, on a socket of this machine."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from calibrant._core.messages import needed

with needed("calibrant ui needs Starlette and uvicorn", "'calibrant[ui]'"):
    import h11
    import uvicorn
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from calibrant.ui.app import make_app
    from calibrant.ui.guard import LOOPBACK, Guard

PORT = 8321
HEADER_SECONDS, BODY_SECONDS = 10.0, 30.0
"""Time for all headers of a request, and without a byte of its body."""
_SHUTDOWN_SECONDS = 2
"""Time that open requests have when the server stops."""


def serve(
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    max_upload: int = 500,
    open_browser: bool = True,
    announce: Callable[[str], object] = print,
) -> None:
    """Serve the page until it is interrupted or its terminal closes.

    Parameters
    ----------
    host : str
        Address to listen on; the default is reachable from this machine alone.
    port : int, optional
        By default 8321, or any free port if that is in use.
    max_upload : int
        Largest file in megabytes.
    open_browser : bool
        Open the page in the browser.
    announce : callable
        Called with the address of the page, which contains its token.
    """
    with listening(host, port) as listener:
        guard = Guard(host, listener.getsockname()[1])
        app = make_app(guard, max_upload * 1_000_000)
        announce(guard.address)
        if open_browser:  # the socket listens already, so that the browser waits for the answer
            webbrowser.open(guard.address)
        run_app(app, listener)


def listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port, by default on 8321 or else on any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.getaddrinfo(host, None, family)
    except (OSError, UnicodeError) as problem:
        raise ValueError(
            f"--host must be an address or a name of this machine, got {host!r}: leave it out for "
            f"{LOOPBACK[0]}"
        ) from problem
    try:
        return socket.create_server((host, PORT if port is None else port), family=family)
    except OSError as problem:
        if port is None:
            return socket.create_server((host, 0), family=family)
        reason = problem.strerror or problem
        raise OSError(f"cannot listen on {host}, port {port}: {reason}; try --port 0") from problem


def run_app(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application on a socket until it is interrupted or its terminal closes."""
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    with suppress(KeyboardInterrupt), _hangup_terminates():
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _hangup_terminates() -> Iterator[None]:
    """Handle a hangup, which would end the process at once, as uvicorn handles SIGTERM.

    A hangup that is ignored, as under ``nohup``, stays ignored.
    """
    hangup = getattr(signal, "SIGHUP", None)
    in_main = threading.current_thread() is threading.main_thread()
    if hangup is None or not in_main or signal.getsignal(hangup) is not signal.SIG_DFL:
        yield
        return
    signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(hangup, signal.SIG_DFL)


class TimedProtocol(H11Protocol):
    """HTTP with time limits: uvicorn by itself waits for the rest of a request for ever."""

    _awaited: object = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read data, and time what is still missing."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        awaited = self.conn.their_state
        if awaited is h11.IDLE and self._awaited is h11.IDLE:
            return  # more of the same headers
        if self._timer is not None:
            self._timer.cancel()
        seconds = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(awaited)
        self._awaited = awaited
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self.flow.read_paused:  # it is not the client that is behind
            self._watch()
        else:
            self.transport.close()
