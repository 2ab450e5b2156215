"""The state of a monitor as a box and as figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from calibrant.monitor.report import MonitorReport
from calibrant.show.box import Beside, Box, Verdict
from calibrant.show.charts import EstimatedWindow, drift_chart, estimate_chart
from calibrant.show.figures.drift import drift_plot, window_plot
from calibrant.show.html import Html
from calibrant.show.numbers import percent
from calibrant.show.results import box_of, drawing_of
from calibrant.show.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_WINDOWS = 20
"""Windows of a table."""


@box_of.register(MonitorReport)
def monitor_box(report: MonitorReport) -> Box:
    """Return the advice, the windows and their charts."""
    shown = Beside(list(charts(report.with_short_names()).values()))
    said = Verdict(report.advice(), "good" if report.alarm is None else "bad")
    return Box(
        "Monitor report",
        [report.describe()],
        [said],
        [shown, windows_table(report)],
        report.remarks(),
    )


def windows_table(report: MonitorReport) -> Table:
    """Return a row for each of the last windows."""
    headings = ["window", "examples", "accuracy", "confidence", "gap", "ECE", "e-value"]
    formats = {"accuracy": ".2f", "confidence": ".2f", "gap": "+.2f", "ece": ".2f"}
    rows = []
    for row in report.windows[-MAX_WINDOWS:]:
        shares = [
            f"{100 * row[key]:{form}} %" if row["n"] else "-" for key, form in formats.items()
        ]
        more = [_estimated(row)] if report.estimated else []
        rows.append([row["window"], f"{row['n']:,}", *shares, f"{row['e_value']:.3g}", *more])
    headings += ["estimated"] if report.estimated else []
    return Table(headings, rows, bars=headings.index("gap"))


def _estimated(row: dict[str, Any]) -> str:
    """Return the accuracy of a window that was estimated without labels."""
    if math.isnan(row["estimate"]):
        return "-"
    if math.isnan(row["estimate_low"]):
        return f"{row['promise']}"
    ends = f"{100 * row['estimate_low']:.1f} to {100 * row['estimate_high']:.1f}"
    return f"{100 * row['estimate']:.1f} ({ends}) %"


def charts(report: MonitorReport) -> dict[str, Html]:
    """Return what windows show, by title: evidence, gaps and estimates if there are any."""
    names = [row["window"] for row in report.windows]
    alarm = None if report.alarm is None else report.alarm.window
    evidence, gaps = ([row[key] for row in report.windows] for key in ("e_value", "gap"))
    shown = {
        "Evidence of a drift": drift_chart(
            names, evidence, label="e-value", limit=report.limit, alarm=alarm, log=True
        ),
        "Gap": drift_chart(
            names, gaps, label="confidence minus accuracy", alarm=alarm, form=percent
        ),
    }
    if report.estimated:
        keys = ("window", "estimate", "estimate_low", "estimate_high", "accuracy")
        windows = [EstimatedWindow(*(row[key] for key in keys)) for row in report.windows]
        shown["Estimates without labels"] = estimate_chart(windows, label="accuracy")
    return {name: chart for name, chart in shown.items()}


@drawing_of.register(MonitorReport)
def _monitor_plot(report: MonitorReport, ax: Axes | None = None) -> Axes | Figure:
    short = report.with_short_names()
    return drift_plot(short) if ax is None else window_plot(short, ax)
