"""Every metric of examples that are on a device, and streams of them."""

from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant import metrics
from calibrant.metrics import METRICS
from tests.support.simulate import drawn, drawn_tags
from tests.support.tensors import tensors


def examples(classes=4):
    logits, labels = drawn(np.random.default_rng(2), 500, classes, temperature=1.5)
    labels[::20] = -100
    return tensors(logits, labels)


@pytest.fixture
def weight():
    return torch.from_numpy(np.random.default_rng(3).uniform(0.5, 2, 500)).float()


def numbers(evaluation):
    return {name: evaluation[name] for name in evaluation}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, estimate in wanted.items():
        np.testing.assert_allclose(tuple(found[name]), tuple(estimate), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric(name, device, weight):
    metric = METRICS[name]
    logits, labels = examples(2 if metric.two_classes_only else 4)
    wanted = metric.compute(logits, labels)
    assert metric.compute(logits.to(device), labels.to(device)) == pytest.approx(wanted, rel=1e-5)
    weighted = metric.compute(logits, labels, sample_weight=weight)
    for there in (
        (logits.to(device), labels, weight.to(device)),
        (logits.to(device), labels.numpy(), weight.numpy()),
        (logits.numpy(), labels.to(device), weight.to(device)),
    ):
        found = metric.compute(*there[:2], sample_weight=there[2])
        assert found == pytest.approx(weighted, rel=1e-5)
    probs = logits.softmax(-1)
    wanted = metric.compute(probs=probs, labels=labels)
    found = metric.compute(probs=probs.to(device), labels=labels.to(device))
    assert found == pytest.approx(wanted, rel=1e-5)
    if metric.needs_pairs or name in ("ece", "ks", "auroc"):
        pairs = metrics.top_label(logits, labels)
        claimed = torch.from_numpy(pairs.confidence).float()
        outcome = torch.from_numpy(pairs.outcome)
        wanted = metric.compute(confidence=claimed, outcome=outcome)
        found = metric.compute(confidence=claimed.to(device), outcome=outcome.to(device))
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("classes", [2, 4])
def test_an_evaluation_with_subgroups(device, weight, dtype, classes):
    logits, labels = examples(classes)
    logits, by = logits.to(dtype), torch.arange(500) % 3
    level = 0.9 if dtype == torch.float32 and classes == 4 else None
    wanted = cal.evaluate(logits, labels, sample_weight=weight, by=by, level=level)
    found = cal.evaluate(
        logits.to(device),
        labels.to(device),
        sample_weight=weight.to(device),
        by=by.to(device),
        level=level,
    )
    assert_same(numbers(found), numbers(wanted))
    assert found.by.keys() == wanted.by.keys()


def test_an_evaluation_of_tags_and_log_odds(device):
    rng = np.random.default_rng(0)
    logits, labels = drawn_tags(rng, 300, np.array([0.5, 1.0]), np.array([0.0, 1.0]))
    tags, labels = tensors(logits, labels)
    wanted = cal.evaluate(tags, labels, estimand="multilabel", level=None)
    found = cal.evaluate(tags.to(device), labels.to(device), estimand="multilabel", level=None)
    assert_same(numbers(found), numbers(wanted))
    wanted = cal.evaluate(tags[:, 0], labels[:, 0], level=None)
    found = cal.evaluate(tags[:, 0].to(device), labels[:, 0].to(device), level=None)
    assert_same(numbers(found), numbers(wanted))


def test_a_stream_of_batches(device, weight):
    logits, labels = examples()
    stream, plain = (cal.Accumulator(pairs=True, level=None) for _ in range(2))
    for rows in torch.arange(500).split(120):
        plain.update(logits[rows], labels[rows], sample_weight=weight[rows])
        there = (x[rows].to(device) for x in (logits, labels))
        stream.update(*there, sample_weight=weight[rows].to(device), by=(rows % 2).to(device))
    assert_same(numbers(stream.compute()), numbers(plain.compute()))


CURVES: dict[str, Any] = {
    "margins": lambda z, y: metrics.margins(z),
    "top_label": lambda z, y: metrics.top_label(z, y).confidence,
    "one_vs_rest": lambda z, y: metrics.one_vs_rest(z, y, k=1).confidence,
    "positive_class": lambda z, y: metrics.positive_class(z[:, 0], (y > 0) * 1).confidence,
    "multilabel": lambda z, y: metrics.multilabel(z, (z > 0) * 1).confidence,
    "per_class_ece": lambda z, y: metrics.per_class_ece(z, y),
    "binned_pairs": lambda z, y: metrics.binned_pairs(z, y).accuracy,
    "calibration_test": lambda z, y: metrics.calibration_test(z, y).p_value,
    "confidence_histogram": lambda z, y: metrics.confidence_histogram(z, y).right,
    "reliability": lambda z, y: metrics.reliability(z, y).accuracy,
    "reliability_by_class": lambda z, y: [
        r.reliability.accuracy for r in metrics.reliability_by_class(z, y)
    ],
    "reliability_by_margin": lambda z, y: [
        r.reliability.accuracy for r in metrics.reliability_by_margin(z, y)
    ],
    "smooth_reliability": lambda z, y: metrics.smooth_reliability(z, y).accuracy,
    "decision_curve": lambda z, y: metrics.decision_curve(z[:, :2], (y > 0) * 1).net_benefit,
    "risk_coverage": lambda z, y: metrics.risk_coverage(z, y).risk,
    "fpr95": lambda z, y: metrics.fpr95(z[:, 0], z[:, 1]),
    "ood_auroc": lambda z, y: metrics.ood_auroc(z[:, 0], z[:, 1]),
}


@pytest.mark.parametrize("name", CURVES)
def test_reductions_and_curves(name, device):
    logits, labels = examples()
    wanted, found = (
        CURVES[name](z, y) for z, y in ((logits, labels), (logits.to(device), labels.to(device)))
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_every_function_of_examples_is_here():
    functions = {
        name
        for name, value in vars(metrics).items()
        if callable(value) and getattr(value, "__module__", "").startswith("calibrant.metrics.")
        if not isinstance(value, type)
    }
    assert functions - {*METRICS, "__getattr__"} <= {*CURVES}


def test_a_default_device_changes_nothing(device):
    logits, labels = examples()
    wanted = cal.evaluate(logits, labels, level=None)
    margins = metrics.margins(logits)
    with torch.device(device):
        for values in (logits.numpy(), logits.to(device)):
            assert_same(numbers(cal.evaluate(values, labels, level=None)), numbers(wanted))
            np.testing.assert_allclose(metrics.margins(values), margins)
