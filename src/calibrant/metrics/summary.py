"""Metrics as entries of the table, and what their values and intervals follow from.

That is sums of scores, sums in bins, and pairs for metrics that sort: each of them, or sums in fine
bins if many. Pairs take nine bytes of each example. Sums in fine bins take the same memory for any
number, add up over shards, and give every metric that sorts to within the width of a bin.

A bootstrap with Poisson weights repeats each example a number of times that is drawn from a Poisson
distribution of mean 1. The numbers of the examples of a bin add up to a Poisson variable whose mean
is their count, so that it is drawn for the bin as a whole: a replicate costs as much for a billion
examples as for a thousand, and depends on the sums and the seed alone, not on shards or workers.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from calibrant._core.binning import Bins, bin_index, fill, stable_order
from calibrant._core.checks import FloatArray
from calibrant._core.chunks import EstimandChoice
from calibrant.metrics import gaps
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.gaps import Excess, Functional, GapCells
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.reductions import Pairs, Reduced, WeightedPairs

MOST_PAIRS = 1 << 18
"""Number of labels, ignored ones included, up to which every pair is kept. Metrics take about a
hundred bytes for each, while pooling changes them by a hundredth of a standard error."""
MESH = 20_480
"""Bins of equal width; those that metrics use, of width 1/40, 1/128 and 1/4096, are unions of them.
"""
OCTAVES, PER_OCTAVE = 30, 8
"""The first and the last of these bins are divided further, towards 0 and 1, where the confidences
of large models are."""
RUN = 25
"""Replicates that are drawn at a time."""

Statistic = Callable[[FloatArray, FloatArray], FloatArray]
"""Maps masses ``(..., bins)`` of events and of the rest, in order of confidence, to ``(...)``."""


@cache
def _fine_edges() -> FloatArray:
    """Edges of the fine bins.

    >>> edges = _fine_edges()
    >>> len(edges), bool((np.diff(edges) > 0).all()), float(edges[1] - edges[0]) < 1e-13
    (20961, True, True)
    """
    steps = np.arange(OCTAVES * PER_OCTAVE, 0, -1) / PER_OCTAVE
    tail = 2.0**-steps / MESH
    even = np.arange(1, MESH) / MESH  # the floats nearest to the edges, as of uniform_edges
    return np.concatenate([[0.0], tail, even, 1 - tail[::-1], [1.0]])


@dataclass(frozen=True, eq=False)
class PooledPairs:
    """Sums of the examples per fine bin: of those whose event happened, and of the rest."""

    happened: Bins
    rest: Bins

    @classmethod
    def of(cls, pairs: Pairs | WeightedPairs, weight: FloatArray | None) -> PooledPairs:
        """Return the sums of some pairs."""
        edges, outcome = _fine_edges(), pairs.outcome.astype(bool)

        def sums(which: float) -> Bins:
            mass = None if weight is None else weight[outcome == which]
            claimed = pairs.confidence[outcome == which]
            return fill(claimed, np.full_like(claimed, which), edges, mass)

        return cls(sums(1.0), sums(0.0))

    @classmethod
    def empty(cls) -> PooledPairs:
        """Return the sums of no examples."""
        return cls(Bins.empty(_fine_edges()), Bins.empty(_fine_edges()))

    def __add__(self, other: PooledPairs) -> PooledPairs:
        return PooledPairs(self.happened + other.happened, self.rest + other.rest)

    @cached_property
    def bins(self) -> Bins:
        """Sums of all examples."""
        return self.happened + self.rest

    @cached_property
    def pairs(self) -> WeightedPairs:
        """One pair for each bin and outcome, at the mean confidence, with the sum of weights."""
        sides = (self.happened, self.rest)
        held = [side.weight > 0 for side in sides]
        confidence = np.concatenate([s.confidence[h] for s, h in zip(sides, held, strict=True)])
        outcome = np.repeat([1.0, 0.0], [int(h.sum()) for h in held])
        weight = np.concatenate([s.weight[h] for s, h in zip(sides, held, strict=True)])
        return WeightedPairs(np.clip(confidence, 0, 1), outcome, weight)

    @property
    def weight(self) -> FloatArray:
        """Sums of weights, so that these are never taken for equally weighted examples."""
        return self.bins.weight

    def filled(self, edges: FloatArray) -> Bins:
        """Sums of the examples per wider bin; exact if its edges are among the fine ones."""
        place, fine = bin_index(self.bins.edges[1:], edges), self.bins
        names = ("weight", "claimed", "observed", "spread", "squares")
        sums = (np.bincount(place, getattr(fine, name), edges.size - 1) for name in names)
        # counts are exact in floats up to 2^53
        count = np.bincount(place, fine.count, edges.size - 1).astype(np.int64)
        return Bins(edges, count, *(values.astype(np.float64, copy=False) for values in sums))

    def equal_mass_edges(self, bins: int) -> FloatArray:
        """Edges, among the fine ones, of bins that hold about equally much weight each."""
        mass = np.cumsum(self.bins.weight)
        cuts = np.searchsorted(mass, mass[-1] * np.arange(1, bins) / bins * (1 - 1e-12))
        inner = np.unique(self.bins.edges[1:][cuts])
        last = self.bins.edges[1:][np.flatnonzero(self.bins.weight)[-1]]
        return np.concatenate([[0.0], inner[inner < last], [1.0]])

    def replicates(self, count: int, seed: int) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Yield masses of events and of the rest in bootstrap samples, ``(runs, held bins)``."""
        rng = np.random.default_rng([seed, 2])  # apart from the draws of other intervals
        held = self.bins.weight > 0
        sides = [(side.effective[held], side.weight[held]) for side in (self.happened, self.rest)]
        for start in range(0, count, RUN):
            size = min(RUN, count - start)
            happened, rest = (
                # with unequal weights, as many equal ones as have the same mean and variance
                rng.poisson(mean, (size, mean.size)) * (weight / np.where(mean > 0, mean, 1.0))
                for mean, weight in sides
            )
            yield happened, rest

    def value(self, statistic: Statistic) -> float:
        """Return a statistic of the examples."""
        held = self.bins.weight > 0
        return float(statistic(self.happened.weight[held], self.rest.weight[held]))

    def deviation(self, statistic: Statistic, count: int, seed: int) -> float:
        """Return the standard deviation of a statistic over bootstrap samples."""
        values = [statistic(*masses) for masses in self.replicates(count, seed)]
        return float(np.std(np.concatenate(values), ddof=1))


