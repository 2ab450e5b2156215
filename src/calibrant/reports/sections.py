"""The sections of a page about one set of predictions, in the order of the questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from calibrant.display.html import Html, joined, tag
from calibrant.display.results import threshold_text
from calibrant.display.svg import Line, forest_chart, line_chart
from calibrant.reports import content
from calibrant.reports.checks import percent
from calibrant.reports.findings import CHECKS, Finding
from calibrant.reports.model import SEVERITIES, Remedy, Severity, Subject
from calibrant.reports.results import Results
from calibrant.reports.shell import chart, scrollable, section, snippet, unbroken
from calibrant.reports.unchecked import Unchecked
from calibrant.reports.verdict import Verdict
from calibrant.slices import Slices

MOST_CLASSES = 1000
"""Rows of the tables of classes, over all sets of predictions of a page."""
MOST_GROUPS = 40
"""Subgroups that the chart shows."""


@dataclass(frozen=True)
class Sections:
    """Makes the sections; ``prefix`` tells anchors apart, ``level`` is that of the headings."""

    results: Results
    subject: Subject
    prefix: str = ""
    level: int = 2

    def heading(self, text: str, below: int = 0) -> Html:
        """Return a heading of a section, or of a part below it."""
        return tag(f"h{self.level + below}", text)

    def name(self, text: str) -> str:
        """Return an anchor."""
        return f"{self.prefix}{text}"

    @property
    def verdict(self) -> Verdict:
        """The answer about these predictions."""
        return self.results.verdicts[self.subject.name]

    def all(self) -> list[Html]:
        """Return every section but the verdict."""
        made: Sequence[Callable[[], Html]] = (
            self.findings,
            self.how_far,
            self.where,
            self.remedy,
            self.decisions,
            self.next_steps,
            self.not_checked,
        )
        return [make() for make in made]

    def hero(self) -> Html:
        """Return the verdict, large."""
        verdict = self.verdict
        words = tag(
            "div",
            tag(f"h{self.level}", content.QUESTION, class_="question"),
            tag("p", verdict.answer, class_="answer"),
            tag("p", unbroken(verdict.sentence), class_="lead"),
        )
        return tag(
            "section",
            words,
            self._figure(),
            class_=f"hero {verdict.severity}",
            id=self.name("verdict"),
        )

    def _figure(self) -> Html:
        evaluation, part = self.subject.evaluation, self.subject.answers
        interval = f", {evaluation.interval_heading} {self.verdict.interval}".rstrip(", ")
        what = "calibration error (ECE)"
        if evaluation.probability:
            what = f"calibration error (ECE) of {evaluation.probability}"
        return tag(
            "div",
            tag("p", self.verdict.figure, class_="number"),
            tag("p", unbroken(what + interval), class_="muted small"),
            tag(
                "dl",
                *_meters(1 - part.confidence, 1 - part.accuracy),
                class_="meters",
            ),
            class_="figure",
        )

    def tiles(self) -> Html:
        """Return the figures that matter most."""
        evaluation = self.subject.evaluation
        shown = dict(zip(evaluation, evaluation.table(), strict=True))
        names = {"accuracy": "Accuracy", "auroc": "Tells right from wrong (AUROC)"}
        names |= {"nll": "Negative log-likelihood"}
        tiles = [tile(title, *shown[name][1:]) for name, title in names.items()]
        remedy = self.subject.remedy
        if remedy is not None and remedy.after is not None and not remedy.changes_nothing:
            after = dict(zip(remedy.after, remedy.after.table(), strict=True))["ece"]
            tiles.insert(0, tile("ECE after calibration", *after[1:]))
        return tag("dl", *tiles, class_="tiles")

    def findings(self) -> Html:
        """Return the findings."""
        found = self.results.findings_by_subject[self.subject.name]
        items = [tag("li", self._finding(finding)) for finding in found]
        listed = tag("ul", *items, class_="findings")
        words = tag("p", f"{counted(found)}. Open one for its meaning and remedy.", class_="muted")
        return section(self.name("findings"), self.heading("Findings"), words, listed)

    def _finding(self, finding: Finding) -> Html:
        heading = tag(
            f"h{self.level + 1}",
            tag("span", finding.code, class_="code"),
            finding.title,
            tag("span", content.WORDS[finding.severity], class_="badge"),
        )
        summary = tag(
            "summary", heading, tag("span", unbroken(finding.evidence), class_="evidence")
        )
        more = tag(
            "div",
            tag("p", CHECKS[finding.code].meaning),
            tag("p", tag("b", "What to do: "), finding.fix) if finding.fix else "",
            tag("p", "Documentation: ", tag("code", finding.link), class_="muted small"),
            class_="more",
        )
        return tag("details", summary, more, class_=f"finding {finding.severity}")

    def how_far(self) -> Html:
        """Return reliability diagrams, before and after, and all metrics."""
        remedy, evaluation = self.subject.remedy, self.subject.evaluation
        charts = [chart(evaluation.chart(), "As it is")]
        if remedy is not None and remedy.after is not None and not remedy.changes_nothing:
            assert remedy.chosen is not None
            caption = f"Calibrated by {remedy.chosen.method}, on examples it was not fitted on"
            charts.append(chart(remedy.after.chart(), caption))
        claim = self.subject.probability
        words = (
            f"Bars show what happened where the {claim} below was claimed. On the dashed line both "
            "agree; orange is the difference."
        )
        table = content.explained_metrics(self.subject)
        return section(
            self.name("how-far"),
            self.heading("How far off, and in which direction"),
            tag("p", words, class_="muted"),
            tag("div", *charts, class_="columns"),
            tag(
                "div",
                self.heading("All figures", 1),
                scrollable(table, evaluation.describe()),
                class_="block",
            ),
        )

    def where(self) -> Html:
        """Return ranges of confidence, classes, margins and subgroups."""
        subject, level = self.subject, self.subject.evaluation.level
        name = subject.probability
        ranges = content.parts_table(subject.ranges, name, level)
        caption = "Gap: claimed less happened, in points"
        blocks = [self._block(f"By {name}", scrollable(ranges, caption))]
        blocks.append(self._classes())
        if subject.slices is not None:
            blocks.append(self._slices(subject.slices))
        if subject.evaluation.by:
            blocks.append(self._groups())
        if subject.margins:
            title = "By margin"
            margins = content.parts_table(subject.margins, "margin", level)
            caption = "By difference of the two largest logits, in fifths of the examples"
            blocks.append(self._block(title, scrollable(margins, caption)))
        return section(self.name("where"), self.heading("Where it is off"), *blocks)

    def _block(self, title: str, *inside: Html) -> Html:
        return tag("div", self.heading(title, 1), *inside, class_="block")

    def _classes(self) -> Html:
        subject, most = self.subject, max(10, MOST_CLASSES // len(self.results.subjects))
        ordered = content.worst_first(subject.classes)
        title = "By tag" if subject.word == "tag" else "By class"
        table, count = self.name("classes"), self.name("classes-count")
        caption = f"{title}, those furthest beyond noise first"
        said = f"{len(ordered):,} in all"
        if len(ordered) > most:
            said = f"{most:,} of {len(ordered):,}: the JSON form has all"
        search = tag(
            "div",
            Html(
                f'<input type="search" aria-label="Search {subject.word} names" '
                f'placeholder="Search" data-table="{table}" data-count="{count}">'
            ),
            tag("span", said, id=count, class_="muted small", role="status"),
            class_="tools needs-script",
            hidden="hidden",
        )
        shown = scrollable(
            content.classes_table(ordered[:most], subject),
            caption,
            name=table,
            kind="tall sortable",
        )
        note = [tag("p", said, class_="muted small")] if len(ordered) > most else []
        return self._block(title, *note, *([search] if len(ordered) > 2 else []), shown)

    def _slices(self, slices: Slices) -> Html:
        title = "Subgroups that were searched"
        words = [tag("p", f"{slices.describe()}. {slices.verdict()}")]
        if not slices.is_off:
            return self._block(title, *words)
        table = scrollable(content.slices_table(slices), "Gap: claimed less observed, in points")
        notes = [tag("p", line, class_="muted small") for line in slices.remarks()]
        return self._block(title, *words, table, *notes)

    def _groups(self) -> Html:
        groups = dict(list(self.subject.evaluation.by.items())[:MOST_GROUPS])
        ece = [group["ece"] for group in groups.values()]
        svg = forest_chart(
            list(groups),
            *([e[i] for e in ece] for i in range(3)),
            label="ECE",
            reference=self.subject.evaluation["ece"].value,
        )
        title = f"By {self.subject.by}"
        rows = content.groups_table(self.subject)
        table = scrollable(rows, f"{title}, worst first", kind="sortable tall")
        drawn = chart(svg, "ECE of each; dashed: of all examples")
        columns = tag("div", drawn, table, class_="columns")
        return self._block(title, columns)

    def remedy(self) -> Html:
        """Return the methods that were tried, the recommendation and its price."""
        remedy, heading = self.subject.remedy, self.heading("What fixes it")
        if remedy is None:
            words = f"No method was tried: {self.subject.remedy_error}."
            return section(self.name("fix"), heading, tag("p", words))
        columns = tag("div", self._advice(remedy), _methods_chart(remedy), class_="columns")
        caption = f"{remedy.comparison.describe()}; * within noise of the best"
        remarks = [tag("li", text) for text in remedy.comparison.remarks()]
        return section(
            self.name("fix"),
            heading,
            columns,
            scrollable(content.methods_table(remedy), caption, kind="sortable"),
            tag("ul", *remarks, class_="small muted") if remarks else "",
        )

    def _advice(self, remedy: Remedy) -> Html:
        method = remedy.comparison.choice()
        short = f"Use {method}" if method and not remedy.changes_nothing else "Leave it as it is"
        facts = [joined([tag("dt", n), tag("dd", v)]) for n, v in content.price(remedy)]
        return tag(
            "div",
            tag("p", "Recommendation", class_="muted small"),
            tag("p", short, class_="advice"),
            tag("p", content.reason(remedy)),
            tag("dl", *facts, class_="facts"),
            class_="card",
        )

    def decisions(self) -> Html:
        """Return thresholds: a slider, the curve and guarantees."""
        points, subject = self.subject.decisions, self.subject
        heading = self.heading("When to answer, and when to ask a person")
        if not points:
            words = "Thresholds are for one answer per example; tags have one per tag."
            return section(self.name("decide"), heading, tag("p", words))
        calibrated = subject.remedy is not None and bool(subject.remedy.coverage)
        of = "calibrated confidence" if calibrated else "confidence"
        table = scrollable(content.decisions_table(points), f"Errors among answers, by {of}")
        svg = line_chart(
            [
                Line(
                    "wrong", [p.coverage for p in points], [p.error for p in points], colour="wrong"
                )
            ],
            x_label="share answered",
            y_label="wrong among these",
        )
        columns = tag("div", chart(svg, "The surest answers first"), table, class_="columns")
        return section(self.name("decide"), heading, self._slider(of), columns, *self._guarantees())

    def _slider(self, of: str) -> Html:
        points = self.subject.decisions
        rows = [
            (threshold_text(p.threshold), round(p.coverage, 4), round(p.error, 5)) for p in points
        ]
        data = Html(f'<script type="application/json">{json.dumps(rows)}</script>')
        label = self.name("slider")
        start = min(range(len(points)), key=lambda i: abs(points[i].coverage - 0.9))
        words = tag(
            "output",
            "Answer ",
            _value("answered"),
            " of the examples, and ",
            _value("wrong"),
            f" of these answers are wrong: accept a {of} of at least ",
            _value("threshold"),
            ". The other ",
            _value("left"),
            " go to a person.",
            for_=label,
        )
        return tag(
            "div",
            data,
            tag("label", "Share of the examples to answer", for_=label, class_="muted small"),
            Html(
                f'<input type="range" id="{label}" min="0" max="{len(points) - 1}" value="{start}">'
            ),
            words,
            _stack(),
            class_="slider card needs-script block",
            hidden="hidden",
        )

    def _guarantees(self) -> list[Html]:
        remedy = self.subject.remedy
        if remedy is None or not remedy.thresholds:
            return []
        table = content.guarantees_table(remedy)
        shown = scrollable(table, content.guarantees_caption(remedy))
        return [self._block("With a guarantee", shown)]

    def next_steps(self) -> Html:
        """Return commands and code to copy."""
        made = [snippet(each) for each in content.snippets(self.subject)]
        return section(self.name("now"), self.heading("What to do now"), *made)

    def not_checked(self) -> Html:
        """Return what was not checked."""
        items = [_unchecked(item) for item in self.results.unchecked(self.subject)]
        return section(
            self.name("not-checked"),
            self.heading("What was not checked"),
            tag("ul", *items, class_="open"),
        )


def counted(found: Sequence[Finding]) -> str:
    """Return how many findings of each severity there are, in words."""
    counts = {s: sum(finding.severity == s for finding in found) for s in SEVERITIES[::-1]}
    plural: dict[Severity, str] = {"warn": "warnings", "info": "notes"}
    named = {
        s: content.WORDS[s] if n == 1 else plural.get(s, content.WORDS[s])
        for s, n in counts.items()
    }
    texts = [f"{n} {named[s]}" for s, n in counts.items() if n]
    return ", ".join(texts) or "Nothing was found"


def _methods_chart(remedy: Remedy) -> Html:
    measured = remedy.comparison.measured
    ece = [evaluation["ece"] for evaluation in measured.values()]
    svg = forest_chart(
        list(measured),
        *([e[i] for e in ece] for i in range(3)),
        label="ECE",
        highlighted=remedy.comparison.choice(),
    )
    return chart(svg, f"ECE on {remedy.comparison.n_test:,} examples that no method was fitted on")


def _meters(implied: float, made: float) -> list[Html]:
    """Return bars of the mistakes that confidences imply, and of those that are made."""
    most = max(implied, made, 1e-12)
    kind = "wrong" if made > implied else "right"
    return [
        _meter("Mistakes that its confidences imply", implied, most, "claimed"),
        _meter("Mistakes that it makes", made, most, kind),
    ]


def _meter(name: str, value: float, most: float, kind: str) -> Html:
    fill = tag("i", class_=kind, style=f"width:{100 * value / most:.2f}%")
    return tag(
        "div",
        tag("dt", name),
        tag("dd", percent(value)),
        tag("dd", fill, class_="bar", aria_hidden="true"),
    )


def tile(title: str, value: str, interval: str) -> Html:
    """Return a figure with its title and interval."""
    small = tag("small", interval) if interval else ""
    return tag("div", tag("dt", title), tag("dd", value, small), class_="tile")


def _stack() -> Html:
    """Return a bar that the slider divides, and the key of its colours."""
    bars = [tag("i", class_=kind) for kind in ("right", "wrong")]
    words = {"right": "answered, right", "wrong": "answered, wrong", "rest": "not answered"}
    key = [tag("li", tag("i", class_=kind, aria_hidden="true"), t) for kind, t in words.items()]
    return joined(
        [tag("div", *bars, class_="stack", aria_hidden="true"), tag("ul", *key, class_="key")]
    )


def _value(name: str) -> Html:
    return Html(f'<b data-value="{name}"></b>')


def _unchecked(item: Unchecked) -> Html:
    how = [Html("<br>"), tag("span", item.how, class_="muted small")] if item.how else []
    return tag("li", item.what, *how)
