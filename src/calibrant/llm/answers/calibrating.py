"""Fit maps to graded answers, with figures before and after, as ``calibrant llm answers`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, FloatArray, IntArray, silenced, warn
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.llm.answers.confidence import Aggregator, evaluate_answers
from calibrant.llm.answers.rows import AnswerRows, Source
from calibrant.llm.answers.signal_calibrator import (
    FOLDS,
    SignalCalibrator,
    _enough_for_folds,
    _folds,
    _signal_calibrator,
    _with_signals,
)
from calibrant.llm.answers.signals import signal_values
from calibrant.metrics.clustered import ConfidenceEvaluation, Evaluations

_MIN_ANSWERS_FOR_MAP = 20
"""Answers below which the command line warns of a map."""


def warn_of_few(count: int, what: str) -> None:
    """Warn of a map that is fitted to so few answers that its chances mean little."""
    if count < _MIN_ANSWERS_FOR_MAP:
        warn(
            f"{count:,} {what} are too few for a map, whose chances are then hardly more than "
            f"guesses: grade {_MIN_ANSWERS_FOR_MAP} at least, better 100"
        )


def fit_answers(
    answers: AnswerRows, *, aggregate: Aggregator | None = None, stage: Map = "beta"
) -> AnswerCalibrator:
    """Fit a map from the confidences of graded answers to the chance that they are right.

    ``aggregate`` is as for :meth:`AnswerRows.confidences`. The map keeps the source of the
    confidences, and refuses those of another.
    """
    confidence, source = answers.confidences(aggregate)
    return AnswerCalibrator.of_confidences(confidence, answers.grades(), source, stage)


def cross_validated_answers(
    answers: AnswerRows, *, aggregate: Aggregator | None = None, stage: Map = "beta"
) -> Evaluations:
    """Measure confidences ``before`` and, each by a map that was fitted on other folds, ``after``.

    Answers to one question, such as the sentences of a long answer, stay in one fold, and the
    intervals are then those of independent questions. Without ``after`` if there are fewer than
    ten questions.
    """
    confidence, source = answers.confidences(aggregate)
    return cross_validated(confidence, answers.grades(), answers.groups, source, stage)


def cross_validated(
    confidence: FloatArray, correct: BoolArray, groups: IntArray, source: Source, stage: Map
) -> Evaluations:
    """:func:`cross_validated_answers` of arrays ``(answers,)``."""
    evaluations = {"before": evaluate_answers(confidence, correct, groups=groups)}
    if int(groups.max()) + 1 < 2 * FOLDS:
        return evaluations
    after = np.empty_like(confidence)
    with silenced():  # the fit to all answers repeats what is worth saying
        for train, test in _folds(groups):
            fitted = AnswerCalibrator.of_confidences(
                confidence[train], correct[train], source, stage
            )
            after[test] = fitted.predict_confidences(confidence[test])
    return evaluations | {"after": evaluate_answers(after, correct, groups=groups)}


class SignalFit(NamedTuple):
    """A map of signals, and its figures on held-out answers.

    Attributes
    ----------
    calibrator : SignalCalibrator
    alone : dict of ConfidenceEvaluation
        Of maps of each signal alone; all answers count, also those without the signal.
    raw : dict of ConfidenceEvaluation
        Of each signal as it is, of the answers that have it.
    together : ConfidenceEvaluation or None
        Of the map of all signals; None if there are too few answers.
    """

    calibrator: SignalCalibrator
    alone: Evaluations
    raw: Evaluations
    together: ConfidenceEvaluation | None = None

    @property
    def best(self) -> str:
        """The signal with the lowest log loss, of held-out answers if there are enough."""
        figures = self.alone or self.raw
        return min(figures, key=lambda name: figures[name]["nll"].value)


def fit_signals(
    answers: AnswerRows,
    names: Sequence[str] | None = None,
    *,
    stage: Map = "beta",
    level: float | None = 0.9,
) -> SignalFit:
    """Fit a map from the signals of graded answers to the chance that they are right.

    ``names`` are the signals to use, by default all that the rows have or that their material
    allows (:func:`~calibrant.llm.signals_of`). The map keeps their names and the source of the
    answers, and refuses others. Answers to one question, such as the fields of one document, stay
    in one fold, and the intervals are those of independent questions.
    """
    answers = _with_signals(answers)
    values, right, groups = signal_values(answers, names), answers.grades(), answers.groups
    fitted = _signal_calibrator(answers, names, stage=stage)
    known = {name: ~np.isnan(column) for name, column in values.items()}
    raw = {
        name: evaluate_answers(values[name][has], right[has], groups=groups[has], level=level)
        for name, has in known.items()
        if has.any()
    }
    if not _enough_for_folds(right, groups):
        return SignalFit(fitted, {}, raw)

    def held_out(chosen: Mapping[str, FloatArray]) -> ConfidenceEvaluation:
        chances = np.empty(len(right))
        for train, test in _folds(groups):
            one = SignalCalibrator(stage=stage)
            some = {name: column[train] for name, column in chosen.items()}
            one.fit(some, right[train], groups=groups[train])
            chances[test] = one.predict({name: x[test] for name, x in chosen.items()})
        return evaluate_answers(chances, right, groups=groups, level=level)

    with silenced():  # the fit to all answers has said what is worth saying
        alone = {name: held_out({name: column}) for name, column in values.items()}
        together = held_out(values) if len(values) > 1 else alone[fitted.names_[0]]
    return SignalFit(fitted, alone, raw, together)
