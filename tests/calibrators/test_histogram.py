"""Histograms, BBQ and scaling-binning against slow loops, other libraries and known truths."""

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import calibration
import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp, softmax
from sklearn.linear_model import LogisticRegression

from calibrant.calibrators import histogram
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.histogram import (
    _EDGE_SLACK,
    BBQ,
    HistogramBinning,
    HistogramOneVsRest,
    ScalingBinning,
    _class_odds,
    _ranked,
)
from calibrant.calibrators.top_label import MAX_ODDS
from tests.support.binned_maps import (
    confidence,
    quiet,
    samples,
    slow_bin,
    slow_edges,
    slow_means,
    two_classes,
)
from tests.support.simulate import drawn


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "bins"), [(1, 3), (2, 5), (40, 1), (40, 7), (41, 50), (200, 15)])
def test_bins_of_equal_mass_are_those_of_the_definition(rng, n, bins, ties, weigh):
    odds, right, weight = samples(rng, n, ties)
    weight = weight if weigh else np.ones(n)
    edges = slow_edges(odds.tolist(), weight.tolist(), bins)
    means = slow_means(odds, right, weight, edges)
    fitted = quiet(HistogramBinning, two_classes(odds), right.astype(int), weight=weight, bins=bins)
    assert len(edges) + 1 <= min(n, bins)
    np.testing.assert_allclose(fitted.edges_, edges, atol=2e-4)
    found = confidence(HistogramBinning, odds, right, weight, bins=bins, keep_argmax=False)
    expected = [means[slow_bin(s, edges)] for s in odds]
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("bins", [1, 4, 15])
def test_bins_of_equal_width_are_those_of_the_definition(rng, bins, weigh):
    odds, right, weight = samples(rng, 150)
    odds = odds[odds < 3]  # so that the last bins are empty
    right, weight = right[: len(odds)], (weight if weigh else np.ones(150))[: len(odds)]
    edges = [i / bins for i in range(1, bins)]
    sure = [1 / (1 + math.exp(-s)) for s in odds]
    means = slow_means(sure, right, weight, edges)
    centres = [(b + 0.5) / bins for b in range(bins)]
    assert bins == 1 or None in means
    at = np.append(odds, [4.0, 6.0])
    found = confidence(
        *(HistogramBinning, odds, right, weight, at), bins=bins, mass=False, keep_argmax=False
    )
    expected = []
    for s in at:
        b = slow_bin(1 / (1 + math.exp(-s)), edges)
        mean = means[b]
        expected.append(centres[b] if mean is None else mean)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_confidence_on_an_edge_is_in_the_bin_below_at_the_fit_and_later(classes, dtype):
    """A confidence of 1/2, 1/3 or 1/5 is an edge of 30 bins, up to the rounding of log-odds."""
    logits, labels = np.zeros((100, classes), dtype), np.arange(100) % 10 // 9
    fitted = quiet(HistogramBinning, logits, labels, bins=30, mass=False, keep_argmax=False)
    levels = expit(fitted.levels_.double().numpy())
    share = 0.1 if classes == 2 else 0.9  # of class 1, or of the top class
    np.testing.assert_allclose(levels[30 // classes - 1], share, atol=1e-6)
    np.testing.assert_allclose(levels[30 // classes], (30 // classes + 0.5) / 30, atol=_EDGE_SLACK)
    np.testing.assert_allclose(fitted.predict_proba(logits)[:, 0], 0.9, atol=1e-6)


def test_another_library_has_the_same_histogram(rng):
    logits, labels = drawn(rng, 600, 5, 2.0)
    probs = softmax(logits, -1)
    other = calibration.HistogramTopCalibrator(600, 15)
    other.train_calibration(probs, labels)
    fitted = HistogramBinning(keep_argmax=False).fit(logits, labels)
    found = fitted.predict_proba(logits)[np.arange(600), logits.argmax(-1)]
    np.testing.assert_allclose(found, other.calibrate(probs), atol=1e-6)


def test_bins_that_are_all_right_or_all_wrong_end_at_what_float32_can_tell():
    odds = np.repeat([1.0, 3.0], 50)
    fitted = quiet(
        HistogramBinning, two_classes(odds), (odds > 2).astype(int), bins=2, keep_argmax=False
    )
    np.testing.assert_array_equal(fitted.levels_, [-MAX_ODDS, MAX_ODDS])
    np.testing.assert_allclose(fitted.edges_, [2.0])


def slow_ovr(logits, labels, weight, bins, mass, at):
    """Bins of every class over the rows in which it is possible, then each row normalised."""
    classes, out = logits.shape[1], np.zeros(at.shape)
    own, there = (row_odds(rows) for rows in (logits, at))
    for k in range(classes):
        rows = [i for i in range(len(logits)) if np.isfinite(own[i, k])]
        odds, w = [own[i, k] for i in rows], [weight[i] for i in rows]
        hits = [float(labels[i] == k) for i in rows]
        by_width = [math.log(b / (bins - b)) for b in range(1, bins)]
        edges = slow_edges(odds, w, bins) if mass else by_width
        means = slow_means(odds, hits, w, edges)
        for i, s in enumerate(there[:, k]):
            mean = means[slow_bin(s, edges)]
            centre = (slow_bin(s, edges) + 0.5) / bins
            out[i, k] = 0 if np.isneginf(s) else centre if mean is None else mean
    for i, row in enumerate(out):
        out[i] = row / row.sum() if row.sum() else softmax(at[i])
    return out


def row_odds(logits):
    """Log-odds of each class of each row, at most 30: a class that is alone is as sure as that."""
    found = np.empty(logits.shape)
    for i, row in enumerate(logits):
        for k in range(len(row)):
            rest = logsumexp(np.delete(row, k))
            found[i, k] = -np.inf if np.isneginf(row[k]) else min(row[k] - rest, 30)
    return found


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mass", [True, False])
def test_one_vs_rest_is_its_definition(rng, mass, masked, weigh):
    logits, labels = drawn(rng, 240, 4, 1.5)
    if masked:
        hidden = rng.random(logits.shape) < 0.2
        hidden[np.arange(240), labels] = False
        logits = np.where(hidden, -np.inf, logits)
    weight = rng.integers(1, 4, 240).astype(float) if weigh else np.ones(240)
    fitted = quiet(HistogramOneVsRest, logits, labels, weight=weight, bins=8, mass=mass)
    expected = slow_ovr(logits, labels, weight, 8, mass, logits)
    found = fitted.predict_proba(logits)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (found[np.isneginf(logits)] == 0).all()


def test_another_library_has_the_same_histograms_of_classes(rng):
    logits, labels = drawn(rng, 900, 4, 2.0)
    probs = softmax(logits, -1)
    other = calibration.HistogramMarginalCalibrator(900, 15)
    other.train_calibration(probs, labels)
    expected = other.calibrate(probs)
    expected /= expected.sum(-1, keepdims=True)
    found = quiet(HistogramOneVsRest, logits, labels).predict_proba(logits)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_log_odds_of_classes_have_their_digits_near_0_and_1(rng):
    logits = torch.from_numpy(rng.normal(size=(300, 5)) * np.geomspace(0.1, 100, 300)[:, None])
    logits -= logits.amax(-1, keepdim=True)
    np.testing.assert_allclose(_class_odds(logits), row_odds(logits.numpy()), rtol=1e-9, atol=1e-9)
    single = _class_odds(logits.float())
    np.testing.assert_allclose(
        single, row_odds(logits.float().double().numpy()), rtol=3e-6, atol=3e-6
    )


def test_a_row_of_zeros_stays_as_it_was():
    """Whoever was given even chances was wrong, whoever was sure was right."""
    logits = np.array([[0.0, 0.0, -20.0]] * 30 + [[20.0, 0.0, 0.0]] * 30 + [[0.0, 20.0, 0.0]] * 30)
    labels = np.array([2] * 30 + [0] * 30 + [1] * 30)
    fitted = quiet(HistogramOneVsRest, logits, labels, bins=3)
    row = np.array([[1.0, 0.9, -3.0], [20.0, 0.0, 0.0]])
    levels = fitted.predict_proba(row)
    # between the groups: no class has ever been right there
    odds = row_odds(row)[0]
    edges = fitted.edges_.numpy()
    shares = [math.exp(fitted.levels_[k, slow_bin(odds[k], edges[k])]) for k in range(3)]
    assert max(shares) < 1e-12
    np.testing.assert_allclose(levels[0], softmax(row[0]), atol=1e-6)
    np.testing.assert_allclose(levels[1], [1, 0, 0], atol=1e-6)
    assert torch.isfinite(fitted(torch.from_numpy(row))).all()


def test_a_class_that_was_always_masked_stays_about_as_it_is(rng):
    logits, labels = drawn(rng, 400, 3)
    wide = np.concatenate([logits, np.full((400, 1), -np.inf)], axis=1)
    with pytest.warns(UserWarning, match=r"1 of 4 classes have no example \(3\)"):
        fitted = HistogramOneVsRest(bins=5).fit(wide, labels)
    narrow = HistogramOneVsRest(bins=5).fit(logits, labels)
    found = fitted.predict_proba(wide)
    assert (found[:, 3] == 0).all()
    np.testing.assert_allclose(found[:, :3], narrow.predict_proba(logits), atol=1e-6)
    np.testing.assert_allclose(fitted.levels_[3].exp(), (np.arange(5) + 0.5) / 5, rtol=1e-5)
    np.testing.assert_array_equal(
        fitted.predict_proba(np.array([[-np.inf, -np.inf, -np.inf, 0.0]])), [[0, 0, 0, 1]]
    )


def test_a_class_without_a_label_is_improbable_and_said(rng):
    logits, labels = drawn(rng, 400, 4)
    keep = labels != 2
    with pytest.warns(
        UserWarning, match=r"HistogramOneVsRest: 1 of 4 classes have no example \(2\)"
    ):
        fitted = HistogramOneVsRest(bins=5).fit(logits[keep], labels[keep])
    found = fitted.predict_proba(logits)
    assert (found[:, 2] < 1e-11).all()
    assert (found[:, 2] > 0).all()


@pytest.mark.parametrize("threads_used", [1, 3])
def test_groups_of_classes_blocks_and_threads_change_nothing(
    rng, monkeypatch, threads, threads_used, small_blocks
):
    logits, labels = drawn(rng, 130, 11)
    labels[::9] = -100
    alone = quiet(HistogramOneVsRest, logits, labels)
    threads(threads_used)
    monkeypatch.setattr(histogram, "_ODDS_AT_A_TIME", 4 * 130)
    again = quiet(HistogramOneVsRest, logits, labels)
    for name, values in alone.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], values)


def test_classes_are_shared_among_threads_even_if_the_rows_were_read_by_one(
    rng, monkeypatch, threads
):
    threads(3)
    shared = []

    def on_threads(task, *arguments):
        shared.append(len(arguments[0]))
        return [task(*one) for one in zip(*arguments, strict=True)]

    monkeypatch.setattr(histogram, "on_threads", on_threads)
    monkeypatch.setattr(histogram, "thread_ranges", lambda x: [(0, x.labels.size)])  # as of a GPU
    quiet(HistogramOneVsRest, *drawn(rng, 130, 11))
    assert shared == [1, 3]


def test_one_vs_rest_undoes_a_distortion_of_each_class(rng):
    logits = 1.5 * rng.normal(size=(30_000, 3))
    truth = softmax(logits + np.array([1.5, 0.0, -0.5]), -1)
    labels = (np.log(truth) + rng.gumbel(size=truth.shape)).argmax(-1)
    fitted = HistogramOneVsRest().fit(logits[:15_000], labels[:15_000])
    after = np.abs(fitted.predict_proba(logits[15_000:]) - truth[15_000:]).mean()
    before = np.abs(softmax(logits[15_000:], -1) - truth[15_000:]).mean()
    assert after < 0.5 * before


TOP_LABEL = [HistogramBinning, BBQ, ScalingBinning]


EVERY = [*TOP_LABEL, HistogramOneVsRest]


def slow_bbq(odds, right, weight, at):
    """Every binning in plain probabilities; the average of what they say at some log-odds."""
    n = sum(weight)
    most = min(math.ceil(10 * n ** (1 / 3) - 1e-9), math.ceil(n / 5), len(set(odds)))
    scores, says, seen = [], [], []
    for bins in range(max(1, math.floor(n ** (1 / 3) / 10 + 1e-9)), max(1, most) + 1):
        edges = slow_edges(odds, weight, bins)
        if edges in seen:
            continue
        seen.append(edges)
        borders = [0.0, *(1 / (1 + math.exp(-e)) for e in edges), 1.0]
        score, means = 1.0, []
        for b in range(len(edges) + 1):
            inside = [i for i, s in enumerate(odds) if slow_bin(s, edges) == b]
            count = sum(weight[i] for i in inside)
            hits = sum(weight[i] for i in inside if right[i])
            prior = 2 / (len(edges) + 1)
            alpha = prior * (borders[b] + borders[b + 1]) / 2
            beta = prior - alpha
            # in one power of e: each of the three ratios alone may leave the range of floats
            whole = math.lgamma(prior) - math.lgamma(count + prior)
            good = math.lgamma(hits + alpha) - math.lgamma(alpha)
            bad = math.lgamma(count - hits + beta) - math.lgamma(beta)
            score *= math.exp(whole + good + bad)
            means.append((hits + alpha) / (count + prior))
        scores.append(score)
        says.append([means[slow_bin(s, edges)] for s in at])
    return np.average(says, axis=0, weights=scores)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [1, 3, 12, 45, 90])
def test_bbq_is_the_average_over_all_binnings(rng, n, ties, weigh):
    odds, right, weight = samples(rng, n, ties)
    weight = weight if weigh else np.ones(n)
    at = np.concatenate([odds, rng.uniform(0, 8, 20)])
    # 5 decimals are what a fit tells apart: no value may lie closer to an edge
    at = at[[all(abs(s - (a + b) / 2) > 1e-3 for a in odds for b in odds if a != b) for s in at]]
    expected = slow_bbq(odds.tolist(), right, (weight / weight.mean()).tolist(), at)
    found = confidence(BBQ, odds, right, weight, at, keep_argmax=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "least", "most"), [(1, 1, 1), (64, 1, 13), (1000, 1, 100), (27_000, 3, 300)]
)
def test_bbq_tries_numbers_of_bins_around_the_cube_root(rng, n, least, most):
    odds = np.linspace(0, 20, n)
    found = histogram._binnings(_ranked(odds, odds > 3, np.ones(n)))
    assert [len(cuts) + 1 for cuts in found] == list(range(least, most + 1))


