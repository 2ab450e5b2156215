"""The log-partition table against its definition in float64, whatever the classes and the rows."""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from scipy.special import entr, expit, logsumexp, softmax

from calibrant._core import chunks as _walk
from calibrant._core.chunks import examples
from calibrant.calibrators import logpartition as _partition
from calibrant.calibrators.logpartition import (
    LOWEST,
    OCTAVES,
    TOP,
    Records,
    _softplus,
    concatenate,
    tabulate,
)
from tests.support.simulate import drawn

INF = math.inf
LAST = LOWEST * 2**OCTAVES
FLOOR = math.log(_partition.LEAST_REST)

CONFIDENCE = 2e-5
"""Error of the confidence that is allowed: a fifth of what the documentation guarantees."""
LOG_ODDS = 1e-4
"""Error of the log-odds of the top class, down to odds of one in 1e13."""
SLOPE = 2e-3
"""Error of dA/dlog b."""

TEMPERATURES = np.geomspace(0.05, 20, 21)
BORDERS = [3, 10, 100, 101, 1000, 1500, 1501, 50_000, 250_000]
"""Numbers of classes on both sides of every change of the density."""


def table_of(logits, labels=None, **options):
    if labels is None:
        labels = np.asarray(torch.as_tensor(logits).argmax(-1))
    return tabulate(examples(logits, labels, **options))


def others(logits):
    """Gaps of all classes but the top, which has inf in their place, in float64."""
    values = np.asarray(logits, dtype=np.float64)
    gaps = values.max(-1, keepdims=True) - values
    np.put_along_axis(gaps, values.argmax(-1)[:, None], INF, -1)
    return gaps


def exact(gaps, b, count: float | np.ndarray = 1.0):
    """R and dR/dlog b of gaps ``(n, m)``, each of as many classes as ``count`` says."""
    b = np.broadcast_to(b, len(gaps))[:, None]
    rest = logsumexp(-b * gaps, axis=-1, b=count)
    terms = count * np.exp(-b * gaps - np.maximum(rest, -1e300)[:, None])
    return rest, -(terms * np.where(terms > 0, b * gaps, 0)).sum(-1)


def assert_exact(records, gaps, b, count: float | np.ndarray = 1.0):
    rest, slope = exact(gaps, b, count)
    found = records.log_rest(b)
    assert np.abs(expit(-found.value) - expit(-rest)).max() < CONFIDENCE
    tail = rest > -30
    assert np.abs(found.value - rest)[tail].max(initial=0) < LOG_ODDS
    whole = records.log_partition(b)
    np.testing.assert_allclose(whole.value, np.logaddexp(0, rest), rtol=1e-4, atol=CONFIDENCE)
    np.testing.assert_allclose(whole.slope, expit(rest) * slope, rtol=0, atol=SLOPE)


def realistic(rng, n, classes):
    """Logits of many scales and tails, some with a class that stands out."""
    logits = rng.lognormal(0.7, 0.7, (n, 1)) * rng.normal(size=(n, classes))
    logits[::3] *= rng.standard_t(4, size=logits[::3].shape)
    logits[::2, classes // 2] += rng.exponential(8, len(logits[::2]))
    return logits


def assert_same(found, expected, atol=0.0):
    assert found.classes == expected.classes
    for field in fields(Records):
        if field.name != "classes":
            one, other = getattr(found, field.name), getattr(expected, field.name)
            assert one.dtype == other.dtype, field.name
            np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=field.name)


# Accuracy between the nodes


@pytest.fixture(scope="module", params=[(2, 500), (10, 1000), (1000, 100), (50_000, 12)], ids=str)
def typical(request):
    """Records and gaps of realistic logits."""
    classes, n = request.param
    logits = realistic(np.random.default_rng(classes), n, classes)
    return table_of(logits), others(logits)


def test_one_temperature_for_all_is_exact(typical):
    records, gaps = typical
    for temperature in TEMPERATURES:
        assert_exact(records, gaps, 1 / temperature)


def test_a_temperature_for_each_is_exact(typical, rng):
    records, gaps = typical
    for _ in range(10):
        assert_exact(records, gaps, rng.choice(1 / TEMPERATURES, len(records)))
        assert_exact(records, gaps, np.exp(rng.uniform(*np.log([0.05, 20]), len(records))))


