"""What the forms of a report show of one set of predictions: sentences, tables and charts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibrant._core.showing import threshold_text
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.registry import METRICS
from calibrant.show.charts import Line, forest_chart, line_chart
from calibrant.show.html import Html
from calibrant.show.metrics import metrics_table, reliability_svg, subgroup_table
from calibrant.show.pages import SEVERITIES, SEVERITY_NAMES, Snippet
from calibrant.show.report.findings import Finding
from calibrant.show.report.model import (
    MIN_EXAMPLES_OF_CLASS,
    ClassFigures,
    Coverage,
    Part,
    Remedy,
    Subject,
)
from calibrant.show.report.verdict import Unchecked, Verdict, snippets, subgroups_text
from calibrant.show.slices import slices_table
from calibrant.show.style import percent
from calibrant.show.tables import Table
from calibrant.show.workflows import methods_table

MAX_CLASSES = 1000
"""Rows of the tables of classes, over all sets of predictions of a page."""
MAX_GROUPS = 40
"""Subgroups that the chart shows."""
SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)
"""Shares of answers that the table of thresholds shows."""
CHOICES = (0.9, 0.8)
"""Shares of answers whose costs are told."""
CASES = 1000


def counted(found: Sequence[Finding]) -> str:
    """Return how many findings of each severity there are, in words."""
    plural = {**SEVERITY_NAMES, "warn": "warnings", "info": "notes"}
    counts = {s: sum(finding.severity == s for finding in found) for s in SEVERITIES[::-1]}
    texts = [f"{n} {SEVERITY_NAMES[s] if n == 1 else plural[s]}" for s, n in counts.items() if n]
    return ", ".join(texts) or "Nothing was found"


@dataclass(frozen=True)
class View:
    """One set of predictions of a report; ``name`` tells its anchors from those of others."""

    subject: Subject
    verdict: Verdict
    findings: list[Finding]
    unchecked: list[Unchecked]
    name: str = ""
    sets: int = 1
    """Sets of predictions on the page."""

    question = "Can I trust this model's confidence?"

    @property
    def prefix(self) -> str:
        """Start of anchors."""
        return f"{self.name}-" if self.name else ""

    @property
    def level(self) -> int:
        """Level of the headings of sections."""
        return 3 if self.name else 2

    @property
    def counted(self) -> str:
        """How many findings there are."""
        return counted(self.findings)

    @property
    def remedy(self) -> Remedy | None:
        """The advised method, where it helps."""
        remedy = self.subject.remedy
        return remedy if remedy is not None and remedy.helps else None

    # ----------------------------------------------------------------------------------- verdict

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
        of = f" of {self.subject.probability}" if evaluation.probability else ""
        interval = f", {evaluation.interval_heading} {self.verdict.interval}".rstrip(", ")
        return f"calibration error (ECE){of}{interval}"

    @property
    def meters(self) -> list[tuple[str, str, str, str]]:
        """Bars of the mistakes that are expected, and of those made: text, width and kind."""
        part = self.subject.answers
        expected, made = 1 - part.confidence, 1 - part.accuracy
        most = max(expected, made, 1e-12)
        return [
            ("Expected mistakes", percent(expected), f"{100 * expected / most:.2f}", "claimed"),
            (
                *("Mistakes made", percent(made), f"{100 * made / most:.2f}"),
                "wrong" if made > expected else "right",
            ),
        ]

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """The four figures that matter most: title, value, and interval or value after."""
        titles = {"accuracy": "Accuracy", "ece": "Calibration error (ECE)"}
        titles |= {"nll": "Log loss", "auroc": "Tells right from wrong (AUROC)"}
        before = _cells(self.subject.evaluation)
        if self.remedy is None or self.remedy.after is None:
            return [(title, *before[name]) for name, title in titles.items()]
        after = _cells(self.remedy.after)
        return [
            (title, before[name][0], f"after calibration {after[name][0]}")
            for name, title in titles.items()
        ]

    @property
    def diagrams(self) -> list[tuple[Html, str]]:
        """Reliability diagrams as it is and, where that helps, after calibration."""
        curve = self.subject.curve
        shown = [(reliability_svg(curve(), _ece_text(self.subject.evaluation)), "As it is")]
        if self.remedy is not None and self.remedy.after is not None:
            after = self.remedy.after
            caption = "After calibration, on examples it was not fitted on"
            shown.append((reliability_svg(curve(after), _ece_text(after)), caption))
        return shown

    @property
    def metrics(self) -> Table:
        """All metrics with a sentence about each."""
        evaluation = self.subject.evaluation
        table = metrics_table(evaluation)
        rows = [
            (
                *row,
                self.subject.with_names(
                    re.sub(r",? :math:`[^`]*`", "", METRICS[name].summary).rstrip(".")
                ),
            )
            for row, name in zip(table.rows, evaluation, strict=True)
        ]
        headings = (*map(self.subject.with_names, table.headings), "meaning")
        return Table(headings, rows, words=(0, 3))

    # ------------------------------------------------------------------------------------ where

    @property
    def ranges(self) -> Table:
        """Claims and events by range of confidence."""
        level = self.subject.evaluation.level
        return parts_table(self.subject.ranges, self.subject.probability, level)

    @property
    def margins(self) -> Table:
        """The same by margin."""
        level = self.subject.evaluation.level
        return parts_table(self.subject.margins, "margin of the top two logits", level)

    @property
    def by_class(self) -> str:
        """Title of the classes."""
        return "By tag" if self.subject.word == "tag" else "By class"

    @property
    def classes(self) -> tuple[Table, Table]:
        """Classes, those furthest beyond noise first; and those of too few examples to tell."""
        many, few = self._classes()
        most = max(10, MAX_CLASSES // self.sets)
        return self._class_table(many[:most]), self._class_table(few[: most - len(many[:most])])

    @property
    def classes_shown(self) -> str:
        """How many of the classes are shown."""
        shown, every = sum(len(table.rows) for table in self.classes), len(self.subject.classes)
        if shown < every:
            return f"{shown:,} of {every:,}: the JSON form has all"
        return f"{every:,} in all"

    def worst_classes(self, most: int) -> Table:
        """Return the classes that are furthest beyond noise."""
        many, few = self._classes()
        return self._class_table([*many, *few][:most])

    def _classes(self) -> tuple[list[ClassFigures], list[ClassFigures]]:
        def size(each: ClassFigures) -> tuple[float, float]:
            low, high = each.part.gap_ends
            return (-max(low, -high), -abs(each.part.gap)) if each.part.n else (math.inf, 0.0)

        every = sorted(self.subject.classes, key=size)
        many = [each for each in every if each.part.n >= MIN_EXAMPLES_OF_CLASS]
        return many, [each for each in every if each.part.n < MIN_EXAMPLES_OF_CLASS]

    def _class_table(self, classes: Sequence[ClassFigures]) -> Table:
        heading = "tag" if self.subject.word == "tag" else "predicted class"
        parts = [each.part for each in classes]
        table = parts_table(parts, heading, self.subject.evaluation.level)
        rows = [
            (*cells, percent(each.labelled, 2), percent(each.claimed, 2))
            for cells, each in zip(table.rows, classes, strict=True)
        ]
        return replace(table, headings=(*table.headings, "occurs", "mean probability"), rows=rows)

    @property
    def subgroups(self) -> str:
        """What the search for subgroups says, beside the verdict on all examples."""
        return subgroups_text(self.subject, self.verdict)

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
    def advice(self) -> str:
        """The advice in a few words."""
        if self.remedy is None or self.remedy.chosen is None:
            return "Leave it as it is"
        return f"Calibrate: use {self.remedy.chosen.method}"

    @property
    def reasons(self) -> list[str]:
        """Why, and what it costs, in sentences."""
        remedy, codes = self.remedy, {finding.code: finding for finding in self.findings}
        if remedy is None or remedy.before is None or remedy.after is None:
            against = codes.get("CAL019")
            if against is None:
                return ["Nothing speaks against the confidences as they are."]
            return [against.evidence, against.fix]
        before, after = (percent(each["ece"].value) for each in (remedy.before, remedy.after))
        assert remedy.chosen is not None
        return [
            f"On examples that it was not fitted on, a stated {self.subject.probability} is off by "
            f"{after} on average, in place of {before}.",
            f"{remedy.price(self.subject.counted)} The fit takes "
            f"{remedy.chosen.fit_seconds:.1f} s.",
        ]

    @property
    def choices(self) -> Table | None:
        """What each choice costs, in mistakes and in work for people."""
        if not self.subject.coverage:
            return None
        rows = [_choice("Use it as it is, and trust all answers", self.subject.coverage[-1])]
        calibrated = self.remedy is not None and self.remedy.coverage
        points, before = self.subject.decisions, ""
        if calibrated:
            rows.append(_choice("Calibrate, and trust all answers", points[-1]))
            before = "Calibrate, and "
        for share in CHOICES:
            point = min(points, key=lambda each: abs(each.coverage - share))
            if abs(point.coverage - share) < 0.05:
                words = f"{before}ask a person about the least sure {100 * (1 - share):.0f} %"
                rows.append(_choice(f"{words[0].upper()}{words[1:]}", point))
        headings = ("choice", "answered", "sent to a person", "mistakes", "mistakes it expects")
        return Table(headings, rows)

    @property
    def methods(self) -> Table:
        """All methods that were tried."""
        assert self.subject.remedy is not None
        return methods_table(self.subject.remedy.comparison)

    @property
    def methods_chart(self) -> Html:
        """The ECE of each method."""
        assert self.subject.remedy is not None
        comparison = self.subject.remedy.comparison
        return ece_chart(comparison.measured, highlighted=comparison.choice())

    # --------------------------------------------------------------------------------- decisions

    @property
    def decided_by(self) -> str:
        """Confidence that the thresholds are about."""
        return "calibrated confidence" if self.remedy is not None else "confidence"

    @property
    def decisions(self) -> Table:
        """Errors among the answers at some shares of answers."""
        points = self.subject.decisions
        nearest = [min(points, key=lambda point: abs(point.coverage - share)) for share in SHARES]
        rows = [
            (percent(point.coverage), threshold_text(point.threshold), percent(point.error, 2))
            for point in dict.fromkeys(nearest)
        ]
        return Table(("answered", "confidence at least", "wrong among these"), rows)

    @property
    def decisions_chart(self) -> Html:
        """Errors among the surest answers."""
        points = self.subject.decisions
        shares, errors = [p.coverage for p in points], [p.error for p in points]
        line = Line("wrong", shares, errors, colour="wrong")
        return line_chart([line], x_label="share answered", y_label="wrong among these")

    @property
    def slider(self) -> dict[str, Any]:
        """Threshold, share and error of each place of the slider; at first nine tenths answer."""
        points = self.subject.decisions
        places = [
            (threshold_text(p.threshold), round(p.coverage, 4), round(p.error, 5)) for p in points
        ]
        start = min(range(len(points)), key=lambda i: abs(points[i].coverage - 0.9))
        return {"places": places, "start": start}

    @property
    def guarantees(self) -> Table | None:
        """Thresholds that keep an error rate with certainty, if there are any."""
        if self.remedy is None or not self.remedy.thresholds:
            return None
        rows = []
        for each in self.remedy.thresholds:
            cells = ("none found", "-", "-")
            if math.isfinite(each.threshold):
                shares = percent(each.coverage), percent(each.error, 2)
                cells = (threshold_text(each.threshold), *shares)
            rows.append((percent(each.max_error), *cells))
        headings = ("errors at most", "confidence at least", "answered", "observed errors")
        return Table(headings, rows)

    @property
    def guaranteed(self) -> str:
        """What is guaranteed, and for which calibrator: another fit has other confidences."""
        assert self.remedy is not None
        assert self.remedy.chosen is not None
        return (
            f"Each threshold keeps its error rate with {100 * self.remedy.thresholds[0].level:g} % "
            f"certainty, for {self.remedy.chosen.method} as fitted here, on the "
            f"{self.remedy.comparison.fitted_on}"
        )

    @property
    def snippets(self) -> list[Snippet]:
        """Commands and code for what to do next."""
        return snippets(self.subject)


def parts_table(parts: Sequence[Part], heading: str, level: float | None) -> Table:
    """Return claimed and observed shares of parts."""
    interval = f"{100 * (level or 0.9):g} % interval"
    headings = (heading, "examples", "share", "claimed", "happened", interval, "gap")
    rows = [
        (
            *(part.name, f"{part.n:,}", percent(part.share)),
            *(percent(part.confidence), percent(part.accuracy)),
            *(f"[{100 * part.low:.1f}, {100 * part.high:.1f}]", f"{100 * part.gap:+.1f}"),
        )
        if part.n
        else (part.name, "0", percent(0.0), "-", "-", "", "-")
        for part in parts
    ]
    return Table(headings, rows, bars=headings.index("gap"))


def overview_table(subjects: Sequence[Subject], answers: Sequence[str]) -> Table:
    """Return several sets of predictions side by side."""
    interval = subjects[0].evaluation.interval_heading or "interval"
    headings = ("predictions", "trust?", "examples", "accuracy", "confidence", "ECE", interval)
    rows = []
    for subject, answer in zip(subjects, answers, strict=True):
        shown = _cells(subject.evaluation)
        after = subject.remedy.after if subject.remedy and subject.remedy.helps else None
        rows.append(
            (
                *(subject.name, answer, f"{subject.evaluation.n:,}", shown["accuracy"][0]),
                *(percent(subject.answers.confidence), *shown["ece"]),
                percent(after["ece"].value, 2) if after else "-",
            )
        )
    return Table((*headings, "calibrated ECE"), rows, words=(0, 1))


def ece_chart(
    evaluations: Mapping[str, Evaluation],
    *,
    highlighted: str | None = None,
    reference: float | None = None,
) -> Html:
    """Return the ECE of some evaluations with their intervals."""
    values, low, high = zip(*(each["ece"] for each in evaluations.values()), strict=True)
    options: Any = {"highlighted": highlighted, "reference": reference}
    return forest_chart(list(evaluations), values, low, high, label="ECE", **options)


def _cells(evaluation: Evaluation) -> dict[str, tuple[str, str]]:
    """Return the value and the interval of each metric as text."""
    return {name: row[1:] for name, row in zip(evaluation, evaluation.table(), strict=True)}


def _ece_text(evaluation: Evaluation) -> str:
    return " ".join(("ECE", *_cells(evaluation)["ece"])).rstrip()


def _choice(words: str, point: Coverage) -> tuple[str, ...]:
    """Return what a choice costs in so many cases."""
    answered = round(CASES * point.coverage)
    mistakes = (CASES * point.coverage * share for share in (point.error, point.expected))
    return (words, str(answered), str(CASES - answered), *(f"{x:.0f}" for x in mistakes))
