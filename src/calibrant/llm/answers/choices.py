"""Multiple choice, by letters or whole texts, as logits of the choices; P(True) is one of two.

A model that is asked every question with its options in several orders shows its preference for
some letters, and averages of its log-probabilities over the orders do not have it: they are the
reference for what calibration corrects from one order alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from scipy.special import chdtrc, expit, log_softmax, logsumexp
from torch import nn

from calibrant._core.checks import (
    FloatArray,
    IntArray,
    Values,
    as_float64,
    as_labels,
    as_scores,
    check_choice,
    check_whole,
)
from calibrant._core.engines import report
from calibrant._core.showing import as_html, columns_frame, one_line
from calibrant._core.torch_models import evaluating
from calibrant.llm.answers.asking import LengthLimit, _calibrated_generations, end_ids
from calibrant.llm.answers.questions import LETTERS, Question, _choice_prompt, short_prompt
from calibrant.llm.answers.topk import TopLogprobs, _by_token, _shown_tokens
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.documents import Encoded, _encode_documents, _padded
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models import huggingface

if TYPE_CHECKING:
    import pandas as pd

Permutations: TypeAlias = Literal["cyclic", "all"]
"""Rotations of the options, one for each; or all orders, 24 of four options."""
_Order: TypeAlias = tuple[int, ...]
"""Numbers of the options in the order in which they are shown."""


def _option_orders(permutations: Permutations | None, choices: int) -> list[_Order]:
    """Return the orders in which a question with so many options is asked, its own first.

    None is for its own order alone.
    """
    numbers = tuple(range(choices))
    if permutations is None:
        return [numbers]
    check_choice("permutations", permutations, ("cyclic", "all"))
    if permutations == "all":
        return list(itertools.permutations(numbers))
    return [numbers[i:] + numbers[:i] for i in numbers]


class OptionBias(NamedTuple):
    """How often each letter is chosen, and how often it is right. Arrays are ``(letters,)``.

    Attributes
    ----------
    chosen, right : shares of the questions
    prob : mean probability of the letter
    p_value : float
        Of the hypothesis that letters are chosen as often as they are right (Stuart and Maxwell's
        test). Small if there is a preference.
    n : int
        Questions.
    """

    chosen: FloatArray
    right: FloatArray
    prob: FloatArray
    p_value: float
    n: int

    @property
    def letters(self) -> tuple[str, ...]:
        """Names of the options."""
        return LETTERS[: len(self.chosen)]

    @property
    def excess(self) -> float:
        """Share of the answers that would have to move to another letter."""
        return float(np.abs(self.chosen - self.right).sum() / 2)

    def describe(self) -> str:
        """Describe the preference in a sentence."""
        shares = zip(self.letters, self.chosen, self.right, strict=True)
        parts = [f"{name} {100 * c:.0f} % ({100 * r:.0f} %)" for name, c, r in shares]
        return (
            f"chosen letters of {self.n:,} questions, and how often they are right: "
            f"{', '.join(parts)}; p = {self.p_value:.2g} for no preference"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        columns = {name: getattr(self, name).tolist() for name in ("chosen", "right", "prob")}
        about = {"excess": self.excess, "p_value": self.p_value, "n": self.n}
        return {"letters": list(self.letters), **columns, **about}

    def __repr__(self) -> str:
        return one_line(self, f"{100 * self.excess:.1f} % of answers", f"p = {self.p_value:.2g}")

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each letter. Needs pandas."""
        columns = {"chosen": self.chosen, "right": self.right, "prob": self.prob}
        return columns_frame({"option": list(self.letters), **columns})


