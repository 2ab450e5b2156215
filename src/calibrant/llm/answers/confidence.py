"""Confidence of generated answers, from their token probabilities, and its calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import (
    FloatArray,
    IntArray,
    Values,
    as_float64,
    as_keys,
    as_labels,
    as_pairs,
    known_rows,
)
from calibrant.llm.heads.evaluate import ConfidenceEvaluation, evaluate_tokens
from calibrant.metrics import intervals, ranking
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.intervals import Estimate
from calibrant.workflows.evaluate import evaluate

SMALLEST = float(np.finfo(np.float32).tiny)
"""Replaces a stored probability of zero."""
SUREST = 1e-9
"""Distance from 1 at which confidences are clipped."""
ANSWER_METRICS = ("accuracy", "ece", "debiased_ece", "nll", "brier", "auroc", "aurc")

Answers: TypeAlias = Sequence[Values] | Values
"""A list with an array for each answer, or all tokens in one array; see answer_confidence."""


class Tokens(NamedTuple):
    """Tokens of all answers, ``(tokens,)``, and the first of each answer, ``(answers,)``."""

    probs: FloatArray
    starts: IntArray

    @property
    def logs(self) -> FloatArray:
        """Logarithms of the probabilities, finite."""
        return np.log(np.maximum(self.probs, SMALLEST))

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each answer."""
        return np.diff(self.starts, append=len(self.probs))


def _geometric(tokens: Tokens) -> FloatArray:
    return np.asarray(_product(tokens) / tokens.lengths)


def _product(tokens: Tokens) -> FloatArray:
    return np.asarray(np.add.reduceat(tokens.logs, tokens.starts))


def _arithmetic(tokens: Tokens) -> FloatArray:
    mean = np.add.reduceat(tokens.probs, tokens.starts) / tokens.lengths
    return np.log(np.clip(mean, SMALLEST, 1.0))


def _first(tokens: Tokens) -> FloatArray:
    return tokens.logs[tokens.starts]


def _minimum(tokens: Tokens) -> FloatArray:
    return np.asarray(np.minimum.reduceat(tokens.logs, tokens.starts))


Aggregator = Literal["geometric", "product", "arithmetic", "first", "minimum"]
AGGREGATORS: dict[str, Callable[[Tokens], FloatArray]] = {
    "geometric": _geometric,
    "product": _product,
    "arithmetic": _arithmetic,
    "first": _first,
    "minimum": _minimum,
}
"""Functions that return the log-confidence of each answer, by name."""


def answer_confidence(
    token_probs: Answers,
    aggregate: Aggregator = "geometric",
    *,
    mask: Values | None = None,
    documents: Values | None = None,
) -> FloatArray:
    r"""Aggregate the token probabilities of each answer to one confidence.

    With the probabilities :math:`p_1, \ldots, p_m` of the tokens of an answer,

    - ``geometric``: :math:`(p_1 \cdots p_m)^{1/m}`, which does not depend on the length;
    - ``product``: :math:`p_1 \cdots p_m`, the probability of the whole text;
    - ``arithmetic``: :math:`(p_1 + \ldots + p_m) / m`, as in the ATS paper (Xie et al. 2024);
    - ``first``: :math:`p_1`;
    - ``minimum``: :math:`\min_t p_t`.

    None of them is the chance that the answer is right:
    :class:`~calibrant.llm.AnswerCalibrator` learns that.

    Parameters
    ----------
    token_probs : list of (m_i,), or (answers, tokens) with mask, or (tokens,) with documents
        Probabilities, not logarithms.
    aggregate : str
    mask : (answers, tokens) of bool, optional
        True for tokens of the answer, False for padding.
    documents : (tokens,) integers, optional
        Number of the answer of each token. Answers are returned in the order of their numbers.

    Examples
    --------
    >>> answer_confidence([[0.9, 0.4], [0.5]])
    array([0.6, 0.5])
    >>> answer_confidence([0.9, 0.4, 0.5], "minimum", documents=[0, 0, 1])
    array([0.4, 0.5])
    """
    return np.exp(log_confidence(token_probs, aggregate, mask=mask, documents=documents))


def log_confidence(
    token_probs: Answers,
    aggregate: str,
    *,
    mask: Values | None = None,
    documents: Values | None = None,
) -> FloatArray:
    """Logarithm of :func:`~calibrant.llm.answer_confidence`, also where a product underflows."""
    checks.check_choice("aggregate", aggregate, get_args(Aggregator))
    return np.minimum(AGGREGATORS[aggregate](_as_tokens(token_probs, mask, documents)), 0.0)


def log_odds(log_confidence: FloatArray) -> FloatArray:
    """Log-odds of confidences, from their logarithms ``(n,)``; finite for 1 too."""
    return np.asarray(log_confidence - np.log(np.maximum(-np.expm1(log_confidence), SUREST)))


def _as_tokens(token_probs: Answers, mask: Values | None, documents: Values | None) -> Tokens:
    if mask is not None and documents is not None:
        raise ValueError("pass mask with a padded array or documents with a flat one, not both")
    if mask is not None:
        tokens = _from_array(token_probs, "mask", as_labels(mask, "mask"), 2)
    elif documents is not None:
        tokens = _from_array(token_probs, "documents", as_labels(documents, "documents"), 1)
    else:
        tokens = _from_list(token_probs)
    if not ((tokens.probs >= 0) & (tokens.probs <= 1 + 1e-6)).all():
        raise ValueError(
            "token_probs must be in [0, 1] and not NaN; for log-probabilities pass np.exp of them"
        )
    return tokens