def test_the_slope_is_the_derivative_of_the_value(typical, rng):
    records, _ = typical
    log_b = rng.uniform(math.log(LOWEST) + 0.01, math.log(LAST) - 0.01, len(records))
    for curve in (records.log_rest, records.log_partition):
        below, above = (curve(np.exp(log_b + step)).value for step in (-1e-5, 1e-5))
        slope = curve(np.exp(log_b)).slope
        np.testing.assert_allclose((above - below) / 2e-5, slope, rtol=1e-4, atol=1e-5)


def test_tracked_records_forget_where_the_sharpness_was(typical, rng):
    records, _ = typical
    tracked, log_b = records.tracked(), rng.uniform(*np.log([0.03, 40]), len(records))
    for size in (0.0, 0.01, 0.3, 3.0):  # within a window, to the next, far away and beyond
        log_b = log_b + rng.uniform(-size, size, len(log_b))
        found, expected = tracked.log_rest(np.exp(log_b)), records.log_rest(np.exp(log_b))
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.slope, expected.slope, rtol=1e-12, atol=1e-12)


def test_the_softplus_and_its_derivative():
    x = np.concatenate([[-1e300, -800, 0, 800, 1e300], np.linspace(-50, 50, 1001)])
    value, slope = _softplus(x)
    np.testing.assert_allclose(value, np.logaddexp(0, x), rtol=1e-14)
    np.testing.assert_allclose(slope, expit(x), rtol=1e-14)


def test_the_table_holds_the_values_and_slopes_at_the_nodes(rng):
    logits = rng.normal(size=(50, 7))
    records = table_of(logits)
    assert records.table.shape == (50, OCTAVES * records.density + 1, 2)
    assert records.table.dtype == np.float32
    for node in range(records.table.shape[1]):
        rest, slope = exact(others(logits), LOWEST * 2 ** (node / records.density))
        np.testing.assert_allclose(records.table[:, node, 0], rest, rtol=1e-5, atol=1e-4)
        per_node = slope * math.log(2) / records.density
        np.testing.assert_allclose(records.table[:, node, 1], per_node, rtol=1e-4, atol=1e-5)


# The hardest rows


def grouped(gaps, count):
    """Float64 logits with a top class and, at each gap of a row, as many as ``count`` says."""
    spread = np.repeat(-gaps, count, axis=1)
    return np.concatenate([spread, np.zeros((len(gaps), 1))], axis=1)


def one_gap(steps):
    return np.geomspace(0.01, 1e4, steps)[:, None]


def two_gaps(near_steps, far_steps):
    """Every pair of a small gap and a larger one."""
    near = np.concatenate([[0], np.geomspace(0.003, 30, near_steps - 1)])
    far = np.geomspace(0.01, 1e4, far_steps)
    return np.array([(a, a + d) for a in near for d in far])


def modelled(gaps, count, classes):
    """Records with the table of the definition, so that no row of logits is needed."""
    density = _partition._nodes_per_octave(classes)
    nodes = LOWEST * 2 ** (np.arange(OCTAVES * density + 1) / density)
    columns = [exact(gaps, b, count) for b in nodes]
    rest, slope = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    left = np.exp(np.minimum(rest - FLOOR, 0))
    slope = slope * left * math.log(2) / density
    table = np.stack([np.maximum(rest, FLOOR), slope], axis=-1).astype(np.float32)
    some = table_of(np.zeros((1, 2))).take(np.zeros(len(gaps), dtype=int))
    return replace(some, table=table, classes=classes)


@pytest.mark.parametrize("classes", BORDERS)
def test_one_class_close_to_the_top_and_all_others_at_one_larger_gap(classes):
    gaps, count = two_gaps(10, 80), np.array([1, classes - 2])
    records = modelled(gaps, count, classes)
    for b in np.geomspace(LOWEST, LAST, 60):
        assert_exact(records, gaps, b, count)


