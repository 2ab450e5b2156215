"""Serve the proxy of a gate."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

from calibrant._core.addresses import is_loopback, listening, run_app, to_open
from calibrant.llm.gate.gate import Gate
from calibrant.llm.gate.judging import Judge

HOST, PORT = "127.0.0.1", 8322
TOKEN = "CALIBRANT_GATE_TOKEN"
"""Environment variable with the token of a gate that other machines can reach."""
MEGABYTE = 1_000_000


def serve_gate(
    gate: Gate,
    upstream: str,
    *,
    host: str = HOST,
    port: int | None = None,
    state: str | os.PathLike[str] | None = None,
    timeout: float = 600.0,
    max_body: int = 20,
    announce: Callable[[str, str], object] = print,
) -> None:
    """Serve an OpenAI-compatible proxy with the verdicts of a gate until it is interrupted.

    Parameters
    ----------
    gate : Gate
        For confidences from token probabilities.
    upstream : str
        Address of an OpenAI-compatible server, such as ``http://127.0.0.1:8000/v1``.
    host : str
        Address to listen on; the default is reachable from this machine alone. Requests to any
        other need the token in the environment variable CALIBRANT_GATE_TOKEN, or else a random one.
    port : int, optional
        By default 8322, or any free port if that is in use.
    state : path, optional
        File of the drift watch.
    timeout : float
        Seconds without a byte from the upstream after which it is given up.
    max_body : int
        Largest request in megabytes.
    announce : callable
        Called with the address for clients and the token, which is empty on this machine.
    """
    _check_libraries()
    from calibrant.llm.gate.proxy import Settings, check_upstream, make_proxy

    judge, address = Judge(gate, state), check_upstream(upstream)
    token = "" if is_loopback(host) else os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    with listening(host, port, PORT) as listener:
        bound = listener.getsockname()[1]
        settings = Settings(address, host, bound, token, timeout, max_body * MEGABYTE)
        app = make_proxy(judge, settings)
        announce(f"http://{to_open(host)}:{bound}/v1", token)
        run_app(app, listener, shutdown=5)


def _check_libraries() -> None:
    try:
        import httpx  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'calibrant[serve]'"
        raise ImportError(
            f"calibrant llm gate serve needs Starlette, uvicorn and httpx: {remedy}"
        ) from error