class _Part(NamedTuple):
    """What is kept of each example of a batch."""

    pairs: Pairs
    answers: Pairs  # those that AUROC and AURC rank; the same object where they are the same
    weight: FloatArray | None


class KeptPairs:
    """Pairs of the examples of a stream, which are pooled from the first batch on that is too much.

    Whether they are pooled depends on the number of labels alone, not on batches or their order.
    """

    def __init__(self, most: float | None = None) -> None:
        self.most, self.labels = MOST_PAIRS if most is None else most, 0
        self._parts: list[_Part] = []
        self._sums: tuple[PooledPairs, PooledPairs] | None = None  # answers may be the pairs

    @property
    def pooled(self) -> bool:
        """True if single pairs are not kept."""
        return self._sums is not None

    def add(
        self, pairs: Pairs, answers: Pairs | None, weight: FloatArray | None, labels: int
    ) -> None:
        """Add the pairs of a batch; ``answers`` are None where they are the pairs themselves."""
        self.labels += labels
        self._parts.append(_Part(pairs, answers or pairs, weight))
        self._settle()

    def merge(self, other: KeptPairs) -> None:
        """Add what another stream has kept."""
        self.labels += other.labels
        self._parts += other._parts
        if other._sums is not None:
            self.pool()
            self._add(other._sums)
        self._settle()

    def pool(self) -> None:
        """Keep sums in place of single pairs from now on."""
        if self._sums is None:
            nothing = PooledPairs.empty()
            self._sums = (nothing, nothing)
        self._settle()

    def _settle(self) -> None:
        if self._sums is None:
            if self.labels > self.most:
                self.pool()
            return
        parts, self._parts = self._parts, []
        for part in parts:
            pairs = answers = PooledPairs.of(part.pairs, part.weight)
            if part.answers is not part.pairs:
                answers = PooledPairs.of(part.answers, part.weight)
            self._add((pairs, answers))

    def _add(self, sums: tuple[PooledPairs, PooledPairs]) -> None:
        assert self._sums is not None
        pairs = answers = self._sums[0] + sums[0]
        if self._sums[0] is not self._sums[1] or sums[0] is not sums[1]:
            answers = self._sums[1] + sums[1]
        self._sums = (pairs, answers)

    def joined(self) -> WeightedPairs:
        """Return the pairs in the order of their arrival; of pooled ones, one for each bin."""
        if self._sums is not None:
            return self._sums[0].pairs
        return self._joined([part.pairs for part in self._parts])

    def in_order(self) -> tuple[WeightedPairs | PooledPairs, WeightedPairs | PooledPairs]:
        """Return pairs and answers in order of confidence: once, for all metrics that sort."""
        if self._sums is not None:
            return self._sums

        def in_order(parts: Sequence[Pairs]) -> WeightedPairs:
            confidence, outcome, weight = self._joined(parts)
            order = stable_order(confidence)
            weight = None if weight is None else weight[order]
            return WeightedPairs(confidence[order], outcome[order], weight)

        pairs = answers = in_order([part.pairs for part in self._parts])
        if any(part.answers is not part.pairs for part in self._parts):
            answers = in_order([part.answers for part in self._parts])
        return pairs, answers

    def _joined(self, parts: Sequence[Pairs]) -> WeightedPairs:
        nothing = Pairs(np.zeros(0), np.zeros(0))  # type: ignore[arg-type]  # outcomes as floats
        confidence, outcome = map(np.concatenate, zip(nothing, *parts, strict=True))
        weight = None
        if any(part.weight is not None for part in self._parts):
            masses = ((part.weight, part.pairs.outcome.size) for part in self._parts)
            weight = np.concatenate([np.ones(n) if w is None else w for w, n in masses])
        return WeightedPairs(confidence, outcome, weight)


