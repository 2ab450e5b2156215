"""Reduction of logits to pairs against its definition, whatever the blocks and threads."""

import math
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp, softmax

import calibrant as cal
from calibrant._core import chunks
from tests.support.named_predictions import every, pairs_of, predictions
from tests.support.simulate import drawn

INF = math.inf


@pytest.fixture
def masked(rng):
    """Logits with -inf at some classes, never all and never the label."""
    logits, labels = drawn(rng, 300, 6)
    hidden = rng.random(logits.shape) < 0.3
    hidden[np.arange(300), labels] = False
    return np.where(hidden, -INF, logits), labels


# Pairs


@every
def test_top_label_pairs_are_the_largest_softmax_and_whether_it_is_right(name):
    logits, labels = predictions(name)
    confidence, outcome = pairs_of(logits, labels)
    found = cal.top_label(logits, labels)
    np.testing.assert_allclose(found.confidence, confidence, rtol=1e-14)
    np.testing.assert_array_equal(found.outcome, outcome)


@pytest.mark.parametrize("classes", [3, 10, 100, 1024])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_with_the_same_logits_in_another_order_are_ties(classes, dtype, small_blocks):
    rng = np.random.default_rng(classes)
    rows = rng.integers(0, 9, size=(4, classes)) / rng.choice([1, 7.0], size=(4, 1))
    logits = rng.permuted(np.repeat(rows, 50, axis=0).astype(dtype), axis=1)
    labels = rng.integers(classes, size=200)
    for values in (logits, torch.from_numpy(logits), logits[::-1], logits.astype(np.float64)):
        assert len(np.unique(cal.top_label(values, labels).confidence)) == 4
    order = np.argsort(-logits, axis=1, kind="stable")
    ranked = np.take_along_axis(logits, order, 1), (order == labels[:, None]).argmax(1)
    assert cal.auroc(logits, labels) == cal.auroc(*ranked) or np.isnan(cal.auroc(*ranked))


