"""Files are bounded, kept under names of our own, and removed."""

import asyncio
import os
import signal
import tempfile

import pytest
from starlette.exceptions import HTTPException

from calibrant.ui import uploads
from calibrant.ui.uploads import PREFIX, Uploads, _shown_name, _suffix_of, _temporary_home
from tests.support.warm_scripts import run_script


async def in_chunks(*chunks, problem=None):
    for chunk in chunks:
        yield chunk
    if problem is not None:
        raise problem


def receive(store, name, *chunks, problem=None):
    return asyncio.run(store.receive(name, in_chunks(*chunks, problem=problem)))


@pytest.fixture
def store(tmp_path):
    return Uploads(tmp_path, limit=10)


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/cron.d/x.npz",
        "..\\..\\windows\\x.npz",
        "/abs/x.npz",
        "x\x00y.npz",
        "a/../b.NPZ",
        "con.npz",
        "日本 \u202e語.npz",
        "x" * 5000 + ".npz",
    ],
)
def test_no_name_of_the_client_reaches_the_disk(store, tmp_path, name):
    key = receive(store, name, b"abc", b"def")
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file == tmp_path / key / f"{key}.npz" == store.files[key].path
    assert file.read_bytes() == b"abcdef"


def test_the_shown_name_is_short_and_inert():
    assert _shown_name("x" * 5000 + ".npz").endswith("x.npz")
    assert len(_shown_name("x" * 5000 + ".npz")) == uploads.MAX_NAME
    assert _shown_name("a\x1b[31m\u202e.npz") == "a\\x1b[31m\\u202e.npz"
    assert _shown_name("") == _shown_name("/") == "unnamed"


def test_the_limit_holds_while_the_file_comes_in(store, tmp_path):
    seen = []

    async def much():
        for i in range(100):
            seen.append(i)
            yield b"1234"

    with pytest.raises(HTTPException, match="--max-upload"):
        asyncio.run(store.receive("x.npz", much()))
    assert len(seen) == 3
    assert not list(tmp_path.iterdir())
    assert receive(store, "x.npz", b"1234567890")


@pytest.mark.parametrize("problem", [ConnectionError(), asyncio.CancelledError()])
def test_a_file_that_breaks_off_leaves_nothing(store, tmp_path, problem):
    with pytest.raises(type(problem)):
        receive(store, "x.npz", b"12", problem=problem)
    assert not list(tmp_path.iterdir())
    assert not store.files


def test_an_empty_file_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match=r"x\.npz is empty"):
        receive(store, "x.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.pt", "could run any code"),
        ("model.PTH", "could run any code"),
        ("x.pkl", "could run any code"),
        ("val_logits.npy", "holds one array"),
        ("x.exe", "numpy.savez"),
        ("npz", "numpy.savez"),
        ("x.npz/y", "numpy.savez"),
    ],
)
def test_other_kinds_of_files_are_refused_with_the_reason(name, reason):
    with pytest.raises(ValueError, match=reason) as problem:
        _suffix_of(name)
    assert ".safetensors" in str(problem.value)


def test_the_file_unused_for_longest_makes_room(store, tmp_path):
    keys = [receive(store, "x.npz", b"1") for _ in range(uploads.MAX_FILES)]
    assert store.get(keys[0]) is not None  # used now
    receive(store, "x.npz", b"1")
    assert len(list(tmp_path.iterdir())) == uploads.MAX_FILES
    assert store.get(keys[1]) is None
    assert store.get(keys[0]) is not None
    assert store.get("../" + keys[0]) is None


KILLED = """
    import os, signal
    from calibrant.ui.uploads import _temporary_home

    with _temporary_home() as home:
        (home / "a1b2").mkdir()
        (home / "a1b2" / "a1b2.npz").write_text("an upload")
        os.kill(os.getpid(), signal.SIGKILL)
"""


# the folder of a server goes with it, or when the next one starts; nothing else is touched


@pytest.fixture
def temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_removed_at_the_end(temporary_files):
    with _temporary_home() as home:
        assert home.parent == temporary_files
        assert os.name == "nt" or home.stat().st_mode & 0o777 == 0o700
        (home / "upload").write_text("content")
    assert not list(temporary_files.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="signals differ there")
def test_what_a_killed_server_left_is_removed_by_the_next(temporary_files):
    ended = run_script(KILLED, env={"TMPDIR": str(temporary_files)})
    assert ended.returncode == -signal.SIGKILL
    (left,) = temporary_files.glob(f"{PREFIX}*")
    assert (left / "a1b2" / "a1b2.npz").exists()
    with _temporary_home() as home:
        assert list(temporary_files.glob(f"{PREFIX}*")) == [home]


def test_folders_of_others_stay(temporary_files):
    (temporary_files / f"{PREFIX}notes").mkdir()  # somebody's own, without a lock
    (temporary_files / f"{PREFIX}notes" / "mine.txt").write_text("mine")
    with _temporary_home() as running:
        (temporary_files / f"{PREFIX}link").symlink_to(running)
        with _temporary_home():
            assert running.exists()
    (temporary_files / "elsewhere").mkdir()
    (temporary_files / "elsewhere" / ".server.lock").touch()
    (temporary_files / f"{PREFIX}other").symlink_to(temporary_files / "elsewhere")
    with _temporary_home():
        assert (temporary_files / "elsewhere").exists()
        assert (temporary_files / f"{PREFIX}notes" / "mine.txt").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="it has no such owners")
def test_folders_of_other_users_stay(temporary_files, monkeypatch):
    left = temporary_files / f"{PREFIX}left"
    left.mkdir()
    (left / ".server.lock").touch()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with _temporary_home():
        assert left.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_files))
    with _temporary_home():
        assert not left.exists()