def option_bias(logits: Values, labels: Values) -> OptionBias:
    """Measure the preference for some letters.

    ``logits`` ``(n, letters)`` are those of the letters, ``labels`` ``(n,)`` the numbers of the
    right ones.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(4, size=300)
    >>> preferring_a = rng.gumbel(size=(300, 4)) + [1.0, 0, 0, 0]
    >>> option_bias(preferring_a, labels).p_value < 0.001
    True
    """
    scores, right = as_float64(logits), as_labels(labels)
    if scores.ndim != 2 or right.shape != scores.shape[:1] or scores.shape[1] < 2:
        raise ValueError(
            f"logits must be (n, letters) and labels (n,), got {np.shape(logits)} and "
            f"{np.shape(labels)}"
        )
    n, letters = scores.shape
    if not n or np.isnan(scores).any() or not ((right >= 0) & (right < letters)).all():
        raise ValueError(
            f"logits must hold questions and no NaN, and labels be from 0 to {letters - 1}, got "
            f"{n} questions and labels {right}: leave out questions without a right option"
        )
    chosen, true = (np.eye(letters)[numbers] for numbers in (scores.argmax(-1), right))
    prob = np.exp(log_softmax(scores, axis=-1)).mean(0)
    # Wald's test that differences (n, letters), which sum to 0, have the mean 0
    off = chosen - true
    inverse = np.linalg.pinv(off.T @ off / n, hermitian=True)
    p_value = float(chdtrc(letters - 1, n * off.mean(0) @ inverse @ off.mean(0)))
    return OptionBias(chosen.mean(0), true.mean(0), prob, p_value, n)


class PermutedChoices(NamedTuple):
    """Logits of questions that were asked with their options in several orders.

    Attributes
    ----------
    logits : (n, orders, letters)
        Of the letters, in the order in which the options were shown.
    labels : (n,)
        Right options, by their numbers in the questions.
    orders : list of tuple
        Numbers of the options in the order in which they were shown; the first is their own.
    """

    logits: FloatArray
    labels: IntArray
    orders: Sequence[_Order]

    def averaged(self) -> FloatArray:
        """Return the log-probabilities ``(n, options)`` of the options, averaged over orders."""
        if len(self.orders) == 1:
            return self.logits[:, 0]
        total = np.zeros_like(self.logits[:, 0])
        for shown, order in zip(self.logits.swapaxes(0, 1), self.orders, strict=True):
            total[:, list(order)] += log_softmax(shown, axis=-1)
        return np.asarray(log_softmax(total / len(self.orders), axis=-1))


def ask_choices(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    shots: Sequence[Question] = (),
    fitted: FittedHead | None = None,
    permutations: Permutations | None = None,
    batch: int = 8,
) -> tuple[FloatArray, IntArray]:
    """Return the logits ``(n, choices)`` of the questions, and the right choices ``(n,)``.

    Parameters
    ----------
    questions : sequence of Question
        With equally many choices.
    shots : sequence of Question
        Solved examples; those with the subject of a question precede it, or all if none has it.
    permutations : {"cyclic", "all"}, optional
        Ask each question with its options in several orders, and average their log-probabilities:
        a preference for some letters cancels. It takes as many times longer.
    model, tokenizer, fitted, batch
        As for :func:`ask`.
    """
    about: Any = {"shots": shots, "permutations": permutations, "batch": batch}
    asked = _ask_choices_each(model, tokenizer, questions, {"": fitted}, **about)[""]
    return asked.averaged(), asked.labels


def _ask_choices_each(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    heads: Mapping[str, FittedHead | None],
    *,
    shots: Sequence[Question] = (),
    permutations: Permutations | None = None,
    batch: int = 8,
) -> dict[str, PermutedChoices]:
    """:func:`ask_choices` once, with the logits of several heads by name; None for no head.

    The solved examples keep their orders.
    """
    counts = {len(question.choices) for question in questions}
    if len(counts) != 1 or not min(counts):
        raise ValueError(
            f"questions must have equally many choices, got {sorted(counts)}: ask them separately"
        )
    letters = _choice_tokens(tokenizer, LETTERS[: min(counts)])
    orders = _option_orders(permutations, min(counts))
    shown = [
        replace(question, choices=tuple(question.choices[i] for i in order))
        for question in questions
        for order in orders
    ]
    prompts = [_choice_prompt(question, shots) for question in shown]
    first_token = LengthLimit(1, end_ids(model, tokenizer))
    logits: dict[str, list[FloatArray]] = {name: [] for name in heads}
    runs = _calibrated_generations(model, tokenizer, prompts, heads, first_token, batch)
    for name, generation, first in runs:
        chosen = as_float64((first * generation.sharpness)[:, letters])
        logits[name].append(log_softmax(chosen, axis=-1))
    labels = np.array([question.answer for question in questions])
    shape = len(questions), len(orders), -1
    return {
        name: PermutedChoices(np.concatenate(parts).reshape(shape), labels, orders)
        for name, parts in logits.items()
    }


