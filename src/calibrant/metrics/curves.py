"""Data of the diagrams; :mod:`calibrant.plots` draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.fft import dct, idct
from scipy.stats import beta, norm

from calibrant._core import checks
from calibrant._core.binning import Bins, uniform_edges
from calibrant._core.checks import FloatArray, Values, check_level
from calibrant._core.chunks import EstimandChoice, resolve_estimand
from calibrant.metrics.reductions import (
    ESTIMANDS,
    Data,
    EventData,
    Input,
    WeightedPairs,
    answers_from,
    keywords,
    margins,
    pairs_from,
)
from calibrant.metrics.smooth import smooth_ece_of_pairs

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Reliability(NamedTuple):
    """Accuracy per bin with an interval; empty bins are NaN. Each ``(bins,)``."""

    edges: FloatArray  # (bins + 1,)
    confidence: FloatArray
    accuracy: FloatArray
    low: FloatArray
    high: FloatArray
    share: FloatArray

    @property
    def probability(self) -> str:
        """Name of the confidence where it is that of one class, P(y = 1), else empty."""
        return ""


class PositiveReliability(Reliability):
    """Reliability of P(y = 1): the accuracy is the frequency of y = 1."""

    @property
    def probability(self) -> str:
        """Name of the confidence."""
        return ESTIMANDS["binary"]


class SmoothReliability(NamedTuple):
    """Accuracy as a smooth function of confidence with a band. Each ``(points,)``."""

    confidence: FloatArray
    accuracy: FloatArray
    low: FloatArray
    high: FloatArray
    density: FloatArray

    @property
    def probability(self) -> str:
        """Name of the confidence where it is that of one class, P(y = 1), else empty."""
        return ""


class PositiveSmoothReliability(SmoothReliability):
    """Smooth reliability of P(y = 1)."""

    @property
    def probability(self) -> str:
        """Name of the confidence."""
        return ESTIMANDS["binary"]


class MarginReliability(NamedTuple):
    """Reliability of the examples whose margin between the top two logits is in a range."""

    low: float
    high: float
    reliability: Reliability


class Histogram(NamedTuple):
    """Share of all examples per bin of confidence that are right, and that are wrong."""

    edges: FloatArray
    right: FloatArray
    wrong: FloatArray


@keywords(EventData)
def reliability(
    logits: Input = None,
    labels: Input = None,
    *,
    bins: int = 15,
    equal_mass: bool = False,
    level: float = 0.9,
    **data: Unpack[EventData],
) -> Reliability:
    """Accuracy per bin of confidence, with Clopper-Pearson intervals.

    The bars of a reliability diagram (DeGroot and Fienberg 1983). Input as for
    :func:`calibrant.ece`.

    >>> reliability(confidence=[0.85, 0.85, 0.95], outcome=[1, 0, 1], bins=10).accuracy[-2:]
    array([0.5, 1. ])
    """
    pairs = pairs_from(logits, labels, **data)
    edges = pairs.equal_mass_edges(bins) if equal_mass else uniform_edges(bins)
    return reliability_of(pairs.filled(edges), level=level, positive=_positive(logits, **data))


def reliability_of(filled: Bins, *, level: float = 0.9, positive: bool = False) -> Reliability:
    """Reliability from sums per bin, such as those of an Evaluation; ``positive`` of P(y = 1)."""
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
    kind = PositiveReliability if positive else Reliability
    return kind(filled.edges, filled.confidence, filled.accuracy, low, high, share)


def _positive(logits: Input, **data: Unpack[EventData]) -> bool:
    """Return True if P(y = 1) of examples is measured; pairs may be of anything."""
    scores = data.get("probs") if logits is None else logits
    if scores is None:
        return False
    shape = checks.as_scores(scores).shape
    classes = int(shape[-1]) if len(shape) > 1 else 2
    return resolve_estimand(data.get("estimand", "auto"), classes) == "binary"


@keywords(EventData)
def smooth_reliability(
    logits: Input = None,
    labels: Input = None,
    *,
    level: float = 0.9,
    points: int = 512,
    **data: Unpack[EventData],
) -> SmoothReliability:
    """Kernel regression of outcome on confidence, at the bandwidth of smooth ECE.

    The band is pointwise. Where the density is near zero the curve rests on few examples. Input as
    for :func:`calibrant.ece`.

    >>> curve = smooth_reliability(confidence=[0.5] * 100, outcome=[1] * 60 + [0] * 40)
    >>> round(float(curve.accuracy[256]), 2)
    0.6
    """
    check_level(level)
    pairs = pairs_from(logits, labels, **data)
    claimed, happened, weights = pairs
    mass = np.ones_like(claimed) if weights is None else weights
    width = max(smooth_ece_of_pairs(pairs), 2 / points)
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
    low, high = (np.clip(accuracy + sign * reach, 0, 1) for sign in (-1, 1))
    density = density / mass.sum() * points
    kind = PositiveSmoothReliability if _positive(logits, **data) else SmoothReliability
    return kind(grid, accuracy, low, high, density)


@keywords(Data)
def confidence_histogram(
    logits: Input = None, labels: Input = None, *, bins: int = 30, **data: Unpack[Data]
) -> Histogram:
    """Distribution of confidence among right and among wrong answers.

    Of the predicted class, also with two classes. Input as for :func:`calibrant.ece`.

    >>> confidence_histogram(confidence=[0.9, 0.9, 0.2], outcome=[1, 0, 0], bins=2).right
    array([0.        , 0.33333333])
    """
    filled = answers_from(logits, labels, **data).filled(uniform_edges(bins))
    right = filled.observed / filled.total
    return Histogram(filled.edges, right, filled.weight / filled.total - right)


def reliability_by_margin(
    logits: Values,
    labels: Values,
    *,
    estimand: EstimandChoice = "auto",
    margin_bins: int = 3,
    bins: int = 15,
    level: float = 0.9,
) -> list[MarginReliability]:
    """Reliability by margin between the top two logits, smallest margins first (SMART, fig. 15).

    Each bin of margins holds about equally many examples. ``estimand`` as for
    :func:`calibrant.ece`.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(900, 5))
    >>> [m.low < m.high for m in reliability_by_margin(logits, logits.argmax(-1))]
    [True, True, True]
    """
    checks.check_whole("margin_bins", margin_bins)
    confidence, outcome, _ = pairs_from(logits, labels, estimand=estimand)
    positive = _positive(logits, estimand=estimand)
    margin = margins(checks.as_scores(logits)[checks.as_labels(labels) != checks.IGNORED])
    order = np.argsort(margin, kind="stable")
    curves = []
    for part in np.array_split(order, min(margin_bins, order.size)):
        pairs = WeightedPairs(confidence[part], outcome[part], None)
        filled = pairs.filled(uniform_edges(bins))
        curve = reliability_of(filled, level=level, positive=positive)
        curves.append(MarginReliability(float(margin[part[0]]), float(margin[part[-1]]), curve))
    return curves
