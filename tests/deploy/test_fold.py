"""Calibrators folded into the last linear layer."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calibrant.calibrators.auto import Auto
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.decide.priors import PriorCorrection
from calibrant.deploy import fold_into_linear
from tests.support.calibrators import EVERY_METHOD
from tests.support.models import CLASSES, WIDTH, fitted

LINEAR = ["none", "ts", "vector", "matrix", "cts", "auto"]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(("bias", "one_logit"), [(True, False), (False, False), (False, True)])
def test_folded_layer_is_calibrated(network, inputs, name, bias, one_logit):
    calibrator = fitted(
        name, one_logit=one_logit, **({"candidates": ["ts"]} if name == "auto" else {})
    )
    network[3] = last = nn.Linear(WIDTH, 1 if one_logit else CLASSES, bias=bias)
    network.eval()
    logits = network(inputs).detach()
    wanted = calibrator.predict_proba(logits)
    before = copy.deepcopy(last.state_dict())
    network[3] = fold_into_linear(calibrator, last)
    found = network(inputs).detach()
    found = found.sigmoid() if one_logit else found.softmax(-1)
    np.testing.assert_allclose(found, wanted, atol=3e-7)
    assert all(torch.equal(value, before[key]) for key, value in last.state_dict().items())
    assert (network[3].bias is None) == (not bias and name in ("none", "ts", "auto", "cts"))
    if name != "none":
        plain = logits.sigmoid() if one_logit else logits.softmax(-1)
        assert not np.allclose(wanted, plain, atol=1e-3)


def test_definition():
    """The definition, with numbers: factors 1, 2, 3 and intercepts, after centring."""
    calibrator: Any = fitted("vector")
    last = nn.Linear(2, CLASSES)
    x = torch.randn(7, 2)
    z = last(x).double().detach().numpy()
    w, b = (getattr(calibrator, key).double().numpy() for key in ("weight_", "bias_"))
    wanted = np.exp(w * (z - z.mean(1, keepdims=True)) + b)
    found = fold_into_linear(calibrator, last)(x).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, wanted / wanted.sum(1, keepdims=True), atol=3e-7)


@pytest.mark.parametrize("one_logit", [False, True])
def test_prior_correction(one_logit):
    new = [0.1, 0.9] if one_logit else [0.1, 0.2, 0.3, 0.4]
    old = [0.5, 0.5] if one_logit else [0.25] * 4
    calibrator = PriorCorrection(fitted("vector", one_logit=one_logit)).set_priors(old, new)
    last, x = nn.Linear(3, 1 if one_logit else CLASSES), torch.randn(9, 3)
    found = fold_into_linear(calibrator, last)(x)
    found = found.sigmoid() if one_logit else found.softmax(-1)
    wanted = calibrator.predict_proba(last(x).detach())
    np.testing.assert_allclose(found.detach(), wanted, atol=3e-7)


def test_type_and_mode_are_kept():
    found = fold_into_linear(fitted("matrix"), nn.Linear(3, CLASSES, dtype=torch.float64).eval())
    assert found.weight.dtype == found.bias.dtype == torch.float64
    assert not found.training
    assert type(found) is nn.Linear


@pytest.mark.parametrize(
    "name", [k for k, v in EVERY_METHOD.items() if k not in LINEAR and not v.needs_features]
)
def test_nonlinear_methods_are_refused(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrator = fitted(name, one_logit=EVERY_METHOD[name].two_classes_only)
    with pytest.raises(ValueError, match="is not linear in the logits"):
        fold_into_linear(calibrator, nn.Linear(3, calibrator.classes))


def test_auto_with_a_nonlinear_choice():
    calibrator = fitted("auto", candidates=["blend"])
    with pytest.raises(ValueError, match="Blend is not linear in the logits"):
        fold_into_linear(calibrator, nn.Linear(3, CLASSES))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((TemperatureScaling(), nn.Linear(3, 4)), ValueError, "is not fitted"),
        ((Auto(), nn.Linear(3, 4)), ValueError, "Auto is not fitted"),
        (("ts", nn.Linear(3, 4)), TypeError, "must be a Calibrator, got str"),
        ((fitted("ts"), nn.Conv2d(1, 1, 1)), TypeError, "linear must be an nn.Linear, got Conv2d"),
        ((fitted("ts"), nn.Linear(3, 5)), ValueError, "linear must have 4 outputs, got 5"),
        ((fitted("ts", one_logit=True), nn.Linear(3, 2)), ValueError, "must have 1 outputs"),
    ],
)
def test_refused(given, error, message):
    with pytest.raises(error, match=message):
        fold_into_linear(*given)
