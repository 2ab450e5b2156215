"""Statistics against slow definitions, scipy, and published values."""

from itertools import permutations

import numpy as np
import pytest
from scipy import optimize, stats

from benchmarks.arena import statistics


@pytest.fixture
def values(rng):
    """Values of five methods on twenty tasks, with ties and a method that is usually the best."""
    table = rng.integers(0, 6, size=(20, 5)).astype(float)
    table[:, 2] -= 2
    return table


@pytest.fixture
def datasets():
    """Seven data sets with one to five tasks each."""
    return [f"set{i}" for i in np.repeat(np.arange(7), [1, 2, 3, 4, 5, 4, 1])]


def wins_by_hand(table):
    methods = table.shape[1]
    won = np.zeros((methods, methods))
    for task in table:
        for i, j in permutations(range(methods), 2):
            won[i, j] += 1 if task[i] < task[j] else 0.5 if task[i] == task[j] else 0
    return won


def rates_by_hand(table):
    won = wins_by_hand(table)
    return won.sum(1) / (len(table) * (table.shape[1] - 1))


def test_win_rates_count_pairs(values):
    rates = statistics.win_rates(statistics.wins(values).sum(0))
    np.testing.assert_allclose(rates, rates_by_hand(values), rtol=1e-14)
    assert rates.mean() == pytest.approx(0.5)


def test_a_failure_loses_against_all_but_other_failures():
    rates = statistics.win_rates(statistics.wins(np.array([[1.0, np.inf, np.inf]])).sum(0))
    np.testing.assert_allclose(rates, [1, 0.25, 0.25])


def test_intervals_resample_whole_data_sets(values, datasets):
    draws, names = 50, sorted(set(datasets))
    found = statistics.bootstrap(statistics.win_rates, values, datasets, draws=draws, seed=3)
    rng = np.random.default_rng(3)
    resampled = []
    for _ in range(draws):
        chosen = [names[i] for i in rng.integers(len(names), size=len(names))]
        rows = [i for name in chosen for i, own in enumerate(datasets) if own == name]
        resampled.append(rates_by_hand(values[rows]))
    np.testing.assert_allclose(found.value, rates_by_hand(values))
    np.testing.assert_allclose(found.low, np.percentile(resampled, 2.5, axis=0))
    np.testing.assert_allclose(found.high, np.percentile(resampled, 97.5, axis=0))


def test_win_rate_intervals_cover_the_truth(rng):
    covered = []
    for seed in range(200):
        effect = rng.normal(size=40)  # that all tasks of a data set share
        first = np.repeat(effect, 5) + 0.3 * rng.normal(size=200)
        table = np.stack([first, np.full(200, 0.3)], 1)
        names = [str(i) for i in np.repeat(np.arange(40), 5)]
        rate = statistics.bootstrap(statistics.win_rates, table, names, draws=200, seed=seed)
        truth = stats.norm.cdf(0.3 / np.hypot(1, 0.3))
        covered.append(rate.low[0] <= truth <= rate.high[0])
    assert 0.89 <= np.mean(covered) <= 0.99


def test_ratings_maximise_the_likelihood(values):
    won = wins_by_hand(values) + 0.5
    np.fill_diagonal(won, 0)

    def loss(free):
        ratings = np.array([0, *free])
        chance = 1 / (1 + 10 ** ((ratings[None] - ratings[:, None]) / 400))
        return -(won * np.log(chance)).sum()

    best = optimize.minimize(loss, np.zeros(4), method="Nelder-Mead", tol=1e-10).x
    best = optimize.minimize(loss, best, method="Nelder-Mead", tol=1e-12).x
    ratings = statistics.bradley_terry(wins_by_hand(values))
    np.testing.assert_allclose(ratings[1:] - ratings[0], best, atol=1e-2)
    assert ratings.mean() == pytest.approx(1000)


def test_ratings_of_a_known_model_are_recovered(rng):
    truth = np.array([1300.0, 1100.0, 900.0, 700.0])
    chance = 1 / (1 + 10 ** ((truth[None] - truth[:, None]) / 400))
    won = np.zeros((4, 4))
    for i in range(4):
        for j in range(i):
            won[i, j] = rng.binomial(100_000, chance[i, j])
            won[j, i] = 100_000 - won[i, j]
    np.testing.assert_allclose(statistics.bradley_terry(won), truth, atol=10)


def test_a_method_that_always_wins_has_a_finite_rating():
    ratings = statistics.bradley_terry(1e6 * np.triu(np.ones((6, 6)), 1))
    assert np.isfinite(ratings).all()
    assert (np.diff(ratings) < 0).all()


def test_friedman_agrees_with_scipy_with_and_without_ties(rng, values):
    for table in (values, rng.normal(size=(12, 4))):
        names = [str(i) for i in range(len(table))]
        ranks = statistics.mean_ranks(table, names)
        expected = stats.friedmanchisquare(*table.T)
        assert ranks.statistic == pytest.approx(expected.statistic, rel=1e-12)
        assert ranks.p_value == pytest.approx(expected.pvalue, rel=1e-9)
        by_hand = np.mean([stats.rankdata(task) for task in table], 0)
        np.testing.assert_allclose(ranks.mean, by_hand)


def test_ranks_are_those_of_means_over_data_sets(values, datasets):
    names = sorted(set(datasets))
    blocks = [values[[d == name for d in datasets]].mean(0) for name in names]
    expected = statistics.mean_ranks(np.stack(blocks), names)
    assert statistics.mean_ranks(values, datasets).critical == expected.critical
    np.testing.assert_array_equal(statistics.mean_ranks(values, datasets).mean, expected.mean)


@pytest.mark.parametrize(("methods", "quantile"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_difference_of_the_published_table(rng, methods, quantile):
    """Demšar 2006, table 5 (a), at the level 0.05."""
    table = rng.normal(size=(30, methods))
    found = statistics.mean_ranks(table, [str(i) for i in range(30)]).critical
    assert found == pytest.approx(quantile * np.sqrt(methods * (methods + 1) / 180), rel=5e-4)


def test_equal_methods_have_no_difference():
    ranks = statistics.mean_ranks(np.ones((5, 3)), list("abcde"))
    assert (ranks.statistic, ranks.p_value) == (0, 1)
    np.testing.assert_array_equal(ranks.mean, [2, 2, 2])
