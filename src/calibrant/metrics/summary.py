"""Metrics as entries of the table, and the sums from which their values and intervals follow."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calibrant._core.binning import Bins
from calibrant._core.checks import FloatArray
from calibrant._core.chunks import EstimandChoice
from calibrant.metrics import gaps
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.gaps import Excess, Functional, GapCells
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.kept_pairs import PooledPairs
from calibrant.metrics.reductions import Reduced, WeightedPairs

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
