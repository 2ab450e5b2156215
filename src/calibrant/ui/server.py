"""The server of the page."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable

from calibrant._core import addresses
from calibrant._core.optional import needed
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
    _check_libraries()
    from calibrant.ui.app import make_app

    with listening(host, port) as listener:
        guard = Guard(host, listener.getsockname()[1])
        app = make_app(guard, max_upload * MEGABYTE)
        announce(guard.address)
        if open_browser:  # the socket listens already, so that the browser waits for the answer
            webbrowser.open(guard.address)
        addresses.run_app(app, listener, shutdown=2)


def listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port, by default on 8321 or else on any that is free."""
    return addresses.listening(host, port, PORT)


def _check_libraries() -> None:
    with needed("calibrant ui needs Starlette and uvicorn", "'calibrant[ui]'"):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
