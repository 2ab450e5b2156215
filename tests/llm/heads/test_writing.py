"""Shards whose rows come in any order, and are complete or not there."""

import sys

import numpy as np
import pytest

from calibrant.llm.heads.tables import new_shard, sole_writer
from tests.support.warm_scripts import run_script

# Writes more than a file may have. The limit of a process gives the error of a full disk, without
# one; a memory map would end the process.
FULL = """
    import resource, signal, sys
    from pathlib import Path
    import numpy as np
    from calibrant.llm.heads.tables import new_shard

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    with new_shard(Path(sys.argv[1]), 0) as put:
        put(np.arange(100), {"hidden": np.ones((100, 50))}, 100)
"""


def test_rows_in_any_order(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "half": rng.normal(size=(50, 3, 2)).astype(np.float16),
        "flags": rng.random(50) < 0.5,
        "turned": np.asfortranarray(rng.normal(size=(50, 4))),
        "numbers": rng.integers(0, 9, 50),
    }
    order = rng.permutation(50)
    with new_shard(tmp_path, 7) as put:
        for rows in (order[:9], np.sort(order[9:30]), np.sort(order[30:])):
            put(rows, {name: values[rows] for name, values in columns.items()}, 50)
        assert not (tmp_path / "shard-00007").exists()
    for name, values in columns.items():
        found = np.load(tmp_path / "shard-00007" / f"{name}.npy")
        np.testing.assert_array_equal(found, values)
        assert found.dtype == values.dtype


def test_a_shard_without_all_rows_does_not_get_its_name(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"2 rows of .*top\.npy were not written"),
        new_shard(tmp_path, 0) as put,
    ):
        put(np.array([0, 3]), {"top": np.ones(2)}, 4)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of files")
def test_a_file_that_cannot_grow_is_an_error(tmp_path):
    done = run_script(FULL, tmp_path)
    assert done.returncode == 1
    assert "could not be written (File too large)" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    for name in (".shard-00003.0123", "shard-00002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "top.npy").write_bytes(b"half")
    with sole_writer(tmp_path):
        assert not (tmp_path / ".shard-00003.0123").exists()
        assert (tmp_path / "shard-00002" / "top.npy").exists()