def test_the_error_of_bbq_falls_with_the_number_of_samples(rng):
    grid, errors = np.linspace(0.05, 6, 200), []
    for n in (300, 3000, 30_000, 300_000):
        odds = rng.exponential(2, n)
        right = rng.random(n) < expit(0.5 * odds + 0.2 * np.sin(2 * odds))
        found = confidence(BBQ, odds, right, at=grid, keep_argmax=False)
        errors.append(np.abs(found - expit(0.5 * grid + 0.2 * np.sin(2 * grid))).mean())
    assert errors[-1] < 0.012, errors
    assert all(after < 0.75 * before for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("bins", [1, 10])
def test_bins_give_the_mean_of_the_line(rng, bins, weigh):
    odds, right, weight = samples(rng, 300)
    weight = weight if weigh else np.ones(300)
    line = LogisticRegression(C=1e10, tol=1e-10).fit(odds[:, None], right, weight)
    said = line.predict_proba(odds[:, None])[:, 1]
    edges = slow_edges(said.tolist(), weight.tolist(), bins)  # bins of the outputs, as in the paper
    means: Any = slow_means(said, said, weight, edges)
    expected = [means[slow_bin(s, edges)] for s in said]
    found = confidence(ScalingBinning, odds, right, weight, bins=bins, keep_argmax=False)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_another_library_has_the_same_bins_of_the_line(rng):
    logits, labels = drawn(rng, 750, 5, 2.0)
    probs = softmax(logits, -1)
    other = calibration.PlattBinnerTopCalibrator(750, 15)
    other.train_calibration(probs, labels)
    fitted = ScalingBinning(keep_argmax=False).fit(logits, labels)
    found = fitted.predict_proba(logits)[np.arange(750), logits.argmax(-1)]
    np.testing.assert_allclose(found, other.calibrate(probs), atol=1e-4)


@pytest.mark.parametrize("answers", ["right", "wrong"])
def test_one_sided_answers_end_at_the_bounds_and_say_so(rng, answers):
    logits = 3 * rng.normal(size=(1000, 4))
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    message = "ScalingBinning found no optimum for these 1,000 examples and stopped at its bounds"
    with told(), pytest.warns(UserWarning, match=message):
        fitted = ScalingBinning().fit(logits, labels)
    assert (fitted.levels_.abs() <= MAX_ODDS).all()
    sure = fitted.predict_proba(logits).max(-1).mean()
    assert sure > 0.999 if answers == "right" else sure < 0.4


def test_bins_of_the_line_have_less_noise_than_a_histogram(rng):
    errors: dict[Any, list[float]] = {HistogramBinning: [], ScalingBinning: []}
    for _ in range(10):
        odds = rng.exponential(2, 500)
        right = rng.random(500) < expit(0.6 * odds)
        for kind, found in errors.items():
            said = confidence(kind, odds, right, keep_argmax=False)
            found.append(float(np.abs(said - expit(0.6 * odds)).mean()))
    assert np.mean(errors[ScalingBinning]) < 0.6 * np.mean(errors[HistogramBinning])


def hard_cases(rng):
    logits = 3 * rng.normal(size=(300, 6))
    only = np.full((300, 6), -np.inf)
    only[:, 0] = 0.0
    anything = rng.integers(0, 6, 300)
    yield "all right", logits, logits.argmax(-1)
    yield "all wrong", logits, logits.argmin(-1)
    yield "one confidence", np.tile([2.0, 1.0, 0.0, 0.0, 0.0, 0.0], (300, 1)), anything
    yield "level", np.zeros((300, 6)), anything
    yield "duplicates", np.repeat(logits[:3], 100, axis=0), anything
    yield "one sample", logits[:1], np.array([2])
    yield "one possible class", only, np.zeros(300, int)
    yield "huge", 1e4 * logits, logits.argmax(-1)


@pytest.mark.parametrize("options", [{}, {"mass": False}])
@pytest.mark.parametrize("kind", EVERY)
def test_hard_data_end_within_bounds(rng, kind, options):
    if options and kind not in (HistogramBinning, HistogramOneVsRest):
        pytest.skip("its bins have equal mass")
    for name, logits, labels in hard_cases(rng):
        fitted = quiet(kind, logits, labels, **options)
        state = fitted.state_dict().values()
        assert all(torch.isfinite(values).all() for values in state), name
        probs = fitted.predict_proba(logits)
        assert np.isfinite(probs).all(), name
        np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*(not alike|labels are)")
@pytest.mark.parametrize("kind", TOP_LABEL)
def test_one_confidence_is_one_bin_with_the_accuracy(kind):
    logits, labels = np.tile([3.0, 0.0, 0.0], (1000, 1)), (np.arange(1000) % 10 == 0).astype(int)
    fitted = kind().fit(logits, labels)
    assert fitted.edges_.shape == (0,)
    np.testing.assert_allclose(fitted.predict_proba(logits)[:, 0], 0.9, atol=1e-3)


COST = """
import re, warnings
import numpy as np
import torch
from calibrant._core import chunks
from calibrant.calibrators.histogram import HistogramOneVsRest

def peak():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])

warnings.simplefilter("ignore")
torch.set_num_threads(2)
chunks.CHUNK_SIZE["cpu"] = 1 << 18  # what chunks take is little beside these logits
rng = np.random.default_rng(0)
logits = rng.standard_normal((5_000, 1000), dtype=np.float32)
labels = rng.integers(0, 1000, 5_000)
HistogramOneVsRest().fit(logits[:100], labels[:100])
before = peak()
HistogramOneVsRest().fit(logits, labels).predict_proba(logits)
print((peak() - before) / logits.nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_thousand_classes_need_at_most_twice_the_memory_of_their_logits():
    # memory in use: with a fixed threshold, glibc gives back what is freed instead of keeping it
    alone = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2