def ask_true(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    fitted: FittedHead | None = None,
    batch: int = 8,
) -> FloatArray:
    r"""Return P(True) ``(n,)``, for prompts that ask for True or False (Kadavath et al. 2022).

    It is the share of the tokens that mean true among these and those that mean false,

    .. math:: \frac{\sum_{t \in \text{true}} e^{z_t}}
        {\sum_{t \in \text{true}} e^{z_t} + \sum_{t \in \text{false}} e^{z_t}} .

    Such prompts come from :func:`~calibrant.llm.answers.questions.verdict_prompt`. The arguments
    are those of :func:`ask`.
    """
    verdicts = [_spellings(tokenizer, word) for word in ("True", "False")]
    first_token = LengthLimit(1, end_ids(model, tokenizer))
    runs = _calibrated_generations(model, tokenizer, prompts, {"": fitted}, first_token, batch)
    parts = []
    for _, generation, first in runs:
        scores = first * generation.sharpness
        true, false = (logsumexp(as_float64(scores[:, each]), axis=-1) for each in verdicts)
        parts.append(expit(true - false))
    return np.concatenate(parts)


def _spellings(tokenizer: Any, word: str) -> list[int]:
    """Tokens of a word: with or without a space before it, capitalised or not."""
    forms = [f"{space}{form}" for space in (" ", "") for form in (word, word.lower())]
    single = _single_tokens(tokenizer, forms)
    if not single:
        raise ValueError(f"the tokenizer has no token of its own for {word!r}")
    return sorted({*single.values()})


def _single_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """Return the tokens of those texts that are one token of their own."""
    coded = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    unknown = getattr(tokenizer, "unk_token_id", None)
    return {text: int(ids[0]) for text, ids in coded.items() if len(ids) == 1 and ids[0] != unknown}


def ask_texts_each(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    heads: Mapping[str, FittedHead | None],
    *,
    shots: Sequence[Question] = (),
    batch: int = 8,
) -> dict[str, list[FloatArray]]:
    """Compute the log-probabilities ``(choices,)`` of the choices of each question, by head.

    A choice is scored by the total log-probability of its text after the question, and these are
    normalised over the choices. For TruthfulQA, where the best answer stands against the incorrect
    ones, the share of questions whose right choice is likeliest is the measure MC1 (Lin, Hilton
    and Evans 2022).

    Parameters
    ----------
    questions : sequence of Question
        With two choices or more each, which the prompt does not show.
    heads : dict
        Temperature heads by name; None for no head.
    shots : sequence of Question
        Solved examples before each question.
    batch : int
        Texts that are scored together.
    model, tokenizer
        As for :func:`~calibrant.llm.ask`.
    """
    check_whole("batch", batch)
    texts = _encoded_choices(model, tokenizer, questions, shots)
    sizes = np.cumsum([len(question.choices) for question in questions])
    logits, total = {}, len(heads) * len(texts)
    for number, (name, fitted) in enumerate(heads.items()):
        parts = []
        with nullcontext() if fitted is None else attached(model, fitted):
            for part in _likelihoods(model, texts, batch):
                parts.append(part)
                report(number * len(texts) + sum(map(len, parts)), total)
        rows = np.split(np.concatenate(parts), sizes[:-1])
        logits[name] = [choice_logits_from_likelihoods(row) for row in rows]
    return logits


def _encoded_choices(
    model: Any, tokenizer: Any, questions: Sequence[Question], shots: Sequence[Question]
) -> list[Encoded]:
    """Return the tokens of each choice after its question; raise if any is too long."""
    pairs = [
        (short_prompt(question, shots), f" {choice}")
        for question in questions
        for choice in question.choices
    ]
    whole = 1 << 30  # nothing is cut
    texts, positions = _encode_documents(pairs, tokenizer, whole), huggingface._positions_of(model)
    for (prompt, choice), text in zip(pairs, texts, strict=True):
        if positions and len(text.ids) > positions:
            raise ValueError(
                f"the choice {choice[1:61]!r} after a prompt ending with {prompt[-60:]!r} needs "
                f"{len(text.ids)} tokens, more than the {positions} positions of the model: show "
                "fewer shots, or leave the question out"
            )
    return texts


