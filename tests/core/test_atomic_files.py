"""Files that take their name when they are complete, and locks that end with their process."""

import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import calibrant
from calibrant._core.atomic_files import STALE_SECONDS, locked, replacing, temporary_folder

HOLD = """
    import sys, time
    from pathlib import Path
    from calibrant._core.atomic_files import locked

    with locked(Path(sys.argv[1])):
        print("locked", flush=True)
        time.sleep(float(sys.argv[2]))
        Path(sys.argv[1]).write_text("written by the other")
"""


def write(target, text="new"):
    with replacing(target) as temporary:
        temporary.write_text(text)


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_points_to_is_replaced_and_the_link_stays(there, tmp_path):
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "out.csv", tmp_path / "link.csv"
    link.symlink_to("data/out.csv")
    (tmp_path / "second.csv").symlink_to(link)
    if there:
        target.write_text("old")
    write(tmp_path / "second.csv")
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert (tmp_path / "second.csv").is_symlink()
    assert os.listdir(tmp_path / "data") == ["out.csv"]


def test_a_link_into_a_missing_folder_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(FileNotFoundError, match=r"folder .*gone does not exist"):
        write(tmp_path / "link")


@pytest.mark.parametrize("letter", ["a", "é", "語"])
@pytest.mark.parametrize("size", [219, 240, 255])
def test_names_may_be_as_long_as_files_allow(letter, size, tmp_path):
    name = letter * (size // len(letter.encode()))
    write(tmp_path / name, "first")
    write(tmp_path / name, "second")
    with temporary_folder(tmp_path / name) as folder, locked(tmp_path / name):
        assert folder.parent == tmp_path
    assert (tmp_path / name).read_text() == "second"
    assert len(os.listdir(tmp_path)) == 2  # and the lock


def test_old_leftovers_of_long_names_are_removed(tmp_path):
    name = "n" * 255
    with replacing(tmp_path / name) as temporary:
        temporary.write_text("left")
        os.link(temporary, left := temporary.with_name(f"{temporary.name[:-32]}{'0' * 32}"))
    os.utime(left, (0, time.time() - STALE_SECONDS - 9))
    write(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def other_process(target, seconds):
    """Start a process that holds the lock for some seconds, and then writes the file."""
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(target), str(seconds)]
    env = {"PYTHONPATH": str(Path(calibrant.__file__).parents[1])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_lock_is_waited_for(tmp_path):
    with other_process(tmp_path / "state.json", 1), locked(tmp_path / "state.json"):
        assert (tmp_path / "state.json").read_text() == "written by the other"


def test_a_lock_that_is_not_waited_for(tmp_path):
    with locked(tmp_path / "state.json"), pytest.raises(BlockingIOError):
        locked(tmp_path / "state.json", wait=False).__enter__()
    with locked(tmp_path / "state.json", wait=False):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    with other_process(tmp_path / "state.json", 600) as process:
        process.kill()
        process.wait()
        begin = time.monotonic()
        with locked(tmp_path / "state.json"):
            assert time.monotonic() - begin < 10


def test_a_link_has_the_lock_of_its_file(tmp_path):
    (tmp_path / "link.json").symlink_to("state.json")
    with locked(tmp_path / "state.json"), pytest.raises(BlockingIOError):
        locked(tmp_path / "link.json", wait=False).__enter__()


def test_other_files_are_not_locked(tmp_path):
    with other_process(tmp_path / "state.json", 600) as process, locked(tmp_path / "other.json"):
        process.kill()
    assert not (tmp_path / "state.json").exists()


def test_a_lock_needs_its_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder .*gone does not exist"):
        locked(tmp_path / "gone" / "state.json").__enter__()


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    target = tmp_path / "state.json"
    target.write_text("before")
    target.chmod(mode)
    with replacing(target) as temporary:
        temporary.write_text("after")
        assert permissions(temporary) == 0o600  # others cannot read what is being written
    assert (target.read_text(), permissions(target)) == ("after", mode)


def test_a_new_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    with replacing(tmp_path / "new") as temporary:
        temporary.write_text("new")
    assert permissions(tmp_path / "new") == permissions(tmp_path / "usual")


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "state.json").write_text("before")
    with pytest.raises(ValueError, match="no"), replacing(tmp_path / "state.json"):
        raise ValueError("no")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
