"""Errors per bin against loops over the bins, and values worked out by hand.

The binning rule itself is tested in tests/core/test_binning.py.
"""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant as cal
from tests.support.definitions import slow_ece
from tests.support.named_predictions import TIGHT, every, pairs_of, predictions

TENTHS = [round(0.1 * k, 1) for k in range(1, 10)]


# Equal width


@every
def test_ece_of_the_table_and_of_a_stream_is_that_of_the_pairs(name):
    logits, labels = predictions(name)
    expected = slow_ece(*pairs_of(logits, labels), bins=15)
    found = cal.METRICS["ece"].compute(logits, labels, estimand="top_label")
    assert found == pytest.approx(expected, abs=TIGHT)
    stream = cal.Accumulator(level=None, estimand="top_label")
    for part in np.array_split(np.arange(len(labels)), 7):
        stream.update(logits[part], labels[part])
    assert stream.compute()["ece"].value == pytest.approx(expected, abs=TIGHT)


@every
def test_weighted_ece_equals_a_loop_over_bins(rng, name):
    confidence, outcome = pairs_of(*predictions(name))
    weight = rng.exponential(size=outcome.size)
    expected = slow_ece(confidence, outcome, weight=weight)
    assert cal.ece(confidence=confidence, outcome=outcome, sample_weight=weight) == pytest.approx(
        expected, abs=TIGHT
    )


@pytest.mark.parametrize("edge", [0.3, 0.6, 0.7])
def test_a_value_on_an_edge_is_in_the_bin_below(edge):
    """Two in one bin: the gap of their means. In two bins: the mean of 1 - p and p."""
    together = cal.ece(confidence=[edge - 0.05, edge], outcome=[1, 0], bins=10)
    assert together == pytest.approx(abs(2 * edge - 0.05 - 1) / 2, abs=1e-12)
    apart = cal.ece(confidence=[edge, edge + 0.05], outcome=[1, 0], bins=10)
    assert apart == pytest.approx((1 - edge + edge + 0.05) / 2, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_confidence_of_low_precision_is_binned_by_the_value_it_has(dtype):
    """The float32 nearest to 0.3 is 0.30000001: above the edge, and not rounded onto it."""
    values = np.array(TENTHS, dtype=dtype)
    expected = [math.ceil(10 * float(v)) - 1 for v in values]
    found = [int(np.argmax(fill_one(v).count)) for v in values]
    assert found == expected
    assert 3 in expected or dtype == np.float16


def fill_one(value):
    return cal.metrics.binned.binned_pairs(confidence=np.array([value]), outcome=[1], bins=10)


@pytest.mark.parametrize("bins", [1, 2, 15, 49])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_no_confidence_at_either_end_is_dropped(bins, value):
    assert cal.ece(confidence=[value] * 3, outcome=[1 - value] * 3, bins=bins) == 1.0
    assert cal.ada_ece(confidence=[value] * 3, outcome=[1 - value] * 3, bins=bins) == 1.0
    assert cal.ks(confidence=[value] * 3, outcome=[1 - value] * 3) == 1.0
    assert cal.smce(confidence=[value] * 3, outcome=[1 - value] * 3) == 1.0
    assert cal.smooth_ece(confidence=[value] * 3, outcome=[1 - value] * 3) == pytest.approx(
        1, abs=1e-9
    )


def test_empty_bins_add_nothing():
    """Ten bins, two of them used: the value is that of the two, and no mean is invented."""
    confidence, outcome = [0.05, 0.05, 0.95], [1, 0, 0]
    expected = (2 * abs(0.05 - 0.5) + 0.95) / 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cal.ece(confidence=confidence, outcome=outcome, bins=10) == pytest.approx(
            expected, abs=1e-12
        )
        filled = cal.metrics.binned.binned_pairs(confidence=confidence, outcome=outcome, bins=10)
        assert np.isnan(filled.confidence[1:-1]).all()
        assert np.isnan(filled.accuracy[1:-1]).all()
        np.testing.assert_array_equal(filled.gap[1:-1], 0)
        assert cal.mce(
            confidence=confidence, outcome=outcome, bins=10, min_count=0
        ) == pytest.approx(0.95)
        assert math.isfinite(cal.debiased_ece(confidence=confidence, outcome=outcome, bins=10))


def test_a_million_equal_rows_do_not_drift():
    """Float32 sums of 0.8 are off by 1 % after a million of them."""
    confidence = np.full(1_000_000, 0.8)
    outcome = np.arange(1_000_000) % 5 < 4
    assert cal.ece(confidence=confidence, outcome=outcome) == pytest.approx(0, abs=1e-9)
    single = torch.full((1_000_000,), 0.8)
    assert cal.ece(confidence=single, outcome=outcome) == pytest.approx(
        float(single[0].double()) - 0.8, abs=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_confidences_are_counted_and_added_up_exactly(dtype):
    """Past 256 bfloat16 has no odd numbers, and float16 ends at 65504."""
    confidence = torch.full((80_001,), 0.75, dtype=dtype)
    outcome = (torch.arange(80_001) % 2 == 0).to(dtype)
    assert cal.ece(confidence=confidence, outcome=outcome) == pytest.approx(
        0.75 - 40_001 / 80_001, abs=1e-12
    )


# Equal mass


def test_ties_are_not_split_whatever_the_order_of_the_labels(rng):
    """1000 confidences of 0.7, 70 % right: the error is 0 in every order."""
    outcome = np.repeat([1, 0], [700, 300])
    for order in (outcome, outcome[::-1], rng.permutation(outcome)):
        assert cal.ada_ece(confidence=[0.7] * 1000, outcome=order) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("bins", [5, 6, 15, 1000])
def test_more_bins_than_examples_put_each_example_into_its_own(bins):
    confidence, outcome = np.array([0.1, 0.35, 0.4, 0.8, 0.99]), np.array([0, 1, 0, 1, 1])
    expected = np.abs(confidence - outcome).mean()
    assert cal.ada_ece(confidence=confidence, outcome=outcome, bins=bins) == pytest.approx(
        expected, abs=1e-12
    )
    assert math.isfinite(cal.ece(confidence=confidence, outcome=outcome, bins=bins))


# Class-wise


@every
@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.2])
def test_classwise_ece_equals_a_loop_over_classes_and_bins(rng, name, threshold):
    logits, labels = predictions(name)
    probs, weight = softmax(logits, axis=-1), rng.exponential(size=len(labels))
    expected, share = [], []
    for k in range(logits.shape[1]):
        kept = probs[:, k] > threshold if threshold else np.ones(len(labels), bool)
        happened = (labels == k)[kept]
        expected.append(slow_ece(probs[kept, k], happened, weight=weight[kept]))
        share.append(weight @ (labels == k))  # of all labels, also with a threshold
    options = {"threshold": threshold, "sample_weight": weight}
    found = cal.metrics.per_class_ece(logits, labels, **options)
    np.testing.assert_allclose(found, expected, atol=TIGHT)
    mean = cal.classwise_ece(logits, labels, **options)
    assert mean == pytest.approx(np.mean(expected), abs=TIGHT)
    by_share = cal.classwise_ece(logits, labels, average="prevalence", **options)
    assert by_share == pytest.approx(np.average(expected, weights=share), abs=TIGHT)


