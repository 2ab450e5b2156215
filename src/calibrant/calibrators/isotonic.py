r"""Isotonic regression of probabilities: the rising steps that fit the outcomes best.

Of the :math:`n K` pairs (probability of a class, whether it is the label) only :math:`n` have the
outcome 1. The outcomes between two of those are all 0, so the solution pools them with the one
before: how many they are and the largest of them are all that a fit needs. So it walks over the
logits in blocks, and what is solved in the end has :math:`n + 1` groups, whatever the number of
classes.

Log-odds stand for probabilities, which near 1 have no digits left to tell examples apart; only the
lines between steps are straight in the probability itself. They are rounded to single precision,
so that rounding errors do not sort what is equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_some, warn
from calibrant._core.chunks import (
    Chunk,
    Examples,
    explained,
    labelled_chunks,
    on_threads,
    thread_ranges,
    top_class,
)
from calibrant._core.solve import check_time
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.data_checks import missing_classes, warn_together
from calibrant.calibrators.piecewise import at_place, place
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.top_label import log_rest

Odds: TypeAlias = NDArray[np.float32]

STEPS = 10
"""Parameters that a curve counts for; in truth its steps become more with the examples."""
SLIGHT = math.log(1e-9)
"""Logarithm of the share of the old probability that is added to the new one."""
LEAST = 1e-37
"""Smallest level but 0, so that gradients stay finite."""
FAR = 1e30
"""Log-odds of a probability of 1."""
PART = {"cpu": 1 << 15, "cuda": 1 << 23}
"""Numbers that are worked on at a time: a dozen copies of them stay in a core's cache."""
ROOM = 1 << 22
"""Numbers that are held at a time, unless an eighth of the logits are more."""


class StepCalibrator(Calibrator):
    """A temperature, if wanted, then curves of steps for the probabilities of the classes.

    Subclasses write ``_fit_curves``.
    """

    temperature_: Tensor
    odds_: Tensor
    prob_: Tensor
    learned_shapes = "odds_ points; prob_ points"

    def __init__(self, *, temperature: bool = True) -> None:
        super().__init__()
        self.temperature = temperature
        self._store(temperature_=1.0, odds_=torch.zeros(1), prob_=torch.zeros(1))

    def _fit_curves(self, examples: Examples, labelled: Labelled) -> StepCurve:
        """One curve, or one for each class."""
        raise NotImplementedError

    def _fit(self, examples: Examples, context: Context) -> None:
        check_some(int((examples.labels != IGNORED).sum()))
        self.solution_, result = None, 1.0
        if self.temperature:
            first = TemperatureScaling().fit_examples(examples)
            self.solution_, result = first.solution_, float(first.temperature_)
        self._store(temperature_=result)
        labelled = _labelled(examples, result)
        self._warn_of_certainty(labelled.right)
        curve = self._fit_curves(examples, labelled)
        self._store(odds_=curve.odds, prob_=curve.prob)

    def _warn_of_certainty(self, right: BoolArray) -> None:
        if right.all() or not right.any():
            warn(
                f"{type(self).__name__}: all of these {len(right):,} examples are "
                f"{'right' if right.all() else 'wrong'}, so nothing is learned about doubt"
            )

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        tempered = logits / self.temperature_.to(logits.dtype)
        log_probs = tempered.log_softmax(-1)
        level = steps(rounded_class_odds(tempered, log_probs), self.odds_, self.prob_).to(
            logits.dtype
        )
        # in logarithms, so that no class vanishes whose probability float32 cannot hold
        level = torch.where(level > 0, level.clamp(min=LEAST).log(), -torch.inf)
        result = torch.logaddexp(level, log_probs + SLIGHT)
        result = torch.where(torch.isneginf(logits), -torch.inf, result)
        return result - result.amax(-1, keepdim=True)


