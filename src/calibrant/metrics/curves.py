"""Data of the diagrams; :mod:`calibrant.show` draws it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.fft import dct, idct
from scipy.special import ndtri

from calibrant._core import checks
from calibrant._core.binning import Bins, uniform_edges
from calibrant._core.checks import FloatArray, Values, check_level
from calibrant._core.chunks import EstimandChoice, resolve_estimand
from calibrant._core.showing import as_axes, as_html, columns_frame, one_line
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.reductions import (
    Data,
    EventData,
    Input,
    WeightedPairs,
    _examples_of_caller,
    answers_from,
    event_probability,
    keywords,
    margins,
    pairs_from,
    reduce_examples,
)
from calibrant.metrics.reliability import Reliability, reliability_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from typing_extensions import Unpack


CELLS = 2048
"""Cells of [0, 1] in which the smooth curve takes examples together."""


class SmoothReliability(NamedTuple):
    """Accuracy as a smooth function of confidence, with a band. The arrays are ``(points,)``."""

    confidence: FloatArray
    accuracy: FloatArray
    low: FloatArray
    high: FloatArray
    density: FloatArray
    level: float = math.nan
    """Coverage of the band at each single confidence."""
    probability: str = ""
    """Name of the confidence where it is that of one event, such as P(y = 1), else empty."""

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the curve as by :func:`calibrant.show.figures.smooth_diagram`, with its options."""
        return as_axes(self, ax, **options)

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.confidence)} points")

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each point of the curve. Needs pandas."""
        return columns_frame({name: getattr(self, name) for name in self._fields[:5]})


class MarginReliability(NamedTuple):
    """Reliability of the examples whose margin between the top two logits is in a range."""

    low: float
    high: float
    reliability: Reliability

    def __repr__(self) -> str:
        return one_line(self, f"margin {self.low:.4g} to {self.high:.4g}", repr(self.reliability))

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Frame of the reliability. Needs pandas."""
        return self.reliability.to_frame()


