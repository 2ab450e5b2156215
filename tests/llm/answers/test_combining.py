"""Combinations of signals, against simulated truths."""

import numpy as np
import pytest
from scipy.special import expit, logit

from calibrant.llm.answers import combining
from calibrant.llm.answers.combining import (
    fill_in,
    fit_combination,
    fit_combined,
    fit_single,
    held_out,
    log_loss,
    paired_gain,
    split,
)


def test_folds_keep_questions_together_and_cover_all_answers():
    groups = np.repeat(np.arange(23), 3)
    tests = []
    for train, test in split(groups):
        assert not {*groups[train]} & {*groups[test]}
        assert sorted([*train, *test]) == list(range(69))
        tests += [*test]
    assert sorted(tests) == list(range(69))


def test_missing_values_are_filled_with_their_normal_mean():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 2))
    x = np.stack([x[:, 0], 0.8 * x[:, 0] + 0.6 * x[:, 1], rng.normal(size=4000)], 1)
    covariance = x.T @ x / len(x)
    holes = x.copy()
    holes[:2000, 1] = np.nan
    holes[0] = np.nan
    filled = fill_in(holes, covariance)
    np.testing.assert_array_equal(filled[2000:], x[2000:])
    np.testing.assert_array_equal(filled[0], 0)
    np.testing.assert_allclose(filled[1:2000, 1], 0.8 * x[1:2000, 0], atol=0.15)
    # the rest is noise around it: 0.6 deviations
    assert np.std(filled[1:2000, 1] - x[1:2000, 1]) == pytest.approx(0.6, abs=0.03)


def test_a_single_map_recovers_the_chances_and_those_without_the_signal():
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.05, 0.95, 6000)
    lacks = rng.random(6000) < 0.3
    right = rng.random(6000) < np.where(lacks, 0.2, truth)
    values = np.where(lacks, np.nan, expit(2 * logit(truth)))  # too sure
    single = fit_single(values, right, "beta")
    assert single.absent == pytest.approx(0.2, abs=0.02)
    assert not single.inverted
    found = single.predict(values)
    assert np.abs(found[~lacks] - truth[~lacks]).max() < 0.04
    assert (found[lacks] == single.absent).all()


def test_signals_that_point_down_are_inverted_only_if_this_is_shown():
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.05, 0.95, 400)
    right = rng.random(400) < truth
    down = fit_single(1 - truth, right, "sigmoid")
    assert down.inverted
    np.testing.assert_allclose(
        down.predict(1 - truth), fit_single(truth, right, "sigmoid").predict(truth), atol=1e-9
    )
    few = fit_single(1 - truth[:14], right[:14], "sigmoid")
    assert not few.inverted
    assert np.ptp(few.predict(truth)) < 1e-6  # no rising map is left


def test_too_few_answers_of_a_kind_give_a_constant():
    right = np.arange(50) < 4
    single = fit_single(np.linspace(0, 1, 50), right, "beta")
    assert single.calibrator is None
    assert np.ptp(single.predict(np.array([0.1, 0.9, np.nan]))) == 0
    assert single.predict(np.array([0.5]))[0] == pytest.approx(4.5 / 51)
    everything = fit_single(np.linspace(0, 1, 50), np.ones(50, bool), "beta").predict(np.ones(1))
    assert everything[0] == pytest.approx(50.5 / 51)  # not 1


def simulated(rng, n, coefficients, noise=0):
    """Signals whose log-odds add up to those of the truth, and some that say nothing."""
    x = rng.normal(size=(n, len(coefficients) + noise))
    truth = expit(x[:, : len(coefficients)] @ np.array(coefficients))
    return expit(x), rng.random(n) < truth, truth


def test_independent_signals_add_up():
    values, right, truth = simulated(np.random.default_rng(0), 8000, [1.5, 0.8], noise=1)
    fitted = fit_combined(values, right, np.arange(8000), "beta")
    assert fitted.best == 0
    found = fitted.together(values)
    assert np.abs(found - truth).mean() < 0.015
    # each alone averages over the other
    assert np.abs(fitted.alone(values) - truth).mean() > 0.1
    assert fitted.combination.weights[2] < 0.1


def test_strong_shrinkage_leaves_the_best_signal():
    values, right, _ = simulated(np.random.default_rng(1), 400, [1.5, 0.8])
    singles = [fit_single(column, right, "sigmoid") for column in values.T]
    odds = combining.log_odds_by_signal(singles, values)
    strong = fit_combination(odds, right, 0, 1e9)
    np.testing.assert_allclose(strong.weights, [1, 0], atol=1e-3)
    np.testing.assert_allclose(strong.predict(odds), singles[0].predict(values[:, 0]), atol=2e-3)
    weak = fit_combination(odds, right, 0, 1e-9)
    assert weak.weights[1] > 0.5


def test_answers_that_lack_a_signal_get_the_chance_of_the_others():
    rng = np.random.default_rng(2)
    values, right, _ = simulated(rng, 6000, [1.5, 0.8])
    fitted = fit_combined(values, right, np.arange(6000), "beta")
    holes = values.copy()
    holes[:, 1] = np.nan  # which never happened in the fit
    # given the first signal alone, the truth is that of its own map
    gap = fitted.together(holes) - fitted.alone(values)
    assert np.abs(gap).max() < 0.06
    assert np.isfinite(fitted.together(np.full((3, 2), np.nan))).all()


def test_a_missing_signal_that_tells_something_is_learned():
    rng = np.random.default_rng(3)
    values, right, truth = simulated(rng, 6000, [1.0, 0.7])
    lacks = rng.random(6000) < 0.4
    right[lacks] = rng.random(lacks.sum()) < expit(logit(truth[lacks]) - 2)
    values[lacks, 1] = np.nan
    fitted = fit_combined(values, right, np.arange(6000), "beta")
    found = fitted.together(values)
    assert found[lacks].mean() == pytest.approx(right[lacks].mean(), abs=0.015)
    assert found[~lacks].mean() == pytest.approx(right[~lacks].mean(), abs=0.015)
    assert fitted.combination.absent[1] < -1


def test_the_choice_of_the_best_signal_does_not_leak():
    # of several signals that say nothing, one always fits best by chance
    rng, losses = np.random.default_rng(0), []
    for _ in range(3):
        values, right = rng.random((80, 4)), rng.random(80) < 0.5
        held = held_out(values, right, np.arange(80), "sigmoid")
        each = log_loss(held.each, right[:, None]).mean(0)
        losses.append([log_loss(held.best, right).mean(), each.min()])
    nested, optimistic = np.mean(losses, axis=0)
    assert optimistic < nested
    assert nested > np.log(2)


def test_the_gain_has_the_standard_error_of_questions():
    rng = np.random.default_rng(0)
    before, after = rng.random((2, 40))
    gain = paired_gain(before, after, np.arange(40))
    difference = before - after
    assert gain.value == pytest.approx(difference.mean())
    assert gain.deviation == pytest.approx(difference.std(ddof=1) / np.sqrt(40))
    # ten answers to each question that are all alike are worth one
    groups = np.repeat(np.arange(40), 10)
    repeated = paired_gain(before[groups], after[groups], groups)
    assert repeated == pytest.approx(gain)
