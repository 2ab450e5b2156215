"""Diagrams of calibration, from the data of ``calibrant.metrics`` and ``calibrant.calibrators``.

Every function draws into ``ax`` (a new figure without one) and returns it. Text, ticks and frames
take the colours of the matplotlib style in use, and fills are translucent, so that the same call
looks right in a paper and in a dark notebook. Needs matplotlib: ``pip install 'calibrant[plot]'``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from calibrant._core.checks import FloatArray
from calibrant._core.messages import comma_separated
from calibrant.calibrators.margin_curves import MarginChange, MarginTemperature
from calibrant.metrics import curves
from calibrant.metrics.curves import Histogram, MarginReliability, Reliability, SmoothReliability
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.ranking import RiskCoverage
from calibrant.metrics.reductions import Pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibrant.retrain.masked_classifier import Epoch

RIGHT, WRONG = "#2f7fb8", "#d9662b"
"""Blue for accuracy and right answers, orange for the rest: safe for colour-blind readers."""


def reliability_diagram(
    data: Reliability | Evaluation | Pairs, ax: Axes | None = None, *, label: str = ""
) -> Axes:
    """Accuracy per bin with intervals, the gap to the confidence, and the share of each bin.

    ``data`` is from ``calibrant.reliability``, ``calibrant.evaluate`` or ``calibrant.top_label``;
    ``label`` is the legend of the bars. Of two classes, P(y = 1) is drawn against the frequency of
    y = 1, and the axes say so.

    Examples
    --------
    >>> from calibrant.metrics import top_label
    >>> reliability_diagram(top_label([[2.0, 0.0], [1.0, 0.0]], [0, 1])).get_xlabel()
    'confidence'
    """
    curve = _reliability(data)
    axes, (claim, event) = _square(ax, curve.probability), _axis_names(curve.probability)
    seen = np.isfinite(curve.accuracy)
    left, width = curve.edges[:-1][seen], np.diff(curve.edges)[seen]
    accuracy, claimed = curve.accuracy[seen], curve.confidence[seen]
    bars: dict[str, Any] = {"x": left, "width": width, "align": "edge"}
    axes.bar(height=accuracy, color=RIGHT, alpha=0.55, lw=0, label=label or event, **bars)
    gap: dict[str, Any] = {"facecolor": "none", "edgecolor": WRONG, "hatch": "////", "lw": 1}
    axes.bar(height=claimed - accuracy, bottom=accuracy, label=f"gap to {claim}", **gap, **bars)
    reach = np.abs(np.stack([curve.low[seen], curve.high[seen]]) - accuracy)
    axes.errorbar(claimed, accuracy, yerr=reach, fmt="o", ms=3, lw=1, capsize=2, color=_ink())
    _counts(axes, curve.edges, curve.share)
    _legend(axes, loc="lower right")  # where the bars are solid and hide nothing
    return axes


def _reliability(data: object) -> Reliability:
    if isinstance(data, Reliability):
        return data
    if isinstance(data, Evaluation):
        level, positive = data.level or 0.9, bool(data.probability)
        return curves.reliability_of(data.bins, level=level, positive=positive)
    if isinstance(data, Pairs):
        return curves.reliability(confidence=data.confidence, outcome=data.outcome)
    kind = type(data).__name__
    raise TypeError(
        f"data must be from reliability, evaluate or top_label, got {kind}: pass "
        "calibrant.metrics.reliability(logits, labels)"
    )


def smooth_diagram(curve: SmoothReliability, ax: Axes | None = None, *, label: str = "") -> Axes:
    """Accuracy as a smooth function of confidence with its band, over the density.

    The line is as wide as the examples are dense there.
    """
    axes = _square(ax, curve.probability)
    from matplotlib.collections import LineCollection

    # where less than a thousandth of the peak density lies, the curve is extrapolation
    seen = curve.density > 1e-3 * curve.density.max()
    x, y = curve.confidence, curve.accuracy
    axes.fill_between(
        x, curve.low, curve.high, where=seen.tolist(), color=RIGHT, alpha=0.25, lw=0, label="band"
    )
    points, shown = np.stack([x, y], -1), seen[:-1] & seen[1:]
    lines = list(np.stack([points[:-1], points[1:]], 1)[shown])
    wide = (0.8 + 4 * np.sqrt(curve.density / curve.density.max())[:-1][shown]).tolist()
    axes.add_collection(LineCollection(lines, linewidths=wide, colors=RIGHT, capstyle="round"))
    event = _axis_names(curve.probability)[1]
    axes.plot([], [], color=RIGHT, lw=2.5, label=label or event)
    _legend(axes)
    return axes


def confidence_histogram(shares: Histogram, ax: Axes | None = None) -> Axes:
    """Distribution of confidence among right and among wrong answers, on a logarithmic scale."""
    axes = _axes(ax)
    for values, color, label in ((shares.right, RIGHT, "right"), (shares.wrong, WRONG, "wrong")):
        axes.stairs(100 * values, shares.edges, fill=True, color=color, alpha=0.35)
        axes.stairs(100 * values, shares.edges, color=color, lw=1.5, label=label)
    least = min(x[x > 0].min() for x in (shares.right, shares.wrong) if x.any())
    axes.set(xlim=(0, 1), xlabel="confidence", ylabel="share of the examples (%)", yscale="log")
    axes.set_ylim(50 * least, 200)
    _legend(axes)
    return axes


def margin_diagrams(curves: Sequence[MarginReliability]) -> Figure:
    """Reliability diagrams side by side, one for each bin of margins (SMART, figure 15)."""
    figure: Figure
    figure, axes = _pyplot().subplots(1, len(curves), figsize=(3.3 * len(curves), 4), squeeze=False)
    # the strips above the diagrams are not seen by the automatic layouts
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.12, top=0.78, wspace=0.2)
    for curve, ax in zip(curves, axes[0], strict=True):
        reliability_diagram(curve.reliability, ax)
        ax.child_axes[0].set_title(f"margin {curve.low:.1f} to {curve.high:.1f}")
        if ax is not axes[0][0]:
            ax.get_legend().remove()
            ax.set_ylabel("")
    return figure


def risk_coverage_plot(
    curve: RiskCoverage, ax: Axes | None = None, *, label: str = "by confidence"
) -> Axes:
    """Error rate among the most confident examples, against how many of them are kept."""
    axes = _axes(ax)
    axes.plot(100 * curve.coverage, 100 * curve.risk, color=RIGHT, lw=2, label=label)
    whole = 100 * curve.risk[-1]
    axes.axhline(whole, color=_ink(), lw=1, ls=":", label="no order")
    # with all wrong answers last, errors begin when only they are left
    kept = np.linspace(1, 100, 200)
    best = np.maximum(kept - (100 - whole), 0) / kept * 100
    axes.plot(kept, best, color=_ink(), lw=1, ls="--", label="best order")
    axes.set(xlim=(0, 100), ylim=(0, None), xlabel="coverage (%)", ylabel="risk (%)")
    _legend(axes)
    return axes


def temperature_plot(
    curve: MarginTemperature, ax: Axes | None = None, *, label: str = "temperature"
) -> Axes:
    """Temperature against margin, with the middle nine tenths shaded."""
    axes = _axes(ax)
    axes.fill_between(curve.margin, curve.low, curve.high, color=RIGHT, alpha=0.25, lw=0)
    axes.plot(curve.margin, curve.temperature, color=RIGHT, lw=2, label=label)
    axes.axhline(1, color=_ink(), lw=1, ls="--", label="unchanged")
    axes.set(xlabel="margin of the top two logits", ylabel="temperature")
    _legend(axes, loc="best")  # the line may go anywhere
    return axes


def adjustment_plot(changes: Mapping[str, MarginChange], ax: Axes | None = None) -> Axes:
    """Mean change of the confidence against the margin, one line for each method."""
    axes = _axes(ax)
    axes.axhline(0, color=_ink(), lw=1)
    _lines(axes, {name: (curve.margin, 100 * curve.change) for name, curve in changes.items()})
    axes.set(xlabel="margin of the top two logits", ylabel="change of confidence (points)")
    return axes


GATE = {
    "gate_positive": "gate at +1",
    "gate_flips": "gate changed",
    "smoothing_lowered": "smoothing lowered",
}
"""Columns of a training log with FeDLaS, and their titles in a plot."""


def gate_plot(log: Sequence[Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Gate of FeDLaS by epoch, from the log of ``calibrant bench train``: rows of ``log.csv``."""
    missing = [name for name in GATE if not log or name not in log[0]]
    if missing:
        names = comma_separated(missing)
        raise ValueError(f"the log must be of a training with FeDLaS, it has no {names}")
    axes, epochs = _axes(ax), [int(row["epoch"]) for row in log]
    _lines(axes, {GATE[name]: (epochs, [100 * float(row[name]) for row in log]) for name in GATE})
    axes.set(xlabel="epoch", ylabel="training examples (%)", ylim=(0, 100))
    return axes


