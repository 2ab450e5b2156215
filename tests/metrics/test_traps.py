"""Traps in which calibration libraries have been caught, each as a truth about this one.

The expected values are worked out by hand. What other libraries give is in tests/test_peers.py
and docs/two-eces.md.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant._core.binning import Bins, bin_index, equal_mass_edges, fill, uniform_edges

TENTHS = [round(0.1 * k, 1) for k in range(1, 10)]
EVERY_COUNT = [1, 2, 3, 7, 10, 15, 20, 49, 100]


def logits_of(probs):
    return np.log(np.asarray(probs, dtype=np.float64))


# Bins: the closed side, the ends, the number


@pytest.mark.parametrize("edge", TENTHS)
def test_a_value_on_an_edge_is_in_the_bin_below(edge):
    """Two in one bin: the gap of their means. In two bins: the mean of 1 - p and p."""
    together = cal.ece(confidence=[edge - 0.05, edge], outcome=[1, 0], bins=10)
    assert together == pytest.approx(abs(2 * edge - 0.05 - 1) / 2, abs=1e-12)
    apart = cal.ece(confidence=[edge, edge + 0.05], outcome=[1, 0], bins=10)
    assert apart == pytest.approx((1 - edge + edge + 0.05) / 2, abs=1e-12)


@pytest.mark.parametrize("bins", EVERY_COUNT)
def test_every_decimal_edge_closes_its_bin(bins):
    """k / bins, as Python divides, is the last value of bin k; the next float is not."""
    edges = np.array([k / bins for k in range(1, bins + 1)])
    np.testing.assert_array_equal(bin_index(edges, uniform_edges(bins)), np.arange(bins))
    above = np.nextafter(edges[:-1], 2)
    np.testing.assert_array_equal(bin_index(above, uniform_edges(bins)), np.arange(1, bins))


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


def test_a_confidence_of_one_is_in_the_last_bin():
    assert cal.ece(confidence=[0.95, 1.0], outcome=[1, 0], bins=10) == pytest.approx(
        0.475, abs=1e-12
    )


def test_a_confidence_of_zero_is_in_the_first_bin():
    assert cal.ece(confidence=[0.0, 0.05], outcome=[1, 0], bins=10) == pytest.approx(
        0.475, abs=1e-12
    )


@pytest.mark.parametrize("bins", EVERY_COUNT)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_no_confidence_at_either_end_is_dropped(bins, value):
    assert cal.ece(confidence=[value] * 3, outcome=[1 - value] * 3, bins=bins) == 1.0
    assert cal.ada_ece(confidence=[value] * 3, outcome=[1 - value] * 3, bins=bins) == 1.0
    assert cal.ks(confidence=[value] * 3, outcome=[1 - value] * 3) == 1.0
    assert cal.smce(confidence=[value] * 3, outcome=[1 - value] * 3) == 1.0
    assert cal.smooth_ece(confidence=[value] * 3, outcome=[1 - value] * 3) == pytest.approx(
        1, abs=1e-9
    )


def test_a_certain_class_counts_in_the_classwise_error():
    """The probabilities 1 and 0 are exact in float64 here, at both ends of the bins."""
    logits = np.array([[0.0, -800.0], [0.0, -800.0]])
    assert cal.classwise_ece(logits, [0, 1]) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("bins", EVERY_COUNT)
def test_there_are_as_many_bins_as_were_asked_for(bins):
    """Bin centres fall into distinct bins, and the two ends add no bin."""
    centres = (np.arange(bins) + 0.5) / bins
    values = np.concatenate([[0.0], centres, [1.0]])
    filled = cal.metrics.binned.binned_pairs(
        confidence=values, outcome=np.zeros(values.size), bins=bins
    )
    assert filled.count.size == bins
    expected = np.ones(bins)
    expected[0] += 1
    expected[-1] += 1
    np.testing.assert_array_equal(filled.count, expected)
    whole = cal.evaluate(logits_of([[0.5, 0.5]]), [0], bins=bins, metrics=["ece"], level=None)
    assert whole.bins.count.size == bins


@pytest.mark.parametrize("bins", [0, -1, 1.5, 15.0, "15", None])
def test_a_number_of_bins_that_is_none_is_refused(bins):
    for error in (cal.ece, cal.ada_ece, cal.mce, cal.debiased_ece):
        with pytest.raises(ValueError, match="bins must be a positive whole number"):
            error([0.5], [1], bins=bins)


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


# Equal mass


def test_ties_are_not_split_whatever_the_order_of_the_labels(rng):
    """1000 confidences of 0.7, 70 % right: the error is 0 in every order."""
    outcome = np.repeat([1, 0], [700, 300])
    for order in (outcome, outcome[::-1], rng.permutation(outcome)):
        assert cal.ada_ece(confidence=[0.7] * 1000, outcome=order) == pytest.approx(0, abs=1e-12)


def test_the_order_of_rows_does_not_change_an_equal_mass_error(rng):
    confidence = rng.choice([0.2, 0.5, 0.5, 0.7, 0.9], 999)
    outcome = rng.random(999) < confidence**2
    expected = cal.ada_ece(confidence=confidence, outcome=outcome)
    for order in (np.arange(999)[::-1], np.lexsort([outcome, confidence]), rng.permutation(999)):
        found = cal.ada_ece(confidence=confidence[order], outcome=outcome[order])
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_large_tie_takes_one_bin_and_leaves_the_others_theirs():
    """Half of the rows tie at 0.6; the rest keep bins of their own on either side."""
    confidence = np.concatenate(
        [np.linspace(0.1, 0.5, 25), np.full(50, 0.6), np.linspace(0.7, 1, 25)]
    )
    edges = equal_mass_edges(confidence, 4)
    np.testing.assert_allclose(edges, [0, 0.5, 0.6, 1])
    np.testing.assert_array_equal(fill(confidence, confidence, edges).count, [25, 50, 25])


@pytest.mark.parametrize("bins", [5, 6, 15, 1000])
def test_more_bins_than_examples_put_each_example_into_its_own(bins):
    confidence, outcome = np.array([0.1, 0.35, 0.4, 0.8, 0.99]), np.array([0, 1, 0, 1, 1])
    expected = np.abs(confidence - outcome).mean()
    assert cal.ada_ece(confidence=confidence, outcome=outcome, bins=bins) == pytest.approx(
        expected, abs=1e-12
    )
    assert math.isfinite(cal.ece(confidence=confidence, outcome=outcome, bins=bins))


def test_one_example_is_enough():
    names = ["ece", "ada_ece", "classwise_ece", "ks", "smce", "smooth_ece"]
    found = cal.evaluate(logits_of([[0.8, 0.2]]), [0], metrics=names, level=None)
    for name in names:
        assert found[name].value == pytest.approx(0.2, abs=1e-3), name


def test_equal_mass_bins_hold_equally_many_distinct_values(rng):
    confidence = rng.permutation(np.linspace(0.01, 0.99, 150))
    edges = equal_mass_edges(confidence, 15)
    np.testing.assert_array_equal(fill(confidence, confidence, edges).count, [10] * 15)


# Many samples


def doubled(value, times):
    for _ in range(times):
        value = value + value
    return value


def test_counts_beyond_the_integers_of_float32_stay_exact():
    """Two bins, each off by 0.2, with 2**36 times 500 examples; float32 counts end at 2**24."""
    confidence = np.repeat([0.7, 0.9], 500)
    outcome = np.concatenate([np.arange(500) % 2, np.arange(500) % 10 < 7])
    once = fill(confidence, outcome.astype(np.float64), uniform_edges(15))
    many = doubled(once, 36)
    assert many.count.dtype == np.int64
    assert int(many.count.sum()) == 1000 * 2**36
    assert np.abs(many.gap).sum() == pytest.approx(0.2, abs=1e-12)
    one_more = many + fill(np.array([0.7]), np.array([1.0]), uniform_edges(15))
    assert int(one_more.count.sum()) == 1000 * 2**36 + 1


def test_a_stream_beyond_the_integers_of_float32_gives_the_error_of_its_start():
    """Every figure of an accumulator merged with itself 30 times is that of the first batch."""
    probs = np.array([[0.7, 0.3], [0.9, 0.1]])[np.arange(1000) % 2]
    labels = np.where(np.arange(1000) // 2 % 10 < np.array([5, 7])[np.arange(1000) % 2], 0, 1)
    stream = cal.Accumulator(level=None).update(logits_of(probs), labels)
    start = {name: found.value for name, found in stream.compute().items()}
    assert start["ece"] == pytest.approx(0.2, abs=1e-12)
    for _ in range(30):
        other = stream.like().merge(stream)
        stream.merge(other)
    found = stream.compute()
    assert found.n == 1000 * 2**30
    for name, value in start.items():
        assert found[name].value == pytest.approx(value, abs=1e-12), name


def test_a_million_equal_rows_do_not_drift():
    """Float32 sums of 0.8 are off by 1 % after a million of them."""
    confidence = np.full(1_000_000, 0.8)
    outcome = np.arange(1_000_000) % 5 < 4
    assert cal.ece(confidence=confidence, outcome=outcome) == pytest.approx(0, abs=1e-9)
    single = torch.full((1_000_000,), 0.8)
    assert cal.ece(confidence=single, outcome=outcome) == pytest.approx(
        float(single[0].double()) - 0.8, abs=1e-9
    )


# NaN, infinities, masks


def takes_logits():
    """Everything public that takes logits and labels."""
    functions: dict[str, Any] = {name: metric.compute for name, metric in cal.METRICS.items()}
    functions["per_class_ece"] = cal.metrics.per_class_ece
    functions["evaluate"] = lambda logits, labels: cal.evaluate(logits, labels, level=None)
    functions["update"] = lambda logits, labels: cal.Accumulator().update(logits, labels)
    return functions


BAD = {
    "NaN": ([0.0, math.nan, 1.0], "has NaN"),
    "+inf": ([0.0, math.inf, 1.0], r"has \+inf"),
    "nothing possible": ([-math.inf] * 3, "-inf in every class"),
    "answer masked": ([0.0, 1.0, -math.inf], "-inf at its own label 2"),
}


@pytest.mark.parametrize("name", takes_logits())
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", [np.float16, np.float64, torch.float32, torch.bfloat16])
def test_a_row_without_a_softmax_or_a_likelihood_is_refused_by_its_number(name, bad, kind):
    values, message = BAD[bad]
    rows = np.zeros((40, 3))
    rows[37] = values
    logits = torch.tensor(rows, dtype=kind) if isinstance(kind, torch.dtype) else rows.astype(kind)
    with pytest.raises(ValueError, match=f"row 37 .*{message}"):
        takes_logits()[name](logits, np.full(40, 2))


@pytest.mark.parametrize("bad", BAD)
def test_an_ignored_row_may_hold_anything(rng, bad):
    logits, labels = rng.normal(size=(40, 3)), rng.integers(0, 3, 40)
    kept = np.arange(40) != 37
    expected = cal.evaluate(logits[kept], labels[kept], level=None)
    logits[37], labels[37] = BAD[bad][0], -100
    found = cal.evaluate(logits, labels, level=None)
    assert found.n == 39
    for name in found:
        assert found[name].value == pytest.approx(expected[name].value, abs=1e-12), name


@pytest.mark.parametrize(
    "function",
    [cal.ece, cal.ada_ece, cal.mce, cal.ks, cal.smce, cal.smooth_ece, cal.auroc, cal.aurc],
)
def test_pairs_that_are_not_numbers_are_refused(function):
    with pytest.raises(ValueError, match="confidence must be"):
        function([0.5, math.nan], [1, 0])
    with pytest.raises(ValueError, match="outcome must be"):
        function([0.5, 0.5], [1, math.nan])
    with pytest.raises(ValueError, match="weight must be"):
        function([0.5, 0.5], [1, 0], weight=[1, math.nan])


def test_masked_classes_are_as_good_as_absent(rng):
    """The top-3 of 50 classes: the other logits are -inf, and nothing but class-wise changes."""
    small = rng.normal(size=(300, 3))
    labels = rng.integers(0, 3, 300)
    masked = np.full((300, 50), -np.inf)
    masked[:, 10:13] = small
    expected = cal.evaluate(small, labels, level=None)
    for logits in (masked, torch.tensor(masked), torch.tensor(masked).float()):
        found = cal.evaluate(logits, labels + 10, level=None)
        for name in expected:
            scale = 3 / 50 if name == "classwise_ece" else 1
            assert found[name].value == pytest.approx(scale * expected[name].value, abs=1e-6), name


def test_a_masked_class_differs_from_a_very_unlikely_one_only_in_the_error(rng):
    """Replacing -inf by -1e4 moves no figure, so a mask is not an outlier."""
    logits, labels = rng.normal(size=(100, 4)), rng.integers(0, 3, 100)
    results = []
    for low in (-np.inf, -1e4):
        logits[:, 3] = low
        results.append(cal.evaluate(logits, labels, level=None))
    for name in results[0]:
        assert results[0][name].value == pytest.approx(results[1][name].value, abs=1e-12), name


# Classes come from the logits


def test_classes_without_a_label_count_as_classes(rng):
    logits, labels = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    found = cal.evaluate(logits, labels)
    assert found.classes == 3
    assert cal.metrics.per_class_ece(logits, labels).shape == (3,)
    # what is claimed for class 2 never happens
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert cal.metrics.per_class_ece(logits, labels)[2] == pytest.approx(
        probs[:, 2].mean(), abs=1e-12
    )


def test_the_classwise_error_is_a_mean_over_classes_and_not_a_sum(rng):
    logits, labels = rng.normal(size=(200, 5)), rng.integers(0, 5, 200)
    per_class = cal.metrics.per_class_ece(logits, labels)
    assert cal.classwise_ece(logits, labels) == pytest.approx(per_class.sum() / 5, abs=1e-12)


@pytest.mark.parametrize("average", ["mean", "prevalence"])
def test_a_threshold_that_leaves_nothing_gives_no_error(average):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cal.classwise_ece(np.zeros((4, 3)), [0, 1, 2, 0], threshold=0.5, average=average)
    assert math.isnan(found)


def test_every_label_the_same_is_no_trouble(rng):
    found = cal.evaluate(rng.normal(size=(100, 3)), np.zeros(100, dtype=int))
    assert math.isfinite(found["ece"].value)
    assert math.isfinite(found["classwise_ece"].value)


@pytest.mark.parametrize("label", [3, -1, 255])
def test_a_label_that_is_no_class_is_refused(label):
    with pytest.raises(ValueError, match=rf"labels must be in \[0, 3\).*got {label} at row 1"):
        cal.evaluate(np.zeros((2, 3)), [0, label])


# Logits are never taken for probabilities


def test_scores_between_zero_and_one_are_logits():
    """Softmax of (1, 0) is 0.731, whatever the scores look like."""
    confidence, _ = cal.top_label([[1.0, 0.0], [0.5, 0.5]], [0, 0])
    np.testing.assert_allclose(confidence, [1 / (1 + math.exp(-1)), 0.5])


@pytest.mark.parametrize("row", [[9.0, -9.0, 0.0], [0.4, 0.3, 0.3], [-800.0, 0.0, 5.0]])
def test_one_more_row_does_not_change_the_others(rng, row):
    logits = rng.random((50, 3))
    labels = rng.integers(0, 3, 50)
    before = cal.top_label(logits, labels)
    after = cal.top_label(np.vstack([logits, row]), np.append(labels, 0))
    np.testing.assert_array_equal(after.confidence[:50], before.confidence)
    np.testing.assert_array_equal(after.outcome[:50], before.outcome)


def test_probabilities_come_in_by_name_only(rng):
    probs = rng.dirichlet(np.ones(4), 300)
    labels = rng.integers(0, 4, 300)
    as_probs = cal.evaluate(probs=probs, labels=labels, level=None)
    as_logs = cal.evaluate(np.log(probs), labels, level=None)
    with pytest.warns(UserWarning, match="look like probabilities"):  # told, not guessed
        as_logits = cal.evaluate(probs, labels, level=None)
    for name in as_probs:
        assert as_probs[name].value == pytest.approx(as_logs[name].value, abs=1e-9), name
    assert as_probs["nll"].value == pytest.approx(-np.log(probs[np.arange(300), labels]).mean())
    assert abs(as_probs["ece"].value - as_logits["ece"].value) > 0.05


def test_logits_and_probs_together_are_refused():
    both = np.array([[0.4, 0.6]])
    with pytest.raises(TypeError, match="either logits or probs are wanted"):
        cal.evaluate(both, [1], probs=both)
    with pytest.raises(TypeError, match="either logits or probs are wanted"):
        cal.evaluate(labels=[1])


@pytest.mark.parametrize("probs", [[[0.4, 0.7]], [[2.0, -1.0]], [[math.nan, 1.0]], [[5.0, 3.0]]])
def test_probs_that_are_none_are_refused(probs):
    with pytest.raises(ValueError, match="probs must"):
        cal.evaluate(probs=np.array(probs), labels=[0])


def test_a_probability_of_zero_is_floored_with_a_warning():
    probs = np.array([[1.0, 0.0], [0.5, 0.5]], dtype=np.float32)
    with pytest.warns(UserWarning, match="1 probabilities are exactly 0"):
        found = cal.evaluate(probs=probs, labels=[1, 0], level=None)
    assert found["ece"].value == pytest.approx((1 + 0.5) / 2, abs=1e-12)
    floor = float(np.finfo(np.float32).smallest_subnormal) / 2
    assert found["nll"].value == pytest.approx((math.log(2) - math.log(floor)) / 2)


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.float16, 2.0**-25),
        (torch.bfloat16, 2.0**-134),
        (torch.float32, 2.0**-150),
        (torch.float64, math.ulp(0.0)),  # half of which is no number
    ],
)
@pytest.mark.parametrize("column", [False, True])
def test_the_floor_of_a_probability_is_half_the_smallest_number_of_its_dtype(dtype, floor, column):
    probs = torch.tensor([0.0] if column else [[1.0, 0.0]], dtype=dtype)
    with pytest.warns(UserWarning, match="1 probabilities are exactly 0"):
        found = cal.evaluate(probs=probs, labels=[1], metrics=["nll"], level=None)
    assert found["nll"].value == pytest.approx(-math.log(floor))


def test_a_probability_below_the_normal_numbers_is_kept():
    smallest = np.finfo(np.float32).smallest_subnormal
    probs = np.array([[1.0, smallest]], dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cal.evaluate(probs=probs, labels=[1], metrics=["nll"], level=None)
    assert found["nll"].value == pytest.approx(149 * math.log(2))


def test_confidences_that_are_logits_are_refused():
    with pytest.raises(ValueError, match=r"confidence must be in \[0, 1\], got 2"):
        cal.ece(confidence=[2.0, 0.5], outcome=[1, 0])


def test_class_labels_are_not_outcomes():
    with pytest.raises(ValueError, match="outcome must be 0 or 1"):
        cal.ece(confidence=[0.9, 0.5], outcome=[2, 0])


# The estimand: one logit, two classes, many tags


def test_one_logit_z_stands_for_zero_and_z():
    """Not for (-z, z), which would be sigmoid(2 z)."""
    z = np.array([-3.0, 0.0, 2.0])
    expected = 1 / (1 + np.exp(-z))
    np.testing.assert_allclose(cal.metrics.positive_class(z, [0, 1, 1]).confidence, expected)
    both = np.stack([np.zeros(3), z], -1)
    np.testing.assert_allclose(cal.metrics.positive_class(both, [0, 1, 1]).confidence, expected)
    found = cal.evaluate(z, [0, 1, 1], estimand="binary", level=None)
    assert found["nll"].value == pytest.approx(
        -np.log([1 - expected[0], expected[1], expected[2]]).mean()
    )


def test_a_binary_problem_has_two_estimands_and_the_caller_says_which():
    """P(y = 1) is 0.2 and 0.8, and y = 1 both times: one answer of confidence 0.8 is wrong."""
    z, labels = logits_of([0.2 / 0.8, 0.8 / 0.2]), [1, 1]
    np.testing.assert_allclose(cal.metrics.positive_class(z, labels).confidence, [0.2, 0.8])
    np.testing.assert_array_equal(cal.metrics.positive_class(z, labels).outcome, [True, True])
    as_event = cal.evaluate(z, labels, estimand="binary", level=None)
    assert as_event["ece"].value == pytest.approx((0.8 + 0.2) / 2, abs=1e-12)
    np.testing.assert_allclose(cal.top_label(z, labels).confidence, [0.8, 0.8])
    np.testing.assert_array_equal(cal.top_label(z, labels).outcome, [False, True])
    as_answer = cal.evaluate(z, labels, level=None)
    assert as_answer["ece"].value == pytest.approx(0.8 - 0.5, abs=1e-12)


def test_the_top_label_error_looks_at_one_entry_of_each_row(rng):
    """Flattened over all classes, the same rows give another and smaller number."""
    probs = rng.dirichlet(np.ones(10), 500)
    labels = rng.integers(0, 10, 500)
    top = cal.ece(np.log(probs), labels)
    flat = cal.ece(confidence=probs, outcome=np.eye(10)[labels])
    assert top == pytest.approx(
        cal.ece(confidence=probs.max(-1), outcome=probs.argmax(-1) == labels), abs=1e-12
    )
    assert flat < top / 2


# Precision of the input


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_measured_as_their_values_in_float64(rng, dtype):
    logits = torch.tensor(3 * rng.normal(size=(2000, 20))).to(dtype)
    labels = rng.integers(0, 20, 2000)
    found = cal.evaluate(logits, labels, level=None)
    expected = cal.evaluate(logits.double().numpy(), labels, level=None)
    for name in expected:
        assert found[name].value == expected[name].value, name


def test_low_precision_logits_do_not_round_the_confidence():
    """In bfloat16 a softmax would be a multiple of 1/256 here; the pairs have all digits."""
    logits = torch.tensor([[3.0, 0.0, -1.0]], dtype=torch.bfloat16)
    confidence, _ = cal.top_label(logits, [0])
    assert confidence.dtype == np.float64
    expected = math.exp(3) / (math.exp(3) + 1 + math.exp(-1))
    assert confidence[0] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_confidences_are_counted_and_added_up_exactly(dtype):
    """Past 256 bfloat16 has no odd numbers, and float16 ends at 65504."""
    confidence = torch.full((80_001,), 0.75, dtype=dtype)
    outcome = (torch.arange(80_001) % 2 == 0).to(dtype)
    assert cal.ece(confidence=confidence, outcome=outcome) == pytest.approx(
        0.75 - 40_001 / 80_001, abs=1e-12
    )


def test_confidences_near_one_do_not_become_one():
    """1 - 1e-12 is 1 in float32."""
    confidence, _ = cal.top_label([[0.0, math.log(1e-12)]], [0])
    assert 0 < 1 - confidence[0] < 2e-12


def test_extreme_logits_are_stable():
    found = cal.evaluate(np.array([[1e4, 0.0], [0.0, 1e4]]), [0, 0], level=None)
    assert found["nll"].value == pytest.approx(5000)
    assert found["ece"].value == pytest.approx(0.5)


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


# Sums that add


def test_bins_of_different_edges_do_not_add():
    with pytest.raises(ValueError, match="different edges"):
        Bins.empty(uniform_edges(10)) + Bins.empty(uniform_edges(15))


def test_batches_of_any_size_give_one_number(rng):
    """The mean of the errors of batches is larger: noise does not cancel within a batch."""
    logits = rng.normal(size=(1000, 4))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    whole = cal.ece(logits, labels)
    parts = []
    for size in (1, 7, 100, 1000):
        stream = cal.Accumulator(level=None)
        for start in range(0, 1000, size):
            rows = slice(start, start + size)
            stream.update(logits[rows], labels[rows])
            if size == 100:
                parts.append(cal.ece(logits[rows], labels[rows]))
        assert stream.compute()["ece"].value == pytest.approx(whole, abs=1e-12)
    assert np.mean(parts) > 2 * whole
