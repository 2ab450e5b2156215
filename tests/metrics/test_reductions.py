"""The walk over the rows: pairs against their definitions, whatever the blocks and threads."""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp, softmax

import calibrant as cal
from calibrant._core import chunks as _walk
from calibrant.data import shards
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


@pytest.mark.parametrize("k", range(4))
def test_one_vs_rest_is_the_softmax_of_the_class(rng, k):
    logits, labels = drawn(rng, 200, 4)
    labels[::7] = -100
    kept = labels != -100
    found = cal.one_vs_rest(logits, labels, k)
    np.testing.assert_allclose(found.confidence, softmax(logits, -1)[kept, k], rtol=1e-13)
    np.testing.assert_array_equal(found.outcome, labels[kept] == k)


def test_one_vs_rest_of_one_logit_has_two_classes(rng):
    odds, labels = rng.normal(size=50), rng.integers(0, 2, 50)
    zero, one = (cal.one_vs_rest(odds, labels, k) for k in (0, 1))
    np.testing.assert_allclose(one.confidence, expit(odds))
    np.testing.assert_allclose(zero.confidence, expit(-odds))
    np.testing.assert_array_equal(zero.outcome, labels == 0)
    np.testing.assert_array_equal(one.outcome, labels == 1)


@pytest.mark.parametrize("k", [-1, 4])
def test_one_vs_rest_needs_a_class(k):
    with pytest.raises(ValueError, match=rf"k must be a class in \[0, 4\), got {k}"):
        cal.one_vs_rest(np.zeros((2, 4)), [0, 1], k)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_binary_is_the_sigmoid_of_one_logit_and_the_softmax_of_two(rng, kind):
    odds, labels = 3 * rng.normal(size=200), rng.integers(0, 2, 200)
    labels[3] = -100
    kept = labels != -100
    both = rng.normal(size=(200, 1)) + np.stack([np.zeros(200), odds], -1)
    for logits in (odds, both):
        found = cal.binary(kind(logits), kind(labels))
        np.testing.assert_allclose(found.confidence, expit(odds)[kept], rtol=1e-12)
        np.testing.assert_array_equal(found.outcome, labels[kept] == 1)


def test_one_column_of_logits_is_not_multilabel():
    with pytest.raises(ValueError, match=r'multilabel logits must be .* estimand="binary"'):
        cal.multilabel([0.5, -0.5], [1, 0])


@pytest.mark.parametrize("shape", [(60, 5), (3, 20, 5)])
def test_multilabel_is_the_sigmoid_of_every_cell(rng, shape):
    logits, labels = 3 * rng.normal(size=shape), rng.integers(0, 2, shape)
    labels[0] = -100
    kept = labels != -100
    found = cal.multilabel(logits, labels)
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
    for found in (cal.top_label(logits, labels), cal.one_vs_rest(logits, labels, 0)):
        assert found.confidence.dtype == np.float64
        assert found.outcome.dtype == np.bool_
        assert isinstance(found, cal.Pairs)
    reverse = cal.top_label(logits[::-1], labels[::-1])
    np.testing.assert_array_equal(
        reverse.confidence[::-1], cal.top_label(logits, labels).confidence
    )


# Figures of other estimands


def test_every_cell_of_a_multilabel_problem_is_an_example(rng):
    logits = rng.normal(size=(150, 4))
    labels = (rng.random((150, 4)) < expit(2 * logits)).astype(int)
    labels[::9, 2] = -100
    kept = labels != -100
    probs, happened = expit(logits)[kept], labels[kept]
    found = cal.evaluate(logits, labels, estimand="multilabel", level=None)
    assert (found.n, found.classes) == (kept.sum(), 4)
    assert found.describe().startswith(f"{kept.sum()} labels of 4 tags; estimand: every tag")
    assert found["ece"].value == pytest.approx(cal.ece(probs, happened), abs=1e-12)
    assert found["accuracy"].value == pytest.approx(((probs > 0.5) == happened).mean())
    loss = -np.log(np.where(happened, probs, 1 - probs))
    assert found["nll"].value == pytest.approx(loss.mean())
    assert found["brier"].value == pytest.approx(2 * ((probs - happened) ** 2).mean())
    per_tag = []
    for t in range(4):
        of_tag = kept[:, t]
        per_tag.append(cal.ece(expit(logits[of_tag, t]), labels[of_tag, t]))
    assert found["classwise_ece"].value == pytest.approx(np.mean(per_tag), abs=1e-12)


