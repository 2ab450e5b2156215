"""From the graded answers of a log to a map, a threshold with a promise, and figures."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrant._core.checks import BoolArray
from calibrant.decide.thresholds import Threshold, threshold
from calibrant.display.results import one_line
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.llm.answers.graded import GradedAnswers, Row
from calibrant.llm.answers.grading import FEWEST
from calibrant.llm.logs.options import Rescored, option_logits, rescore
from calibrant.llm.logs.reading import Log
from calibrant.llm.tokens.evaluate import ConfidenceEvaluation
from calibrant.llm.workflows import (
    apply_answers,
    calibrated,
    cross_validated_answers,
    fit_answers,
)

LEAST = 20
"""Fewest answers of a study, half of which the map is fitted on."""


@dataclass(frozen=True, eq=False, repr=False)
class AnswerStudy:
    """What a log of graded answers shows.

    Attributes
    ----------
    log : Log
    graded : GradedAnswers
    before, after : ConfidenceEvaluation
        Of the confidences as they are and, each by a map that was fitted on others, calibrated.
    calibrator : AnswerCalibrator
        Fitted on one half of the answers; its threshold was found on the other half.
    held_out : (answers,) bool
        True for the answers of the threshold.
    rows : list of dict
        Rows of the log with ``calibrated``, ``abstains`` and ``part`` (fit or threshold), and
        ``option_probs`` of calibrated multiple choice.
    options : Rescored or None
        Of multiple choice.
    """

    log: Log
    graded: GradedAnswers
    before: ConfidenceEvaluation
    after: ConfidenceEvaluation
    calibrator: AnswerCalibrator
    held_out: BoolArray
    rows: list[Row]
    options: Rescored | None

    @property
    def threshold(self) -> Threshold:
        """The threshold of the map."""
        assert self.calibrator.threshold_ is not None
        return self.calibrator.threshold_

    @property
    def repeated(self) -> int:
        """Number of answers to questions that an earlier answer is to."""
        counts = Counter(question for question in self.graded.questions if question)
        return sum(count - 1 for count in counts.values())

    def __repr__(self) -> str:
        errors = (f"{100 * e['ece'].value:.1f} %" for e in (self.before, self.after))
        return one_line(self, f"{len(self.rows):,} answers", f"ECE {', calibrated '.join(errors)}")


def study_answers(
    log: Log, *, max_error: float = 0.1, level: float = 0.9, seed: int = 0
) -> AnswerStudy:
    """Fit a map to the answers of a log, and find a threshold that keeps a promise.

    The map is fitted on a random half of the answers, and the threshold found on the other: with
    certainty ``level``, at most ``max_error`` of the answers above it are wrong
    (:func:`calibrant.threshold`). The figures are cross-validated on all answers.

    Parameters
    ----------
    log : Log
        From :func:`calibrant.llm.read_log`.
    max_error, level : float in (0, 1)
    seed : int
        Of the division into halves.

    Examples
    --------
    >>> from calibrant.llm.answers.graded import AnswerRows
    >>> rng = np.random.default_rng(0)
    >>> stated = rng.uniform(0.5, 1, 600)
    >>> right = rng.random(600) < stated**3  # too sure
    >>> rows = [{"confidence": c, "correct": y} for c, y in zip(stated, right)]
    >>> log = Log("log.jsonl", "answers", AnswerRows([str(i) for i in range(600)], rows))
    >>> study = study_answers(log, max_error=0.3)
    >>> study.before["ece"].value > 3 * study.after["ece"].value
    True
    >>> study.threshold.promise()
    'With 90 % certainty, at most 30 % of the accepted answers are wrong.'
    """
    graded = log.answers.answers()
    if len(graded.correct) < LEAST:
        raise ValueError(
            f"{log.path} has {len(graded.correct)} graded answers: {LEAST} or more are needed"
        )
    held_out = np.random.default_rng(seed).permutation(len(graded.correct)) % 2 == 1
    stage: Map = "beta" if len(held_out) >= 2 * FEWEST else "sigmoid"
    calibrator = _calibrator(graded, held_out, stage, max_error, level)
    figures = cross_validated_answers(graded, stage=stage)
    options = _rescored(log)
    rows = _rows(log, calibrator, held_out, options)
    return AnswerStudy(
        log, graded, figures["before"], figures["after"], calibrator, held_out, rows, options
    )


def _calibrator(
    graded: GradedAnswers, held_out: BoolArray, stage: Map, max_error: float, level: float
) -> AnswerCalibrator:
    """Fit the map on one half, and find the threshold on the other."""
    fitted = fit_answers(_part(graded, ~held_out), stage=stage)
    rest = _part(graded, held_out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what to do without a threshold is said in the findings
        fitted.threshold_ = threshold(
            confidence=calibrated(fitted, rest.confidence),
            outcome=rest.correct,
            max_error=max_error,
            level=level,
        )
    return fitted


def _part(graded: GradedAnswers, chosen: BoolArray) -> GradedAnswers:
    def those(values: Any) -> Any:
        return [value for value, keep in zip(values, chosen, strict=True) if keep]

    tokens = those(graded.token_probs) if graded.token_probs else ()
    return graded._replace(
        questions=those(graded.questions),
        answers=those(graded.answers),
        confidence=graded.confidence[chosen],
        correct=graded.correct[chosen],
        token_probs=tokens,
    )


def _rescored(log: Log) -> Rescored | None:
    options = option_logits(log.answers.rows)
    return rescore(options) if options and len(options.labels) >= FEWEST else None


def _rows(
    log: Log, calibrator: AnswerCalibrator, held_out: BoolArray, options: Rescored | None
) -> list[Row]:
    rows = apply_answers(calibrator, log.answers)
    for i, (row, rest) in enumerate(zip(rows, held_out, strict=True)):
        row["part"] = "threshold" if rest else "fit"
        if options is not None:
            count = len(row["option_logprobs"])
            row["option_probs"] = options.probs[i, :count].tolist()
    return rows
