"""Dense predictions: classes in any dimension, other ignored labels, and groups of pixels."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant._core.binning import fill, uniform_edges
from calibrant.metrics.accumulator import GroupSums, _GroupNoise
from calibrant.metrics.gaps import gap_deviation
from calibrant.metrics.summary import SCORES
from tests.support.metrics import ANY_CLASSES
from tests.support.simulate import drawn

GROUPED = [name for name, metric in cal.METRICS.items() if metric.by_groups]


@pytest.fixture(scope="module")
def images():
    """Scores (images, classes, height, width), labels with 255, and both as they are elsewhere."""
    rng = np.random.default_rng(0)
    z = 2 * rng.normal(size=(12, 3, 8, 8))
    tilt = rng.normal(size=(12, 3, 1, 1))
    labels = (0.7 * z + tilt + rng.gumbel(size=z.shape)).argmax(1)
    ignored = rng.random(labels.shape) < 0.1
    stated = np.where(ignored, 255, labels).astype(np.uint8)
    return (z, stated), (np.moveaxis(z, 1, -1), np.where(ignored, -100, labels))


LAYOUT: Any = {"class_dim": 1, "ignore_index": 255}


@pytest.mark.parametrize("name", ANY_CLASSES)
def test_metrics_take_classes_in_front_and_another_ignored_label(images, name):
    dense, plain = images
    metric, expected = cal.METRICS[name].compute, cal.METRICS[name].compute(*plain)
    assert metric(*dense, **LAYOUT) == expected
    assert metric(*map(torch.tensor, dense), **LAYOUT) == expected
    probs = torch.tensor(dense[0]).softmax(1)
    assert metric(probs=probs, labels=dense[1], **LAYOUT) == pytest.approx(expected, abs=1e-12)


def test_evaluations_streams_and_calibrators_take_them(images):
    dense, plain = images
    expected = cal.evaluate(*plain)
    assert dict(cal.evaluate(*dense, **LAYOUT)) == dict(expected)
    stream = cal.Accumulator(pairs=True).update(*dense, **LAYOUT)
    assert dict(stream.compute()) == dict(expected)
    fitted = cal.CALIBRATORS["vector"]().fit(*dense, **LAYOUT)
    again = cal.CALIBRATORS["vector"]().fit(*plain)
    probs = again.predict_proba(plain[0])
    np.testing.assert_array_equal(
        fitted.predict_proba(dense[0], class_dim=1), np.moveaxis(probs, -1, 1)
    )
    there = fitted.predict_proba(torch.tensor(dense[0]), class_dim=-3)
    assert there.shape == dense[0].shape
    np.testing.assert_array_equal(fitted.predict(dense[0], class_dim=1), probs.argmax(-1))


FEW_METRICS: Any = {"metrics": ["ece", "nll", "accuracy"]}


def streamed(logits, labels):
    stream = cal.Accumulator(grouped=True, **FEW_METRICS)
    for i, one in enumerate(logits):
        stream.update(one[None], labels[i, None], groups=np.array([i]), **LAYOUT)
    stream.compute()


def evaluated(logits, labels):
    """``ignore_index`` would cost a copy of the labels."""
    cal.evaluate(logits, labels, groups=np.arange(len(labels)), **FEW_METRICS, class_dim=1)


@pytest.mark.parametrize(("work", "few", "many"), [(streamed, 4, 40), (evaluated, 20, 40)])
def test_memory_does_not_grow_with_the_images(work, few, many, rng):
    """An image has 22,500 pixels: the confidences of 20 more in double precision are 3.6 MB."""
    peaks = []
    for count in (2, few, many):  # the first pass imports and caches
        logits = 2 * rng.normal(size=(count, 4, 150, 150)).astype(np.float32)
        labels = rng.integers(4, size=(count, 150, 150))
        tracemalloc.start()
        work(logits, labels)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 1e6


def test_wrong_layouts_are_refused(images, tmp_path):
    (z, labels), _ = images
    with pytest.raises(ValueError, match="class_dim must be a dimension of the scores, got 4"):
        cal.ece(z, labels, class_dim=4)
    with pytest.raises(ValueError, match=r"got 255 at position"):
        cal.ece(z, labels, class_dim=1)
    with pytest.raises(TypeError, match="stand alone"):
        cal.ece(confidence=[0.5], outcome=[1], ignore_index=255)
    np.savez(tmp_path / "p.npz", logits=z, labels=labels)
    with pytest.raises(TypeError, match="are for arrays: files have the classes last"):
        cal.evaluate(tmp_path / "p.npz", class_dim=1)


def test_large_arrays_are_measured_in_blocks(images, monkeypatch):
    dense, _ = images
    options: Any = {"groups": np.arange(12), "by": np.arange(12) % 2, "level": None, **LAYOUT}
    weight = np.random.default_rng(0).exponential(size=dense[1].shape)
    expected = cal.evaluate(*dense, sample_weight=weight, **options)
    monkeypatch.setattr("calibrant.workflows.evaluate.BLOCK", 3 * 64)
    found = cal.evaluate(*dense, sample_weight=weight, **options)
    for one, other in ((found, expected), (found.by["1"], expected.by["1"])):
        for name in other:
            assert one[name].value == pytest.approx(other[name].value, abs=1e-12)
        assert (one.n, one.groups) == (other.n, other.groups)


def test_standard_errors_of_means_are_those_over_groups(images):
    dense, (z, labels) = images
    found = cal.evaluate(*dense, groups=np.arange(12), **LAYOUT)
    kept = labels >= 0
    loss = torch.nn.functional.cross_entropy(
        torch.tensor(np.moveaxis(z, -1, 1)), torch.tensor(labels), reduction="none"
    ).numpy()
    sums, counts = loss.sum((1, 2)), kept.sum((1, 2))  # ignored ones have no loss
    off = sums - found["nll"].value * counts
    deviation = np.sqrt(12 / 11 * (off**2).sum()) / counts.sum()
    reach = 1.7958848187 * deviation  # the 95 % quantile of Student's t with 11 degrees
    assert found["nll"].high - found["nll"].value == pytest.approx(reach, rel=1e-6)
    assert found.n == kept.sum()
    assert found.groups == 12
    assert "in 12 groups" in str(found)
    assert found.to_dict()["groups"] == 12


def test_gaps_vary_as_sums_over_whole_groups(rng):
    luck = rng.choice([-0.2, 0.2], 40)  # of all examples of a group
    group, claimed = np.repeat(np.arange(40), 25), rng.uniform(0.3, 0.7, 1000)
    residual = claimed - (rng.random(1000) < claimed + luck[group])
    filled = fill(claimed, claimed - residual, uniform_edges(15))
    table, expected = np.zeros((40, 1 + len(SCORES) + 15)), np.zeros(15)
    table[:, 0] = 25
    for b, gap in enumerate(filled.gap):
        inside = np.ceil(claimed * 15).astype(int) - 1 == b
        sums = [residual[inside & (group == g)].sum() for g in range(40)]
        table[:, 1 + len(SCORES) + b] = sums
        expected[b] = np.sqrt(40 / 39 * sum((x - 25 * gap) ** 2 for x in sums)) / 1000
    wide = gap_deviation(_GroupNoise(table, np.sqrt(40 / 39)).widened(filled))
    np.testing.assert_allclose(wide, np.maximum(expected, gap_deviation(filled)), rtol=1e-9)
    assert (wide > 1.1 * gap_deviation(filled)).any()


def test_groups_of_one_are_almost_independent_examples(rng):
    data = drawn(rng, 3000, 4, 1.5)
    plain = cal.evaluate(*data, metrics=GROUPED)
    found = cal.evaluate(*data, metrics=GROUPED, groups=rng.permutation(3000))
    for name in GROUPED:
        width = plain[name].high - plain[name].low
        close = (0.5 if name == "under_ece" else 0.25) * width  # 0 leaves the upper end vague
        np.testing.assert_allclose(found[name], plain[name], atol=close, err_msg=name)


def test_the_pixels_of_an_image_are_fewer_examples_than_they_seem(images):
    dense, _ = images
    one, other = (cal.evaluate(*dense, groups=g, **LAYOUT) for g in (None, np.arange(12)))
    for name in ("accuracy", "nll", "brier", "ece"):
        assert np.ptp(other[name][1:]) > 1.3 * np.ptp(one[name][1:]), name
    assert other.test is None
    assert np.isnan(other["classwise_ece"].low)
    named = cal.evaluate(*dense, groups=np.arange(12), metrics=["smooth_ece"], **LAYOUT)
    assert named["smooth_ece"].value == one["smooth_ece"].value
    assert np.isnan(named["smooth_ece"].low)


def test_streams_and_files_with_groups_add_up(images, tmp_path):
    _, (z, labels) = images
    names = np.array([f"image {i // 2}" for i in range(12)])  # two rows for each
    expected = cal.evaluate(z, labels, groups=names)
    parts = [
        cal.Accumulator(grouped=True).update(z[i::2], labels[i::2], groups=names[i::2])
        for i in (0, 1)
    ]
    found = parts[0].merge(parts[1]).compute()
    np.savez(tmp_path / "p.npz", logits=z, labels=labels, image=names)
    filed = cal.evaluate(tmp_path / "p.npz", groups="image")
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-9, err_msg=name)
        np.testing.assert_allclose(filed[name], expected[name], atol=1e-9, err_msg=name)
    with pytest.raises(TypeError, match="groups= go with every batch"):
        cal.Accumulator(grouped=True).update(z, labels)
    with pytest.raises(ValueError, match="groups must have one value"):
        cal.evaluate(z, labels, groups=np.arange(5))


def test_the_interval_of_two_groups_reaches_beyond_the_error():
    """A bootstrap of two groups draws each of them once, without noise, in every second sample."""
    above = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sharpness = rng.gamma(4, 0.25, size=(2, 1, 1))
        logits = 1.5 * (rng.normal(size=(2, 1, 3)) + rng.normal(size=(2, 200, 3)))
        labels = (sharpness * logits + rng.gumbel(size=logits.shape)).argmax(-1)
        found = cal.evaluate(1.6 * logits, labels, groups=[0, 1], metrics=["ece"])["ece"]
        above += found.high > 1.2 * found.value
    assert above > 14


def test_one_group_has_no_intervals(images):
    dense, _ = images
    found = cal.evaluate(*dense, groups=np.zeros(12, int), **LAYOUT)
    assert all(np.isnan(estimate.low) for estimate in found.values())
    assert not GroupSums().sums
