"""A report as Markdown, in the dialect of GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from calibrant._core.messages import printable
from calibrant.reports import content
from calibrant.reports.content import Table
from calibrant.reports.findings import Finding
from calibrant.reports.model import Subject
from calibrant.reports.results import Results

MARKS = {"bad": "🔴", "warn": "🟠", "info": "🔵", "good": "🟢"}
MOST_CLASSES = 10
_ENTITIES = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "@": "&#64;",
    "://": "&#58;//",
    "www.": "www&#46;",
}
"""Markup, and what GitHub makes links of."""
_SPECIAL = re.compile(r"([\\`*_\[\]{}|~#$!])")


def escaped(text: object) -> str:
    r"""Return text of any origin as Markdown that shows it.

    >>> print(escaped("<b>*cat* | dog"))
    &lt;b&gt;\*cat\* \| dog
    """
    plain = _SPECIAL.sub(r"\\\1", " ".join(printable(str(text)).split()))
    for raw, safe in _ENTITIES.items():
        plain = plain.replace(raw, safe)
    return plain


def markdown_of(report: Results) -> str:
    """Return the whole report."""
    lines = [f"# {escaped(report.title)}", ""]
    if len(report.subjects) > 1:
        lines += _overview(report)
    for subject in report.subjects:
        lines += _subject(report, subject)
    lines += ["<details><summary>Provenance</summary>", "", *_provenance(report), "", "</details>"]
    return "\n".join(lines) + "\n"


def table(content: Table) -> list[str]:
    """Return the lines of a table, numbers to the right."""
    rule = [":--" if i in content.words else "--:" for i in range(len(content.headings))]
    rows = [list(map(escaped, row)) for row in content.rows]
    for i in content.highlighted:
        rows[i] = [f"**{cell}**" if cell else "" for cell in rows[i]]
    cells = [list(map(escaped, content.headings)), rule, *rows]
    return ["| " + " | ".join(row) + " |" for row in cells] + [""]


def fenced(language: str, code: str) -> list[str]:
    """Return code in a fence that is longer than any in it."""
    longest = max(map(len, re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", printable(code), fence, ""]


def _overview(report: Results) -> list[str]:
    answers = [f"{MARKS[v.severity]} {v.answer}" for v in report.verdicts.values()]
    return table(content.overview_table(report.subjects, answers))


def _subject(report: Results, subject: Subject) -> list[str]:
    several = len(report.subjects) > 1
    return [
        *([f"## {escaped(subject.name)}", ""] if several else []),
        *_verdict(report, subject),
        *_findings(report.findings_by_subject[subject.name]),
        *_details("All figures", table(content.metrics_table(subject))),
        *_where(subject),
        *_remedy(subject),
        *_now(subject),
        *_details("Not checked", [f"- {escaped(u)}" for u in report.unchecked(subject)]),
    ]


def _verdict(report: Results, subject: Subject) -> list[str]:
    verdict = report.verdicts[subject.name]
    shown = f"ECE {verdict.figure} {verdict.interval}".strip()
    return [
        f"{MARKS[verdict.severity]} **{content.QUESTION} {escaped(verdict.answer)}.** "
        f"{escaped(verdict.sentence)}",
        "",
        f"{escaped(shown)}; {escaped(subject.evaluation.describe())}",
        "",
    ]


def _findings(found: Sequence[Finding]) -> list[str]:
    lines = [
        f"- {MARKS[f.severity]} **{f.code} {escaped(f.title)}** ({content.WORDS[f.severity]}): "
        f"{escaped(f'{f.evidence} {f.fix}')}"
        for f in found
    ]
    return [*lines, ""]


def _details(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "</details>", ""]


def _where(subject: Subject) -> list[str]:
    level = subject.evaluation.level
    lines = table(content.parts_table(subject.ranges, subject.probability, level))
    if subject.margins:
        lines += table(content.parts_table(subject.margins, "margin of the top two logits", level))
    worst = content.worst_first(subject.classes)[:MOST_CLASSES]
    lines += table(content.classes_table(worst, subject))
    if len(subject.classes) > MOST_CLASSES:
        lines += [f"The {MOST_CLASSES} of {len(subject.classes):,} that are furthest off.", ""]
    if subject.evaluation.by:
        lines += [f"Subgroups by {escaped(subject.by)}:", "", *table(content.groups_table(subject))]
    if subject.slices is not None:
        lines += [escaped(f"{subject.slices.describe()}. {subject.slices.verdict()}"), ""]
        lines += table(content.slices_table(subject.slices)) if subject.slices.is_off else []
    return _details("Where it is off", lines)


def _remedy(subject: Subject) -> Iterator[str]:
    remedy = subject.remedy
    if remedy is None:
        return
    yield f"**What fixes it:** {escaped(remedy.comparison.advice())}"
    yield ""
    yield from table(content.methods_table(remedy))
    if costs := content.price(remedy):
        yield "Price: " + ", ".join(f"{name} {value}" for name, value in costs) + "."
        yield ""


def _now(subject: Subject) -> Iterator[str]:
    lines: list[str] = []
    for snippet in content.snippets(subject):
        lines += [f"{snippet.title}:", "", *fenced(snippet.language, snippet.code)]
    if subject.decisions:
        lines += table(content.decisions_table(subject.decisions))
    if subject.remedy is not None and subject.remedy.thresholds:
        lines += [f"{escaped(content.guarantees_caption(subject.remedy))}:", ""]
        lines += table(content.guarantees_table(subject.remedy))
    yield from _details("What to do now", lines)


def _provenance(report: Results) -> Iterator[str]:
    made = report.provenance
    yield f"calibrant {escaped(made.calibrant)}, Python {made.python}, NumPy {made.numpy}, "
    yield f"torch {escaped(made.torch)}; {made.created}"
    yield ""
    if made.command:
        yield from fenced("bash", made.command)
    for file in dict.fromkeys(file for subject in report.subjects for file in subject.files):
        digest = f"sha256 {file.sha256}" if file.sha256 else "not hashed"
        yield f"- {escaped(file.path)}: {file.bytes:,} bytes, {digest}"
