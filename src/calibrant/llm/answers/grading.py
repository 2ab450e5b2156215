"""Let a model answer questions: a set of them, to be graded, or one, where it may abstain."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import log_softmax

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.engines import silently
from calibrant._core.messages import printable
from calibrant.calibrators.auto import Auto
from calibrant.llm.answers import asking, choices, questions as question_sets
from calibrant.llm.answers.asking import Answer
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.choices import OptionBias, Permutations, option_bias
from calibrant.llm.answers.confidence import AGGREGATORS, Aggregator, answer_confidence
from calibrant.llm.answers.questions import Question
from calibrant.llm.answers.rows import AnswerRows, Row, Source
from calibrant.llm.heads.fitted import FittedHead, Gains, _gains_over_one_temperature
from calibrant.llm.models import huggingface
from calibrant.llm.models.huggingface import fingerprint_of
from calibrant.metrics.clustered import Evaluations
from calibrant.workflows.evaluate_answers import SMALLEST, evaluate_answers
from calibrant.workflows.fit import cross_fit

FOLDS, MIN_QUESTIONS = 5, 100
"""Folds for the calibration of choices, and the fewest questions that it needs."""
_ONE_LINE, _SENTENCES = 32, 64
"""Largest numbers of tokens of a short answer and of one in sentences."""
CONFIDENCES = (*AGGREGATORS, "p_true")
_DRAWN_TOGETHER = 16
_REMEDY = (
    "fit one on answers of this model with this head, by calibrant llm evaluate --chat "
    "--save-answers and calibrant llm answers fit"
)
Confidence: TypeAlias = Aggregator | Literal["p_true"]
"""An aggregation of token probabilities, or the model's own verdict in a second prompt."""
Form: TypeAlias = Literal["written", "letters", "texts"]
"""Answers that the model writes, letters of choices, or choices that it finds likeliest."""
Grade: TypeAlias = Callable[[str, Question], bool]
"""Returns True if an answer to a question is right."""
Heads: TypeAlias = Mapping[str, FittedHead | None]
Network: TypeAlias = tuple[Any, Any]
"""A model and its tokenizer."""


class QuestionSet(NamedTuple):
    """Questions to ask, solved ones to show before them, and the form of the answers.

    Written answers are one line after the solved ones or, with ``chat``, whole answers to the
    question alone.
    """

    questions: list[Question]
    shots: list[Question]
    form: Form = "written"
    chat: bool = False

    def prompts(self, tokenizer: Any) -> list[str]:
        """Return the prompts for written answers."""
        if self.chat:
            return [asking.chat_prompt(tokenizer, one.text) for one in self.questions]
        return [question_sets.short_prompt(one, self.shots) for one in self.questions]

    def verdict_prompts(self, tokenizer: Any, answers: Sequence[str]) -> list[str]:
        """Return the second prompts, which ask if the answers are true."""
        pairs = zip(self.questions, answers, strict=True)
        asked = [question_sets.verdict_prompt(one, text) for one, text in pairs]
        return [asking.chat_prompt(tokenizer, text) for text in asked] if self.chat else asked

    def prompt_form(self, tokenizer: Any) -> str:
        """Name the form of the prompts, for the source of the confidences."""
        if not self.chat:
            return f"short, {len(self.shots)} shots"
        return "chat" if getattr(tokenizer, "chat_template", None) else "plain"

    def longest(self, max_new_tokens: int | None) -> int:
        """Return the largest number of tokens of a written answer, by default that of its form."""
        return max_new_tokens or (_SENTENCES if self.chat else _ONE_LINE)


class Graded(NamedTuple):
    """Graded answers and, of multiple choice by letters, the preference for some letters."""

    answers: AnswerRows
    option_bias: OptionBias | None = None


