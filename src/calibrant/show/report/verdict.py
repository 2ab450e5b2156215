"""The answer to the first question, whether the confidences can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from calibrant.show.report.checks import (
    LARGE,
    SIGNIFICANT,
    SMALL,
    cannot_tell,
    percent,
    points,
    worst_range,
)
from calibrant.show.report.findings import Finding
from calibrant.show.report.model import Severity, Subject


@dataclass(frozen=True)
class Verdict:
    """The answer in plain words.

    Attributes
    ----------
    severity : {"good", "info", "warn", "bad"}
    answer : str
        A few words, such as "No".
    sentence : str
        What that means in practice, with numbers.
    figure, interval : str
        The calibration error, as text; the interval is empty without one.
    """

    severity: Severity
    answer: str
    sentence: str
    figure: str
    interval: str

    def __str__(self) -> str:
        return f"{self.answer}. {self.sentence}"


def verdict_of(subject: Subject, findings: Sequence[Finding]) -> Verdict:
    """Answer the question for one set of predictions."""
    rows = dict(zip(subject.evaluation, subject.evaluation.table(), strict=True))
    figure, interval = rows["ece"][1:]
    codes = {finding.code: finding for finding in findings}
    if "CAL010" in codes:
        doubt = codes["CAL010"].evidence
        return Verdict("bad", "Check the data first", doubt, figure, interval)
    severity = _severity(subject, codes)
    answers = {"good": "Yes", "info": "Too few examples to tell", "warn": "Not quite", "bad": "No"}
    sentence = f"{_claims(subject)} {_conclusion(subject, severity)}"
    return Verdict(severity, answers[severity], sentence, figure, interval)


def _severity(subject: Subject, codes: dict[str, Finding]) -> Severity:
    evaluation = subject.evaluation
    value, low, _ = evaluation["ece"]
    if evaluation.test is None:  # without intervals
        return "bad" if value >= LARGE else "warn" if value >= 2 * SMALL else "good"
    # near its level, the test may see nothing where the interval is far from zero
    if evaluation.test.p_value >= SIGNIFICANT and low < SMALL:
        return "info" if cannot_tell(evaluation) else "good"
    over = codes.get("CAL001")
    if low >= LARGE or (over is not None and over.severity == "bad"):
        return "bad"
    return "warn" if low >= SMALL or worst_range(subject) else "good"


def _claims(subject: Subject) -> str:
    part = subject.answers
    if subject.evaluation.estimand == "multilabel":
        return (
            f"Over all decisions about tags it is {percent(part.confidence)} sure on average and "
            f"right in {percent(part.accuracy)}."
        )
    return (
        f"On average it is {percent(part.confidence)} sure of its answers and right in "
        f"{percent(part.accuracy)} of them."
    )


def _conclusion(subject: Subject, severity: Severity) -> str:
    part, ece = subject.answers, subject.evaluation["ece"]
    if severity == "info":
        return (
            f"With {subject.evaluation.n:,} {subject.counted} the error could be anywhere from "
            f"{percent(ece.low)} to {percent(ece.high)}."
        )
    if severity == "good":
        return f"A stated {subject.probability} is off by {percent(ece.value, 2)} on average."
    worst = worst_range(subject)
    if ece.low < SMALL and worst is not None:
        what = "the " * (subject.word == "tag") + subject.probability
        return (
            f"On average that is close, but not everywhere: where {what} is "
            f"{worst.name}, {percent(worst.confidence)} is claimed and {percent(worst.accuracy)} "
            "happens."
        )
    wrong = (1 - part.accuracy) / max(1 - part.confidence, 1e-12)
    if part.gap_ends[0] > 0 and 1.2 <= wrong < 1000:
        return f"It makes {wrong:.1f} times as many mistakes as its confidence implies."
    if part.gap_ends[0] > 0:
        return f"Its confidences are {points(part.gap)} too high."
    if part.gap_ends[1] < 0:
        return f"It is right more often than it says, by {points(-part.gap)}."
    return f"The stated {subject.probability} is too high in some places and too low in others."
