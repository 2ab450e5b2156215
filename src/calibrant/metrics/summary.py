"""The line of a metric in the table, and the sums from which its value and interval follow."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from calibrant._core.binning import Bins
from calibrant._core.checks import FloatArray
from calibrant._core.chunks import Estimand
from calibrant.metrics import intervals
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.gaps import Functional, GapCurve, gap_curve
from calibrant.metrics.intervals import Cells, Estimate
from calibrant.metrics.moments import Moments
from calibrant.metrics.reductions import WeightedPairs

REPLICATES = 1000
"""Draws behind an interval; the errors without bins take fewer."""


class Metric(NamedTuple):
    """A line of :data:`~calibrant.METRICS`."""

    title: str
    compute: Callable[..., float]
    """The public function: ``compute(logits, labels)`` and the other forms of input."""
    estimate: Callable[[Summary], Estimate]
    """The value with its interval, from the sums of an accumulator."""
    reference: str = ""
    aliases: tuple[str, ...] = ()
    """Other names that people type."""
    percent: bool = True
    higher_is_better: bool = False
    proper: bool = False
    needs_pairs: bool = False
    """A stream must keep every (confidence, outcome) for it."""

    @property
    def summary(self) -> str:
        """First sentence of the function's documentation."""
        return (inspect.getdoc(self.compute) or "").partition("\n")[0]


@dataclass(frozen=True)
class Summary:
    """Everything that the metrics are computed from, after the last example."""

    moments: Moments
    bins: Bins
    classwise: ClassBins | None
    pairs: WeightedPairs
    """Sorted by confidence; empty in a stream that keeps none."""
    estimand: Estimand
    level: float | None
    seed: int

    @cached_property
    def cells(self) -> Cells:
        """The equal-width bins, for drawing."""
        return intervals.cells_of(self.bins, gap_curve(self.bins), REPLICATES, self.seed)

    @cached_property
    def equal_mass(self) -> Bins:
        """Sums of the pairs in as many bins of equal mass."""
        return self.pairs.filled(self.pairs.equal_mass_edges(self.bins.count.size))

    @cached_property
    def curve(self) -> GapCurve:
        """Gap as a function of confidence, from the pairs."""
        return gap_curve(self.equal_mass)

    def error(
        self,
        measured: float | FloatArray,
        error: Functional,
        filled: Bins | None = None,
        replicates: int = REPLICATES,
    ) -> Estimate:
        """Attach an interval to a calibration error; the bins are the usual ones by default."""
        value = float(measured)
        if self.level is None or math.isnan(value):
            return Estimate(value)
        cells = self.cells
        if filled is not None:
            cells = intervals.cells_of(filled, self.curve, replicates, self.seed)
        return intervals.error_interval(value, error, cells, self.level)

    def interval(
        self, construct: Callable[..., Estimate], value: float, *spread: float
    ) -> Estimate:
        """Attach an interval to a value whose standard error is known."""
        return Estimate(value) if self.level is None else construct(value, *spread, self.level)
