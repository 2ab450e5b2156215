"""Tables of a report, which all its forms share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from calibrant._core.showing import threshold_text
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.registry import METRICS
from calibrant.show.metrics import metrics_table
from calibrant.show.report.checks import percent
from calibrant.show.report.model import ClassFigures, Coverage, Part, Remedy, Subject
from calibrant.show.tables import Table

SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)
"""Shares of answers that tables of thresholds show."""


def explained_metrics(evaluation: Evaluation) -> Table:
    """Return all metrics with a sentence about each."""
    table = metrics_table(evaluation)
    rows = [
        (*row, re.sub(r",? :math:`[^`]*`", "", METRICS[name].summary).rstrip("."))
        for row, name in zip(table.rows, evaluation, strict=True)
    ]
    return Table((*table.headings, "meaning"), rows, words=(0, 3))


def parts_table(parts: Sequence[Part], heading: str, level: float | None) -> Table:
    """Return claimed and observed shares of parts."""
    interval = f"{100 * (level or 0.9):g} % interval"
    headings = (heading, "examples", "share", "claimed", "happened", interval, "gap")
    return Table(headings, [_cells(part) for part in parts], bars=headings.index("gap"))


def _cells(part: Part) -> tuple[str, ...]:
    if not part.n:
        return (part.name, "0", percent(0.0), "-", "-", "", "-")
    return (
        *(part.name, f"{part.n:,}", percent(part.share)),
        *(percent(part.confidence), percent(part.accuracy)),
        *(f"[{100 * part.low:.1f}, {100 * part.high:.1f}]", f"{100 * part.gap:+.1f}"),
    )


def classes_table(classes: Sequence[ClassFigures], subject: Subject) -> Table:
    """Return the same by class, with how often it occurs."""
    heading = "tag" if subject.word == "tag" else "predicted class"
    table = parts_table([each.part for each in classes], heading, subject.evaluation.level)
    rows = [
        (*cells, percent(each.labelled, 2), percent(each.claimed, 2))
        for cells, each in zip(table.rows, classes, strict=True)
    ]
    return replace(table, headings=(*table.headings, "occurs", "mean probability"), rows=rows)


def worst_first(classes: Sequence[ClassFigures]) -> list[ClassFigures]:
    """Return classes whose gap is furthest beyond noise first; those never predicted last."""

    def size(each: ClassFigures) -> tuple[float, float]:
        low, high = each.part.gap_ends
        return (-max(low, -high), -abs(each.part.gap)) if each.part.n else (math.inf, 0.0)

    return sorted(classes, key=size)


def decisions_table(points: Sequence[Coverage]) -> Table:
    """Return errors among the answers at some shares of answers."""
    nearest = [min(points, key=lambda point: abs(point.coverage - share)) for share in SHARES]
    rows = [
        (percent(point.coverage), threshold_text(point.threshold), percent(point.error, 2))
        for point in dict.fromkeys(nearest)
    ]
    return Table(("answered", "confidence at least", "wrong among these"), rows)


def guarantees_table(remedy: Remedy) -> Table:
    """Return thresholds that keep an error rate with certainty."""
    rows = []
    for each in remedy.thresholds:
        limit = percent(each.max_error)
        if math.isinf(each.threshold):
            rows.append((limit, "none found", "-", "-"))
        else:
            shares = percent(each.coverage), percent(each.error, 2)
            rows.append((limit, threshold_text(each.threshold), *shares))
    headings = ("errors at most", "confidence at least", "answered", "observed errors")
    return Table(headings, rows)


def overview_table(subjects: Sequence[Subject], answers: Sequence[str]) -> Table:
    """Return several sets of predictions side by side."""
    interval = subjects[0].evaluation.interval_heading or "interval"
    headings = ("predictions", "trust?", "examples", "accuracy", "confidence", "ECE", interval)
    rows = []
    for subject, answer in zip(subjects, answers, strict=True):
        shown = dict(zip(subject.evaluation, subject.evaluation.table(), strict=True))
        after = subject.remedy.after if subject.remedy else None
        rows.append(
            (
                *(subject.name, answer, f"{subject.evaluation.n:,}", shown["accuracy"][1]),
                *(percent(subject.answers.confidence), *shown["ece"][1:]),
                percent(after["ece"].value, 2) if after else "-",
            )
        )
    return Table((*headings, "calibrated ECE"), rows, words=(0, 1))
