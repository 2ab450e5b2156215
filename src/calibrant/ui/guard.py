"""Refuse requests that do not come from the page itself, and restrict what the page may do.

Any site that is open in the browser can send requests to a server on this machine. Three checks
keep them out: the ``Host`` must be this server's, or else a site could point its own name here (DNS
rebinding); requests that change something must come from this origin; and all need a secret that is
chosen at each start and handed out in the printed address only.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TOKEN_HEADER = "x-calibrant-token"
_READING = ("GET", "HEAD")

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
REPORT_POLICY = (
    "sandbox allow-scripts allow-popups allow-modals; default-src 'none'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""The report has scripts of its own: in a sandbox they have no origin, and thus no access here."""
_HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Guard:
    """The rules for one server: the host and port that it is bound to, and the secret."""

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def cookie(self) -> str:
        """Name of the cookie; cookies are shared between the ports of a machine."""
        return f"calibrant-{self.port}"

    @property
    def address(self) -> str:
        """Address to open, with the secret; that of this machine if the host is every address."""
        address = _address(self.host)
        everywhere = address is not None and address.is_unspecified
        host = "127.0.0.1" if everywhere else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"

    def set_cookie(self) -> str:
        """Return the header by which the page hands the secret to the browser."""
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def refusal(self, scope: Scope) -> str | None:
        """Return the reason to refuse a request, or None."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        host = headers.get("host", "")
        if not self.is_own(host):
            return "this server does not answer to that host name: open the address it has printed"
        if scope["method"] not in _READING:
            site, origin = headers.get("sec-fetch-site"), headers.get("origin")
            if site not in (None, "same-origin") or origin not in (None, f"http://{host}"):
                return "this request comes from another site, which may not change anything here"
            if not self._is_token(headers.get(_TOKEN_HEADER, "")):
                return "this request lacks the token of the page: reload the page"
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        given = query.get("token", []) if scope["path"] == "/" else []
        known = any(map(self._is_token, [*given, _cookie(headers, self.cookie)]))
        if known or scope["path"].startswith("/page/"):
            return None
        return "the address lacks its token: open the address that calibrant ui has printed"

    def is_own(self, host: str) -> bool:
        """Return True if a ``Host`` header names this server.

        An address in digits does so wherever the server answers other machines: nobody can point it
        elsewhere, as with a name.
        """
        name, _, port = host.rpartition(":")
        if port != str(self.port):
            return False
        name = name.removeprefix("[").removesuffix("]").lower()
        if name in LOOPBACK or name == self.host.lower():
            return True
        return not is_loopback(self.host) and _address(name) is not None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.token.encode())


@dataclass(frozen=True)
class Guarded:
    """An application behind a guard."""

    app: ASGIApp
    guard: Guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with status 403."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message.get("headers", [])}
                added = [
                    (n.encode(), v.encode()) for n, v in _HEADERS.items() if n.encode() not in given
                ]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        reason = self.guard.refusal(scope)
        if reason is None:
            await self.app(scope, receive, with_headers)
            return
        await receive()  # closing while bytes come in would reset the connection, without an answer
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await with_headers({"type": "http.response.start", "status": 403, "headers": headers})
        await with_headers({"type": "http.response.body", "body": reason.encode()})


def _cookie(headers: Mapping[str, str], name: str) -> str:
    # http.cookies stops at the first cookie that it cannot parse, such as JSON in quotes, and
    # the cookies of all servers on this machine come together
    pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is in digits; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
