"""A report as a page of HTML: one file that fetches nothing, and is useful without its script."""

from __future__ import annotations

from collections.abc import Sequence

from calibrant.display.html import Html, joined, notebook, tag
from calibrant.display.results import heading, remarks, verdict
from calibrant.display.svg import Line, forest_chart, line_chart
from calibrant.reports import content
from calibrant.reports.content import Table
from calibrant.reports.model import Subject
from calibrant.reports.results import Results
from calibrant.reports.sections import Sections, counted
from calibrant.reports.shell import chart, document, scrollable, section, unbroken

LINKS = {
    "verdict": "Verdict",
    "findings": "Findings",
    "how-far": "How far off",
    "where": "Where",
    "fix": "What fixes it",
    "decide": "Thresholds",
    "now": "What now",
    "not-checked": "Not checked",
}
PAINTS = ("right", "wrong", "good", "muted", "warn", "bad")
"""Colours of sets of predictions; of more, no curves are drawn over each other."""


def page_of(results: Results) -> str:
    """Return the page of a report."""
    if len(results.subjects) == 1:
        return _single(results, results.subjects[0])
    return _comparison(results)


def _single(results: Results, subject: Subject) -> str:
    sections = Sections(results, subject)
    links = [*LINKS.items(), ("provenance", "Provenance")]
    main = [sections.hero(), sections.tiles(), *sections.all(), _provenance(results)]
    return document(results.title, _about(subject), links, *main)


def _about(subject: Subject) -> str:
    where = f"{subject.split} split of {subject.path}" if subject.split else subject.path
    count = f"{subject.evaluation.n:,} examples, {subject.evaluation.classes:,} classes"
    if subject.word == "tag":
        count = f"{subject.evaluation.n:,} labels of {subject.evaluation.classes:,} tags"
    ignored = f", {subject.ignored:,} labels ignored" if subject.ignored else ""
    return f"{where}: {count}{ignored}"


def _comparison(results: Results) -> str:
    names = [f"set-{i}" for i in range(1, len(results.subjects) + 1)]
    links = [("overview", "Overview")]
    links += [(name, s.name) for name, s in zip(names, results.subjects, strict=True)][:12]
    boxes = [
        _box(results, subject, name) for name, subject in zip(names, results.subjects, strict=True)
    ]
    about = f"{len(results.subjects)} sets of predictions side by side"
    links.append(("provenance", "Provenance"))
    main = [_overview(results), *boxes, _provenance(results)]
    return document(results.title, about, links, *main)


def _overview(results: Results) -> Html:
    subjects, verdicts = results.subjects, results.verdicts.values()
    trusted = sum(each.severity == "good" for each in verdicts)
    answer = f"{trusted} of {len(subjects)}"
    hero = tag(
        "section",
        tag(
            "div",
            tag("h2", "How many can be trusted?", class_="question"),
            tag("p", answer, class_="answer"),
            tag("p", unbroken(_extremes(subjects)), class_="lead"),
        ),
        _forest(subjects),
        class_=f"hero {results.verdict.severity}",
        id="overview",
    )
    table = content.overview_table(subjects, [each.answer for each in verdicts])
    shown = scrollable(table, "All sets of predictions", kind="sortable")
    few = len(subjects) <= len(PAINTS)
    curves = [chart(_curves(subjects), "Accuracy by confidence")] if few else []
    return joined([hero, shown, tag("div", *curves, class_="columns")])


def _extremes(subjects: Sequence[Subject]) -> str:
    ordered = sorted(subjects, key=lambda subject: subject.evaluation["ece"].value)
    best, worst = (
        f"{s.name} ({100 * s.evaluation['ece'].value:.2f} %)" for s in (ordered[0], ordered[-1])
    )
    return f"The calibration error (ECE) is lowest for {best} and highest for {worst}."


def _forest(subjects: Sequence[Subject]) -> Html:
    ece = [subject.evaluation["ece"] for subject in subjects]
    names = [subject.name for subject in subjects]
    return Html(forest_chart(names, *([e[i] for e in ece] for i in range(3)), label="ECE"))


def _curves(subjects: Sequence[Subject]) -> str:
    lines = [Line("ideal", [0, 1], [0, 1], colour="ink", dashed=True)]
    for subject, paint in zip(subjects, PAINTS, strict=False):
        curve = subject.evaluation.reliability()
        lines.append(Line(subject.name, curve.confidence, curve.accuracy, colour=paint))
    claim = subjects[0].evaluation.probability or "confidence"
    return line_chart(lines, x_label=claim, y_label="share right", y_range=(0, 1))


def _box(results: Results, subject: Subject, name: str) -> Html:
    sections = Sections(results, subject, prefix=f"{name}-", level=3)
    answer = sections.verdict
    summary = tag(
        "summary",
        tag("h2", subject.name),
        " ",
        tag("span", answer.answer, class_="badge"),
        tag("p", _about(subject), class_="small"),
    )
    inside = tag("div", sections.hero(), sections.tiles(), *sections.all())
    return tag("details", summary, inside, class_=f"subject {answer.severity}", id=name)


def _provenance(results: Results) -> Html:
    made = results.provenance
    versions = f"{made.calibrant} (Python {made.python}, NumPy {made.numpy}, torch {made.torch})"
    facts = {"made": made.created, "calibrant": versions}
    facts |= {"command": made.command} if made.command else {}
    named = {name: value for name, value in made.options.items() if value is not None}
    facts |= {name.replace("_", " "): str(value) for name, value in named.items()}
    rows = [
        (file.path, f"{file.bytes:,}", file.sha256 or "not hashed")
        for file in dict.fromkeys(f for subject in results.subjects for f in subject.files)
    ]
    files = Table(("file", "bytes", "sha256"), rows, words=(0, 2))
    lines = [joined([tag("dt", name), tag("dd", value)]) for name, value in facts.items()]
    return section(
        "provenance",
        tag("h2", "Provenance"),
        tag("dl", *lines, class_="facts small"),
        scrollable(files, "Files that were read", kind="files") if rows else "",
    )


def notebook_form(results: Results) -> str:
    """Return the verdict and the findings for a notebook."""
    answer = results.verdict
    kind = "" if answer.severity == "info" else answer.severity
    items = [
        tag("li", tag("b", f"{f.code} {f.title}: "), f.evidence, Html("<br>"), f.fix)
        for f in results.findings
    ]
    return notebook(
        heading(results.title, f"ECE {answer.figure} {answer.interval}".strip()),
        verdict(str(answer), kind),
        tag("details", tag("summary", f"Findings: {counted(results.findings)}"), tag("ul", *items)),
        remarks(['report.save("report.html") writes the whole page']),
    )
