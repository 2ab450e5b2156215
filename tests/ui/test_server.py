"""The server starts on a free port, drops half-open requests, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import webbrowser
from pathlib import Path
from urllib.request import urlopen

import pytest
import uvicorn

import calibrant
from calibrant.ui import app

SHORT = 0.3
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: "


def test_another_port_is_taken_where_the_usual_one_is_in_use(monkeypatch):
    with app._listening("127.0.0.1", 0) as one:
        monkeypatch.setattr(app, "PORT", one.getsockname()[1])
        with app._listening("127.0.0.1", None) as other:
            assert other.getsockname()[1] not in (0, one.getsockname()[1])
        with pytest.raises(OSError, match="try --port 0"):
            app._listening("127.0.0.1", one.getsockname()[1])


@pytest.mark.parametrize("missing", ["starlette.types", "uvicorn"])
def test_a_missing_library_is_explained(run, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "calibrant.ui.app")
    code, out, err = run("ui", "--no-browser", "--port", "0")
    assert (code, out) == (2, "")
    assert "pip install 'calibrant[ui]'" in err


@pytest.fixture
def served(monkeypatch):
    """Arguments of the server, which is not started."""
    calls = []
    monkeypatch.setattr(app, "serve", lambda *args, **options: calls.append((args, options)))
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
    app.serve(port=0, announce=told.append)
    app.serve(port=0, announce=told.append, open_browser=False)
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
