"""Programs of torch.export, and inputs that both exporters share."""

import json
import zipfile

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from calibrant.deploy import EXPORTS, export_program
from tests.support.exported import CLASSES, WIDTH, fitted, run_file, shifted, simulated, softmax


@pytest.mark.parametrize(
    "name",
    # one of each module; the ONNX export of every method begins with the same program
    [
        *("ts", "vector", "dirichlet", "cts", "smart", "beta", "histogram_ovr"),
        *("isotonic", "spline", "gc", "procal", "fc", "blend", "auto"),
    ],
)
def test_methods(name, tmp_path):
    calibrator, path = fitted(name), tmp_path / "calibrator.pt2"
    assert export_program(calibrator, path) <= 1e-5
    for rows in (1, 1000):
        data = simulated(rows, 3, int(calibrator.classes_))
        arrays = [data["logits"], *([data["features"]] if calibrator.needs_features else [])]
        output = run_file(path, *arrays)
        np.testing.assert_allclose(softmax(output), calibrator.predict_proba(*arrays), atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        (inside,) = (one for one in archive.namelist() if one.endswith("calibrant.json"))
        assert json.loads(archive.read(inside))["kind"] == name


class Named(nn.Module):
    """Takes its inputs by name and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, *, left, right):
        return {"logits": self.fc(left + right), "rest": left}


@pytest.mark.parametrize("suffix", EXPORTS)
def test_inputs_by_name(suffix, tmp_path):
    torch.manual_seed(0)
    model, path = Named(), tmp_path / f"model{suffix}"
    left, right = torch.randn(2, 9, WIDTH)
    example = {"right": right[:2], "left": left[:2]}  # another order than that of the model
    EXPORTS[suffix](fitted("ts"), path, model=model, example=example)
    with torch.no_grad():
        wanted = fitted("ts").predict_proba(model.fc(left + right)).numpy()
    output = run_file(path, right=right.numpy(), left=left.numpy())
    np.testing.assert_allclose(softmax(output), wanted, atol=1e-6)
    if suffix == ".onnx":
        assert [one.name for one in onnx.load(path).graph.input] == ["right", "left"]


@pytest.mark.parametrize("suffix", EXPORTS)
def test_features_of_a_model(suffix, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    path, inputs = tmp_path / f"model{suffix}", torch.randn(9, 3)
    EXPORTS[suffix](shifted(), path, model=model, example=inputs[:2], last_layer=model[2])
    with torch.no_grad():
        wanted = shifted().predict_proba(model(inputs), model[:2](inputs)).numpy()
    np.testing.assert_allclose(softmax(run_file(path, inputs.numpy())), wanted, atol=1e-6)
    assert not model[2]._forward_pre_hooks