class IsotonicCalibration(StepCalibrator):
    r"""One isotonic regression for the probabilities of all classes (Zhang et al. 2020, IRM).

    .. math:: p'_k \propto f(p_k) + 10^{-9} p_k

    where :math:`f` is the rising function with the least squared error of all pairs of a
    probability and an outcome, as scikit-learn's ``IsotonicRegression`` finds it. The small share
    of the old probability keeps the order of the classes where :math:`f` is level. Masked classes
    stay impossible and count for nothing.

    A class whose probability is below all those that a label had in the fit gets nearly 0, so a
    single new label there costs much likelihood. Use it with thousands of examples.

    Parameters
    ----------
    temperature : bool
        Divide by the best single temperature first, which the paper does not: on real models
        that is better in calibration and in likelihood.

    Attributes
    ----------
    temperature_ : scalar Tensor
    odds_, prob_ : (m,) Tensor
        Log-odds of the ends of the steps, and the new probability there.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(5000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = IsotonicCalibration(temperature=False).fit(3 * truth, labels)  # over-confident
    >>> steps(torch.tensor([0.0, 2.2]), fitted.odds_, fitted.prob_)  # of 0.5 and 0.9
    tensor([0.3..., 0.4...])
    """

    name = "isotonic"
    aliases = ("isotonic_regression",)
    summary = "a temperature, then one rising step curve for the probabilities of all classes"
    keeps_argmax = True
    monotone = True

    def size(self, classes: int) -> int:
        """What a curve counts for, and the temperature."""
        return STEPS + self.temperature

    def _fit_curves(self, examples: Examples, labelled: Labelled) -> StepCurve:
        marks, hits = counted(labelled.odds, labelled.weight)
        walk = partial(_others, examples, float(self.temperature_), marks)
        mass, largest = zip(*on_threads(walk, thread_ranges(examples)), strict=True)
        return pooled(marks, hits, Between(np.sum(mass, axis=0), np.max(largest, axis=0)))