def keep_plot(history: Sequence[Epoch], ax: Axes | None = None) -> Axes:
    """Keep-rate, confidence and accuracy of a :class:`calibrant.MaCCal` in each epoch."""
    axes, epochs = _axes(ax), range(1, len(history) + 1)
    columns = {"keep-rate q": "keep", "confidence": "confidence", "accuracy": "accuracy"}
    values = {k: [100 * getattr(epoch, name) for epoch in history] for k, name in columns.items()}
    _lines(axes, {title: (epochs, y) for title, y in values.items()})
    axes.set(xlabel="epoch", ylabel="%", ylim=(0, 102))
    return axes


def _lines(axes: Axes, lines: Mapping[str, tuple[Any, Any]]) -> None:
    """Draw lines ``{title: (x, y)}`` that can be told apart without their colours."""
    for (title, (x, y)), style in zip(lines.items(), cycle(["-", "--", "-.", ":"]), strict=False):
        axes.plot(x, y, lw=2, ls=style, label=title)
    _legend(axes, loc="best")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        message = f"diagrams need matplotlib ({error}): pip install 'calibrant[plot]'"
        raise ImportError(message) from error
    return plt


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    axes: Axes = _pyplot().subplots(figsize=(4.2, 3.4), layout="constrained")[1]
    return axes


