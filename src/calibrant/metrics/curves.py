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
from calibrant._core.tables import columns_frame
from calibrant.display.html import notebook
from calibrant.display.results import one_line
from calibrant.display.svg import Line, histogram_chart, line_chart, reliability_chart
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

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack


CELLS = 2048
"""Cells of [0, 1] in which the smooth curve takes examples together."""


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

    def __repr__(self) -> str:
        used = int((self.share > 0).sum())
        return one_line(self, f"{len(self.share)} bins, {used} with examples")

    def chart(self, note: str = "") -> str:
        """Reliability diagram as SVG."""
        claim, event = axis_names(self.probability)
        return reliability_chart(*self, claim=claim, event=event, note=note)

    def _repr_html_(self) -> str:
        return notebook(self.chart())

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each bin: its ends and the values. Needs pandas."""
        ends = {"low_edge": self.edges[:-1], "high_edge": self.edges[1:]}
        values = {name: getattr(self, name) for name in self._fields[1:]}
        return columns_frame({**ends, **values})


class PositiveReliability(Reliability):
    """Reliability of P(y = 1): the accuracy is the frequency of y = 1."""

    @property
    def probability(self) -> str:
        """Name of the confidence."""
        return ESTIMANDS["binary"]


class SmoothReliability(NamedTuple):
    """Accuracy as a smooth function of confidence, with a band for it. Each ``(points,)``."""

    confidence: FloatArray
    accuracy: FloatArray
    low: FloatArray
    high: FloatArray
    density: FloatArray

    @property
    def probability(self) -> str:
        """Name of the confidence where it is that of one class, P(y = 1), else empty."""
        return ""

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.confidence)} points")

    def _repr_html_(self) -> str:
        claim, event = axis_names(self.probability)
        # where less than a thousandth of the peak density lies, the curve is extrapolation
        seen = np.where(self.density > 1e-3 * self.density.max(), 1.0, np.nan)
        low, high = seen * self.low, seen * self.high
        curve = Line(event, self.confidence, seen * self.accuracy, low, high)
        ideal = Line("ideal", [0, 1], [0, 1], colour="ink", dashed=True)
        return notebook(line_chart([curve, ideal], x_label=claim, y_label=event, y_range=(0, 1)))

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each point of the curve. Needs pandas."""
        return columns_frame(self._asdict())


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

    def __repr__(self) -> str:
        return one_line(self, f"margin {self.low:.4g} to {self.high:.4g}", repr(self.reliability))

    def _repr_html_(self) -> str:
        return notebook(self.reliability.chart(f"margin {self.low:.4g} to {self.high:.4g}"))

    def to_frame(self) -> pd.DataFrame:
        """Frame of the reliability. Needs pandas."""
        return self.reliability.to_frame()


class Histogram(NamedTuple):
    """Share of all examples per bin of confidence that are right, and that are wrong."""

    edges: FloatArray
    right: FloatArray
    wrong: FloatArray

    def __repr__(self) -> str:
        shares = f"{100 * self.right.sum():.1f} % right, {100 * self.wrong.sum():.1f} % wrong"
        return one_line(self, f"{len(self.right)} bins", shares)

    def _repr_html_(self) -> str:
        return notebook(histogram_chart(self.edges, {"right": self.right, "wrong": self.wrong}))

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each bin: its ends and the shares. Needs pandas."""
        ends = {"low_edge": self.edges[:-1], "high_edge": self.edges[1:]}
        return columns_frame({**ends, "right": self.right, "wrong": self.wrong})


def axis_names(probability: str) -> tuple[str, str]:
    """Names of the claimed probability and of what it is compared with.

    >>> axis_names("")
    ('confidence', 'accuracy')
    """
    return (probability, "frequency of y = 1") if probability else ("confidence", "accuracy")


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
    check_level(level)
    pairs = pairs_from(logits, labels, **data)
    grid = (np.arange(points) + 0.5) / points
    filled = pairs.filled(uniform_edges(CELLS))
    held = filled.weight > 0
    claimed, right = filled.confidence[held], filled.accuracy[held]
    mass, variance = filled.weight[held] / filled.total, 1 / filled.effective[held]
    share = (filled.total**2 / filled.squares.sum()) ** (-1 / 5)
    widths = _widths(grid, claimed, mass, share)
    weights = np.stack([_fit_at(x, h, claimed, mass) for x, h in zip(grid, widths, strict=True)])
    accuracy = np.clip(weights @ right, 0, 1)
    worth = 1 / (weights**2 @ variance)  # examples
    z2 = float(norm.ppf((1 + level) / 2)) ** 2
    centre = (accuracy * worth + z2 / 2) / (worth + z2)
    around = np.interp(claimed, grid, centre)
    noise = weights**2 @ (variance * around * (1 - around))
    reach = np.sqrt(z2 * noise * worth / (worth + z2))
    low, high = np.clip(centre - reach, 0, accuracy), np.clip(centre + reach, accuracy, 1)
    kind = PositiveSmoothReliability if _positive(logits, **data) else SmoothReliability
    return kind(grid, accuracy, low, high, _density(pairs, points))


def _widths(grid: FloatArray, claimed: FloatArray, mass: FloatArray, share: float) -> FloatArray:
    """Reach of the window around each point that holds a share of the mass, by bisection."""
    running = np.concatenate([[0.0], np.cumsum(mass)])
    low, high = np.full(grid.size, 2 / grid.size), np.ones(grid.size)
    for _ in range(20):
        middle = (low + high) / 2
        first, last = (np.searchsorted(claimed, grid + sign * middle) for sign in (-1, 1))
        enough = running[last] - running[first] >= share
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return 1.01 * high  # examples at the very end have no weight


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