@pytest.mark.parametrize(("classes", "near", "far"), [(10, 12, 60), (1000, 6, 25), (50_000, 3, 7)])
def test_the_hardest_rows_are_tabulated_as_exactly(classes, near, far):
    count, gaps = np.array([1, classes - 2]), two_gaps(near, far)
    gaps = np.concatenate([gaps, np.repeat(one_gap(2 * near), 2, axis=1)])
    records = table_of(grouped(gaps, count))
    for b in np.geomspace(LOWEST, LAST, 40):
        assert_exact(records, gaps, b, count)


@pytest.mark.parametrize("odds", [1, 10, 25, 40])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_log_odds_are_exact_where_the_confidence_rounds_to_one(classes, odds):
    b = np.geomspace(LOWEST, LAST, 150)
    gaps = ((odds + math.log(classes - 1)) / b)[:, None]
    found = table_of(grouped(gaps, np.array([classes - 1]))).log_rest(b)
    np.testing.assert_allclose(-found.value, odds, rtol=0, atol=LOG_ODDS)
    np.testing.assert_allclose(found.slope, -odds - math.log(classes - 1), rtol=1e-3)


def test_odds_beyond_float32_stay_beyond_reach():
    gaps, count = np.geomspace(1, 1e35, 300)[:, None], np.array([9])
    records = table_of(grouped(gaps, count))
    for b in np.geomspace(LOWEST, LAST, 100):
        rest, _ = exact(gaps, b, count)
        found = records.log_rest(b)
        far = rest < -60
        assert found.value[far].max(initial=-60) < -50
        assert np.isfinite(found.value).all()
        assert np.isfinite(found.slope).all()


# Below and above the nodes


@pytest.mark.parametrize("temperature", [1e6, 1000, 200, 25, 20.1, 0.039, 0.02, 0.001, 1e-9])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_temperatures_beyond_the_nodes_are_exact(rng, classes, temperature):
    logits = 3 * rng.normal(size=(200, classes))
    records, gaps = table_of(logits), others(logits)
    assert_exact(records, gaps, 1 / temperature)
    assert_exact(records, gaps, np.full(200, 1 / temperature))


@pytest.mark.parametrize("border", [LOWEST, LAST])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_the_curves_do_not_jump_at_the_ends_of_the_nodes(rng, classes, border):
    records = table_of(3 * rng.normal(size=(300, classes)))
    records = records.take(records.log_rest(LAST).value > -60)
    for curve in (records.log_rest, records.log_partition):
        inside, outside = (curve(border * (1 + step)) for step in (-1e-9, 1e-9))
        np.testing.assert_allclose(outside.value, inside.value, rtol=1e-5, atol=2e-4)
        np.testing.assert_allclose(outside.slope, inside.slope, rtol=1e-3, atol=2e-3)


def test_at_sharpness_zero_all_possible_classes_are_equal(rng):
    logits = 3 * rng.normal(size=(30, 6))
    logits[::2, 4] = -INF
    logits[0, 1:] = -INF
    records = table_of(logits)
    for b in (0.0, 1e-12):
        value, slope = records.log_partition(b)
        np.testing.assert_allclose(np.exp(value), np.isfinite(logits).sum(-1), rtol=1e-9)
        np.testing.assert_allclose(slope, 0, atol=1e-9)


def test_at_boundless_sharpness_only_the_top_classes_are_left(rng):
    logits = 3 * rng.normal(size=(30, 6))
    logits[::2, [0, 3]] = 50
    records = table_of(logits)
    for b in (1e9, 1e12):
        value, slope = records.log_partition(b)
        np.testing.assert_allclose(np.exp(value), np.where(np.arange(30) % 2, 1, 2), rtol=1e-6)
        np.testing.assert_allclose(slope, 0, atol=1e-6)
        assert np.isfinite(records.log_rest(b).value).all()


