"""What a report says, before it takes a form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

from calibrant._core import json_form
from calibrant.show.report.findings import Finding, findings_of
from calibrant.show.report.model import SEVERITIES, ClassFigures, Part, Remedy, Subject
from calibrant.show.report.unchecked import Unchecked, unchecked_of
from calibrant.show.report.verdict import Verdict, verdict_of


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


@dataclass(frozen=True, eq=False)
class Results:
    """Everything that a report says about one or several sets of predictions.

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
        return {subject.name: findings_of(subject) for subject in self.subjects}

    @property
    def findings(self) -> list[Finding]:
        """Findings of all sets of predictions, the most serious first."""
        every = [finding for found in self.findings_by_subject.values() for finding in found]
        return sorted(every, key=lambda finding: -SEVERITIES.index(finding.severity))

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The answer for each set of predictions."""
        return {s.name: verdict_of(s, self.findings_by_subject[s.name]) for s in self.subjects}

    @property
    def verdict(self) -> Verdict:
        """The answer; the worst one of several."""
        return max(self.verdicts.values(), key=lambda each: SEVERITIES.index(each.severity))

    def unchecked(self, subject: Subject) -> list[Unchecked]:
        """Return what was not checked about a set of predictions."""
        return unchecked_of(subject, len(self.subjects) - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: errors as fractions, undefined values as None."""
        return {
            "title": self.title,
            "verdict": vars(self.verdict),
            "subjects": [self._subject_dict(subject) for subject in self.subjects],
            "provenance": asdict(self.provenance),
        }

    def _subject_dict(self, subject: Subject) -> dict[str, Any]:
        found = self.findings_by_subject[subject.name]
        result = {
            "name": subject.name,
            "verdict": vars(self.verdicts[subject.name]),
            "findings": [finding.to_dict() for finding in found],
            "unchecked": [item._asdict() for item in self.unchecked(subject)],
        }
        figures = {f.name: getattr(subject, f.name) for f in fields(subject)}
        return {name: plain(value) for name, value in {**figures, **result}.items()}

    def to_json(self) -> str:
        """Return the JSON form as text."""
        return json_form.json_text(self.to_dict())


def plain(value: Any) -> Any:
    """Return a value for JSON: evaluations as ``evaluate --json`` has them."""
    if isinstance(value, Remedy):
        return {
            "comparison": plain(value.comparison.to_dict()),
            "chosen": value.chosen.method if value.chosen else None,
            "coverage": plain(value.coverage),
            "thresholds": [each.state() for each in value.thresholds],
        }
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if isinstance(value, Part):
        return plain({**vars(value), "gap": value.gap})
    if isinstance(value, ClassFigures):
        figures = dict(vars(value))
        return {**plain(figures.pop("part")), **plain(figures)}
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return json_form.plain(value)
