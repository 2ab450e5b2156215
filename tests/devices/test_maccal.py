"""MaC-Cal trains on the device of its features, and answers on that of its input."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import calibrant as cal
from calibrant.calibrators.maccal import MaskedClassifier, replace_head
from tests.support.features import clustered_features


@pytest.fixture
def data():
    features, labels = clustered_features(np.random.default_rng(0))
    return torch.from_numpy(features), torch.from_numpy(labels)


QUICK: dict[str, Any] = {"bottleneck": 16, "epochs": 4, "batch_size": 32, "rate": 0.02, "step": 0.0}


def places(module):
    return {x.device for x in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("samples", [0, 2])
def test_it_trains_on_the_device_of_its_features(data, device, samples, tmp_path):
    features, labels = data
    there = features.to(device)
    retrained = cal.MaCCal(**QUICK, samples=samples).fit(
        there,
        labels.to(device),
        held_out=(there[:50], labels[:50]),
        sample_weight=np.ones(300),
        checkpoint=tmp_path / "checkpoint",
    )
    assert places(retrained) == {device}
    assert retrained(there).device == device
    probs = retrained.predict_proba(there)
    assert probs.device == device
    assert float((probs.cpu().argmax(-1) == labels).float().mean()) > 0.6
    arrays = retrained.predict_proba(features.numpy())
    np.testing.assert_allclose(arrays, probs.cpu(), atol=1e-5)
    for call in (retrained, retrained.predict_proba):
        with pytest.raises(ValueError, match=rf"on {device}, .* on cpu: "):
            call(features)
    again = cal.MaCCal(**QUICK, samples=samples).fit(
        there,
        labels,
        held_out=(there[:50], labels[:50]),
        sample_weight=np.ones(300),
        checkpoint=tmp_path / "checkpoint",
    )
    torch.testing.assert_close(again(there).cpu(), retrained(there).cpu())
    cal.save(retrained, tmp_path / "saved")
    loaded = cal.load(tmp_path / "saved", device=device)
    assert places(loaded) == {device}
    torch.testing.assert_close(loaded(there).cpu(), retrained(there).cpu())


def test_features_are_where_the_labels_are_not(data, device):
    features, labels = data
    retrained = cal.MaCCal(**QUICK).fit(features.numpy(), labels.to(device))
    assert places(retrained) == {torch.device("cpu")}
    retrained.to(device).fit(features.numpy(), labels)
    assert places(retrained) == {device}
    retrained.fit(features, labels)
    assert places(retrained) == {torch.device("cpu")}


def test_as_a_calibrator(data, device):
    features, labels = data
    retrained = cal.MaCCal(**QUICK).fit(features.to(device), labels)
    logits = torch.zeros(300, 4).to(device)
    wanted = retrained.predict_proba(features.to(device))
    for beside in (features.to(device), features, features.numpy()):
        probs = retrained.predict_proba(logits, beside)
        assert probs.device == device
        torch.testing.assert_close(probs.cpu(), wanted.cpu())


def test_on_the_features_of_a_network(data, device):
    features, labels = data
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)
    batches = list(zip(features.split(100), labels.split(100), strict=True))
    retrained = cal.MaCCal(**QUICK).fit_model(model, batches, held_out=batches[:1])
    assert places(retrained) == {device}
    assert replace_head(model, retrained)(features.to(device)).device == device
    logits, targets, inputs = cal.collect(model, batches, last_layer="2")
    behind = cal.calibrated(model, retrained, last_layer="2")
    assert behind(features.to(device)).device == device
    assert len(logits) == len(targets) == len(inputs) == 300


def test_a_masked_classifier_alone(data, device):
    features = data[0]
    plain = MaskedClassifier(12, 4, samples=3)
    wanted = plain(features)
    torch.testing.assert_close(plain.to(device)(features.to(device)).cpu(), wanted)
