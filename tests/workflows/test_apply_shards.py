"""Shards are calibrated one by one: once each, whole, and again only if something changed."""

import copy
import json
import os
import resource
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import calibrant
from calibrant import use
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import open_dataset
from calibrant.data.files import WRITERS
from calibrant.workflows.apply import apply, apply_shards
from calibrant.workflows.receipts import RECEIPTS
from tests.support.interrupted_writes import interrupt_third_write
from tests.support.predictions import cut, needs_pyarrow, predictions, without_text
from tests.support.warm_scripts import run_script

ARRAYS = predictions(rows=60, classes=3)


@pytest.fixture
def halved():
    calibrator = TemperatureScaling()
    calibrator._store(temperature_=2.0)
    calibrator._set_classes(3)
    return calibrator


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i, shard in enumerate(cut(ARRAYS, 0, 7, 30)):
        np.savez(folder / f"{i:05}-of-00004.npz", **shard)
    return folder


def stamps(folder):
    """Inode and time of every output: another pair means that it was written."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.npz")
    }


def assert_complete(folder, factor=0.5):
    split = open_dataset(folder).split()
    logits = ARRAYS["logits"] * factor
    np.testing.assert_allclose(split.logits, logits - logits.max(-1, keepdims=True), rtol=1e-6)
    for key in ("labels", "importance", "region"):
        np.testing.assert_array_equal(split.read(key), ARRAYS[key])


def test_shards_keep_their_names_and_hold_what_apply_writes(tmp_path, shards, halved):
    steps = []
    with use(progress=lambda *step: steps.append(step)):
        result = apply_shards(halved, shards, tmp_path / "out")
    assert result.describe() == "wrote 4 shards"
    assert steps == [(0, 60), (7, 60), (30, 60), (60, 60)]
    assert_complete(tmp_path / "out")
    apply(halved, shards, tmp_path / "whole.npz")
    whole = open_dataset(tmp_path / "whole.npz").split().logits
    np.testing.assert_array_equal(open_dataset(tmp_path / "out").split().logits, whole)


def test_a_second_run_keeps_everything(tmp_path, shards, halved):
    out = tmp_path / "out"
    apply_shards(halved, shards, out)
    before = stamps(out)
    with ThreadPoolExecutor(2) as pool, use(executor=pool):
        result = apply_shards(halved, shards, out)
    assert result.describe() == "wrote 0 shards, kept 4 of an earlier run"
    assert stamps(out) == before


def test_a_killed_run_goes_on(tmp_path, shards, halved, monkeypatch):
    """Ended after two shards, in the middle of the third."""
    out = tmp_path / "out"
    interrupt_third_write(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        apply_shards(halved, shards, out)
    before = stamps(out)
    assert sorted(before) == ["00000-of-00004.npz", "00001-of-00004.npz"]
    assert sorted(os.listdir(out)) == [RECEIPTS, *sorted(before)]
    with pytest.raises(FileNotFoundError, match=r"00002-of-00004\.npz is missing"):
        open_dataset(out)  # a part is not taken for the whole
    result = apply_shards(halved, shards, out)
    assert [os.path.basename(path) for path in result.kept] == sorted(before)
    assert before.items() <= stamps(out).items()
    assert_complete(out)


def test_an_output_without_receipt_is_written_again(tmp_path, shards, halved):
    """As after a kill between the two, or if somebody wrote to the output."""
    out = tmp_path / "out"
    apply_shards(halved, shards, out)
    (out / RECEIPTS / "00001-of-00004.npz.json").unlink()
    (out / RECEIPTS / "00002-of-00004.npz.json").write_text("[")
    (out / "00003-of-00004.npz").write_bytes(b"somebody else")
    result = apply_shards(halved, shards, out)
    assert result.describe() == "wrote 3 shards, kept 1 of an earlier run"
    assert_complete(out)


def test_a_changed_input_or_calibrator_is_noticed(tmp_path, shards, halved):
    out = tmp_path / "out"
    apply_shards(halved, shards, out)
    before = stamps(out)
    np.savez(shards / "00001-of-00004.npz", **{**cut(ARRAYS, 7)[0], "site": np.zeros(7)})
    result = apply_shards(halved, shards, out)
    again = "wrote 1 shard (1 of them again, since the input or the calibrator changed)"
    assert result.describe() == f"{again}, kept 3 of an earlier run"
    other = {name for name, stamp in stamps(out).items() if before[name] != stamp}
    assert other == {"00001-of-00004.npz"}
    assert_complete(out)
    halved._store(temperature_=4.0)
    assert len(apply_shards(halved, shards, out).changed) == 4
    assert_complete(out, 0.25)


def test_an_input_that_is_gone(tmp_path, shards, halved):
    out = tmp_path / "out"
    for i in range(4):
        (shards / f"{i:05}-of-00004.npz").rename(shards / f"{i}.npz")
    apply_shards(halved, shards, out)
    (shards / "2.npz").unlink()
    with pytest.warns(UserWarning, match=r"the input of .*2\.npz is gone"):
        apply_shards(halved, shards, out)
    (out / "2.npz").unlink()
    apply_shards(halved, shards, out)  # nothing to warn of


class Repeating(ThreadPoolExecutor):
    """Runs every task four times, side by side."""

    def map(self, fn, *iterables, **options):
        (items,) = iterables
        return iter(list(super().map(fn, [item for item in items for _ in range(4)]))[::4])


def test_two_writers_of_one_shard_leave_one_whole_file(tmp_path, shards, halved):
    """A retry may run beside a task that was taken for lost."""
    out = tmp_path / "out"
    with Repeating(4) as pool, use(executor=pool):
        assert apply_shards(halved, shards, out).describe() == "wrote 4 shards"
    assert_complete(out)
    apply_shards(halved, shards, out)  # the last receipt may be of the file of another writer
    assert apply_shards(halved, shards, out).describe().startswith("wrote 0 shards")


def test_another_run_into_the_same_folder_is_noticed(tmp_path, shards, halved, monkeypatch):
    """It starts when the first has written two shards, and ends before the first."""
    out, write, count = tmp_path / "out", WRITERS[".npz"], 0
    other = copy.deepcopy(halved)
    other._store(temperature_=4.0)

    def slow(path, arrays):
        nonlocal count
        count += 1
        if count == 3:
            assert apply_shards(other, shards, out).describe().startswith("wrote 4 shards")
        write(path, arrays)

    monkeypatch.setitem(WRITERS, ".npz", slow)
    with pytest.raises(ValueError, match=r"another run has written \S+, \S+ meanwhile"):
        apply_shards(halved, shards, out)
    monkeypatch.setitem(WRITERS, ".npz", write)
    assert apply_shards(halved, shards, out).describe().endswith("kept 2 of an earlier run")
    assert_complete(out)


def test_a_full_disk(tmp_path, shards, halved):
    """Files of at most 1500 bytes: finished shards stay, and the next run goes on with the rest."""
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with pytest.raises(OSError, match=r"00001-of-00004.npz was not written .*run the same"):
            apply_shards(halved, shards, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(os.listdir(out)) == [RECEIPTS, "00000-of-00004.npz"]
    assert len(apply_shards(halved, shards, out).kept) == 1
    assert_complete(out)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 kilobytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk, tmp_path, halved):
    """Shards of 3 kB, and as much for the arrays that a shard is made of: some fit, not all."""
    folder, out = tmp_path / "in", small_disk / "out"
    folder.mkdir()
    arrays = predictions(rows=1200, classes=3)
    for i, shard in enumerate(cut(arrays, 200, 400, 600, 800, 1000)):
        np.savez(folder / f"{i}.npz", logits=shard["logits"], labels=shard["labels"])
    with pytest.raises(OSError, match=r"npz was not written \(No space left on device\)"):
        apply_shards(halved, folder, out)
    left = sorted(path.name for path in out.iterdir())
    finished = [name for name in left if name.endswith(".npz")]
    assert left == [RECEIPTS, *finished]  # nothing in part
    assert open_dataset(out).split().rows == 200 * len(finished)
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert len(apply_shards(halved, folder, out).kept) == len(finished)
    np.testing.assert_array_equal(open_dataset(out).split().labels, arrays["labels"])


KILLED = """
import os, signal, sys
from calibrant.data.files import WRITERS
from calibrant.artifacts import load
from calibrant.workflows.apply import apply_shards

