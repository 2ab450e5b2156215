"""The folder of a server goes with it, or when the next one starts; nothing else is touched."""

import os
import signal
import tempfile

import pytest

from calibrant.ui.home import PREFIX, temporary_home
from tests.support.warm_scripts import run_script

KILLED = """
    import os, signal
    from calibrant.ui.home import temporary_home

    with temporary_home() as home:
        (home / "a1b2").mkdir()
        (home / "a1b2" / "a1b2.npz").write_text("an upload")
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_removed_at_the_end(tmp_path):
    with temporary_home() as home:
        assert home.parent == tmp_path
        assert os.name == "nt" or home.stat().st_mode & 0o777 == 0o700
        (home / "upload").write_text("content")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="signals differ there")
def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path):
    ended = run_script(KILLED, env={"TMPDIR": str(tmp_path)})
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(f"{PREFIX}*")
    assert (left / "a1b2" / "a1b2.npz").exists()
    with temporary_home() as home:
        assert list(tmp_path.glob(f"{PREFIX}*")) == [home]


def test_folders_of_others_stay(tmp_path):
    (tmp_path / f"{PREFIX}notes").mkdir()  # somebody's own, without a lock
    (tmp_path / f"{PREFIX}notes" / "mine.txt").write_text("mine")
    with temporary_home() as running:
        (tmp_path / f"{PREFIX}link").symlink_to(running)
        with temporary_home():
            assert running.exists()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".server.lock").touch()
    (tmp_path / f"{PREFIX}other").symlink_to(tmp_path / "elsewhere")
    with temporary_home():
        assert (tmp_path / "elsewhere").exists()
        assert (tmp_path / f"{PREFIX}notes" / "mine.txt").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="it has no such owners")
def test_folders_of_other_users_stay(tmp_path, monkeypatch):
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / ".server.lock").touch()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with temporary_home():
        assert left.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_home():
        assert not left.exists()
