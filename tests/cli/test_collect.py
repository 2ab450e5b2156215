"""The verb collect, from inputs to an evaluation, in one process and in two."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calibrant.data import open_dataset
from tests.support.command_line import in_shell

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with code of a model, and shards of images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "network_of_a_test.py").write_text(NETWORK)
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        pixels = rng.normal(size=(20, 2, 2, 3)).astype(np.float32)
        np.savez(f"images/{i}.npz", pixels=pixels, label=rng.integers(0, 3, 20), id=np.arange(20))
    yield tmp_path
    sys.modules.pop("network_of_a_test", None)


ARGUMENTS = ("collect", "network_of_a_test:make", "images", "--inputs", "pixels")


def test_from_inputs_to_an_evaluation(folder, run):
    code, out, err = run(*ARGUMENTS, "--batch", "7", "-o", "logits")
    assert (code, out) == (0, "")
    assert err == "wrote 3 shards in logits; to measure them:\n  calibrant evaluate logits\n"
    assert run("evaluate", "logits", "--level", "0")[0] == 0
    assert run("fit", "logits", "--method", "ts", "-o", "ts")[0] == 0
    assert run("apply", "ts", "logits", "-o", "calibrated")[0] == 0
    split = open_dataset("calibrated").split()
    assert split.rows == 60
    assert split.read("id").tolist() == [*range(20)] * 3
    assert "wrote 0 shards, kept 3 of an earlier run" in run(*ARGUMENTS, "-o", "logits")[2]


def test_bad_shards_are_listed(folder, run):
    np.savez("images/3.npz", pixels=np.zeros((2, 5)))
    code, _, err = run(*ARGUMENTS, "--skip-bad", "-o", "logits")
    assert code == 0
    assert "skipped 1 bad shard of 4:\n  images/3.npz: the model refused 2 examples" in err
    code, _, err = run(*ARGUMENTS, "-o", "logits")
    assert code == 2
    assert err.startswith("error: images/3.npz: the model refused 2 examples (RuntimeError: mat1")
    assert "Traceback" not in err


def test_the_working_folder_is_searched_last(folder, run):
    """A file there must not take the place of a library."""
    (folder / "json.py").write_text("raise RuntimeError")
    assert run(*ARGUMENTS, "-o", "logits")[0] == 0
    assert sys.path[-1] == str(folder)


@pytest.mark.slow
def test_two_processes_write_what_one_does(folder, run, monkeypatch):
    assert run(*ARGUMENTS, "-o", "one")[0] == 0
    # as torchrun tells them apart: this process, and one of its own
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    env = {"RANK": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(in_shell, *ARGUMENTS, "-o", "two", env=env, timeout=120)
        code, _, err = run(*ARGUMENTS, "-o", "two")
    assert code == 0, err
    assert "wrote 2 shards" in err
    assert other.result().returncode == 0, other.result().stderr
    assert "wrote 1 shard " in other.result().stderr
    one, two = (open_dataset(folder / name).split() for name in ("one", "two"))
    np.testing.assert_array_equal(one.logits, two.logits)
    np.testing.assert_array_equal(one.labels, two.labels)


@pytest.mark.slow
def test_workers(folder, run):
    code, _, err = run(*ARGUMENTS, "--workers", "2", "-o", "logits")
    assert code == 0, err
    assert "60 examples in" in err
    assert "on 2 workers" in err
    assert open_dataset("logits").split().rows == 60
