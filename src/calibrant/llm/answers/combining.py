r"""Several signals of an answer to the chance that it is right.

Each signal :math:`j` has a map of its own to a chance, whose log-odds are :math:`x_j`. Together,

.. math:: \log\frac{p}{1 - p} = b + \sum_j w_j \tilde x_j + \sum_j v_j d_j , \qquad w_j \ge 0 ,

where :math:`d_j` is 1 if an answer lacks the signal; :math:`\tilde x_j` is then its mean given the
signals that the answer has, under the covariance of the fit. The weights minimise the log loss plus
:math:`\frac{\lambda}{n} (|w - e|^2 + |v|^2)` with :math:`e` 1 for the best signal alone and 0 for
all others, so that a large :math:`\lambda` leaves the best signal as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit

from calibrant._core import checks
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant._core.solve import minimise_within
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.metrics import intervals, ranking

FOLDS = 5
RIDGES = (1000.0, 100.0, 10.0, 1.0, 0.1)
"""Strengths of the shrinkage towards the best signal that are tried, the strongest first."""
CERTAINTY = 0.99
"""Level at which a signal must be shown to point the wrong way before it is inverted."""
STEEPEST, FARTHEST = 10.0, 20.0
"""Largest weight, and largest log-odds of the mean answer."""
LIGHTEST = 1e-6
"""Smaller weights are 0, so that signals without a use are not asked for."""
FEWEST = 5
"""Right and wrong answers each that a map of one signal needs."""


class Single(NamedTuple):
    """A map of one signal to the chance to be right.

    Attributes
    ----------
    calibrator : AnswerCalibrator or None
        None if there were too few answers for one: all have the chance ``absent``.
    inverted : bool
        Small values of the signal mean sure.
    absent : float
        Chance of an answer without the signal.
    least : float
        Distance of all chances from 0 and 1.
    """

    calibrator: AnswerCalibrator | None
    inverted: bool
    absent: float
    least: float

    def predict(self, values: FloatArray) -> FloatArray:
        """Return the chances of answers, from their signals ``(n,)`` or NaN."""
        chances, has = np.full(len(values), self.absent), ~np.isnan(values)
        if self.calibrator is not None and has.any():
            known = values[has]
            chances[has] = self.calibrator.predict(1 - known if self.inverted else known)
        return np.asarray(np.clip(chances, self.least, 1 - self.least))


def fit_single(values: FloatArray, correct: BoolArray, stage: Map) -> Single:
    """Fit the map of one signal ``(n,)``, NaN where an answer lacks it."""
    has = ~np.isnan(values)
    base = (correct.sum() + 0.5) / (len(correct) + 1)
    # two answers of the usual kind are added to those without the signal, which may be few
    absent = (correct[~has].sum() + 2 * base) / ((~has).sum() + 2)
    least = 0.5 / (len(correct) + 1)
    known, right = values[has], correct[has]
    if min(right.sum(), (~right).sum()) < FEWEST:
        return Single(None, False, float(base), least)
    inverted = _points_down(known, right)
    with checks.silenced():  # the table of all signals shows a useless one
        fitted = AnswerCalibrator(None, stage=stage).fit(1 - known if inverted else known, right)
    return Single(fitted, inverted, float(absent), least)


def _points_down(known: FloatArray, right: BoolArray) -> bool:
    """Return True if small values are shown to mean sure: AUROC is below 1/2 with certainty."""
    area = ranking.auroc_with_error(known, right.astype(np.float64), None)
    return intervals.logit_interval(*area, CERTAINTY).high < 0.5


class Combination(NamedTuple):
    """Weights of the signals, and what fills in those that an answer lacks.

    Attributes
    ----------
    weights : (k,)
        Of the log-odds of the chances by each signal.
    absent : (k,)
        Added where an answer lacks a signal.
    offset : float
    mean, covariance : (k,), (k, k)
        Of the log-odds, 0 for those that are missing.
    """

    weights: FloatArray
    absent: FloatArray
    offset: float
    mean: FloatArray
    covariance: FloatArray

    def predict(self, odds: FloatArray) -> FloatArray:
        """Return the chances of answers, from log-odds ``(n, k)`` by signal or NaN."""
        missing = np.isnan(odds)
        filled = fill_in(odds - self.mean, self.covariance)
        return np.asarray(expit(self.offset + filled @ self.weights + missing @ self.absent))


def fill_in(centred: FloatArray, covariance: FloatArray) -> FloatArray:
    """Replace NaN in centred rows ``(n, k)`` by the normal mean given the other values."""
    filled = np.where(np.isnan(centred), 0.0, centred)
    patterns, which = np.unique(np.isnan(centred), axis=0, return_inverse=True)
    small = 1e-3 * np.diag(covariance).mean() + 1e-9
    for number, lacks in enumerate(patterns):
        if not lacks.any() or lacks.all():
            continue
        has, rows = ~lacks, which.reshape(-1) == number
        inner = covariance[np.ix_(has, has)] + small * np.eye(has.sum())
        slopes = np.linalg.solve(inner, covariance[np.ix_(has, lacks)])
        filled[np.ix_(rows, lacks)] = filled[np.ix_(rows, has)] @ slopes
    return np.asarray(filled)


def fit_combination(odds: FloatArray, correct: BoolArray, best: int, ridge: float) -> Combination:
    """Fit the weights of log-odds ``(n, k)``, NaN where an answer lacks a signal."""
    missing = np.isnan(odds)
    count = np.maximum((~missing).sum(0), 1)
    mean = np.where(missing, 0.0, odds).sum(0) / count
    centred = np.where(missing, 0.0, odds - mean)
    covariance = centred.T @ centred / len(odds)
    # an indicator that never occurs has nothing to learn from
    told = missing.any(0) & ~missing.all(0)
    inputs = np.hstack([fill_in(odds - mean, covariance), missing[:, told]])
    prior = np.zeros(inputs.shape[1])
    prior[best] = 1.0
    width = odds.shape[1]
    level = float(np.clip(mean[best], -FARTHEST, FARTHEST))
    line = _fit_line(inputs, correct, prior, width, ridge, level)
    line[:width][line[:width] < LIGHTEST] = 0.0
    absent = np.zeros(width)
    absent[told] = line[width:-1]
    return Combination(line[:width], absent, float(line[-1]), mean, covariance)


def _fit_line(
    inputs: FloatArray,
    correct: BoolArray,
    prior: FloatArray,
    weights: int,
    ridge: float,
    level: float,
) -> FloatArray:
    """Coefficients that are drawn to their prior, the first few at least 0; then the offset."""
    pull, target = ridge / len(inputs), correct.astype(np.float64)

    def value_and_gradient(line: FloatArray) -> tuple[float, FloatArray]:
        result, off = inputs @ line[:-1] + line[-1], line[:-1] - prior
        value = float((np.logaddexp(0, result) - target * result).mean() + pull * off @ off)
        slope = (expit(result) - target) / len(inputs)
        return value, np.append(inputs.T @ slope + 2 * pull * off, slope.sum())

    others = inputs.shape[1] - weights
    bounds = [(0.0, STEEPEST)] * weights + [(-STEEPEST, STEEPEST)] * others
    start = np.append(prior, level)
    return minimise_within(value_and_gradient, start, [*bounds, (-FARTHEST, FARTHEST)]).x


class Combined(NamedTuple):
    """Maps of all signals, the number of the best one, and their combination."""

    singles: list[Single]
    best: int
    ridge: float
    combination: Combination

    def each(self, values: FloatArray) -> FloatArray:
        """Return the chances ``(n, k)`` by each signal alone."""
        return chances_by_signal(self.singles, values)

    def alone(self, values: FloatArray) -> FloatArray:
        """Return the chances ``(n,)`` by the best signal."""
        return self.singles[self.best].predict(values[:, self.best])

    def together(self, values: FloatArray) -> FloatArray:
        """Return the chances ``(n,)`` by all signals."""
        return self.combination.predict(log_odds_by_signal(self.singles, values))


def chances_by_signal(singles: Sequence[Single], values: FloatArray) -> FloatArray:
    """Return the chances ``(n, k)`` by each signal alone, from signals ``(n, k)`` or NaN."""
    pairs = zip(singles, values.T, strict=True)
    return np.stack([single.predict(column) for single, column in pairs], axis=1)


def log_odds_by_signal(singles: Sequence[Single], values: FloatArray) -> FloatArray:
    """Return the log-odds ``(n, k)`` of the chances by each signal; NaN where it is missing."""
    return np.where(np.isnan(values), np.nan, logit(chances_by_signal(singles, values)))


def fit_combined(values: FloatArray, correct: BoolArray, groups: IntArray, stage: Map) -> Combined:
    """Fit all maps to signals ``(n, k)``; the best one and the shrinkage by cross-validation."""
    best, ridge = _chosen(values, correct, groups, stage)
    singles = [fit_single(column, correct, stage) for column in values.T]
    odds = log_odds_by_signal(singles, values)
    return Combined(singles, best, ridge, fit_combination(odds, correct, best, ridge))


class Part(NamedTuple):
    """Answers of all folds but one, those of that one, and what maps of the former make of both."""

    train: IntArray
    test: IntArray
    train_odds: FloatArray
    test_odds: FloatArray
    test_chances: FloatArray


def _part(
    values: FloatArray, correct: BoolArray, stage: Map, train: IntArray, test: IntArray
) -> Part:
    singles = [fit_single(column, correct[train], stage) for column in values[train].T]
    train_odds, test_odds = (log_odds_by_signal(singles, values[at]) for at in (train, test))
    return Part(train, test, train_odds, test_odds, chances_by_signal(singles, values[test]))


def _chosen(
    values: FloatArray, correct: BoolArray, groups: IntArray, stage: Map
) -> tuple[int, float]:
    """Return the signal and the shrinkage with the lowest log loss on held-out answers."""
    parts = [_part(values, correct, stage, train, test) for train, test in split(groups)]
    losses = [log_loss(one.test_chances, correct[one.test, None]).sum(0) for one in parts]
    best = int(np.sum(losses, axis=0).argmin())

    def loss(ridge: float) -> float:
        total = 0.0
        for one in parts:
            fitted = fit_combination(one.train_odds, correct[one.train], best, ridge)
            total += float(log_loss(fitted.predict(one.test_odds), correct[one.test]).sum())
        return total

    return best, min(RIDGES, key=loss)


class HeldOut(NamedTuple):
    """Chances of answers, each by maps that were fitted to other answers.

    Attributes
    ----------
    each : (n, k)
        By each signal alone.
    best : (n,)
        By the signal that was best among the other answers.
    together : (n,)
    """

    each: FloatArray
    best: FloatArray
    together: FloatArray


def held_out(values: FloatArray, correct: BoolArray, groups: IntArray, stage: Map) -> HeldOut:
    """Cross-validate all maps, choices included: these are made anew for every fold."""
    each, best, together = np.empty_like(values), *np.empty((2, len(values)))
    for train, test in split(groups):
        fitted = fit_combined(values[train], correct[train], groups[train], stage)
        each[test] = fitted.each(values[test])
        best[test] = each[test, fitted.best]
        together[test] = fitted.together(values[test])
    return HeldOut(each, best, together)


def split(groups: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the numbers of the answers of all folds but one, and of that one.

    Answers to one question, which have the same number in ``groups`` ``(n,)``, stay together.
    """
    names, member = np.unique(groups, return_inverse=True)
    fold = (np.random.default_rng(0).permutation(len(names)) % FOLDS)[member]
    for number in range(min(FOLDS, len(names))):
        yield np.flatnonzero(fold != number), np.flatnonzero(fold == number)


def log_loss(chances: FloatArray, correct: BoolArray) -> FloatArray:
    """Return the negative log-likelihood of each answer."""
    return -np.log(np.where(correct, chances, 1 - chances))


class Gain(NamedTuple):
    """A mean of differences between answers, and its standard error."""

    value: float
    deviation: float


def paired_gain(before: FloatArray, after: FloatArray, groups: IntArray) -> Gain:
    """Return the mean of ``before - after``, with the standard error of independent questions."""
    difference = before - after
    mean = float(difference.mean())
    _, member = np.unique(groups, return_inverse=True)
    sums = np.bincount(member, difference - mean)
    spread = len(sums) / max(len(sums) - 1, 1)
    return Gain(mean, float(np.sqrt(spread * (sums**2).sum())) / len(difference))
