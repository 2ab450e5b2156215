"""The devices that every method runs on; nothing here needs more than torch and pytest."""

import contextlib
import warnings

import numpy as np
import pytest
import torch

from calibrant.calibrators.features import clipping
from tests.support.pretended_device import PRETENDED, WITHOUT_FLOAT64, pretended_devices

DEVICES = [
    pytest.param(PRETENDED, id="pretended"),
    pytest.param(WITHOUT_FLOAT64, id="pretended without float64"),
]
if torch.cuda.is_available():
    DEVICES.append(pytest.param(torch.device("cuda:0"), id="cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request):
    """A device that is not the CPU."""
    with contextlib.nullcontext() if request.param.type == "cuda" else pretended_devices():
        yield request.param


@pytest.fixture
def rng():
    return np.random.default_rng(20260101)


@pytest.fixture(autouse=True)
def few_examples_are_meant():
    """Warnings of few examples are tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.fixture(autouse=True)
def few_clipping_values(monkeypatch):
    """How well feature clipping searches is tested elsewhere, too."""
    monkeypatch.setattr(clipping, "_TAILS", (*clipping._TAILS[:2], 4))
    monkeypatch.setattr(clipping, "_REFINED", 1)
    monkeypatch.setattr(clipping, "_HALVINGS", 2)
