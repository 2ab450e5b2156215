"""The page of ``calibrant ui`` on a port of this machine, and requests to it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace
from urllib.parse import quote

from starlette.types import ASGIApp

from calibrant.ui.app import _make_app
from calibrant.ui.guard import Guard
from tests.support.local_server import local_server


class Client:
    """Sends requests as the page does; headers that are None are left out."""

    def __init__(self, guard: Guard):
        self.guard = guard
        self.host = f"127.0.0.1:{guard.port}"
        self.usual = {
            "host": self.host,
            "origin": f"http://{self.host}",
            "sec-fetch-site": "same-origin",
            "cookie": f"{guard.cookie}={guard.token}",
            "x-calibrant-token": guard.token,
        }

    def send(self, method, path, body=b"", **headers):
        """Return status, headers and body; underscores in names of headers stand for dashes."""
        changed = {name.replace("_", "-"): value for name, value in headers.items()}
        usual = {**self.usual, "content-length": str(len(body))}
        connection = HTTPConnection("127.0.0.1", self.guard.port, timeout=60)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**usual, **changed}.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return SimpleNamespace(
            status=response.status,
            headers={name.lower(): value for name, value in response.getheaders()},
            body=content,
            json=lambda: json.loads(content),
        )

    def get(self, path, **headers):
        return self.send("GET", path, **headers)

    def post(self, path, content=None, **headers):
        body = json.dumps({} if content is None else content).encode()
        return self.send("POST", path, body, **headers)

    def upload(self, name, body, **headers):
        return self.send("POST", "/api/files", body, x_file_name=quote(name), **headers)

    def finished(self, job, seconds=120):
        """Return a job when it is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            told = self.get(f"/api/jobs/{job}").json()
            if told["state"] not in ("waiting", "running"):
                return told
            time.sleep(0.05)
        raise AssertionError(f"the job takes more than {seconds} seconds: {told}")

    def looked(self, name, body):
        """Upload a file, and return the answer and what was seen in it."""
        answer = self.upload(name, body)
        assert answer.status == 202, answer.body
        return answer.json(), self.finished(answer.json()["job"])


@contextmanager
def page_server(max_upload: int = 2_000_000) -> Iterator[Client]:
    """Run the server in a thread."""
    guards = []

    def made(port: int) -> ASGIApp:
        guards.append(Guard("127.0.0.1", port))
        return _make_app(guards[0], max_upload)

    with local_server(made):
        yield Client(guards[0])
