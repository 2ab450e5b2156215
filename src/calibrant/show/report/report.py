"""The result of a report, and its forms: a page, Markdown, JSON and a box."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

from calibrant._core.showing import json_text, one_line, plain
from calibrant.show.charts import Line, line_chart
from calibrant.show.html import Html, _notebook, _rendered
from calibrant.show.pages import (
    SEVERITIES,
    SEVERITY_MARKS,
    SEVERITY_NAMES,
    _fenced,
    _write_form,
    document,
)
from calibrant.show.report.findings import Finding, _findings_of
from calibrant.show.report.model import MIN_EXAMPLES_OF_CLASS, Subject
from calibrant.show.report.verdict import Unchecked, Verdict, _unchecked_of, _verdict_of
from calibrant.show.report.view import _ece_chart, _overview_table, _view_of, counted
from calibrant.show.tables import Table

QUESTION = "Can I trust this model's confidence?"
SECTIONS = {
    "verdict": "Verdict",
    "findings": "Findings",
    "fix": "What fixes it",
    "how-far": "How far off",
    "now": "What now",
    "where": "Where",
    "decide": "Thresholds",
    "details": "Details",
    "not-checked": "Not checked",
    "provenance": "Provenance",
}
"""Anchors of a page about one set of predictions, with their names."""
MAX_LINKS = 12
PAINTS = ("right", "wrong", "good", "muted", "warn", "bad")
"""Colours of sets of predictions; of more, no curves are drawn over each other."""


@dataclass(frozen=True)
class Provenance:
    """What made a report: versions, time, options, and the command that repeats it.

    The command is empty where arrays were passed, which are in no file.
    """

    calibrant: str
    python: str
    numpy: str
    torch: str
    created: str
    command: str
    options: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """A verdict on the confidences of one or several sets of predictions, findings and remedies.

    Made by :func:`calibrant.report`; printing it gives Markdown.

    Attributes
    ----------
    title : str
    subjects : list of Subject
        Figures of each set of predictions.
    provenance : Provenance
    """

    title: str
    subjects: list[Subject]
    provenance: Provenance = field(repr=False)

    @cached_property
    def findings_by_subject(self) -> dict[str, list[Finding]]:
        """Findings of each set of predictions, the most serious first."""
        return {subject.name: _findings_of(subject) for subject in self.subjects}

    @property
    def findings(self) -> list[Finding]:
        """Findings of all sets of predictions, the most serious first."""
        every = [finding for found in self.findings_by_subject.values() for finding in found]
        return sorted(every, key=lambda finding: -SEVERITIES.index(finding.severity))

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The answer for each set of predictions."""
        return {s.name: _verdict_of(s, self.findings_by_subject[s.name]) for s in self.subjects}

    @property
    def verdict(self) -> Verdict:
        """The answer; the worst one of several."""
        return max(self.verdicts.values(), key=lambda each: SEVERITIES.index(each.severity))

    def unchecked(self, subject: Subject) -> list[Unchecked]:
        """Return what was not checked about a set of predictions."""
        return _unchecked_of(subject, len(self.subjects) - 1)

    def __repr__(self) -> str:
        return one_line(self, self.title, self.verdict.answer, counted(self.findings))

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        figure = f"ECE {self.verdict.figure} {self.verdict.interval}".strip()
        values = {"report": self, "figure": figure, "counted": counted(self.findings)}
        return _notebook(_rendered("report_box.html", **values))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: errors as fractions, undefined values as None."""
        return {
            "title": self.title,
            "verdict": vars(self.verdict),
            "subjects": [self._subject_dict(subject) for subject in self.subjects],
            "provenance": asdict(self.provenance),
        }

    def _subject_dict(self, subject: Subject) -> dict[str, Any]:
        content: dict[str, Any] = {f.name: getattr(subject, f.name) for f in fields(subject)}
        content |= {
            "columns": subject.columns._asdict(),
            "verdict": vars(self.verdicts[subject.name]),
            "findings": self.findings_by_subject[subject.name],
            "unchecked": [item._asdict() for item in self.unchecked(subject)],
        }
        return cast("dict[str, Any]", _plain(content))

    def to_json(self) -> str:
        """Return the JSON form as text."""
        return json_text(self.to_dict())

    def to_markdown(self) -> str:
        """Return the report for pull requests and the summaries of continuous integration."""
        answers = [f"{SEVERITY_MARKS[v.severity]} {v.answer}" for v in self.verdicts.values()]
        return _rendered(
            "report.md",
            report=self,
            pages=self._views(),
            overview=_overview_table(self.subjects, answers),
            files=self._files(),
            marks=SEVERITY_MARKS,
            names=SEVERITY_NAMES,
            question=QUESTION,
            fenced=_fenced,
        )

    def to_html(self) -> str:
        """Return the page: one file that fetches nothing, and is useful without its script."""
        pages, made = self._views(), self.provenance
        about, links = pages[0].about, [*SECTIONS.items()]
        values: dict[str, Any] = {"report": self, "pages": pages, "files": self._files()}
        values |= {"names": SEVERITY_NAMES, "fewest": MIN_EXAMPLES_OF_CLASS, "question": QUESTION}
        if len(pages) > 1:
            about = f"{len(pages)} sets of predictions side by side"
            sets = ((page.name, page.subject.name) for page in pages[:MAX_LINKS])
            links = [("overview", "Overview"), *sets, ("provenance", "Provenance")]
            values["overview"] = self._overview()
        facts = {
            "made": made.created,
            "calibrant": f"{made.calibrant} (Python {made.python}, NumPy {made.numpy}, "
            f"torch {made.torch})",
            **({"command": made.command} if made.command else {}),
            **{k.replace("_", " "): v for k, v in made.options.items() if v is not None},
        }
        return document("report.html", self.title, about, links, provenance=facts, **values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as ``.html``, ``.md`` or ``.json``, by the suffix of the path."""
        forms = {".html": self.to_html, ".md": self.to_markdown, ".json": self.to_json}
        _write_form(path, forms)

    def _views(self) -> list[SimpleNamespace]:
        """Return what is shown of each set; ``name`` tells the anchors of several apart."""
        several = len(self.subjects) > 1
        return [
            _view_of(
                subject,
                self.verdicts[subject.name],
                self.findings_by_subject[subject.name],
                self.unchecked(subject),
                name=f"set-{i}" if several else "",
                sets=len(self.subjects),
            )
            for i, subject in enumerate(self.subjects, 1)
        ]

    def _overview(self) -> dict[str, object]:
        """Return how several sets of predictions compare."""
        verdicts, subjects = self.verdicts.values(), self.subjects
        ordered = sorted(subjects, key=lambda subject: subject.evaluation["ece"].value)
        best, worst = (
            f"{s.name} ({100 * s.evaluation['ece'].value:.2f} %)" for s in (ordered[0], ordered[-1])
        )
        return {
            "answer": f"{sum(v.severity == 'good' for v in verdicts)} of {len(subjects)}",
            "sentence": f"The calibration error (ECE) is lowest for {best} and highest for "
            f"{worst}.",
            "forest": _ece_chart({s.name: s.evaluation for s in subjects}),
            "table": _overview_table(subjects, [each.answer for each in verdicts]),
            "curves": _curves(subjects) if len(subjects) <= len(PAINTS) else None,
        }

    def _files(self) -> Table:
        files = dict.fromkeys(file for subject in self.subjects for file in subject.files)
        rows = [(file.path, f"{file.bytes:,}", file.sha256 or "not hashed") for file in files]
        return Table(("file", "bytes", "sha256"), rows, words=(0, 2))


def _curves(subjects: Sequence[Subject]) -> Html:
    lines = [Line("ideal", [0, 1], [0, 1], colour="ink", dashed=True)]
    for subject, paint in zip(subjects, PAINTS, strict=False):
        curve = subject.curve()
        lines.append(Line(subject.name, curve.confidence, curve.accuracy, colour=paint))
    claim = subjects[0].probability
    return line_chart(lines, x_label=claim, y_label="share right", y_range=(0, 1))


def _plain(value: Any) -> Any:
    """Return a value for JSON: what knows its JSON form, and the fields of data classes."""
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if is_dataclass(value):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return plain(value)
