"""Feature clipping, against a network with clipped features and a dense grid."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import nn

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators.features import FeatureClipping, clipping
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.with_features import fitted, linear_data, mean_nll


def clipped_data(rng, n=4000, classes=6, width=30, clip=1.5):
    """Labels of a model that cut its features at ``clip``; also its honest logits."""
    features = rng.exponential(size=(n, width)) * np.where(rng.random((n, width)) < 0.5, -1, 1)
    weight, bias = 0.5 * rng.normal(size=(classes, width)), rng.normal(size=classes)
    honest = features.clip(-clip, clip) @ weight.T + bias
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    return features @ weight.T + bias, labels, features, (weight, bias), honest


@pytest.mark.parametrize("temperature", [True, False])
def test_the_clipping_value_is_found(temperature, rng):
    logits, labels, features, head, honest = clipped_data(rng, n=6000)
    module = FeatureClipping(max_accuracy_loss=1.0, temperature=temperature)
    module.fit(logits, labels, features=features, head=head)
    assert float(module.clip_) == pytest.approx(1.5, abs=0.3)
    assert float(module.temperature_) == pytest.approx(1.0, abs=0.1)
    error = np.abs(module.predict_proba(logits, features) - softmax(honest, -1)).mean()
    assert error < 0.3 * np.abs(softmax(logits, -1) - softmax(honest, -1)).mean()


@pytest.mark.parametrize("temperature", [True, False])
def test_it_is_a_network_with_clipped_features(temperature, rng):
    torch.manual_seed(0)
    body, layer = nn.Sequential(nn.Linear(8, 20), nn.ReLU()), nn.Linear(20, 5)
    with torch.no_grad():
        layer.weight *= 8
        inputs = 3 * torch.randn(3000, 8)
        features = body(inputs)
        logits, honest = layer(features), layer(features.clamp(max=1.0))
        labels = (honest - torch.empty_like(logits).exponential_().log()).argmax(-1)
    module = FeatureClipping(max_accuracy_loss=1.0, temperature=temperature)
    module.fit(logits, labels, features=features, head=(layer.weight, layer.bias))
    clip = float(module.clip_)
    assert 0 < clip < features.max()  # else nothing is tested
    with torch.no_grad():
        by_hand = layer(body(inputs).clamp(-clip, clip))
        expected = by_hand
        if temperature:
            single = TemperatureScaling().fit(by_hand, labels).temperature_
            assert float(module.temperature_) == pytest.approx(float(single), rel=1e-4)
            expected = by_hand / single
        else:
            assert module.temperature_ == 1
    torch.testing.assert_close(
        module.predict_proba(logits, features), expected.softmax(-1), atol=1e-5, rtol=1e-4
    )


def too_sure(rng, n=1500):
    """A model that is too sure by a factor: clipping lowers its confidence, at a price."""
    return linear_data(rng, n=n, width=20, temperature=6.0)


def judged(clip, logits, labels, features, head, weight=None):
    """Metrics of the last layer on clipped features."""
    found = features.clip(-clip, clip) @ head[0].T + head[1]
    return {
        name: estimate.value
        for name, estimate in cal.evaluate(found, labels, level=None, sample_weight=weight).items()
    }


@pytest.fixture(scope="module")
def dense_grid():
    """Data, and their metrics without clipping and at many clipping values."""
    data = too_sure(np.random.default_rng(20260101))
    values = np.linspace(0.02, np.abs(data[2]).max(), 80)
    return data, judged(np.inf, *data), [judged(c, *data) for c in values]


@pytest.mark.parametrize(
    ("objective", "loss"), [("nll", 0.0), ("ece", 0.02), ("nll", 0.5), ("ece", 0.5)]
)
def test_no_value_of_a_dense_grid_is_better_at_the_same_accuracy(objective, loss, dense_grid):
    data, plain, dense = dense_grid
    module = FeatureClipping(objective=objective, max_accuracy_loss=loss, temperature=False)
    fitted(module, *data)
    allowed = [x for x in (plain, *dense) if x["accuracy"] >= (1 - loss) * plain["accuracy"]]
    found = judged(float(module.clip_), *data)
    assert found["accuracy"] >= (1 - loss) * plain["accuracy"] - 1e-9
    assert found[objective] <= min(x[objective] for x in allowed) * 1.05 + 0.002
    if loss < 0.5:  # the limit holds something back
        assert found[objective] > 1.1 * min(x[objective] for x in dense)


def test_the_objective_decides(rng):
    data = too_sure(rng)
    make = partial(FeatureClipping, max_accuracy_loss=1.0, temperature=False)
    likely, calibrated = (
        judged(float(fitted(make(objective=o), *data).clip_), *data) for o in ("nll", "ece")
    )
    assert likely["nll"] < calibrated["nll"]
    assert likely["ece"] > calibrated["ece"]


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_values_are_judged_at_their_own_temperatures(rng):
    logits, labels, features, head = too_sure(rng)
    make = partial(FeatureClipping, max_accuracy_loss=1.0)
    together, alone = (
        fitted(make(temperature=t), logits, labels, features, head) for t in (True, False)
    )
    assert float(together.clip_) > 1.2 * float(alone.clip_)  # a temperature does it better

    def after(clip):
        by_hand = features.clip(-clip, clip) @ head[0].T + head[1]
        return mean_nll(TemperatureScaling().fit(by_hand, labels).predict_proba(by_hand), labels)

    found = mean_nll(together.predict_proba(logits, features), labels)
    assert found < after(float(alone.clip_)) - 0.005
    assert found <= min(map(after, np.linspace(0.05, np.abs(features).max(), 60))) + 0.002


def test_values_between_those_of_the_grid_are_tried(rng, monkeypatch):
    logits, labels, features, head, _ = clipped_data(rng, n=2000)
    monkeypatch.setattr(clipping, "_TAILS", (1e-3, 0.5, 4))
    module = FeatureClipping(max_accuracy_loss=1.0, temperature=False)
    clip = float(fitted(module, logits, labels, features, head).clip_)
    coarse = np.quantile(np.abs(features), 1 - np.geomspace(1e-3, 0.5, 4))
    assert np.abs(coarse - clip).min() > 0.02
    data = logits, labels, features, head
    assert judged(clip, *data)["nll"] < min(judged(c, *data)["nll"] for c in coarse)


def test_the_accuracy_that_is_kept_is_the_weighted_one(rng):
    data = logits, labels, features, head = too_sure(rng)
    make = partial(FeatureClipping, max_accuracy_loss=0.05, temperature=False)
    clip = float(fitted(make(), *data).clip_)
    clipped = features.clip(-clip, clip) @ head[0].T + head[1]
    lost = (logits.argmax(-1) == labels) & (clipped.argmax(-1) != labels)
    weight = np.where(lost, 30.0, 1.0)

    def kept(value):
        after, before = (
            judged(c, logits, labels, features, head, weight)["accuracy"] for c in (value, np.inf)
        )
        return after / before

    tried = make()._judged(clip, tabulate(examples(clipped, labels, weight)))
    assert tried.accuracy == pytest.approx(np.average(clipped.argmax(-1) == labels, weights=weight))
    assert kept(clip) < 0.9
    assert kept(float(fitted(make(), *data, sample_weight=weight).clip_)) >= 0.95 - 1e-9


def test_where_clipping_does_not_help_logits_stay_to_the_last_digit(rng):
    logits, labels, features, head = linear_data(rng, temperature=0.5)  # under-confident
    module = FeatureClipping(temperature=False).fit(logits, labels, features=features, head=head)
    assert float(module.clip_) == pytest.approx(3e38)
    assert torch.isfinite(module.clip_)
    given = torch.from_numpy(logits).float()
    expected = given - given.amax(-1, keepdim=True)
    found = module(given, 1e4 * torch.from_numpy(features).float())
    assert torch.equal(found, expected - expected.amax(-1, keepdim=True))


def test_a_layer_without_bias(rng):
    logits, labels, features, (weight, bias), _ = clipped_data(rng, n=1000)
    FeatureClipping().fit(logits - bias, labels, features=features, head=(weight, None))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z, f, w, b: (z, f, (w[::-1].copy(), b)),
        lambda z, f, w, b: (z, f, (w, b + np.linspace(-2, 2, 6))),
        lambda z, f, w, b: (z / 2, f, (w, b)),
        lambda z, f, w, b: (z, np.maximum(f, 0), (w, b)),
        lambda z, f, w, b: (z[::-1].copy(), f, (w, b)),
    ],
    ids=["weight", "bias", "scaled logits", "other features", "other order"],
)
def test_a_layer_that_does_not_give_the_logits_is_refused(wrong, rng):
    logits, labels, features, head, _ = clipped_data(rng, n=500)
    logits, features, head = wrong(logits, features, *head)
    with pytest.raises(ValueError, match="head and features must give the logits"):
        FeatureClipping().fit(logits, labels, features=features, head=head)


def test_misshapen_layers_are_refused(rng):
    logits, labels, features, (weight, bias), _ = clipped_data(rng, n=500)
    fit = partial(FeatureClipping().fit, logits, labels, features=features)
    with pytest.raises(ValueError, match=r"of shapes \(classes, width\) and \(classes,\)"):
        fit()
    with pytest.raises(TypeError, match=r"head must be \(weight, bias\), got ndarray"):
        fit(head=weight)
    for head in ((weight.T, bias), (weight[:-1], bias[:-1]), (weight, bias[:, None])):
        with pytest.raises(ValueError, match=r"of shapes \(6, 30\) and \(6,\)"):
            fit(head=head)
    with pytest.raises(ValueError, match="head must be finite"):
        fit(head=(np.where(weight > 1, np.nan, weight), bias))


def test_of_many_samples_and_features_some_are_searched(rng, monkeypatch):
    logits, labels, features, head, _ = clipped_data(rng, n=3000)
    fit = partial(FeatureClipping(max_accuracy_loss=1.0).fit, features=features, head=head)
    whole = copy.deepcopy(fit(logits, labels))
    monkeypatch.setattr(clipping, "_MAX_SEARCHED", 1000)
    monkeypatch.setattr(clipping, "_LOOKED_AT", 5000)
    some = fit(logits, labels)
    assert float(some.clip_) != float(whole.clip_)
    assert float(some.clip_) == pytest.approx(float(whole.clip_), abs=0.3)
    # the temperature is that of all samples
    clip = float(some.clip_)
    by_hand = features.clip(-clip, clip) @ head[0].T + head[1]
    single = TemperatureScaling().fit(by_hand, labels).temperature_
    torch.testing.assert_close(some.temperature_, single, rtol=1e-4, atol=0)
