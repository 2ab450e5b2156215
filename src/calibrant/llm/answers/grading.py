"""Let a model answer questions: a set of them, to be graded, or one, where it may abstain."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import log_softmax

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.engines import Progress
from calibrant._core.messages import printable
from calibrant.calibrators.auto import Auto
from calibrant.llm.answers import asking, choices, questions as question_sets
from calibrant.llm.answers.asking import Answer
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.choices import OptionBias, Permutations, option_bias
from calibrant.llm.answers.confidence import (
    AGGREGATORS,
    SMALLEST,
    Aggregator,
    answer_confidence,
    evaluate_answers,
)
from calibrant.llm.answers.questions import Question
from calibrant.llm.answers.rows import AnswerRows, Row, Source
from calibrant.llm.heads.fitted import FittedHead, Gains, _gains_over_one_temperature
from calibrant.llm.models import huggingface
from calibrant.llm.models.huggingface import fingerprint_of
from calibrant.metrics.clustered import Evaluations
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


class QuestionSet(NamedTuple):
    """Questions to ask, solved ones to show before them, and the form of the answers."""

    questions: list[Question]
    shots: list[Question]
    form: Form = "written"


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
    return QuestionSet(drawn[shots:], drawn[:shots], form)


def grade_questions(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    *,
    fitted: FittedHead | None = None,
    confidence: Confidence | None = None,
    chat: bool = False,
    grade: Grade | None = None,
    permutations: Permutations | None = None,
    samples: int | None = None,
    max_new_tokens: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Graded]:
    """Let a model answer questions; return its answers ``before`` and with a ``head``.

    The answers are also measured with the one temperature, ``global``, that the head was compared
    with. Letters of at least 100 questions are also returned ``calibrated``
    (:func:`calibrated_choices`).

    Parameters
    ----------
    asked : QuestionSet
        Written answers are one line after solved examples or, with ``chat``, whole answers to the
        question alone. Choices between texts are made by their likelihood.
    confidence : str, optional
        Of written answers.
    grade : callable, optional
        Returns, for a written answer and its question, True if it is right. By default that is an
        exact match of a reference, or with ``chat`` an answer that contains one.
    permutations : {"cyclic", "all"}, optional
        Ask questions that are answered by letters with their options in several orders, and also
        return the answers ``permuted``, by averages over the orders, which have no preference.
    samples : int, optional
        Draw so many further answers to each question, by :func:`~calibrant.llm.answers.asking.\
draw_answers`, from the model without a head.
    max_new_tokens : int, optional
        Largest number of tokens of a written answer, by default 32, with ``chat`` 64.
    """
    own: dict[Form, dict[str, Any]] = {
        "written": {"grade": grade, "samples": samples, "max_new_tokens": max_new_tokens},
        "letters": {"permutations": permutations},
    }
    for form, options in own.items():
        for name, value in options.items():
            if value is not None and asked.form != form:
                raise ValueError(
                    f"{name} is for questions of the form {form!r}, and these are {asked.form!r}: "
                    f"leave it out"
                )
    lengths: Any = {"chat": chat, "confidence": confidence, "max_new_tokens": max_new_tokens}
    check_lengths(model, tokenizer, asked, **lengths)
    network = (model, tokenizer)
    heads = fitted.beside_one_temperature() if fitted else {"before": None}
    if asked.form == "written":
        rule, limit = confidence or "geometric", _longest(chat, max_new_tokens)
        return _written(network, asked, heads, rule, chat, grade, samples, limit, progress)
    shots = f"{len(asked.shots)} shots"
    sources = {name: _source_of(model, head, asked.form, shots) for name, head in heads.items()}
    if asked.form == "letters":
        return _lettered(network, asked, heads, sources, permutations, progress)
    texts = choices.ask_texts_each(
        model, tokenizer, asked.questions, heads, shots=asked.shots, progress=progress
    )
    return {name: Graded(_chosen(asked, rows, sources[name])) for name, rows in texts.items()}


def _written(
    network: tuple[Any, Any],
    asked: QuestionSet,
    heads: Heads,
    rule: Confidence,
    chat: bool,
    grade: Grade | None,
    samples: int | None,
    max_new_tokens: int,
    progress: Progress | None,
) -> dict[str, Graded]:
    model, tokenizer = network
    prompts, form, prompt = _prompts(tokenizer, asked, chat)
    match = question_sets._contains_reference if chat else question_sets.exact_match
    limits: Any = {"max_new_tokens": max_new_tokens, "one_line": not chat, "progress": progress}
    answers = asking._ask_each(model, tokenizer, prompts, heads, **limits)
    drawn: list[list[str]] = []
    if samples is not None:
        batch = max(1, _DRAWN_TOGETHER // samples)
        limits |= {"samples": samples, "batch": batch}
        drawn = asking.draw_answers(model, tokenizer, prompts, **limits)
    graded = {}
    for name, head in heads.items():
        values = _confidences(network, asked.questions, answers[name], head, rule, form)
        source, rows = _source_of(model, head, rule, prompt).row(), []
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


def _prompts(
    tokenizer: Any, asked: QuestionSet, chat: bool
) -> tuple[list[str], Callable[[str], str], str]:
    """Return the prompts for written answers, what makes prompts of others, and their form."""
    if not chat:
        prompts = [question_sets.short_prompt(one, asked.shots) for one in asked.questions]
        return prompts, str, f"short, {len(asked.shots)} shots"
    form = partial(asking.chat_prompt, tokenizer)
    name = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    return [form(question.text) for question in asked.questions], form, name


def _longest(chat: bool, max_new_tokens: int | None) -> int:
    return max_new_tokens or (_SENTENCES if chat else _ONE_LINE)


def check_lengths(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    *,
    chat: bool = False,
    confidence: Confidence | None = None,
    max_new_tokens: int | None = None,
) -> None:
    """Raise if any prompt is too long for the model, before the first answer is generated."""
    if asked.form == "texts":
        choices._encoded_choices(model, tokenizer, asked.questions, asked.shots)
    elif asked.form == "letters":
        prompts = choices._choice_prompts(asked.questions, asked.shots)
        asking._checked_prompts(model, tokenizer, prompts, 1)
    else:
        longest = _longest(chat, max_new_tokens)
        prompts, form, _ = _prompts(tokenizer, asked, chat)
        asking._checked_prompts(model, tokenizer, prompts, longest)
        if confidence == "p_true":
            second = [form(question_sets.verdict_prompt(one, "")) for one in asked.questions]
            asking._checked_prompts(model, tokenizer, second, longest + 1)


def _lettered(
    network: tuple[Any, Any],
    asked: QuestionSet,
    heads: Heads,
    sources: Mapping[str, Source],
    permutations: Permutations | None,
    progress: Progress | None,
) -> dict[str, Graded]:
    options: Any = {"shots": asked.shots, "permutations": permutations, "progress": progress}
    found = choices._ask_choices_each(*network, asked.questions, heads, **options)
    *_, (last, shown) = found.items()
    own, labels, source = shown.logits[:, 0], shown.labels, sources[last]
    tried = {name: (each.logits[:, 0], sources[name]) for name, each in found.items()}
    if permutations is not None:
        renamed = source._replace(confidence="letters, permuted")
        tried["permuted"] = shown.averaged(), renamed
    if len(labels) >= MIN_QUESTIONS:
        renamed = source._replace(confidence="letters, calibrated")
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


def calibrated_choices(logits: FloatArray, labels: IntArray) -> FloatArray:
    """Calibrate the logits ``(n, choices)`` of questions, each by a fit on other folds of them.

    Returns log-probabilities. A preference for some letters is corrected, so that answers may
    change.
    """
    auto = Auto(keep_argmax=False)
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
    rule = confidence_of(calibrator, confidence)
    asked, network = [Question(question, ())], (model, tokenizer)
    prompts: list[str] = [question]
    form: Callable[[str], str] = str
    prompt = "plain"
    if chat:
        prompts, form, prompt = _prompts(tokenizer, QuestionSet(asked, []), chat)
    if calibrator is not None:
        calibrator.source_.check(_source_of(model, fitted, rule, prompt), _REMEDY)
    (answer,) = asking.ask(*network, prompts, fitted=fitted, max_new_tokens=max_new_tokens)
    values, required = _confidences(network, asked, [answer], fitted, rule, form), min_confidence
    if calibrator is not None:
        values = calibrator.predict_confidences(values)
        if calibrator.threshold_ is not None:
            required = max(required, calibrator.threshold_.threshold)
    return answer._replace(confidence=float(values[0]), required=required)


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


def _confidences(
    network: tuple[Any, Any],
    questions: Sequence[Question],
    answers: Sequence[Answer],
    fitted: FittedHead | None,
    rule: Confidence,
    form: Callable[[str], str],
) -> FloatArray:
    """Confidence of each answer; ``form`` makes a prompt of a question."""
    if rule != "p_true":
        return answer_confidence([answer.probs for answer in answers], rule)
    pairs = zip(questions, answers, strict=True)
    prompts = [form(question_sets.verdict_prompt(one, answer.text)) for one, answer in pairs]
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
