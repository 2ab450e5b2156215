"""Reliability diagrams: one, several side by side, smooth ones, and histograms of confidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from calibrant._core.checks import FloatArray
from calibrant.show.charts.axes import _axis_names
from calibrant.show.figures.look import (
    _current,
    _in_look,
    _new_axes,
    _panel_title,
    _panels,
    _text_of,
    legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibrant.metrics.curves import (
        ClassReliability,
        Histogram,
        MarginReliability,
        SmoothReliability,
    )
    from calibrant.metrics.evaluation import Evaluation
    from calibrant.metrics.reductions import Pairs
    from calibrant.metrics.reliability import Estimate, Reliability

    Binned: TypeAlias = Reliability | Evaluation | Pairs

STRIP = (1.04, 1.18)
"""Bottom and top of the shares, above the diagram in the same axes: layouts see them there."""
HEIGHT = 1.3
"""Height of a figure with one diagram and its legend, in units of its width."""


@_in_look
def reliability_diagram(data: Binned, ax: Axes | None = None, *, label: str = "") -> Axes:
    """Accuracy per bin with intervals, the gap to the confidence, and the share of each bin.

    The legend has the ECE, with its interval if ``data`` is an evaluation. It stands below a new
    figure, and inside axes that are passed.

    Parameters
    ----------
    data : Reliability, Evaluation or Pairs
        From :func:`calibrant.metrics.reliability`, :func:`calibrant.evaluate` or
        :func:`calibrant.top_label`. Of two classes, P(y = 1) is drawn against the frequency of
        y = 1, and the axes say so.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    label : str
        Name of the bars in the legend.

    Examples
    --------
    >>> from calibrant.metrics import top_label
    >>> reliability_diagram(top_label([[2.0, 0.0], [1.0, 0.0]], [0, 1])).get_xlabel()
    'confidence'
    """
    curve = _curve(data)
    axes = _square(_new_axes(ax, height=HEIGHT), curve.probability)
    handles = _bars(axes, curve, _text_of(label) if label else "")
    _counts(axes, curve.edges, curve.share)
    place = "below" if ax is None else _free_corner(curve, curve.share)
    legend(axes, place, title=_error_text(curve), handles=handles)
    return axes


@_in_look
def reliability_diagrams(data: Mapping[str, Binned]) -> Figure:
    """Reliability diagrams side by side, with one scale for their shares.

    For several models or subgroups, or for the same examples before and after calibration.

    Parameters
    ----------
    data : mapping
        From titles to what :func:`reliability_diagram` takes.

    Examples
    --------
    >>> from calibrant.metrics import reliability
    >>> one = reliability(confidence=[0.9, 0.8], outcome=[1, 0])
    >>> len(reliability_diagrams({"model A": one, "model B": one}).axes)
    2
    """
    if not data:
        raise ValueError("there is nothing to draw: pass at least one result by its title")
    curves = [_curve(one) for one in data.values()]
    axes = _panels(len(curves), height=STRIP[1])
    most = max(float(np.nanmax(curve.share)) for curve in curves)
    handles: list[Any] = []
    for ax, title, curve in zip(axes, data, curves, strict=True):
        drawn = _bars(_square(ax, curve.probability), curve, "")
        handles = handles or drawn
        _counts(ax, curve.edges, curve.share, most, named=ax is axes[0])
        _panel_title(ax, title, _error_text(curve))
    _outer_only(axes)
    return _with_legend(axes, handles)


def before_and_after(before: Binned, after: Binned) -> Figure:
    """Reliability diagrams before and after calibration, as by :func:`reliability_diagrams`."""
    return reliability_diagrams({"before": before, "after": after})


def margin_diagrams(curves: Sequence[MarginReliability]) -> Figure:
    """Reliability diagrams by margin, side by side (SMART, figure 15).

    ``curves`` are from :func:`calibrant.metrics.reliability_by_margin`.
    """
    return reliability_diagrams({_range(c.low, c.high): c.reliability for c in curves})


def class_diagrams(
    curves: Sequence[ClassReliability], *, names: Sequence[str] | None = None, most: int = 9
) -> Figure:
    """Reliability diagrams of the first classes, side by side.

    Parameters
    ----------
    curves : sequence of ClassReliability
        From :func:`calibrant.metrics.reliability_by_class`, worst first.
    names : sequence of str, optional
        Names of all classes, in the order of their numbers.
    most : int
        Number of classes that are drawn.
    """
    shown = curves[:most]
    kind = "tag" if shown and shown[0].reliability.probability == "P(tag)" else "class"
    titles = [f"{kind} {c.number}" if names is None else str(names[c.number]) for c in shown]
    alike = len(set(titles)) < len(titles)
    titles = [f"{t} ({c.number})" if alike else t for t, c in zip(titles, shown, strict=True)]
    return reliability_diagrams({t: c.reliability for t, c in zip(titles, shown, strict=True)})


@_in_look
def smooth_diagram(curve: SmoothReliability, ax: Axes | None = None, *, label: str = "") -> Axes:
    """Accuracy as a smooth function of confidence with its band, below the density.

    The line is as wide as the examples are dense there. The band holds the accuracy at each single
    confidence with the probability that the legend names. ``curve`` is from
    :func:`calibrant.metrics.smooth_reliability`.
    """
    axes = _square(_new_axes(ax, height=HEIGHT), curve.probability)
    handles = _smooth(axes, curve, _text_of(label) if label else "")
    place = "below" if ax is None else _free_corner(curve, curve.density)
    legend(axes, place, handles=handles)
    return axes


@_in_look
def smooth_diagrams(curves: Mapping[str, SmoothReliability]) -> Figure:
    """Smooth diagrams side by side, by their titles."""
    axes = _panels(len(curves), height=STRIP[1])
    handles: list[Any] = []
    for ax, (title, curve) in zip(axes, curves.items(), strict=True):
        handles = _smooth(_square(ax, curve.probability), curve, "")
        _panel_title(ax, title)
    _outer_only(axes)
    return _with_legend(axes, handles)


@_in_look
def confidence_histogram(shares: Histogram, ax: Axes | None = None) -> Axes:
    """Distribution of confidence among right and among wrong answers, on a logarithmic scale.

    Lines mark the mean confidence and the accuracy: the distance is how far off the model is.
    ``shares`` are from :func:`calibrant.metrics.confidence_histogram`.
    """
    axes = _new_axes(ax)
    _histogram(axes, shares)
    axes.set_ylim(50 * _least(shares), 300)
    legend(axes, "upper left")
    return axes


@_in_look
def confidence_histograms(shares: Mapping[str, Histogram]) -> Figure:
    """Histograms of confidence side by side, by their titles, on one scale."""
    axes = _panels(len(shares), height=0.9)
    handles: list[Any] = []
    least = min(map(_least, shares.values()))
    for ax, (title, each) in zip(axes, shares.items(), strict=True):
        handles = _histogram(ax, each)
        ax.set_ylim(50 * least, 300)
        _panel_title(ax, title)
    for handle, name in zip(handles[2:], ("accuracy", "mean confidence"), strict=False):
        handle.set_label(name)
    _outer_only(axes)
    return _with_legend(axes, handles)


def _error_text(curve: Reliability) -> str:
    """Return the calibration error of the bins in words, with its interval if there is one.

    >>> from calibrant.metrics import reliability
    >>> _error_text(reliability(confidence=[0.9, 0.8], outcome=[1, 0]))
    'ECE 45.00 %'
    """
    if math.isnan(curve.ece.value):
        return ""
    equal = np.allclose(np.diff(curve.edges), 1 / (len(curve.edges) - 1))
    return f"{'ECE' if equal else 'adaptive ECE'} {_interval_text(curve.ece)}"


def _interval_text(estimate: Estimate) -> str:
    """Return a share in per cent with its interval, if there is one."""
    value = f"{100 * estimate.value:.2f} %"
    if math.isnan(estimate.low):
        return value
    return f"{value} [{100 * estimate.low:.2f}, {100 * estimate.high:.2f}]"


def _curve(data: Any) -> Reliability:
    if hasattr(data, "edges"):
        return data  # type: ignore[no-any-return]
    if hasattr(data, "reliability"):
        return data.reliability()  # type: ignore[no-any-return]
    raise TypeError(
        f"data must be from reliability, evaluate or top_label, got {type(data).__name__}: pass "
        "calibrant.metrics.reliability(logits, labels)"
    )


def _square(axes: Axes, probability: str) -> Axes:
    claim, event = _axis_names(probability)
    look, (bottom, top) = _current(), STRIP
    axes.set(xlim=(0, 1), ylim=(0, top + 0.01), xlabel=claim, aspect="equal")
    axes.set_ylabel(event, y=0.5 / (top + 0.01))
    axes.spines["left"].set_bounds(0, 1)
    ticks, names = [0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    line: dict[str, Any] = {"color": look.colours.ink, "lw": look.thin, "ls": "--"}
    axes.plot([0, 1], [0, 1], zorder=1.5, **line)  # above the bars, below the points
    axes.plot([0, 1], [bottom, bottom], color=look.colours.muted, lw=look.thin)
    return axes


def _bars(axes: Axes, curve: Reliability, label: str) -> list[Any]:
    """Draw the bins; returns what a legend shows of them."""
    look, (claim, event) = _current(), _axis_names(curve.probability)
    seen = np.isfinite(curve.accuracy)
    left, width = curve.edges[:-1][seen], np.diff(curve.edges)[seen]
    accuracy, claimed = curve.accuracy[seen], curve.confidence[seen]
    bars: dict[str, Any] = {"x": left, "width": width, "align": "edge"}
    paper = axes.figure.get_facecolor()
    fill: dict[str, Any] = {"color": look.colours.right, "alpha": 0.55, "label": label or event}
    solid = axes.bar(height=accuracy, edgecolor=paper, lw=0.4, **fill, **bars)
    gap: dict[str, Any] = {"facecolor": "none", "edgecolor": look.colours.wrong, "hatch": "/////"}
    gap |= {"lw": look.thin, "label": f"gap to {claim}"}
    hatched = axes.bar(height=claimed - accuracy, bottom=accuracy, **gap, **bars)
    point: dict[str, Any] = {"color": look.colours.ink, "ms": look.thick * 1.3, "lw": look.thin}
    if not np.isfinite(curve.low[seen]).any():
        axes.plot(claimed, accuracy, "o", clip_on=False, **point)
        return [solid, hatched]
    reach = np.abs(np.stack([curve.low[seen], curve.high[seen]]) - accuracy)
    interval = f"{100 * curve.level:g} % interval"
    bars = {"capsize": look.thick, "ecolor": look.colours.muted, "clip_on": False}
    whiskers = axes.errorbar(
        claimed, accuracy, yerr=reach, fmt="o", label=interval, **bars, **point
    )
    return [solid, hatched, whiskers]


def _smooth(axes: Axes, curve: SmoothReliability, label: str) -> list[Any]:
    """Draw a smooth curve; returns what a legend shows of it."""
    from matplotlib.collections import LineCollection

    look, (bottom, top) = _current(), STRIP
    # where less than a thousandth of the peak density lies, the curve is extrapolation
    density = curve.density / curve.density.max()
    seen = density > 1e-3
    x, y, colour = curve.confidence, curve.accuracy, look.colours.right
    band = axes.fill_between(
        x, curve.low, curve.high, where=seen.tolist(), color=colour, alpha=0.25, lw=0
    )
    points, shown = np.stack([x, y], -1), seen[:-1] & seen[1:]
    lines = list(np.stack([points[:-1], points[1:]], 1)[shown])
    widths = look.thick * (0.5 + 1.8 * np.sqrt(density)[:-1][shown])
    axes.add_collection(
        LineCollection(lines, linewidths=widths.tolist(), colors=colour, capstyle="round")
    )
    event = label or _axis_names(curve.probability)[1]
    (line,) = axes.plot([], [], color=colour, lw=1.5 * look.thick, label=event)
    interval = "band" if math.isnan(curve.level) else f"{100 * curve.level:g} % band, at each point"
    band.set_label(interval)
    heights = bottom + (top - bottom) * density
    axes.fill_between(x, bottom, heights, color=look.colours.muted, alpha=0.5, lw=0)
    return [line, band]


def _histogram(axes: Axes, shares: Histogram) -> list[Any]:
    """Draw shares of right and wrong answers; returns what a legend shows of them."""
    look, handles = _current(), []
    for values, colour, name in (
        (shares.right, look.colours.right, "right"),
        (shares.wrong, look.colours.wrong, "wrong"),
    ):
        axes.stairs(100 * values, shares.edges, fill=True, color=colour, alpha=0.15)
        line = axes.stairs(100 * values, shares.edges, color=colour, lw=look.thick, label=name)
        handles.append(line)
    marks: list[Any] = []
    for value, style, name in (
        (shares.accuracy, "-", "accuracy"),
        (shares.confidence, "--", "mean confidence"),
    ):
        if not math.isnan(value):
            mark: dict[str, Any] = {"color": look.colours.ink, "lw": look.thin * 1.3, "ls": style}
            marks.append(axes.axvline(value, label=f"{name} {100 * value:.1f} %", **mark))
    axes.set(xlim=(0, 1), xlabel="confidence", ylabel="share of the examples", yscale="log")
    _percent_ticks(axes)
    return [*handles, *marks]


def _least(shares: Histogram) -> float:
    """Return the smallest share that is above zero."""
    return float(min(x[x > 0].min() for x in (shares.right, shares.wrong) if x.any()))


def _counts(
    axes: Axes,
    edges: FloatArray,
    share: FloatArray,
    most: float | None = None,
    *,
    named: bool = True,
) -> None:
    """Draw the share of the examples per bin above the diagram; the largest is ``most``."""
    look, (bottom, top) = _current(), STRIP
    peak = float(np.nanmax(share)) if most is None else most
    heights = (top - bottom) * share / peak
    bars: dict[str, Any] = {"align": "edge", "color": look.colours.muted, "alpha": 0.6}
    axes.bar(edges[:-1], heights, np.diff(edges), bottom, **bars)
    if not named:
        return
    axes.annotate(
        f"{100 * peak:.0f} %",
        (0, top),
        (-0.45 * look.size.text, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        size=0.92 * look.size.text,
        color=look.colours.muted,
        annotation_clip=False,
    )


def _free_corner(
    curve: Reliability | SmoothReliability, weight: FloatArray
) -> str | tuple[float, float]:
    """Return the place for a legend inside axes: the lower right if most of a curve is above."""
    above = float(np.nansum((curve.accuracy - curve.confidence) * weight)) > 0
    return "lower right" if above else (0.02, 0.99)


def _outer_only(axes: Sequence[Axes]) -> None:
    """Keep the labels of the first column and of the last row, since all axes are the same."""
    columns = axes[0].get_gridspec().ncols  # type: ignore[union-attr]
    for i, ax in enumerate(axes):
        if i % columns:
            ax.set_ylabel("")
            ax.tick_params(labelleft=False)
        if i + columns < len(axes):
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)


def _with_legend(axes: Sequence[Axes], handles: Sequence[Any]) -> Figure:
    """Draw one legend below all diagrams."""
    figure: Any = axes[0].figure
    names = [handle.get_label() for handle in handles]
    # a name has about half an em per character, and its handle and the gap take four
    ems = sum(4 + 0.55 * len(name) for name in names)
    fits = ems * _current().size.text / 72 < figure.get_figwidth()
    columns = len(names) if fits else 2
    drawn = figure.legend(
        handles, names, loc="outside lower center", ncols=columns, handlelength=1.6
    )
    drawn.get_frame().set_alpha(0)
    return figure  # type: ignore[no-any-return]


def _range(low: float, high: float) -> str:
    return f"margin {low:.1f} to {high:.1f}"


def _percent_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.yaxis.set_minor_locator(NullLocator())
