"""Multiple choice: probabilities of the choices, prediction sets of them, and P(True).

The model's probability of a choice is divided by that of all choices together. The results are
logits of the choices, for every calibrator and metric that takes logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import expit, log_softmax, logsumexp
from torch import Tensor

from calibrant._core.checks import FloatArray, Values, as_float64, as_labels, as_scores
from calibrant.decide.conformal_sets import ConformalSets, Score, conformal
from calibrant.llm.answers.topk import TopLogprobs, by_token, shown_tokens

LETTERS = ("A", "B", "C", "D")


def choice_tokens(
    tokenizer: Any, choices: Sequence[str] = LETTERS, *, prefix: str | None = None
) -> list[int]:
    """Return the token ids by which a model names its choice, all different.

    ``prefix`` is the text between the prompt and the choice: a space after ``Answer:``, nothing
    after a line break or a chat template. By default it is a space; or nothing, if the choices
    after a space are not single tokens, as with tokenizers that put a space before every text.
    """
    wrong = []
    for between in (" ", "") if prefix is None else (prefix,):
        coded = [tokenizer.encode(f"{between}{name}", add_special_tokens=False) for name in choices]
        fault = _fault(tokenizer, choices, [list(tokens) for tokens in coded])
        if not fault:
            return [int(tokens[0]) for tokens in coded]
        wrong.append(f"with the prefix {between!r} {fault}")
    raise ValueError(
        f"{', and '.join(wrong)}: use other names or another prefix, or pass likelihoods of whole "
        "answers to choice_logits_from_likelihoods"
    )


def _fault(tokenizer: Any, choices: Sequence[str], coded: list[list[int]]) -> str:
    """Say why the choices are not one token each; empty if they are."""
    for choice, tokens in zip(choices, coded, strict=True):
        if len(tokens) != 1:
            parts = [tokenizer.decode([token]) for token in tokens[:5]]
            return f"choice {choice!r} is {len(tokens)} tokens, {parts}"
    doubled = [c for c, tokens in zip(choices, coded, strict=True) if coded.count(tokens) > 1]
    if doubled or [getattr(tokenizer, "unk_token_id", None)] in coded:
        named = ", ".join(map(repr, doubled or choices))
        return f"the tokenizer has no token of its own for {named}"
    return ""


def choice_logits(logits: Values, tokens: Sequence[int]) -> FloatArray:
    """Compute the log-probabilities ``(..., choices)`` of the choices from the logits of a model.

    ``logits`` ``(..., vocabulary)`` are those at the position of the choice, ``tokens`` from
    :func:`choice_tokens`.

    >>> np.exp(choice_logits([[9.0, 1.0, 1.0, 0.0]], [1, 2])).round(2)
    array([[0.5, 0.5]])
    """
    scores = as_scores(logits)
    wanted = as_labels(tokens, "tokens")
    if wanted.ndim != 1 or wanted.size < 2:
        raise ValueError(f"tokens must be ids of two choices or more, got {wanted.tolist()}")
    chosen = _columns(scores, wanted, "tokens")
    if np.isnan(chosen).any() or (chosen.max(-1) == -np.inf).any():
        raise ValueError("logits have NaN, or every choice masked by -inf, at some position")
    return np.asarray(log_softmax(chosen, axis=-1))


def choice_logits_from_likelihoods(
    log_likelihoods: Values, lengths: Values | None = None
) -> FloatArray:
    """Compute the log-probabilities of choices that are whole texts.

    ``log_likelihoods`` ``(..., choices)`` are sums of the log-probabilities of the tokens of each
    choice, after the question. They are divided by ``lengths``, the tokens or bytes of each choice.

    >>> np.exp(choice_logits_from_likelihoods([[-2.0, -4.0]], [1, 2])).round(2)
    array([[0.5, 0.5]])
    """
    scores = as_float64(as_scores(log_likelihoods, "log_likelihoods"))
    if scores.ndim < 1 or scores.shape[-1] < 2:
        raise ValueError(f"log_likelihoods must have two choices or more, got {scores.shape}")
    if not np.isfinite(scores).all() or (scores > 1e-6).any():
        raise ValueError("log_likelihoods must be finite and at most 0")
    if lengths is not None:
        count = as_float64(lengths)
        if not (count > 0).all():
            raise ValueError("lengths must be above 0")
        scores = scores / count
    return np.asarray(log_softmax(scores, axis=-1))


def choice_logits_from_top(top: TopLogprobs, choices: Sequence[str] = LETTERS) -> FloatArray:
    """Compute the log-probabilities of the choices from the top tokens that a service returns.

    ``top`` has an entry for each question, as for :func:`~calibrant.llm.top_confidence`. The result
    ``(n, choices)`` is exact. A choice counts with and without a space before it.

    >>> shown = [{"A": -1.0, " B": -1.0, "The": -2.0}]
    >>> np.exp(choice_logits_from_top(shown, ("A", "B"))).round(2)
    array([[0.5, 0.5]])
    """
    shown = shown_tokens(top)
    if shown is None:
        raise TypeError(f"top must hold tokens with their log-probabilities, got {top!r:.80}")
    logs = np.full((len(shown), len(choices)), -np.inf)
    for i, position in enumerate(shown):
        for token, value in by_token(position).items():
            if token.strip() in choices:
                at = list(choices).index(token.strip())
                logs[i, at] = np.logaddexp(logs[i, at], value)
        missing = [c for c, v in zip(choices, logs[i], strict=True) if v == -np.inf]
        if missing:
            raise ValueError(
                f"choice {missing[0]!r} is not among the {len(by_token(position))} tokens of "
                f"question {i}: request more (top_logprobs), or use logit_bias"
            )
    return np.asarray(log_softmax(logs, axis=-1))


def choice_sets(
    choice_scores: Values,
    answers: Values,
    *,
    coverage: float = 0.9,
    score: Score = "lac",
    seed: int = 0,
) -> ConformalSets:
    """Learn prediction sets of choices with a coverage, by split conformal prediction.

    ``choice_scores`` ``(n, choices)`` are logits of the choices of held-out questions, preferably
    calibrated, and ``answers`` ``(n,)`` the right choices; the other arguments are those of
    :func:`calibrant.decide.conformal`. The ``sets(choice_scores)`` of the result, or
    ``sets(probs=...)``, are for new questions.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> scores = 2 * rng.normal(size=(2000, 4))
    >>> answers = (scores + rng.gumbel(size=scores.shape)).argmax(-1)
    >>> fitted = choice_sets(scores[:1000], answers[:1000])
    >>> inside = fitted.sets(scores[1000:])[np.arange(1000), answers[1000:]]
    >>> bool(0.87 < inside.mean() < 0.93)
    True
    """
    scores = as_float64(as_scores(choice_scores, "choice_scores"))
    if scores.ndim < 2 or scores.shape[-1] < 2:
        raise ValueError(
            f"choice_scores must be (n, choices) with two choices or more, got {scores.shape}"
        )
    if (scores.max(-1, initial=-np.inf) == -np.inf).any():
        raise ValueError("choice_scores have every choice masked by -inf for some question")
    return conformal(scores, answers, coverage=coverage, score=score, seed=seed)


def p_true(logits: Values, true_tokens: Sequence[int], false_tokens: Sequence[int]) -> FloatArray:
    r"""P(True): confidence of a model in an answer that it is shown (Kadavath et al. 2022).

    A second prompt shows question and answer and asks if it is true. The confidence is the share
    of the tokens that mean yes among these and those that mean no,

    .. math:: \frac{\sum_{t \in \text{true}} e^{z_t}}
        {\sum_{t \in \text{true}} e^{z_t} + \sum_{t \in \text{false}} e^{z_t}} .

    ``logits`` ``(..., vocabulary)`` are those at the position of the verdict; the tokens may be
    those of " True", "True" and " Yes", for instance.

    >>> p_true([[0.0, 0.0, 1.0, 5.0]], [0, 1], [2]).round(2)
    array([0.42])
    """
    scores = as_scores(logits)
    yes, no = as_labels(true_tokens, "true_tokens"), as_labels(false_tokens, "false_tokens")
    if not yes.size or not no.size or np.intersect1d(yes, no).size:
        raise ValueError("true_tokens and false_tokens must each hold a token and share none")
    true = logsumexp(_columns(scores, np.unique(yes), "true_tokens"), axis=-1)
    return np.asarray(
        expit(true - logsumexp(_columns(scores, np.unique(no), "false_tokens"), axis=-1))
    )


def _columns(scores: Tensor | np.ndarray[Any, Any], tokens: Any, name: str) -> FloatArray:
    """Return some columns in float64, without copying the others."""
    vocabulary = scores.shape[-1] if scores.ndim else 0
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(
            f"{name} must be in [0, {vocabulary}), got {tokens.tolist()}: pass those of this "
            "model's tokenizer"
        )
    if isinstance(scores, Tensor):
        return as_float64(scores[..., torch.from_numpy(tokens).to(scores.device)])
    return as_float64(scores[..., tokens])
