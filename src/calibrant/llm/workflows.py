"""The steps behind ``calibrant llm evaluate`` and ``calibrant llm ask``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import log_softmax

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.chunks import Progress
from calibrant.calibrators.auto import Auto
from calibrant.display.html import notebook
from calibrant.display.results import one_line
from calibrant.llm.answers import asking, questions as question_sets
from calibrant.llm.answers.asking import Answer
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.confidence import Aggregator, answer_confidence, evaluate_answers
from calibrant.llm.answers.questions import Question
from calibrant.llm.answers.shading import ShadedText, shaded_text
from calibrant.llm.heads.fitted import FittedHead, token_predictions
from calibrant.llm.tokens.evaluate import ConfidenceEvaluation, evaluate_tokens
from calibrant.llm.tokens.tables import TokenTable
from calibrant.workflows.fit import cross_fit

Confidence: TypeAlias = Aggregator | Literal["p_true"]
"""An aggregation of token probabilities, or the model's own verdict in a second prompt."""
Evaluations: TypeAlias = dict[str, ConfidenceEvaluation]
"""Evaluations ``before``, with a head ``after``, and of multiple choice ``calibrated``."""
FOLDS, FEWEST = 5, 100  # folds of the questions for their calibration, and how many these must be


def evaluate_table(
    table: TokenTable, fitted: FittedHead | None = None, *, level: float | None = 0.9
) -> Evaluations:
    """Measure the calibration of the tokens of a table, before and after a head."""
    evaluations = {}
    for name, head in _before_and_after(fitted).items():
        tokens = token_predictions(table, head)
        evaluations[name] = evaluate_tokens(
            tokens.confidence, tokens.correct, table.documents, nll=tokens.nll, level=level
        )
    return evaluations


class QuestionSet(NamedTuple):
    """Questions to ask, and solved ones to show before them."""

    questions: list[Question]
    shots: list[Question]

    @property
    def choices(self) -> bool:
        """True for multiple choice."""
        return bool(self.questions[0].choices)


def read_question_set(
    path: str | os.PathLike[str], *, limit: int | None = None, shots: int = 5, seed: int = 0
) -> QuestionSet:
    """Read and draw questions.

    ``path`` is a folder of MMLU, ``TruthfulQA.csv``, or a text file of questions and answers.
    ``limit`` questions are drawn, or all. ``shots`` solved examples are, for MMLU, the first of
    each subject, else the first drawn.
    """
    if Path(path).is_dir():
        solved = question_sets.first_of_each(question_sets.read_mmlu(path, "dev"), shots)
        whole = question_sets.read_mmlu(path, "test")
        return QuestionSet(question_sets.subset(whole, limit or len(whole), seed=seed), solved)
    is_csv = str(path).endswith(".csv")
    whole = (question_sets.read_truthfulqa if is_csv else question_sets.read_questions)(path)
    if len(whole) <= shots:
        raise ValueError(f"{path} has {len(whole)} questions, too few for {shots} shots: use fewer")
    drawn = question_sets.subset(whole, (limit or len(whole)) + shots, seed=seed)
    return QuestionSet(drawn[shots:], drawn[:shots])


def evaluate_questions(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    *,
    fitted: FittedHead | None = None,
    confidence: Confidence | None = None,
    keep_predictions: bool = False,
    level: float | None = 0.9,
    progress: Progress | None = None,
) -> Evaluations:
    """Let a model answer questions, and measure its calibration before and after a head.

    Multiple choice of at least 100 questions is also measured ``calibrated``: each question by
    :class:`calibrant.Auto`, fitted on the answers in other folds. It corrects a preference for some
    letters and may so change answers, unless ``keep_predictions``.
    """
    heads, evaluations = _before_and_after(fitted), {}
    if asked.choices:
        logits, labels = asking.ask_choices_each(
            model, tokenizer, asked.questions, heads, shots=asked.shots, progress=progress
        )
        if len(labels) >= FEWEST:
            *_, last = logits.values()
            logits["calibrated"] = calibrated_choices(last, labels, keep_predictions)
        for name, each in logits.items():
            probs, right = np.exp(each.max(-1)), each.argmax(-1) == labels
            evaluations[name] = evaluate_answers(probs, right, level=level)
        return evaluations
    prompts = [question_sets.short_prompt(one, asked.shots) for one in asked.questions]
    by_head = asking.ask_each(model, tokenizer, prompts, heads, progress=progress)
    for name, answers in by_head.items():
        pairs = zip(answers, asked.questions, strict=True)
        right = np.array([question_sets.exact_match(a.text, q.references) for a, q in pairs])
        rule = confidence or "geometric"
        probs = _confidences(model, tokenizer, asked.questions, answers, heads[name], rule)
        evaluations[name] = evaluate_answers(probs, right, level=level)
    return evaluations