def _from_list(token_probs: Answers) -> Tokens:
    if isinstance(token_probs, (Tensor, np.ndarray)) and token_probs.dtype != object:
        raise ValueError(
            f"token_probs is one array of shape {tuple(token_probs.shape)}: pass mask (answers, "
            "tokens) or documents (tokens,) with it, or a list with an array for each answer"
        )
    try:
        answers = [as_float64(one) for one in token_probs]  # type: ignore[union-attr]
        for number, one in enumerate(answers):
            if one.ndim != 1:
                raise ValueError(f"answer {number} has shape {one.shape}")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"token_probs must have an array (tokens,) of probabilities for each answer ({error}); "
            "from ask, pass [answer.probs for answer in answers]"
        ) from error
    return Tokens(np.concatenate([*answers, []]), _starts(np.array([*map(len, answers)], np.int64)))


def _from_array(token_probs: Answers, name: str, layout: IntArray, ndim: int) -> Tokens:
    probs = as_float64(token_probs)  # type: ignore[arg-type]
    if probs.ndim != ndim or probs.shape != layout.shape:
        form = "(answers, tokens)" if ndim == 2 else "(tokens,)"
        got = f"{probs.shape}, {layout.shape}"
        raise ValueError(f"token_probs and {name} must both be {form}, got {got}")
    if ndim == 2:
        return Tokens(probs[layout != 0], _starts((layout != 0).sum(1)))
    order = np.argsort(layout, kind="stable")
    return Tokens(probs[order], _starts(np.unique(layout, return_counts=True)[1]))


def _starts(lengths: NDArray[Any]) -> IntArray:
    """Return the number of the first token of each answer; every answer must have one."""
    if not lengths.size:
        raise ValueError("token_probs holds no answer: at least one is needed")
    if not lengths.all():
        empty = np.flatnonzero(lengths == 0)
        raise ValueError(
            f"answer {empty[0]} has no tokens ({empty.size} of {lengths.size} have none): drop "
            "such answers and count them as wrong, or keep the end token of every answer"
        )
    return np.asarray(np.cumsum(lengths, dtype=np.int64) - lengths)


def evaluate_answers(
    confidence: Values,
    correct: Values,
    *,
    groups: Values | None = None,
    bins: int = 15,
    level: float | None = 0.9,
    seed: int = 0,
) -> ConfidenceEvaluation:
    """Measure the calibration of answers, with intervals for independent questions.

    The metrics are accuracy, calibration errors, NLL and Brier score of "right or wrong", AUROC and
    AURC.

    Parameters
    ----------
    confidence : (n,) in [0, 1]
    correct : (n,) 0 or 1
    groups : (n,), optional
        Answers with the same value, such as the sentences of one long answer, are not independent:
        the intervals are then those of independent groups, and there is no AURC.
    bins, level, seed
        As for :func:`calibrant.evaluate`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> confidence = rng.random(1000)
    >>> evaluate_answers(confidence, rng.random(1000) < confidence)["ece"].low
    0.0
    """
    claimed, outcome, _ = as_pairs(confidence, correct)
    if groups is not None and np.unique(as_keys(groups)).size < claimed.size:
        options: Any = {"bins": bins, "level": level, "seed": seed}
        losses = -np.log(np.maximum(np.where(outcome == 1, claimed, 1 - claimed), SMALLEST))
        found = evaluate_tokens(claimed, outcome, groups, nll=losses, **options)
        return replace(found, unit="answers")
    with known_rows():  # answers may state the same few confidences
        binary = evaluate(
            log_odds(np.log(np.maximum(claimed, SMALLEST))),
            outcome.astype(np.int64),
            estimand="binary",
            bins=bins,
            metrics=("ece", "debiased_ece", "nll", "auroc"),
            level=level,
            seed=seed,
        )
    squares = (claimed - outcome) ** 2
    right, area = float(outcome.mean()), ranking.aurc_with_error(claimed, outcome, None)
    own = {"accuracy": right, "brier": float(squares.mean()), "aurc": area.value}
    estimates = {**binary.metrics, **{name: Estimate(value) for name, value in own.items()}}
    if level is not None and len(squares) > 1:
        deviation = float(squares.std(ddof=1)) / math.sqrt(len(squares))
        estimates["accuracy"] = intervals.share_interval(right, len(squares), level)
        estimates["brier"] = intervals.loss_interval(own["brier"], deviation, level)
        estimates["aurc"] = intervals.logit_interval(*area, level)
    rest = {f.name: getattr(binary, f.name) for f in fields(Evaluation)}
    rest["metrics"] = {name: estimates[name] for name in ANSWER_METRICS}
    curve = ranking.risk_coverage(confidence=claimed, outcome=outcome, level=level or 0.9).thinned()
    curve = curve if level else curve.without_intervals()
    return ConfidenceEvaluation(**rest, risk_coverage=curve)
