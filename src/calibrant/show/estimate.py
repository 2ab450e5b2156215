"""Estimated performance as boxes and figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from calibrant.estimate.performance_estimate import TITLES, PerformanceEstimate, Status
from calibrant.show.box import Box, Callout, Kind, _drawing_of, box_of
from calibrant.show.figures.comparison import forest_plot
from calibrant.show.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBERS = ("brier", "nll", "auroc", "f1")
"""Metrics that are shown as numbers, not in percent; counts are whole numbers."""
COUNTS = tuple(name for name in TITLES if name.endswith("tives"))
KINDS: dict[Status, Kind] = {
    "holds": "good",
    "labels": "good",
    "unchecked": "warn",
    "widened": "warn",
    "withdrawn": "bad",
    "contradicted": "bad",
}


@box_of.register(PerformanceEstimate)
def estimate_box(estimate: PerformanceEstimate) -> Box:
    """Return the metrics, and the guarantee behind them."""
    said = Callout(estimate.verdict(), KINDS[estimate.status])
    remarks = [*estimate.remarks(), estimate.assumption()]
    parts = [_estimates_table(estimate)]
    return Box("Estimated performance", [estimate.describe()], [said], parts, remarks)


def _estimates_table(estimate: PerformanceEstimate) -> Table:
    """Return a row for each metric; without an interval where nothing supports one."""
    if estimate.status == "unchecked":
        values = [(TITLES[name], _shown(name, e.value)) for name, e in estimate.items()]
        return Table(("metric", "if confidences are right"), values)
    rows = []
    for name, each in estimate.items():
        value, low, high = (_shown(name, x) for x in each)
        rows.append((TITLES[name], value, "-" if math.isnan(each.low) else f"{low} to {high}"))
    return Table(("metric", "estimate", f"{100 * estimate.level:g} % interval"), rows)


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if name in COUNTS:
        return f"{value:,.0f}"
    return f"{value:.4f}" if name in NUMBERS else f"{100 * value:.2f} %"


@_drawing_of.register(PerformanceEstimate)
def _shares_plot(estimate: PerformanceEstimate, ax: Axes | None = None) -> Axes:
    shares = [name for name in estimate if name not in (*COUNTS, "brier", "nll")]
    rows = {TITLES[name]: estimate[name] for name in shares}
    return forest_plot(rows, ax, title="estimate", reference=None, level=estimate.level)
