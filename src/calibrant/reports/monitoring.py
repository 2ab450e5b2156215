"""The state of a monitor in the forms of a report: a page, Markdown and JSON."""

from __future__ import annotations

import os
from functools import partial

from calibrant._core.json_form import json_text
from calibrant.display.html import Html, joined, tag
from calibrant.monitor import MonitorReport
from calibrant.reports.content import Snippet, Table
from calibrant.reports.files import write_form
from calibrant.reports.markdown import MARKS, escaped, fenced, table
from calibrant.reports.model import Severity
from calibrant.reports.shell import chart, document, scrollable, section, snippet, unbroken

QUESTION = "Has the model drifted?"
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
    report = report.with_short_names()
    return document(
        "Calibration over time",
        f"{report.n:,} labelled examples in {len(report.windows):,} windows",
        list(LINKS.items()),
        _hero(report),
        _over_time(report),
        _windows(report),
        section("now", tag("h2", "What to do now"), snippet(_advised(report))),
    )


def _severity(report: MonitorReport) -> Severity:
    return "good" if report.alarm is None else "bad"


def _answer(report: MonitorReport) -> str:
    return "Not so far" if report.alarm is None else "Yes"


def _advised(report: MonitorReport) -> Snippet:
    return GO_ON if report.alarm is None else REFIT


def _evidence(e_value: float) -> str:
    return f"{e_value:.3g}" if e_value <= MOST else f"over {MOST:,.0f}"


def _hero(report: MonitorReport) -> Html:
    words = tag(
        "div",
        tag("h2", QUESTION, class_="question"),
        tag("p", _answer(report), class_="answer"),
        tag("p", unbroken(report.advice()), class_="lead"),
    )
    figure = tag(
        "div",
        tag("p", _evidence(report.e_value), class_="number"),
        tag("p", f"e-value; an alarm is raised at {report.limit:g}", class_="muted small"),
        tag("p", unbroken(report.describe() + "."), class_="small"),
        class_="figure",
    )
    return tag("section", words, figure, class_=f"hero {_severity(report)}", id="verdict")


def _over_time(report: MonitorReport) -> Html:
    charts = [chart(svg, caption) for caption, svg in report.charts().items()]
    shown = tag("div", *charts, class_="columns") if report.windows else ""
    return section("time", tag("h2", "Over time"), shown)


def _windows(report: MonitorReport) -> Html:
    headings, *rows = report.table()
    caption = f"The last {len(rows)} of {len(report.windows):,} windows"
    remarks = [tag("li", unbroken(text)) for text in report.remarks()]
    shown = scrollable(Table(headings, rows), caption, kind="sortable tall")
    listed = tag("ul", *remarks) if remarks else ""
    return section("windows", tag("h2", "Windows"), shown, joined([listed]))


def monitor_markdown(report: MonitorReport) -> str:
    """Return the state of a monitor for pull requests and the summaries of jobs."""
    report = report.with_short_names()
    headings, *rows = report.table()
    advised = _advised(report)
    lines = [
        "# Calibration over time",
        "",
        f"{MARKS[_severity(report)]} **{QUESTION} {_answer(report)}.** {escaped(report.advice())}",
        "",
        escaped(report.describe() + "."),
        "",
        *table(Table(headings, rows)),
        *(f"- {escaped(text)}" for text in report.remarks()),
        "",
        f"{advised.title}:",
        "",
        *fenced(advised.language, advised.code),
    ]
    return "\n".join(lines)
