"""Thresholds for answers, turns and conversations keep their guarantees on simulated data."""

import warnings
from fractions import Fraction
from math import comb, exp
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from calibrant.decide import threshold
from calibrant.decide.threshold_search import hoeffding_bentkus, threshold_grid
from calibrant.llm.gate.fitting import _find_threshold, _Scored

MAX_ERROR, CERTAINTY, RUNS = 0.1, 0.9, 200
MOST = int(binom.ppf(0.999, RUNS, 1 - CERTAINTY))
"""Broken guarantees that chance allows, once in a thousand runs of the test."""


def scored(confidence, correct, unit=None):
    n = len(confidence)
    unit = np.arange(n) if unit is None else np.asarray(unit)
    return _Scored(np.asarray(confidence, float), np.asarray(correct, bool), unit, np.full(n, ""))


def talks(rng, n):
    """Conversations of 16 to 24 turns that are all right or, just too often, all wrong."""
    number = np.repeat(np.arange(n), rng.integers(16, 25, n))
    confidence = rng.uniform(0.6, 1, number.size)
    return scored(confidence, (rng.random(n) < 1 - 1.04 * MAX_ERROR)[number], number)


def mixed_talks(rng, n):
    """Conversations of 4 turns whose confidences differ, with one stroke of luck for all of them.

    A turn of confidence c is right with probability c, so that the confidences are calibrated.
    """
    number = np.repeat(np.arange(n), 4)
    confidence = 1 - 0.4 * rng.random(4 * n) ** 2
    return scored(confidence, rng.random(n)[number] < confidence, number)


def true_loss(draw, unit, limit, n=40_000):
    """Mean loss of the conversations with an accepted turn, by its definition."""
    answers = draw(np.random.default_rng(99), n)
    accepted = answers.confidence >= limit
    turns = np.bincount(answers.unit, accepted, n)
    wrong = np.bincount(answers.unit, accepted & ~answers.correct, n)
    touched = turns > 0
    losses = wrong[touched] / turns[touched] if unit == "turn" else wrong[touched] > 0
    return losses.mean()


def limits_of(draw, unit, n, ignoring_conversations=False):
    limits = []
    for seed in range(RUNS):
        answers = draw(np.random.default_rng(seed), n)
        kept: Any = "answer" if ignoring_conversations else unit
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _find_threshold(answers, unit=kept, max_error=MAX_ERROR, certainty=CERTAINTY)
        limits.append(found.threshold)
    return np.array(limits)


def broken(draw, unit, limits):
    """Number of thresholds that accept more mistakes than guaranteed."""
    known = {limit: true_loss(draw, unit, limit) for limit in np.unique(limits) if limit <= 1}
    return sum(known.get(limit, 0.0) > MAX_ERROR for limit in limits)


@pytest.mark.parametrize("unit", ["turn", "conversation"])
@pytest.mark.parametrize("draw", [talks, mixed_talks])
def test_promises_about_conversations_are_kept(draw, unit):
    limits = limits_of(draw, unit, 300)
    if draw is mixed_talks:
        assert np.isfinite(limits).all()  # not by accepting nothing
    assert broken(draw, unit, limits) <= MOST


@pytest.mark.parametrize(("draw", "unit"), [(talks, "turn"), (mixed_talks, "conversation")])
def test_thresholds_that_take_turns_for_independent_break_them(draw, unit):
    limits = limits_of(draw, unit, 300, ignoring_conversations=True)
    assert broken(draw, unit, limits) > 1.5 * MOST


def test_answers_have_the_threshold_of_decide(rng):
    confidence = rng.random(500)
    answers = scored(confidence, rng.random(500) < confidence)
    found = _find_threshold(answers, unit="answer", max_error=0.2, certainty=0.9)
    options = {"confidence": confidence, "outcome": answers.correct}
    assert found == threshold(**options, max_error=0.2, certainty=0.9)


@pytest.mark.parametrize("unit", ["turn", "conversation"])
def test_conversations_of_one_turn_are_answers(rng, unit):
    confidence = rng.random(900)
    answers = scored(confidence, rng.random(900) < confidence)
    found = _find_threshold(answers, unit=unit, max_error=0.2, certainty=0.9)
    plain = _find_threshold(answers, unit="answer", max_error=0.2, certainty=0.9)
    if unit == "conversation":
        assert found == plain
    assert plain.threshold <= found.threshold < plain.threshold + 0.1


@pytest.mark.parametrize("unit", ["turn", "conversation"])
def test_shares_are_those_of_the_definition(unit):
    rng = np.random.default_rng(4)
    number, confidence = 7 * np.repeat(np.arange(300), 2), rng.random(600)
    answers = scored(confidence, rng.random(600) < confidence, number)
    found = _find_threshold(answers, unit=unit, max_error=0.25, certainty=0.8)
    touched, loss = 0, 0.0
    for number in set(answers.unit.tolist()):
        one = answers.where((answers.unit == number) & (answers.confidence >= found.threshold))
        if one.correct.size:
            touched += 1
            wrong = (~one.correct).mean()
            loss += wrong if unit == "turn" else wrong > 0
    assert 0 < touched < 300
    assert found.n == 300
    assert found.coverage == pytest.approx(touched / 300)
    assert found.error == pytest.approx(loss / touched)


@pytest.mark.parametrize("unit", ["answer", "turn", "conversation"])
def test_an_answer_at_the_threshold_is_accepted(unit):
    limit = threshold_grid(0.2)[0][70]
    confidence, right = np.repeat([limit, limit - 1e-9], 400), np.repeat([True, False], 400)
    found = _find_threshold(scored(confidence, right), unit=unit, max_error=0.2, certainty=0.9)
    assert found.threshold == limit
    assert found.coverage == 0.5


def test_hoeffding_and_bentkus_by_their_formulas():
    m, r, most = 40, Fraction(5, 80), Fraction(1, 5)
    kl = float(r) * np.log(float(r / most)) + float(1 - r) * np.log(float((1 - r) / (1 - most)))
    tail = sum(comb(m, k) * most**k * (1 - most) ** (m - k) for k in range(4))  # up to 2.5, so 3
    wanted = min(np.exp(-m * kl), exp(1) * float(tail))
    (found,) = hoeffding_bentkus(np.array([m]), np.array([2.5]), 0.2)
    assert found == pytest.approx(wanted)
    # three thirds that do not quite add up to one
    (third,) = hoeffding_bentkus(np.array([m]), np.array([1 + 1e-13]), 0.2)
    assert third == pytest.approx(hoeffding_bentkus(np.array([m]), np.array([1.0]), 0.2)[0])


def test_no_evidence_where_the_mean_is_at_the_limit_or_above():
    found = hoeffding_bentkus(np.array([50, 50, 0]), np.array([5.0, 20.0, 0.0]), 0.1)
    np.testing.assert_allclose(found, 1)
