"""The application on a socket of this machine: the page, uploads, jobs and their results."""

from __future__ import annotations

import json
import signal
import socket
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import unquote

from calibrant import __version__
from calibrant._core.messages import failure_text, needed
from calibrant.show.html import escaped
from calibrant.show.style import themes

with needed("calibrant ui needs Starlette and uvicorn", "'calibrant[ui]'"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from calibrant.ui.fit_choices import STEPS, Choices
    from calibrant.ui.guard import LOOPBACK, REPORT_POLICY, Guard, Guarded
    from calibrant.ui.jobs import Job, Jobs, _new_id
    from calibrant.ui.uploads import SUFFIXES, Upload, Uploads, _temporary_home
    from calibrant.ui.worker import FitTask, LookTask

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


_PAGE = Path(__file__).with_name("page")
_ASSETS = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
RESULTS = {
    "report.html": "text/html",
    "report.md": "text/markdown",
    "report.json": "application/json",
    "calibrator.safetensors": "application/octet-stream",
    "calibrator.onnx": "application/octet-stream",
}
"""Files of a finished job by name; no others can be requested."""
_EXPANSION = 10
"""Arrays may take that many times the memory of the largest file."""
_MAX_REQUEST_BYTES = 10_000
"""Bytes of a request other than an upload."""


def _make_app(guard: Guard, max_upload: int) -> ASGIApp:
    """Return the application; ``max_upload`` is in bytes.

    Files are in a temporary folder, which is removed when the server stops.
    """
    service = Service(guard, max_upload)
    routes = [
        Route("/", service.index),
        Route("/page/{name}", _asset),
        Route("/api/files", service.upload, methods=["POST"]),
        Route("/api/sample", service.sample, methods=["POST"]),
        Route("/api/jobs", service.run, methods=["POST"]),
        Route("/api/jobs/{id}", service.job),
        Route("/api/jobs/{id}/stop", service.stop, methods=["POST"]),
        Route("/results/{id}/{name}", service.result),
    ]
    handlers: Any = dict.fromkeys((HTTPException, OSError, ClientDisconnect), _explained)
    app = Starlette(routes=routes, lifespan=service.lifespan, exception_handlers=handlers)
    return Guarded(app, guard)


@dataclass
class Service:
    """The state that requests share, and the handlers of requests."""

    guard: Guard
    max_upload: int

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Own the temporary folder and the jobs while the server runs."""
        with _temporary_home() as home:
            self.uploads = Uploads(home, self.max_upload)
            self.jobs = Jobs(home)
            try:
                yield
            finally:
                self.jobs.close()

    async def index(self, request: Request) -> Response:
        """Return the page, with the token that its requests need."""
        values = {
            "token": self.guard.token,
            "limit": str(self.max_upload),
            "suffixes": ",".join(SUFFIXES),
            "version": __version__,
        }
        template = Template((_PAGE / "index.html").read_text("utf-8"))
        content = template.substitute({name: escaped(value) for name, value in values.items()})
        return HTMLResponse(content, headers={"set-cookie": self.guard.set_cookie()})

    async def upload(self, request: Request) -> Response:
        """Take a file as the body of a request, and look at it."""
        self.jobs.check_room()
        name = unquote(request.headers.get("x-file-name", ""))
        try:
            self.uploads.check_size(int(request.headers.get("content-length", "0")))
            key = await self.uploads.receive(name, request.stream())
        except ValueError as problem:
            raise HTTPException(415, str(problem)) from problem
        return self._look(key)

    async def sample(self, request: Request) -> Response:
        """Take the embedded predictions as if they had been uploaded."""
        self.jobs.check_room()
        return self._look(await run_in_threadpool(self.uploads.add_sample))

    def _look(self, key: str) -> Response:
        upload = self._upload(key)
        task = LookTask(upload.path, upload.name, _EXPANSION * self.max_upload)
        job = self.jobs.add(Job(task))
        size = upload.path.stat().st_size
        answer = {"file": key, "name": upload.name, "size": size, "job": job.id}
        return JSONResponse(answer, status_code=202)

    async def run(self, request: Request) -> Response:
        """Fit, report and export with the choices of the user."""
        content = await _json(request)
        upload = self._upload(content.pop("file", None))
        try:
            choices = Choices.from_json(content)
        except (TypeError, ValueError) as problem:
            raise HTTPException(400, str(problem)) from problem
        key = _new_id()
        task = FitTask(upload.path, upload.name, self.jobs.folder(key), choices)
        job = self.jobs.add(Job(task, STEPS, id=key))
        return JSONResponse({"job": job.id}, status_code=202)

    async def job(self, request: Request) -> Response:
        """Return the progress of a job."""
        job = self._job(request)
        folder = self.jobs.folder(job.id)
        files = [name for name in RESULTS if job.state == "done" and (folder / name).is_file()]
        sizes = {name: (folder / name).stat().st_size for name in files}
        return JSONResponse({**job.to_dict(), "files": sizes})

    async def stop(self, request: Request) -> Response:
        """Stop a job."""
        job = self._job(request)
        await run_in_threadpool(self.jobs.stop, job)
        return JSONResponse(job.to_dict())

    async def result(self, request: Request) -> Response:
        """Return a file of a finished job: the report to look at, or anything to keep."""
        job, name = self._job(request), request.path_params["name"]
        path = self.jobs.folder(job.id) / name if name in RESULTS else None
        if path is None or job.state != "done" or not path.is_file():
            raise HTTPException(404, "this job has no such file")
        shown = name == "report.html" and "download" not in request.query_params
        return FileResponse(
            path,
            media_type=RESULTS[name],
            filename=name,
            content_disposition_type="inline" if shown else "attachment",
            headers={"content-security-policy": REPORT_POLICY},
        )

    def _job(self, request: Request) -> Job:
        job = self.jobs.get(request.path_params["id"])
        if job is None:
            raise HTTPException(404, "this job is not known any more: choose the file again")
        return job

    def _upload(self, key: object) -> Upload:
        upload = self.uploads.get(key)
        if upload is None:
            raise HTTPException(404, "this file is not known any more: choose it again")
        return upload


async def _asset(request: Request) -> Response:
    """Return a file of the page."""
    name = request.path_params["name"]
    if name not in _ASSETS:
        raise HTTPException(404, "there is no such file")
    content = (_PAGE / name).read_text("utf-8")
    if name == "page.css":
        content = f"{themes()}\n{content}"
    return Response(content, media_type=_ASSETS[name])


async def _json(request: Request) -> dict[str, Any]:
    """Return the object in the body of a request."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_REQUEST_BYTES:
            raise HTTPException(413, f"a request may have {_MAX_REQUEST_BYTES:,} bytes")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise HTTPException(400, "the request must be a JSON object")
    return content


async def _explained(request: Request, problem: Exception) -> Response:
    """Answer with the message of an error, and its status."""
    if isinstance(problem, HTTPException):
        return JSONResponse({"error": problem.detail}, status_code=problem.status_code)
    status = 400 if isinstance(problem, ClientDisconnect) else 500
    return JSONResponse({"error": failure_text(problem)}, status_code=status)
