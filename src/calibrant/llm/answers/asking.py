"""Put questions to a model: short answers with their confidence, and letters of multiple choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.torch_models import evaluating
from calibrant.llm.answers.choices import LETTERS, choice_logits, choice_tokens, p_true
from calibrant.llm.answers.confidence import Aggregator, answer_confidence
from calibrant.llm.answers.questions import Question, choice_prompt
from calibrant.llm.fingerprint import mark_of
from calibrant.llm.heads.attach import Report, end_tokens, fitting, report
from calibrant.llm.heads.fit import FittedHead
from calibrant.llm.huggingface import inputs_device, positions_of
from calibrant.llm.tokens.documents import prompt_ids

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers give for a part of a character."""
Told = Callable[[int, int], object]
"""Told (prompts done, prompts in all)."""


class Answer(NamedTuple):
    """What a model wrote, and how sure it is.

    Attributes
    ----------
    text : str
        Up to the first line break.
    pieces : list of str
        What each token adds to the text; a character of several tokens comes with its last.
    probs : (tokens,)
        Calibrated probability of each token.
    confidence : float
        Of the whole answer.
    cut : bool
        Whether it would have gone on, had there been more tokens to write.
    """

    text: str
    pieces: list[str]
    probs: FloatArray
    confidence: float
    cut: bool


def chat_prompt(tokenizer: Any, question: str) -> str:
    """A question as the chat model gets it, ready for an answer; itself where there is no template.

    Parameters
    ----------
    tokenizer
        Of Hugging Face.
    question : str

    Returns
    -------
    str
        For :func:`ask`.
    """
    if not getattr(tokenizer, "chat_template", None):
        return question
    turns = [{"role": "user", "content": question}]
    made: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return made


def ask(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    fitted: FittedHead | None = None,
    how: Aggregator = "geometric",
    most: int = 32,
    batch: int = 8,
    progress: Told | None = None,
) -> list[Answer]:
    """Let a model answer, each time with the likeliest token, up to the first line break.

    The text is that of the model as it is; a head changes the probabilities that are told.

    Parameters
    ----------
    model, tokenizer
        Of Hugging Face.
    prompts : sequence of str
        Also chats that a template has made a text of: what begins with the token for the
        beginning of a text gets no second one.
    fitted : FittedHead, optional
        Without one the probabilities are those of the model.
    how : str
        How those of the tokens become one, as for :func:`answer_confidence`.
    most : int
        Tokens of an answer.
    batch : int
        Prompts that are answered together.
    progress : callable, optional

    Returns
    -------
    list of Answer
    """
    options: dict[str, Any] = {"how": how, "most": most, "batch": batch, "progress": progress}
    return ask_each(model, tokenizer, prompts, {"": fitted}, **options)[""]


def ask_each(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    heads: Mapping[str, FittedHead | None],
    *,
    how: Aggregator = "geometric",
    most: int = 32,
    batch: int = 8,
    progress: Told | None = None,
) -> dict[str, list[Answer]]:
    """Let a model answer once, and tell the confidence under each of several heads.

    Parameters
    ----------
    heads : dict of FittedHead
        By any names; None stands for the model as it is.
    model, tokenizer, prompts, how, most, batch, progress
        As for :func:`ask`.

    Returns
    -------
    dict of lists of Answer
        By the same names; the texts are the same.
    """
    found: dict[str, list[Answer]] = {name: [] for name in heads}
    stop = set(tokenizer.all_special_ids) | end_tokens(model)
    for name, told, _ in _reports(model, tokenizer, prompts, heads, batch, most, progress):
        columns = told.tokens, told.log_probs, told.written
        tokens, logs, written = (column.cpu() for column in columns)
        rows = zip(tokens, logs.double().exp(), written, strict=True)
        found[name] += [_answer(tokenizer, *row, how, stop) for row in rows]
    return found


