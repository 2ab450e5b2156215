"""ASGI applications on a free port of this machine, in a thread."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def local_server(make_app: Callable[[int], Any]) -> Iterator[int]:
    """Run an application that is made for a port; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # without a limit the server waits for connections that a client keeps open
        config = uvicorn.Config(
            make_app(port), ws="none", log_level="critical", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()
