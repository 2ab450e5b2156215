"""From the graded answers of a log to a map, a threshold with a guarantee, and figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import BoolArray, FloatArray, IntArray, silenced
from calibrant._core.showing import one_line
from calibrant.decide.threshold_limits import threshold
from calibrant.decide.threshold_results import Threshold
from calibrant.llm.answers.calibrator import (
    AnswerCalibrator,
    Map,
    cross_validated_answers,
    fit_answers,
)
from calibrant.llm.answers.grading import MIN_QUESTIONS, calibrated_choices
from calibrant.llm.answers.logs.reading import Log
from calibrant.llm.answers.rows import Row, _unpacked_cell
from calibrant.llm.answers.signal_calibrator import (
    SignalCalibrator,
    SignalFit,
    _signal_calibrator,
    fit_signals,
)
from calibrant.llm.answers.signals import signal_values, signals_of
from calibrant.metrics.clustered import ConfidenceEvaluation
from calibrant.metrics.evaluation import Evaluation
from calibrant.workflows.evaluate import evaluate
from calibrant.workflows.evaluate_answers import evaluate_answers

_METRICS = ("accuracy", "ece", "nll", "brier")
_MIN_ANSWERS = 20
"""Answers that a study needs, half of which the map is fitted on."""


@dataclass(frozen=True, eq=False, repr=False)
class AnswerStudy:
    """What a log of graded answers shows.

    Attributes
    ----------
    log : Log
    confidence : (answers,)
        Confidences as they are: those of the log or, where it has none, its best signal. NaN where
        an answer lacks it.
    correct : (answers,) bool
    source : str
        Name of these confidences.
    before, after : ConfidenceEvaluation
        Of the confidences as they are and, each by a map that was fitted on others, calibrated.
    calibrator : AnswerCalibrator or SignalCalibrator
        Fitted on one half of the questions; its threshold was found on the other half.
    held_out : (answers,) bool
        True for the answers of the threshold.
    rows : list of dict
        Rows of the log with ``calibrated``, ``abstains`` and ``part`` (fit or threshold), and
        ``option_probs`` of calibrated multiple choice.
    signals : SignalFit or None
        Figures of every signal, if there are others besides the confidence.
    options : dict of Evaluation or None
        Of the options of multiple choice, ``before`` and ``after`` their calibration.
    """

    log: Log
    confidence: FloatArray
    correct: BoolArray
    source: str
    before: ConfidenceEvaluation
    after: ConfidenceEvaluation
    calibrator: AnswerCalibrator | SignalCalibrator
    held_out: BoolArray
    rows: list[Row]
    signals: SignalFit | None = None
    options: dict[str, Evaluation] | None = None

    @property
    def threshold(self) -> Threshold:
        """The threshold of the map."""
        assert self.calibrator.threshold_ is not None
        return self.calibrator.threshold_

    def __repr__(self) -> str:
        errors = (f"{100 * e['ece'].value:.1f} %" for e in (self.before, self.after))
        return one_line(self, f"{len(self.rows):,} answers", f"ECE {', calibrated '.join(errors)}")


def study_answers(
    log: Log, *, max_error: float = 0.1, certainty: float = 0.95, seed: int = 0
) -> AnswerStudy:
    """Fit a map to the answers of a log, and find a threshold that keeps a guarantee.

    The map is fitted on a random half of the questions, and the threshold found on the other: with
    probability ``certainty``, at most ``max_error`` of the answers above it are wrong
    (:func:`calibrant.threshold`). The figures are cross-validated on all answers.

    Answers with signals besides the confidence get a map of all; others, and those that are too few
    to compare signals, one of their confidence.

    Parameters
    ----------
    log : Log
        From :func:`calibrant.llm.read_log`.
    max_error, certainty : float in (0, 1)
    seed : int
        Of the division into halves.

    Examples
    --------
    >>> from calibrant.llm.answers.rows import AnswerRows
    >>> rng = np.random.default_rng(0)
    >>> stated = rng.uniform(0.5, 1, 600)
    >>> right = rng.random(600) < stated**3  # too sure
    >>> rows = [{"confidence": c, "correct": y} for c, y in zip(stated, right)]
    >>> log = Log("log.jsonl", "answers", AnswerRows([str(i) for i in range(600)], rows))
    >>> study = study_answers(log, max_error=0.3)
    >>> study.before["ece"].value > 3 * study.after["ece"].value
    True
    """
    answers, correct = log.answers, log.answers.grades()
    groups = answers.groups
    questions = int(groups.max()) + 1
    if len(correct) < _MIN_ANSWERS or questions < _MIN_ANSWERS // 2:
        raise ValueError(
            f"{log.path} has {len(correct)} graded answers to {questions} questions: "
            f"{_MIN_ANSWERS} or more are needed, to {_MIN_ANSWERS // 2} questions"
        )
    # a random half of the questions
    held_out = np.random.default_rng(seed).permutation(questions)[groups] % 2 == 1
    stage: Map = "beta" if len(correct) >= 2 * MIN_QUESTIONS else "sigmoid"
    confidence, source, before, after, signals = _figures(log, stage)
    fitted_on, others = answers.where(~held_out), answers.where(held_out)
    calibrator: AnswerCalibrator | SignalCalibrator
    if signals is None:
        calibrator = fit_answers(fitted_on, stage=stage)
    else:
        calibrator = _signal_calibrator(signals_of(fitted_on), stage=stage)
    chances = calibrator.predict_rows(others)
    with silenced():  # what to do without a threshold is said in the findings
        calibrator.threshold_ = threshold(
            confidence=chances, outcome=others.grades(), max_error=max_error, certainty=certainty
        )
    options = option_logits(answers.rows)
    rescored = _rescored(*options) if options and len(options[1]) >= MIN_QUESTIONS else None
    rows = calibrator.apply(answers)
    for i, (row, rest) in enumerate(zip(rows, held_out, strict=True)):
        row["part"] = "threshold" if rest else "fit"
        if rescored is not None:
            count = len(_unpacked_cell(row["option_logits"]))
            row["option_probs"] = rescored[1][i, :count].tolist()
    return AnswerStudy(
        *(log, confidence, correct, source, before, after, calibrator, held_out, rows),
        signals,
        rescored and rescored[0],
    )


def _figures(
    log: Log, stage: Map
) -> tuple[FloatArray, str, ConfidenceEvaluation, ConfidenceEvaluation, SignalFit | None]:
    """Return confidences, their name, figures before and after a map, and those of signals."""
    answers, fit = log.answers, None
    if log.has_signals:
        with silenced():  # the fit to one half repeats what is worth saying
            fit = fit_signals(answers, stage=stage)
    if fit is None or fit.together is None:  # there are too few to combine them
        confidence, source = answers.confidences()
        found = cross_validated_answers(answers, stage=stage)
        return confidence, source.confidence, found["before"], found["after"], None
    if any(all(key in row for row in answers.rows) for key in ("confidence", "token_probs")):
        confidence, source = answers.confidences()
        before = evaluate_answers(confidence, answers.grades(), groups=answers.groups)
        return confidence, source.confidence, before, fit.together, fit
    values = signal_values(signals_of(answers), [fit.best])[fit.best]
    return values, fit.best, fit.raw[fit.best], fit.together, fit


def _rescored(logits: FloatArray, labels: IntArray) -> tuple[dict[str, Evaluation], FloatArray]:
    """Calibrate options, each question by a fit on other folds, and measure them again.

    A preference of the model for some options is corrected, so that answers may change. Returns the
    evaluations ``before`` and ``after``, in which accuracy is that of the likeliest option, and
    the calibrated probabilities.
    """
    calibrated = calibrated_choices(logits, labels)
    figures = {
        name: evaluate(scores, labels, estimand="top_label", metrics=_METRICS)
        for name, scores in (("before", logits), ("after", calibrated))
    }
    return figures, np.exp(calibrated)


def option_logits(rows: Sequence[Row]) -> tuple[FloatArray, IntArray] | None:
    """Return logits ``(questions, options)`` and labels; None unless all answers have both.

    Options that a question has fewer of than others have -inf.
    """
    cells = [(row.get("option_logits"), row.get("label")) for row in rows]
    if not rows or any(None in pair for pair in cells):
        return None
    options, labels = zip(*(map(_unpacked_cell, pair) for pair in cells), strict=True)
    if None in labels:  # as a cell of CSV has it
        return None
    logits = np.full((len(rows), max(map(len, options))), -np.inf)
    for line, values in zip(logits, options, strict=True):
        line[: len(values)] = values
    return logits, np.array(labels, dtype=np.int64)


def save_options(rows: Sequence[Row], file: str | os.PathLike[str]) -> None:
    """Write the options of answers as a prediction file, ``.npz`` with logits and labels."""
    options = option_logits(rows)
    if options is None:
        raise ValueError(
            f"{os.fspath(file)} is for multiple choice, and some answers have no log-probabilities "
            "of options or no right one: write .jsonl or .csv"
        )
    with replacing(Path(file)) as temporary, temporary.open("wb") as stream:
        np.savez(stream, logits=options[0], labels=options[1])
