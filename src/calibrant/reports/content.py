"""Tables and texts of a report, which the page and Markdown share."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calibrant.data.dataset import ARRAYS
from calibrant.display.results import threshold_text
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.registry import METRICS
from calibrant.reports.checks import percent
from calibrant.reports.model import ClassFigures, Coverage, Part, Remedy, Severity, Subject
from calibrant.slices import Slices

WORDS: dict[Severity, str] = {"bad": "serious", "warn": "warning", "info": "note", "good": "good"}
"""Severities of findings, as they are shown."""
SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)
"""Shares of answers that tables of thresholds show."""
CALIBRATED = "calibrated.npz"
"""File that the advised commands write."""
QUESTION = "Can I trust this model's confidence?"


@dataclass(frozen=True)
class Table:
    """Text of the cells of a table; columns ``words`` are no numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    highlighted: Sequence[int] = ()


class Snippet(NamedTuple):
    """Commands or code to copy."""

    title: str
    language: str
    code: str


def metrics_table(subject: Subject) -> Table:
    """All metrics, as ``calibrant evaluate`` shows them."""
    evaluation = subject.evaluation
    headings = (evaluation.heading or "metric", "value", evaluation.interval_heading or "interval")
    return Table(headings, evaluation.table())


def explained_metrics(subject: Subject) -> Table:
    """The same with a sentence about each."""
    table = metrics_table(subject)
    meanings = [_without_math(METRICS[name].summary) for name in subject.evaluation]
    rows = [(*row, meaning) for row, meaning in zip(table.rows, meanings, strict=True)]
    return Table((*table.headings, "meaning"), rows, words=(0, 3))


def _without_math(sentence: str) -> str:
    return re.sub(r",? :math:`[^`]*`", "", sentence).rstrip(".")


def parts_table(parts: Sequence[Part], heading: str, level: float | None) -> Table:
    """Claimed and observed shares of parts."""
    interval = f"{100 * (level or 0.9):g} % interval"
    headings = (heading, "examples", "share", "claimed", "happened", interval, "gap")
    return Table(headings, [_cells(part) for part in parts])


def classes_table(classes: Sequence[ClassFigures], subject: Subject) -> Table:
    """The same by class, with how often it occurs."""
    heading = "tag" if subject.word == "tag" else "predicted class"
    table = parts_table([each.part for each in classes], heading, subject.evaluation.level)
    headings = (*table.headings, "occurs", "mean probability")
    rows = [
        (*cells, percent(each.labelled, 2), percent(each.claimed, 2))
        for cells, each in zip(table.rows, classes, strict=True)
    ]
    return Table(headings, rows)


def _cells(part: Part) -> tuple[str, ...]:
    if not part.n:
        return (part.name, "0", percent(0.0), "-", "-", "", "-")
    return (
        part.name,
        f"{part.n:,}",
        percent(part.share),
        percent(part.confidence),
        percent(part.accuracy),
        f"[{100 * part.low:.1f}, {100 * part.high:.1f}]",
        signed(part.gap),
    )


def signed(gap: float) -> str:
    """Return a gap in points with its sign."""
    return f"{100 * gap:+.1f}"


def worst_first(classes: Sequence[ClassFigures]) -> list[ClassFigures]:
    """Classes whose gap is furthest beyond noise first; those never predicted last."""

    def size(each: ClassFigures) -> tuple[float, float]:
        low, high = each.part.gap_ends
        return (-max(low, -high), -abs(each.part.gap)) if each.part.n else (math.inf, 0.0)

    return sorted(classes, key=size)


def slices_table(slices: Slices) -> Table:
    """Figures of the subgroups that were found."""
    headings, *rows = slices.table()
    return Table(headings, rows)


def groups_table(subject: Subject) -> Table:
    """Figures of the subgroups."""
    headings, *rows = subject.evaluation.subgroup_table()
    return Table(headings, rows)


def methods_table(remedy: Remedy) -> Table:
    """All methods that were tried; a star marks those within the noise of the best."""
    headings, *rows = remedy.comparison.table()
    chosen = remedy.comparison.choice()
    marked = [i for i, row in enumerate(rows) if row[0] == chosen]
    return Table(headings, rows, highlighted=marked)


def reason(remedy: Remedy) -> str:
    """Why the chosen method was chosen."""
    advice = remedy.comparison.advice()
    _, bracket, inside = advice.partition(" (")
    why = inside.removesuffix(").") if bracket else advice
    return f"{why[:1].upper()}{why[1:]}".rstrip(".") + "."


def price(remedy: Remedy) -> list[tuple[str, str]]:
    """What the chosen method costs, as names and values."""
    chosen, before, after = remedy.chosen, remedy.before, remedy.after
    if chosen is None or before is None or after is None:
        return []
    change = after["accuracy"].value - before["accuracy"].value
    return [
        ("accuracy", f"{100 * change:+.2f} points"),
        ("predictions changed", f"{chosen.argmax_changed:,} of {remedy.comparison.n_test:,}"),
        ("time of the fit", f"{chosen.fit_seconds:.1f} s"),
    ]


