"""The table of metrics, and what each of them computes its figure and interval from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from calibrant._core.binning import Bins, equal_mass_edges, fill, uniform_edges
from calibrant._core.checks import FloatArray, Values
from calibrant._core.chunks import Estimand
from calibrant.metrics import binned, intervals, ranking, scores, smooth
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.gap_curve import Shape, shape_of
from calibrant.metrics.intervals import Cells, Estimate
from calibrant.metrics.reductions import top_label
from calibrant.metrics.scores import Moments

REPLICATES = 1000
"""Draws behind an interval; the errors without bins take fewer."""


class Metric(NamedTuple):
    """A line of :data:`METRICS`."""

    title: str
    compute: Callable[[Values, Values], float]
    """The figure, from logits ``(..., classes)`` and labels ``(...)``."""
    estimate: Callable[[Summary], Estimate]
    """The figure with its interval, from what an accumulator holds."""
    percent: bool = True
    higher_is_better: bool = False
    proper: bool = False
    needs_pairs: bool = False
    """Whether a stream must keep every (confidence, outcome) for it."""


@dataclass(frozen=True)
class Summary:
    """What the metrics are computed from, once all examples are in."""

    moments: Moments
    bins: Bins
    classwise: ClassBins | None
    confidence: FloatArray
    outcome: FloatArray
    weight: FloatArray | None
    estimand: Estimand
    level: float | None
    seed: int

    @cached_property
    def cells(self) -> Cells:
        """The equal-width bins, for drawing."""
        return intervals.cells_of(self.bins, shape_of(self.bins), REPLICATES, self.seed)

    @cached_property
    def equal_mass(self) -> Bins:
        """Sums of the pairs in bins of equal mass."""
        return self.filled(equal_mass_edges(self.confidence, self.bins.count.size, self.weight))

    @cached_property
    def shape(self) -> Shape:
        """Gap as a function of confidence, from the pairs."""
        return shape_of(self.equal_mass)

    def filled(self, edges: FloatArray) -> Bins:
        """Sums of the pairs in other bins."""
        return fill(self.confidence, self.outcome, edges, self.weight)

    def error(
        self,
        value: float,
        error: intervals.Functional,
        filled: Bins | None = None,
        replicates: int = REPLICATES,
    ) -> Estimate:
        """Attach an interval to a calibration error; the bins are the usual ones by default."""
        if self.level is None or math.isnan(value):
            return Estimate(value)
        cells = self.cells
        if filled is not None:
            cells = intervals.cells_of(filled, self.shape, replicates, self.seed)
        return intervals.error_interval(value, error, cells, self.level)

    def interval(
        self, value: float, deviation: float, kind: Callable[[float, float, float], Estimate]
    ) -> Estimate:
        """Attach an interval to a figure with a standard error."""
        return Estimate(value) if self.level is None else kind(value, deviation, self.level)


def _accuracy(s: Summary) -> Estimate:
    return s.interval(s.moments.mean("correct"), s.moments.worth, intervals.share_interval)


def _score(name: str) -> Callable[[Summary], Estimate]:
    def estimate(s: Summary) -> Estimate:
        return s.interval(s.moments.mean(name), s.moments.deviation(name), intervals.mean_interval)

    return estimate


def _classwise(s: Summary) -> Estimate:
    if s.classwise is None:
        return Estimate(math.nan)
    value = s.classwise.average()
    if s.level is None or not len(s.classwise.redrawn):
        return Estimate(value)
    return intervals.class_interval(value, s.classwise, s.level)


def _ada_ece(s: Summary) -> Estimate:
    return s.error(binned.absolute(s.equal_mass.gap), intervals.total, s.equal_mass)


def _mce(s: Summary) -> Estimate:
    return s.error(binned.largest(s.bins), intervals.worst(s.bins))


def _ks(s: Summary) -> Estimate:
    value = smooth.ks(s.confidence, s.outcome, sample_weight=s.weight)
    edges = equal_mass_edges(s.confidence, 100, s.weight)
    return s.error(value, intervals.running, s.filled(edges), REPLICATES // 2)


def _smooth_ece(s: Summary) -> Estimate:
    value = smooth.smooth_ece(s.confidence, s.outcome, sample_weight=s.weight)
    return s.error(value, smooth.smoothed, s.filled(uniform_edges(128)), REPLICATES // 5)


def _smce(s: Summary) -> Estimate:
    value = smooth.smce(s.confidence, s.outcome, sample_weight=s.weight)
    return s.error(value, smooth.lipschitz_error, s.filled(uniform_edges(40)), REPLICATES // 5)


def _auroc(s: Summary) -> Estimate:
    return _ranked(s, ranking.auroc_with_error(s.confidence, s.outcome, s.weight))


def _aurc(s: Summary) -> Estimate:
    if s.estimand != "top_label":  # P(class 1) is no confidence in an answer
        return Estimate(math.nan)
    return _ranked(s, ranking.aurc_with_error(s.confidence, s.outcome, s.weight))


def _ranked(s: Summary, found: ranking.Influenced) -> Estimate:
    if s.level is None:
        return Estimate(found.value)
    return intervals.logit_interval(*found, s.level)


def _of_pairs(function: Callable[..., float]) -> Callable[[Values, Values], float]:
    def compute(logits: Values, labels: Values) -> float:
        return function(*top_label(logits, labels))

    return compute


METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy", scores.accuracy, _accuracy, higher_is_better=True),
    "ece": Metric(
        "ECE",
        _of_pairs(binned.ece),
        lambda s: s.error(binned.absolute(s.bins.gap), intervals.total),
    ),
    "debiased_ece": Metric(
        "ECE, debiased",
        _of_pairs(binned.debiased_ece),
        lambda s: s.error(binned.debiased(s.bins), intervals.total),
    ),
    "ada_ece": Metric("ECE, equal mass", _of_pairs(binned.ada_ece), _ada_ece, needs_pairs=True),
    "classwise_ece": Metric("ECE, class-wise", binned.classwise_ece, _classwise),
    "mce": Metric("maximum error", _of_pairs(binned.mce), _mce),
    "over_ece": Metric(
        "ECE, over-confident",
        _of_pairs(binned.over_ece),
        lambda s: s.error(binned.positive(s.bins.gap), intervals.over),
    ),
    "under_ece": Metric(
        "ECE, under-confident",
        _of_pairs(binned.under_ece),
        lambda s: s.error(binned.positive(-s.bins.gap), intervals.under),
    ),
    "ks": Metric("KS error", _of_pairs(smooth.ks), _ks, needs_pairs=True),
    "smooth_ece": Metric("smooth ECE", _of_pairs(smooth.smooth_ece), _smooth_ece, needs_pairs=True),
    "smce": Metric("smCE", _of_pairs(smooth.smce), _smce, needs_pairs=True),
    "nll": Metric("NLL", scores.nll, _score("nll"), percent=False, proper=True),
    "brier": Metric("Brier", scores.brier, _score("brier"), percent=False, proper=True),
    "auroc": Metric(
        "AUROC of confidence",
        _of_pairs(ranking.auroc),
        _auroc,
        higher_is_better=True,
        needs_pairs=True,
    ),
    "aurc": Metric("AURC", _of_pairs(ranking.aurc), _aurc, needs_pairs=True),
}
"""Every metric of :func:`evaluate`, by its name on the command line and in JSON."""