write, count = WRITERS[".npz"], 0

def killed(path, arrays):
    global count
    count += 1
    if count == 3:
        path.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, arrays)

WRITERS[".npz"] = killed
apply_shards(load(sys.argv[1]), sys.argv[2], sys.argv[3])
"""


@pytest.mark.slow
def test_a_process_is_killed_while_it_writes(tmp_path, shards, halved):
    out = tmp_path / "out"
    calibrant.save(halved, tmp_path / "ts")
    ended = run_script(KILLED, tmp_path / "ts", shards, out)
    assert ended.returncode == -signal.SIGKILL
    before = stamps(out)
    assert sorted(before) == ["00000-of-00004.npz", "00001-of-00004.npz"]
    assert len(apply_shards(halved, shards, out).kept) == 2
    assert before.items() <= stamps(out).items()
    assert_complete(out)


def test_folders_of_the_input_are_kept(tmp_path, halved):
    for i, shard in enumerate(cut(ARRAYS, 20)):
        folder = tmp_path / "in" / f"day={i}"
        folder.mkdir(parents=True)
        np.savez(folder / "part.npz", **shard)
    apply_shards(halved, str(tmp_path / "in" / "*" / "part.npz"), tmp_path / "out")
    assert_complete(str(tmp_path / "out" / "*" / "part.npz"))


@needs_pyarrow
def test_an_empty_shard_that_does_not_know_its_classes(tmp_path, halved):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "in"
    folder.mkdir()
    arrays = without_text(ARRAYS)
    for i, shard in enumerate(cut(arrays, 30)):
        lists = {k: pa.array(list(v)) if v.ndim == 2 else v for k, v in shard.items()}
        pq.write_table(pa.table(lists), folder / f"{i}.parquet")
    schema = pq.read_schema(folder / "0.parquet")
    pq.write_table(schema.empty_table(), folder / "2.parquet")
    apply_shards(halved, folder, tmp_path / "out")
    split = open_dataset(tmp_path / "out").split()
    assert split.rows == 60
    assert pq.read_table(tmp_path / "out" / "2.parquet").num_rows == 0


def test_numpy_files_become_archives(tmp_path, halved):
    folder = tmp_path / "in"
    folder.mkdir()
    for i, shard in enumerate(cut(ARRAYS, 30)):
        for key in ("logits", "labels"):
            np.save(folder / f"{i}_{key}.npy", shard[key])
    apply_shards(halved, folder, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").glob("*.npz")) == [
        "0_logits.npz",
        "1_logits.npz",
    ]
    assert open_dataset(tmp_path / "out").split().rows == 60


def test_refusals(tmp_path, shards, halved):
    with pytest.raises(ValueError, match="is part of the input"):
        apply_shards(halved, shards, shards)
    with pytest.raises(FileNotFoundError):
        apply_shards(halved, shards, tmp_path / "nowhere" / "out")
    halved._set_classes(4)
    with pytest.raises(ValueError, match="fitted for 4 classes"):
        apply_shards(halved, shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_receipts_name_the_input(tmp_path, shards, halved):
    apply_shards(halved, shards, tmp_path / "out")
    content = json.loads((tmp_path / "out" / RECEIPTS / "00002-of-00004.npz.json").read_text())
    assert content["input"] == str(shards / "00002-of-00004.npz")
