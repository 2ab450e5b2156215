"""Step functions of the confidence, against slow loops, other libraries and known truths."""

import itertools
import math
from typing import Any

import calibration
import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, logsumexp, softmax
from sklearn.linear_model import LogisticRegression

from calibrant._core.solve import time_limit
from calibrant.calibrators import binning
from calibrant.calibrators.binning import BBQ, ScalingBinning
from calibrant.calibrators.histogram import (
    HistogramBinning,
    HistogramOneVsRest,
    ranked,
)
from calibrant.calibrators.top_label import MAX_ODDS
from calibrant.calibrators.watch import told
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


@pytest.mark.parametrize("kind", TOP_LABEL)
def test_the_other_classes_keep_their_proportions(rng, kind):
    logits, labels = drawn(rng, 500, 5, 2.0)
    out, raw = (
        kind(keep_argmax=False).fit(logits, labels).predict_proba(logits),
        softmax(logits, -1),
    )
    for i, top in enumerate(logits.argmax(-1)):
        rest, before = np.delete(out[i], top), np.delete(raw[i], top)
        np.testing.assert_allclose(rest / rest.sum(), before / before.sum(), atol=1e-5)


@pytest.mark.parametrize("kind", TOP_LABEL)
def test_predictions_change_only_where_that_is_allowed(rng, kind):
    logits, labels = drawn(rng, 500, 5, 6.0)
    kept, free = (kind(keep_argmax=k).fit(logits, labels) for k in (True, False))
    assert kept.keeps_argmax
    assert not free.keeps_argmax
    before = logits.argmax(-1)
    assert (kept.predict_proba(logits).argmax(-1) == before).all()
    assert (free.predict_proba(logits).argmax(-1) != before).any()


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


def test_bbq_weighs_more_than_one_binning(rng):
    """Otherwise the comparison above would say nothing about the average."""
    odds, right, weight = samples(rng, 90)
    ranks = ranked(odds, right, weight)
    scores = [binning.score(ranks, cuts).log_score for cuts in binning.binnings(ranks)]
    share = np.exp(np.array(scores) - logsumexp(scores))
    assert np.sort(share)[-2] > 0.1


@pytest.mark.parametrize(
    ("n", "least", "most"), [(1, 1, 1), (64, 1, 13), (1000, 1, 100), (27_000, 3, 300)]
)
def test_bbq_tries_numbers_of_bins_around_the_cube_root(rng, n, least, most):
    odds = np.linspace(0, 20, n)
    found = binning.binnings(ranked(odds, odds > 3, np.ones(n)))
    assert [len(cuts) + 1 for cuts in found] == list(range(least, most + 1))


def test_bbq_takes_binnings_that_come_out_the_same_once():
    odds, right = np.repeat([1.0, 2.0, 3.0], 100), np.arange(300) % 3 > 0
    found = binning.binnings(ranked(odds, right, np.ones(300)))
    assert sorted(len(cuts) + 1 for cuts in found) == [1, 2, 3]


def test_the_error_of_bbq_falls_with_the_number_of_samples(rng):
    grid, errors = np.linspace(0.05, 6, 200), []
    for n in (300, 3000, 30_000, 300_000):
        odds = rng.exponential(2, n)
        right = rng.random(n) < expit(0.5 * odds + 0.2 * np.sin(2 * odds))
        found = confidence(BBQ, odds, right, at=grid, keep_argmax=False)
        errors.append(np.abs(found - expit(0.5 * grid + 0.2 * np.sin(2 * grid))).mean())
    assert errors[-1] < 0.012, errors
    assert all(after < 0.75 * before for before, after in itertools.pairwise(errors))


def test_bbq_stops_at_the_time_limit(rng):
    odds, right, _ = samples(rng, 2000)
    with time_limit(0.0), pytest.raises(TimeoutError):
        BBQ().fit(two_classes(odds), right.astype(int))


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


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind is not BBQ])
def test_weight_two_is_a_row_twice(rng, kind):
    """Of BBQ, which counts examples, a row twice is one more."""
    logits, labels = drawn(rng, 300, 4, 2.0)
    weight = np.where(np.arange(300) % 3 == 0, 2.0, 1.0)
    again = np.repeat(np.arange(300), weight.astype(int))
    weighted = quiet(kind, logits, labels, weight=weight)
    twice = quiet(kind, logits[again], labels[again])
    for name, values in weighted.state_dict().items():
        np.testing.assert_allclose(twice.state_dict()[name], values, atol=1e-5)


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


@pytest.mark.parametrize("kind", EVERY)
def test_an_exported_graph_takes_any_number_of_rows(rng, kind):
    logits, labels = drawn(rng, 500, 6, 2.0)
    fitted = quiet(kind, logits, labels)
    rows = torch.export.Dim("rows")
    graph = torch.export.export(
        fitted, (torch.randn(4, 6),), dynamic_shapes={"logits": {0: rows}}
    ).module()
    fresh = torch.from_numpy(4 * rng.normal(size=(37, 6))).float()
    fresh[3, 2] = -torch.inf
    torch.testing.assert_close(graph(fresh), fitted(fresh))


@pytest.mark.parametrize("kind", EVERY)
def test_another_number_of_bins_is_loaded_too(rng, kind):
    logits, labels = drawn(rng, 500, 6, 2.0)
    fitted, other = quiet(kind, logits, labels), kind(**kind().config())
    other.load_state_dict(fitted.state_dict())
    np.testing.assert_array_equal(other.predict_proba(logits), fitted.predict_proba(logits))


@pytest.mark.parametrize(
    ("kind", "classes", "size"),
    [(HistogramBinning, 6, 15), (BBQ, 6, 10), (ScalingBinning, 6, 17), (HistogramOneVsRest, 6, 90)],
)
def test_sizes(kind, classes, size):
    assert kind().size(classes) == size


def test_log_probabilities_are_logits(rng):
    logits, labels = drawn(rng, 500, 6, 2.0)
    for kind in EVERY:
        plain = quiet(kind, logits, labels).predict_proba(logits)
        logs = log_softmax(logits, -1)
        np.testing.assert_allclose(quiet(kind, logs, labels).predict_proba(logs), plain, atol=1e-5)
