"""Charts of bins: reliability diagrams and histograms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from calibrant.show.charts.axes import PAINTS, Axes, as_array, finite, first_names, legend_places
from calibrant.show.html import Html, rendered
from calibrant.show.numbers import percent

PALE = 0.5
"""Width of an interval above which a bin is pale."""


@dataclass(frozen=True)
class Bin:
    """A bin of a reliability diagram that has examples."""

    left: float
    right: float
    confidence: float
    accuracy: float
    low: float
    high: float
    share: float

    def describe(self, claim: str, event: str) -> str:
        """Return the numbers of the bin, for its hover."""
        ends = f" ({percent(self.low)} to {percent(self.high)})" if self.whiskers else ""
        return (
            f"{claim} {percent(self.left)} to {percent(self.right)}: mean "
            f"{percent(self.confidence)}, {event} {percent(self.accuracy)}{ends}; "
            f"{percent(self.share)} of the examples"
        )

    @property
    def whiskers(self) -> bool:
        """True if there is an interval."""
        return finite(self.low, self.high)

    @property
    def unsure(self) -> bool:
        """True if too few examples are known to say much: such bins are pale."""
        return self.whiskers and self.high - self.low > PALE


def reliability_chart(
    edges: ArrayLike,
    confidence: ArrayLike,
    accuracy: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    share: ArrayLike,
    *,
    claim: str = "confidence",
    event: str = "accuracy",
    note: str = "",
) -> Html:
    """Return a reliability diagram: accuracy per bin, its interval, and the gap to the confidence.

    Parameters
    ----------
    edges : (bins + 1,)
    confidence, accuracy, low, high, share : (bins,)
        As in :class:`calibrant.metrics.curves.Reliability`; a bin without examples is NaN.
    claim, event : str
        Names of the axes.
    note : str
        A line in the corner, such as the ECE with its interval.

    Examples
    --------
    >>> chart = reliability_chart([0, 0.5, 1], [0.4, 0.9], [0.5, 0.7], [0.3, 0.6], [0.7, 0.8],
    ...                           [0.2, 0.8])
    >>> chart.startswith("<svg"), "accuracy 70 % (60 % to 80 %)" in chart
    (True, True)
    """
    columns = (as_array(v).tolist() for v in (confidence, accuracy, low, high, share))
    rows = zip(pairwise(as_array(edges).tolist()), zip(*columns, strict=True), strict=True)
    bins = [Bin(*ends, *values) for ends, values in rows if finite(*values[:2])]
    places, height = legend_places([event, f"gap to {claim}", "ideal"], (46, 440, 396))
    return rendered(
        "charts/reliability.html",
        axes=Axes.within((46, 86, 376, 386), (0, 1), (0, 1)),
        bins=bins,
        peak=max((b.share for b in bins), default=0),
        claim=claim,
        event=event,
        note=note,
        places=places,
        height=height,
        percent=percent,
        label=f"Reliability diagram: {event} against {claim}. {note}".strip(),
    )


def histogram_chart(
    edges: ArrayLike,
    shares: Mapping[str, ArrayLike],
    *,
    x_label: str = "confidence",
    y_label: str = "share of the examples",
) -> Html:
    """Return shares per bin as outlines over each other, the first blue and the second orange.

    Examples
    --------
    >>> chart = histogram_chart([0, 0.5, 1], {"right": [0.1, 0.7], "wrong": [0.1, 0.1]})
    >>> chart.count("<rect"), "right, 50 % to 100 %: 70 %" in chart
    (6, True)
    """
    limits, columns = as_array(edges), {name: as_array(values) for name, values in shares.items()}
    peak = max((float(np.nanmax(v)) for v in columns.values() if np.isfinite(v).any()), default=1)
    sets = []
    for paint, (name, values) in zip(PAINTS, columns.items(), strict=False):
        bars = zip(limits, limits[1:], values, strict=False)
        sets.append((paint, name, [bar for bar in bars if finite(bar[2])]))
    places, height = legend_places(list(columns), (50, 270, 410))
    return rendered(
        "charts/histogram.html",
        axes=Axes.within((50, 30, 396, 220), (limits[0], limits[-1]), (0, peak or 1)),
        sets=sets,
        x_label=x_label,
        y_label=y_label,
        places=places,
        height=height,
        percent=percent,
        label=f"Histogram: {y_label} against {x_label}, {first_names(columns)}",
    )