def test_the_binary_estimand_changes_the_event_and_not_the_scores(rng):
    logits, labels = drawn(rng, 400, 2, 1.5)
    top = cal.evaluate(logits, labels, level=None)
    event = cal.evaluate(logits, labels, estimand="binary", level=None)
    probs = softmax(logits, -1)[:, 1]
    assert event["ece"].value == pytest.approx(cal.ece(probs, labels == 1), abs=1e-12)
    assert event["auroc"].value == pytest.approx(cal.auroc(probs, labels == 1), abs=1e-12)
    for name in ("accuracy", "nll", "brier", "classwise_ece"):
        assert event[name].value == pytest.approx(top[name].value, abs=1e-12), name
    assert "estimand: P(class 1)" in event.describe()


# Masked classes


def test_masked_classes_have_probability_zero(masked):
    logits, labels = masked
    probs = softmax(logits, -1)
    found = cal.top_label(logits, labels)
    np.testing.assert_allclose(found.confidence, probs.max(-1), rtol=1e-13)
    np.testing.assert_array_equal(found.outcome, probs.argmax(-1) == labels)
    np.testing.assert_allclose(
        cal.one_vs_rest(logits, labels, 2).confidence, probs[:, 2], rtol=1e-13
    )
    loss = logsumexp(logits, -1) - logits[np.arange(300), labels]
    assert cal.nll(logits, labels) == pytest.approx(loss.mean(), abs=1e-12)
    brier = ((probs - np.eye(6)[labels]) ** 2).sum(-1).mean()
    assert cal.brier(logits, labels) == pytest.approx(brier, abs=1e-12)


def test_log_odds_of_minus_infinity_are_certainty():
    found = cal.binary([-INF, 0.0], [0, 1])
    np.testing.assert_array_equal(found.confidence, [0, 0.5])
    assert cal.nll([-INF, 0.0], [0, 1]) == pytest.approx(math.log(2) / 2)


# Margins


@pytest.mark.parametrize("shape", [(40, 5), (4, 10, 5), (40, 2)])
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_a_margin_is_the_largest_logit_less_the_second(rng, shape, kind):
    logits = rng.normal(size=shape)
    ordered = np.sort(logits, axis=-1)
    found = cal.margins(kind(logits))
    assert found.shape == shape[:-1]
    np.testing.assert_allclose(found, ordered[..., -1] - ordered[..., -2], rtol=1e-14)


def test_margins_of_masked_single_and_one_logit_rows(masked):
    logits, _ = masked
    ordered = np.sort(logits, axis=-1)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(cal.margins(logits), ordered[:, -1] - ordered[:, -2])
    assert cal.margins([[1.0, -INF, -INF]]) == INF
    np.testing.assert_array_equal(cal.margins(np.zeros((3, 1))), [INF] * 3)
    np.testing.assert_array_equal(cal.margins([-2.0, 0.5]), [2, 0.5])


def test_margins_of_no_rows_are_no_margins():
    assert cal.margins(np.zeros((0, 4))).shape == (0,)