def _axis_names(probability: str) -> tuple[str, str]:
    """Return the names of the claimed probability and of what it is compared with."""
    return (probability, "frequency of y = 1") if probability else ("confidence", "accuracy")


def _square(ax: Axes | None, probability: str) -> Axes:
    if ax is None:
        figure, ax = _pyplot().subplots(figsize=(4.2, 4.8))
        figure.subplots_adjust(left=0.14, right=0.97, bottom=0.1, top=0.84)  # room for a strip
    claim, event = _axis_names(probability)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel=claim, ylabel=event, aspect="equal")
    ax.plot([0, 1], [0, 1], color=_ink(), lw=1, ls="--", zorder=1.5)  # above bars
    return ax


def _legend(axes: Axes, loc: Literal["upper left", "lower right", "best"] = "upper left") -> None:
    axes.legend(loc=loc, framealpha=0.8, edgecolor="none")


def _counts(axes: Axes, edges: FloatArray, share: FloatArray) -> None:
    """Share of the examples per bin, in a strip above the diagram."""
    strip = axes.inset_axes((0, 1.02, 1, 0.14), sharex=axes)
    strip.bar(edges[:-1], 100 * share, np.diff(edges), align="edge", color=_ink(), alpha=0.45, lw=0)
    strip.tick_params(labelbottom=False, bottom=False)
    peak = 100 * float(share.max())
    strip.set_yticks([peak], [f"{peak:.0f} %"])
    for side in ("top", "right"):
        strip.spines[side].set_visible(False)


def _ink() -> str:
    """Return the colour of text in the style in use: black on paper, light in a dark notebook."""
    return str(_pyplot().rcParams["text.color"])