def _likelihoods(model: Any, texts: Sequence[Encoded], batch: int) -> Iterator[FloatArray]:
    """Yield the total log-probabilities of the tokens that count, for each batch of texts."""
    device = huggingface._inputs_device(model)
    with evaluating(model), torch.no_grad():
        for start in range(0, len(texts), batch):
            some = texts[start : start + batch]
            # padding comes after the texts, where causal attention does not look
            ids, mask = _padded([text.ids for text in some])
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            totals = []
            for row, text in zip(logits, some, strict=True):
                targets = torch.from_numpy(text.targets)
                logs = row[(targets - 1).to(row.device)].float().log_softmax(-1)
                chosen = torch.from_numpy(text.ids)[targets].to(row.device)
                totals.append(float(logs.gather(-1, chosen[:, None]).cpu().double().sum()))
            yield np.array(totals)


def _choice_tokens(tokenizer: Any, choices: Sequence[str]) -> list[int]:
    """Return the token ids by which a model names its choice, all different.

    They follow a space; or nothing, if the choices after a space are not single tokens, as with
    tokenizers that put a space before every text.
    """
    for prefix in (" ", ""):
        single = _single_tokens(tokenizer, [f"{prefix}{name}" for name in choices])
        if len({*single.values()}) == len(choices):
            return list(single.values())
    names = [name for name in choices if name not in single]
    raise ValueError(
        f"the tokenizer has no token of its own for {', '.join(map(repr, names or choices))}: pass "
        "likelihoods of whole answers to choice_logits_from_likelihoods"
    )


def choice_logits_from_likelihoods(log_likelihoods: Values) -> FloatArray:
    """Compute the log-probabilities of choices that are whole texts.

    ``log_likelihoods`` ``(..., choices)`` are sums of the log-probabilities of the tokens of each
    choice, after the question; divide them by the lengths of the choices if these should not count.

    >>> np.exp(choice_logits_from_likelihoods([[-2.0, -2.0]])).round(2)
    array([[0.5, 0.5]])
    """
    scores = as_float64(as_scores(log_likelihoods, "log_likelihoods"))
    if scores.ndim < 1 or scores.shape[-1] < 2:
        raise ValueError(f"log_likelihoods must have two choices or more, got {scores.shape}")
    if not np.isfinite(scores).all() or (scores > 1e-6).any():
        raise ValueError("log_likelihoods must be finite and at most 0")
    return np.asarray(log_softmax(scores, axis=-1))


def choice_logits_from_top(top: TopLogprobs, choices: Sequence[str] = LETTERS) -> FloatArray:
    """Compute the log-probabilities of the choices from the top tokens that a service returns.

    ``top`` has an entry for each question, as for :func:`~calibrant.llm.top_confidence`. The result
    ``(n, choices)`` is exact. A choice counts with and without a space before it.

    >>> shown = [{"A": -1.0, " B": -1.0, "The": -2.0}]
    >>> np.exp(choice_logits_from_top(shown, ("A", "B"))).round(2)
    array([[0.5, 0.5]])
    """
    shown = _shown_tokens(top)
    if shown is None:
        raise TypeError(f"top must hold tokens with their log-probabilities, got {top!r:.80}")
    logs = np.full((len(shown), len(choices)), -np.inf)
    for i, position in enumerate(shown):
        if np.isnan([value for _, value in position]).any():
            raise ValueError(f"question {i} has a log-probability that is NaN: leave it out")
        for token, value in _by_token(position).items():
            if token.strip() in choices:
                at = list(choices).index(token.strip())
                logs[i, at] = np.logaddexp(logs[i, at], value)
        missing = [c for c, v in zip(choices, logs[i], strict=True) if v == -np.inf]
        if missing:
            raise ValueError(
                f"choice {missing[0]!r} is not among the {len(_by_token(position))} tokens of "
                f"question {i}: request more (top_logprobs), or use logit_bias"
            )
    return np.asarray(log_softmax(logs, axis=-1))
