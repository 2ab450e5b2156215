"""Estimated performance of batches, beside what was measured where labels came."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from calibrant.show.figures.look import current, in_look, legend, new_axes, text_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from calibrant.estimate.result import PerformanceEstimate
    from calibrant.metrics.reliability import Estimate

KINDS = {
    "estimated": ("holds", "widened"),
    "from labels": ("labels", "contradicted"),
    "no interval": ("unchecked", "withdrawn"),
}
"""Words of the legend, and the states of the promise that they stand for."""


@in_look
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
    axes, look = new_axes(ax, height=0.5), current()
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
            interval_points(axes, shown, f"{label}{interval}", paint, marker)
    if measured:
        at = {i: 100 * measured[name] for i, name in enumerate(batches) if name in measured}
        style: dict[str, Any] = {"ls": "", "marker": "_", "ms": 5 * look.thick, "mew": look.thick}
        axes.plot(list(at), list(at.values()), color=look.colours.ink, label="measured", **style)
    names = [text_of(name, 16) for name in batches]
    turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(names) > 4 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel(f"{metric} (%)")
    legend(axes)
    return axes


def interval_points(
    axes: Axes, points: Mapping[int, Estimate], label: str, paint: str, marker: str = "o"
) -> None:
    """Draw shares in per cent by their place, with their intervals where they have some."""
    look = current()
    for i, share in points.items():
        if not math.isnan(share.low):
            ends = [100 * share.low, 100 * share.high]
            axes.plot([i, i], ends, color=paint, lw=1.6 * look.thick, alpha=0.5)
    style: dict[str, Any] = {"ls": "", "marker": marker, "ms": 2.2 * look.thick}
    values = [100 * share.value for share in points.values()]
    axes.plot(list(points), values, color=paint, label=label, **style)
