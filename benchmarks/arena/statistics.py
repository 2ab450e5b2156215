"""Statistics over a table of tasks and methods, in which lower values are better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from calibrant._core.checks import FloatArray

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
    """Return who beats whom, ``(tasks, methods, methods)``: 1 for a win, 0.5 for a tie."""
    one, other = values[:, :, None], values[:, None, :]
    return np.asarray((one < other) + 0.5 * (one == other))


def win_rates(beaten: FloatArray) -> FloatArray:
    """Return the share of its comparisons that each method won, from sums of :func:`wins`."""
    np.fill_diagonal(beaten, 0)
    return np.asarray(beaten.sum(1) / (beaten + beaten.T).sum(1))


def bradley_terry(beaten: FloatArray) -> FloatArray:
    r"""Return Elo ratings of the Bradley-Terry model, with the mean at 1000.

    They maximise the likelihood of the wins ``(methods, methods)`` under

    .. math:: P(i \text{ beats } j) = \frac{1}{1 + 10^{(R_j - R_i) / 400}}

    (Bradley and Terry 1952). Every pair gets one tie in addition, so that a method that always
    wins has a finite rating.
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
    statistic: Callable[[FloatArray], FloatArray],
    values: FloatArray,
    datasets: Sequence[str],
    *,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return a statistic of the sums of wins, with percentile intervals over data sets.

    ``values`` are ``(tasks, methods)``, and ``statistic`` is :func:`win_rates` or
    :func:`bradley_terry`. Tasks of one data set are drawn together, since they are not independent.
    """
    names, member = np.unique(datasets, return_inverse=True)
    won = np.zeros((len(names), values.shape[1], values.shape[1]))
    np.add.at(won, member, wins(values))
    rng, size = np.random.default_rng(seed), len(names)
    counts = (np.bincount(rng.integers(size, size=size), minlength=size) for _ in range(draws))
    drawn = [statistic(np.tensordot(count, won, 1)) for count in counts]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(statistic(won.sum(0)), low, high)


def mean_ranks(values: FloatArray, datasets: Sequence[str], *, alpha: float = 0.05) -> Ranks:
    r"""Return mean ranks over data sets, Friedman's test, and Nemenyi's critical difference.

    Values are averaged over the tasks of a data set first: the tests need independent blocks. With
    :math:`k` methods and :math:`N` data sets,

    .. math:: \mathrm{CD} = \frac{q_\alpha}{\sqrt 2} \sqrt{\frac{k (k + 1)}{6 N}}

    where :math:`q_\alpha` is the quantile of the studentised range (Demšar 2006).
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
