"""Figures by time window: a monitor, and estimates beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrant.metrics.reliability import Estimate
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

    from calibrant.estimate.performance_estimate import PerformanceEstimate
    from calibrant.metrics.reliability import Estimate
    from calibrant.monitor.monitor_report import MonitorReport


KINDS = {
    "estimated": ("holds", "widened"),
    "from labels": ("labels", "contradicted"),
    "no interval": ("unchecked", "withdrawn"),
}
"""Words of the legend, and the states of the guarantee that they stand for."""


@_in_look
def estimate_plot(
    batches: Mapping[str, PerformanceEstimate],
    ax: Axes | None = None,
    *,
    measured: Mapping[str, float] | None = None,
    metric: str = "accuracy",
) -> Axes:
    """Estimates with their intervals, batch by batch; crosses where there is no interval.

    Parameters
    ----------
    batches : mapping of str to PerformanceEstimate
        By name, in the order of time.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    measured : mapping of str to float, optional
        Values of batches whose labels are known.
    metric : str
        Name of a share, drawn in per cent.

    Examples
    --------
    >>> from calibrant.estimate import estimate_performance
    >>> import numpy as np
    >>> monday = estimate_performance(probs=np.linspace(0, 1, 100))
    >>> estimate_plot({"monday": monday}, measured={"monday": 0.8}).get_ylabel()
    'accuracy (%)'
    """
    if not batches:
        raise ValueError("there is nothing to draw: no batch was estimated")
    axes, look = _new_axes(ax, height=0.5), _current()
    paints = (look.colours.right, look.colours.good, look.colours.bad)
    for (label, states), paint in zip(KINDS.items(), paints, strict=True):
        shown = {
            i: batch.metrics[metric]
            for i, batch in enumerate(batches.values())
            if batch.status in states
        }
        if label == "no interval":
            interval, marker = "", "x"
        else:
            interval, marker = f", {100 * next(iter(batches.values())).level:g} %", "o"
        if shown:
            _interval_points(axes, shown, f"{label}{interval}", paint, marker)
    if measured:
        at = {i: 100 * measured[name] for i, name in enumerate(batches) if name in measured}
        style: dict[str, Any] = {"ls": "", "marker": "_", "ms": 5 * look.thick, "mew": look.thick}
        axes.plot(list(at), list(at.values()), color=look.colours.ink, label="measured", **style)
    names = [_text_of(name, 16) for name in batches]
    turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(names) > 4 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel(f"{metric} (%)")
    legend(axes)
    return axes


def _interval_points(
    axes: Axes, points: Mapping[int, Estimate], label: str, paint: str, marker: str = "o"
) -> None:
    """Draw shares in per cent by their place, with their intervals where they have some."""
    look = _current()
    for i, share in points.items():
        if not math.isnan(share.low):
            ends = [100 * share.low, 100 * share.high]
            axes.plot([i, i], ends, color=paint, lw=1.6 * look.thick, alpha=0.5)
    style: dict[str, Any] = {"ls": "", "marker": marker, "ms": 2.2 * look.thick}
    values = [100 * share.value for share in points.values()]
    axes.plot(list(points), values, color=paint, label=label, **style)


TICKS = 8
"""Windows that are named."""
LEVEL = 0.9
"""Coverage of the intervals."""


@_in_look
def drift_plot(report: MonitorReport) -> Figure:
    """Accuracy and mean confidence of each window, and below them the e-value with its limit.

    ``report`` is that of :meth:`calibrant.Monitor.report`. The e-value measures the evidence
    against calibration: an alarm is raised where it reaches its limit.
    """
    _check(report)
    upper, lower = _panels(2, height=0.36, columns=1)
    _shares(upper, report)
    upper.set_xlabel("")
    upper.tick_params(labelbottom=False)
    look, x = _current(), np.arange(len(report.windows))
    evidence = np.maximum([float(row["e_value"]) for row in report.windows], 1e-3)
    line: dict[str, Any] = {"marker": "o", "ms": 1.6 * look.thick, "lw": look.thick}
    lower.plot(x, evidence, color=look.colours.right, label="e-value", **line)
    alarm = f"alarm at {report.limit:g}"
    lower.axhline(report.limit, color=look.colours.bad, lw=1.3 * look.thin, ls="--", label=alarm)
    lower.set(yscale="log", ylabel="e-value")
    lower.set_ylim(min(evidence.min(), 1) / 2, max(evidence.max(), report.limit) * 4)
    lower.yaxis.set_minor_locator(_no_ticks())
    _windows(lower, report)
    _alarm(lower, report)
    legend(lower)
    return _figure_of(upper)


@_in_look
def window_plot(report: MonitorReport, ax: Axes | None = None) -> Axes:
    """Accuracy with its 90 % interval, and mean confidence, of each window of a monitor."""
    _check(report)
    axes = _new_axes(ax, height=0.5)
    _shares(axes, report)
    return axes


def _check(report: MonitorReport) -> None:
    if not report.windows:
        raise ValueError("the monitor has seen no labelled examples: there is nothing to draw")


def _shares(axes: Axes, report: MonitorReport) -> None:
    look, x = _current(), np.arange(len(report.windows))
    right, claimed = (
        np.array([float(row[key]) for row in report.windows], dtype=np.float64)
        for key in ("accuracy", "confidence")
    )
    line: dict[str, Any] = {"ms": 1.6 * look.thick, "lw": look.thick}
    axes.plot(x, 100 * right, "o-", color=look.colours.right, label="accuracy", **line)
    low, high = report.accuracy_intervals(LEVEL)
    area: dict[str, Any] = {"color": look.colours.right, "alpha": 0.2, "lw": 0}
    axes.fill_between(x, 100 * low, 100 * high, label=f"{100 * LEVEL:g} % interval", **area)
    axes.plot(x, 100 * claimed, "s--", color=look.colours.wrong, label="mean confidence", **line)
    _estimates(axes, report)
    axes.set_ylabel("share (%)")
    _windows(axes, report)
    _alarm(axes, report)
    legend(axes)


def _estimates(axes: Axes, report: MonitorReport) -> None:
    """Draw accuracies that were estimated without labels; crosses where nothing is guaranteed."""
    shares = {
        i: Estimate(row["estimate"], row["estimate_low"], row["estimate_high"])
        for i, row in enumerate(report.windows)
        if "estimate" in row
    }
    promised = {i: share for i, share in shares.items() if not math.isnan(share.low)}
    withdrawn = {i: share for i, share in shares.items() if math.isnan(share.low)}
    colours = _current().colours
    if promised:
        _interval_points(axes, promised, "estimated", colours.good)
    if not all(math.isnan(share.value) for share in withdrawn.values()):
        _interval_points(axes, withdrawn, "estimate withdrawn", colours.bad, "x")


def _windows(axes: Axes, report: MonitorReport) -> None:
    """Name some of the windows below the axis."""
    step = math.ceil(len(report.windows) / TICKS)
    shown = range(0, len(report.windows), step)
    names = [_text_of(report.windows[i]["window"], 12) for i in shown]
    turned = any(len(name) > 5 for name in names)
    layout: dict[str, Any] = {"rotation": 30, "ha": "right"} if turned else {}
    axes.set_xticks(list(shown), names, **layout)
    axes.set_xlim(-0.4, max(len(report.windows) - 0.6, 0.4))
    axes.set_xlabel("window")


def _alarm(axes: Axes, report: MonitorReport) -> None:
    """Mark the window of the first alarm."""
    if report.alarm is None:
        return
    look = _current()
    names = [row["window"] for row in report.windows]
    if report.alarm.window in names:
        at = names.index(report.alarm.window)
        axes.axvline(at, color=look.colours.bad, lw=1.3 * look.thin, ls=":")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
