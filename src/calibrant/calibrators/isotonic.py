r"""Isotonic regression of probabilities: the rising steps that fit the outcomes best.

Of the :math:`n K` pairs (probability of a class, whether it is the label) only :math:`n` have the
outcome 1. The solution pools the zeros between two of those with the one before: their number and
the largest of them are all that a fit needs. Log-odds stand for probabilities, which near 1 have no
digits left, and are rounded to single precision, so that rounding errors do not sort what is equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from calibrant._core import chunks
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_some, warn
from calibrant._core.chunks import Examples, LabelledRows, on_threads, thread_ranges, top_class
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.fit_inputs import _missing_classes, _warn_together
from calibrant.calibrators.histogram import _by_class
from calibrant.calibrators.piecewise import _at_place, _place
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.top_label import _log_sum_without, _maps_class_one, kept_by_task

_Odds: TypeAlias = NDArray[np.float32]
_Run: TypeAlias = tuple[int, int]

_CURVE_SIZE = 10
"""Parameters that a curve counts for; in truth its steps become more with the examples."""
_LOG_OLD_SHARE = math.log(1e-9)  # of the share of the old probability that is added to the new one
_MIN_LEVEL = 1e-37  # smallest level but 0, so that gradients stay finite
_CERTAIN_ODDS = 1e30  # log-odds of a probability of 1
_NUMBERS_AT_A_TIME = {
    "cpu": 1 << 15,
    "cuda": 1 << 23,
}  # numbers at a time: copies stay in a core's cache
_MAX_HELD = 1 << 22  # numbers that are held at a time, unless an eighth of the logits are more


class _StepCalibrator(Calibrator):
    """A temperature, if wanted, then curves of steps for the probabilities of the classes."""

    learned_shapes = "odds_ points; prob_ points"
    temperature_: Tensor
    odds_: Tensor
    prob_: Tensor

    def __init__(self, *, temperature: bool = True) -> None:
        super().__init__()
        self.temperature = temperature
        self._store(temperature_=1.0, odds_=torch.zeros(1), prob_=torch.zeros(1))

    def _fit_curves(self, examples: Examples, odds: _Odds) -> _StepCurve:
        """One curve, or one for each class; ``odds`` ``(n,)`` are those of the labels."""
        raise NotImplementedError

    def _fit(self, examples: Examples, context: Context) -> None:
        check_some(int((examples.labels != IGNORED).sum()))
        self.solution_, result = None, 1.0
        if self.temperature:
            first = TemperatureScaling().fit_examples(examples)
            self.solution_, result = first.solution_, float(first.temperature_)
        self._store(temperature_=result)
        task = partial(_label_odds, examples, result)
        odds, right = chunks.joined(on_threads(task, thread_ranges(examples)))
        if right.all() or not right.any():
            which = f"all {len(right):,} examples are {'right' if right.all() else 'wrong'}"
            warn(f"{type(self).__name__}: {which}, so nothing is learned about doubt")
        curve = self._fit_curves(examples, odds)
        self._store(odds_=curve.odds, prob_=curve.prob)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        tempered = logits / self.temperature_.to(logits.dtype)
        log_probs = tempered.log_softmax(-1)
        odds = _rounded_class_odds(tempered, log_probs)
        level = steps(odds, self.odds_, self.prob_).to(logits.dtype)
        # in logarithms, so that no class vanishes whose probability float32 cannot hold
        level = torch.where(level > 0, level.clamp(min=_MIN_LEVEL).log(), -torch.inf)
        result = torch.logaddexp(level, log_probs + _LOG_OLD_SHARE)
        result = torch.where(torch.isneginf(logits), -torch.inf, result)
        return result - result.amax(-1, keepdim=True)


class IsotonicCalibration(_StepCalibrator):
    r"""One isotonic regression for the probabilities of all classes (Zhang et al. 2020, IRM).

    .. math:: p'_k \propto f(p_k) + 10^{-9} p_k

    where :math:`f` is the rising function with the least squared error of all pairs of a
    probability and an outcome, as in scikit-learn's ``IsotonicRegression``. The small share of the
    old probability keeps the order of the classes where :math:`f` is level. Probabilities below
    all those that a label had in the fit become nearly 0, so a new label there costs much
    likelihood. Use it with thousands of examples.

    For two classes :math:`f` is fitted to the probability of class 1 and whether it is the label,
    as in Zadrozny and Elkan 2002, so that the threshold of 0.5 may move.

    Parameters
    ----------
    temperature : bool
        Divide by the best single temperature first, which the paper does not.
    keep_argmax : bool, optional
        Keep the predicted class; by default that of more than two classes. With True, the pairs of
        both classes are pooled.

    Attributes
    ----------
    temperature_ : scalar Tensor
    odds_, prob_ : (m,) Tensor
        Log-odds of the ends of the steps, and the new probability there; ``(2, m)`` where class 1
        has a curve of its own, and class 0 its mirror image.

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
    summary = "a temperature, then one rising step curve for all classes"
    keeps_argmax = monotone = kept_by_task
    learned_shapes = "odds_ points|classes points; prob_ points|classes points"

    def __init__(self, *, temperature: bool = True, keep_argmax: bool | None = None) -> None:
        super().__init__(temperature=temperature)
        self.keep_argmax = keep_argmax

    def size(self, classes: int) -> int:
        """Equivalent parameters of a curve, and the temperature."""
        return _CURVE_SIZE + self.temperature

    def _fit_curves(self, examples: Examples, odds: _Odds) -> _StepCurve:
        if _maps_class_one(self, examples.classes):
            return _class_curves(self, examples, len(odds))
        hit_odds, hits = counted(odds, examples.labelled_weight())
        walk = partial(_others, examples, float(self.temperature_), hit_odds)
        mass, largest = zip(*on_threads(walk, thread_ranges(examples)), strict=True)
        return pooled(hit_odds, hits, _Between(np.sum(mass, axis=0), np.max(largest, axis=0)))


