"""Isotonic regression, held against scikit-learn's over all pairs and a slow definition."""

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.special import expit, logit, softmax

from calibrant._core import chunks as _walk
from calibrant.calibrators import isotonic
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.isotonic import (
    IsotonicCalibration,
    IsotonicOneVsRest,
    _rounded_class_odds,
    _violators,
    steps,
)
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.simulate import drawn
from tests.support.warm_scripts import run_script

BOTH: list[Any] = [IsotonicCalibration, IsotonicOneVsRest]


def quiet(kind, logits, labels, *, temperature=False, **options):
    """A fit; what it says about few samples and missing classes is tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(temperature=temperature).fit(logits, labels, **options)


def hard_case(rng, kind):
    """Logits, labels and weights in which something is special."""
    n, classes = int(rng.integers(20, 150)), int(rng.integers(2, 9))
    logits = rng.normal(size=(n, classes)) * rng.uniform(0.3, 4)
    if "tied" in kind:
        logits = np.round(logits)
    if "repeated" in kind:
        logits = np.repeat(logits, 3, axis=0)
    labels = (logits / rng.uniform(0.4, 3) + rng.gumbel(size=logits.shape)).argmax(-1)
    if "masked" in kind:
        hidden = rng.random(logits.shape) < 0.25
        hidden[np.arange(len(labels)), labels] = False
        logits = np.where(hidden, -np.inf, logits)
    weight = rng.exponential(size=len(labels)) if "weighted" in kind else None
    return logits, labels, weight


CASES = ["plain", "tied", "repeated", "masked", "weighted", "tied repeated masked weighted"]


def regression(probs, outcome, weight):
    from sklearn.isotonic import IsotonicRegression

    return IsotonicRegression(out_of_bounds="clip").fit(probs, outcome, sample_weight=weight)


def expected_from_all_pairs(logits, labels, weight, at):
    """One regression of scikit-learn over all pairs; of two classes, those of class 1."""
    if logits.shape[-1] == 2:
        return expected_one_vs_rest(logits, labels, weight, at)
    return expected_pooled(logits, labels, weight, at)


def expected_pooled(logits, labels, weight, at):
    """One regression of scikit-learn over all pairs."""
    probs, possible = softmax(logits, -1), np.isfinite(logits)
    one_hot = np.eye(logits.shape[-1])[labels]
    repeated = None if weight is None else np.broadcast_to(weight[:, None], probs.shape)[possible]
    fitted = regression(probs[possible], one_hot[possible], repeated)
    return fitted.predict(at.ravel()).reshape(at.shape)


def expected_one_vs_rest(logits, labels, weight, at):
    """A regression of scikit-learn for each class that has a sample."""
    probs, found = softmax(logits, -1), np.empty_like(at)
    for k in range(logits.shape[-1]):
        possible = np.isfinite(logits[:, k])
        if (labels == k).any():
            own = None if weight is None else weight[possible]
            fitted = regression(probs[possible, k], (labels == k)[possible], own)
            found[:, k] = fitted.predict(at[:, k])
        else:
            found[:, k] = at[:, k]
    return found


def normalised(level, probs, logits):
    mixed = np.where(np.isfinite(logits), level + 1e-9 * probs, 0)
    return mixed / mixed.sum(-1, keepdims=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [(IsotonicCalibration, expected_from_all_pairs), (IsotonicOneVsRest, expected_one_vs_rest)],
)
def test_probabilities_are_those_of_scikit_learn(rng, kind, expected, case):
    pytest.importorskip("sklearn")
    for _ in range(20):
        logits, labels, weight = hard_case(rng, case)
        fitted = quiet(kind, logits, labels, sample_weight=weight)
        probs = softmax(logits, -1)
        level = expected(logits, labels, weight, probs)
        np.testing.assert_allclose(
            fitted.predict_proba(logits), normalised(level, probs, logits), atol=1e-6
        )
        # also between the samples; where one step is close to the next, float32 sees the jump
        fresh = rng.normal(size=logits.shape) * 2
        probs = softmax(fresh, -1)
        level = expected(logits, labels, weight, probs)
        error = np.abs(fitted.predict_proba(fresh) - normalised(level, probs, fresh))
        assert error.max() < 1e-3
        assert np.median(error) < 1e-7


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_both_of_two_classes_are_pooled_to_keep_the_predicted_one(rng):
    pytest.importorskip("sklearn")
    logits, labels = drawn(rng, 300, 2, 1.7)
    logits[:, 1] += 1.0
    fitted = IsotonicCalibration(temperature=False, keep_argmax=True).fit(logits, labels)
    probs, found = softmax(logits, -1), fitted.predict_proba(logits)
    level = expected_pooled(logits, labels, None, probs)
    np.testing.assert_allclose(found, normalised(level, probs, logits), atol=1e-6)
    assert (found.argmax(-1) == logits.argmax(-1)).all()
    moved = IsotonicCalibration(temperature=False).fit(logits, labels).predict_proba(logits)
    assert (moved.argmax(-1) != logits.argmax(-1)).mean() > 0.05


@pytest.mark.parametrize("weigh", [False, True])
def test_the_steps_are_those_of_scikit_learn(rng, weigh):
    pytest.importorskip("sklearn")
    logits, labels = drawn(rng, 2000, 5, 1.7)
    weight = rng.exponential(size=2000) if weigh else None
    fitted = quiet(IsotonicCalibration, logits, labels, sample_weight=weight)
    repeated = None if weight is None else np.repeat(weight, 5)
    other = regression(softmax(logits, -1).ravel(), np.eye(5)[labels].ravel(), repeated)
    x, y = expit(fitted.odds_.double().numpy()), fitted.prob_.double().numpy()
    np.testing.assert_allclose(x, other.X_thresholds_[-len(x) :], rtol=1e-6)
    np.testing.assert_allclose(y, other.y_thresholds_[-len(y) :], rtol=1e-5)
    assert len(other.X_thresholds_) - len(x) == 1  # the first end of the step at 0
    assert other.y_thresholds_[0] == y[0] == 0


pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=12).map(
    lambda rows: np.array(rows, dtype=float).T
)


@given(pairs)
def test_pooling_is_the_largest_of_the_least_means(rows):
    """The value at i is max over j <= i of min over k >= i of the mean from j to k."""
    hits, extra = rows
    total = hits + extra
    first = _violators(hits, total)
    assert first[0] == 0
    value = np.add.reduceat(hits, first) / np.add.reduceat(total, first)
    found = np.repeat(value, np.diff(np.append(first, len(hits))))
    for i in range(len(hits)):
        lows = [
            min(hits[j : k + 1].sum() / total[j : k + 1].sum() for k in range(i, len(hits)))
            for j in range(i + 1)
        ]
        assert found[i] == pytest.approx(max(lows))
    assert (np.diff(value) > 0).all()


# The line between the steps


def exact_steps(odds, x, y):
    """Straight in the probability, by the tail in which it is small."""
    found = []
    for s in odds:
        if s <= x[0] or s >= x[-1]:
            found.append(y[0] if s <= x[0] else y[-1])
            continue
        i = int(np.searchsorted(x, s)) - 1
        low, high, here = (-expit(-v) if x[i] > 0 else expit(v) for v in (x[i], x[i + 1], s))
        found.append(y[i] + (y[i + 1] - y[i]) * (here - low) / (high - low))
    return np.array(found)


@pytest.mark.parametrize("centre", [-35.0, -5.0, 0.0, 5.0, 35.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lines_are_straight_in_the_probability_far_out_as_well(rng, centre, dtype):
    x = centre + np.sort(rng.normal(size=9)) * 2
    y = np.sort(rng.random(9))
    odds = centre + 3 * rng.normal(size=(40, 5))
    found = steps(torch.tensor(odds, dtype=dtype), torch.tensor(x), torch.tensor(y))
    assert found.dtype == dtype
    expected = exact_steps(odds.ravel(), x, y).reshape(40, 5)
    atol = 1e-10 if dtype == torch.float64 else 2e-4
    np.testing.assert_allclose(found, expected, atol=atol)
    one_each = steps(
        torch.tensor(odds, dtype=dtype),
        torch.tensor(np.stack([x + k for k in range(5)])),
        torch.tensor(np.stack([y / (k + 1) for k in range(5)])),
    )
    for k in range(5):
        expected = exact_steps(odds[:, k], x + k, y / (k + 1))
        np.testing.assert_allclose(one_each[:, k], expected, atol=atol)


def test_points_of_equal_place_are_a_jump():
    x, y = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0.1, 0.2, 0.6, 0.6])
    found = steps(torch.tensor([1.0, 1.0001, -3.0, 3.0, -torch.inf]), x, y)
    np.testing.assert_allclose(found, [0.2, 0.6, 0.1, 0.6, 0.1])
    np.testing.assert_allclose(steps(torch.tensor([-1.0, 1.0]), x[:1], y[:1]), [0.1, 0.1])


def test_odds_of_every_class(rng):
    logits = 6 * rng.normal(size=(200, 5))
    logits -= logits.max(-1, keepdims=True)
    tensor = torch.from_numpy(logits)
    found = _rounded_class_odds(tensor, tensor.log_softmax(-1))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, logit(softmax(logits, -1)), rtol=1e-5, atol=1e-5)
    far = torch.tensor([[0.0, -60.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    found = _rounded_class_odds(far, far.log_softmax(-1))
    np.testing.assert_allclose(found[0], [60, -60, -np.inf])
    assert found[1, 0] > 1e20
    assert torch.isfinite(found[1, 0])


def test_confidences_that_round_to_one_are_told_apart(rng):
    """Answers with log-odds of about 20 are right less often than those at 40."""
    odds = np.where(np.arange(4000) % 2, 20.0, 40.0) + rng.normal(size=4000)
    right = rng.random(4000) < np.where(odds < 30, 0.6, 0.95)
    logits = np.stack([odds, np.zeros(4000)], axis=1)
    for dtype in (np.float32, np.float64):
        for kind in BOTH:
            fitted = kind(temperature=False).fit(logits.astype(dtype), np.where(right, 0, 1))
            found = fitted.predict_proba(np.array([[20.0, 0.0], [40.0, 0.0]], dtype))[:, 0]
            np.testing.assert_allclose(found, [0.6, 0.95], atol=0.05)


# Truth, and what is guaranteed


def test_a_known_distortion_is_undone(rng):
    odds = 2 * rng.normal(size=60_000)
    truth = expit(0.4 * odds + np.sin(odds) / 3)
    labels = (rng.random(60_000) < truth).astype(int)
    for kind in BOTH:
        fitted = kind(temperature=False).fit(odds[:40_000], labels[:40_000])
        error = fitted.predict_proba(odds[40_000:]) - truth[40_000:]
        assert np.abs(error).mean() < 0.02, kind


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_one_vs_rest_undoes_what_differs_between_classes(rng):
    truth = 2 * rng.normal(size=(40_000, 3))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    logits = truth * [1.0, 2.0, 0.5] + [0.0, 1.0, -0.5]
    probs = softmax(truth[30_000:], -1)
    errors = []
    for kind in BOTH:
        fitted = kind(temperature=False).fit(logits[:30_000], labels[:30_000])
        out = fitted.predict_proba(logits[30_000:])
        errors.append(np.abs(out.mean(0) - probs.mean(0)).max())
    assert errors[1] < min(0.04, errors[0] / 3), errors
    changed = out.argmax(-1) != logits[30_000:].argmax(-1)
    assert changed.mean() > 0.02
    assert not IsotonicOneVsRest.keeps_argmax


def test_where_the_curve_is_level_the_old_order_remains(rng):
    logits, labels = drawn(rng, 400, 4, 2.0)
    fitted = IsotonicCalibration(temperature=False).fit(logits, labels)
    low = np.array([[0.0, -40.0, -50.0, -300.0]])
    out = fitted(torch.from_numpy(low))[0]
    assert torch.isfinite(out).all()
    # far below every hit the new probability is a billionth of the old one
    assert float(out[1] - out[2]) == pytest.approx(10, abs=1e-4)
    assert float(out[2] - out[3]) == pytest.approx(250, abs=1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_masked_classes_count_for_nothing(rng, kind):
    logits, labels = drawn(rng, 500, 4, 2.0)
    masked = np.concatenate([logits, np.full((500, 3), -np.inf)], axis=1)
    wide, narrow = quiet(kind, masked, labels), quiet(kind, logits, labels)
    found = wide.predict_proba(masked)
    assert (found[:, 4:] == 0).all()
    np.testing.assert_allclose(found[:, :4], narrow.predict_proba(logits), atol=1e-7)
    all_but_one = np.array([[-np.inf, 2.0] + [-np.inf] * 5])
    np.testing.assert_array_equal(wide.predict_proba(all_but_one), [[0, 1] + [0] * 5])


def test_classes_without_a_sample_stay_as_they_are_and_are_counted(rng):
    logits, labels = drawn(rng, 3000, 5, 2.0, scale=1.0)
    few = np.where(np.isin(labels, (1, 4)), 0, labels)
    message = (
        r"IsotonicOneVsRest: 2 of 5 classes have no example \(1, 4\): their probabilities stay"
    )
    with pytest.warns(UserWarning, match=message):
        fitted = IsotonicOneVsRest(temperature=False).fit(logits, few)
    found, before = fitted.predict_proba(logits), softmax(logits, -1)
    np.testing.assert_allclose(found[:, 1] / found[:, 4], before[:, 1] / before[:, 4], rtol=1e-4)
    level = steps(torch.from_numpy(logit(before)).float(), fitted.odds_, fitted.prob_)
    np.testing.assert_allclose(level[:, [1, 4]], before[:, [1, 4]], rtol=1e-5)
    assert np.abs(level.numpy() - before)[:, [0, 2, 3]].mean() > 0.02


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_with_a_temperature_it_is_the_fit_to_tempered_logits(rng, kind, weigh):
    logits, labels = drawn(rng, 800, 4, 2.5)
    weight = rng.exponential(size=800) if weigh else None
    fitted = quiet(kind, logits, labels, temperature=True, sample_weight=weight)
    first = TemperatureScaling().fit(logits, labels, sample_weight=weight)
    assert float(fitted.temperature_) == float(first.temperature_) != 1
    assert fitted.solution_ == first.solution_
    tempered = logits / float(first.temperature_)
    after = quiet(kind, tempered, labels, sample_weight=weight)
    assert float(after.temperature_) == 1
    np.testing.assert_allclose(
        fitted.predict_proba(logits), after.predict_proba(tempered), atol=1e-6
    )
    plain = quiet(kind, logits, labels, sample_weight=weight).predict_proba(logits)
    assert kind is IsotonicCalibration or np.abs(plain - fitted.predict_proba(logits)).max() > 1e-3


# The walk


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("weigh", [False, True])
def test_blocks_threads_and_groups_of_classes_change_nothing(
    rng, kind, weigh, small_blocks, threads, monkeypatch
):
    logits, labels, _ = hard_case(rng, "repeated masked")
    labels[5:9] = -100
    weight = rng.integers(1, 4, len(labels)).astype(float) if weigh else None
    with monkeypatch.context() as whole:
        whole.setitem(_walk.CHUNK_SIZE, "cpu", 1 << 18)
        expected = quiet(kind, logits, labels, sample_weight=weight)
        probs = expected.predict_proba(logits)
    monkeypatch.setattr(isotonic, "_MAX_HELD", 1)  # one class at a time
    monkeypatch.setitem(isotonic._NUMBERS_AT_A_TIME, "cpu", 7)
    for count in (1, 3):
        threads(count)
        found = quiet(kind, torch.from_numpy(logits), labels, sample_weight=weight)
        for name, values in expected.state_dict().items():
            np.testing.assert_array_equal(found.state_dict()[name], values)
        np.testing.assert_allclose(found.predict_proba(logits), probs, atol=1e-12)
    many = np.stack([logits, logits])
    np.testing.assert_allclose(found.predict_proba(many), np.stack([probs, probs]), atol=1e-12)


# Hard data


def edge_cases(rng):
    logits = 3 * rng.normal(size=(300, 4))
    return {
        "right": (logits, logits.argmax(-1)),
        "wrong": (logits, logits.argmin(-1)),
        "one sample": (np.array([[1.0, 0.0, -1.0, -2.0]]), np.array([1])),
        "level": (np.zeros((40, 4)), np.arange(40) % 4),
        "one row": (np.tile(logits[:1], (60, 1)), np.arange(60) % 3),
        "far": (1e4 * logits, logits.argmax(-1) * (np.arange(300) % 5 > 0)),
        "tiny": (1e-30 * logits, np.arange(300) % 4),
    }


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("case", edge_cases(np.random.default_rng(0)))
def test_hard_data_end_in_finite_numbers(rng, kind, case, temperature):
    logits, labels = edge_cases(rng)[case]
    fitted = quiet(kind, logits, labels, temperature=temperature)
    assert all(torch.isfinite(values).all() for values in fitted.state_dict().values())
    fresh = np.concatenate([logits, 5 * rng.normal(size=(50, 4))])
    for dtype in (np.float32, np.float64):
        out = fitted(torch.from_numpy(fresh.astype(dtype)))
        assert torch.isfinite(out).all()
        np.testing.assert_allclose(out.softmax(-1).sum(-1), 1, atol=1e-6)


def test_equal_rows_become_the_frequencies_of_their_labels():
    logits = np.tile([[2.0, 1.0, 0.0]], (60, 1))
    labels = np.repeat([0, 1, 2], [30, 20, 10])
    for kind in BOTH:
        found = quiet(kind, logits, labels).predict_proba(logits[:1])
        np.testing.assert_allclose(found, [[1 / 2, 1 / 3, 1 / 6]], atol=1e-6)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("answers", ["right", "wrong"])
def test_one_sided_answers_are_told(rng, kind, answers):
    logits = 3 * rng.normal(size=(1000, 4))
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    message = f"{kind.__name__}: all 1,000 examples are {answers}, so nothing is learned"
    with told(), pytest.warns(UserWarning, match=message):
        fitted = kind(temperature=False).fit(logits, labels)
    confidence = fitted.predict_proba(logits).max(-1)
    assert confidence.mean() > 0.9 if answers == "right" else confidence.mean() < 0.6


COST = """
import re, warnings
import numpy as np
import torch
from calibrant.calibrators.isotonic import {name}

def peak():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])

warnings.simplefilter("ignore")
torch.set_num_threads(2)
rng = np.random.default_rng(0)
logits = 3 * rng.standard_normal((20_000, 1000), dtype=np.float32)
labels = (logits[:, :50] / 2 + rng.gumbel(size=(20_000, 50))).argmax(-1)
{name}().fit(logits[:100], labels[:100])
before = peak()
{name}().fit(logits, labels)
print((peak() - before) / logits.nbytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [IsotonicOneVsRest])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_thousand_classes_need_less_memory_than_their_logits(kind):
    done = run_script(COST.format(name=kind.__name__))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.8