class IsotonicOneVsRest(StepCalibrator):
    r"""An isotonic regression for each class (Zadrozny and Elkan 2002).

    .. math:: p'_k \propto f_k(p_k) + 10^{-9} p_k

    where :math:`f_k` is fitted to the probability of class :math:`k` and whether it is the label,
    as in :class:`IsotonicCalibration`. It may change the predicted class. With a temperature first
    it is the IROvA-TS of Zhang et al. 2020. Classes without an example keep their probability, up
    to the sum of the row. Each class needs hundreds of examples of its own.

    Parameters
    ----------
    temperature : bool
        Divide by the best single temperature first.

    Attributes
    ----------
    temperature_ : scalar Tensor
    odds_, prob_ : (classes, m) Tensor
        Log-odds of the ends of the steps of each class, and the new probability there; short rows
        repeat their last end.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(5000, 3))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = IsotonicOneVsRest().fit(truth + [0.0, 0.0, 1.0], labels)  # too much of class 2
    >>> fitted.predict_proba(np.array([[0.0, 0.0, 1.0]]))
    array([[0.3..., 0.3..., 0.3...]])
    """

    name = "isotonic_ovr"
    summary = "a rising curve for each class"
    learned_shapes = "odds_ classes points; prob_ classes points"

    def size(self, classes: int) -> int:
        """What a curve counts for, for each class, and the temperature."""
        return STEPS * classes + self.temperature

    def _fit_curves(self, examples: Examples, labelled: Labelled) -> StepCurve:
        warn_together(self, missing_classes(examples, "their probabilities stay as they are"))
        labels = examples.labels[examples.labels != IGNORED]
        held = max(1, examples.classes // 8, ROOM // len(labels))
        curves: list[StepCurve] = []
        for first in range(0, examples.classes, held):
            check_time()
            some = range(first, min(first + held, examples.classes))
            curves += _class_curves(
                _columns(examples, float(self.temperature_), some), labels - first, labelled.weight
            )
        return StepCurve(*(_padded(rows) for rows in zip(*curves, strict=True)))


# ------------------------------------------------------------------------------------- the curves


def rounded_class_odds(logits: Tensor, log_probs: Tensor) -> Tensor:
    """Log-odds of every class ``(..., classes)`` in float32, of logits whose largest is 0."""
    # only the top class can have more than a half: the others lose no digits
    less = log_probs.clamp(max=-math.log(2))
    odds = less - torch.log1p(-less.exp())
    return odds.scatter(-1, logits.argmax(-1, keepdim=True), -log_rest(logits)).float()


def steps(odds: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The line through points (log-odds, new probability), straight in the old probability.

    Level beyond the first and the last point. Points are ``(m,)``, or ``(classes, m)``.

    Examples
    --------
    >>> x = torch.tensor([0.0, 2.1972246])  # probabilities of 0.5 and 0.9
    >>> steps(torch.tensor([-1.0, 0.8472979, 9.0]), x, torch.tensor([0.2, 0.6]))
    tensor([0.2, 0.4, 0.6])
    """
    x, y = x.to(odds.dtype), y.to(odds.dtype)
    last = x.shape[-1] - 1
    after = place(odds, x).clamp(min(1, last), last)
    before = (after - 1).clamp(min=0)
    low, high = at_place(x, before), at_place(x, after)
    side = torch.where(low > 0, -1.0, 1.0)  # the tail in which differences keep their digits
    start = torch.sigmoid(side * low)
    width = torch.sigmoid(side * high) - start
    share = (torch.sigmoid(side * odds) - start) / torch.where(width == 0, 1, width)
    share = torch.where(width == 0, (odds > low).to(odds.dtype), share.clamp(0, 1))
    bottom, ceiling = at_place(y, before), at_place(y, after)
    return torch.minimum(bottom + share * (ceiling - bottom), ceiling)


class StepCurve(NamedTuple):
    """Ends of steps, ``(m,)``, or ``(classes, m)`` where short rows repeat their last end."""

    odds: Odds
    prob: FloatArray


class Between(NamedTuple):
    """The pairs with outcome 0 between the marks, before the first and from each one on."""

    mass: FloatArray  # (marks + 1,) sum of their weights
    largest: Odds  # (marks + 1,) the last of them, -inf where there are none


def nothing(marks: Odds) -> Between:
    """Sums to begin with."""
    return Between(np.zeros(len(marks) + 1), np.full(len(marks) + 1, -np.inf, np.float32))


def counted(odds: Odds, weight: FloatArray | None) -> tuple[Odds, FloatArray]:
    """Different log-odds in order, and the weight of the examples at each."""
    marks, which = np.unique(odds, return_inverse=True)
    return marks, np.bincount(which, weight, minlength=len(marks)).astype(np.float64)


def tally(marks: Odds, odds: Odds, weight: FloatArray | None, into: Between) -> None:
    """Add the log-odds of pairs with outcome 0 to the sums between the marks."""
    if weight is None:
        odds = np.sort(odds)
    else:
        order = np.argsort(odds)
        odds, weight = odds[order], weight[order]
    where = np.searchsorted(marks, odds, side="right")
    first = np.flatnonzero(np.diff(where, prepend=-1))
    if first.size == 0:
        return
    end, at = np.append(first[1:], len(odds)), where[first]
    into.mass[at] += end - first if weight is None else np.add.reduceat(weight, first)
    into.largest[at] = np.maximum(into.largest[at], odds[end - 1])


def pooled(marks: Odds, hits: FloatArray, misses: Between) -> StepCurve:
    """The ends of the steps of an isotonic regression.

    ``marks`` ``(m,)`` are the distinct log-odds of pairs with outcome 1, in order, ``hits`` their
    weights.

    Examples
    --------
    >>> misses = Between(np.array([4.0, 3.0, 0.0]), np.array([-2.0, 1.0, -np.inf]))
    >>> curve = pooled(np.array([-1.0, 2.0]), np.ones(2), misses)
    >>> curve.odds, curve.prob
    (array([-2., -1.,  1.,  2.]), array([0.  , 0.25, 0.25, 1.  ]))
    """
    total, left, right = hits + misses.mass[1:], marks, np.maximum(marks, misses.largest[1:])
    if misses.largest[0] > -np.inf:  # none of these was right
        hits, total = np.append(0, hits), np.append(misses.mass[0], total)
        left, right = (np.append(misses.largest[0], ends) for ends in (left, right))
    first = violators(hits, total)
    last = np.append(first[1:], len(hits)) - 1
    value = np.add.reduceat(hits, first) / np.add.reduceat(total, first)
    x, y = np.stack([left[first], right[last]], axis=1).ravel(), np.repeat(value, 2)
    kept = np.append(True, np.diff(x) > 0)
    return StepCurve(x[kept], y[kept])


def violators(hits: FloatArray, total: FloatArray) -> IntArray:
    """First group of each step, after groups that do not rise were pooled with those before.

    ``scipy.optimize.isotonic_regression`` is six times faster, but compares rounded means: where
    two groups have equal means, it now and then keeps them apart. Here products are compared,
    which are exact for counts.

    >>> violators(np.array([0.0, 2.0, 1.0, 3.0]), np.array([1.0, 3.0, 3.0, 4.0]))
    array([0, 1, 3])
    """
    first: list[int] = []
    sums: list[tuple[float, float]] = []
    for i, (hit, mass) in enumerate(zip(hits.tolist(), total.tolist(), strict=True)):
        start = i
        while sums and sums[-1][0] * mass >= hit * sums[-1][1]:
            before, start = sums.pop(), first.pop()
            hit, mass = hit + before[0], mass + before[1]
        first.append(start)
        sums.append((hit, mass))
    return np.array(first)


# --------------------------------------------------------------------------------------- the walk


class Labelled(NamedTuple):
    """The labelled rows, each ``(n,)``."""

    odds: Odds  # of the label
    right: BoolArray  # whether the label is the top class
    weight: FloatArray | None


def _odds_chunks(
    examples: Examples, temperature: float, row_range: tuple[int, int]
) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield blocks with the log-odds of all classes; bad rows are refused."""
    for chunk in labelled_chunks(examples, *row_range):
        top = chunk.logits.amax(-1, keepdim=True)
        own = (top - chunk.logits.gather(-1, chunk.labels[:, None]))[:, 0]
        if not torch.isfinite(own).all():
            raise explained(examples, int(chunk.number[~torch.isfinite(own).cpu().numpy()][0]))
        odds = torch.empty_like(chunk.logits, dtype=torch.float32)
        rows = max(1, PART.get(odds.device.type, PART["cpu"]) // examples.classes)
        for part, best, out in zip(
            *(x.split(rows) for x in (chunk.logits, top, odds)), strict=True
        ):
            wide = (part.double() - best) / temperature
            out.copy_(rounded_class_odds(wide, wide.log_softmax(-1)))
        yield chunk, odds


def _cuts(examples: Examples) -> tuple[list[tuple[int, int]], list[int]]:
    """Runs of rows, and how many labelled ones come before each and in all."""
    cuts = thread_ranges(examples)
    counts = [int((examples.labels[a:b] != IGNORED).sum()) for a, b in cuts]
    return cuts, list(accumulate(counts, initial=0))


def _labelled(examples: Examples, temperature: float) -> Labelled:
    cuts, ends = _cuts(examples)
    result = Labelled(
        np.empty(ends[-1], np.float32), np.empty(ends[-1], bool), examples.labelled_weight()
    )

    def fill(row_range: tuple[int, int], done: int) -> None:
        for chunk, odds in _odds_chunks(examples, temperature, row_range):
            some = slice(done, done := done + len(odds))
            result.odds[some] = odds.gather(-1, chunk.labels[:, None])[:, 0].cpu().numpy()
            result.right[some] = (top_class(chunk.logits) == chunk.labels).cpu().numpy()

    on_threads(fill, cuts, ends[:-1])
    return result


def _others(
    examples: Examples, temperature: float, marks: Odds, row_range: tuple[int, int]
) -> Between:
    """What lies between the marks, of all classes but the labels of a run of rows."""
    result = nothing(marks)
    for chunk, odds in _odds_chunks(examples, temperature, row_range):
        # to where masked classes are: below every mark, where the curve is 0 however many there are
        odds.scatter_(-1, chunk.labels[:, None], -torch.inf)
        weight = None if chunk.weight is None else np.repeat(chunk.weight.numpy(), examples.classes)
        tally(marks, odds.cpu().numpy().ravel(), weight, result)
    return result


def _columns(examples: Examples, temperature: float, some: range) -> Odds:
    """Log-odds of some classes, ``(classes, n)``."""
    cuts, ends = _cuts(examples)
    result = np.empty((len(some), ends[-1]), np.float32)

    def fill(row_range: tuple[int, int], done: int) -> None:
        for _, odds in _odds_chunks(examples, temperature, row_range):
            rows = slice(done, done := done + len(odds))
            result[:, rows] = odds[:, some.start : some.stop].T.cpu().numpy()

    on_threads(fill, cuts, ends[:-1])
    return result


def _class_curves(columns: Odds, labels: IntArray, weight: FloatArray | None) -> list[StepCurve]:
    """The steps of each row of columns, on one thread per core."""

    def some(numbers: IntArray) -> list[StepCurve]:
        return [_class_curve(columns[k], labels == k, weight) for k in numbers]

    parts = on_threads(some, np.array_split(np.arange(len(columns)), torch.get_num_threads()))
    return list(chain.from_iterable(parts))


def _class_curve(odds: Odds, own: BoolArray, weight: FloatArray | None) -> StepCurve:
    """The steps of one class; the line that changes nothing where it has no example."""
    if not own.any():
        return StepCurve(np.array([-FAR, FAR], np.float32), np.array([0.0, 1.0]))
    marks, hits = counted(odds[own], None if weight is None else weight[own])
    misses = nothing(marks)
    tally(marks, odds[~own], None if weight is None else weight[~own], misses)
    return pooled(marks, hits, misses)


def _padded(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of one length; short ones repeat their last number."""
    width = max(map(len, rows))
    return np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in rows])