class IsotonicOneVsRest(_StepCalibrator):
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
        Log-odds at which the steps of a class end, and the new probability there; short rows
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
        """Equivalent parameters of a curve for each class, and the temperature."""
        return _CURVE_SIZE * classes + self.temperature

    def _fit_curves(self, examples: Examples, odds: _Odds) -> _StepCurve:
        return _class_curves(self, examples, len(odds))


def _rounded_class_odds(logits: Tensor, log_probs: Tensor) -> Tensor:
    """Log-odds of every class ``(..., classes)`` in float32, of logits whose largest is 0."""
    # only the top class can have more than a half: the others lose no digits
    less, top = log_probs.clamp(max=-math.log(2)), top_class(logits)
    odds = less - torch.log1p(-less.exp())
    return odds.scatter(-1, top, -_log_sum_without(logits, top)).float()


def steps(odds: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The line through points (log-odds, new probability), straight in the old probability."""
    x, y = x.to(odds.dtype), y.to(odds.dtype)
    last = x.shape[-1] - 1
    after = _place(odds, x).clamp(min(1, last), last)
    before = after - min(1, last)
    low, high = _at_place(x, before), _at_place(x, after)
    side = torch.where(low > 0, -1.0, 1.0)  # the tail in which differences keep their digits
    start = torch.sigmoid(side * low)
    width = torch.sigmoid(side * high) - start
    flat = width == 0
    share = (torch.sigmoid(side * odds) - start) / torch.where(flat, 1, width)
    share = torch.where(flat, (odds > low).to(odds.dtype), share.clamp(0, 1))
    bottom, ceiling = _at_place(y, before), _at_place(y, after)
    return torch.minimum(bottom + share * (ceiling - bottom), ceiling)


class _StepCurve(NamedTuple):
    """Ends of steps, ``(m,)``, or ``(classes, m)`` where short rows repeat their last end."""

    odds: _Odds
    prob: FloatArray


class _Between(NamedTuple):
    """The pairs with outcome 0 before the first hit, and from each hit on."""

    mass: FloatArray  # (hits + 1,) sum of their weights
    largest: _Odds  # (hits + 1,) the last of them, -inf where there are none


def nothing(hit_odds: _Odds) -> _Between:
    """Sums to begin with."""
    return _Between(np.zeros(len(hit_odds) + 1), np.full(len(hit_odds) + 1, -np.inf, np.float32))


def counted(odds: _Odds, weight: FloatArray | None) -> tuple[_Odds, FloatArray]:
    """Different log-odds in order, and the weight of the examples at each."""
    hit_odds, which = np.unique(odds, return_inverse=True)
    return hit_odds, np.bincount(which, weight, minlength=len(hit_odds)).astype(np.float64)


def tally(hit_odds: _Odds, odds: _Odds, weight: FloatArray | None, into: _Between) -> None:
    """Add the log-odds of pairs with outcome 0 to the sums between those of hits."""
    if weight is None:
        odds = np.sort(odds)
    else:
        order = np.argsort(odds)
        odds, weight = odds[order], weight[order]
    where = np.searchsorted(hit_odds, odds, side="right")
    first = np.flatnonzero(np.diff(where, prepend=-1))
    if first.size == 0:
        return
    end, at = np.append(first[1:], len(odds)), where[first]
    into.mass[at] += end - first if weight is None else np.add.reduceat(weight, first)
    into.largest[at] = np.maximum(into.largest[at], odds[end - 1])


def _tally_there(hit_odds: _Odds, odds: Tensor, weight: Tensor | None, into: _Between) -> None:
    """As :func:`tally`, on a device, where all numbers are many more than the hits."""
    odds, order = odds.sort()
    ends = torch.searchsorted(odds, torch.from_numpy(hit_odds).to(odds.device))
    bounds = F.pad(F.pad(ends, (1, 0)), (0, 1), value=len(odds))
    until = bounds if weight is None else F.pad(weight[order].cumsum(0), (1, 0))[bounds]
    last = odds[(bounds[1:] - 1).clamp(min=0)]
    largest = torch.where(bounds.diff() > 0, last, -torch.inf)
    into.mass[:] += until.diff().cpu().numpy()
    np.maximum(into.largest, largest.cpu().numpy(), out=into.largest)


def pooled(hit_odds: _Odds, hits: FloatArray, misses: _Between) -> _StepCurve:
    """The ends of the steps of an isotonic regression; ``hits`` are the weights at ``hit_odds``."""
    total, left, right = hits + misses.mass[1:], hit_odds, np.maximum(hit_odds, misses.largest[1:])
    if misses.largest[0] > -np.inf:  # none of these was right
        hits, total = np.append(0, hits), np.append(misses.mass[0], total)
        left, right = (np.append(misses.largest[0], ends) for ends in (left, right))
    first = _violators(hits, total)
    last = np.append(first[1:], len(hits)) - 1
    value = np.add.reduceat(hits, first) / np.add.reduceat(total, first)
    x, y = np.stack([left[first], right[last]], axis=1).ravel(), np.repeat(value, 2)
    kept = np.append(True, np.diff(x) > 0)
    return _StepCurve(x[kept], y[kept])


def _violators(hits: FloatArray, total: FloatArray) -> IntArray:
    """First group of each step, after groups that do not rise were pooled with those before.

    ``scipy.optimize.isotonic_regression`` compares rounded means, and now and then keeps groups of
    equal means apart. Here products are compared, which are exact for counts.
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


def _odds_chunks(
    examples: Examples, divisor: float, run: _Run
) -> Iterator[tuple[LabelledRows, Tensor]]:
    """Yield blocks with the log-odds of all classes; bad rows are refused."""
    for chunk in chunks.labelled_chunks(examples, *run):
        top = chunk.logits.amax(-1, keepdim=True)
        own = (top - chunk.logits.gather(-1, chunk.labels[:, None]))[:, 0]
        if not torch.isfinite(own).all():
            raise chunks.explained(
                examples, int(chunk.number[~torch.isfinite(own).cpu().numpy()][0])
            )
        odds = torch.empty_like(chunk.logits, dtype=torch.float32)
        numbers = _NUMBERS_AT_A_TIME.get(odds.device.type, _NUMBERS_AT_A_TIME["cpu"])
        rows = max(1, numbers // examples.classes)
        for a in range(0, len(odds), rows):
            wide = (chunk.logits[a : a + rows].double() - top[a : a + rows]) / divisor
            odds[a : a + rows] = _rounded_class_odds(wide, wide.log_softmax(-1))
        yield chunk, odds


def _label_odds(examples: Examples, temperature: float, run: _Run) -> tuple[NDArray[Any], ...]:
    """Log-odds of the labels, and whether they are the top class."""
    parts = [
        (
            odds.gather(-1, chunk.labels[:, None])[:, 0],
            top_class(chunk.logits)[:, 0] == chunk.labels,
        )
        for chunk, odds in _odds_chunks(examples, temperature, run)
    ]
    return tuple(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))


def _others(examples: Examples, temperature: float, hit_odds: _Odds, run: _Run) -> _Between:
    """The pairs between those of hits, of all classes but the labels of a run of rows."""
    result = nothing(hit_odds)
    for chunk, odds in _odds_chunks(examples, temperature, run):
        # to where masked classes are: below every hit, where the curve is 0 however many there are
        odds.scatter_(-1, chunk.labels[:, None], -torch.inf)
        weight = chunk.weight
        weight = None if weight is None else weight.repeat_interleave(examples.classes)
        if odds.device.type != "cpu":
            _tally_there(hit_odds, odds.view(-1), weight, result)
            continue
        tally(hit_odds, odds.numpy().ravel(), None if weight is None else weight.numpy(), result)
    return result


def _class_curves(calibrator: _StepCalibrator, examples: Examples, count: int) -> _StepCurve:
    """The steps of every class, of ``count`` labelled examples."""
    _warn_together(calibrator, _missing_classes(examples, "their probabilities stay as they are"))
    held = max(1, examples.classes // 8, _MAX_HELD // count)
    temperature, weight = float(calibrator.temperature_), examples.labelled_weight()

    def all_odds(run: _Run) -> Iterator[Tensor]:
        return (odds for _, odds in _odds_chunks(examples, temperature, run))

    curves = _by_class(examples, held, all_odds, partial(_class_curve, weight))
    width = max(len(curve.odds) for curve in curves)
    padded = [[np.pad(x, (0, width - len(x)), mode="edge") for x in c] for c in curves]
    return _StepCurve(*map(np.stack, zip(*padded, strict=True)))


def _class_curve(weight: FloatArray | None, odds: _Odds, own: BoolArray) -> _StepCurve:
    """The steps of one class; the line that changes nothing where it has no example."""
    if not own.any():
        return _StepCurve(
            np.array([-_CERTAIN_ODDS, _CERTAIN_ODDS], np.float32), np.array([0.0, 1.0])
        )
    hit_odds, hits = counted(odds[own], None if weight is None else weight[own])
    misses = nothing(hit_odds)
    tally(hit_odds, odds[~own], None if weight is None else weight[~own], misses)
    return pooled(hit_odds, hits, misses)
