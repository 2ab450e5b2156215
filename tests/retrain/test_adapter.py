"""Retrained classifiers in the place of calibrators."""

import numpy as np
import pytest
import torch
from torch import nn

import calibrant as cal
from calibrant.retrain.adapter import as_calibrator
from calibrant.retrain.maccal import MaCCal
from tests.support.features import CLASSES, QUICK


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.usefixtures("operators_read_once")
def test_retrained_classifier_is_exported_to_onnx(data, tmp_path, samples):
    module = MaCCal(**QUICK, keep=0.7, samples=samples).fit(*data)
    assert cal.export_onnx(module, tmp_path / "classifier.onnx") <= 1e-5


def test_as_a_calibrator_it_ignores_logits(data):
    module = MaCCal(**QUICK).fit(*data)
    features, calibrator = torch.tensor(data[0]), as_calibrator(module)
    logits = calibrator(torch.randn(300, CLASSES), features)
    assert torch.equal(logits, module(features))
    assert torch.equal(logits.amax(-1), torch.zeros(300))
    probs = calibrator.predict_proba(np.zeros((300, CLASSES)), data[0])
    np.testing.assert_allclose(probs, logits.softmax(-1), atol=1e-6)
    assert as_calibrator(calibrator) is calibrator
    with pytest.raises(TypeError, match="calibrator must be a Calibrator or a MaCCal, got ReLU"):
        as_calibrator(nn.ReLU())
    with pytest.raises(ValueError, match=r"not fitted: call fit\(features, labels\) first"):
        as_calibrator(MaCCal())
