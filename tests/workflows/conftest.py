import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from calibrant.data import Split


@pytest.fixture
def small_chunks(monkeypatch):
    """Read a few rows at a time, so that small files too are walked in many chunks."""
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 256)


@pytest.fixture
def no_whole_logits(monkeypatch):
    """Let nobody read all logits at once."""
    read = Split.read

    def refusing(self, column):
        assert column != "logits"
        return read(self, column)

    monkeypatch.setattr(Split, "read", refusing)


@pytest.fixture(scope="session")
def process_pool():
    """One other process, which takes seconds to start."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool
