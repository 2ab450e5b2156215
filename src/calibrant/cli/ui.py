"""The verb ui."""

from __future__ import annotations

import click

from calibrant.cli import shared
from calibrant.cli.shared import _option, _verb

EXPOSED = (
    "warning: other machines can reach the page at {}: whoever has the address with its token can "
    "send files and read your reports, and nothing is encrypted; leave out --host to keep it on "
    "this machine"
)


@_verb()
@_option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@_option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port to listen on; 0: any.  [default: 8321, or any if it is in use]",
)
@_option("--no-browser", is_flag=True, help="Do not open the browser.")
@_option("--max-upload", default=500, type=shared.AT_LEAST_1, metavar="MB", help="Largest file.")
def ui(host: str, port: int | None, no_browser: bool, max_upload: int) -> None:
    """Open a page to drop a prediction file on.

    The page shows what the file holds, fits a calibrator, and gives a report, the calibrator and an
    ONNX file to download. It is served by this machine for this machine: nothing is sent elsewhere,
    and what it has written is removed when you stop it with Ctrl-C.

    \b
    Examples:
      calibrant ui
      calibrant ui --port 9000 --no-browser --max-upload 2000
    """  # noqa: D301
    from calibrant.ui.app import serve
    from calibrant.ui.guard import is_loopback

    if not is_loopback(host):
        shared.say(EXPOSED.format(host))

    def announce(address: str) -> None:
        shared.say(f"calibrant ui is at {address}\nStop it with Ctrl-C.")

    serve(host, port, max_upload=max_upload, open_browser=not no_browser, announce=announce)