@pytest.mark.parametrize("classes", [2, 3, 1000, 1024, 1025, 5000])
def test_equal_and_extreme_logits_of_any_number_of_classes(classes):
    logits = np.zeros((4, classes))
    logits[1, 1:] = -np.inf
    logits[2, 0], logits[3, 0] = 800.0, 30.0
    found = cal.top_label(logits, np.zeros(4, int)).confidence
    last = 1 / (1 + (classes - 1) * math.exp(-30))
    np.testing.assert_allclose(found, [1 / classes, 1.0, 1.0, last], rtol=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_one_vs_rest_is_the_softmax_of_the_class(rng, k):
    logits, labels = drawn(rng, 200, 4)
    labels[::7] = -100
    kept = labels != -100
    found = cal.metrics.one_vs_rest(logits, labels, k=k)
    np.testing.assert_allclose(found.confidence, softmax(logits, -1)[kept, k], rtol=1e-13)
    np.testing.assert_array_equal(found.outcome, labels[kept] == k)


def test_pairs_of_images_have_their_classes_where_class_dim_says(rng):
    logits, labels = rng.normal(size=(3, 4, 5, 2)), rng.integers(2, size=(3, 4, 5))
    seen, marked = np.where(labels == 0, -100, labels), np.where(labels == 0, 255, labels)
    layout: Any = {"class_dim": 1, "ignore_index": 255}
    images = np.moveaxis(logits, -1, 1)
    for reduce in (
        cal.top_label,
        cal.metrics.positive_class,
        partial(cal.metrics.one_vs_rest, k=0),
    ):
        for found, wanted in zip(
            reduce(images, marked, **layout), reduce(logits, seen), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)


def test_one_vs_rest_of_one_logit_has_two_classes(rng):
    odds, labels = rng.normal(size=50), rng.integers(0, 2, 50)
    zero, one = (cal.metrics.one_vs_rest(odds, labels, k=k) for k in (0, 1))
    np.testing.assert_allclose(one.confidence, expit(odds))
    np.testing.assert_allclose(zero.confidence, expit(-odds))
    np.testing.assert_array_equal(zero.outcome, labels == 0)
    np.testing.assert_array_equal(one.outcome, labels == 1)


@pytest.mark.parametrize("k", [-1, 4])
def test_one_vs_rest_needs_a_class(k):
    with pytest.raises(ValueError, match=rf"k must be a class in \[0, 4\), got {k}"):
        cal.metrics.one_vs_rest(np.zeros((2, 4)), [0, 1], k=k)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_the_positive_class_is_the_sigmoid_of_one_logit_and_the_softmax_of_two(rng, kind):
    odds, labels = 3 * rng.normal(size=200), rng.integers(0, 2, 200)
    labels[3] = -100
    kept = labels != -100
    both = rng.normal(size=(200, 1)) + np.stack([np.zeros(200), odds], -1)
    for logits in (odds, both):
        found = cal.metrics.positive_class(kind(logits), kind(labels))
        np.testing.assert_allclose(found.confidence, expit(odds)[kept], rtol=1e-12)
        np.testing.assert_array_equal(found.outcome, labels[kept] == 1)


def test_one_column_of_logits_is_not_multilabel():
    with pytest.raises(ValueError, match=r'multilabel logits must be .* estimand="binary"'):
        cal.metrics.multilabel([0.5, -0.5], [1, 0])


@pytest.mark.parametrize("shape", [(60, 5), (3, 20, 5)])
def test_multilabel_is_the_sigmoid_of_every_cell(rng, shape):
    logits, labels = 3 * rng.normal(size=shape), rng.integers(0, 2, shape)
    labels[0] = -100
    kept = labels != -100
    found = cal.metrics.multilabel(logits, labels)
    np.testing.assert_allclose(found.confidence, expit(logits)[kept], rtol=1e-12)
    np.testing.assert_array_equal(found.outcome, labels[kept] == 1)


def test_top_label_of_one_logit_is_the_likelier_class(rng):
    odds, labels = rng.normal(size=100), rng.integers(0, 2, 100)
    found = cal.top_label(odds, labels)
    np.testing.assert_allclose(found.confidence, expit(np.abs(odds)))
    np.testing.assert_array_equal(found.outcome, (odds > 0) == (labels == 1))


def test_the_first_of_equal_logits_is_the_prediction():
    logits = np.zeros((5, 70))
    logits[:, [3, 4, 60]] = 1
    found = cal.top_label(logits, [3, 4, 60, 0, 3])
    assert found.outcome.tolist() == [True, False, False, False, True]
    assert cal.accuracy(logits, [3, 4, 60, 0, 3]) == 0.4
    assert cal.accuracy([0.0, 0.0], [0, 1]) == 0.5


def test_pairs_come_in_the_order_of_the_rows_as_float64_and_bool(rng):
    logits, labels = drawn(rng, 20, 3)
    for found in (cal.top_label(logits, labels), cal.metrics.one_vs_rest(logits, labels, k=0)):
        assert found.confidence.dtype == np.float64
        assert found.outcome.dtype == np.bool_
        assert isinstance(found, cal.metrics.Pairs)
    reverse = cal.top_label(logits[::-1], labels[::-1])
    np.testing.assert_array_equal(
        reverse.confidence[::-1], cal.top_label(logits, labels).confidence
    )


def test_scores_between_zero_and_one_are_logits():
    """Softmax of (1, 0) is 0.731, whatever the scores look like."""
    confidence, _ = cal.top_label([[1.0, 0.0], [0.5, 0.5]], [0, 0])
    np.testing.assert_allclose(confidence, [1 / (1 + math.exp(-1)), 0.5])


def test_low_precision_logits_do_not_round_the_confidence():
    """In bfloat16 a softmax would be a multiple of 1/256 here; the pairs have all digits."""
    logits = torch.tensor([[3.0, 0.0, -1.0]], dtype=torch.bfloat16)
    confidence, _ = cal.top_label(logits, [0])
    assert confidence.dtype == np.float64
    expected = math.exp(3) / (math.exp(3) + 1 + math.exp(-1))
    assert confidence[0] == pytest.approx(expected, abs=1e-15)


def test_confidences_near_one_do_not_become_one():
    """1 - 1e-12 is 1 in float32."""
    confidence, _ = cal.top_label([[0.0, math.log(1e-12)]], [0])
    assert 0 < 1 - confidence[0] < 2e-12


# Estimands


def test_every_cell_of_a_multilabel_problem_is_an_example(rng):
    logits = rng.normal(size=(150, 4))
    labels = (rng.random((150, 4)) < expit(2 * logits)).astype(int)
    labels[::9, 2] = -100
    kept = labels != -100
    probs, happened = expit(logits)[kept], labels[kept]
    found = cal.evaluate(logits, labels, estimand="multilabel", level=None)
    assert (found.n, found.classes) == (kept.sum(), 4)
    assert found.describe().startswith(f"{kept.sum()} labels of 4 tags; calibration of every tag")
    assert found["ece"].value == pytest.approx(
        cal.ece(confidence=probs, outcome=happened), abs=1e-12
    )
    assert found["accuracy"].value == pytest.approx(((probs > 0.5) == happened).mean())
    loss = -np.log(np.where(happened, probs, 1 - probs))
    assert found["nll"].value == pytest.approx(loss.mean())
    assert found["brier"].value == pytest.approx(2 * ((probs - happened) ** 2).mean())
    per_tag = []
    for t in range(4):
        of_tag = kept[:, t]
        per_tag.append(cal.ece(confidence=expit(logits[of_tag, t]), outcome=labels[of_tag, t]))
    assert found["classwise_ece"].value == pytest.approx(np.mean(per_tag), abs=1e-12)


def test_the_binary_estimand_changes_the_event_and_not_the_scores(rng):
    logits, labels = drawn(rng, 400, 2, 1.5)
    top = cal.evaluate(logits, labels, estimand="top_label", level=None)
    event = cal.evaluate(logits, labels, estimand="binary", level=None)
    probs = softmax(logits, -1)[:, 1]
    assert event["ece"].value == pytest.approx(
        cal.ece(confidence=probs, outcome=labels == 1), abs=1e-12
    )
    assert event["auroc"].value == pytest.approx(
        cal.auroc(confidence=probs, outcome=labels == 1), abs=1e-12
    )
    for name in ("accuracy", "nll", "brier", "classwise_ece"):
        assert event[name].value == pytest.approx(top[name].value, abs=1e-12), name
    assert "calibration of P(y = 1)" in event.describe()


def test_a_binary_problem_has_two_estimands_and_the_caller_says_which():
    """P(y = 1) is 0.2 and 0.8, and y = 1 both times: one answer of confidence 0.8 is wrong."""
    z, labels = np.log([0.2 / 0.8, 0.8 / 0.2]), [1, 1]
    np.testing.assert_allclose(cal.metrics.positive_class(z, labels).confidence, [0.2, 0.8])
    np.testing.assert_array_equal(cal.metrics.positive_class(z, labels).outcome, [True, True])
    as_event = cal.evaluate(z, labels, estimand="binary", level=None)
    assert as_event["ece"].value == pytest.approx((0.8 + 0.2) / 2, abs=1e-12)
    np.testing.assert_allclose(cal.top_label(z, labels).confidence, [0.8, 0.8])
    np.testing.assert_array_equal(cal.top_label(z, labels).outcome, [False, True])
    as_answer = cal.evaluate(z, labels, estimand="top_label", level=None)
    assert as_answer["ece"].value == pytest.approx(0.8 - 0.5, abs=1e-12)


# Masked classes


def test_masked_classes_have_probability_zero(masked):
    logits, labels = masked
    probs = softmax(logits, -1)
    found = cal.top_label(logits, labels)
    np.testing.assert_allclose(found.confidence, probs.max(-1), rtol=1e-13)
    np.testing.assert_array_equal(found.outcome, probs.argmax(-1) == labels)
    np.testing.assert_allclose(
        cal.metrics.one_vs_rest(logits, labels, k=2).confidence, probs[:, 2], rtol=1e-13
    )
    loss = logsumexp(logits, -1) - logits[np.arange(300), labels]
    assert cal.nll(logits, labels) == pytest.approx(loss.mean(), abs=1e-12)
    brier = ((probs - np.eye(6)[labels]) ** 2).sum(-1).mean()
    assert cal.brier(logits, labels) == pytest.approx(brier, abs=1e-12)


def test_log_odds_of_minus_infinity_are_certainty():
    found = cal.metrics.positive_class([-INF, 0.0], [0, 1])
    np.testing.assert_array_equal(found.confidence, [0, 0.5])
    assert cal.nll([-INF, 0.0], [0, 1]) == pytest.approx(math.log(2) / 2)


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


# Margins


@pytest.mark.parametrize("shape", [(40, 5), (4, 10, 5), (40, 2)])
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_a_margin_is_the_largest_logit_less_the_second(rng, shape, kind):
    logits = rng.normal(size=shape)
    ordered = np.sort(logits, axis=-1)
    found = cal.metrics.margins(kind(logits))
    assert found.shape == shape[:-1]
    np.testing.assert_allclose(found, ordered[..., -1] - ordered[..., -2], rtol=1e-14)


def test_margins_of_masked_single_and_one_logit_rows(masked):
    logits, _ = masked
    ordered = np.sort(logits, axis=-1)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(cal.metrics.margins(logits), ordered[:, -1] - ordered[:, -2])
    assert cal.metrics.margins([[1.0, -INF, -INF]]) == INF
    np.testing.assert_array_equal(cal.metrics.margins(np.zeros((3, 1))), [INF] * 3)
    np.testing.assert_array_equal(cal.metrics.margins([-2.0, 0.5]), [2, 0.5])


def test_margins_of_no_rows_are_no_margins():
    assert cal.metrics.margins(np.zeros((0, 4))).shape == (0,)


def test_margins_in_small_blocks_are_the_same(rng, small_blocks):
    logits = rng.normal(size=(50, 7))
    ordered = np.sort(logits, axis=-1)
    np.testing.assert_allclose(cal.metrics.margins(logits), ordered[:, -1] - ordered[:, -2])


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [INF, INF, 0.0], [-INF, -INF, -INF]])
def test_a_row_without_a_margin_is_refused_by_its_number(row):
    logits = np.zeros((5, 3))
    logits[3] = row
    with pytest.raises(ValueError, match=r"logits must be finite.*row 3"):
        cal.metrics.margins(logits)


