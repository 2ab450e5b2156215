"""Let a model answer a set of questions, and grade the answers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import log_softmax

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.engines import Progress
from calibrant.calibrators.auto import Auto
from calibrant.llm.answers import asking, questions as question_sets
from calibrant.llm.answers.asking import Answer
from calibrant.llm.answers.confidence import Aggregator, answer_confidence
from calibrant.llm.answers.drawing import draw_answers
from calibrant.llm.answers.graded import GradedAnswers, Source
from calibrant.llm.answers.likelihoods import ask_texts_each, encoded_choices
from calibrant.llm.answers.option_bias import Permutations, PermutedChoices, option_bias
from calibrant.llm.answers.questions import Question
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models import huggingface
from calibrant.llm.models.fingerprint import fingerprint_of
from calibrant.workflows.fit import cross_fit

FOLDS, FEWEST = 5, 100  # folds of the questions for their calibration, and how many these must be
ONE_LINE, SENTENCES = 32, 64
"""Largest numbers of tokens of a short answer and of one in sentences."""
BATCH = 16
"""Samples that are drawn together."""
Confidence: TypeAlias = Aggregator | Literal["p_true"]
"""An aggregation of token probabilities, or the model's own verdict in a second prompt."""
Form: TypeAlias = Literal["written", "letters", "texts"]
"""Answers that the model writes, letters of choices, or choices that it finds likeliest."""
Grade: TypeAlias = Callable[[str, Question], bool]
"""Returns True if an answer to a question is right."""


