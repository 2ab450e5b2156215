"""The server starts on a free port, drops half-open requests, and leaves nothing behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from urllib.request import urlopen

import pytest
import uvicorn

import calibrant
from calibrant.ui import server

SHORT = 0.3
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: "


def test_another_port_is_taken_where_the_usual_one_is_in_use(monkeypatch):
    with server.listening("127.0.0.1", 0) as one:
        monkeypatch.setattr(server, "PORT", one.getsockname()[1])
        with server.listening("127.0.0.1", None) as other:
            assert other.getsockname()[1] not in (0, one.getsockname()[1])
        with pytest.raises(OSError, match="try --port 0"):
            server.listening("127.0.0.1", one.getsockname()[1])


@pytest.mark.parametrize("missing", ["starlette.types", "uvicorn"])
def test_a_missing_library_is_explained(run, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "calibrant.ui.server")
    code, out, err = run("ui", "--no-browser", "--port", "0")
    assert (code, out) == (2, "")
    assert "pip install 'calibrant[ui]'" in err


@pytest.fixture
def served(monkeypatch):
    """Arguments of the server, which is not started."""
    calls = []
    monkeypatch.setattr(server, "serve", lambda *args, **options: calls.append((args, options)))
    return calls


def test_options_of_the_command(run, served):
    assert run("ui", "--no-browser", "--port", "9", "--max-upload", "7")[0] == 0
    args, options = served[0]
    assert args == ("127.0.0.1", 9)
    assert (options["open_browser"], options["max_upload"]) == (False, 7)


def test_a_host_that_others_can_reach_is_warned_of(run, served):
    assert "warning: other machines can reach the page" in run("ui", "--host", "0.0.0.0")[2]
    assert "warning" not in run("ui", "--host", "localhost")[2]


def test_the_browser_opens_the_printed_address(monkeypatch):
    opened: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    server.serve(port=0, announce=told.append)
    server.serve(port=0, announce=told.append, open_browser=False)
    assert opened == told[:1]
    assert "?token=" in opened[0]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals differ there")
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_command_serves_until_it_is_stopped_and_removes_its_files(how, tmp_path):
    command = [sys.executable, "-m", "calibrant", "ui", "--no-browser", "--port", "0"]
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(calibrant.__file__).parents[1]),
        "TMPDIR": str(tmp_path),
    }
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        assert address.startswith("http://127.0.0.1:")
        with urlopen(address, timeout=30) as answer:
            assert b"Drop a prediction file" in answer.read()
        assert [path.name[:13] for path in tmp_path.glob("calibrant*")] == ["calibrant-ui-"]
        process.send_signal(getattr(signal, how))
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "Traceback" not in err
    assert not list(tmp_path.glob("calibrant*"))
    assert process.returncode == (0 if how == "SIGINT" else -signal.SIGTERM)


# half-open requests are dropped; slow clients, slow servers and kept connections are not


@contextmanager
def running(app, monkeypatch):
    """Serve as the page and the gate do; yields the port."""
    servers: list[uvicorn.Server] = []

    class Server(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Server)
    with server.listening("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run_app, args=(app, listener))
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
    monkeypatch.setattr(server, "HEADER_SECONDS", SHORT)
    monkeypatch.setattr(server, "BODY_SECONDS", SHORT)
    app = Counting()
    with running(app, monkeypatch) as port:
        assert is_closed(sent(port, *pieces))
    assert app.left == (b"\r\n\r\n" in b"".join(pieces))


def test_headers_that_trickle_in_have_one_deadline(monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 2 * SHORT)
    with running(Counting(), monkeypatch) as port:
        pieces = [HEAD + b"9\r\n", *[b"X-More: 1\r\n"] * 400]
        with pytest.raises(ConnectionError):
            sent(port, *pieces, pause=SHORT / 4)


def test_a_second_request_that_stays_half_open_is_dropped(monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", SHORT)
    with running(Counting(), monkeypatch) as port:
        connection = sent(port, HEAD + b"4\r\n\r\n1234")
        assert answer(connection) == b"4"
        connection.sendall(b"POST / HT")
        assert is_closed(connection)


def test_a_body_may_take_long_while_it_comes_in(monkeypatch):
    monkeypatch.setattr(server, "BODY_SECONDS", 2.0)
    with running(Counting(), monkeypatch) as port:
        pieces = [HEAD + b"10\r\n\r\n", *[b"x"] * 10]
        with sent(port, *pieces, pause=0.3) as connection:
            assert answer(connection) == b"10"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slow_server_does_not_drop_its_clients(when, monkeypatch):
    """It reads a body late, of which the system holds a part back, or takes long to answer."""
    monkeypatch.setattr(server, "HEADER_SECONDS", SHORT)
    monkeypatch.setattr(server, "BODY_SECONDS", SHORT)
    size = 20_000_000
    pieces = [HEAD + b"%d\r\n\r\n" % size, b"x" * size]
    app = Counting(**{when: 4 * SHORT})
    with running(app, monkeypatch) as port, sent(port, *pieces) as connection:
        assert answer(connection) == str(size).encode()
