"""What a device refuses: the pretended ones must refuse what a GPU does."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.pretended_device import WITHOUT_FLOAT64


@pytest.fixture
def there(device):
    return torch.arange(6.0).reshape(2, 3).to(device)


MIXED: dict[str, Any] = {
    "add": lambda x, y: x + y,
    "matmul": lambda x, y: x @ y.T,
    "where": lambda x, y: torch.where(x > 1, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack numbers": lambda x, y: torch.stack([x[0, 0], y[0, 0]]),
    "linear": lambda x, y: torch.nn.functional.linear(x, y),
    "gather": lambda x, y: x.gather(-1, y.long()),
    "index of the CPU": lambda x, y: y[x[0, :1].long()],
    "set": lambda x, y: x.index_put((torch.tensor([0]),), y[0]),
    "out": lambda x, y: torch.mul(x, 2, out=y),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_do_not_mix(name, there):
    with pytest.raises(RuntimeError, match="device"):
        MIXED[name](there, torch.ones(2, 3))


def test_tensors_there_are_no_arrays(there):
    for conversion in (np.asarray, lambda x: x.numpy(), np.exp):
        with pytest.raises(TypeError, match=r"can't convert .* device type tensor to numpy"):
            conversion(there)


def test_numbers_and_indices_of_the_cpu_are_taken(there, device):
    wanted = torch.arange(6.0).reshape(2, 3)
    results = {
        "number": (there * torch.tensor(2.0), wanted * 2),
        "rows": (there[torch.tensor([1])], wanted[[1]]),
        "array": (there[np.array([1])], wanted[[1]]),
        "mask": (there[torch.tensor([True, False])], wanted[:1]),
        "zeros": (torch.zeros(2, device=device), torch.zeros(2)),
        "tensor": (torch.tensor([1.0], device=device), torch.ones(1)),
        "like": (torch.ones_like(there), torch.ones(2, 3)),
        "new": (there.new_tensor([3.0]), torch.tensor([3.0])),
        "copy": (copy.deepcopy(there), wanted),
        "view": (there.T.reshape(-1)[2:], wanted.T.reshape(-1)[2:]),
    }
    for name, (found, expected) in results.items():
        assert found.device == device, name
        torch.testing.assert_close(found.cpu(), expected)
    written = there.clone()
    written[0], written[:, 1] = 5, torch.ones(2)
    assert written.tolist() == [[5, 1, 5], [3, 1, 5]]
    with torch.inference_mode():
        assert torch.equal((there.softmax(-1) > 0.5)[0].cpu(), torch.tensor([False, False, True]))


def test_modules_move_and_learn(there, device):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    wanted = layer(there.cpu()).detach()
    torch.testing.assert_close(layer.to(device)(there).cpu().detach(), wanted)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        loss = (layer(there)[:, 0] - there[:, 0]).square().mean()
        loss.backward()
        optimiser.step()
    assert float(loss) < 0.1
    assert {p.device for p in layer.to("cpu").parameters()} == {torch.device("cpu")}


def test_single_precision_alone(device):
    if device != WITHOUT_FLOAT64:
        pytest.skip("it has float64")
    there, wide = torch.ones(2, device=device), torch.ones(2, dtype=torch.float64)
    for wrong in (
        there.double,
        lambda: wide.to(device),
        lambda: there.to("cpu", torch.float64),
        lambda: torch.zeros(2, dtype=torch.float64, device=device),
    ):
        with pytest.raises(TypeError, match="float64"):
            wrong()
    assert wide.to(device, torch.float32).dtype == torch.float32
    assert there.cpu().double().dtype == torch.float64
