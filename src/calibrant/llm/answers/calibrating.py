"""The steps behind ``calibrant llm evaluate`` of questions, ``ask`` and ``answers``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import FloatArray, IntArray, silenced, warn
from calibrant._core.messages import printable
from calibrant._core.showing import one_line
from calibrant.artifacts import load
from calibrant.llm.answers import asking, grading
from calibrant.llm.answers.asking import Answer
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.llm.answers.confidence import AGGREGATORS, SMALLEST, evaluate_answers
from calibrant.llm.answers.graded import AnswerRows, GradedAnswers
from calibrant.llm.answers.grading import Confidence
from calibrant.llm.answers.lines import Row
from calibrant.llm.answers.questions import Question
from calibrant.llm.answers.shading import ShadedText, shaded_text
from calibrant.llm.answers.signal_calibrator import (
    FOLDS,
    SignalCalibrator,
    enough_for_folds,
    folds,
)
from calibrant.llm.answers.signals import UNREAD, signal_values, signals_of
from calibrant.llm.answers.stated import OFF_SCALE
from calibrant.llm.heads.evaluate import (
    ConfidenceEvaluation,
    Evaluations,
    Gains,
    gains_over_one_temperature,
)
from calibrant.llm.heads.fitted import FittedHead

CONFIDENCES = (*AGGREGATORS, "p_true")
_ENOUGH_TO_HAVE_A_SIGNAL = 10
"""Answers of which some should have a signal that those of the fit had."""
_MIN_ANSWERS_FOR_MAP = 20
"""Answers below which the command line warns of a map."""
_REMEDY = (
    "fit one on answers of this model with this head, by calibrant llm evaluate --chat "
    "--save-answers and calibrant llm answers fit"
)


def evaluate_graded(
    graded: Mapping[str, GradedAnswers], *, level: float | None = 0.9
) -> Evaluations:
    """Measure the calibration of answers of :func:`grade_questions`."""
    return {
        name: evaluate_answers(answers.confidence, answers.correct, level=level)
        for name, answers in graded.items()
    }


def gains_of_graded(graded: Mapping[str, GradedAnswers]) -> Gains:
    """Gains of answers over those with one temperature; without it there are none."""
    scores = {}
    for name, answers in graded.items():
        own = np.where(answers.correct, answers.confidence, 1 - answers.confidence)
        scores[name] = {"nll": -np.log(np.maximum(own, SMALLEST)), "brier": (1 - own) ** 2}
    count = len(graded["before"].correct)
    return gains_over_one_temperature(scores, np.arange(count), np.ones(count))


class Reply(NamedTuple):
    """An answer, its confidence, and the confidence that was required."""

    answer: Answer
    confidence: float
    required: float

    @property
    def abstains(self) -> bool:
        """True if the confidence is below the required one."""
        return self.confidence < self.required

    def __repr__(self) -> str:
        said = "abstains" if self.abstains else repr(self.answer.text)
        figures = f"confidence {100 * self.confidence:.1f} %, required {100 * self.required:g} %"
        return one_line(self, said, figures)

    def shaded(self, title: str = "Answer") -> ShadedText:
        """Return the answer with shaded tokens, and the confidence that decided."""
        if not self.abstains:
            return self.answer.shaded(title, self.confidence)
        figures = f"confidence {100 * self.confidence:.1f} %, required {100 * self.required:g} %"
        return shaded_text([], [], title=title, note=f"no answer: {figures}")

    def _repr_html_(self) -> str:
        return self.shaded().box().notebook()


def answer_question(
    model: Any,
    tokenizer: Any,
    question: str,
    *,
    fitted: FittedHead | None = None,
    calibrator: AnswerCalibrator | None = None,
    confidence: Confidence | None = None,
    min_confidence: float = 0.0,
    max_new_tokens: int = grading.SENTENCES,
    chat: bool = True,
) -> Reply:
    """Answer a question with a calibrated confidence, or abstain.

    ``calibrator`` turns the confidence into the chance that the answer is right; its threshold
    applies besides ``min_confidence``. ``confidence`` is by default that of the calibrator, or
    ``geometric``. With ``chat`` the question is rendered with the chat template.
    """
    rule, form = confidence_of(calibrator, confidence), grading.form_of(tokenizer, chat)
    source = grading.source_of(model, fitted, rule, grading.prompt_form(tokenizer, chat))
    if calibrator is not None:
        calibrator.source_.check(source, _REMEDY)
    asked, prompts = [Question(question, ())], [form(question)]
    grading.check_written(model, tokenizer, asked, prompts, form, rule, max_new_tokens)
    options: dict[str, Any] = {"fitted": fitted, "max_new_tokens": max_new_tokens}
    (answer,) = asking.ask(model, tokenizer, prompts, **options)
    values = grading.confidences(model, tokenizer, asked, [answer], fitted, rule, form)
    required = min_confidence
    if calibrator is not None:
        values = calibrated(calibrator, values)
        if calibrator.threshold_ is not None:
            required = max(required, calibrator.threshold_.threshold)
    return Reply(answer, float(values[0]), required)


def confidence_of(calibrator: AnswerCalibrator | None, confidence: str | None) -> Confidence:
    """Return the confidence that an answer calibrator needs; raise if another is asked for."""
    known = calibrator.source_.confidence if calibrator is not None else ""
    if calibrator is not None and not (known or confidence):
        raise ValueError("the answer calibrator was fitted on other confidences: pass confidence")
    if known and confidence not in (None, known):
        raise ValueError(
            f"the answer calibrator was fitted on {printable(known)} confidences, got "
            f"confidence={confidence}: leave it out"
        )
    rule: Any = known or confidence or "geometric"
    if rule not in CONFIDENCES:
        raise ValueError(
            f"the answer calibrator is for confidences of {printable(rule)}, not computed "
            "here: apply it to a file of answers, by calibrant llm answers apply"
        )
    return rule  # type: ignore[no-any-return]


def fit_answers(graded: GradedAnswers, *, stage: Map = "beta") -> AnswerCalibrator:
    """Fit a map from the confidences of graded answers to the chance that they are right.

    The map keeps the source of the confidences, and refuses those of another.
    """
    return _fitted(graded, stage, np.arange(len(graded.correct)))


def warn_of_few(count: int, what: str) -> None:
    """Warn of a map that is fitted to so few answers that its chances mean little."""
    if count < _MIN_ANSWERS_FOR_MAP:
        warn(
            f"{count:,} {what} are too few for a map, whose chances are then hardly more than "
            f"guesses: grade {_MIN_ANSWERS_FOR_MAP} at least, better 100"
        )


def cross_validated_answers(graded: GradedAnswers, *, stage: Map = "beta") -> Evaluations:
    """Measure confidences ``before`` and, each by a map that was fitted on other folds, ``after``.

    Answers to one question, such as the sentences of a long answer, stay in one fold, and the
    intervals are then those of independent questions. Without ``after`` if there are fewer than
    ten questions.
    """
    confidence, correct, groups = graded.confidence, graded.correct, graded.groups
    evaluations = {"before": evaluate_answers(confidence, correct, groups=groups)}
    if int(groups.max()) + 1 < 2 * FOLDS:
        return evaluations
    after = np.empty_like(confidence)
    with silenced():  # the fit to all answers repeats what is worth saying
        for train, test in folds(groups):
            after[test] = calibrated(_fitted(graded, stage, train), confidence[test])
    return evaluations | {"after": evaluate_answers(after, correct, groups=groups)}


def _fitted(graded: GradedAnswers, stage: Map, rows: IntArray) -> AnswerCalibrator:
    rule: Any = graded.source.confidence
    made = AnswerCalibrator(rule if rule in AGGREGATORS else None, stage=stage)
    answers = _as_answers(made, graded.confidence[rows])
    return made.fit(answers, graded.correct[rows], source=graded.source)


def calibrated(calibrator: AnswerCalibrator, confidence: FloatArray) -> FloatArray:
    """Return the chances of answers to be right, from confidences of any source."""
    return calibrator.predict(_as_answers(calibrator, confidence))


def _as_answers(calibrator: AnswerCalibrator, confidence: FloatArray) -> Any:
    # every aggregate of a single token is its probability
    return confidence if calibrator.aggregate is None else list(confidence[:, None])


def load_map(path: str | os.PathLike[str]) -> AnswerCalibrator | SignalCalibrator:
    """Load a map of ``llm answers fit``, of confidences or of signals."""
    loaded = load(path)
    if not isinstance(loaded, (AnswerCalibrator, SignalCalibrator)):
        raise ValueError(
            f"{path} holds a {type(loaded).__name__}, a map of answers is wanted: calibrant llm "
            "answers fit makes one"
        )
    return loaded


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
    fitted = signal_calibrator(answers, names, stage=stage)
    known = {name: ~np.isnan(column) for name, column in values.items()}
    raw = {
        name: evaluate_answers(values[name][has], right[has], groups=groups[has], level=level)
        for name, has in known.items()
        if has.any()
    }
    if not enough_for_folds(right, groups):
        return SignalFit(fitted, {}, raw)

    def held_out(chosen: Mapping[str, FloatArray]) -> ConfidenceEvaluation:
        chances = np.empty(len(right))
        for train, test in folds(groups):
            one = SignalCalibrator(stage=stage)
            some = {name: column[train] for name, column in chosen.items()}
            one.fit(some, right[train], groups=groups[train])
            chances[test] = one.predict({name: x[test] for name, x in chosen.items()})
        return evaluate_answers(chances, right, groups=groups, level=level)

    with silenced():  # the fit to all answers has said what is worth saying
        alone = {name: held_out({name: column}) for name, column in values.items()}
        together = held_out(values) if len(values) > 1 else alone[fitted.names_[0]]
    return SignalFit(fitted, alone, raw, together)


def signal_calibrator(
    answers: AnswerRows, names: Sequence[str] | None = None, *, stage: Map = "beta"
) -> SignalCalibrator:
    """Fit a map to the signals that graded answers have, ``names`` of them or all."""
    return SignalCalibrator(stage=stage).fit(
        signal_values(answers, names),
        answers.grades(),
        groups=answers.groups,
        source=answers.source(),
    )


def apply_answers(
    calibrator: AnswerCalibrator | SignalCalibrator, answers: AnswerRows
) -> list[Row]:
    """Add the chance of each answer to be right to its row, as ``calibrated``.

    With a threshold there is also ``abstains``. Raises if the confidences or signals are of another
    source.
    """
    by_signals = isinstance(calibrator, SignalCalibrator)
    chances = (_by_signals if by_signals else _by_confidence)(calibrator, answers)
    rows = [{**row, "calibrated": float(p)} for row, p in zip(answers.rows, chances, strict=True)]
    if calibrator.threshold_ is not None:
        for row, abstains in zip(rows, calibrator.abstains(chances), strict=True):
            row["abstains"] = bool(abstains)
    return rows


def _with_signals(answers: AnswerRows) -> AnswerRows:
    """Compute the signals of rows; warn of stated numbers that have another scale."""
    found = signals_of(answers)
    reasons = [row.get(UNREAD, {}).get("stated", "") for row in found.rows]
    off = sum(reason.startswith(OFF_SCALE) for reason in reasons)
    if off:
        warn(
            f"{off:,} of {len(reasons):,} stated confidences are numbers above 1 without a percent "
            "sign, and not read: compute the signals first, by calibrant llm answers signals "
            "--stated-scale"
        )
    return found


def _by_signals(calibrator: Any, answers: AnswerRows) -> FloatArray:
    values = signal_values(_with_signals(answers), calibrator.names_)
    for name, column in values.items():
        if (
            len(column) >= _ENOUGH_TO_HAVE_A_SIGNAL
            and np.isnan(column).all()
            and calibrator.coverage_[name]
        ):
            warn(
                f"none of the {len(column):,} answers has the signal {printable(name)}, which "
                f"{100 * calibrator.coverage_[name]:.0f} % of those of the fit had: compute it in "
                "the same way"
            )
    chances: FloatArray = calibrator.predict(values, source=answers.source())
    return chances


def _by_confidence(calibrator: Any, answers: AnswerRows) -> FloatArray:
    stated = any("confidence" in row for row in answers.rows)
    confidence, source, _ = answers.confidences(None if stated else calibrator.aggregate)
    calibrator.source_.check(source)
    known = calibrator.source_.confidence
    if known and not source.confidence:
        warn(
            f"the answers do not say where their confidence comes from, and the answer calibrator "
            f"is for {printable(known)}: state it as source"
        )
    return calibrated(calibrator, confidence)