def test_a_certain_class_counts_in_the_classwise_error():
    """The probabilities 1 and 0 are exact in float64 here, at both ends of the bins."""
    logits = np.array([[0.0, -800.0], [0.0, -800.0]])
    assert cal.classwise_ece(logits, [0, 1]) == pytest.approx(0.5, abs=1e-12)


def test_classes_without_a_label_count_as_classes(rng):
    logits, labels = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    assert cal.evaluate(logits, labels, metrics=["ece"], level=None).classes == 3
    assert cal.metrics.per_class_ece(logits, labels).shape == (3,)
    # what is claimed for class 2 never happens
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    errors = [slow_ece(probs[:, k], labels == k) for k in range(3)]
    assert errors[2] == pytest.approx(probs[:, 2].mean(), abs=1e-12)
    np.testing.assert_allclose(cal.metrics.per_class_ece(logits, labels), errors, atol=1e-12)
    by_share = np.average(errors[:2], weights=np.bincount(labels))
    found = cal.classwise_ece(logits, labels, average="prevalence")
    assert found == pytest.approx(by_share, abs=1e-12)


@pytest.mark.parametrize("average", ["mean", "prevalence"])
def test_a_threshold_that_leaves_nothing_gives_no_error(average):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cal.classwise_ece(np.zeros((4, 3)), [0, 1, 2, 0], threshold=0.5, average=average)
    assert math.isnan(found)


# The largest error needs a count


def test_mce_passes_over_bins_with_few_examples():
    """One stray example at 0.2 is off by 0.8; 50 at 0.9 are off by 0.1."""
    confidence = np.array([0.9] * 50 + [0.2])
    outcome = np.array([1] * 40 + [0] * 10 + [1])
    assert cal.mce(confidence=confidence, outcome=outcome) == pytest.approx(0.1)
    assert cal.mce(confidence=confidence, outcome=outcome, min_count=1) == pytest.approx(0.8)
    assert cal.mce(confidence=confidence, outcome=outcome, min_count=51) != cal.mce(
        confidence=confidence, outcome=outcome
    )
    assert math.isnan(cal.mce(confidence=confidence, outcome=outcome, min_count=51))


@pytest.mark.parametrize(("n", "least"), [(100, 10), (1000, 10), (1001, 11), (5000, 50)])
def test_mce_wants_one_percent_and_at_least_ten(n, least):
    for few, expected in ((least, 0.8), (least - 1, 0.1)):
        confidence = np.repeat([0.9, 0.2], [n - few, few])
        outcome = np.concatenate([np.arange(n - few) < round(0.8 * (n - few)), np.ones(few)])
        assert cal.mce(confidence=confidence, outcome=outcome) == pytest.approx(expected, abs=0.01)


def test_mce_counts_examples_and_not_weights():
    """Three examples of weight 100 are still three."""
    confidence = np.array([0.9] * 50 + [0.2] * 3)
    outcome = np.array([1] * 45 + [0] * 5 + [1] * 3)
    weight = np.repeat([1.0, 100.0], [50, 3])
    assert cal.mce(confidence=confidence, outcome=outcome, sample_weight=weight) == pytest.approx(
        0, abs=1e-12
    )
