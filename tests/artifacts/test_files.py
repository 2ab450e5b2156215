"""Artifacts take their places in one step, whoever reads, writes or is killed meanwhile."""

import json
import os
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from calibrant import artifacts as io
from tests.support.artifacts import temperature
from tests.support.warm_scripts import run_script


def value(path):
    return float(io.load(path).temperature_)


@pytest.fixture
def folder(tmp_path):
    io.save(temperature(), tmp_path / "ts")
    return tmp_path / "ts"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["ts", "ts-0.5", "ts.safetensors", "ts.json"])
def test_the_suffix_decides_between_a_folder_and_a_file(name, tmp_path):
    for number in (2.0, 3.0):
        io.save(temperature(number), tmp_path / name)
        assert value(tmp_path / name) == number
    is_file = name.endswith(("safetensors", "json"))
    assert (tmp_path / name).is_file() is is_file
    assert names(tmp_path) == [name]
    if not is_file:
        assert names(tmp_path / name) == [io.FILE]
        assert value(tmp_path / name / io.FILE) == 3  # the file can be named too
        io.save(temperature(4.0), tmp_path / name / io.FILE)
        assert value(tmp_path / name) == 4


def test_a_damaged_artifact_in_a_folder_is_replaced(folder):
    (folder / io.FILE).write_bytes(b"cut")
    io.save(temperature(3.0), folder)
    assert value(folder) == 3


def test_a_link_is_followed(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "other.json").symlink_to(folder / io.FILE)
    for number, link in ((3.0, "link"), (4.0, "other.json")):
        io.save(temperature(number), tmp_path / link)
        assert (tmp_path / link).is_symlink()
        assert value(folder) == value(tmp_path / link) == number


def test_other_files_stay(folder):
    others = {"notes.txt": "mine", "config.json": '{"kind": "of the model"}'}
    for name, text in others.items():
        (folder / name).write_text(text)
    (folder / "weights.safetensors").write_bytes(b"mine")
    io.save(temperature(3.0), folder)
    assert value(folder) == 3
    assert {name: (folder / name).read_text() for name in others} == others
    assert names(folder) == sorted([io.FILE, *others, "weights.safetensors"])


def test_files_that_are_no_artifacts_are_not_replaced(tmp_path):
    (tmp_path / "a.json").write_text('{"mine": 1}')
    (tmp_path / "b").write_text("mine")
    save_file({"logits": torch.zeros(2, 3)}, tmp_path / "c.safetensors")
    for path in sorted(tmp_path.iterdir()):
        before = path.read_bytes()
        with pytest.raises(ValueError, match="is not an artifact and is not replaced"):
            io.save(temperature(), path)
        assert path.read_bytes() == before
    assert names(tmp_path) == ["a.json", "b", "c.safetensors"]


@pytest.mark.parametrize("name", ["a/ts", "a/ts.json"])
def test_a_missing_parent_is_not_made(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; create it first"):
        io.save(temperature(), tmp_path / name)


@pytest.mark.parametrize("name", ["missing", "missing.json", "empty"])
def test_what_is_not_there_is_not_loaded(name, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=f"there is no artifact .*{name}: .*save"):
        io.load(tmp_path / name)


# ----------------------------------------------------------------------------- kills and failures

KILLED = """
    import json, os, sys
    from pathlib import Path
    from calibrant import artifacts as io
    from tests.support.artifacts import temperature

    def killed_at(step):
        "Let the process die at its step-th call that may touch the disk."
        done = 0

        def guarded(call):
            def guard(*args, **kwargs):
                nonlocal done
                done += 1
                if done > step:
                    os._exit(9)
                return call(*args, **kwargs)
            return guard

        for owner, name in (
            *((os, "replace"), (os, "fsync"), (Path, "mkdir")),
            *((Path, "open"), (Path, "unlink"), (Path, "iterdir")),
        ):
            setattr(owner, name, guarded(getattr(owner, name)))

    def values_after_kills(place, again):
        for step in range(40):
            pid = os.fork()
            if pid == 0:
                killed_at(step)
                io.save(temperature(3.0), place)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code not in (0, 9):
                sys.exit(f"step {step} failed with {code}")
            try:
                yield float(io.load(place).temperature_)
            except FileNotFoundError:
                yield None
            if code == 0:
                break
            if again:
                io.save(temperature(2.0), place)

    places = {place: list(values_after_kills(place, "new" in place)) for place in sys.argv[1:]}
    print(json.dumps(places))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks of a process")
def test_after_a_kill_the_old_one_or_the_new_one_loads(tmp_path):
    io.save(temperature(2.0), tmp_path / "new")
    before = {"new": 2.0, "nothing": None}
    done = run_script(KILLED, *before, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for place, seen in json.loads(done.stdout).items():
        assert len(seen) > 5
        assert set(seen) == {before[place], 3.0}
        assert seen[-1] == 3.0


def test_a_failed_replacement_leaves_the_old_one(folder, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    for owner, name in ((os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(OSError, match="no space left"):
                io.save(temperature(3.0), folder)
        assert value(folder) == 2
        assert names(folder) == [io.FILE]


# ---------------------------------------------------------------------------- readers and writers


def test_readers_never_see_a_save(tmp_path):
    place = tmp_path / "ts"
    problems, seen, writing = [], set(), threading.Event()
    io.save(temperature(1.0), place)

    def write(first):
        for number in np.arange(60) + first:
            io.save(temperature(float(number)), place)

    def keep_reading():
        while writing.is_set():
            try:
                seen.add(value(place))
            except Exception as error:  # in a thread it would be lost
                problems.append(error)

    writing.set()
    readers = [threading.Thread(target=keep_reading) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(first,)) for first in (1, 1001)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    writing.clear()
    for thread in readers:
        thread.join()
    assert not problems, problems[0]
    assert len(seen) > 3
    assert names(place)[-1] == io.FILE
