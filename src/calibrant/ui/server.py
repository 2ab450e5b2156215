"""The server of the page, on a socket of this machine."""

from __future__ import annotations

import signal
import socket
import webbrowser
from collections.abc import Callable
from contextlib import suppress

from calibrant._core.messages import needed

with needed("calibrant ui needs Starlette and uvicorn", "'calibrant[ui]'"):
    import uvicorn
    from starlette.types import ASGIApp

    from calibrant.ui.app import _make_app
    from calibrant.ui.guard import LOOPBACK, Guard

PORT = 8321
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
    with _listening(host, port) as listener:
        guard = Guard(host, listener.getsockname()[1])
        app = _make_app(guard, max_upload * 1_000_000)
        announce(guard.address)
        if open_browser:  # the socket listens already, so that the browser waits for the answer
            webbrowser.open(guard.address)
        _run_app(app, listener)


def _listening(host: str, port: int | None) -> socket.socket:
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


def _run_app(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application on a socket until it is interrupted or its terminal closes."""
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    with suppress(AttributeError, ValueError):  # not on Windows, nor in another thread
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it stays ignored
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
