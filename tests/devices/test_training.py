"""Training with the losses, and predicting, as it is done on a GPU."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import calibrant as cal
from calibrant.losses import LOSSES
from tests.support.calibrators import EVERY_METHOD
from tests.support.losses import made
from tests.support.simulate import drawn
from tests.support.tensors import tensors

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.compiler.reset()  # a function has few compiled forms at a time
    return torch.device("cuda:0")


class Network(nn.Module):
    """Returns logits, and the inputs of the last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, inputs):
        features = self.first(inputs).relu()
        return self.last(features), features


def data(cuda):
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 5, 512)
    inputs = rng.normal(size=(512, 16)) + 2 * np.eye(5, 16)[labels]
    return [x.to(cuda) for x in tensors(inputs, labels, np.arange(512))]


def trained(model, loss, batches, dtype=None, steps=20):
    parameters = [*model.parameters(), *loss.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=0.02)
    inputs, labels, index = batches
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            logits, features = model(inputs)
            value = loss(logits, labels, features, index)
        assert value.dtype == torch.float32
        value.backward()
        optimiser.step()
    return float((model(inputs)[0].argmax(-1) == labels).float().mean())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_network_learns_in_every_precision(name, dtype, cuda):
    torch.manual_seed(0)
    model, loss = Network().to(cuda), made(name, examples=512).to(cuda)
    assert trained(model, loss, data(cuda), dtype) > 0.7


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_step_is_one_graph_and_the_same(name, cuda):
    torch.manual_seed(0)
    inputs, labels, index = data(cuda)
    model = Network().to(cuda)
    logits, features = (x.detach() for x in model(inputs))
    loss = made(name, examples=512).to(cuda)
    other = copy.deepcopy(loss)
    compiled = torch.compile(other, fullgraph=True)
    for precision in (None, torch.bfloat16):
        with torch.autocast("cuda", dtype=precision, enabled=precision is not None):
            wanted = loss(logits, labels, features, index)
            found = compiled(logits, labels, features, index)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ce", "adafocal", "crl", "fedlas_ls", "fedlas_mbls"])
def test_a_process_of_a_distributed_run(name, cuda, tmp_path):
    address = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Network().to(cuda), device_ids=[0])
        assert trained(model, made(name, examples=512).to(cuda), data(cuda), torch.bfloat16) > 0.7
        stream = cal.Accumulator(pairs=True)
        inputs, labels, _ = data(cuda)
        stream.update(model(inputs)[0].detach(), labels)
        before = stream.compute()["ece"]
        assert stream.all_reduce().compute()["ece"] == before
    finally:
        torch.distributed.destroy_process_group()


METHODS = [name for name, kind in EVERY_METHOD.items() if not kind.needs_features]


@pytest.mark.parametrize("name", METHODS)
def test_a_compiled_calibrator_is_one_graph_and_the_same(name, cuda):
    kind = EVERY_METHOD[name]
    logits, labels = drawn(np.random.default_rng(0), 2000, 2 if kind.two_classes_only else 6, 1.7)
    there, targets = (x.to(cuda) for x in tensors(logits, labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrator = kind().fit(there, targets)
    compiled = torch.compile(calibrator, fullgraph=True)
    with torch.inference_mode():
        found, wanted = compiled(there).softmax(-1), calibrator(there).softmax(-1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            torch.testing.assert_close(calibrator(there).softmax(-1), wanted, rtol=0, atol=0)
    assert float((found - wanted).abs().mean()) < 1e-4


def test_a_large_fit(cuda):
    """It once failed: cross-validation called methods on the CPU with logits that were not."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(100_000, 1000, device=cuda)
    labels = (logits / 1.5 - torch.empty_like(logits).exponential_().log()).argmax(-1)
    calibrator = cal.Auto().fit(logits, labels)
    assert calibrator.device == cuda
    probs = calibrator.predict_proba(logits[:5000])
    assert probs.device == cuda
    assert cal.nll(probs=probs, labels=labels[:5000]) < cal.nll(logits[:5000], labels[:5000])
