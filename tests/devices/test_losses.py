"""Every training loss, and loops that train with it, on the device of the model."""

import copy

import numpy as np
import pytest
import torch

from calibrant.losses import LOSSES
from tests.support.losses import gradient, made, value


@pytest.fixture(params=list(LOSSES))
def name(request):
    return request.param


def batch():
    """Logits, labels, features and the numbers of examples."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(40, 5)) * 3).float()
    labels = torch.from_numpy(rng.integers(0, 5, 40))
    labels[::9] = -100
    features = torch.from_numpy(rng.normal(size=(40, 7))).float()
    return logits, labels, features, torch.arange(40)


def test_values_and_gradients_are_those_of_the_cpu(name, device):
    logits, *others = batch()
    torch.manual_seed(0)
    here = made(name)
    there = copy.deepcopy(here).to(device)
    mine, other = logits.clone().requires_grad_(), logits.to(device).requires_grad_()
    for _ in range(2):  # those with a state have one in the second step
        mine.grad = other.grad = None
        wanted = here(mine, *others)
        loss = there(other, *(x.to(device) for x in others))
        wanted.backward()
        loss.backward()
        assert loss.device == device
        assert value(loss) == pytest.approx(value(wanted), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient(other).cpu(), gradient(mine), rtol=1e-4, atol=1e-6)
    assert {x.device for x in (*there.buffers(), *there.parameters())} <= {device}


def test_validation_logits_there_and_labels_here(device):
    logits, labels, _, _ = batch()
    here, there = made("adafocal"), made("adafocal").to(device)
    here.observe(logits, labels)
    there.observe(logits.to(device), labels.numpy())
    torch.testing.assert_close(there.gamma_.cpu(), here.gamma_)
    assert there.gamma_.device == device