def _answer(
    tokenizer: Any, tokens: Tensor, probs: Tensor, written: Tensor, how: Aggregator, stop: set[int]
) -> Answer:
    kept = written.nonzero()[:, 0].tolist()
    ids = [int(tokens[i]) for i in kept]
    count = _length(tokenizer, ids, stop)
    claimed = probs[kept[:count]].numpy()
    text = tokenizer.decode(ids[:count], skip_special_tokens=True).strip()
    sure = float(answer_confidence([claimed], how)[0])
    cut = count == len(tokens) and ids[-1] not in stop
    return Answer(text, _pieces(tokenizer, ids[:count]), claimed, sure, cut)


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token adds to the text of those before it.

    Alone, a part of a character is no text, and some tokenizers give a word without its blank.
    """
    found, done = [], ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
        if text.endswith(BROKEN) and count < len(ids):
            text = done
        found.append(text[len(done) :])
        done = text
    return found


def ask_choices(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    shots: Sequence[Question] = (),
    fitted: FittedHead | None = None,
    prefix: str | None = None,
    batch: int = 8,
    progress: Told | None = None,
) -> tuple[FloatArray, IntArray]:
    """Logits of the choices of each question, and the numbers of the right ones.

    Parameters
    ----------
    model, tokenizer
        Of Hugging Face.
    questions : sequence of Question
        With equally many choices.
    shots : sequence of Question
        Solved examples; those with the subject of a question stand before it, or all where none
        has.
    fitted : FittedHead, optional
    prefix : str, optional
        As for :func:`choice_tokens`; None is a blank, or nothing where the tokenizer wants that.
    batch : int
    progress : callable, optional

    Returns
    -------
    logits : (n, choices)
        For :func:`calibrant.evaluate`, and for the calibrators.
    labels : (n,)
    """
    options: dict[str, Any] = {"prefix": prefix, "batch": batch, "progress": progress}
    found, labels = ask_choices_each(
        model, tokenizer, questions, {"": fitted}, shots=shots, **options
    )
    return found[""], labels


def ask_choices_each(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    heads: Mapping[str, FittedHead | None],
    *,
    shots: Sequence[Question] = (),
    prefix: str | None = None,
    batch: int = 8,
    progress: Told | None = None,
) -> tuple[dict[str, FloatArray], IntArray]:
    """Logits of the choices under each of several heads, from one pass of the model.

    Parameters
    ----------
    heads : dict of FittedHead
        By any names; None stands for the model as it is.
    model, tokenizer, questions, shots, prefix, batch, progress
        As for :func:`ask_choices`.

    Returns
    -------
    logits : dict of (n, choices)
        By the same names.
    labels : (n,)
    """
    counts = {len(question.choices) for question in questions}
    if len(counts) != 1 or not min(counts):
        raise ValueError(
            f"questions must have equally many choices, got {sorted(counts)}: put them in parts"
        )
    letters = choice_tokens(tokenizer, LETTERS[: counts.pop()], prefix=prefix)
    prompts = [choice_prompt(question, _own(shots, question)) for question in questions]
    found: dict[str, list[FloatArray]] = {name: [] for name in heads}
    for name, told, first in _reports(model, tokenizer, prompts, heads, batch, 1, progress):
        found[name] += [choice_logits(first * told.sharpness, letters)]
    labels = np.array([question.answer for question in questions])
    return {name: np.concatenate(parts) for name, parts in found.items()}, labels


def ask_true(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    fitted: FittedHead | None = None,
    batch: int = 8,
    progress: Told | None = None,
) -> FloatArray:
    """P(True) of answers that a model is shown, its own for instance; see :func:`p_true`.

    Parameters
    ----------
    prompts : sequence of str
        That ask for True or False, as those of :func:`verdict_prompt`.
    model, tokenizer, fitted, batch, progress
        As for :func:`ask`.

    Returns
    -------
    (n,)
        For ``AnswerCalibrator(how=None)``.
    """
    verdicts = [_spelled(tokenizer, word) for word in ("True", "False")]
    told = _reports(model, tokenizer, prompts, {"": fitted}, batch, 1, progress)
    return np.concatenate([p_true(first * one.sharpness, *verdicts) for _, one, first in told])


def _spelled(tokenizer: Any, word: str) -> list[int]:
    """Tokens that are a word: after a blank or a line break, with a capital letter or without."""
    forms = [f"{blank}{form}" for blank in (" ", "") for form in (word, word.lower())]
    coded = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
    found = {int(tokens[0]) for tokens in coded if len(tokens) == 1} - {tokenizer.unk_token_id}
    if not found:
        raise ValueError(
            f"the tokenizer has no token of its own for {word!r}: take logits of other words, and "
            "pass them to p_true"
        )
    return sorted(found)


def _reports(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    heads: Mapping[str, FittedHead | None],
    batch: int,
    most: int,
    progress: Told | None,
) -> Iterator[tuple[str, Report, Tensor]]:
    """Yield what each head says of the answers to some prompts at a time.

    With it come the logits ``(rows, vocabulary)`` of their first tokens, as the model has them.
    """
    plain = FittedHead.of_temperature(1.0, mark_of(model))
    tried = {name: plain if fitted is None else fitted for name, fitted in heads.items()}
    for fitted in tried.values():
        fitting(model, fitted)  # before the model writes
    done = 0
    for inputs, output in _generated(model, tokenizer, prompts, batch, most):
        first, mask = output.logits[0].float(), inputs["attention_mask"]
        for name, fitted in tried.items():
            yield name, report(model, fitted, output, attention_mask=mask), first
        done += len(first)
        if progress is not None:
            progress(done, len(prompts))


def _own(shots: Sequence[Question], question: Question) -> Sequence[Question]:
    return [shot for shot in shots if shot.subject == question.subject] or shots


def _generated(
    model: Any, tokenizer: Any, prompts: Sequence[str], batch: int, most: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the inputs and the output of ``generate``, for some prompts at a time."""
    _check_prompts(prompts)
    if batch < 1:
        raise ValueError(f"batch must be 1 or more, got {batch}")
    place, positions = inputs_device(model), positions_of(model)
    with evaluating(model), _left_padded(tokenizer), torch.no_grad():
        for start in range(0, len(prompts), batch):
            ids = [prompt_ids(tokenizer, prompt) for prompt in prompts[start : start + batch]]
            longest = max(map(len, ids))
            if positions and longest + most > positions:
                raise ValueError(
                    f"a prompt of {longest} tokens and an answer of {most} need more than the "
                    f"{positions} positions of {type(model).__name__}: shorten the prompts, show "
                    "fewer solved examples, or lower most"
                )
            inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(place)
            output = model.generate(
                **inputs,
                max_new_tokens=most,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,  # nor any other rule of the model's own
                no_repeat_ngram_size=0,
                return_dict_in_generate=True,
                output_logits=True,
                output_hidden_states=True,
                pad_token_id=tokenizer.pad_token_id,
            )
            yield inputs, output


def _check_prompts(prompts: Any) -> None:
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of texts, got one text: put it into a list")
    if not prompts:
        raise ValueError("there must be a prompt at least, got none")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise TypeError(f"prompts must be texts, got {prompt!r:.60} for prompt {number}")
        if not prompt:
            raise ValueError(f"prompt {number} is empty: there is nothing to go on with")


@contextmanager
def _left_padded(tokenizer: Any) -> Iterator[None]:
    """Answers must follow their prompts at once; some tokenizers have nothing to pad with."""
    before = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        yield
    finally:
        tokenizer.padding_side, tokenizer.pad_token = before


def _length(tokenizer: Any, ids: list[int], stop: set[int]) -> int:
    """Tokens before the first line break or the end; one at least, so that there is a claim."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if ids[count - 1] in stop or "\n" in text.lstrip():
            return max(1, count - 1)
    return len(ids)