@pytest.mark.parametrize("logits", [[[0.0, 0.0], [INF, 0.0]], [0.0, INF]])
def test_one_logit_of_plus_infinity_has_no_margin(logits):
    with pytest.raises(ValueError, match=r"logits must be finite.*row 1"):
        cal.metrics.margins(logits)


# Blocks and threads


def whole(logits, labels, **options):
    return {
        name: estimate.value
        for name, estimate in cal.evaluate(logits, labels, level=None, **options).items()
    }


@pytest.mark.parametrize(("count", "block"), [(1, 7), (2, 64), (5, 1)])
def test_tiny_blocks_on_any_number_of_threads_agree(rng, monkeypatch, threads, count, block):
    logits, labels = drawn(rng, 250, 5, 1.5)
    labels[rng.random(250) < 0.2] = -100
    labels[:60] = -100  # whole blocks without a label
    weight = rng.exponential(size=250)
    expected = whole(logits, labels, sample_weight=weight)
    pairs = cal.top_label(logits, labels)
    monkeypatch.setitem(chunks.CHUNK_SIZE, "cpu", block)
    threads(count)
    for shaped in (logits, torch.tensor(logits), logits.reshape(10, 25, 5)):
        shape = shaped.shape[:-1]
        found = whole(shaped, labels.reshape(shape), sample_weight=weight.reshape(shape))
        assert found == pytest.approx(expected, abs=1e-12, rel=0)
    np.testing.assert_array_equal(cal.top_label(logits, labels).confidence, pairs.confidence)
    np.testing.assert_array_equal(cal.top_label(logits, labels).outcome, pairs.outcome)


