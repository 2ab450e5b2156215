"""Estimated performance of batches, beside what was measured where labels came."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from calibrant.plots.data import EstimatedBatch
from calibrant.plots.look import current, in_look, legend, new_axes, text_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {
    "estimated": ("holds", "unchecked", "widened"),
    "from labels": ("labels",),
    "withdrawn": ("withdrawn",),
}
"""Words of the legend, and the states of the promise that they stand for."""


@in_look
def estimate_plot(
    batches: Mapping[str, EstimatedBatch],
    ax: Axes | None = None,
    *,
    measured: Mapping[str, float] | None = None,
    metric: str = "accuracy",
) -> Axes:
    """Estimates with their intervals, batch by batch; crosses where the promise is withdrawn.

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
        shown = [i for i, batch in enumerate(batches.values()) if batch.status in states]
        _points(axes, batches, shown, metric, label, paint)
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


def _points(
    axes: Axes,
    batches: Mapping[str, EstimatedBatch],
    shown: list[int],
    metric: str,
    label: str,
    paint: str,
) -> None:
    if not shown:
        return
    look, values = current(), [batch.metrics[metric] for batch in batches.values()]
    interval = "" if label == "withdrawn" else f", {100 * next(iter(batches.values())).level:g} %"
    for i in shown:
        low, high = 100 * values[i].low, 100 * values[i].high
        if not math.isnan(low):
            axes.plot([i, i], [low, high], color=paint, lw=1.6 * look.thick, alpha=0.5)
    marker = "x" if label == "withdrawn" else "o"
    style: dict[str, Any] = {"ls": "", "marker": marker, "ms": 2.2 * look.thick}
    points = [100 * values[i].value for i in shown]
    axes.plot(shown, points, color=paint, label=f"{label}{interval}", **style)
