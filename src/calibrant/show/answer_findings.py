"""Findings about the graded answers of a log, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.showing import threshold_text
from calibrant.llm.answers.logs.study import AnswerStudy
from calibrant.llm.answers.rows import is_cut_off
from calibrant.metrics.intervals import share_interval
from calibrant.show.pages import SEVERITIES, Severity
from calibrant.show.report.findings import LARGE, SIGNIFICANT, SMALL, cannot_tell
from calibrant.show.report.model import Part, binomial_test, holm
from calibrant.show.style import percent, points

_FEW_OF_A_KIND = 10
"""Answers that a kind of question must have among those that the map was not fitted on."""
_USEFUL = 0.7
"""AUROC from which a confidence tells right answers from wrong ones more than poorly."""
_SHOWN = 5
"""Kinds that the evidence names."""


class _Note(NamedTuple):
    """One finding: how serious it is, the numbers that show it, and what to do about it."""

    severity: Severity
    title: str
    evidence: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.title}: {self.evidence}"


def _notes_of(study: AnswerStudy) -> list[_Note]:
    """Return all findings, the most serious first."""
    notes = [note for note in (check(study) for check in _CHECKS) if note is not None]
    return sorted(notes, key=lambda note: -SEVERITIES.index(note.severity))


def _verdict_of(study: AnswerStudy) -> _Note:
    """Return the answer to the question whether confidences are chances to be right."""
    evaluation, part = study.before, _whole(study)
    value, low, high = evaluation["ece"]
    said = (
        f"The mean confidence is {percent(part.confidence)}, and {percent(part.accuracy)} of the "
        f"answers are right."
    )
    if evaluation.test is not None and evaluation.test.p_value >= SIGNIFICANT and low < SMALL:
        if cannot_tell(evaluation):
            may = f"The error may be {percent(low)} or {percent(high)}."
            return _Note("info", "Too few answers to tell", f"{said} {may}")
        return _Note("good", "Yes", f"{said} A confidence is off by {percent(value)} on average.")
    after = f"With the map the error is {percent(study.after['ece'].value)}."
    evidence = f"{said} A confidence is off by {percent(value)}. {after}"
    return _Note("bad", "No", evidence) if low >= LARGE else _Note("warn", "Not quite", evidence)


def _whole(study: AnswerStudy) -> Part:
    """Return the confidences as they are, of all answers."""
    return _part("all", study.confidence, study.correct, ~np.isnan(study.confidence))


def kinds(study: AnswerStudy) -> list[Part]:
    """Return the calibrated confidences of each kind of question, where the map was not fitted.

    The kind that is furthest beyond noise comes first. Empty if there is only one.
    """
    names = np.array([str(row.get("kind") or "") for row in study.rows])
    chances = np.array([row["calibrated"] for row in study.rows])
    different = sorted(set(names.tolist()))
    chosen = [(name, (names == name) & study.held_out) for name in different]
    parts = [
        _part(name, chances, study.correct, those)
        for name, those in chosen
        if those.sum() >= _FEW_OF_A_KIND and len(different) > 1
    ]
    return sorted(parts, key=lambda part: part.p_value)


def _part(name: str, confidence: FloatArray, correct: BoolArray, those: BoolArray) -> Part:
    count, claimed = int(those.sum()), float(confidence[those].mean())
    right, low, high = share_interval(float(correct[those].mean()), count, 0.9)
    p_value = binomial_test(right * count, count, claimed)
    return Part(name, count, count / len(correct), claimed, right, low, high, p_value)


def _direction(study: AnswerStudy) -> _Note | None:
    part = _whole(study)
    low, high = part.gap_ends
    if part.p_value >= SIGNIFICANT or low <= 0 <= high:
        return None
    evidence = (
        f"The mean confidence is {percent(part.confidence)}, but {percent(part.accuracy)} "
        f"[{100 * part.low:.1f}, {100 * part.high:.1f}] of the answers are right."
    )
    severity: Severity = "bad" if abs(part.gap) >= LARGE else "warn"
    title = f"Confidences are too {'high' if part.gap > 0 else 'low'}"
    return _Note(severity, title, evidence, "Use the map instead of the confidences as they are.")


def _order(study: AnswerStudy) -> _Note:
    value, low, high = study.before["auroc"]
    if math.isnan(value):
        evidence = "all answers are right, or all are wrong."
        return _Note("warn", "Nothing to tell apart", evidence, "Grade harder or easier questions.")
    shown = f"AUROC {percent(value)} [{100 * low:.1f}, {100 * high:.1f}]"
    if low > 0.5 and high >= _USEFUL:
        advice = "Thresholds can make use of it: see which answers to accept."
        return _Note("good", "Confidence tells right answers from wrong ones", f"{shown}.", advice)
    severity: Severity = "warn"
    if low > 0.5:
        title = "Confidence tells right answers from wrong ones poorly"
        advice = "Another signal, or several together, may do better."
    elif high >= _USEFUL:
        title = "Too few answers to see if confidence tells right from wrong"
        advice = "Grade more answers."
    else:
        severity, title = "bad", "Confidence does not tell right answers from wrong ones"
        advice = "No map can mend this: use another signal, such as agreement of several samples."
    return _Note(severity, title, f"{shown}; 50 % is chance.", advice)


def _map(study: AnswerStudy) -> _Note:
    before, after = study.before["ece"], study.after["ece"]
    losses = study.before["nll"].value, study.after["nll"].value
    evidence = (
        f"the log loss is {losses[0]:.3f} before and {losses[1]:.3f} after, the calibration error "
        f"(ECE) {percent(before.value)} and {percent(after.value)} [{100 * after.low:.1f}, "
        f"{100 * after.high:.1f}]; each answer by a map of others."
    )
    if losses[1] < losses[0]:
        advice = "Apply the map to new answers of this model, to questions in the same form."
        return _Note("good", "The map helps", evidence, advice)
    advice = "Keep the confidences as they are, or grade more answers."
    return _Note("warn", "The map does not help", evidence, advice)


def _signals(study: AnswerStudy) -> _Note | None:
    if study.signals is None:
        if not study.log.has_signals:
            return None
        evidence = f"{int(study.correct.sum()):,} of {len(study.rows):,} answers are right."
        title = "Too few answers to compare signals"
        return _Note("info", title, evidence, "Grade more; the map is one of the confidence alone.")
    fitted, alone = study.signals.calibrator, study.signals.alone
    best, together = study.signals.best, study.signals.together
    evidence = f"of {len(fitted.names_)} signals {best} is the best alone"
    if best in alone:
        loss, auroc = alone[best]["nll"].value, alone[best]["auroc"].value
        evidence += f" (log loss {loss:.3f}, AUROC {percent(auroc)})"
    title = "The map combines several signals"
    if together is not None:
        evidence += f"; together they have a log loss of {together['nll'].value:.3f}"
        helps = best in alone and together["nll"].value < alone[best]["nll"].value
        title = "Signals together do better than each" if helps else "One signal is enough"
    advice = "New answers need the same signals, computed in the same way."
    return _Note("info", title, f"{evidence}.", advice)


def _promise(study: AnswerStudy) -> _Note:
    found = study.threshold
    if math.isinf(found.threshold):
        most, certain = (f"{100 * share:.4g} %" for share in (found.max_error, found.certainty))
        evidence = (
            f"on {found.n:,} answers no confidence is high enough to show an error of at most "
            f"{most} with {certain} certainty."
        )
        advice = "Allow more errors, grade more answers, or use a better signal."
        return _Note("warn", "No threshold keeps the error rate", evidence, advice)
    evidence = (
        f"{found.promise()} It accepts calibrated chances from {threshold_text(found.threshold)} "
        f"on: {percent(found.coverage)} of {found.n:,} answers that the map was not fitted on, of "
        f"which {percent(found.error)} are wrong."
    )
    advice = "The guarantee is for questions like these, from the same model and prompt."
    return _Note("good", "A threshold with a guarantee", evidence, advice)


def _kinds(study: AnswerStudy) -> _Note | None:
    parts = kinds(study)
    adjusted = holm([part.p_value for part in parts])
    off = [part for part, p in zip(parts, adjusted, strict=True) if p < SIGNIFICANT]
    if not off:
        return None
    named = [
        f"{part.name} ({percent(part.confidence)} claimed, {percent(part.accuracy)} right)"
        for part in off[:_SHOWN]
    ]
    more = f", and {len(off) - _SHOWN} more" if len(off) > _SHOWN else ""
    advice = "Fit a map for each of these kinds; the guarantee holds for all kinds together."
    title = "Some kinds of questions are off after calibration"
    return _Note("warn", title, f"{', '.join(named)}{more}.", advice)


def _options(study: AnswerStudy) -> _Note | None:
    if study.options is None:
        return None
    before, after = study.options["before"], study.options["after"]
    gain = after["accuracy"].value - before["accuracy"].value
    evidence = (
        f"accuracy {percent(before['accuracy'].value)} before and "
        f"{percent(after['accuracy'].value)} after ({points(gain)}), ECE "
        f"{percent(before['ece'].value)} and {percent(after['ece'].value)}, Brier score "
        f"{before['brier'].value:.3f} and {after['brier'].value:.3f}."
    )
    severity: Severity = "good" if after["nll"].value < before["nll"].value else "info"
    advice = "calibrant fit options.npz fits the calibrator of the options."
    return _Note(severity, "Options, calibrated and scored again", evidence, advice)


def _constant(study: AnswerStudy) -> _Note | None:
    sure = float((study.confidence >= 1).mean())
    if sure < 0.05:
        return None
    evidence = f"{percent(sure)} of the confidences are exactly 1."
    advice = "They cannot be told apart: a signal with more values orders answers better."
    return _Note("info", "Many confidences are 1", evidence, advice)


def _data(study: AnswerStudy) -> _Note | None:
    truncated = sum(map(is_cut_off, study.rows))
    groups = study.log.answers.groups
    repeated = len(groups) - len({*groups.tolist()})
    facts = {
        f"{study.log.left_out:,} answers of the log were left out": study.log.left_out,
        f"{repeated:,} answers are to questions that come more than once, and the guarantee "
        "takes answers as independent": repeated,
        f"{truncated:,} of {len(study.rows):,} answers were cut off at their largest length": (
            truncated
        ),
    }
    said = "; ".join(text for text, count in facts.items() if count)
    advice = "Look at these answers before you rely on the figures."
    return _Note("info", "About the data", f"{said}.", advice) if said else None


_CHECKS: Sequence[Callable[[AnswerStudy], _Note | None]] = (
    *(_direction, _order, _map, _signals, _promise, _kinds, _options, _constant, _data),
)