@pytest.mark.parametrize("shape", [(6, 4, 10, 3), (24, 1, 10, 3), (1, 240, 3)])
def test_blocks_that_cut_across_leading_dimensions_keep_every_row(rng, small_blocks, shape):
    logits, labels = drawn(rng, 240, 3)
    moved = np.moveaxis(np.ascontiguousarray(np.moveaxis(logits.reshape(shape), -1, 1)), 1, -1)
    for shaped in (logits.reshape(shape), moved, torch.from_numpy(moved)):
        found = cal.top_label(shaped, labels.reshape(shape[:-1]))
        np.testing.assert_allclose(found.confidence, softmax(logits, -1).max(-1), rtol=1e-13)
        np.testing.assert_array_equal(found.outcome, logits.argmax(-1) == labels)


def test_tags_keep_their_columns_in_small_blocks(rng, small_blocks):
    logits = rng.normal(size=(40, 5)) + 2 * np.arange(5)
    labels = rng.integers(0, 2, (40, 5))
    found = cal.evaluate(logits, labels, estimand="multilabel", level=None)
    expected = np.mean(
        [cal.ece(confidence=expit(logits[:, t]), outcome=labels[:, t]) for t in range(5)]
    )
    assert found["classwise_ece"].value == pytest.approx(expected, abs=1e-12)


