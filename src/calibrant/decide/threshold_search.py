"""The search for thresholds that keep limits with a guaranteed probability (Learn then Test)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit, rel_entr

from calibrant._core.checks import BoolArray, FloatArray, IntArray, warn
from calibrant._core.showing import threshold_text
from calibrant.decide.threshold_results import LimitName, ShownLimit, Threshold, in_words
from calibrant.metrics.intervals import clopper_pearson

MISSES = ("recall", "fnr")
"""Limits that hold the better, the lower the threshold; that on ``fpr``, the higher it is."""
STEPS = 10
"""Thresholds that are tried per unit of log-odds."""
REACH = 7
"""Log-odds up to which they lie above the middle, and down to which below zero."""
FALL = 3.0
"""Factor by which the error probability of a search falls per unit of distance of its start."""
MOST_TIMES = 1e4
"""Times the examples up to which a sufficient number of labels is sought."""
MAX_TRIED = 500
"""Thresholds that are tried to find that number."""

Test: TypeAlias = Callable[[IntArray, "FloatArray | IntArray", float], FloatArray]


def _binomial_p_values(
    trials: IntArray, failures: FloatArray | IntArray, share: float
) -> FloatArray:
    """P-values of shares of failures above ``share``, from counts; 1 where there are no trials."""
    from scipy.stats import binom

    return np.where(trials > 0, binom.cdf(failures, trials, share), 1.0)


def hoeffding_bentkus(trials: IntArray, losses: FloatArray | IntArray, share: float) -> FloatArray:
    """P-values of mean losses above ``share``, from sums of losses in [0, 1].

    >>> hoeffding_bentkus(np.array([0, 100]), np.array([0.0, 2.5]), 0.1).round(4)
    array([1.    , 0.0131])
    """
    mean = np.minimum(losses / np.maximum(trials, 1), share)
    divergence = rel_entr(mean, share) + rel_entr(1 - mean, 1 - share)
    # a sum that is whole but for its last digit must not be rounded up to the next number
    up = np.ceil(np.asarray(losses, np.float64) - 1e-9)
    bentkus = math.e * _binomial_p_values(trials, up, share)
    return np.where(trials > 0, np.minimum(np.exp(-trials * divergence), bentkus), 1.0)


class Trials(NamedTuple):
    """Tests of one limit at the thresholds of a grid, from high to low; each ``(thresholds,)``.

    Attributes
    ----------
    name : what is limited
    limit : its largest value, of precision and recall the smallest
    trials : number of independent units that it is a share or a mean of
    failures : number of those that fail, or the sum of their losses in [0, 1]
    test : p-values of the hypotheses that the share of failures is larger than allowed
    ends : values without any failure, and with failures only
    """

    name: LimitName
    limit: float
    trials: IntArray
    failures: FloatArray | IntArray
    test: Test = _binomial_p_values
    ends: tuple[float, float] = (0.0, 1.0)

    @property
    def share(self) -> float:
        """Share of failures, or mean loss, that is allowed."""
        none, only = self.ends
        return (self.limit - none) / (only - none)

    def value(self, share: float) -> float:
        """Return what is limited, from a share of failures."""
        none, only = self.ends
        return none + (only - none) * share

    def bound(self, at: int, level: float) -> float:
        """Return the end of the interval of the value at one threshold."""
        n, failed = self.trials[at], self.failures[at]
        if self.test is _binomial_p_values:
            return self.value(float(clopper_pearson(failed, n, level)[1]))
        low = float(failed / n)
        above = brentq(lambda x: float(self.test(n, failed, x)) - level, low, 1) if low < 1 else 1.0
        return self.value(float(above))

    def shown(self, at: int | None, level: float) -> ShownLimit:
        """Return the limit with the value at one threshold, and its bound."""
        n = 0 if at is None else int(self.trials[at])
        if at is None or not n:
            return ShownLimit(self.name, self.limit, math.nan, math.nan, n)
        value = self.value(float(self.failures[at]) / n)
        return ShownLimit(self.name, self.limit, value, self.bound(at, level), n)

    def times(self, factor: float, step: int) -> Trials:
        """Return the trials at every ``step``-th threshold of so many times the examples."""
        trials = np.round(factor * self.trials[::step])
        failures = factor * self.failures[::step]
        if self.test is _binomial_p_values:
            failures = np.round(failures)
        return self._replace(trials=trials, failures=np.minimum(failures, trials))

    def passed(self, level: float, shares: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Level of the test at each threshold, and whether it passes.

        Limits on misses hold below any threshold at which they hold, and the one on false alarms
        above: tests in this order need no correction (fixed-sequence testing). The others hand
        their level on by the fallback procedure.
        """
        p_values = self.test(self.trials, self.failures, self.share)
        if self.name in MISSES or self.name == "fpr":
            order = slice(None, None, -1 if self.name in MISSES else 1)
            passed = np.logical_and.accumulate((p_values <= level)[order])[order]
            return np.full(len(p_values), level), passed
        return _fallback(p_values, level * shares)


