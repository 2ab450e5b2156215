"""A report as a page of HTML, as Markdown and in a notebook: templates filled with its content."""

from __future__ import annotations

import re
from collections.abc import Sequence

from calibrant._core.messages import printable
from calibrant.show.charts import Line, line_chart
from calibrant.show.html import Html, document, notebook, rendered
from calibrant.show.report.model import Severity, Subject
from calibrant.show.report.results import Results
from calibrant.show.report.tables import overview_table
from calibrant.show.report.view import SubjectView, counted, ece_chart
from calibrant.show.tables import Table

LINKS = {
    "verdict": "Verdict",
    "findings": "Findings",
    "how-far": "How far off",
    "where": "Where",
    "fix": "What fixes it",
    "decide": "Thresholds",
    "now": "What now",
    "not-checked": "Not checked",
    "provenance": "Provenance",
}
MAX_LINKS = 12
PAINTS = ("right", "wrong", "good", "muted", "warn", "bad")
"""Colours of sets of predictions; of more, no curves are drawn over each other."""
MARKS: dict[Severity, str] = {"bad": "🔴", "warn": "🟠", "info": "🔵", "good": "🟢"}


def page_of(report: Results) -> str:
    """Return one file that fetches nothing, and is useful without its script."""
    subjects = report.subjects
    values = {"report": report, "provenance": _provenance(report), "files": _files(report)}
    if len(subjects) == 1:
        view = SubjectView(report, subjects[0])
        return document(
            "report.html", report.title, view.about, LINKS.items(), pages=[view], **values
        )
    views = [SubjectView(report, s, f"set-{i}") for i, s in enumerate(subjects, 1)]
    links = [("overview", "Overview"), *((v.name, v.subject.name) for v in views[:MAX_LINKS])]
    links.append(("provenance", "Provenance"))
    about = f"{len(subjects)} sets of predictions side by side"
    values |= {"pages": views, "overview": _overview(report)}
    return document("report.html", report.title, about, links, **values)


def _overview(report: Results) -> dict[str, object]:
    """Return how several sets of predictions compare."""
    verdicts, subjects = report.verdicts.values(), report.subjects
    ordered = sorted(subjects, key=lambda subject: subject.evaluation["ece"].value)
    best, worst = (
        f"{s.name} ({100 * s.evaluation['ece'].value:.2f} %)" for s in (ordered[0], ordered[-1])
    )
    return {
        "answer": f"{sum(v.severity == 'good' for v in verdicts)} of {len(subjects)}",
        "sentence": f"The calibration error (ECE) is lowest for {best} and highest for {worst}.",
        "forest": ece_chart({s.name: s.evaluation for s in subjects}),
        "table": overview_table(subjects, [each.answer for each in verdicts]),
        "curves": _curves(subjects) if len(subjects) <= len(PAINTS) else None,
    }


def _curves(subjects: Sequence[Subject]) -> Html:
    lines = [Line("ideal", [0, 1], [0, 1], colour="ink", dashed=True)]
    for subject, paint in zip(subjects, PAINTS, strict=False):
        curve = subject.evaluation.reliability()
        lines.append(Line(subject.name, curve.confidence, curve.accuracy, colour=paint))
    claim = subjects[0].evaluation.probability or "confidence"
    return line_chart(lines, x_label=claim, y_label="share right", y_range=(0, 1))


def _provenance(report: Results) -> list[tuple[str, str]]:
    made = report.provenance
    versions = f"{made.calibrant} (Python {made.python}, NumPy {made.numpy}, torch {made.torch})"
    facts = {"made": made.created, "calibrant": versions}
    facts |= {"command": made.command} if made.command else {}
    named = {name: value for name, value in made.options.items() if value is not None}
    return [*facts.items(), *((name.replace("_", " "), str(v)) for name, v in named.items())]


def _files(report: Results) -> Table:
    files = dict.fromkeys(file for subject in report.subjects for file in subject.files)
    rows = [(file.path, f"{file.bytes:,}", file.sha256 or "not hashed") for file in files]
    return Table(("file", "bytes", "sha256"), rows, words=(0, 2))


def markdown_of(report: Results) -> str:
    """Return the report for pull requests and the summaries of continuous integration."""
    answers = [f"{MARKS[v.severity]} {v.answer}" for v in report.verdicts.values()]
    return rendered(
        "report.md",
        report=report,
        pages=[SubjectView(report, subject) for subject in report.subjects],
        overview=overview_table(report.subjects, answers),
        files=_files(report),
        marks=MARKS,
        fenced=fenced,
    )


def fenced(language: str, code: str) -> str:
    """Return code in a fence that is longer than any in it."""
    longest = max(map(len, re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(code)}\n{fence}"


def notebook_of(report: Results) -> str:
    """Return the verdict and the findings for a notebook."""
    figure = f"ECE {report.verdict.figure} {report.verdict.interval}".strip()
    values = {"report": report, "figure": figure, "counted": counted(report.findings)}
    return notebook(rendered("report_box.html", **values))
