"""Data of the diagrams: everything that a plot shows is computed here, nothing is drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import dct, idct
from scipy.stats import beta, norm
from torch import Tensor

from calibrant._core.binning import Bins, equal_mass_edges, fill, uniform_edges
from calibrant._core.checks import (
    IGNORED,
    FloatArray,
    Values,
    as_labels,
    as_pairs,
    as_scores,
    check_level,
)
from calibrant.metrics.reductions import margins, top_label
from calibrant.metrics.smooth import smooth_ece


class Reliability(NamedTuple):
    """Accuracy per bin with an interval; empty bins are NaN. Each ``(bins,)``."""

    edges: FloatArray  # (bins + 1,)
    confidence: FloatArray
    accuracy: FloatArray
    low: FloatArray
    high: FloatArray
    share: FloatArray


class SmoothReliability(NamedTuple):
    """Accuracy as a smooth function of confidence with a band. Each ``(points,)``."""

    confidence: FloatArray
    accuracy: FloatArray
    low: FloatArray
    high: FloatArray
    density: FloatArray


class MarginGroup(NamedTuple):
    """Reliability of the examples whose margin between the top two logits is in a range."""

    low: float
    high: float
    reliability: Reliability


class Histogram(NamedTuple):
    """Shares of all examples per bin of confidence, right ones apart from wrong ones."""

    edges: FloatArray
    right: FloatArray
    wrong: FloatArray


def reliability(
    confidence: Values,
    outcome: Values,
    *,
    bins: int = 15,
    equal_mass: bool = False,
    sample_weight: Values | None = None,
    level: float = 0.9,
) -> Reliability:
    """Accuracy per bin of confidence, with Clopper-Pearson intervals.

    The bars of a reliability diagram (DeGroot and Fienberg 1983).

    >>> reliability([0.85, 0.85, 0.95], [1, 0, 1], bins=10).accuracy[-2:]
    array([0.5, 1. ])
    """
    claimed, happened, weights = as_pairs(confidence, outcome, sample_weight)
    edges = equal_mass_edges(claimed, bins, weights) if equal_mass else uniform_edges(bins)
    return reliability_of(fill(claimed, happened, edges, weights), level=level)


def reliability_of(filled: Bins, *, level: float = 0.9) -> Reliability:
    """Reliability of sums per bin, those of a stream for instance."""
    check_level(level)
    with np.errstate(invalid="ignore"):
        effective = filled.effective
        hits = filled.accuracy * effective
        tail = (1 - level) / 2
        low = np.where(hits > 0, beta.ppf(tail, hits, effective - hits + 1), 0.0)
        high = np.where(hits < effective, beta.ppf(1 - tail, hits + 1, effective - hits), 1.0)
    empty = filled.weight == 0
    low[empty] = high[empty] = np.nan
    share = filled.weight / filled.total
    return Reliability(filled.edges, filled.confidence, filled.accuracy, low, high, share)


def smooth_reliability(
    confidence: Values,
    outcome: Values,
    *,
    sample_weight: Values | None = None,
    level: float = 0.9,
    points: int = 512,
) -> SmoothReliability:
    """Kernel regression of outcome on confidence, at the bandwidth of smooth ECE.

    The kernel is the reflected Gaussian of :func:`calibrant.smooth_ece`; the band is pointwise.
    Where the density is near zero the curve rests on few examples.

    >>> curve = smooth_reliability([0.5] * 100, [1] * 60 + [0] * 40)
    >>> round(float(curve.accuracy[256]), 2)
    0.6
    """
    check_level(level)
    claimed, happened, weights = as_pairs(confidence, outcome, sample_weight)
    mass = np.ones_like(claimed) if weights is None else weights
    width = max(smooth_ece(confidence, outcome, sample_weight=sample_weight), 2 / points)
    cell = np.minimum((claimed * points).astype(np.int64), points - 1)
    frequency = (np.pi * np.arange(points)) ** 2 / 2

    def blurred(values: FloatArray, by: float) -> FloatArray:
        spectrum = dct(np.bincount(cell, values, points), norm="ortho")
        return np.asarray(idct(spectrum * np.exp(-frequency * by**2), norm="ortho"))

    density = np.maximum(blurred(mass, width), 1e-12 * mass.sum())
    accuracy = np.clip(blurred(mass * happened, width) / density, 0, 1)
    # Variance of a weighted mean, by the square of the kernel. That of a Gaussian is a narrower
    # one; at either end its product with its own reflection comes on top.
    grid = (np.arange(points) + 0.5) / points
    noise = mass**2 * (happened - accuracy[cell]) ** 2
    squares = np.maximum(blurred(noise, width / np.sqrt(2)), 0) / (2 * np.sqrt(np.pi) * width)
    for end in (0.0, 1.0):
        mirrored = noise @ np.exp(-(((claimed - end) / width) ** 2))
        edge = np.exp(-(((grid - end) / width) ** 2)) / (np.pi * width**2 * points)
        squares += mirrored * edge
    reach = float(norm.ppf((1 + level) / 2)) * np.sqrt(squares / points) / density
    return SmoothReliability(
        grid,
        accuracy,
        np.clip(accuracy - reach, 0, 1),
        np.clip(accuracy + reach, 0, 1),
        density / mass.sum() * points,
    )


def histogram(confidence: Values, outcome: Values, *, bins: int = 30) -> Histogram:
    """How often each confidence occurs, split by outcome.

    >>> histogram([0.9, 0.9, 0.2], [1, 0, 0], bins=2).right
    array([0.        , 0.33333333])
    """
    claimed, happened, _ = as_pairs(confidence, outcome)
    filled = fill(claimed, happened, uniform_edges(bins))
    right = filled.observed / filled.total
    return Histogram(filled.edges, right, filled.weight / filled.total - right)


def margin_groups(
    logits: Tensor | ArrayLike,
    labels: Tensor | ArrayLike,
    *,
    groups: int = 3,
    bins: int = 15,
    level: float = 0.9,
) -> list[MarginGroup]:
    """Reliability by margin between the top two logits, smallest margins first (SMART, fig. 15).

    Groups of about equally many examples. A model that is calibrated overall may be
    under-confident where the margin is large and over-confident where it is small.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(900, 5))
    >>> [g.reliability.share.sum().round() for g in margin_groups(logits, logits.argmax(-1))]
    [np.float64(1.0), np.float64(1.0), np.float64(1.0)]
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    pairs = top_label(logits, labels)
    margin = margins(as_scores(logits)[as_labels(labels) != IGNORED])
    order = np.argsort(margin, kind="stable")
    parts = np.array_split(order, min(groups, order.size))
    return [
        MarginGroup(
            float(margin[part[0]]),
            float(margin[part[-1]]),
            reliability(*(column[part] for column in pairs), bins=bins, level=level),
        )
        for part in parts
    ]
