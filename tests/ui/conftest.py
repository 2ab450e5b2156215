import io

import numpy as np
import pytest

from tests.support.page_server import page_server


@pytest.fixture(scope="session")
def client():
    """One server, with one process that works, for all tests of the page."""
    with page_server() as client:
        yield client


def over_confident(rows, seed, classes=3):
    rng = np.random.default_rng(seed)
    honest = 2 * rng.normal(size=(rows, classes))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(1)
    return (2 * honest).astype("float32"), labels


@pytest.fixture(scope="session")
def arrays():
    """Two splits of three classes."""
    val, test = over_confident(300, 1), over_confident(200, 2)
    return {
        **{"val_logits": val[0], "val_labels": val[1]},
        **{"test_logits": test[0], "test_labels": test[1]},
    }


def npz(**arrays):
    """Return arrays as the bytes of a .npz file; objects become pickles."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


@pytest.fixture(scope="session")
def content(arrays):
    """The bytes of a prediction file."""
    return npz(**arrays)