def test_fifty_thousand_classes_are_measured_by_the_definitions(rng):
    logits, labels = drawn(rng, 60, 50_000, scale=4)
    probs = softmax(logits, -1)
    found = whole(logits, labels)
    top = probs.max(-1), probs.argmax(-1) == labels
    assert found["ece"] == pytest.approx(cal.ece(confidence=top[0], outcome=top[1]), abs=1e-12)
    assert found["nll"] == pytest.approx(-np.log(probs[np.arange(60), labels]).mean(), abs=1e-9)
    happened = np.zeros_like(probs)
    happened[np.arange(60), labels] = 1
    assert found["brier"] == pytest.approx(((probs - happened) ** 2).sum(-1).mean(), abs=1e-12)
    cell = np.ceil(probs * 15).astype(int) - 1 + 15 * np.arange(50_000)
    gaps = np.bincount(cell.ravel(), (probs - happened).ravel(), 15 * 50_000)
    assert found["classwise_ece"] == pytest.approx(np.abs(gaps).sum() / 60 / 50_000, abs=1e-15)


def counts():
    """Number of torch threads here, and in a thread that begins now."""
    with ThreadPoolExecutor(1) as pool:
        return torch.get_num_threads(), pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_torch_threads_is_put_back(rng, small_blocks, threads, count):
    threads(count)
    assert counts() == (count, count)
    logits, labels = drawn(rng, 100, 3)
    cal.evaluate(logits, labels, level=None)
    assert counts() == (count, count)
    logits[70, 1] = math.nan
    with pytest.raises(ValueError, match="row 70 has NaN"):
        cal.evaluate(logits, labels, level=None)
    assert counts() == (count, count)


# Bad rows


BAD = {"NaN": [math.nan, 0, 0], r"\+inf": [0, 0, INF], "-inf in every class": [-INF] * 3}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_bad_row_in_any_position_is_named(rng, small_blocks, threads, bad, count, dtype):
    threads(count)
    logits, labels = drawn(rng, 31, 3)
    labels[::3] = -100  # ignored rows count as positions
    for at in np.flatnonzero(labels >= 0):
        broken = torch.tensor(logits).to(dtype)
        broken[at] = torch.tensor(BAD[bad])
        for each in (broken, broken.numpy()) if dtype != torch.bfloat16 else (broken,):
            with pytest.raises(ValueError, match=rf"; row {at} has {bad}"):
                cal.nll(each, labels)


@pytest.mark.parametrize("count", [1, 4])
def test_the_first_of_several_bad_rows_is_named(rng, small_blocks, threads, count):
    threads(count)
    logits, labels = drawn(rng, 200, 3)
    for first in (0, 3, 60, 120, 197):
        broken = logits.copy()
        broken[first::2] = math.nan
        with pytest.raises(ValueError, match=f"; row {first} has NaN"):
            cal.evaluate(broken, labels, level=None)


def test_a_bad_row_of_a_sequence_is_named_by_its_place_among_all_rows(rng, small_blocks):
    logits, labels = drawn(rng, 60, 3)
    logits[37] = math.nan
    with pytest.raises(ValueError, match="; row 37 has NaN"):
        cal.evaluate(logits.reshape(5, 12, 3), labels.reshape(5, 12), level=None)
    with pytest.raises(ValueError, match="; row 37 has NaN"):
        cal.metrics.one_vs_rest(logits, labels, k=0)


def test_a_label_on_a_masked_class_is_named(masked, small_blocks):
    logits, labels = masked
    logits[211, labels[211]] = -INF
    with pytest.raises(
        ValueError, match=f"; row 211 has -inf at its own label {labels[211]}: a masked class"
    ):
        cal.evaluate(logits, labels, level=None)


def test_a_bad_log_odds_is_named():
    for value, message in ((math.nan, "NaN"), (INF, r"\+inf")):
        with pytest.raises(ValueError, match=f"; row 1 has {message}"):
            cal.metrics.positive_class([0.0, value], [0, 1])


