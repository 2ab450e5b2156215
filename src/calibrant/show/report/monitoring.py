"""The state of a monitor in the forms of a report: a page, Markdown and JSON."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from calibrant._core.json_form import json_text
from calibrant.monitor import MonitorReport
from calibrant.show.html import document, rendered
from calibrant.show.monitor import charts, windows_table
from calibrant.show.report.files import write_form
from calibrant.show.report.page import MARKS, fenced
from calibrant.show.report.snippets import Snippet

MOST = 1e6
"""Evidence beyond which its size says nothing more."""
LINKS = {"verdict": "Verdict", "time": "Over time", "windows": "Windows", "now": "What now"}
REFIT = Snippet(
    "Fit a calibrator on recent labelled examples, and begin anew",
    "bash",
    "calibrant fit recent.npz -o calibrator\n"
    "calibrant monitor today.npz --calibrator calibrator --state watch.json --fail",
)
GO_ON = Snippet(
    "Go on with the next window",
    "bash",
    "calibrant monitor tomorrow.npz --calibrator calibrator --state watch.json --fail",
)


def save_monitor_report(report: MonitorReport, path: str | os.PathLike[str]) -> None:
    """Write the state of a monitor as ``.html``, ``.md`` or ``.json``, by the suffix.

    Parameters
    ----------
    report : MonitorReport
        What :meth:`calibrant.Monitor.report` returns.
    path : path
        File to write, which is replaced as a whole.
    """
    forms = {".html": monitor_page, ".md": monitor_markdown, ".json": _json}
    write_form(path, {suffix: partial(form, report) for suffix, form in forms.items()})


def _json(report: MonitorReport) -> str:
    return json_text(report.to_dict())


def monitor_page(report: MonitorReport) -> str:
    """Return the state of a monitor as a page: one file that fetches nothing."""
    counted = f"{report.n:,} labelled examples in {len(report.windows):,} windows"
    about = ("Calibration over time", counted, LINKS.items())
    return document("monitor.html", *about, **_content(report))


def monitor_markdown(report: MonitorReport) -> str:
    """Return the state of a monitor for pull requests and the summaries of jobs."""
    return rendered("monitor.md", marks=MARKS, fenced=fenced, **_content(report))


def _content(report: MonitorReport) -> dict[str, Any]:
    """Return what both forms show."""
    report, calm = report.with_short_names(), report.alarm is None
    e_value = report.e_value
    return {
        "report": report,
        "question": "Has the model drifted?",
        "answer": "Not so far" if calm else "Yes",
        "severity": "good" if calm else "bad",
        "evidence": f"{e_value:.3g}" if e_value <= MOST else f"over {MOST:,.0f}",
        "charts": charts(report),
        "table": windows_table(report),
        "advised": GO_ON if calm else REFIT,
    }