def test_each_sample_may_be_below_between_or_above_the_nodes(rng):
    logits = realistic(rng, 300, 20)
    records, b = table_of(logits), np.exp(rng.uniform(math.log(1e-3), math.log(300), 300))
    together = records.log_rest(b)
    for i in range(300):
        alone = records.take(np.array([i])).log_rest(b[i : i + 1])
        np.testing.assert_allclose(together.value[i], alone.value, rtol=1e-9)
        np.testing.assert_allclose(together.slope[i], alone.slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", [-1e4, -1e9, -1e30])
def test_temperatures_above_twenty_with_classes_that_are_masked_by_a_number(rng, mask):
    logits = rng.normal(size=(50, 1000))
    logits[:, :500] = mask
    records = table_of(logits)
    for temperature in (20.5, 25, 50, 100):
        rest, _ = exact(others(logits), 1 / temperature)
        found = records.log_rest(1 / temperature).value
        assert np.abs(expit(-found) - expit(-rest)).max() < 0.01


@pytest.mark.parametrize("tied", [11, 1000])
def test_more_than_ten_equal_classes_share_the_top_at_any_sharpness(tied):
    logits = np.zeros((1, 1000))
    logits[0, tied:] = -5
    records = table_of(logits)
    for b in (LAST, 1.001 * LAST, 40.0, 1e3):
        assert np.exp(-records.log_partition(b).value) == pytest.approx(1 / tied, rel=1e-4)


# What follows from the table


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_loss_brier_score_and_entropy_follow_from_the_table(rng, classes):
    logits, labels = drawn(rng, 200, classes)
    records = table_of(logits, labels)
    for temperature in TEMPERATURES:
        b = 1 / temperature
        probs = softmax(logits * b, -1)
        true = probs[np.arange(200), labels]
        value, slope = records.log_partition(b)
        loss = logsumexp(b * logits, -1) - b * logits[np.arange(200), labels]
        np.testing.assert_allclose(b * records.own_gap + value, loss, atol=LOG_ODDS)
        brier = 1 - 2 * true + (probs**2).sum(-1)
        twice = records.log_partition(2 * b).value
        found = 1 - 2 * np.exp(-b * records.own_gap - value) + np.exp(twice - 2 * value)
        np.testing.assert_allclose(found, brier, atol=3 * CONFIDENCE)
        np.testing.assert_allclose(value - slope, entr(probs).sum(-1), atol=SLOPE)


@pytest.mark.parametrize("classes", [2, 5, 10, 200])
def test_every_column_is_what_it_says(rng, classes):
    logits, labels = drawn(rng, 300, classes)
    logits[:4] = logits[:4].round(1)
    records = table_of(logits, labels)
    gaps = logits.max(-1, keepdims=True) - logits
    np.testing.assert_array_equal(records.own_gap, gaps[np.arange(300), labels])
    np.testing.assert_allclose(records.mean_gap, gaps.mean(-1), rtol=1e-6)
    np.testing.assert_array_equal(records.top, logits.max(-1))
    np.testing.assert_array_equal(records.correct, logits.argmax(-1) == labels)
    np.testing.assert_array_equal(records.possible, classes)
    np.testing.assert_array_equal(records.labels, labels)
    np.testing.assert_array_equal(records.weight, 1)
    np.testing.assert_array_equal(records.margin, np.sort(gaps, -1)[:, 1].astype(np.float32))
    assert records.margin.dtype == np.float64
    assert (records.classes, len(records)) == (classes, 300)


# Masked classes, ties and extreme rows


def test_masked_classes_count_nowhere(rng):
    logits, labels = drawn(rng, 300, 30)
    hidden = rng.random(logits.shape) < 0.5
    hidden[np.arange(300), labels] = False
    logits[hidden] = -INF
    records, gaps = table_of(logits, labels), others(logits)
    for b in (0.003, LOWEST, 0.3, 1.0, 7.7, LAST, 100.0):
        assert_exact(records, gaps, b)
    np.testing.assert_array_equal(records.possible, (~hidden).sum(-1))
    for i in range(300):
        open_gaps = logits[i].max() - logits[i, ~hidden[i]]
        assert records.mean_gap[i] == pytest.approx(open_gaps.mean(), rel=1e-6)
        few = np.concatenate([np.sort(open_gaps), [INF] * TOP])[:TOP]
        np.testing.assert_array_equal(records.gaps[i], few.astype(np.float32))


def test_one_possible_class_is_certain_at_any_sharpness():
    logits = np.full((3, 12), -INF)
    logits[:, 5] = [-1e30, 0, 1e30]
    records = table_of(logits, [5, 5, 5])
    for b in (0.0, 1e-3, LOWEST, 1.0, LAST, 1e3, np.array([1e-3, 1.0, 1e3])):
        value, slope = records.log_partition(b)
        np.testing.assert_allclose(value, 0, atol=1e-36)
        np.testing.assert_allclose(slope, 0, atol=1e-30)
        np.testing.assert_allclose(records.log_rest(b).value, FLOOR, rtol=1e-6)
    np.testing.assert_array_equal(records.possible, 1)
    np.testing.assert_array_equal(records.mean_gap, 0)
    np.testing.assert_array_equal(records.margin, INF)
    assert records.correct.all()


@pytest.mark.parametrize("tied", [2, 3, 10])
def test_equal_classes_share_the_top(rng, tied):
    logits = rng.normal(size=(20, 200))
    places = np.sort(np.array([rng.permutation(200)[:tied] for _ in range(20)]), axis=1)
    np.put_along_axis(logits, places, 30, -1)
    records = table_of(logits, places[:, 0])
    assert records.correct.all()
    assert not table_of(logits, places[:, 1]).correct.any()
    for b in (1.0, 5.0, LAST, 100.0):
        np.testing.assert_allclose(np.exp(-records.log_partition(b).value), 1 / tied, rtol=1e-4)
    np.testing.assert_array_equal(records.gaps[:, :tied], 0)
    np.testing.assert_array_equal(records.margin, 0)
    assert_exact(records, others(logits), 0.07)


@pytest.mark.parametrize("far", [1e4, 9e7, 1e9, 1e29, 1e37, 1e39, 1e300])
def test_classes_that_are_far_off_have_no_part(far):
    logits = np.array([[0.0, -1.0, -far], [-far, 0.0, -far]])
    own = 2 if far < 1e8 else 1  # farther off they are masked, and cannot be the answer
    records = table_of(logits, [own, 1])
    assert records.own_gap.tolist() == [-logits[0, own], 0]
    for b in (LOWEST, 0.3, 1.0, LAST, 100.0):
        value, slope = records.log_partition(b)
        np.testing.assert_allclose(value, [np.log1p(np.exp(-b)), 0], atol=CONFIDENCE)
        np.testing.assert_allclose(slope, [-b * expit(-b), 0], atol=1e-4)


def test_classes_far_below_the_largest_are_masked():
    records = table_of([[0.0, -1.0, -9e7], [0.0, -1.0, -1e8], [0.0, -1.0, -1e39]], [0, 0, 0])
    assert records.possible.tolist() == [3, 2, 2]


# Precision and shape of the input


def kinds(logits):
    """The same values in every precision and container that is accepted."""
    return {
        "numpy float16": logits.astype(np.float16),
        "numpy float32": logits.astype(np.float32),
        "numpy float64": logits,
        "foreign-endian": logits.astype(">f4"),
        "read-only": np.frombuffer(logits.tobytes()).reshape(logits.shape),
        "strided": np.repeat(logits, 2, axis=1)[:, ::2],
        "torch float16": torch.tensor(logits).half(),
        "torch bfloat16": torch.tensor(logits).bfloat16(),
        "torch float32": torch.tensor(logits).float(),
        "torch float64": torch.tensor(logits),
        "with gradients": torch.tensor(logits, requires_grad=True),
    }


@pytest.mark.parametrize("kind", kinds(np.zeros((1, 1))))
@pytest.mark.parametrize("classes", [4, 300])
def test_every_precision_is_read_as_it_is(rng, kind, classes):
    logits = np.round(realistic(rng, 60, classes).clip(-60, 60), 3)
    given = kinds(logits)[kind]
    array = given.detach().double().numpy() if isinstance(given, torch.Tensor) else given
    stored = array.astype(np.float64)
    labels = rng.integers(0, classes, 60)
    records = table_of(given, labels)
    expected = table_of(stored, labels)
    assert_same(replace(records, table=expected.table), expected, atol=1e-5)
    assert np.abs(records.table - expected.table).max() < 1e-3
    for b in (LOWEST, 0.37, 1.0, 9.1):
        assert_exact(records, others(stored), b)


def test_a_common_offset_of_float64_logits_costs_no_precision(rng):
    logits = rng.integers(-1000, 1000, (40, 20)) / 256
    assert_same(replace(table_of(logits + 1e9), top=logits.max(-1)), table_of(logits))


def test_log_odds_stand_for_two_classes(rng):
    odds, labels = 3 * rng.normal(size=80), rng.integers(0, 2, 80)
    odds[:3] = [0, 0, -INF]
    labels[:3] = [0, 1, 0]
    both = np.stack([np.zeros(80), odds], axis=-1)
    found = table_of(odds, labels)
    assert_same(found, table_of(both, labels))
    assert found.classes == 2
    assert found.correct[:3].tolist() == [True, False, True]
    assert_exact(found, others(both), 0.7)


def test_every_tag_is_a_binary_problem(rng):
    logits, labels = rng.normal(size=(30, 4)), rng.integers(0, 2, (30, 4))
    found = table_of(logits, labels, estimand="multilabel")
    assert_same(found, table_of(logits.ravel(), labels.ravel()))


def test_sequences_are_rows(rng, small_blocks):
    logits, labels = drawn(rng, 120, 5)
    labels[::4] = -100
    weight = rng.exponential(size=120)
    flat = table_of(logits, labels, weight=weight)
    moved = np.ascontiguousarray(np.moveaxis(logits.reshape(6, 20, 5), -1, 1))
    for shaped in (logits.reshape(6, 20, 5), np.moveaxis(moved, 1, -1)):
        for kind in (np.asarray, torch.as_tensor):
            found = table_of(kind(shaped), labels.reshape(6, 20), weight=weight.reshape(6, 20))
            assert_same(found, flat, atol=1e-5)


def test_ignored_rows_are_left_out_and_weights_keep_their_rows(rng):
    logits, labels = drawn(rng, 90, 6)
    weight = rng.exponential(size=90)
    expected = table_of(logits, labels)
    dropped = rng.random(90) < 0.4
    ignored = np.where(dropped, -100, labels)
    found = table_of(np.where(dropped[:, None], math.nan, logits), ignored, weight=weight)
    np.testing.assert_array_equal(found.weight, weight[~dropped])
    assert_same(replace(found, weight=np.ones(len(found))), expected.take(~dropped), atol=1e-5)
    weightless = table_of(logits, labels, weight=np.where(dropped, 0, weight))
    assert_same(weightless, found, atol=1e-5)


# The smallest gaps

TOURNAMENT = 16 * (TOP + 1)
"""The least number of classes that play a tournament for the smallest gaps."""


@pytest.mark.parametrize(
    "classes",
    [
        2,
        3,
        9,
        10,
        11,
        100,
        160,
        TOURNAMENT - 1,
        TOURNAMENT,
        TOURNAMENT + 1,
        TOURNAMENT + 15,
        1000,
        5003,
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_the_smallest_gaps_are_those_of_a_sort(rng, classes, ties):
    logits = rng.normal(size=(100, classes))
    logits = np.round(2 * logits) if ties else logits
    expected = np.sort(logits.max(-1, keepdims=True) - logits, axis=-1)[:, :TOP]
    found = table_of(logits).gaps
    assert found.shape == (100, TOP)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[:, :classes], expected.astype(np.float32))
    np.testing.assert_array_equal(found[:, classes:], INF)


@pytest.mark.parametrize("classes", [TOURNAMENT, TOURNAMENT + 15, 1000])
def test_the_smallest_gaps_are_found_wherever_they_crowd(rng, classes):
    groups = classes // 16
    places = [
        np.arange(10),
        classes - 1 - np.arange(10),
        np.arange(10) * groups,  # one group holds them all
        np.arange(10) * groups + groups - 1,
        np.r_[np.arange(5) * groups, np.arange(5) * groups + 1],
        np.linspace(0, classes - 1, 10).astype(int),
    ]
    logits = -10 - rng.random((len(places), classes))
    leading = -np.arange(10) / 8
    for row, place in zip(logits, places, strict=True):
        row[place] = rng.permutation(leading)
    np.testing.assert_array_equal(table_of(logits).gaps, np.tile(-leading, (len(places), 1)))


# Blocks and threads


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("block", [1, 7, 500])
def test_neither_blocks_nor_threads_change_the_records(rng, monkeypatch, threads, count, block):
    logits, labels = drawn(rng, 130, 20)
    labels[rng.random(130) < 0.2] = -100
    labels[:40] = -100  # whole blocks without a label
    logits[rng.random(logits.shape) < 0.02] = -INF
    logits[np.arange(130), labels.clip(0)] = rng.normal(size=130)
    weight = rng.exponential(size=130)
    expected = table_of(logits, labels, weight=weight)
    monkeypatch.setitem(_walk.CHUNK_SIZE, "cpu", block)
    threads(count)
    assert_same(table_of(logits, labels, weight=weight), expected, atol=2e-5)


def denormal():
    """Whether the thread keeps numbers that are smaller than float32's least normal one."""
    kept = np.full(64, 1e-40, np.float32) * np.ones(64, np.float32)
    return bool((kept > 0).all() and (torch.full((64,), 1e-40) * torch.ones(64) > 0).all())


@pytest.mark.parametrize("rows", [1, 400])
def test_denormal_numbers_are_flushed_in_no_other_thread(rng, small_blocks, rows):
    assert denormal()
    logits, labels = drawn(rng, rows, 3)
    table_of(logits, labels)
    assert denormal()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(denormal).result()


# Parts


def test_records_are_taken_by_index_or_mask(rng):
    logits, labels = drawn(rng, 40, 5)
    weight = rng.exponential(size=40)
    records = table_of(logits, labels, weight=weight)
    for which in (np.array([7, 3, 3, 39]), rng.random(40) < 0.5):
        found = records.take(which)
        assert len(found) == len(np.arange(40)[which])
        np.testing.assert_array_equal(found.labels, labels[which])
        np.testing.assert_array_equal(found.weight, weight[which])
        np.testing.assert_array_equal(found.table, records.table[which])
        value, slope = found.log_partition(0.7)
        np.testing.assert_allclose(value, records.log_partition(0.7).value[which], rtol=1e-5)
        np.testing.assert_allclose(slope, records.log_partition(0.7).slope[which], rtol=1e-5)


@pytest.mark.parametrize("b", [0.001, 1.0, 100.0])
def test_curves_of_no_records_are_empty(rng, b):
    none = table_of(rng.normal(size=(40, 5))).take(np.zeros(40, dtype=bool))
    assert [column.shape for column in none.log_partition(b)] == [(0,), (0,)]


def test_parts_of_rows_join_to_the_whole(rng):
    logits, labels = drawn(rng, 60, 5)
    weight = rng.exponential(size=60)
    whole = table_of(logits, labels, weight=weight)
    cuts = [slice(0, 13), slice(13, 14), slice(14, 60)]
    parts = [table_of(logits[c], labels[c], weight=weight[c]) for c in cuts]
    assert_same(concatenate(parts), whole, atol=1e-5)
    assert_same(concatenate([whole]), whole)
    split = [whole.take(np.arange(60)[c]) for c in cuts]
    assert_same(concatenate(split), whole)


def test_parts_of_different_classes_do_not_join(rng):
    parts = [table_of(rng.normal(size=(3, k))) for k in (4, 3)]
    with pytest.raises(ValueError, match=r"same number of classes, got \[3, 4\]"):
        concatenate(parts)


# Memory


def test_the_records_take_less_than_an_eighth_of_a_thousand_logits(rng):
    logits, labels = drawn(rng, 40, 1000)
    records = table_of(logits.astype(np.float32), labels)
    size = sum(getattr(records, f.name).nbytes for f in fields(Records) if f.name != "classes")
    assert size < logits.astype(np.float32).nbytes / 8


PEAK = """
import re
import numpy as np
from calibrant._core import chunks as _walk
from calibrant.calibrators.logpartition import tabulate

def peak():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])

_walk.CHUNK_SIZE["cpu"] = 1 << 16
rng = np.random.default_rng(0)
tabulate(_walk.examples(rng.random((100, 1000)), np.zeros(100, int)))
logits, labels = rng.random((4000, 1000)), np.zeros(4000, int)
before = peak()
tabulate(_walk.examples(logits, labels))
print((peak() - before) / logits.nbytes)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs the peak of a process")
def test_a_pass_takes_less_than_a_quarter_of_the_logits():
    # freed blocks go back to the system, so that gaps in glibc's heap are not counted
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=given_back
    )
    assert float(found.stdout) < 0.25
