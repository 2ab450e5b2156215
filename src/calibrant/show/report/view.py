"""What the forms of a report show of one set of predictions: sentences, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from calibrant._core.showing import threshold_text
from calibrant.metrics.evaluation import Evaluation
from calibrant.show.charts import Line, forest_chart, line_chart
from calibrant.show.html import Html
from calibrant.show.metrics import diagram, metrics_table, subgroup_table
from calibrant.show.report import tables
from calibrant.show.report.checks import percent
from calibrant.show.report.findings import CHECKS, Finding
from calibrant.show.report.model import SEVERITIES, Part, Remedy, Severity, Subject
from calibrant.show.report.results import Results
from calibrant.show.report.snippets import Snippet, snippets
from calibrant.show.report.unchecked import Unchecked
from calibrant.show.report.verdict import Verdict
from calibrant.show.slices import slices_table
from calibrant.show.tables import Table
from calibrant.show.workflows import methods_table

MAX_CLASSES = 1000
"""Rows of the tables of classes, over all sets of predictions of a page."""
MAX_GROUPS = 40
"""Subgroups that the chart shows."""
WORDS: dict[Severity, str] = {"bad": "serious", "warn": "warning", "info": "note", "good": "good"}
"""Severities of findings, as they are shown."""


def counted(found: Sequence[Finding]) -> str:
    """Return how many findings of each severity there are, in words."""
    plural = {**WORDS, "warn": "warnings", "info": "notes"}
    counts = {s: sum(finding.severity == s for finding in found) for s in SEVERITIES[::-1]}
    texts = [f"{n} {WORDS[s] if n == 1 else plural[s]}" for s, n in counts.items() if n]
    return ", ".join(texts) or "Nothing was found"


@dataclass(frozen=True)
class SubjectView:
    """One set of predictions; ``name`` tells its anchors from those of others."""

    report: Results
    subject: Subject
    name: str = ""

    question = "Can I trust this model's confidence?"
    meters_of = ("Expected mistakes", "Mistakes made")

    @property
    def prefix(self) -> str:
        """Start of anchors."""
        return f"{self.name}-" if self.name else ""

    @property
    def level(self) -> int:
        """Level of the headings of sections."""
        return 3 if self.name else 2

    # ----------------------------------------------------------------------------------- verdict

    @property
    def verdict(self) -> Verdict:
        """The answer about these predictions."""
        return self.report.verdicts[self.subject.name]

    @property
    def about(self) -> str:
        """Which examples, and how many."""
        subject, evaluation = self.subject, self.subject.evaluation
        where = f"{subject.split} split of {subject.path}" if subject.split else subject.path
        count = f"{evaluation.n:,} examples, {evaluation.classes:,} classes"
        if subject.word == "tag":
            count = f"{evaluation.n:,} labels of {evaluation.classes:,} tags"
        ignored = f", {subject.ignored:,} labels ignored" if subject.ignored else ""
        return f"{where}: {count}{ignored}"

    @property
    def measured(self) -> str:
        """What the figure beside the verdict is, with its interval."""
        evaluation = self.subject.evaluation
        of = f" of {evaluation.probability}" if evaluation.probability else ""
        interval = f", {evaluation.interval_heading} {self.verdict.interval}".rstrip(", ")
        return f"calibration error (ECE){of}{interval}"

    @property
    def meters(self) -> list[tuple[str, str, str, str]]:
        """Bars of the mistakes that are expected, and of those made: text, width and kind."""
        part = self.subject.answers
        shares = 1 - part.confidence, 1 - part.accuracy
        kinds = "claimed", "wrong" if shares[1] > shares[0] else "right"
        most = max(*shares, 1e-12)
        return [
            (name, percent(share), f"{100 * share / most:.2f}", kind)
            for name, share, kind in zip(self.meters_of, shares, kinds, strict=True)
        ]

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """Titles, values and intervals of the figures that matter most."""
        after = (
            [] if self.after is None else [("ECE after calibration", *_cells(self.after, "ece"))]
        )
        titles = {"accuracy": "Accuracy", "auroc": "Tells right from wrong (AUROC)"}
        titles |= {"nll": "Negative log-likelihood"}
        own = [(title, *_cells(self.subject.evaluation, name)) for name, title in titles.items()]
        return [*after, *own]

    # ---------------------------------------------------------------------------------- findings

    @property
    def findings(self) -> list[Finding]:
        """What the checks found, the most serious first."""
        return self.report.findings_by_subject[self.subject.name]

    @property
    def counted(self) -> str:
        """How many findings there are."""
        return counted(self.findings)

    def word(self, finding: Finding) -> str:
        """Return the severity of a finding in words."""
        return WORDS[finding.severity]

    def meaning(self, finding: Finding) -> str:
        """Return what a finding tells."""
        return CHECKS[finding.code].meaning

    @property
    def unchecked(self) -> list[Unchecked]:
        """What was not checked."""
        return self.report.unchecked(self.subject)

    # ------------------------------------------------------------------------------ how far, where

    @property
    def after(self) -> Evaluation | None:
        """Figures with the advised method; None where it changes nothing."""
        remedy = self.subject.remedy
        return None if remedy is None or remedy.changes_nothing else remedy.after

    @property
    def diagrams(self) -> list[tuple[Html, str]]:
        """Reliability diagrams as it is and, if anything changes, after calibration."""
        shown = [(diagram(self.subject.evaluation), "As it is")]
        remedy = self.subject.remedy
        if self.after is not None and remedy is not None and remedy.chosen is not None:
            caption = f"Calibrated by {remedy.chosen.method}, on examples it was not fitted on"
            shown.append((diagram(self.after), caption))
        return shown

    @property
    def metrics(self) -> Table:
        """All metrics with their meaning."""
        return tables.explained_metrics(self.subject.evaluation)

    @property
    def plain_metrics(self) -> Table:
        """All metrics."""
        return metrics_table(self.subject.evaluation)

    @property
    def ranges(self) -> Table:
        """Claims and events by range of confidence."""
        return self._parts(self.subject.ranges, self.subject.probability)

    @property
    def margins(self) -> Table:
        """The same by margin."""
        return self._parts(self.subject.margins, "margin of the top two logits")

    def _parts(self, parts: Sequence[Part], heading: str) -> Table:
        return tables.parts_table(parts, heading, self.subject.evaluation.level)

    @property
    def by_class(self) -> str:
        """Title of the classes."""
        return "By tag" if self.subject.word == "tag" else "By class"

    @cached_property
    def classes(self) -> Table:
        """Classes, those furthest beyond noise first."""
        most = max(10, MAX_CLASSES // len(self.report.subjects))
        return self.worst_classes(most)

    def worst_classes(self, most: int) -> Table:
        """Return the classes that are furthest beyond noise."""
        return tables.classes_table(tables.worst_first(self.subject.classes)[:most], self.subject)

    @property
    def classes_shown(self) -> str:
        """How many of the classes are shown."""
        shown, every = len(self.classes.rows), len(self.subject.classes)
        if shown < every:
            return f"{shown:,} of {every:,}: the JSON form has all"
        return f"{every:,} in all"

    @property
    def slices(self) -> Table:
        """Subgroups that were found by a search."""
        assert self.subject.slices is not None
        return slices_table(self.subject.slices)

    @property
    def groups(self) -> Table:
        """Subgroups of a column."""
        return subgroup_table(self.subject.evaluation)

    @property
    def groups_chart(self) -> Html:
        """The ECE of each subgroup."""
        evaluation = self.subject.evaluation
        groups = dict(list(evaluation.by.items())[:MAX_GROUPS])
        return ece_chart(groups, reference=evaluation["ece"].value)

    # ------------------------------------------------------------------------------------ remedy

    @property
    def remedy(self) -> Remedy:
        """The methods that were tried."""
        assert self.subject.remedy is not None
        return self.subject.remedy

    @property
    def methods(self) -> Table:
        """All methods that were tried."""
        return methods_table(self.remedy.comparison)

    @property
    def methods_chart(self) -> Html:
        """The ECE of each method."""
        comparison = self.remedy.comparison
        return ece_chart(comparison.measured, highlighted=comparison.choice())

    @property
    def advice(self) -> str:
        """The advised method in a few words."""
        method = self.remedy.comparison.choice()
        return f"Use {method}" if self.after is not None else "Leave it as it is"

    @property
    def reason(self) -> str:
        """Why the chosen method was chosen."""
        advice = self.remedy.comparison.advice()
        _, bracket, inside = advice.partition(" (")
        why = inside.removesuffix(").") if bracket else advice
        return f"{why[:1].upper()}{why[1:]}".rstrip(".") + "."

    @property
    def price(self) -> list[tuple[str, str]]:
        """What the chosen method costs, as names and values."""
        chosen, before, after = self.remedy.chosen, self.remedy.before, self.remedy.after
        if chosen is None or before is None or after is None:
            return []
        change = after["accuracy"].value - before["accuracy"].value
        changed = f"{chosen.argmax_changed:,} of {self.remedy.comparison.n_test:,}"
        return [
            ("accuracy", f"{100 * change:+.2f} points"),
            ("predictions changed", changed),
            ("time of the fit", f"{chosen.fit_seconds:.1f} s"),
        ]

    # --------------------------------------------------------------------------------- decisions

    @property
    def decided_by(self) -> str:
        """Confidence that the thresholds are about."""
        calibrated = self.subject.remedy is not None and bool(self.subject.remedy.coverage)
        return "calibrated confidence" if calibrated else "confidence"

    @property
    def decisions(self) -> Table:
        """Errors among the answers at some thresholds."""
        return tables.decisions_table(self.subject.decisions)

    @property
    def decisions_chart(self) -> Html:
        """Errors among the surest answers."""
        points = self.subject.decisions
        shares, errors = [p.coverage for p in points], [p.error for p in points]
        line = Line("wrong", shares, errors, colour="wrong")
        return line_chart([line], x_label="share answered", y_label="wrong among these")

    @property
    def slider(self) -> list[tuple[str, float, float]]:
        """Threshold, share answered and error of each place of the slider."""
        return [
            (threshold_text(p.threshold), round(p.coverage, 4), round(p.error, 5))
            for p in self.subject.decisions
        ]

    @property
    def slider_start(self) -> int:
        """Place of the slider at first: nine tenths are answered."""
        shares = [point.coverage for point in self.subject.decisions]
        return min(range(len(shares)), key=lambda i: abs(shares[i] - 0.9))

    @property
    def guarantees(self) -> Table | None:
        """Thresholds with a guarantee, if there are any."""
        remedy = self.subject.remedy
        if remedy is None or not remedy.thresholds:
            return None
        return tables.guarantees_table(remedy)

    @property
    def guaranteed(self) -> str:
        """What is guaranteed, and for which calibrator: another fit has other confidences."""
        remedy = self.remedy
        assert remedy.chosen is not None
        return (
            f"Each threshold keeps its error rate with {100 * remedy.thresholds[0].certainty:g} % "
            f"certainty, for {remedy.chosen.method} as fitted here, on "
            f"{remedy.comparison.fitted_on}"
        )

    @property
    def snippets(self) -> list[Snippet]:
        """Commands and code for what to do next."""
        return snippets(self.subject)


def _cells(evaluation: Evaluation, name: str) -> tuple[str, str]:
    """Return the value and the interval of a metric as text."""
    _, value, interval = dict(zip(evaluation, evaluation.table(), strict=True))[name]
    return value, interval


def ece_chart(
    evaluations: dict[str, Evaluation],
    *,
    highlighted: str | None = None,
    reference: float | None = None,
) -> Html:
    """Return the ECE of some evaluations with their intervals."""
    ends = zip(*(evaluation["ece"] for evaluation in evaluations.values()), strict=True)
    options = {"highlighted": highlighted, "reference": reference}
    return forest_chart(list(evaluations), *ends, label="ECE", **options)  # type: ignore[arg-type]