class ClassReliability(NamedTuple):
    """Reliability of the probability of one class, or of one tag."""

    number: int
    """Of the class, from 0."""
    reliability: Reliability

    def __repr__(self) -> str:
        return one_line(self, f"class {self.number}", repr(self.reliability))

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Frame of the reliability, with the number of the class in front. Needs pandas."""
        frame = self.reliability.to_frame()
        frame.insert(0, "class", self.number)
        return frame


class Histogram(NamedTuple):
    """Share of all examples per bin of confidence that are right, and that are wrong."""

    edges: FloatArray
    right: FloatArray
    wrong: FloatArray
    confidence: float = math.nan
    """Mean confidence of all examples."""
    accuracy: float = math.nan
    """Share of right answers."""

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the shares as by :func:`calibrant.show.figures.confidence_histogram`."""
        return as_axes(self, ax)

    def __repr__(self) -> str:
        shares = f"{100 * self.right.sum():.1f} % right, {100 * self.wrong.sum():.1f} % wrong"
        return one_line(self, f"{len(self.right)} bins", shares)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each bin: its ends and the shares. Needs pandas."""
        ends = {"low_edge": self.edges[:-1], "high_edge": self.edges[1:]}
        return columns_frame({**ends, "right": self.right, "wrong": self.wrong})


@keywords(EventData)
def reliability(
    logits: Input = None,
    labels: Input = None,
    *,
    bins: int = 15,
    equal_mass: bool = False,
    level: float | None = 0.9,
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
    return reliability_of(pairs.filled(edges), level=level, probability=_event(logits, **data))


def _event(logits: Input, **data: Unpack[EventData]) -> str:
    """Return the name of the probability that is measured; pairs may be of anything."""
    scores = data.get("probs") if logits is None else logits
    if scores is None:
        return ""
    shape = checks.as_scores(checks.classes_last(scores, data.get("class_dim"))).shape
    classes = int(shape[-1]) if len(shape) > 1 else 2
    return event_probability(resolve_estimand(data.get("estimand", "auto"), classes))


@keywords(EventData)
def smooth_reliability(
    logits: Input = None,
    labels: Input = None,
    *,
    level: float = 0.9,
    points: int = 512,
    **data: Unpack[EventData],
) -> SmoothReliability:
    r"""Accuracy as a smooth function of confidence, by local quadratic regression.

    At each point a parabola is fitted to the :math:`n^{4/5}` nearest examples with tricube weights
    (loess, Cleveland and Devlin 1988). So the window is narrow where confidences crowd, and an
    accuracy that rises or bends within it causes hardly any bias. The band contains the true
    accuracy of each point with probability ``level``: it is the interval of Agresti and Coull for
    as many examples as the fit is worth there. A jump is smoothed over the width of a window.
    Where the density (a reflected Gaussian kernel of width 0.02) is near zero, the curve is
    extrapolated and the band wide. Input as for :func:`calibrant.ece`.

    >>> curve = smooth_reliability(confidence=[0.5] * 100, outcome=[1] * 60 + [0] * 40)
    >>> round(float(curve.accuracy[256]), 2)
    0.6
    """
    pairs = pairs_from(logits, labels, **data)
    return smooth_reliability_of(
        pairs, level=level, points=points, probability=_event(logits, **data)
    )


def smooth_reliability_of(
    pairs: WeightedPairs, *, level: float = 0.9, points: int = 512, probability: str = ""
) -> SmoothReliability:
    """Compute :func:`smooth_reliability` of checked pairs, of a probability with this name."""
    check_level(level)
    grid = (np.arange(points) + 0.5) / points
    filled = pairs.filled(uniform_edges(CELLS))
    held = filled.weight > 0
    claimed, right = filled.confidence[held], filled.accuracy[held]
    mass, variance = filled.weight[held] / filled.total, 1 / filled.effective[held]
    share = (filled.total**2 / filled.squares.sum()) ** (-1 / 5)
    weights = _parabola_weights(grid, claimed, mass, share, 2 / points)
    accuracy = np.clip(weights @ right, 0, 1)
    worth = 1 / (weights**2 @ variance)  # examples
    z2 = float(ndtri((1 + level) / 2)) ** 2
    centre = (accuracy * worth + z2 / 2) / (worth + z2)
    around = np.interp(claimed, grid, centre)
    noise = weights**2 @ (variance * around * (1 - around))
    reach = np.sqrt(z2 * noise * worth / (worth + z2))
    low, high = np.clip(centre - reach, 0, accuracy), np.clip(centre + reach, accuracy, 1)
    density = _density(pairs, points)
    return SmoothReliability(grid, accuracy, low, high, density, level, probability)


def _parabola_weights(
    points: FloatArray, claimed: FloatArray, mass: FloatArray, share: float, narrowest: float
) -> FloatArray:
    """Weights ``(points, cells)`` whose sums with the outcomes of cells are local parabolas.

    The window around each point holds a share of the mass, and reaches at least ``narrowest``.
    """
    running = np.concatenate([[0.0], np.cumsum(mass)])
    low, high = np.full(points.size, narrowest), np.ones(points.size)
    for _ in range(20):
        middle = (low + high) / 2
        first, last = (np.searchsorted(claimed, points + sign * middle) for sign in (-1, 1))
        enough = running[last] - running[first] >= share
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    widths = 1.01 * high  # examples at the very end have no weight
    return np.stack([_fit_at(x, h, claimed, mass) for x, h in zip(points, widths, strict=True)])


def _fit_at(point: float, width: float, claimed: FloatArray, mass: FloatArray) -> FloatArray:
    """Weights ``(cells,)`` whose sum with the outcomes is a local parabola at a point."""
    weights = np.zeros_like(mass)
    near = slice(*np.searchsorted(claimed, [point - width, point + width]))
    distance = (claimed[near] - point) / width
    root = np.sqrt(mass[near]) * (1 - np.abs(distance) ** 3) ** 1.5
    q, r = np.linalg.qr(root[:, None] * distance[:, None] ** np.arange(3))
    # fewer than three distinct confidences have no parabola: a line, or a mean
    size = np.abs(np.diagonal(r))
    rank = int(np.minimum.accumulate(size > 1e-4 * size[0]).sum())
    at_zero = np.linalg.solve(r[:rank, :rank].T, np.eye(rank)[0])
    weights[near] = root * (q[:, :rank] @ at_zero)
    return weights


def _density(pairs: WeightedPairs, points: int) -> FloatArray:
    """Density of the confidences; a cosine transform extends its input by reflection."""
    share = pairs.filled(uniform_edges(points)).weight
    spectrum = dct(share / share.mean(), norm="ortho")
    damped = spectrum * np.exp(-((np.pi * np.arange(points) * 0.02) ** 2) / 2)
    return np.maximum(idct(damped, norm="ortho"), 0.0)


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
    means = float(filled.claimed.sum() / filled.total), float(right.sum())
    return Histogram(filled.edges, right, filled.weight / filled.total - right, *means)


def reliability_by_margin(
    logits: Values,
    labels: Values,
    *,
    estimand: EstimandChoice = "auto",
    margin_bins: int = 3,
    bins: int = 15,
    level: float | None = 0.9,
) -> list[MarginReliability]:
    """Reliability by margin between the top two logits, smallest margins first (SMART, fig. 15).

    Each bin of margins holds about equally many examples. ``estimand`` as for
    :func:`calibrant.ece`.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(900, 5))
    >>> [m.low < m.high for m in reliability_by_margin(logits, logits.argmax(-1))]
    [True, True, True]
    """
    pairs = pairs_from(logits, labels, estimand=estimand)
    margin = margins(checks.as_scores(logits)[checks.as_labels(labels) != checks.IGNORED])
    probability = _event(logits, estimand=estimand)
    return margin_groups(
        pairs, margin, margin_bins=margin_bins, bins=bins, level=level, probability=probability
    )


def margin_groups(
    pairs: WeightedPairs,
    margin: FloatArray,
    *,
    margin_bins: int = 3,
    bins: int = 15,
    level: float | None = 0.9,
    probability: str = "",
) -> list[MarginReliability]:
    """Compute :func:`reliability_by_margin` of checked pairs and their margins ``(n,)``."""
    checks.check_whole("margin_bins", margin_bins)
    order = np.argsort(margin, kind="stable")
    curves = []
    for part in np.array_split(order, min(margin_bins, order.size)):
        weight = None if pairs.weight is None else pairs.weight[part]
        some = WeightedPairs(pairs.confidence[part], pairs.outcome[part], weight)
        filled = some.filled(uniform_edges(bins))
        curve = reliability_of(filled, level=level, probability=probability)
        curves.append(MarginReliability(float(margin[part[0]]), float(margin[part[-1]]), curve))
    return curves


@checks.warnings_at_caller()
def reliability_by_class(
    logits: Input = None,
    labels: Input = None,
    *,
    probs: Input = None,
    sample_weight: Input = None,
    estimand: EstimandChoice = "auto",
    bins: int = 15,
    level: float | None = 0.9,
) -> list[ClassReliability]:
    """Reliability of the probability of each class against the rest, or of each tag, worst first.

    The classes whose error, of which :func:`calibrant.classwise_ece` is the mean, is largest come
    first; those without any example are left out.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(900, 3))
    >>> logits[:, 2] += 2
    >>> labels = rng.integers(3, size=900)
    >>> reliability_by_class(logits, labels)[0].number
    2
    """
    examples, _ = _examples_of_caller(logits, labels, probs, sample_weight, estimand)
    sums = ClassBins.empty(examples.columns, bins)
    reduce_examples(examples, sums)
    kind = "P(tag)" if examples.estimand == "multilabel" else "P(class)"
    return class_reliability(sums, level=level, probability=kind)


def class_reliability(
    sums: ClassBins, *, level: float | None = 0.9, probability: str = "P(class)"
) -> list[ClassReliability]:
    """Compute :func:`reliability_by_class` from sums per class and bin."""
    edges, errors = uniform_edges(sums.bins), sums.errors()
    total = sums.weight.sum(1, keepdim=True)
    empty = sums.weight <= 1e-9 * total  # a first bin whose examples were moved is off by rounding
    tables = (sums.weight, sums.claimed, sums.observed, sums.squares)
    weight, claimed, observed, squares = (x.masked_fill(empty, 0).numpy() for x in tables)
    none = np.zeros(sums.bins)
    worst = np.argsort(-errors, kind="stable")[: int(np.isfinite(errors).sum())]
    curves = []
    for k in worst.tolist():
        columns = weight[k], claimed[k], observed[k], none, squares[k]
        held = Bins(edges, none.astype(np.int64), *columns)
        curve = reliability_of(held, level=level, probability=probability)
        curves.append(ClassReliability(k, curve))
    return curves