def test_log_odds_that_exclude_their_label_are_not_called_impossible_in_every_class():
    with pytest.raises(ValueError, match="; row 1 has -inf at its own label 1"):
        cal.metrics.positive_class([0.0, -INF], [0, 1])


def test_values_too_far_apart_are_named():
    for low in (-1e9, -1.7e308):
        with pytest.raises(
            ValueError, match=re.escape(f"; row 0 has {low:.2g} at its own label 1, and 2: ")
        ):
            cal.nll([[2.0, low]], [1])


BAD_ROWS = {
    "NaN": ([0.0, math.nan, 1.0], "has NaN"),
    "+inf": ([0.0, math.inf, 1.0], r"has \+inf"),
    "nothing possible": ([-math.inf] * 3, "-inf in every class"),
    "answer masked": ([0.0, 1.0, -math.inf], "-inf at its own label 2"),
}


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("row", [[0.0, math.nan], [math.nan, 0.0]])
def test_nan_beside_either_of_two_labels_is_refused(row, label):
    for measure in (cal.ece, cal.nll):
        with pytest.raises(ValueError, match="row 1 has NaN"):
            measure([[0.0, 1.0], row], [label, label])


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_an_ignored_row_may_hold_anything(rng, bad):
    logits, labels = rng.normal(size=(40, 3)), rng.integers(0, 3, 40)
    kept = np.arange(40) != 37
    expected = cal.evaluate(logits[kept], labels[kept], level=None)
    logits[37], labels[37] = BAD_ROWS[bad][0], -100
    found = cal.evaluate(logits, labels, level=None)
    assert found.n == 39
    for name in found:
        assert found[name].value == pytest.approx(expected[name].value, abs=1e-12), name


# The forms of input: logits, probabilities or pairs


def test_reductions_take_probabilities_too(rng):
    logits, labels = drawn(rng, 50, 2)
    probs = torch.tensor(logits).softmax(-1).numpy()
    metrics = cal.metrics
    for reduce in (cal.top_label, metrics.positive_class):
        np.testing.assert_allclose(
            reduce(probs=probs, labels=labels).confidence, reduce(logits, labels).confidence
        )
    found = metrics.one_vs_rest(probs=probs, labels=labels, k=0)
    np.testing.assert_allclose(found.confidence, probs[:, 0])
    found = metrics.multilabel(probs=probs, labels=np.ones((50, 2), dtype=int))
    np.testing.assert_allclose(found.confidence, probs.ravel())


