"""What the forms of a report show of one set of predictions: sentences, tables and charts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from calibrant._core.showing import threshold_text
from calibrant.calibrators.auto import Auto
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.registry import METRICS
from calibrant.metrics.reliability import Reliability
from calibrant.show.charts import Line, forest_chart, line_chart
from calibrant.show.charts.curves import WIDEST
from calibrant.show.html import Html
from calibrant.show.metrics import _metrics_table, _reliability_svg, _subgroup_table
from calibrant.show.pages import SEVERITIES, SEVERITY_NAMES
from calibrant.show.report.findings import BAD, DATA_LOOK_WRONG, Finding, _data_look_wrong
from calibrant.show.report.model import (
    MIN_EXAMPLES_OF_CLASS,
    ClassFigures,
    Part,
    Remedy,
    Subject,
)
from calibrant.show.report.verdict import Unchecked, Verdict, _request, _snippets, _subgroups_text
from calibrant.show.slices import _slices_table
from calibrant.show.style import percent
from calibrant.show.tables import Table
from calibrant.show.workflows import _methods_table

MAX_CLASSES = 1000
"""Rows of the tables of classes, over all sets of predictions of a page."""
MAX_GROUPS = 40
"""Subgroups that the chart shows."""
SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)
"""Shares of answers that the table of thresholds shows."""
ANSWERED, CASES = (0.9, 0.8), 1000
"""Shares of answers whose costs are told, and the cases of which."""


def counted(found: Sequence[Finding]) -> str:
    """Return how many findings of each severity there are, in words."""
    plural = {**SEVERITY_NAMES, "warn": "warnings", "info": "notes"}
    counts = {s: sum(finding.severity == s for finding in found) for s in SEVERITIES[::-1]}
    texts = [f"{n} {SEVERITY_NAMES[s] if n == 1 else plural[s]}" for s, n in counts.items() if n]
    return ", ".join(texts) or "Nothing was found"


def _view_of(
    subject: Subject,
    verdict: Verdict,
    findings: list[Finding],
    unchecked: Sequence[Unchecked] = (),
    *,
    name: str = "",
    sets: int = 1,
) -> SimpleNamespace:
    """Return what templates show of one set of predictions.

    ``name`` tells its anchors from those of others, of which there are ``sets`` on the page.
    """
    remedy = subject.remedy if subject.remedy is not None and subject.remedy.helps else None
    if _data_look_wrong(findings):  # neither subgroups nor a gain on such data say anything
        subject, remedy = replace(subject, slices=None), None
    return SimpleNamespace(
        subject=subject,
        verdict=verdict,
        findings=findings,
        unchecked=unchecked,
        counted=counted(findings),
        name=name,
        prefix=f"{name}-" if name else "",
        level=3 if name else 2,  # of the headings of sections
        request=_request(subject, verdict, findings),
        snippets=_snippets(subject, findings),
        **_how_far(subject, verdict, remedy),
        **_where(subject, verdict, max(10, MAX_CLASSES // sets)),
        **_remedy(subject, verdict, findings, remedy),
        **_decisions(subject, remedy),
    )


def _how_far(subject: Subject, verdict: Verdict, remedy: Remedy | None) -> dict[str, Any]:
    """Return the examples, the figures that matter most, all figures, and the diagrams."""
    evaluation, part = subject.evaluation, subject.answers
    where = f"{subject.split} split of {subject.path}" if subject.split else subject.path
    count = f"{evaluation.n:,} examples, {evaluation.classes:,} classes"
    if subject.word == "tag":
        count = f"{evaluation.n:,} labels of {evaluation.classes:,} tags"
    ignored = f", {subject.ignored:,} labels ignored" if subject.ignored else ""
    of = f" of {subject.probability}" if evaluation.probability else ""
    interval = f", {evaluation.interval_heading} {verdict.interval}".rstrip(", ")
    shares = {"Expected mistakes": 1 - part.confidence, "Mistakes made": 1 - part.accuracy}
    kinds = ("claimed", "wrong" if part.gap > 0 else "right")
    titles = {"accuracy": "Accuracy", "ece": "Calibration error (ECE)"}
    titles |= {"nll": "Log loss", "auroc": "Tells right from wrong (AUROC)"}
    cells, after = _cells(evaluation), None if remedy is None else remedy.after
    curves = [subject.curve()]
    diagrams = [(_reliability_svg(curves[0], _ece_text(evaluation)), "As it is")]
    tiles = [(title, *cells[key]) for key, title in titles.items()]
    if after is not None:
        caption = "After calibration, on examples it was not fitted on"
        curves.append(subject.curve(after))
        diagrams.append((_reliability_svg(curves[1], _ece_text(after)), caption))
        ends = _cells(after)
        tiles = [(t, cells[k][0], f"after calibration {ends[k][0]}") for k, t in titles.items()]
    table = _metrics_table(evaluation)
    rows = [
        (*row, subject.with_names(re.sub(r",? :math:`[^`]*`", "", METRICS[key].summary)))
        for row, key in zip(table.rows, evaluation, strict=True)
    ]
    headings = (*map(subject.with_names, table.headings), "meaning")
    undefined = {"-": "undefined"}  # such as the AUROC where no answer is wrong
    tiles = [(title, undefined.get(value, value), below) for title, value, below in tiles]
    return {
        "about": f"{where}: {count}{ignored}",
        "measured": f"calibration error (ECE){of}{interval}",
        "usual": subject.usual_error,
        "meters": [
            (title, percent(share), f"{100 * share:.2f}", kind)
            for (title, share), kind in zip(shares.items(), kinds, strict=True)
        ],
        "tiles": tiles,
        "diagrams": diagrams,
        "wide": f"{100 * WIDEST:g} points" if any(map(_has_wide_bin, curves)) else "",
        "metrics": Table(headings, [(*row[:-1], row[-1].rstrip(".")) for row in rows], (0, 3)),
    }


def _has_wide_bin(curve: Reliability) -> bool:
    """Return True if the diagram draws a bin narrower than it is."""
    return bool((np.diff(curve.edges)[curve.share > 0] > WIDEST + 1e-9).any())


def _where(subject: Subject, verdict: Verdict, most: int) -> dict[str, Any]:
    """Return ranges, margins, classes and subgroups; at most so many classes."""

    def beyond_noise(each: ClassFigures) -> tuple[float, float]:
        low, high = each.part.gap_ends
        return (-max(low, -high), -abs(each.part.gap)) if each.part.n else (math.inf, 0.0)

    level, by = subject.evaluation.level, subject.evaluation.by
    ordered = sorted(subject.classes, key=beyond_noise)
    ordered.sort(key=lambda each: each.part.n < MIN_EXAMPLES_OF_CLASS)  # the others come last
    shown = ordered[:most]
    many = [each for each in shown if each.part.n >= MIN_EXAMPLES_OF_CLASS]
    left_out = f"{len(shown):,} of {len(ordered):,}: the JSON form has all"
    groups = dict(list(by.items())[:MAX_GROUPS])
    ece = subject.evaluation["ece"].value
    margin = f"margin of the top two {subject.compared}"
    return {
        "ranges": parts_table(subject.ranges, subject.probability, level),
        "margins": parts_table(subject.margins, margin, level),
        "by_class": "By tag" if subject.word == "tag" else "By class",
        "classes": _class_table(subject, many),
        "few_classes": _class_table(subject, shown[len(many) :]),
        "worst_classes": _class_table(subject, ordered[:10]),
        "classes_shown": left_out if len(shown) < len(ordered) else f"{len(ordered):,} in all",
        "subgroups": _subgroups_text(subject, verdict),
        "slices": None if subject.slices is None else _slices_table(subject.slices),
        "groups": _subgroup_table(subject.evaluation) if by else None,
        "groups_chart": _ece_chart(groups, reference=ece) if by else None,
    }


def _class_table(subject: Subject, classes: Sequence[ClassFigures]) -> Table:
    heading = "tag" if subject.word == "tag" else "predicted class"
    table = parts_table([each.part for each in classes], heading, subject.evaluation.level)
    rows = [
        (*cells, percent(each.labelled, 2), percent(each.claimed, 2))
        for cells, each in zip(table.rows, classes, strict=True)
    ]
    return replace(table, headings=(*table.headings, "occurs", "mean probability"), rows=rows)


def _remedy(
    subject: Subject, verdict: Verdict, findings: Sequence[Finding], remedy: Remedy | None
) -> dict[str, Any]:
    """Return the advice with its reasons, what each choice costs, and all methods."""
    advice, reasons = "Leave it as it is", ["Nothing speaks against the confidences as they are."]
    against = [each for each in findings if each.code == "CAL019"]
    wrong = [each for each in findings if each.code == DATA_LOOK_WRONG]
    if wrong:
        advice, reasons = "Check the data first", [wrong[0].evidence, wrong[0].fix]
    elif remedy is not None and remedy.before and remedy.after and remedy.chosen:
        advice = "Calibrate it: correct the stated confidences"
        before, after = (100 * each["ece"].value for each in (remedy.before, remedy.after))
        seconds = remedy.chosen.fit_seconds
        took = f"{seconds:.0f} seconds" if seconds >= 1.5 else "about a second or less"
        reasons = [
            f"On examples that it was not fitted on, a stated {subject.probability} is off by "
            f"{after:.1f} points on average, instead of {before:.1f}.",
            f"{remedy.price(subject.counted)} The fit takes {took}.",
        ]
        auto = isinstance(remedy.chosen.calibrator, Auto) and remedy.keep_argmax == "auto"
        if remedy.chosen.argmax_changed and auto:
            reasons.append("To keep every prediction, add --set keep_argmax=true to calibrant fit.")
    elif against:
        advice = advice if verdict.severity == "good" else "Label more examples, then look again"
        reasons = [against[0].evidence, against[0].fix]
    elif verdict.severity in BAD:
        advice, reasons = "Compare methods of calibration", ["None was tried: calibrant compare."]
    tried = None if subject.remedy is None or wrong else subject.remedy.comparison
    return {
        "advice": advice,
        "reasons": reasons,
        "choices": _choices(subject, remedy) if subject.coverage and not wrong else None,
        "methods": tried and _methods_table(tried),
        "methods_chart": tried and _ece_chart(tried.measured, highlighted=tried.choice()),
    }


def _choices(subject: Subject, remedy: Remedy | None) -> Table:
    """Return what each choice costs, in mistakes and in work for people."""
    choices = {"Use it as it is, and trust all answers": subject.coverage[-1]}
    asking, points = "Ask", subject.coverage if remedy is None else remedy.coverage
    if remedy is not None:
        choices["Calibrate, and trust all answers"] = points[-1]
        asking = "Calibrate, and ask"
    for share in ANSWERED:
        point = min(points, key=lambda each: abs(each.coverage - share))
        if abs(point.coverage - share) < 0.05:
            choices[f"{asking} a person about the least sure {100 * (1 - share):.0f} %"] = point
    rows = []
    for choice, point in choices.items():
        answered = round(CASES * point.coverage)
        mistakes = (CASES * point.coverage * share for share in (point.error, point.expected))
        rows.append((choice, str(answered), str(CASES - answered), *(f"{x:.0f}" for x in mistakes)))
    return Table(
        ("choice", "answered", "sent to a person", "mistakes", "mistakes it expects"), rows
    )


def _decisions(subject: Subject, remedy: Remedy | None) -> dict[str, Any]:
    """Return errors among the surest answers, as a table, a chart and a slider; and guarantees."""
    points = subject.coverage if remedy is None else remedy.coverage
    decided = {
        "decided_by": "confidence" if remedy is None else "calibrated confidence",
        "decisions": None,
        "guarantees": None if remedy is None or not remedy.thresholds else _guarantees(remedy),
    }
    if not points:
        return decided
    nearest = [min(points, key=lambda point: abs(point.coverage - share)) for share in SHARES]
    rows = [
        (percent(point.coverage), threshold_text(point.threshold), percent(point.error, 2))
        for point in dict.fromkeys(nearest)
    ]
    shares, errors = [p.coverage for p in points], [p.error for p in points]
    line = Line("wrong", shares, errors, colour="wrong")
    return {
        **decided,
        "decisions": Table(("answered", "confidence at least", "wrong among these"), rows),
        "decisions_chart": line_chart(
            [line], x_label="share answered", y_label="wrong among these"
        ),
        "slider": [
            (threshold_text(p.threshold), round(p.coverage, 4), round(p.error, 5)) for p in points
        ],
        "slider_start": min(range(len(points)), key=lambda i: abs(shares[i] - 0.9)),
    }


def _guarantees(remedy: Remedy) -> Table:
    """Return thresholds that keep an error rate with certainty; another fit has other ones."""
    assert remedy.chosen is not None
    rows = []
    for each in remedy.thresholds:
        cells: tuple[str, ...] = ("none found", "-", "-")
        if math.isfinite(each.threshold):
            shares = percent(each.coverage), percent(each.error, 2)
            cells = (threshold_text(each.threshold), *shares)
        rows.append((percent(each.max_error), *cells))
    caption = (
        f"Each error rate holds with {100 * remedy.thresholds[0].certainty:g} % certainty, for "
        f"the confidences of {remedy.chosen.method} as fitted on the {remedy.comparison.fitted_on}"
    )
    headings = ("errors at most", "confidence at least", "answered", "observed errors")
    return Table(headings, rows, caption=caption)


def parts_table(parts: Sequence[Part], heading: str, level: float | None) -> Table:
    """Return stated and observed shares of parts."""
    interval = f"{100 * (level or 0.9):g} % interval"
    headings = (heading, "examples", "share", "stated", "observed", interval, "gap")
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


def _overview_table(subjects: Sequence[Subject], answers: Sequence[str]) -> Table:
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


def _ece_chart(
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