def test_margins_in_small_blocks_are_the_same(rng, small_blocks):
    logits = rng.normal(size=(50, 7))
    ordered = np.sort(logits, axis=-1)
    np.testing.assert_allclose(cal.margins(logits), ordered[:, -1] - ordered[:, -2])


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [INF, INF, 0.0], [-INF, -INF, -INF]])
def test_a_row_without_a_margin_is_refused_by_its_number(row):
    logits = np.zeros((5, 3))
    logits[3] = row
    with pytest.raises(ValueError, match=r"logits must be finite.*row 3"):
        cal.margins(logits)


@pytest.mark.parametrize("logits", [[[0.0, 0.0], [INF, 0.0]], [0.0, INF]])
def test_one_logit_of_plus_infinity_has_no_margin(logits):
    with pytest.raises(ValueError, match=r"logits must be finite.*row 1"):
        cal.margins(logits)


# Blocks and threads


def whole(logits, labels, **options):
    return {
        name: estimate.value
        for name, estimate in cal.evaluate(logits, labels, level=None, **options).items()
    }


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_tiny_blocks_on_any_number_of_threads_agree(rng, monkeypatch, threads, count, block):
    logits, labels = drawn(rng, 250, 5, 1.5)
    labels[rng.random(250) < 0.2] = -100
    labels[:60] = -100  # whole blocks without a label
    weight = rng.exponential(size=250)
    expected = whole(logits, labels, weight=weight)
    pairs = cal.top_label(logits, labels)
    monkeypatch.setitem(_walk.CHUNK_SIZE, "cpu", block)
    threads(count)
    for shaped in (logits, torch.tensor(logits), logits.reshape(10, 25, 5)):
        shape = shaped.shape[:-1]
        found = whole(shaped, labels.reshape(shape), weight=weight.reshape(shape))
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
    expected = np.mean([cal.ece(expit(logits[:, t]), labels[:, t]) for t in range(5)])
    assert found["classwise_ece"].value == pytest.approx(expected, abs=1e-12)


def test_fifty_thousand_classes_are_measured_by_the_definitions(rng):
    logits, labels = drawn(rng, 60, 50_000, scale=4)
    probs = softmax(logits, -1)
    found = whole(logits, labels)
    top = probs.max(-1), probs.argmax(-1) == labels
    assert found["ece"] == pytest.approx(cal.ece(*top), abs=1e-12)
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


def test_the_number_of_torch_threads_stays_in_the_home_process(threads):
    threads(3)

    def fails(part, report):
        assert torch.get_num_threads() == 3
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        shards._alone(fails, os.getpid(), None)  # type: ignore[arg-type]
    assert counts() == (3, 3)


def test_a_shard_in_a_process_of_its_own_runs_on_one_torch_thread(threads):
    threads(3)
    elsewhere = os.getpid() + 1
    found = shards._alone(
        lambda part, report: torch.get_num_threads(),
        elsewhere,
        None,  # type: ignore[arg-type]
    )
    assert found == 1


# Bad rows

BAD = {"NaN": [math.nan, 0, 0], r"\+inf": [0, 0, INF], "-inf in every class": [-INF] * 3}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("count", [1, 4])
def test_a_bad_row_in_any_position_is_named(rng, small_blocks, threads, bad, count):
    threads(count)
    logits, labels = drawn(rng, 61, 3)
    labels[::3] = -100  # ignored rows count as positions
    for at in np.flatnonzero(labels >= 0):
        broken = logits.copy()
        broken[at] = BAD[bad]
        with pytest.raises(ValueError, match=rf"; row {at} has {bad}"):
            cal.nll(broken, labels)


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
        cal.one_vs_rest(logits, labels, 0)


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
            cal.binary([0.0, value], [0, 1])


def test_log_odds_that_exclude_their_label_are_not_called_impossible_in_every_class():
    with pytest.raises(ValueError, match="; row 1 has -inf at its own label 1"):
        cal.binary([0.0, -INF], [0, 1])


def test_values_too_far_apart_are_named():
    with pytest.raises(ValueError, match="; row 0 has values too far apart for float64"):
        cal.nll([[1.7e308, -1.7e308]], [1])