WRONG_CALLS: dict[str, Any] = {
    "nothing": ({}, "labels are missing"),
    "no labels": ({"logits": [[1.0, 0.0]]}, "labels are missing"),
    "no logits": ({"labels": [0]}, "pass either logits or probs=, got neither"),
    "both": ({"logits": [[1.0, 0.0]], "probs": [[1.0, 0.0]], "labels": [0]}, "got both"),
    "swapped": ({"logits": [0, 1], "labels": [[1.0, 0.0]] * 2}, "logits and labels are swapped"),
    "no outcome": ({"confidence": [0.9]}, "confidence= and outcome= go together"),
    "no confidence": ({"outcome": [1]}, "confidence= and outcome= go together"),
    "labels of pairs": (
        {"confidence": [0.9], "labels": [1]},
        "confidence= and outcome= go together",
    ),
    "three forms": (
        {"logits": [[1.0, 0.0]], "labels": [0], "confidence": [0.9], "outcome": [1]},
        "confidence= and outcome= stand alone",
    ),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_call_without_exactly_one_form_is_refused(call):
    arguments, message = WRONG_CALLS[call]
    for metric in (cal.ece, cal.auroc, cal.metrics.reliability):
        with pytest.raises(TypeError, match=message):
            metric(**arguments)


def test_pairs_are_not_positional():
    """(n,) floats are log-odds, never confidences."""
    assert cal.ece([0.9, 0.6], [1, 0]) == pytest.approx(
        cal.evaluate([0.9, 0.6], [1, 0], level=None)["ece"].value
    )
    assert cal.ece(confidence=[0.9, 0.6], outcome=[1, 0]) == pytest.approx(0.35)


@pytest.mark.parametrize("metric", [cal.ece, cal.nll, cal.classwise_ece, cal.top_label])
def test_probabilities_in_the_place_of_logits_are_told_of_once(metric, rng):
    """At the line of the caller, with the remedy; never guessed."""
    probs, labels = rng.dirichlet(np.ones(3), 50), rng.integers(0, 3, 50)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        metric(probs, labels)
        metric(probs[:, 1], labels % 2)  # (confidence, outcome), or P(y = 1)
        metric(np.log(probs), labels)
        metric(probs=probs, labels=labels)
        cal.metrics.roc_auc(probs[:, 1], labels % 2)  # the order of logits is that of probs
    assert [str(w.message).split(":")[1] for w in told] == [
        " every row is nonnegative and sums to one; if they are, pass them as probs=, or as "
        "confidence= with outcome=",
        " every number is between 0 and 1; if they are, pass them as probs=, or as confidence= "
        "with outcome=",
    ]
    assert all(w.filename == __file__ for w in told)


def test_the_negative_log_likelihood_of_floored_probabilities_warns():
    with pytest.warns(
        UserWarning, match="1 labels have a probability of 0, and so an infinite NLL"
    ):
        cal.nll(probs=[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], labels=[0, 0, -100])
    tags = np.array([[0.0, 1.0, 1.0], [0.5, 0.0, 1.0]])
    with pytest.warns(UserWarning, match="2 labels have"):
        cal.evaluate(probs=tags, labels=[[1, 1, 1], [0, -100, 0]], estimand="multilabel")


def test_zeros_of_other_classes_change_no_score_and_are_not_told_of():
    assert cal.nll(probs=[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], labels=[0, 2]) == pytest.approx(
        math.log(2) / 2
    )
    assert cal.evaluate(probs=[0.0, 1.0], labels=[0, 1], level=None)["nll"].value == 0


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


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.float16, 2.0**-25),
        (torch.bfloat16, 2.0**-134),
        (torch.float32, math.exp(-100)),
        (torch.float64, math.exp(-100)),
    ],
)
@pytest.mark.parametrize("column", [False, True])
def test_a_label_of_probability_zero_costs_what_its_dtype_says_or_100_nats(dtype, floor, column):
    probs = torch.tensor([0.0] if column else [[1.0, 0.0]], dtype=dtype)
    with pytest.warns(UserWarning, match="1 labels have a probability of 0"):
        found = cal.evaluate(probs=probs, labels=[1], metrics=["nll"], level=None)
    assert found["nll"].value == pytest.approx(-math.log(floor))


def test_a_probability_that_is_almost_zero_costs_as_much_as_zero():
    smallest = np.finfo(np.float32).smallest_subnormal
    probs = np.array([[1.0, smallest]], dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cal.evaluate(probs=probs, labels=[1], metrics=["nll"], level=None)
    assert found["nll"].value == pytest.approx(100)


@pytest.mark.parametrize("metric", ["ece", "ada_ece", "mce", "ks", "auroc", "aurc"])
@pytest.mark.parametrize("classes", [2, 4])
def test_probabilities_keep_their_ties_and_bin_edges(metric, classes):
    """The way through logarithms and a softmax moves 0.8, and parts equal ones."""
    rng = np.random.default_rng(3)
    tenths = rng.multinomial(10, rng.dirichlet(np.ones(classes)), 400)
    probs, labels = tenths / 10, rng.integers(0, classes, 400)
    stated, outcome = probs[:, 1], labels == 1
    if classes > 2 or metric in ("auroc", "aurc"):  # of answers
        stated, outcome = probs.max(-1), probs.argmax(-1) == labels
    wanted = cal.METRICS[metric].compute(confidence=stated, outcome=outcome)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zeros
        assert cal.METRICS[metric].compute(probs=probs, labels=labels) == wanted
        found = cal.evaluate(probs=probs, labels=labels, by=np.zeros(400, int), level=None)
    assert found[metric].value == pytest.approx(wanted, abs=1e-12)
    assert found.by["0"][metric].value == pytest.approx(wanted, abs=1e-12)


def test_probabilities_of_tags_and_of_one_class_are_as_stated():
    probs, labels = np.array([0.1, 0.7, 0.7, 0.3]), np.array([0, 1, 0, 1])
    np.testing.assert_array_equal(
        cal.metrics.positive_class(probs=probs, labels=labels).confidence, probs
    )
    cells = cal.metrics.multilabel(probs=probs.reshape(2, 2), labels=labels.reshape(2, 2))
    np.testing.assert_array_equal(cells.confidence, probs)