REPLICATES = 1000
"""Draws behind an interval; the errors without bins take fewer."""
SCORES = ("correct", "nll", "brier")
"""Columns of :class:`~calibrant.metrics.reductions.Reduced` that are averaged."""


class Metric(NamedTuple):
    """An entry of ``METRICS``: a function, and its value with an interval in evaluations."""

    title: str
    compute: Callable[..., float]
    """The public function: ``compute(logits, labels)`` and the other forms of input."""
    estimate: Callable[[Summary], Estimate]
    """The value with its interval, from the sums of an accumulator."""
    reference: str = ""
    aliases: tuple[str, ...] = ()
    percent: bool = True
    higher_is_better: bool = False
    needs_pairs: bool = False
    """A stream must keep every (confidence, outcome) for it."""
    two_classes_only: bool = False
    """It is of P(y = 1): left out of evaluations of anything else, and refused if named."""
    on_request: bool = False
    """It is computed only where it is named."""
    by_groups: bool = False
    """It has an interval for examples that depend on each other within groups."""
    two_sided: bool = False
    """Its best value is in the middle: it has no limit on one side."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.compute.__name__

    @property
    def summary(self) -> str:
        """First sentence of the function's documentation."""
        return (inspect.getdoc(self.compute) or "").partition("\n")[0]


