"""Addresses of object stores: the same arrays as from files of this machine."""

import json
import os
import sys

import numpy as np
import pytest

import calibrant
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import open_dataset, save_predictions
from calibrant.data.formats import is_remote, storage_of
from calibrant.workflows.apply import apply_shards
from tests.support.predictions import cut, needs_pyarrow, predictions, without_text

fsspec = pytest.importorskip("fsspec")
ARRAYS = without_text(predictions(rows=40, classes=3))
SUFFIXES = [
    ".npz",
    ".safetensors",
    ".csv",
    *(pytest.param(suffix, marks=needs_pyarrow) for suffix in (".parquet", ".arrow", ".feather")),
]


@pytest.fixture
def store():
    """An empty store in memory."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def upload(store, folder, name="bucket"):
    for path in folder.iterdir():
        store.pipe_file(f"/{name}/{path.name}", path.read_bytes())


@pytest.fixture
def shards(tmp_path):
    def write(suffix):
        folder = tmp_path / "in"
        folder.mkdir()
        for i, shard in enumerate(cut(ARRAYS, 7, 20)):
            if suffix == ".csv":
                classes = {f"logit_{k}": column for k, column in enumerate(shard["logits"].T)}
                table = np.column_stack([shard["labels"], *classes.values()])
                header = ",".join(["label", *classes])
                np.savetxt(folder / f"{i}.csv", table, "%.9g", ",", header=header, comments="")
            else:
                save_predictions(folder / f"{i}{suffix}", shard)
        return folder

    return write


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("address", ["memory://bucket", "memory://bucket/*", "local://{}", "{}"])
def test_shards_of_a_store(tmp_path, store, shards, suffix, address):
    folder = shards(suffix)
    upload(store, folder)
    split = open_dataset(address.format(folder)).split()
    assert len(split.shards) == 3
    for key in ("logits", "labels"):
        np.testing.assert_allclose(split.read(key), ARRAYS[key], rtol=1e-6)
    found = calibrant.evaluate(address.format(folder), level=None)
    expected = calibrant.evaluate(ARRAYS["logits"], ARRAYS["labels"], level=None)
    assert found["nll"].value == pytest.approx(expected["nll"].value, rel=1e-6)


def test_numpy_files_of_a_store(tmp_path, store):
    order = np.asfortranarray(ARRAYS["logits"])
    for key, values in (("logits", order), ("labels", ARRAYS["labels"])):
        np.save(tmp_path / f"X_{key}.npy", values)
    upload(store, tmp_path)
    split = open_dataset("memory://bucket/X_logits.npy").split()
    np.testing.assert_array_equal(split.logits, ARRAYS["logits"])
    np.testing.assert_array_equal(split.labels, ARRAYS["labels"])


def test_an_object_that_changes_is_noticed(store, shards):
    upload(store, shards(".npz"))
    data = open_dataset("memory://bucket")
    store.pipe_file("/bucket/1.npz", store.cat_file("/bucket/1.npz"))  # of the same size
    with pytest.raises(ValueError, match=r"1\.npz was replaced or rewritten"):
        calibrant.evaluate(data, level=None)


def test_calibrated_shards_in_a_store(store, shards):
    upload(store, shards(".npz"))
    calibrator = TemperatureScaling()
    calibrator._store(temperature_=2.0)
    calibrator._set_classes(3)
    out = "memory://calibrated/run"
    assert apply_shards(calibrator, "memory://bucket", out).describe() == "wrote 3 shards"
    again = apply_shards(calibrator, "memory://bucket", out)
    assert again.describe() == "wrote 0 shards, kept 3 of an earlier run"
    logits = ARRAYS["logits"] / 2
    found = open_dataset(out).split()
    np.testing.assert_allclose(found.logits, logits - logits.max(-1, keepdims=True), rtol=1e-6)
    store.pipe_file("/bucket/1.npz", store.cat_file("/bucket/0.npz"))
    assert len(apply_shards(calibrator, "memory://bucket", out).changed) == 1
    store.rm("/bucket/1.npz")
    with pytest.warns(UserWarning, match=r"the input of memory://calibrated/run/1\.npz is gone"):
        apply_shards(calibrator, "memory://bucket", out)
    with pytest.raises(ValueError, match="is part of the input"):
        apply_shards(calibrator, "memory:///bucket", "memory:///bucket")


def test_a_file_address(shards):
    folder = shards(".npz")
    assert open_dataset(f"file://{folder}").split().rows == 40
    assert not is_remote(f"file://{folder}")
    assert storage_of(f"file://{folder}")[1] == folder


def test_refusals(store, monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="memory://nowhere does not exist"):
        open_dataset("memory://nowhere")
    with pytest.raises(FileNotFoundError, match="no file in"):
        open_dataset("memory://bucket/*.npz")
    with pytest.raises(ValueError, match=r"nosuch://a/b\.npz cannot be opened"):
        open_dataset("nosuch://a/b.npz")
    store.pipe_file("/bucket/a.pt", b"PK")
    with pytest.raises(ValueError, match=r"a\.pt cannot be mapped into memory: copy it"):
        open_dataset("memory://bucket/a.pt")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        ImportError, match=r"s3://a/b needs fsspec \(.*\): pip install 'calibrant\[cloud\]'"
    ):
        open_dataset("s3://a/b")
    np.savez(tmp_path / "a.npz", logits=np.zeros((2, 3)), labels=[0, 1])
    assert open_dataset(os.fspath(tmp_path)).split().rows == 2  # files need no extra


def test_windows_of_a_monitor_in_a_store(store, shards, run):
    upload(store, shards(".npz"))
    code, out, _ = run("monitor", "memory://bucket/*.npz", "--json")
    assert code == 0
    names = [next(v for v in w.values() if isinstance(v, str)) for w in json.loads(out)["windows"]]
    assert names == [f"memory:///bucket/{i}.npz" for i in range(3)]