class QuestionSet(NamedTuple):
    """Questions to ask, solved ones to show before them, and the form of the answers."""

    questions: list[Question]
    shots: list[Question]
    form: Form = "written"


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
        solved = question_sets.first_of_each(question_sets.read_mmlu(path, "dev"), shots)
        whole = question_sets.read_mmlu(path, "test")
        drawn = question_sets.subset(whole, limit or len(whole), seed=seed)
        return QuestionSet(drawn, solved, "letters")
    is_csv, shots = str(path).endswith(".csv"), 0 if chat else shots
    whole = (question_sets.read_truthfulqa if is_csv else question_sets.read_questions)(path)
    if len(whole) <= shots:
        raise ValueError(f"{path} has {len(whole)} questions, too few for {shots} shots: use fewer")
    drawn = question_sets.subset(whole, (limit or len(whole)) + shots, seed=seed)
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
    keep_predictions: bool = False,
    permutations: Permutations | None = None,
    samples: int | None = None,
    max_new_tokens: int | None = None,
    progress: Progress | None = None,
) -> dict[str, GradedAnswers]:
    """Let a model answer questions; return its answers ``before`` and with a ``head``.

    The answers are also measured with the one temperature, ``global``, that the head was compared
    with.

    Parameters
    ----------
    asked : QuestionSet
        Written answers are one line after solved examples or, with ``chat``, whole answers to the
        question alone, as of :func:`answer_question`. Choices between texts are made by their
        likelihood.
    confidence : str, optional
        Of written answers.
    grade : callable, optional
        Returns, for a written answer and its question, True if it is right. By default that is an
        exact match of a reference, or with ``chat`` an answer that contains one.
    keep_predictions : bool
        Letters of at least 100 questions are also returned ``calibrated``, each question by
        :class:`calibrant.Auto`, fitted on the answers in other folds. It corrects a preference for
        some letters and may so change answers, unless this is True.
    permutations : {"cyclic", "all"}, optional
        Ask questions that are answered by letters with their options in several orders, and also
        return the answers ``permuted``, by averages over the orders, which have no preference.
    samples : int, optional
        Draw so many further answers to each question, by :func:`~calibrant.llm.answers.drawing.\
draw_answers`, from the model without a head.
    max_new_tokens : int, optional
        Largest number of tokens of a written answer, by default 32, with ``chat`` 64.
    """
    if permutations is not None and asked.form != "letters":
        raise ValueError(
            f"permutations are for answers by letters, and these are {asked.form}: leave them out"
        )
    written = {"grade": grade, "samples": samples, "max_new_tokens": max_new_tokens}
    for name, value in written.items():
        if value is not None and asked.form != "written":
            raise ValueError(
                f"{name} is for written answers, and these are {asked.form}: replace the form of "
                "the questions by 'written'"
            )
    lengths: Any = {"chat": chat, "max_new_tokens": max_new_tokens}
    check_lengths(model, tokenizer, asked, confidence=confidence, **lengths)
    heads = fitted.beside_one_temperature() if fitted else {"before": None}
    if asked.form == "written":
        prompts = _prompts(tokenizer, asked, chat)
        limits = {**_limits(**lengths), "progress": progress}
        answers = asking.ask_each(model, tokenizer, prompts, heads, **limits)
        graded = _written(model, tokenizer, asked, heads, answers, confidence, chat, grade)
        if samples is None:
            return graded
        batch = max(1, BATCH // samples)
        drawn = draw_answers(model, tokenizer, prompts, samples=samples, batch=batch, **limits)
        return {name: answers._replace(samples=drawn) for name, answers in graded.items()}
    shots = f"{len(asked.shots)} shots"
    sources = {name: source_of(model, head, asked.form, shots) for name, head in heads.items()}
    if asked.form == "texts":
        texts = ask_texts_each(
            model, tokenizer, asked.questions, heads, shots=asked.shots, progress=progress
        )
        return {name: _chosen(asked, rows, sources[name]) for name, rows in texts.items()}
    return _lettered(
        model, tokenizer, asked, heads, sources, keep_predictions, permutations, progress
    )


def _lettered(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    heads: Mapping[str, FittedHead | None],
    sources: Mapping[str, Source],
    keep_predictions: bool,
    permutations: Permutations | None,
    progress: Progress | None,
) -> dict[str, GradedAnswers]:
    options: Any = {"shots": asked.shots, "progress": progress}
    permuted: dict[str, PermutedChoices] = {}
    if permutations is None:
        logits, labels = asking.ask_choices_each(
            model, tokenizer, asked.questions, heads, **options
        )
    else:
        permuted = asking.ask_permuted_each(
            model, tokenizer, asked.questions, heads, permutations=permutations, **options
        )
        logits = {name: each.logits[:, 0] for name, each in permuted.items()}
        labels = next(iter(permuted.values())).labels
    tried = {name: (rows, sources[name]) for name, rows in logits.items()}
    *_, (last, (rows, source)) = tried.items()
    if permuted:
        renamed = source._replace(confidence="letters, permuted")
        tried["permuted"] = permuted[last].averaged(), renamed
    if len(labels) >= FEWEST:
        renamed = source._replace(confidence="letters, calibrated")
        tried["calibrated"] = calibrated_choices(rows, labels, keep_predictions), renamed
    return {
        name: _chosen(asked, rows, origin)._replace(option_bias=option_bias(rows, labels))
        for name, (rows, origin) in tried.items()
    }


def _chosen(
    asked: QuestionSet, logits: Sequence[FloatArray] | FloatArray, source: Source
) -> GradedAnswers:
    """Answers that are the likeliest choices, from log-probabilities of the choices."""
    best = [int(row.argmax()) for row in logits]
    pairs = list(zip(asked.questions, best, strict=True))
    return GradedAnswers(
        [question.text for question in asked.questions],
        [question.choices[at] for question, at in pairs],
        np.exp([row.max() for row in logits]),
        np.array([question.answer == at for question, at in pairs]),
        source,
    )


def _written(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    heads: Mapping[str, FittedHead | None],
    answers: Mapping[str, list[Answer]],
    confidence: Confidence | None,
    chat: bool,
    grade: Grade | None,
) -> dict[str, GradedAnswers]:
    rule, form = confidence or "geometric", form_of(tokenizer, chat)
    judge = grade or (_contains if chat else _matches)
    prompt = prompt_form(tokenizer, chat) if chat else f"short, {len(asked.shots)} shots"
    graded = {}
    for name, head in heads.items():
        texts = [answer.text for answer in answers[name]]
        pairs = zip(texts, asked.questions, strict=True)
        graded[name] = GradedAnswers(
            [question.text for question in asked.questions],
            texts,
            confidences(model, tokenizer, asked.questions, answers[name], head, rule, form),
            np.array([bool(judge(text, question)) for text, question in pairs]),
            source_of(model, head, rule, prompt),
            [answer.probs for answer in answers[name]],
            token_texts=[answer.token_texts for answer in answers[name]],
            truncated=[answer.truncated for answer in answers[name]],
        )
    return graded


def check_lengths(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    *,
    chat: bool = False,
    max_new_tokens: int | None = None,
    confidence: Confidence | None = None,
) -> None:
    """Raise if any prompt is too long for the model, before the first answer is generated."""
    if asked.form == "texts":
        encoded_choices(model, tokenizer, asked.questions, asked.shots)
    elif asked.form == "letters":
        prompts = asking.choice_prompts(asked.questions, asked.shots)
        asking.checked_prompts(model, tokenizer, prompts, 1)
    else:
        prompts, form = _prompts(tokenizer, asked, chat), form_of(tokenizer, chat)
        longest = _limits(chat, max_new_tokens)["max_new_tokens"]
        check_written(model, tokenizer, asked.questions, prompts, form, confidence, longest)


def check_written(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    prompts: Sequence[str],
    form: Callable[[str], str],
    confidence: Confidence | None,
    max_new_tokens: int,
) -> None:
    """Raise if a prompt is too long or, with P(True), the second prompt might be."""
    asking.checked_prompts(model, tokenizer, prompts, max_new_tokens)
    if confidence == "p_true":
        empty = [form(question_sets.verdict_prompt(question, "")) for question in questions]
        asking.checked_prompts(model, tokenizer, empty, max_new_tokens + 1)


def _prompts(tokenizer: Any, asked: QuestionSet, chat: bool) -> list[str]:
    if chat:
        return [asking.chat_prompt(tokenizer, question.text) for question in asked.questions]
    return [question_sets.short_prompt(question, asked.shots) for question in asked.questions]


def _limits(chat: bool, max_new_tokens: int | None) -> dict[str, Any]:
    """Return where an answer ends, for :func:`asking.ask_each` and :func:`draw_answers`."""
    longest = max_new_tokens or (SENTENCES if chat else ONE_LINE)
    return {"max_new_tokens": longest, "one_line": not chat}


def form_of(tokenizer: Any, chat: bool) -> Callable[[str], str]:
    """Return the function that makes a prompt of a text."""
    return (lambda text: asking.chat_prompt(tokenizer, text)) if chat else str


def _matches(answer: str, question: Question) -> bool:
    return question_sets.exact_match(answer, question.references)


def _contains(answer: str, question: Question) -> bool:
    return question_sets.contains_reference(answer, question.references)


def prompt_form(tokenizer: Any, chat: bool) -> str:
    """Return the name of the form in which a question alone is put to a model."""
    return "chat" if chat and getattr(tokenizer, "chat_template", None) else "plain"


def source_of(model: Any, fitted: FittedHead | None, confidence: str, prompt: str) -> Source:
    """Return the source of confidences of a model."""
    digest = fingerprint_of(huggingface.plain_model(model)).digest
    head = "none" if fitted is None else head_digest(fitted)
    return Source(confidence, prompt, digest, head, "greedy")


def head_digest(fitted: FittedHead) -> str:
    """Return a hash of the kind and the learned values of a head."""
    total = hashlib.sha256(fitted.head.kind.encode())
    for name, value in sorted(fitted.state_dict().items()):
        total.update(name.encode())
        total.update(value.detach().cpu().double().numpy().astype("<f8").tobytes())
    return total.hexdigest()[:16]


def calibrated_choices(
    logits: FloatArray, labels: IntArray, keep_predictions: bool = False
) -> FloatArray:
    """Calibrate the logits ``(n, choices)`` of questions, each by a fit on other folds of them.

    Returns log-probabilities. A preference for some letters is corrected: the answer may change,
    unless ``keep_predictions``.
    """
    auto = Auto(keep_argmax=keep_predictions)
    fitted = cross_fit({"logits": logits, "labels": labels}, method=auto, folds=FOLDS, level=None)
    result = np.empty_like(logits)
    for i, calibrator in enumerate(fitted.calibrators):
        result[fitted.folds == i] = calibrator.transform(logits[fitted.folds == i])
    return np.asarray(log_softmax(result, axis=-1))


def confidences(
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
