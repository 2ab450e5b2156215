"""The server of the page."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from calibrant._core import addresses
from calibrant.ui.guard import Guard

HOST = "127.0.0.1"
PORT = 8321
MEGABYTE = 1_000_000


def serve(
    host: str = HOST,
    port: int | None = None,
    *,
    max_upload: int = 500,
    open_browser: bool = True,
    announce: Callable[[str], object] = print,
) -> None:
    """Serve the page until it is interrupted.

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
    uvicorn = _uvicorn()
    from calibrant.ui.app import make_app

    with listening(host, port) as listener:
        guard = Guard(host, listener.getsockname()[1])
        config = uvicorn.Config(
            make_app(guard, max_upload * MEGABYTE),
            http="h11",
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        announce(guard.address)
        if open_browser:  # the socket listens already, so that the browser waits for the answer
            webbrowser.open(guard.address)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port, by default on 8321 or else on any that is free."""
    return addresses.listening(host, port, PORT)


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        remedy = "pip install 'calibrant[ui]'"
        raise ImportError(f"calibrant ui needs Starlette and uvicorn: {remedy}") from error
    return uvicorn