def read_question_set(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    shots: int = 5,
    seed: int = 0,
    chat: bool = False,
) -> QuestionSet:
    """Read and draw questions.

    ``path`` is a folder of MMLU, ``TruthfulQA.csv``, or a text file of questions and answers.
    ``limit`` questions are drawn, or all. ``shots`` solved examples are, for MMLU, the first of
    each subject, else the first drawn. With ``chat`` there are none, and answers are written.
    """
    if Path(path).is_dir():
        if chat:
            raise ValueError(f"{path} is answered by letters, not as a chat: leave chat out")
        solved = question_sets._first_of_each(question_sets.read_mmlu(path, "dev"), shots)
        whole = question_sets.read_mmlu(path, "test")
        drawn = question_sets._subset(whole, limit or len(whole), seed=seed)
        return QuestionSet(drawn, solved, "letters")
    is_csv, shots = str(path).endswith(".csv"), 0 if chat else shots
    whole = (question_sets.read_truthfulqa if is_csv else question_sets.read_questions)(path)
    if len(whole) <= shots:
        raise ValueError(f"{path} has {len(whole)} questions, too few for {shots} shots: use fewer")
    drawn = question_sets._subset(whole, (limit or len(whole)) + shots, seed=seed)
    form: Form = "texts" if is_csv and not chat else "written"
    return QuestionSet(drawn[shots:], drawn[:shots], form, chat)


def grade_questions(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    *,
    fitted: FittedHead | None = None,
    confidence: Confidence | None = None,
    grade: Grade | None = None,
    permutations: Permutations | None = None,
    samples: int | None = None,
    max_new_tokens: int | None = None,
) -> dict[str, Graded]:
    """Let a model answer questions; return its answers ``before`` and with a ``head``.

    The answers are also measured with the one temperature, ``global``, that the head was compared
    with. Choices between texts are made by their likelihood. Letters of at least 100 questions are
    also returned ``calibrated`` (:func:`calibrated_choices`).

    Parameters
    ----------
    asked : QuestionSet
        From :func:`read_question_set`.
    confidence : str, optional
        Of written answers.
    grade : callable, optional
        Returns, for a written answer and its question, True if it is right. By default that is an
        exact match of a reference, or of a chat an answer that contains one.
    permutations : {"cyclic", "all"}, optional
        Ask questions that are answered by letters with their options in several orders, and also
        return the answers ``permuted``, by averages over the orders, which have no preference.
    samples : int, optional
        Draw so many further answers to each question, by :func:`~calibrant.llm.answers.asking.\
draw_answers`, from the model without a head.
    max_new_tokens : int, optional
        Largest number of tokens of a written answer, by default 32, of a chat 64.
    """
    own = {"grade": grade, "samples": samples, "max_new_tokens": max_new_tokens}
    for name, value in {**own, "permutations": permutations}.items():
        form = "written" if name in own else "letters"
        if value is not None and asked.form != form:
            raise ValueError(
                f"{name} is for questions of the form {form!r}, and these are {asked.form!r}: "
                f"leave it out"
            )
    check_lengths(model, tokenizer, asked, confidence=confidence, max_new_tokens=max_new_tokens)
    network = (model, tokenizer)
    heads = fitted.beside_one_temperature() if fitted else {"before": None}
    if asked.form == "written":
        rule, longest = confidence or "geometric", asked.longest(max_new_tokens)
        return _written(network, asked, heads, rule, grade, samples, longest)
    shots = f"{len(asked.shots)} shots"
    sources = {name: _source_of(model, head, asked.form, shots) for name, head in heads.items()}
    if asked.form == "letters":
        return _lettered(network, asked, heads, sources, permutations)
    texts = choices.ask_texts_each(*network, asked.questions, heads, shots=asked.shots)
    return {name: Graded(_chosen(asked, rows, sources[name])) for name, rows in texts.items()}


