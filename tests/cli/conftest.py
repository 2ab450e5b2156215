import numpy as np
import pytest

import calibrant.show.report.measure  # noqa: F401  before a test replaces what it imports
from tests.support.command_line import ROWS
from tests.support.few_draws import few_draws
from tests.support.predictions import predictions, splits


@pytest.fixture(scope="package", autouse=True)
def quick_intervals():
    with few_draws():
        yield


@pytest.fixture
def arrays(rng):
    """Over-confident predictions of four classes; region "c" is the worst, then "a", then "b"."""
    logits = rng.normal(size=(ROWS, 4))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    region = np.array(["a", "b", "c"])[np.arange(ROWS) % 3]
    scale = np.array([3.0, 1.0, 9.0])[np.arange(ROWS) % 3]
    return {
        "logits": logits * scale[:, None],
        "labels": labels,
        "region": region,
        "importance": rng.uniform(0.1, 3, ROWS),
    }


@pytest.fixture
def path(tmp_path, arrays, monkeypatch):
    """A file of these predictions in the working folder, under a short name."""
    monkeypatch.chdir(tmp_path)
    np.savez("p.npz", **arrays)
    return "p.npz"


@pytest.fixture
def split_file(tmp_path, arrays):
    """A file whose val split is better than its test split."""
    path = tmp_path / "splits.npz"
    flat = {f"test_{key}": values for key, values in arrays.items()}
    flat |= {f"val_{key}": values[:90] for key, values in arrays.items()}
    np.savez(path, **flat)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with a file of two splits, p.npz, and one without val set, test.npz."""
    monkeypatch.chdir(tmp_path)
    np.savez("p.npz", **splits(val=predictions(seed=1), test=predictions(rows=500, seed=2)))
    np.savez("test.npz", **splits(test=predictions(seed=3)))
    np.savez("plain.npz", **predictions(seed=4))
    return tmp_path
