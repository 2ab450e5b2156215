import pytest
import torch


@pytest.fixture
def data(rng):
    logits = torch.from_numpy(rng.normal(size=(40, 5)) * 3)
    return logits, torch.from_numpy(rng.integers(0, 5, 40))
