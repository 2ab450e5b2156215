"""Factors of the gaps between neighbouring ranks, against their definition."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import logsumexp

import calibrant as cal
from calibrant._core import chunks
from calibrant._core.chunks import examples
from calibrant._core.solve import minimise
from calibrant.calibrators import rank_gaps
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.rank_gaps import RankGaps
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.simulate import drawn
from tests.support.tensors import Largest


def by_hand(row, temperature, factors):
    """Calibrated logits of a row, as the definition sums them; masked classes stay.

    The last factor is that of all further gaps.
    """
    factors = [*factors, *[factors[-1]] * len(row)]
    order = sorted(range(len(row)), key=lambda k: -row[k])
    possible = [k for k in order if row[k] > -np.inf]
    s = [row[k] / temperature for k in possible]
    result = np.full(len(row), -np.inf)
    for r, k in enumerate(possible):
        result[k] = sum(factors[j] * (s[j] - s[j + 1]) for j in range(r, len(s) - 1))
    return result


def slow_fit(logits, labels, weight=None, count=None):
    """The definition, minimised without gradients of its own: T and the factors."""
    share = np.ones(len(labels)) if weight is None else weight

    def mean_nll(temperature, factors):
        scores = [by_hand(row, temperature, factors) for row in logits]
        each = [logsumexp(s) - s[y] for s, y in zip(scores, labels, strict=True)]
        return share @ each / share.sum()

    ones = np.ones(count or logits.shape[1] - 1)
    bounds: dict[str, Any] = {"bounds": (0.05, 20), "method": "bounded", "options": {"xatol": 1e-7}}
    temperature = optimize.minimize_scalar(lambda t: mean_nll(t, ones), **bounds).x

    def loss(factors):
        return mean_nll(temperature, factors) + np.sum((factors - 1) ** 2) / share.sum()

    limits = [(0, None)] * len(ones)
    exact: dict[str, Any] = {"method": "L-BFGS-B", "options": {"ftol": 1e-13, "gtol": 1e-8}}
    found = optimize.minimize(loss, ones, bounds=limits, **exact)
    return temperature, found.x


def shaped(rng, n, factors, scale=2.0):
    """Logits, and labels drawn after their gaps are multiplied by the factors."""
    logits = scale * rng.normal(size=(n, len(factors) + 1))
    truth = np.array([by_hand(row, 1.0, factors) for row in logits])
    return logits, (truth + rng.gumbel(size=truth.shape)).argmax(-1)


@pytest.mark.parametrize("ranks", [0, 1, 9])
@pytest.mark.parametrize("case", ["plain", "weighted", "masked", "at the bound"])
@pytest.mark.filterwarnings("ignore:accuracy .* is no better")  # at the bound
def test_it_is_the_penalised_optimum(rng, monkeypatch, case, ranks):
    """With a factor for each gap, for the first alone, and with one for all."""
    monkeypatch.setattr(rank_gaps, "MAX_RANKS", ranks)
    logits, labels = shaped(rng, 150, [0.5, 1.2, 0.8])
    if case == "at the bound":  # the runner-up is right more often than the top
        labels[:100] = logits[:100].argsort(-1)[:, -2]
    weight = rng.uniform(0.2, 4, len(labels)) if case == "weighted" else None
    if case == "masked":
        other = (labels + rng.integers(1, 4, len(labels))) % 4
        logits[np.arange(0, 150, 3), other[::3]] = -np.inf
        logits[:2] = [[0, -np.inf, -np.inf, -np.inf], [-np.inf, 1, -np.inf, 0]]
        labels[:2] = [0, 3]
    mean_one = None if weight is None else weight / weight.mean()  # the penalty counts examples
    temperature, expected = slow_fit(logits, labels, mean_one, min(ranks + 1, 3))
    fitted = RankGaps().fit(logits, labels, sample_weight=weight)
    assert float(fitted.temperature_) == pytest.approx(temperature, rel=1e-4)
    np.testing.assert_allclose(fitted.factors_, expected, atol=2e-3)
    if ranks:
        assert (expected.min() < 1e-6) == (case == "at the bound")
    rows = [by_hand(row, temperature, expected) for row in logits]
    probs = np.exp(rows - logsumexp(rows, axis=-1, keepdims=True))
    np.testing.assert_allclose(fitted.predict_proba(logits), probs, atol=5e-4)


def test_factors_of_the_truth_are_recovered(rng):
    logits, labels = shaped(rng, 20_000, [0.5, 1.0, 2.0])
    fitted = RankGaps().fit(logits, labels)
    found = fitted.factors_ / fitted.temperature_
    np.testing.assert_allclose(found, [0.5, 1.0, 2.0], atol=0.15)


def test_a_gap_that_misleads_is_better_held_out(rng):
    logits, labels = shaped(rng, 2000, [0.4, 1.5, 1.5, 1.5])
    new, answers = shaped(rng, 2000, [0.4, 1.5, 1.5, 1.5])
    found, plain = (m().fit(logits, labels).transform(new) for m in (RankGaps, TemperatureScaling))
    assert cal.nll(found, answers) < cal.nll(plain, answers) - 0.01


@pytest.mark.filterwarnings("ignore:.*parameters for")
def test_many_classes_and_few_examples_stay_near_temperature_scaling(rng):
    logits, labels = drawn(rng, 300, 400, temperature=2.0, scale=3)
    new, answers = drawn(rng, 2000, 400, temperature=2.0, scale=3)
    fitted = RankGaps().fit(logits, labels)
    assert len(fitted.factors_) == rank_gaps.MAX_RANKS + 1
    assert abs(float(fitted.factors_[-1]) - 1) < 0.2  # of gaps that decide nothing
    plain = TemperatureScaling().fit(logits, labels).transform(new)
    assert cal.nll(fitted.transform(new), answers) < cal.nll(plain, answers) + 0.02


def test_ties_stay_ties_and_the_order_is_kept(rng):
    logits, labels = shaped(rng, 500, [0.3, 3.0, 0.0, 1.0, 0.2])
    fitted = RankGaps().fit(logits, labels)
    rows = rng.integers(-3, 4, size=(500, 6)).astype(np.float64)
    out = fitted.transform(rows)
    for row, found in zip(rows, out, strict=True):
        for value in np.unique(row):
            assert len(np.unique(found[row == value])) == 1
        assert (np.diff(found[np.argsort(row, kind="stable")]) >= 0).all()


def test_threads_and_chunks_do_not_change_the_fit(rng, monkeypatch):
    logits, labels = shaped(rng, 500, [0.5, 1.2, 0.8])
    labels[::7] = -100
    whole = RankGaps().fit(logits, labels)
    monkeypatch.setattr(rank_gaps, "CHUNK_OF_INPUTS", 64)
    monkeypatch.setitem(chunks.CHUNK_SIZE, "cpu", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parts = RankGaps().fit(logits, labels)
    np.testing.assert_allclose(parts.factors_, whole.factors_, atol=1e-5)


def test_nothing_larger_than_the_logits_is_made(rng, monkeypatch):
    logits, labels = drawn(rng, 1500, 150, 2.0)

    def in_turn(task, *arguments, always=False):
        return [task(*each) for each in zip(*arguments, strict=True)]

    monkeypatch.setattr(chunks, "on_threads", in_turn)  # what is seen is seen in this thread
    with Largest() as seen:
        rank_gaps._solve(rank_gaps._gather(examples(logits, labels), 0.5))
    assert 1500 * 149 <= seen.size <= logits.size


def test_search_that_stops_early_is_said_to(rng, monkeypatch):
    logits, labels = shaped(rng, 500, [0.5, 1.2, 0.8])

    def hasty(*arguments, **options):
        return minimise(*arguments, **options | {"steps": 1})

    monkeypatch.setattr(rank_gaps, "minimise", hasty)
    with pytest.warns(UserWarning, match="stopped early, after 1 steps"):
        RankGaps().fit(logits, labels)


def test_data_without_an_optimum_are_told_of(rng):
    logits, _ = drawn(rng, 300, 4)
    with told(), pytest.warns(UserWarning, match="no best temperature"):
        fitted = RankGaps().fit(logits, logits.argmax(-1))
    assert torch.isfinite(fitted.factors_).all()


def test_huge_logits_stay_finite(rng):
    logits, labels = drawn(rng, 300, 4)
    logits = logits.astype(np.float32)
    logits[0] = [3e38, -3e38, -3e38, -3e38]
    labels[0] = 0
    fitted = RankGaps().fit(logits, labels)
    assert torch.isfinite(fitted.factors_).all()
    plain = RankGaps().fit(logits[1:], labels[1:])
    np.testing.assert_allclose(fitted.factors_, plain.factors_, atol=0.01)