def _fallback(p_values: FloatArray, shares: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Level of each test and its result; a test that passes hands its level to the next one."""
    levels, passed = np.empty_like(p_values), np.zeros(len(p_values), dtype=bool)
    carried = 0.0
    for i, (p, share) in enumerate(zip(p_values, shares, strict=True)):
        levels[i] = carried + share
        passed[i] = 0 < levels[i] >= p
        carried = levels[i] if passed[i] else 0.0
    return levels, passed


def threshold_grid(max_error: float, reach: int = REACH) -> tuple[FloatArray, FloatArray]:
    """Thresholds about ``1 - max_error`` that are tried, from high to low; the last is 0.

    With them comes the share of the error probability that enters at each.
    """
    # Half a step lower, so that 1 - max_error and other round numbers, at which confidences tie,
    # lie between two thresholds: which side such a tie is on must not hang on its last digit.
    middle = float(logit(1 - max_error)) - 0.5 / STEPS
    below = max(0, math.ceil(middle + reach))
    step = np.arange(REACH * STEPS, -below * STEPS - 1, -1)
    shares = np.where(step % STEPS == 0, FALL ** -np.abs(step / STEPS), 0.0)
    return np.append(expit(middle + step / STEPS), 0.0), np.append(shares / shares.sum(), 0.0)


class Search(NamedTuple):
    """Thresholds of a grid that keep all limits.

    Attributes
    ----------
    passed : (thresholds,) of bool
    levels : (limits, thresholds), of the tests
    shown : bool
        True if a test passes. A limit on misses alone is kept by the threshold 0 in any case.
    """

    passed: BoolArray
    levels: FloatArray
    shown: bool


def _search(limits: Sequence[Trials], shares: FloatArray, alpha: float) -> Search:
    """Find the thresholds at which all limits hold, except with the probability ``alpha``.

    The limits share ``alpha`` equally (Bonferroni).
    """
    levels, results = zip(*(one.passed(alpha / len(limits), shares) for one in limits), strict=True)
    shown = bool(np.logical_and.reduce(results).any())
    for one, passed in zip(limits, results, strict=True):
        passed[-1] |= one.name in MISSES  # nothing is below the threshold 0
    kept = np.logical_and.reduce(results)
    others = any(one.name not in MISSES for one in limits)
    return Search(kept, np.array(levels), shown or (others and bool(kept.any())))


def _more_labels(limits: Sequence[Trials], shares: FloatArray, alpha: float, n: int) -> float:
    """About how many more examples would show the limits, if their rates were as in these.

    Infinity if no number would.
    """
    monotone = all(one.name in (*MISSES, "fpr") for one in limits)
    step = math.ceil(len(shares) / MAX_TRIED) if monotone else 1

    def enough(times: float) -> bool:
        larger = [one.times(times, step) for one in limits]
        return _search(larger, shares[::step], alpha).shown

    high = 2.0
    while not enough(high):
        high *= 2
        if high > max(MOST_TIMES, 10 * MOST_TIMES / n):
            return math.inf
    low = high / 2
    while high - low > max(0.5 / n, 0.01 * low):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return math.ceil(n * high - 1e-9) - n


class Counts(NamedTuple):
    """What the thresholds of a grid do, from high to low; two of them ``(thresholds,)``.

    Attributes
    ----------
    n : number of independent units
    positive : number of those that are positive, or right
    flagged : number of those that are flagged, or accepted
    false : number of these that are negative, or wrong, or the sum of their losses in [0, 1]
    """

    n: int
    positive: int
    flagged: IntArray
    false: IntArray | FloatArray

    def trials(self, name: LimitName, limit: float, costs: FloatArray | None = None) -> Trials:
        """Return the tests of one limit."""
        every = np.ones_like(self.flagged)
        if name in MISSES:
            missed = self.positive - (self.flagged - self.false)
            ends = (0.0, 1.0) if name == "fnr" else (1.0, 0.0)
            return Trials(name, limit, self.positive * every, missed, ends=ends)
        if name == "fpr":
            return Trials(name, limit, (self.n - self.positive) * every, self.false)
        if name == "cost":
            assert costs is not None
            ends = float(costs.min()), float(costs.max())
            losses = (self.losses(costs) - self.n * ends[0]) / (ends[1] - ends[0])
            return Trials(name, limit, self.n * every, losses, hoeffding_bentkus, ends)
        ends = (0.0, 1.0) if name == "error" else (1.0, 0.0)
        return Trials(name, limit, self.flagged, self.false, ends=ends)

    def losses(self, costs: FloatArray) -> FloatArray:
        """Return the sum of the costs of all decisions at each threshold."""
        found = self.flagged - self.false
        rejected = self.n - self.positive - self.false
        counts = np.stack([rejected, self.false, self.positive - found, found])
        return np.asarray(costs.reshape(4) @ counts)


def best_passing(
    grid: FloatArray,
    shares: FloatArray,
    limits: Sequence[Trials],
    counts: Counts,
    *,
    certainty: float,
    costs: FloatArray | None = None,
    of: str = "",
) -> Threshold:
    """Return the best threshold that passes in the procedure of :func:`threshold`.

    If none passes because of the cost, it is the cheapest of those that keep the other limits.
    ``of`` says in the warning of what the examples are.
    """
    alpha, n = 1 - certainty, counts.n
    found = _search(limits, shares, alpha)
    needed = 0.0 if found.shown else _more_labels(limits, shares, alpha, n)
    passed = found.passed
    if not passed.any() and (others := [one for one in limits if one.name != "cost"]) != limits:
        passed = _search(others, shares, alpha).passed if others else np.ones_like(passed)
    at, value, share = None, math.inf, 0.0
    if len(places := passed.nonzero()[0]):
        at = int(places[-1])  # the lowest
        if costs is not None:
            at = int(places[counts.losses(costs)[places].argmin()])
        elif all(one.name in MISSES for one in limits):
            at = int(places[0])
        value, share = float(grid[at]), float(counts.flagged[at]) / n
    levels = found.levels[:, at or 0].tolist()
    kept = tuple(one.shown(at, level) for one, level in zip(limits, levels, strict=True))
    if passed is not found.passed:
        kept = tuple(one._replace(bound=math.nan) for one in kept)
    cost = None if costs is None else _as_tuples(costs)
    made = Threshold(value, share, n, certainty, kept, needed, cost)
    if not found.shown:
        _warn(made, of, one_sided=counts.positive in (0, n))
    return made


def cheapest(grid: FloatArray, counts: Counts, costs: FloatArray, *, certainty: float) -> Threshold:
    """Return the threshold with the lowest cost in the examples, which guarantees nothing."""
    losses = counts.losses(costs)
    at, n = int(losses.argmin()), counts.n
    cost = ShownLimit("cost", math.inf, float(losses[at]) / n, math.nan, n)
    share = float(counts.flagged[at]) / n
    return Threshold(float(grid[at]), share, n, certainty, (cost,), cost=_as_tuples(costs))


def _as_tuples(costs: FloatArray) -> tuple[tuple[float, float], tuple[float, float]]:
    (a, b), (c, d) = costs.tolist()
    return (a, b), (c, d)


def _warn(made: Threshold, of: str, *, one_sided: bool) -> None:
    """Warn that the limits are not shown, and say what would help."""
    wish = in_words([f"the {one.name} at {one.limit:g}" for one in made.limits])
    sure = f"{100 * made.certainty:.4g} % certainty"
    taken = "accepted" if made.about_answers else "flagged"
    so = f"{'every' if made.coverage else 'no'} example is {taken}"
    if made.threshold < math.inf and any(one.name == "cost" for one in made.limits):
        so = f"the threshold is the cheapest in these, {threshold_text(made.threshold)}"
    remedy = "label more"
    if math.isinf(made.more_labels):
        remedy = "calibrate or improve the model"
        if one_sided and not made.about_answers:
            remedy = "label positive and negative ones"
    warn(
        f"no threshold keeps {wish} with {sure} on {made.n:,} example{'s' if made.n > 1 else ''}"
        f"{of}, so {so}; {made.needs()}: "
        f"{remedy}, or relax the limit"
    )
