"""Statistics over a table of tasks and methods, in which lower values are better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from calibrant._core.checks import FloatArray, IntArray

SCALE = 400 / math.log(10)
"""Elo points of a factor e in the odds of winning."""
START = 1000.0
"""Mean Elo of the methods."""


class Interval(NamedTuple):
    """A value of each method, ``(methods,)``, with the ends of its interval."""

    value: FloatArray
    low: FloatArray
    high: FloatArray


class Ranks(NamedTuple):
    """Mean rank of each method, 1 is best, and what differences of them mean.

    ``statistic`` and ``p_value`` are those of Friedman's test of equal methods; two methods whose
    mean ranks differ by less than ``critical`` cannot be told apart.
    """

    mean: FloatArray
    statistic: float
    p_value: float
    critical: float


def wins(values: FloatArray) -> FloatArray:
    """Return who beats whom, ``(tasks, methods, methods)``: 1 for a win, 0.5 for a tie.

    >>> wins(np.array([[1.0, 2.0]]))[0].tolist()
    [[0.5, 1.0], [0.0, 0.5]]
    """
    one, other = values[:, :, None], values[:, None, :]
    return np.asarray((one < other) + 0.5 * (one == other))


def win_rates(values: FloatArray) -> FloatArray:
    """Return the share of pairwise comparisons that each method wins; a tie is half a win.

    >>> win_rates(np.array([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]]))
    array([0.75, 0.75, 0.  ])
    """
    return _rates(wins(values).sum(0))


def _rates(beaten: FloatArray) -> FloatArray:
    """Return win rates from sums ``(methods, methods)`` of wins."""
    np.fill_diagonal(beaten, 0)
    return np.asarray(beaten.sum(1) / (beaten + beaten.T).sum(1))


def bradley_terry(beaten: FloatArray) -> FloatArray:
    r"""Return Elo ratings of the Bradley-Terry model, with the mean at 1000.

    They maximise the likelihood of the wins ``(methods, methods)`` under

    .. math:: P(i \text{ beats } j) = \frac{1}{1 + 10^{(R_j - R_i) / 400}}

    (Bradley and Terry 1952). Every pair gets one tie in addition, so that a method that always
    wins has a finite rating.

    >>> bradley_terry(np.array([[0.0, 9.5], [0.0, 0.0]])).round(0)
    array([1260.,  740.])
    """
    won = beaten + 0.5
    np.fill_diagonal(won, 0)
    games, score, strength = won + won.T, won.sum(1), np.zeros(len(won))
    for _ in range(100):  # Newton's method; the likelihood is concave
        chance = 1 / (1 + np.exp(strength[None] - strength[:, None]))
        slope = score - (games * chance).sum(1)
        bend = games * chance * (1 - chance)
        # strengths are known up to a constant: adding 1 to the matrix fixes their mean
        step = np.linalg.solve(np.diag(bend.sum(1)) - bend + 1, slope)
        strength += step * min(1, 1 / np.abs(step).max(initial=1e-300))
        if np.abs(step).max() < 1e-12:
            break
    return np.asarray(START + SCALE * (strength - strength.mean()))


def bootstrap(
    values: FloatArray,
    datasets: Sequence[str],
    statistic: Callable[[FloatArray], FloatArray],
    *,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return a statistic of the sums of wins, with percentile intervals over data sets.

    Parameters
    ----------
    values : (tasks, methods)
    datasets : (tasks,)
        Data set of each task: tasks of one are drawn together, since they are not independent.
    statistic : callable
        Of sums of wins ``(methods, methods)``, as :func:`bradley_terry`.

    Examples
    --------
    >>> rate = win_rate_interval(np.array([[1.0, 2.0], [2.0, 1.0]]), ["a", "b"])
    >>> rate.value, rate.low, rate.high
    (array([0.5, 0.5]), array([0., 0.]), array([1., 1.]))
    """
    names, member = np.unique(datasets, return_inverse=True)
    won = np.zeros((len(names), values.shape[1], values.shape[1]))
    np.add.at(won, member, wins(values))
    counts = _drawn_counts(len(names), draws, seed)
    drawn = [statistic(np.tensordot(count, won, 1)) for count in counts]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(statistic(won.sum(0)), low, high)


def _drawn_counts(size: int, draws: int, seed: int) -> Iterator[IntArray]:
    rng = np.random.default_rng(seed)
    return (np.bincount(rng.integers(size, size=size), minlength=size) for _ in range(draws))


def win_rate_interval(values: FloatArray, datasets: Sequence[str], **options: int) -> Interval:
    """Return win rates with intervals over data sets."""
    return bootstrap(values, datasets, _rates, **options)


def elo_interval(values: FloatArray, datasets: Sequence[str], **options: int) -> Interval:
    """Return Elo ratings with intervals over data sets."""
    return bootstrap(values, datasets, bradley_terry, **options)


def mean_ranks(values: FloatArray, datasets: Sequence[str], *, alpha: float = 0.05) -> Ranks:
    r"""Return mean ranks over data sets, Friedman's test, and Nemenyi's critical difference.

    Values are averaged over the tasks of a data set first: the tests need independent blocks. With
    :math:`k` methods and :math:`N` data sets,

    .. math:: \mathrm{CD} = \frac{q_\alpha}{\sqrt 2} \sqrt{\frac{k (k + 1)}{6 N}}

    where :math:`q_\alpha` is the quantile of the studentised range (Demšar 2006).

    >>> mean_ranks(np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]]), ["a", "b", "b"]).mean
    array([1., 2.])
    """
    names, member = np.unique(datasets, return_inverse=True)
    blocks = np.stack([values[member == i].mean(0) for i in range(len(names))])
    ranks = stats.rankdata(blocks, axis=1)
    count, methods = ranks.shape
    mean = ranks.mean(0)
    # with ties the variance of ranks is smaller than k (k + 1) / 12
    spread = (ranks**2).sum() - count * methods * (methods + 1) ** 2 / 4
    between = count**2 * ((mean - (methods + 1) / 2) ** 2).sum()
    statistic = float((methods - 1) * between / spread) if spread else 0.0
    quantile = stats.studentized_range.ppf(1 - alpha, methods, math.inf) / math.sqrt(2)
    critical = float(quantile * math.sqrt(methods * (methods + 1) / (6 * count)))
    return Ranks(mean, statistic, float(stats.chi2.sf(statistic, methods - 1)), critical)
