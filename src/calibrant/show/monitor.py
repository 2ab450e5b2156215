"""The state of a monitor as a box, figures, a page, Markdown and JSON."""

from __future__ import annotations

import math
import os
import re
import shlex
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from calibrant._core.showing import json_text
from calibrant.monitor.monitor_report import MonitorReport
from calibrant.show.box import Beside, Box, Callout, _drawing_of, box_of
from calibrant.show.charts import EstimatedWindow, drift_chart, estimate_chart
from calibrant.show.figures.windows import drift_plot, window_plot
from calibrant.show.html import Html, _rendered
from calibrant.show.pages import SEVERITY_MARKS, Snippet, _fenced, _write_form, document
from calibrant.show.style import _short_percent
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
    said = Callout(report.advice(), "good" if report.alarm is None else "bad")
    return Box(
        "Monitor report",
        [report.describe()],
        [said],
        [shown, _windows_table(report)],
        report.remarks(),
    )


def _windows_table(report: MonitorReport) -> Table:
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
            names, gaps, label="confidence minus accuracy", alarm=alarm, form=_short_percent
        ),
    }
    if report.estimated:
        keys = ("window", "estimate", "estimate_low", "estimate_high", "accuracy")
        windows = [EstimatedWindow(*(row[key] for key in keys)) for row in report.windows]
        shown["Estimates without labels"] = estimate_chart(windows, label="accuracy")
    return {name: chart for name, chart in shown.items()}


@_drawing_of.register(MonitorReport)
def _monitor_plot(report: MonitorReport, ax: Axes | None = None) -> Axes | Figure:
    short = report.with_short_names()
    return drift_plot(short) if ax is None else window_plot(short, ax)


MOST = 1e6
"""Evidence beyond which its size says nothing more."""
LINKS = {"verdict": "Callout", "time": "Over time", "windows": "Windows", "now": "What now"}


def _advised(report: MonitorReport, state: str) -> Snippet:
    """Return the commands for the next window, or for a refit and a stream of its own."""
    last = str(report.windows[-1]["window"]) if report.windows else ""
    table = re.search(r"\.(csv|parquet)\b", last)
    suffix = table[0] if table else ".npz"
    columns = "".join(f" {shlex.quote(word)}" for word in report.columns)
    options = columns + (f" --ids {shlex.quote(report.ids)}" if report.ids is not None else "")
    if report.alarm is None:
        applied = " --calibrator calibrator" * report.calibrated
        watch = f"tomorrow{suffix}{options}{applied} --state {shlex.quote(state)}"
        return Snippet("Go on with the next window", "bash", f"calibrant monitor {watch} --fail")
    place = PurePath(state)
    begun = shlex.quote(str(place.with_name(f"new_{place.name}")))  # a state has one calibrator
    commands = (
        f"calibrant fit recent{suffix}{columns} -o new_calibrator",
        f"calibrant monitor today{suffix}{options} --calibrator new_calibrator --state {begun} "
        "--fail",
    )
    title = "Fit a calibrator on recent labelled examples, and begin a new state"
    title = f"If the data are right: {title[0].lower()}{title[1:]}" if report.doubt else title
    return Snippet(title, "bash", "\n".join(commands))


def save_monitor_report(
    report: MonitorReport, path: str | os.PathLike[str], *, state: str = "watch.json"
) -> None:
    """Write the state of a monitor as ``.html``, ``.md`` or ``.json``, by the suffix.

    Parameters
    ----------
    report : MonitorReport
        What :meth:`calibrant.Monitor.report` returns.
    path : path
        File to write, which is replaced as a whole.
    state : str
        File of the stream, for the commands that are shown.
    """
    forms = {
        ".html": partial(_monitor_page, report, state),
        ".md": partial(_monitor_markdown, report, state),
        ".json": partial(_json, report),
    }
    _write_form(path, forms)


def _json(report: MonitorReport) -> str:
    return json_text(report.to_dict())


def _monitor_page(report: MonitorReport, state: str = "watch.json") -> str:
    """Return the state of a monitor as a page: one file that fetches nothing."""
    counted = f"{report.n:,} labelled examples in {len(report.windows):,} windows"
    about = ("Calibration over time", counted, LINKS.items())
    return document("monitor.html", *about, **_content(report, state))


def _monitor_markdown(report: MonitorReport, state: str = "watch.json") -> str:
    """Return the state of a monitor for pull requests and the summaries of jobs."""
    return _rendered("monitor.md", marks=SEVERITY_MARKS, fenced=_fenced, **_content(report, state))


def _content(report: MonitorReport, state: str) -> dict[str, Any]:
    """Return what both forms show."""
    report, calm = report.with_short_names(), report.alarm is None
    e_value = report.e_value
    return {
        "report": report,
        "question": "Has the model drifted?",
        "answer": "Not so far" if calm else "Check the data first" if report.doubt else "Yes",
        "severity": "good" if calm else "bad",
        "evidence": f"{e_value:.3g}" if e_value <= MOST else f"over {MOST:,.0f}",
        "charts": charts(report),
        "table": _windows_table(report),
        "advised": _advised(report, state),
    }