def decisions_table(points: Sequence[Coverage]) -> Table:
    """Errors among the answers at some shares of answers."""
    shown: list[Coverage] = []
    for share in SHARES:
        nearest = min(points, key=lambda point: abs(point.coverage - share))
        if nearest not in shown:
            shown.append(nearest)
    rows = [
        (percent(point.coverage), threshold_text(point.threshold), percent(point.error, 2))
        for point in shown
    ]
    return Table(("answered", "confidence at least", "wrong among these"), rows)


def guarantees_table(remedy: Remedy) -> Table:
    """Thresholds that keep an error rate with certainty."""
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


def guarantees_caption(remedy: Remedy) -> str:
    """Return what is guaranteed, and for which calibrator: another fit has other confidences."""
    assert remedy.chosen is not None
    level = f"{100 * remedy.thresholds[0].level:g} %"
    return (
        f"Each threshold keeps its error rate with {level} certainty, for {remedy.chosen.method} "
        f"as fitted here, on {remedy.comparison.fitted_on}"
    )


def overview_table(subjects: Sequence[Subject], answers: Sequence[str]) -> Table:
    """Several sets of predictions side by side."""
    interval = subjects[0].evaluation.interval_heading or "interval"
    headings = ("predictions", "trust?", "examples", "accuracy", "confidence", "ECE", interval)
    rows = []
    for subject, answer in zip(subjects, answers, strict=True):
        shown = dict(zip(subject.evaluation, subject.evaluation.table(), strict=True))
        after = subject.remedy.after if subject.remedy else None
        rows.append(
            (
                subject.name,
                answer,
                f"{subject.evaluation.n:,}",
                shown["accuracy"][1],
                percent(subject.answers.confidence),
                *shown["ece"][1:],
                percent(after["ece"].value, 2) if after else "-",
            )
        )
    return Table((*headings, "calibrated ECE"), rows, words=(0, 1))


def snippets(subject: Subject) -> list[Snippet]:
    """Commands and code for what to do next."""
    if subject.remedy is not None and subject.remedy.changes_nothing:
        return _to_keep(subject)
    return [*_to_calibrate(subject), *_to_keep(subject)]


def _path(subject: Subject) -> str:
    return "predictions.npz" if subject.path == ARRAYS else subject.path


def _to_calibrate(subject: Subject) -> list[Snippet]:
    path, file = _path(subject), shlex.quote(_path(subject))
    remedy = subject.remedy
    method = remedy.chosen.method if remedy and remedy.chosen else "auto"
    fitted_on = remedy.fit_split if remedy else ""
    flag = _split_flag(fitted_on, "val")
    option = f", split={fitted_on!r}" if flag else ""
    if subject.word == "tag":
        flag, option = f"{flag} --multilabel", f'{option}, estimand="multilabel"'
    elif remedy and remedy.may_change_predictions:
        flag, option = f"{flag} --choices", f'{option}, options={{"keep_argmax": False}}'
    commands = (
        f"calibrant fit {file} --method {method}{flag} -o calibrator",
        f"calibrant apply calibrator {file} -o {CALIBRATED}",
        "calibrant export calibrator -o calibrator.onnx",
    )
    code = (
        "import calibrant as cal\n",
        f'calibrator = cal.fit({path!r}, method="{method}"{option})',
        'cal.save(calibrator, "calibrator")',
        "probs = calibrator.predict_proba(logits)",
    )
    return [
        Snippet("Fit a calibrator, and apply it", "bash", "\n".join(commands)),
        Snippet("The same in Python", "python", "\n".join(code)),
    ]


def _to_keep(subject: Subject) -> list[Snippet]:
    flag = _split_flag(subject.split, "test")
    flag += " --multilabel" if subject.word == "tag" else ""
    remedy = subject.remedy
    file, evaluation = shlex.quote(_path(subject)), subject.evaluation
    if remedy is not None and remedy.after is not None and not remedy.changes_nothing:
        file, evaluation = CALIBRATED, remedy.after
    gate = f"calibrant evaluate {file}{flag} --max-ece {_limit(evaluation['ece']):g}"
    stop = Snippet("Stop a release that is worse", "bash", gate)
    if subject.word == "tag":  # a monitor takes exclusive classes only
        return [stop]
    watch = "calibrant monitor today.npz --calibrator calibrator --state watch.json --fail"
    return [
        Snippet("Watch it in use: a window of labelled examples at a time", "bash", watch),
        stop,
    ]


def _split_flag(name: str, usual: str) -> str:
    """Return the option that names a split; empty for one that the command takes by itself."""
    return f" --split {shlex.quote(name)}" if name not in ("", usual) else ""


def _limit(ece: Estimate) -> float:
    """Return a limit that the ECE of other examples will keep too, if nothing changes."""
    most = ece.value if math.isnan(ece.high) else max(ece.value, ece.high)
    return max(0.02, math.ceil(100 * most) / 100)