def _written(
    network: Network,
    asked: QuestionSet,
    heads: Heads,
    rule: Confidence,
    grade: Grade | None,
    samples: int | None,
    max_new_tokens: int,
) -> dict[str, Graded]:
    model, tokenizer = network
    prompts, form = asked.prompts(tokenizer), asked.prompt_form(tokenizer)
    match = question_sets._contains_reference if asked.chat else question_sets.exact_match
    limits: Any = {"max_new_tokens": max_new_tokens, "one_line": not asked.chat}
    answers = asking._ask_each(*network, prompts, heads, **limits)
    drawn: list[list[str]] = []
    if samples is not None:
        limits |= {"samples": samples, "batch": max(1, _DRAWN_TOGETHER // samples)}
        drawn = asking.draw_answers(*network, prompts, **limits)
    graded = {}
    for name, head in heads.items():
        values = _confidences(network, asked, answers[name], head, rule)
        source, rows = _source_of(model, head, rule, form).row(), []
        pairs = zip(asked.questions, answers[name], strict=True)
        for i, (question, answer) in enumerate(pairs):
            row: Row = {"question": question.text, "answer": answer.text}
            row |= {"token_probs": answer.probs.tolist(), "token_texts": answer.token_texts}
            row |= {"samples": drawn[i]} if drawn else {}
            row |= {"truncated": True} if answer.truncated else {}
            right = match(answer.text, question.references)
            right = bool(grade(answer.text, question)) if grade is not None else right
            rows.append({**row, "confidence": float(values[i]), **source, "correct": right})
        graded[name] = Graded(AnswerRows.of(rows))
    return graded


def check_lengths(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    *,
    confidence: Confidence | None = None,
    max_new_tokens: int | None = None,
) -> None:
    """Raise if any prompt is too long for the model, before the first answer is generated."""
    if asked.form == "texts":
        choices._encoded_choices(model, tokenizer, asked.questions, asked.shots)
        return
    if asked.form == "letters":
        prompts = [question_sets._choice_prompt(one, asked.shots) for one in asked.questions]
        longest = 1
    else:
        prompts, longest = asked.prompts(tokenizer), asked.longest(max_new_tokens)
    asking._checked_prompts(model, tokenizer, prompts, longest)
    if confidence == "p_true" and asked.form == "written":
        second = asked.verdict_prompts(tokenizer, [""] * len(asked.questions))
        asking._checked_prompts(model, tokenizer, second, longest + 1)


def _lettered(
    network: Network,
    asked: QuestionSet,
    heads: Heads,
    sources: Mapping[str, Source],
    permutations: Permutations | None,
) -> dict[str, Graded]:
    options: Any = {"shots": asked.shots, "permutations": permutations}
    found = choices._ask_choices_each(*network, asked.questions, heads, **options)
    *_, (last, shown) = found.items()
    own, labels, source = shown.logits[:, 0], shown.labels, sources[last]
    tried = {name: (each.logits[:, 0], sources[name]) for name, each in found.items()}
    if permutations is not None:
        renamed = source._replace(confidence="letters, permuted")
        tried["permuted"] = shown.averaged(), renamed
    if len(labels) >= MIN_QUESTIONS:
        renamed = source._replace(confidence="letters, calibrated")
        with silently():
            tried["calibrated"] = calibrated_choices(own, labels), renamed
    return {
        name: Graded(_chosen(asked, rows, origin), option_bias(rows, labels))
        for name, (rows, origin) in tried.items()
    }


def _chosen(
    asked: QuestionSet, logits: Sequence[FloatArray] | FloatArray, source: Source
) -> AnswerRows:
    """Answers that are the likeliest choices, from log-probabilities of the choices."""
    rows: list[Row] = []
    for question, row in zip(asked.questions, logits, strict=True):
        best = int(row.argmax())
        chosen: Row = {"question": question.text, "answer": question.choices[best]}
        chosen |= {"confidence": float(np.exp(row.max())), **source.row()}
        rows.append({**chosen, "correct": question.answer == best})
    return AnswerRows.of(rows)


def calibrated_choices(
    logits: FloatArray, labels: IntArray, keep_argmax: bool = False
) -> FloatArray:
    """Calibrate the logits ``(n, choices)`` of questions, each by a fit on other folds of them.

    Returns log-probabilities. A preference for some letters is corrected, so that answers may
    change, unless ``keep_argmax``.
    """
    auto = Auto(keep_argmax=keep_argmax)
    fitted = cross_fit({"logits": logits, "labels": labels}, method=auto, folds=FOLDS, level=None)
    result = np.empty_like(logits)
    for i, calibrator in enumerate(fitted.calibrators):
        result[fitted.folds == i] = calibrator.transform(logits[fitted.folds == i])
    return np.asarray(log_softmax(result, axis=-1))


def evaluate_graded(graded: Mapping[str, Graded], *, level: float | None = 0.9) -> Evaluations:
    """Measure the calibration of answers of :func:`grade_questions`."""
    return {
        name: evaluate_answers(each.answers.confidences()[0], each.answers.grades(), level=level)
        for name, each in graded.items()
    }


def gains_of_graded(graded: Mapping[str, Graded]) -> Gains:
    """Gains of answers over those with one temperature; without it there are none."""
    scores = {}
    for name, (answers, _) in graded.items():
        confidence = answers.confidences()[0]
        own = np.where(answers.grades(), confidence, 1 - confidence)
        scores[name] = {"nll": -np.log(np.maximum(own, SMALLEST)), "brier": (1 - own) ** 2}
    count = len(graded["before"].answers.rows)
    return _gains_over_one_temperature(scores, np.arange(count), np.ones(count))


def answer_question(
    model: Any,
    tokenizer: Any,
    question: str,
    *,
    fitted: FittedHead | None = None,
    calibrator: AnswerCalibrator | None = None,
    confidence: Confidence | None = None,
    min_confidence: float = 0.0,
    max_new_tokens: int = _SENTENCES,
    chat: bool = True,
) -> Answer:
    """Answer a question with a calibrated confidence, or abstain.

    ``calibrator`` turns the confidence into the chance that the answer is right; its threshold
    applies besides ``min_confidence``. ``confidence`` is by default that of the calibrator, or
    ``geometric``. With ``chat`` the question is rendered with the chat template.
    """
    rule, network = confidence_of(calibrator, confidence), (model, tokenizer)
    asked = QuestionSet([Question(question, ())], [], chat=chat)
    prompts, form = [question], "plain"
    if chat:
        prompts, form = asked.prompts(tokenizer), asked.prompt_form(tokenizer)
    if calibrator is not None:
        calibrator.source_.check(_source_of(model, fitted, rule, form), _REMEDY)
    (answer,) = asking.ask(*network, prompts, fitted=fitted, max_new_tokens=max_new_tokens)
    values, required = _confidences(network, asked, [answer], fitted, rule), min_confidence
    if calibrator is not None:
        values = calibrator.predict(values)
        if calibrator.threshold_ is not None:
            required = max(required, calibrator.threshold_.threshold)
    return answer._replace(confidence=float(values[0]), required=required)


def confidence_of(calibrator: AnswerCalibrator | None, confidence: str | None) -> Confidence:
    """Return the confidence that an answer calibrator needs; raise if another is asked for."""
    known = "geometric" if calibrator is None else calibrator.source_.confidence
    rule: Any = confidence or known
    if not rule:
        raise ValueError("the answer calibrator was fitted on other confidences: pass confidence")
    if calibrator is not None and known and rule != known:
        raise ValueError(
            f"the answer calibrator was fitted on {printable(known)} confidences, got "
            f"confidence={confidence}: leave it out"
        )
    if rule not in CONFIDENCES:
        raise ValueError(
            f"the answer calibrator is for confidences of {printable(rule)}, not computed "
            "here: apply it to a file of answers, by calibrant llm answers apply"
        )
    return rule  # type: ignore[no-any-return]


def _confidences(
    network: Network,
    asked: QuestionSet,
    answers: Sequence[Answer],
    fitted: FittedHead | None,
    rule: Confidence,
) -> FloatArray:
    if rule != "p_true":
        return answer_confidence([answer.probs for answer in answers], rule)
    prompts = asked.verdict_prompts(network[1], [answer.text for answer in answers])
    return choices.ask_true(*network, prompts, fitted=fitted)


def _source_of(model: Any, fitted: FittedHead | None, confidence: str, prompt: str) -> Source:
    """Return the source of confidences of a model, with digests of its and the head's values."""
    digest, head = fingerprint_of(huggingface._plain_model(model)).digest, "none"
    if fitted is not None:
        total = hashlib.sha256(fitted.head.kind.encode())
        for name, value in sorted(fitted.state_dict().items()):
            total.update(name.encode())
            total.update(value.detach().cpu().double().numpy().astype("<f8").tobytes())
        head = total.hexdigest()[:16]
    return Source(confidence, prompt, digest, head, "greedy")
