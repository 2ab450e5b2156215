"""Modules of temperature heads."""

import numpy as np
import pytest
import torch

from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.llm.heads.fitted import HEADS, _make_head
from calibrant.llm.heads.modules import (
    ShapeHead,
    _shape_features,
    _shape_features_of_logits,
    bounded,
)
from tests.support.language_models import (
    random_head,
)


def inputs_of(head, generator=0):
    torch.manual_seed(generator)
    width = {"shape": 12}.get(head.wants, 16)
    return torch.randn(2, 5, width)


@pytest.mark.parametrize("kind", HEADS)
def test_start_is_one_temperature(kind):
    head = _make_head(kind, width=16, start=-0.7)
    assert torch.equal(head(inputs_of(head)), torch.full((2, 5), -0.7))


@pytest.mark.parametrize(("kind", "options"), [*((k, {}) for k in HEADS), ("mlp", {"units": 5})])
def test_config_makes_the_same_form(kind, options):
    head = random_head(kind, **options)
    again = type(head)(**head.config())
    again.load_state_dict(head.state_dict())
    given = inputs_of(head)
    assert torch.equal(again(given), head(given))


def test_unknown_heads_and_options():
    with pytest.raises(ValueError, match="head must be one of"):
        _make_head("lstm", width=16)
    with pytest.raises(ValueError, match="attention_heads"):
        _make_head("ats", width=16, attention_heads=3)


def test_linear_and_mlp_by_hand():
    hidden = torch.randn(7, 16, dtype=torch.float64)
    centred = hidden - hidden.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    linear = random_head("linear").double()
    wanted = normed @ linear.last.weight[0] + linear.last.bias
    torch.testing.assert_close(linear(hidden), wanted)
    mlp = random_head("mlp", units=6).double()
    first = normed @ mlp.first.weight.T + mlp.first.bias
    inner = first[:, :6] * torch.sigmoid(first[:, :6]) * first[:, 6:]
    torch.testing.assert_close(mlp(hidden), inner @ mlp.last.weight[0] + mlp.last.bias)


def test_bounds():
    assert bounded(torch.tensor([-9.0, 0.5, 9.0])).tolist() == [-3.0, 0.5, 3.0]
    assert bounded(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("classes", [3, 40, 2000])
def test_shape_features_agree(classes):
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(50, classes)) * rng.uniform(0.2, 8, (50, 1))).astype(np.float32)
    logits[:3, 0], logits[3:5, 0] = -np.inf, -1e9
    logits[5] = np.where(np.arange(classes) == 1, 90, 0)  # no doubt at all
    labels = logits.argmax(-1)
    wanted = _shape_features_of_logits(torch.from_numpy(logits))
    got = _shape_features(tabulate(examples(logits, labels)))
    assert wanted.shape == (50, 12)
    assert torch.isfinite(wanted).all()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    # and both with the definition, one row at a time
    row = np.sort(logits[20].astype(np.float64))[::-1]
    gaps = row[0] - row
    rest = [np.log(np.exp(-0.05 * 2**k * gaps[1:]).sum()) for k in range(7)]
    leading = np.append(gaps[1:5], [20] * 4)[:4]
    by_hand = [*np.maximum(rest, -12), *np.log1p(np.minimum([gaps.mean(), *leading], 20))]
    np.testing.assert_allclose(wanted[20], by_hand, rtol=1e-4, atol=1e-4)


def test_shape_head_standardises():
    torch.manual_seed(0)
    features = torch.randn(100, 12) * 5 + 3
    features[:, 2] = 4.0  # a feature that never changes must not divide by zero
    head = ShapeHead()
    head.standardise(features)
    torch.nn.init.ones_(head.last.weight)
    found = head(features).detach()
    assert abs(float(found.mean())) < 1e-4
    assert torch.isfinite(found).all()
