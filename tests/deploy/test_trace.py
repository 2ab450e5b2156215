"""Calibrators recorded by torch.jit.trace give what they give, for batches of any size."""

import io

import numpy as np
import pytest
import torch

from calibrant.calibrators.features import proximity
from calibrant.calibrators.registry import TAG_CALIBRATORS
from calibrant.deploy import calibrated
from tests.support.calibrators import EVERY_METHOD
from tests.support.exported import fitted, simulated
from tests.support.simulate import drawn_tags

pytestmark = [
    # sizes of learned values and the number of classes become constants of the trace
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def inputs_of(calibrator, rows, seed):
    data = simulated(rows, seed, max(2, calibrator.classes))
    logits = torch.from_numpy(data["logits"])
    if calibrator.one_logit:
        return (logits[:, 0],)
    if calibrator.accepts_masked:
        logits[::3, 1:-1:2] = -torch.inf
    return (logits, torch.from_numpy(data["features"])) if calibrator.needs_features else (logits,)


def check_trace(calibrator, rows=(1, 4, 200)):
    """Trace with three rows, save, load, and compare."""
    stream = io.BytesIO()
    torch.jit.save(torch.jit.trace(calibrator, inputs_of(calibrator, 3, 0)), stream)
    stream.seek(0)
    traced = torch.jit.load(stream)
    with torch.no_grad():
        for n in rows:
            inputs = inputs_of(calibrator, n, n)
            assert torch.equal(traced(*inputs), calibrator(*inputs))


@pytest.mark.parametrize("name", [*EVERY_METHOD, "ts/1", "isotonic/1", "spline/1", "auto/1"])
def test_every_calibrator_can_be_traced(name):
    check_trace(fitted(name))


@pytest.mark.parametrize("name", TAG_CALIBRATORS)
def test_calibrators_of_tags_can_be_traced(name, rng):
    logits, labels = drawn_tags(rng, 200, np.ones(4), np.zeros(4))
    calibrator = TAG_CALIBRATORS[name]().fit(logits, labels).eval()
    traced = torch.jit.trace(calibrator, torch.from_numpy(logits[:3]))
    with torch.no_grad():
        tensor = torch.from_numpy(logits)
        assert torch.equal(traced(tensor), calibrator(tensor))


def test_a_trace_has_no_blocks_of_its_own_batch(monkeypatch):
    """Distances are computed block by block: a trace of one block must not keep to that."""
    calibrator = fitted("procal")
    monkeypatch.setattr(proximity, "_DISTANCES_AT_A_TIME", 800 * 8)
    check_trace(calibrator, rows=(50,))


def test_a_calibrated_model_can_be_traced():
    torch.manual_seed(0)
    network = torch.nn.Linear(5, 100)
    model = calibrated(network, fitted("isotonic"))
    traced = torch.jit.trace(model, torch.randn(3, 5))
    inputs = torch.randn(40, 5)
    with torch.no_grad():
        assert torch.equal(traced(inputs), model(inputs))
