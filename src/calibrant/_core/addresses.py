"""Addresses that servers listen on, and whom they let in."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def to_open(host: str) -> str:
    """Return the host for an address to open: this machine where the host stands for all.

    >>> to_open("0.0.0.0"), to_open("::1")
    ('127.0.0.1', '[::1]')
    """
    if _is_address(host) and ipaddress.ip_address(host).is_unspecified:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def names_server(header: str, host: str, port: int) -> bool:
    """Return True if a ``Host`` header names the server that is bound to a host and port.

    An address in digits does so wherever the server answers other machines: nobody can point it
    elsewhere, as with a name.
    """
    name, _, given = header.rpartition(":")
    if given != str(port):
        return False
    name = name.removeprefix("[").removesuffix("]").lower()
    if name in LOOPBACK or name == host.lower():
        return True
    return not is_loopback(host) and _is_address(name)


def from_this_origin(site: str | None, origin: str | None, host: str) -> bool:
    """Return False if the browser says that another site than that of the host sent a request.

    ``site``, ``origin`` and ``host`` are the headers ``sec-fetch-site``, ``origin`` and ``host``.
    """
    return site in (None, "same-origin") and origin in (None, f"http://{host}")


def listening(host: str, port: int | None, usual: int) -> socket.socket:
    """Return a socket that listens on a port, by default on the usual one or else on a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.getaddrinfo(host, None, family)
    except (OSError, UnicodeError) as problem:
        raise ValueError(
            f"--host must be an address or a name of this machine, got {host!r}: leave it out for "
            f"{LOOPBACK[0]}"
        ) from problem
    try:
        return socket.create_server((host, usual if port is None else port), family=family)
    except OSError as problem:
        if port is None:
            return socket.create_server((host, 0), family=family)
        reason = problem.strerror or problem
        raise OSError(f"cannot listen on {host}, port {port}: {reason}; try --port 0") from problem


def run_app(app: Any, listener: socket.socket, *, shutdown: int) -> None:
    """Serve an ASGI app on a socket until it is interrupted or its terminal closes. Needs uvicorn.

    ``shutdown`` is the number of seconds that open requests have then.
    """
    import uvicorn

    from calibrant._core.http_timeouts import TimedProtocol

    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=shutdown,
    )
    with suppress(KeyboardInterrupt), _hangup_terminates():
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _hangup_terminates() -> Iterator[None]:
    """Let a hangup, which ends a process at once, have the effect of SIGTERM, which uvicorn takes.

    Where it is ignored, as by ``nohup``, it stays so.
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


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
