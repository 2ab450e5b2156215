r"""Success rates of systems, from many judged answers of which people labelled a few.

A judge's scores :math:`f` are cheap, and wrong in unknown ways; labels :math:`y` of people are
right, and few. A line :math:`g = a + b f`, fitted to the labelled answers L, predicts the label of
every answer, and the labelled ones correct its mean:

.. math:: \hat\theta = \frac1N \sum_{i=1}^N g_i +
   \frac{\sum_{i \in L} w_i (y_i - g_i)}{\sum_{i \in L} w_i} .

With labels at random (equal :math:`w`) this is prediction-powered inference with the tuning that
minimises the variance (PPI++, Angelopoulos, Duchi and Zrnic 2023); with :math:`w` the inverse
probability of being labelled it is the regression estimator of survey sampling, and with strata,
each of which has its own constant a, the stratified one. Least squares make the second term 0.
Whatever the judge does, the rate is right on average; a good judge makes its interval narrow, a
useless one leaves that of the labels alone.

The interval of a rate contains all :math:`\theta` that are compatible with its estimate,

.. math:: (\hat\theta - \theta)^2 \le t^2 \left( v(\theta) + P \right), \qquad
   v(\theta) = \min\{\max\{V + s\,(\theta - \hat\theta),\;
   m \kappa\,\delta (1 - \delta)\},\; m \kappa\,\theta (1 - \theta)\}, \quad
   \delta = |\hat\theta - \theta| ,

where V is the variance by the residuals, P that of the mean prediction, m the largest share of a
label (1/n if they weigh the same), and t Student's quantile. The variance depends on the rate as
that of shares does in Wilson's interval, to which this one comes down if the judge is useless:

- :math:`s = \sum x^3 / \sum x^2`, with the terms x of the estimate, is how fast the variance of
  skewed residuals changes with their mean (exponential tilting; (1 - 2p) / n for shares);
- a rate that is off by :math:`\delta` because the judge makes errors of which none is among the
  labelled answers needs residuals of variance :math:`\delta (1 - \delta)` at least, and the errors
  may be where labels weigh most: with no error among n labels the end is :math:`t^2 / (n + t^2)`
  away, a rule of three;
- no residual varies more than a label itself. :math:`\kappa` is 1 for labels of 0 and 1; for grades
  in between it is their variance in units of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit

from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    IntArray,
    Values,
    as_float64,
    as_keys,
    as_values,
    check_level,
    warn,
)
from calibrant._core.showing import one_line
from calibrant.metrics.intervals import Estimate

_MIN_LABELS = 10
"""Labels below which the judge is not used: its slope would be a guess."""
_ROUNDING = 1e-12
"""Share of the squared scores that rounding may leave where all are equal."""
_UNLIKELY = 2.6
"""Standard errors by which scores of labelled answers differ in one of a hundred random draws."""


class Uncertainty(NamedTuple):
    """What the interval of a rate is made of; see the top of this file.

    Attributes
    ----------
    residual : float
        Variance of the estimate by the residuals.
    skew : float
        Change of that variance with the mean.
    predicted : float
        Variance of the mean prediction.
    largest : float
        Largest share of a label, or of a group of them.
    dispersion : float
        Variance of a label in units of that of 0 and 1 with the same mean.
    parameters : int
        Of the line that predicts labels.
    """

    residual: float
    skew: float
    predicted: float
    largest: float
    dispersion: float
    parameters: int

    def variance(self, rate: float, value: float) -> float:
        """Variance of the estimate ``value`` if the rate is ``rate``."""
        distance, unit = abs(rate - value), self.largest * self.dispersion
        seen = self.residual + self.skew * (rate - value)
        unseen, most = unit * distance * (1 - distance), unit * rate * (1 - rate)
        return min(max(seen, unseen), most) + self.predicted

    def ends(self, value: float, level: float) -> tuple[float, float]:
        """Return both ends of the interval around a rate."""
        freedom = max(1 / self.largest - self.parameters, 1.0)
        quantile = float(stdtrit(freedom, (1 + level) / 2))

        def beyond(rate: float) -> float:
            return abs(rate - value) - quantile * math.sqrt(self.variance(rate, value))

        def end(limit: float) -> float:
            """Rate between the value and a limit at which the variance no longer reaches."""
            if beyond(limit) <= 0:
                return limit
            start = value + 1e-9 * (limit - value)  # at the value itself all labels may be equal
            return float(brentq(beyond, start, limit, xtol=1e-9)) if beyond(start) < 0 else value

        return end(0.0), end(1.0)

    def with_labels(self, ratio: float) -> Uncertainty:
        """Return what it would be with ``ratio`` times as many labels, drawn in the same way."""
        residual, skew, largest = (x / ratio for x in (self.residual, self.skew, self.largest))
        return self._replace(residual=residual, skew=skew, largest=largest)


class RateEstimate(NamedTuple):
    """Success rate of a system, with an interval.

    Attributes
    ----------
    rate : Estimate
        From judge and labels.
    labels_alone : Estimate
        From the labels alone, to compare with.
    slope : float
        Of the line that predicts labels from scores; 0 if the judge is not used.
    n, labelled : int
        Answers, and those of them with labels.
    worth : float
        Number of labels that would give as narrow an interval without the judge.
    level : float
        Coverage of the intervals.
    uncertainty : Uncertainty
    influence : (n,)
        Of each answer on the rate.
    """

    rate: Estimate
    labels_alone: Estimate
    slope: float
    n: int
    labelled: int
    worth: float
    level: float
    uncertainty: Uncertainty
    influence: FloatArray

    @property
    def half_width(self) -> float:
        """Half of the length of the interval."""
        return (self.rate.high - self.rate.low) / 2

    def __repr__(self) -> str:
        value, low, high = (100 * x for x in self.rate)
        interval = f"{100 * self.level:g} % interval {low:.1f} to {high:.1f}"
        count = f"{self.labelled:,} of {self.n:,} labelled"
        return one_line(self, f"{value:.1f} %", interval, count)

    def labels_needed(self, half_width: float) -> int | None:
        """Return how many labels in total would give an interval of a half-width.

        They are drawn in the same way as those that there are. None if labels for all answers would
        not suffice: more answers are needed then.
        """
        if not 0 < half_width < 0.5:
            raise ValueError(
                f"half_width must be between 0 and 0.5, got {half_width}: 0.02 means 2 points"
            )
        if self._half_width_with(self.n) > half_width:
            return None
        return _first(lambda m: self._half_width_with(m) <= half_width, self.labelled)

    def answers_needed(self, half_width: float) -> int:
        """Return how many answers, all labelled, would give an interval of a half-width."""
        value, share = self.rate.value, self.uncertainty.dispersion
        plain = Uncertainty(share * value * (1 - value), share * (1 - 2 * value), 0, 1, share, 1)

        def narrow(answers: int) -> bool:
            low, high = plain.with_labels(answers).ends(value, self.level)
            return (high - low) / 2 <= half_width

        return _first(narrow, self.n)

    def _half_width_with(self, labels: int) -> float:
        scaled = self.uncertainty.with_labels(labels / self.labelled)
        low, high = scaled.ends(self.rate.value, self.level)
        return (high - low) / 2


def _first(holds: Callable[[int], bool], start: int) -> int:
    """Return the first number from ``start`` on for which a rising condition holds."""
    low, step = start - 1, 1
    while not holds(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class _Labels(NamedTuple):
    """Checked input of :func:`success_rate`. Arrays are ``(n,)``."""

    judge: FloatArray
    human: FloatArray  # 0 where there is no label
    known: BoolArray
    weight: FloatArray  # share of each label; 0 where there is none
    strata: IntArray
    clusters: IntArray


def success_rate(
    judge: Values,
    human: Values,
    *,
    probability: Values | None = None,
    strata: Values | None = None,
    groups: Values | None = None,
    level: float = 0.9,
) -> RateEstimate:
    """Estimate the share of right answers of a system from a judge and some labels of people.

    It is the rate of answers to questions like these, not only to these.

    Parameters
    ----------
    judge : (n,)
        Scores of a judge, or votes of 0 and 1, for all answers. Any scale will do: only a line in
        them is used.
    human : (n,)
        1 or 0 for right and wrong, or a grade in between, as a person sees it; NaN without label.
    probability : (n,), optional
        Probability with which each answer was drawn for labelling, if it was not the same for all.
        Only those of labelled answers are used.
    strata : (n,), optional
        Part of the answers, such as "judged right" and "judged wrong", within which the labelled
        ones were drawn. Each needs two labels at least.
    groups : (n,), optional
        Answers that are not independent, such as several to the same question.
    level : float
        Coverage of the interval.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> right = rng.random(5000) < 0.8
    >>> judge = np.where(rng.random(5000) < 0.9, right, ~right)  # errs in one case of ten
    >>> human = np.where(np.arange(5000) < 200, right, np.nan)
    >>> success_rate(judge, human)
    RateEstimate(81.4 %, 90 % interval 78.0 to 84.8, 200 of 5,000 labelled)
    """
    check_level(level)
    data = _checked(judge, human, probability, strata, groups)
    labelled, others = data.judge[data.known], data.judge[~data.known]
    if probability is None and strata is None and min(len(labelled), len(others)) >= _MIN_LABELS:
        # are they chosen by what the judge says of them?
        noise = math.hypot(*(x.std(ddof=1) / math.sqrt(len(x)) for x in (labelled, others)))
        if abs(labelled.mean() - others.mean()) > _UNLIKELY * noise:
            warn(
                f"the labelled answers do not look drawn at random: the judge gives them "
                f"{labelled.mean():.3g} on average, and {others.mean():.3g} the others; pass the "
                "probability of each to be labelled, or strata, else the rate may be wrong"
            )
    alone = _fitted(data._replace(judge=np.zeros_like(data.judge)), level)
    used = _fitted(data, level)
    before, after = (each.uncertainty.variance(*2 * (each.rate.value,)) for each in (alone, used))
    worth = used.labelled * (before / after if after else 1.0)
    return used._replace(labels_alone=alone.rate, worth=worth)


def _fitted(data: _Labels, level: float) -> RateEstimate:
    predicted, slope = _line(data)
    value, n, labels = float(np.clip(predicted.mean(), 0, 1)), len(predicted), int(data.known.sum())
    residuals = np.where(data.known, data.weight * (data.human - predicted), 0.0)
    influence = (predicted - predicted.mean()) / n + residuals
    # residuals from a line that was fitted to the same labels are too small
    count = np.bincount(data.strata, data.known)
    factor, free = np.sqrt(count / (count - 1))[data.strata], count.sum() - count.size
    factor = factor * math.sqrt(free / max(free - 1, 1)) if slope else factor
    sums, whole, shares, wide = (
        np.bincount(data.clusters, x)
        for x in (residuals, influence, data.weight, residuals * factor)
    )
    squares = float(sums @ sums)
    uncertainty = Uncertainty(
        residual=float(wide @ wide),
        skew=float((sums**3).sum()) / squares if squares else 0.0,
        predicted=max(float(whole @ whole) - squares, 0.0),
        largest=float(shares.max()),
        dispersion=_dispersion(data.human[data.known], data.weight[data.known]),
        parameters=int(data.strata.max()) + 1 + (slope != 0),
    )
    rate = Estimate(value, *uncertainty.ends(value, level))
    return RateEstimate(rate, rate, slope, n, labels, labels, level, uncertainty, influence)


def _line(data: _Labels) -> tuple[FloatArray, float]:
    """Predict labels by a line with a constant for each stratum; return it and its slope."""
    total = np.bincount(data.strata, data.weight)
    label, score = (
        np.bincount(data.strata, data.weight * x) / total for x in (data.human, data.judge)
    )
    off, slope = data.judge - score[data.strata], 0.0
    squares = float(data.weight @ off**2)
    varies = squares > _ROUNDING * float(data.weight @ data.judge**2)
    if data.known.sum() >= _MIN_LABELS and varies:
        slope = float(data.weight @ (off * (data.human - label[data.strata]))) / squares
    return label[data.strata] + slope * off, slope


def _dispersion(labels: FloatArray, weight: FloatArray) -> float:
    mean = float(weight @ labels)
    variance = float(weight @ (labels - mean) ** 2)
    if not variance or ((labels == 0) | (labels == 1)).all():
        return 1.0
    return min(1.0, variance / (mean * (1 - mean)))


def _checked(
    judge: Values,
    human: Values,
    probability: Values | None,
    strata: Values | None,
    groups: Values | None,
) -> _Labels:
    scores, labels = as_values(judge, "judge"), as_float64(human)
    n = len(scores)
    if labels.shape != (n,):
        raise ValueError(f"human must have a value for each of {n} answers, got {labels.shape}")
    known = ~np.isnan(labels)
    some = labels[known]
    if some.size < 2:
        raise ValueError(
            f"two answers or more must have a human label, got {some.size}: label some of them, "
            "drawn at random"
        )
    wrong = some[(some < 0) | (some > 1)]
    if wrong.size:
        raise ValueError(
            f"human must be 0 or 1, or a grade in between, got {wrong[0]:g}: divide grades by the "
            "highest one"
        )
    if not np.ptp(some):
        warn(
            f"all {some.size:,} labels are {some[0]:g}: they say nothing about the judge, "
            "which is not used; label more answers"
        )
    if probability is not None and strata is not None:
        raise ValueError("pass probability or strata, not both: strata imply the probabilities")
    numbers = []
    for name, values in (("strata", strata), ("groups", groups)):
        keys = (np.zeros(n) if name == "strata" else np.arange(n)) if values is None else values
        keys = as_keys(keys)
        if keys.shape != (n,):
            raise ValueError(f"{name} must have a value for each of {n} answers, got {keys.shape}")
        numbers.append(np.unique(keys, return_inverse=True)[1].astype(np.int64))
    parts, clusters = numbers
    weight = _label_weights(known, parts, probability)
    return _Labels(scores, np.where(known, labels, 0.0), known, weight, parts, clusters)


def _label_weights(known: BoolArray, strata: IntArray, probability: Values | None) -> FloatArray:
    """Return the share of all answers that each labelled one stands for, ``(n,)``."""
    n = known.size
    if probability is None:
        size, count = np.bincount(strata), np.bincount(strata, known)
        if count.min() < 2:
            raise ValueError(
                f"each of {size.size} strata needs two labelled answers or more, got "
                f"{count.min():g}: label more, or merge strata"
            )
        return np.where(known, size[strata] / count[strata] / n, 0.0)
    chance = as_float64(probability)
    if chance.shape != (n,):
        raise ValueError(
            f"probability must have a value for each of {n} answers, got {chance.shape}"
        )
    if not ((chance[known] > 0) & (chance[known] <= 1)).all():
        raise ValueError(
            "probability must be above 0 and at most 1 for labelled answers: it is that of being "
            "drawn for labelling"
        )
    weight = np.where(known, 1 / np.where(known, chance, 1.0), 0.0)
    return np.asarray(weight / weight.sum())


def rate_difference(
    first: RateEstimate, second: RateEstimate, *, questions: tuple[Values, Values] | None = None
) -> Estimate:
    """Estimate by how much the rate of the second system exceeds that of the first.

    Parameters
    ----------
    first, second : RateEstimate
        With the same level.
    questions : pair of (n,), optional
        Questions of the answers of each system. Answers to the same questions are compared with
        each other, which makes the interval narrower if they tend to be right together.

    Notes
    -----
    The interval combines those of both rates with their correlation (Zou and Donner 2008), which is
    that of the influences of the same questions.

    Examples
    --------
    >>> right = np.random.default_rng(0).random((2, 500)) < [[0.6], [0.8]]
    >>> rates = [success_rate(each, each.astype(float)) for each in right]
    >>> rate_difference(*rates)
    Estimate(0.244, low=0.1936, high=0.2944)
    """
    if first.level != second.level:
        raise ValueError(f"the levels must be equal, got {first.level} and {second.level}")
    correlation = 0.0
    if questions is not None:
        keys = [as_keys(each) for each in questions]
        for each, rate in zip(keys, (first, second), strict=True):
            if each.shape != (rate.n,):
                raise ValueError(
                    f"questions must have one for each of {rate.n} answers, got {each.shape}"
                )
        _, number = np.unique(np.concatenate(keys), return_inverse=True)
        x, y = (
            np.bincount(some, rate.influence, number.max() + 1)
            for some, rate in zip(np.split(number, [first.n]), (first, second), strict=True)
        )
        size = math.sqrt(float(x @ x) * float(y @ y))
        correlation = float(x @ y) / size if size else 0.0
    a, b = first.rate, second.rate
    value = b.value - a.value

    def reach(up: float, down: float) -> float:
        return math.sqrt(max(up**2 + down**2 - 2 * correlation * up * down, 0.0))

    low = value - reach(b.value - b.low, a.high - a.value)
    high = value + reach(b.high - b.value, a.value - a.low)
    return Estimate(value, low, high)
