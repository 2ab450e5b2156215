"""Figures of decisions: risk and coverage, thresholds, and sizes of prediction sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit, logit

from calibrant._core.checks import FloatArray
from calibrant._core.showing import threshold_text
from calibrant.show.figures.look import (
    _current,
    _figure_of,
    _in_look,
    _new_axes,
    _panels,
    _text_of,
    legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibrant.decide.conformal_sets import SetSizes
    from calibrant.decide.threshold_results import Threshold
    from calibrant.metrics.clinical import DecisionCurve
    from calibrant.metrics.ranking import RiskCoverage

MOST_POINTS = 2000
"""Points of a curve that are drawn: more would only make files large."""
FEW = 20
"""Sizes of sets that have a bar of their own; larger ones share the last."""
TICKS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


@_in_look
def risk_coverage_plot(
    curve: RiskCoverage | Mapping[str, RiskCoverage],
    ax: Axes | None = None,
    *,
    label: str = "by confidence",
) -> Axes:
    """Error rate among the most confident answers, against the share of them that is kept.

    Parameters
    ----------
    curve : RiskCoverage, or mapping of str to RiskCoverage
        From :func:`calibrant.metrics.risk_coverage`; several are drawn by their names.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    label : str
        Name of a single curve.
    """
    curves = curve if isinstance(curve, Mapping) else {label: curve}
    axes, look = _new_axes(ax), _current()
    one = len(curves) == 1
    for (name, each), style in zip(curves.items(), look.series(len(curves)), strict=True):
        _risk_line(axes, each, _text_of(name), style, banded=one)
    first = next(iter(curves.values()))
    whole = 100 * first.risk[-1]
    thin: dict[str, Any] = {"color": look.colours.muted, "lw": 1.3 * look.thin}
    if one:
        axes.axhline(whole, ls=":", label="no order", **thin)
        # with all wrong answers last, errors begin when only they are left
        kept = np.linspace(1, 100, 200)
        best = np.maximum(kept - (100 - whole), 0) / kept * 100
        axes.plot(kept, best, ls="--", label="best order", **thin)
    axes.set(xlim=(0, 100), xlabel="answered (%)", ylabel="wrong among these (%)")
    # the band of the few most confident ones may be as wide as everything
    axes.set_ylim(0, max(160 * _level_of_errors(each) for each in curves.values()))
    legend(axes, "upper left")
    return axes


def _risk_line(
    axes: Axes, curve: RiskCoverage, label: str, style: tuple[str, str], *, banded: bool
) -> None:
    look, (colour, dashes) = _current(), style
    some = _thinned(len(curve.coverage))
    x = 100 * curve.coverage[some]
    line: dict[str, Any] = {"color": colour, "ls": dashes, "lw": look.thick, "label": label}
    axes.plot(x, 100 * curve.risk[some], marker=_marker(x), **line)
    if banded:
        _band(axes, x, curve, colour)


def _band(axes: Axes, x: FloatArray, curve: RiskCoverage, colour: str) -> None:
    """Draw the intervals at the points that are drawn, if there are any."""
    if math.isnan(curve.level):
        return
    some, label = _thinned(len(curve.risk)), f"{100 * curve.level:g} % interval, at each point"
    low, high = 100 * curve.low[some], 100 * curve.high[some]
    axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0, label=label)


@_in_look
def decision_curve_plot(curve: DecisionCurve, ax: Axes | None = None) -> Axes:
    """Net benefit of acting from each threshold on, beside those of acting always and never.

    Parameters
    ----------
    curve : DecisionCurve
        From :func:`calibrant.metrics.decision_curve`.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    """
    axes, look = _new_axes(ax), _current()
    (colour, dashes), *_ = look.series(1)
    x = 100 * curve.threshold
    axes.plot(x, curve.net_benefit, color=colour, ls=dashes, lw=look.thick, label="by probability")
    label = f"{100 * curve.level:g} % interval, at each point"
    axes.fill_between(x, curve.low, curve.high, color=colour, alpha=0.2, lw=0, label=label)
    thin: dict[str, Any] = {"color": look.colours.muted, "lw": 1.3 * look.thin}
    axes.plot(x, curve.treat_all, ls="--", label="act always", **thin)
    axes.axhline(0, ls=":", label="act never", **thin)
    axes.set(xlim=(0, 100), xlabel="threshold (%)", ylabel="net benefit")
    highest = float(max(curve.high.max(), 0.01))
    axes.set_ylim(-0.25 * highest, 1.1 * highest)  # acting always falls without end
    legend(axes, "upper right")
    return axes


@_in_look
def threshold_plot(curve: RiskCoverage, *, limit: Threshold | None = None) -> Figure:
    """Share of the answers at or above each confidence, and the error among them.

    Parameters
    ----------
    curve : RiskCoverage
        From :func:`calibrant.metrics.risk_coverage`.
    limit : Threshold, optional
        From :func:`calibrant.threshold`; both panels mark what it does with these examples.
    """
    upper, lower = _panels(2, height=0.42, columns=1)
    look, some = _current(), _thinned(len(curve.threshold))
    x, (colour, other) = _odds(curve.threshold[some]), (look.colours.right, look.colours.wrong)
    line: dict[str, Any] = {"lw": look.thick, "marker": _marker(x)}
    upper.plot(x, 100 * curve.coverage[some], color=colour, **line)
    upper.set(ylabel="answered (%)", ylim=(0, 103))
    lower.plot(x, 100 * curve.risk[some], color=other, label="wrong among these", **line)
    _band(lower, x, curve, other)
    lower.set(ylabel="wrong (%)", xlabel="least confidence of an answer")
    lower.set_ylim(0, 160 * _level_of_errors(curve))
    for ax in (upper, lower):
        _odds_axis(ax, x)
    upper.tick_params(labelbottom=False)
    title = "" if limit is None else _mark(upper, lower, curve, limit)
    legend(lower, "upper right")
    if title:
        upper.set_title(title)
    return _figure_of(upper)


def _mark(upper: Axes, lower: Axes, curve: RiskCoverage, limit: Threshold) -> str:
    """Mark what a threshold does with the examples of the curve, and return it in words."""
    look = _current()
    most = f"{100 * limit.max_error:g} %"
    line: dict[str, Any] = {"color": look.colours.muted, "lw": 1.3 * look.thin}
    lower.axhline(100 * limit.max_error, ls=":", label=f"allowed: {most}", **line)
    if math.isinf(limit.threshold):
        return f"no threshold keeps the error at {most}"
    at = float(_odds(np.array([limit.threshold]))[0])
    point: dict[str, Any] = {"color": look.colours.ink, "ms": 2 * look.thick, "clip_on": False}
    accepted = int((curve.threshold >= limit.threshold).sum())
    values = (float(x[accepted - 1]) if accepted else 0.0 for x in (curve.coverage, curve.risk))
    answered, wrong = values
    said = f"answer {100 * answered:.1f} %", f"error {100 * wrong:.2f} %"
    for ax, value, words in zip((upper, lower), (answered, wrong), said, strict=True):
        ax.axvline(at, ls="--", **line)
        ax.plot([at], [100 * value], "o", **point)
        offset = (0.6 * look.size.text, 0.5 * look.size.text)
        ax.annotate(
            words, (at, 100 * value), offset, textcoords="offset points", weight="bold", va="bottom"
        )
    return f"threshold {100 * float(threshold_text(limit.threshold)):.10g} %"


@_in_look
def set_size_plot(sizes: SetSizes, ax: Axes | None = None) -> Axes:
    """Share of prediction sets by size, and with labels of those that miss the true class.

    ``sizes`` are from :meth:`calibrant.decide.ConformalSets.sizes`.
    """
    axes, look = _new_axes(ax), _current()
    number, share, covered = _few_sizes(sizes)
    known = bool(np.isfinite(covered).all())
    bars: dict[str, Any] = {"width": 0.8, "lw": 0}
    right = 100 * (covered if known else share)
    name = "true class in the set" if known else "sets"
    axes.bar(number, right, color=look.colours.right, alpha=0.7, label=name, **bars)
    mean = float(np.asarray(sizes.size) @ sizes.share)
    title = f"{mean:.3g} classes per set"
    if known:
        missed = 100 * (share - covered)
        colour = look.colours.wrong
        axes.bar(number, missed, bottom=right, color=colour, label="true class missed", **bars)
        within = 100 * float(sizes.covered.sum())
        title += f"\ncovered {within:.1f} %, guaranteed {100 * sizes.promised:g} %"
    axes.set(xlabel="classes in the set", ylabel="share of the examples (%)")
    axes.set_xticks(number, [*map(str, number)])
    if len(number) == FEW + 1:
        axes.set_xticks(number[::4], [f"{n}" if n < FEW else f"{FEW}+" for n in number[::4]])
    legend(axes, title=title)
    return axes


def _few_sizes(sizes: SetSizes) -> tuple[Any, FloatArray, FloatArray]:
    """Return sizes from the smallest to ``FEW``, the last of which holds all larger ones."""
    number = np.minimum(np.asarray(sizes.size), FEW)
    every = np.arange(number.min(), number.max() + 1)
    share, covered = (
        np.bincount(number - every[0], values, len(every))
        for values in (sizes.share, sizes.covered)
    )
    return every, share.astype(np.float64), covered.astype(np.float64)


def _level_of_errors(curve: RiskCoverage) -> float:
    """Return the largest error of curves, but for that of the few most confident answers."""
    many = curve.coverage >= min(0.05, float(curve.coverage[-1]))
    largest = float(curve.risk[many].max())
    return largest if math.isnan(curve.level) else max(largest, float(curve.high[-1]) / 1.2)


def _marker(points: Any) -> str:
    """Return the marker of a curve: one point is no line."""
    return "o" if len(points) == 1 else ""


def _thinned(count: int) -> Any:
    """Return which points to draw of a curve: all, or some that are evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).astype(np.int64))


def _odds(confidence: FloatArray) -> FloatArray:
    """Return the log-odds of confidences, by which those close to 1 are told apart."""
    return np.asarray(logit(np.clip(confidence, 1e-3, 1 - 1e-6)))


def _odds_axis(axes: Axes, x: FloatArray) -> None:
    low, high = float(x.min()), float(x.max())
    room = 0.03 * max(high - low, 1.0)
    axes.set_xlim(low - room, high + room)
    size = _current().size
    em = (high - low + 2 * room) * size.text / 72 / (size.panel - 6 * size.text / 72)
    ticks: dict[float, str] = {}
    free = low - room  # from here on no label is drawn yet
    for share in TICKS:
        place, name = float(logit(share)), f"{100 * share:.6g} %"
        half = 0.32 * em * len(name)
        if free <= place - half and place <= high + room:
            ticks[place], free = name, place + half
    middle = (low + high) / 2
    ticks = ticks or {middle: f"{100 * float(expit(middle)):.4g} %"}
    axes.set_xticks(list(ticks), list(ticks.values()))
