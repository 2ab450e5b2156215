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
from calibrant.llm.answers import asking, choices, questions as question_sets
from calibrant.llm.answers.asking import Answer
from calibrant.llm.answers.confidence import Aggregator, answer_confidence
from calibrant.llm.answers.graded import GradedAnswers, Source
from calibrant.llm.answers.option_bias import Permutations, PermutedChoices, option_bias
from calibrant.llm.answers.questions import Question
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models import huggingface
from calibrant.llm.models.fingerprint import fingerprint_of
from calibrant.workflows.fit import cross_fit

FOLDS, MIN_QUESTIONS = 5, 100
"""Folds for the calibration of choices, and the fewest questions that it needs."""
ONE_LINE, SENTENCES = 32, 64
"""Largest numbers of tokens of a short answer and of one in sentences."""
_DRAWN_TOGETHER = 16
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
    lengths: Any = {"chat": chat, "max_new_tokens": max_new_tokens}
    check_lengths(model, tokenizer, asked, confidence=confidence, **lengths)
    network = (model, tokenizer)
    heads = fitted.beside_one_temperature() if fitted else {"before": None}
    if asked.form == "written":
        return _written(
            network, asked, heads, confidence or "geometric", grade, samples, progress, **lengths
        )
    shots = f"{len(asked.shots)} shots"
    sources = {name: source_of(model, head, asked.form, shots) for name, head in heads.items()}
    if asked.form == "texts":
        texts = choices.ask_texts_each(
            model, tokenizer, asked.questions, heads, shots=asked.shots, progress=progress
        )
        return {name: _chosen(asked, rows, sources[name]) for name, rows in texts.items()}
    return _lettered(network, asked, heads, sources, keep_predictions, permutations, progress)


def _written(
    network: tuple[Any, Any],
    asked: QuestionSet,
    heads: Heads,
    rule: Confidence,
    grade: Grade | None,
    samples: int | None,
    progress: Progress | None,
    *,
    chat: bool,
    max_new_tokens: int | None,
) -> dict[str, GradedAnswers]:
    model, tokenizer = network
    match = question_sets.contains_reference if chat else question_sets.exact_match
    judge: Grade = grade or (lambda text, question: match(text, question.references))
    prompts, form = _prompts(tokenizer, asked, chat), form_of(tokenizer, chat)
    limits: Any = {"max_new_tokens": _longest(chat, max_new_tokens), "one_line": not chat}
    limits["progress"] = progress
    answers = asking.ask_each(model, tokenizer, prompts, heads, **limits)
    prompt = prompt_form(tokenizer, chat) if chat else f"short, {len(asked.shots)} shots"
    graded = {}
    for name, head in heads.items():
        pairs = zip(answers[name], asked.questions, strict=True)
        graded[name] = GradedAnswers(
            [question.text for question in asked.questions],
            [answer.text for answer in answers[name]],
            confidences(model, tokenizer, asked.questions, answers[name], head, rule, form),
            np.array([bool(judge(answer.text, question)) for answer, question in pairs]),
            source_of(model, head, rule, prompt),
            [answer.probs for answer in answers[name]],
            token_texts=[answer.token_texts for answer in answers[name]],
            truncated=[answer.truncated for answer in answers[name]],
        )
    if samples is None:
        return graded
    batch = max(1, _DRAWN_TOGETHER // samples)
    drawn = asking.draw_answers(model, tokenizer, prompts, samples=samples, batch=batch, **limits)
    return {name: answers._replace(samples=drawn) for name, answers in graded.items()}


def _lettered(
    network: tuple[Any, Any],
    asked: QuestionSet,
    heads: Heads,
    sources: Mapping[str, Source],
    keep_predictions: bool,
    permutations: Permutations | None,
    progress: Progress | None,
) -> dict[str, GradedAnswers]:
    options: Any = {"shots": asked.shots, "progress": progress}
    permuted: dict[str, PermutedChoices] = {}
    if permutations is None:
        logits, labels = choices.ask_choices_each(*network, asked.questions, heads, **options)
    else:
        permuted = choices.ask_permuted_each(
            *network, asked.questions, heads, permutations=permutations, **options
        )
        logits = {name: each.logits[:, 0] for name, each in permuted.items()}
        labels = next(iter(permuted.values())).labels
    tried = {name: (rows, sources[name]) for name, rows in logits.items()}
    *_, (last, (rows, source)) = tried.items()
    if permuted:
        renamed = source._replace(confidence="letters, permuted")
        tried["permuted"] = permuted[last].averaged(), renamed
    if len(labels) >= MIN_QUESTIONS:
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
        choices.encoded_choices(model, tokenizer, asked.questions, asked.shots)
    elif asked.form == "letters":
        prompts = choices.choice_prompts(asked.questions, asked.shots)
        asking.checked_prompts(model, tokenizer, prompts, 1)
    else:
        prompts, form = _prompts(tokenizer, asked, chat), form_of(tokenizer, chat)
        longest = _longest(chat, max_new_tokens)
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


def _longest(chat: bool, max_new_tokens: int | None) -> int:
    return max_new_tokens or (SENTENCES if chat else ONE_LINE)


def form_of(tokenizer: Any, chat: bool) -> Callable[[str], str]:
    """Return the function that makes a prompt of a text."""
    return (lambda text: asking.chat_prompt(tokenizer, text)) if chat else str


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
    return choices.ask_true(model, tokenizer, prompts, fitted=fitted)