def calibrated_choices(
    logits: FloatArray, labels: IntArray, keep_predictions: bool = False
) -> FloatArray:
    """Calibrate the logits ``(n, choices)`` of questions, each by a fit on other folds of them.

    Returns log-probabilities. A preference for some letters is corrected: the answer may change,
    unless ``keep_predictions``.
    """
    auto = Auto(keep_argmax=keep_predictions)
    fitted = cross_fit({"logits": logits, "labels": labels}, auto, folds=FOLDS, level=None)
    result = np.empty_like(logits)
    for i, calibrator in enumerate(fitted.calibrators):
        result[fitted.folds == i] = calibrator.transform(logits[fitted.folds == i])
    return np.asarray(log_softmax(result, axis=-1))


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
        return notebook(self.shaded().fragment())


def answer_question(
    model: Any,
    tokenizer: Any,
    question: str,
    *,
    fitted: FittedHead | None = None,
    calibrator: AnswerCalibrator | None = None,
    confidence: Confidence | None = None,
    min_confidence: float = 0.0,
    max_new_tokens: int = 64,
    chat: bool = True,
) -> Reply:
    """Answer a question with a calibrated confidence, or abstain.

    ``calibrator`` turns the confidence into the chance that the answer is right; its threshold
    applies besides ``min_confidence``. ``confidence`` is by default that of the calibrator, or
    ``geometric``. With ``chat`` the question is rendered with the chat template.
    """
    check_confidence(calibrator, confidence)

    def form(text: str) -> str:
        return asking.chat_prompt(tokenizer, text) if chat else text

    options: dict[str, Any] = {"fitted": fitted, "max_new_tokens": max_new_tokens}
    (answer,) = asking.ask(model, tokenizer, [form(question)], **options)
    asked, rule = [Question(question, ())], confidence or "geometric"
    (value,) = _confidences(model, tokenizer, asked, [answer], fitted, rule, form)
    required = min_confidence
    if calibrator is not None:
        (value,) = calibrator.predict([answer.probs] if calibrator.aggregate else [value])
        if calibrator.threshold_ is not None:
            required = max(required, calibrator.threshold_.threshold)
    return Reply(answer, float(value), required)


def check_confidence(calibrator: AnswerCalibrator | None, confidence: str | None) -> None:
    """Raise unless an answer calibrator gets the confidence that it was fitted on."""
    if calibrator is None:
        return
    if calibrator.aggregate is None and confidence is None:
        raise ValueError("the answer calibrator was fitted on other confidences: pass confidence")
    if calibrator.aggregate is not None and confidence not in (None, calibrator.aggregate):
        raise ValueError(
            f"the answer calibrator was fitted on {calibrator.aggregate} confidences, got "
            f"confidence={confidence}: leave it out"
        )


def _before_and_after(fitted: FittedHead | None) -> dict[str, FittedHead | None]:
    return {"before": None} if fitted is None else {"before": None, "after": fitted}


def _confidences(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    fitted: FittedHead | None,
    confidence: Confidence,
    form: Callable[[str], str] = str,
) -> FloatArray:
    """Confidence of each answer; ``form`` makes a prompt of a question."""
    if confidence != "p_true":
        return answer_confidence([answer.probs for answer in answers], confidence)
    pairs = zip(questions, answers, strict=True)
    prompts = [form(question_sets.verdict_prompt(one, answer.text)) for one, answer in pairs]
    return asking.ask_true(model, tokenizer, prompts, fitted=fitted)
