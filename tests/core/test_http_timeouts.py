"""Half-open requests are dropped; slow clients, slow servers and kept connections are not."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.client import HTTPResponse

import pytest

pytest.importorskip("uvicorn")

import uvicorn

from calibrant._core import addresses, http_timeouts

SHORT = 0.3
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: "


@contextmanager
def running(app, monkeypatch):
    """Serve as the page and the gate do; yields the port."""
    servers: list[uvicorn.Server] = []

    class Server(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Server)
    with addresses.listening("127.0.0.1", 0, 0) as listener:
        run = partial(addresses.run_app, app, listener, shutdown=1)
        thread = threading.Thread(target=run)
        thread.start()
        while not (servers and servers[0].started):
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            servers[0].should_exit = True
            thread.join()


class Counting:
    """An application that answers with the number of bytes in the body, slowly if so wished."""

    def __init__(self, before=0.0, after=0.0):
        self.before, self.after, self.left = before, after, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await asyncio.sleep(self.before)
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        await asyncio.sleep(self.after)
        body = str(size).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def sent(port, *pieces, pause=0.0):
    """Send pieces one after another, and return the connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    try:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
    except ConnectionError:
        connection.close()
        raise
    return connection


def answer(connection):
    """Return the body of the answer."""
    response = HTTPResponse(connection)
    response.begin()
    return response.read()


def is_closed(connection):
    """Wait for the end of a connection on which nothing is answered."""
    with connection:
        try:
            return connection.recv(1000) == b""
        except ConnectionError:
            return True


@pytest.mark.parametrize(
    "pieces",
    [[], [b"P"], [HEAD + b"9\r\n"], [HEAD + b"9\r\n\r\n"], [HEAD + b"9\r\n\r\n1234"]],
    ids=["nothing", "a letter", "headers", "no body", "half a body"],
)
def test_half_open_requests_are_dropped(pieces, monkeypatch):
    monkeypatch.setattr(http_timeouts, "HEADERS", SHORT)
    monkeypatch.setattr(http_timeouts, "BODY", SHORT)
    app = Counting()
    with running(app, monkeypatch) as port:
        assert is_closed(sent(port, *pieces))
    assert app.left == (b"\r\n\r\n" in b"".join(pieces))


def test_headers_that_trickle_in_have_one_deadline(monkeypatch):
    monkeypatch.setattr(http_timeouts, "HEADERS", 2 * SHORT)
    with running(Counting(), monkeypatch) as port:
        pieces = [HEAD + b"9\r\n", *[b"X-More: 1\r\n"] * 400]
        with pytest.raises(ConnectionError):
            sent(port, *pieces, pause=SHORT / 4)


def test_a_second_request_that_stays_half_open_is_dropped(monkeypatch):
    monkeypatch.setattr(http_timeouts, "HEADERS", SHORT)
    with running(Counting(), monkeypatch) as port:
        connection = sent(port, HEAD + b"4\r\n\r\n1234")
        assert answer(connection) == b"4"
        connection.sendall(b"POST / HT")
        assert is_closed(connection)


def test_a_body_may_take_long_while_it_comes_in(monkeypatch):
    monkeypatch.setattr(http_timeouts, "BODY", 2.0)
    with running(Counting(), monkeypatch) as port:
        pieces = [HEAD + b"10\r\n\r\n", *[b"x"] * 10]
        with sent(port, *pieces, pause=0.3) as connection:
            assert answer(connection) == b"10"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slow_server_does_not_drop_its_clients(when, monkeypatch):
    """It reads a body late, of which the system holds a part back, or takes long to answer."""
    monkeypatch.setattr(http_timeouts, "HEADERS", SHORT)
    monkeypatch.setattr(http_timeouts, "BODY", SHORT)
    size = 20_000_000
    pieces = [HEAD + b"%d\r\n\r\n" % size, b"x" * size]
    app = Counting(**{when: 4 * SHORT})
    with running(app, monkeypatch) as port, sent(port, *pieces) as connection:
        assert answer(connection) == str(size).encode()
