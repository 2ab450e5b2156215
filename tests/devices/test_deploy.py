"""Models on a device with a calibrator behind them, or in them."""

import numpy as np
import pytest
import torch
from torch import nn

import calibrant as cal
from calibrant.calibrators.registry import make_calibrator
from calibrant.deploy import fold_into_linear
from tests.support.calibrators import make


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return (
        torch.from_numpy(rng.normal(size=(300, 6))).float(),
        torch.from_numpy(rng.integers(0, 3, 300)),
    )


@pytest.mark.parametrize("name", ["ts", "smart", "vector", "gc", "procal"])
def test_a_calibrator_behind_a_model(name, network, data, device):
    inputs, labels = data
    loader = list(zip(inputs.split(64), labels.split(64), strict=True))
    results = []
    for place in ("cpu", device):
        model = network.to(place)
        logits, targets, features = cal.collect(model, loader, last_layer="2")
        calibrator = make(name).fit(logits, targets, features=features)
        behind = cal.calibrated(model, calibrator, last_layer="2").to(place)
        assert behind(inputs.to(place)).device == torch.device(place)
        results += [behind.predict_proba(inputs), behind.predict_proba(inputs.to(place))]
        np.testing.assert_allclose(behind.predict_proba(inputs.numpy()), results[-1], atol=1e-5)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["none", "ts", "vector", "matrix", "cts"])
def test_a_calibrator_in_the_last_layer(name, network, data, device):
    inputs, labels = data
    model = network.to(device)
    logits = model(inputs.to(device)).detach()
    given = {"off_diagonal": 0.01, "intercept": 0.001} if name == "matrix" else {}
    calibrator = make_calibrator(name, given).fit(logits, labels)
    folded = fold_into_linear(calibrator, model[2])
    assert folded.weight.device == device
    result = folded(model[:2](inputs.to(device))).softmax(-1)
    wanted = calibrator.predict_proba(logits)
    torch.testing.assert_close(result.detach().cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5)
