"""The verb export."""

import re

import numpy as np
import onnx
import pytest

from calibrant import artifacts
from calibrant.deploy.exports import SUFFIXES
from tests.support.exported import CLASSES, fitted, run_file, simulated


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    artifacts.save(fitted("ts"), "saved")


@pytest.mark.usefixtures("saved", "operators_read_once")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_export(run, suffix):
    options = ["--opset", "19"] if suffix == ".onnx" else []
    options += ["--tokens", "--probabilities"]
    code, out, err = run("export", "saved", "-o", f"out{suffix}", *options)
    assert (code, out) == (0, "")
    assert err.startswith(f"wrote out{suffix}; where tried, its probabilities differ from ")
    assert err.count("\n") == 1
    logits = simulated(6, 1)["logits"].reshape(2, 3, CLASSES)
    output = run_file(f"out{suffix}", logits)
    np.testing.assert_allclose(output, fitted("ts").predict_proba(logits), atol=1e-6)
    if suffix == ".onnx":
        assert onnx.load("out.onnx").opset_import[0].version == 19


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["saved", "-o", "out.pt"], r"error: cannot write out\.pt: the suffix must be \.onnx or"),
        (["gone", "-o", "out.onnx"], "error: there is no artifact gone"),
        (["saved", "-o", "out.onnx", "--opset", "9"], "error: opset must be 18 or newer"),
        (["saved", "-o", "out.pt2", "--opset", "20"], r"error: opset is for \.onnx files"),
    ],
)
def test_refused(run, arguments, message):
    code, out, err = run("export", *arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)