@dataclass(frozen=True)
class Moments:
    """Sums over a set of examples; the sums of two sets add."""

    count: int
    weight: float
    first: FloatArray  # (scores,) of weight times score
    powers: FloatArray  # (3, scores) of squared weight times the powers 0 to 2 of the score

    @classmethod
    def empty(cls) -> Moments:
        """Sums of no examples."""
        return cls(0, 0.0, np.zeros(len(SCORES)), np.zeros((3, len(SCORES))))

    @classmethod
    def of(cls, reduced: Reduced, weight: FloatArray | None) -> Moments:
        """Sums of the scores of reduced examples."""
        table = np.stack([getattr(reduced, name).astype(np.float64) for name in SCORES])
        mass = np.ones(reduced.nll.size) if weight is None else weight
        with np.errstate(over="ignore"):
            powers = np.stack([(table**k) @ mass**2 for k in range(3)])
        return cls(reduced.nll.size, float(mass.sum()), table @ mass, powers)

    def __add__(self, other: Moments) -> Moments:
        return Moments(*map(operator.add, astuple(self), astuple(other)))

    def mean(self, name: str) -> float:
        """Weighted mean of a score."""
        mean = float(self.first[SCORES.index(name)] / self.weight)
        return min(mean, 1.0) if name == "correct" else mean  # rounding may exceed it

    def deviation(self, name: str) -> float:
        """Standard error of that mean; NaN for a single example."""
        if self.effective <= 1:
            return math.nan
        zeroth, first, second = self.powers[:, SCORES.index(name)]
        mean = np.float64(self.mean(name))
        with np.errstate(over="ignore", invalid="ignore"):  # losses beyond 1e154
            spread = second - 2 * mean * first + mean**2 * zeroth
        if not np.isfinite(spread):
            return math.inf
        return math.sqrt(max(spread, 0.0) / (1 - 1 / self.effective)) / self.weight

    @property
    def effective(self) -> float:
        """Number of equally weighted examples that would be worth as much."""
        return float(self.weight**2 / self.powers[0, 0])

    @property
    def worth(self) -> float:
        """As :attr:`effective`, or fewer where heavy examples are harder than others."""
        count, accuracy = self.effective, self.mean("correct")
        deviation = self.deviation("correct")
        if not deviation > 0:
            return count
        variance = deviation**2 * (1 - 1 / count)  # without the correction for few examples
        return min(count, accuracy * (1 - accuracy) / variance)


@dataclass(frozen=True)
class Summary:
    """Everything that the metrics are computed from, after the last example."""

    moments: Moments
    bins: Bins
    classwise: ClassBins | None
    pairs: WeightedPairs | PooledPairs
    """Sorted by confidence; empty in a stream that keeps none."""
    answers: WeightedPairs | PooledPairs
    """Pairs that AUROC and AURC rank: of the predicted class, unless an estimand was named."""
    estimand: EstimandChoice
    level: float | None
    seed: int
    noise: Callable[[Bins, int, int], FloatArray] | None = None
    """Draws noise of the gaps of bins, for a number of replicates and a seed, where examples depend
    on each other within groups."""

    @cached_property
    def cells(self) -> GapCells:
        """The equal-width bins, for drawing."""
        cells = gaps._cells_of(self.bins, self.bins, REPLICATES, self.seed)
        if self.noise is None:
            return cells
        return gaps._with_noise(cells, self.noise(self.bins, REPLICATES, self.seed))

    @cached_property
    def equal_mass(self) -> Bins:
        """Sums of the pairs in as many bins of equal mass."""
        return self.pairs.filled(self.pairs.equal_mass_edges(self.bins.count.size))

    def error(
        self,
        error: Functional,
        fill: Callable[[], Bins] | None = None,
        *,
        value: float | None = None,
        replicates: int = REPLICATES,
        excess: Excess | None = None,
    ) -> Estimate:
        """A calibration error with its interval; its ``value`` where it is not that of the bins.

        ``fill`` returns other bins than those of equal width, if they are needed.
        """
        if value is None:
            value = float(error((fill() if fill else self.bins).gap))
        if self.level is None or math.isnan(value):
            return Estimate(value)
        cells = self.cells
        if fill is not None:
            cells = gaps._cells_of(fill(), self.equal_mass, replicates, self.seed)
        return gaps.error_interval(value, error, cells, self.level, excess)

    def interval(
        self, construct: Callable[..., Estimate], value: float, *spread: float
    ) -> Estimate:
        """Attach an interval to a value whose standard error is known."""
        return Estimate(value) if self.level is None else construct(value, *spread, self.level)
