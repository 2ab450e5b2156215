"""Confidence of generated answers, from their token probabilities, and its calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import FloatArray, Values, as_float64, as_keys, as_pairs, known_rows
from calibrant.metrics import intervals, ranking
from calibrant.metrics.clustered import ConfidenceEvaluation, evaluate_tokens
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.intervals import Estimate
from calibrant.workflows.evaluate import evaluate

SMALLEST = float(np.finfo(np.float32).tiny)
"""Replaces a stored probability of zero."""
SUREST = 1e-9
"""Distance from 1 at which confidences are clipped."""
ANSWER_METRICS = ("accuracy", "ece", "debiased_ece", "nll", "brier", "auroc", "aurc")

Answers: TypeAlias = Sequence[Values]
"""Probabilities of the tokens of each answer, ``(tokens,)``."""
Aggregator = Literal["geometric", "product", "arithmetic", "first", "minimum"]
AGGREGATORS: tuple[Aggregator, ...] = get_args(Aggregator)


def answer_confidence(token_probs: Answers, aggregate: Aggregator = "geometric") -> FloatArray:
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
    token_probs : list of (tokens,)
        Probabilities, not logarithms, of the tokens of each answer.
    aggregate : str

    Examples
    --------
    >>> answer_confidence([[0.9, 0.4], [0.5]])
    array([0.6, 0.5])
    """
    return np.exp(_log_confidence(token_probs, aggregate))


def _log_confidence(token_probs: Answers, aggregate: str) -> FloatArray:
    """Logarithm of :func:`~calibrant.llm.answer_confidence`, also where a product underflows."""
    checks.check_choice("aggregate", aggregate, AGGREGATORS)
    answers = _token_arrays(token_probs)
    probs, lengths = np.concatenate(answers), np.array([*map(len, answers)])
    if not ((probs >= 0) & (probs <= 1 + 1e-6)).all():
        raise ValueError(
            "token_probs must be in [0, 1] and not NaN; for log-probabilities pass np.exp of them"
        )
    starts, logs = np.cumsum(lengths) - lengths, np.log(np.maximum(probs, SMALLEST))
    match aggregate:
        case "geometric":
            found = np.add.reduceat(logs, starts) / lengths
        case "product":
            found = np.add.reduceat(logs, starts)
        case "arithmetic":
            mean = np.add.reduceat(probs, starts) / lengths
            found = np.log(np.clip(mean, SMALLEST, 1.0))
        case "first":
            found = logs[starts]
        case _:
            found = np.minimum.reduceat(logs, starts)
    return np.asarray(np.minimum(found, 0.0))


def log_odds(log_confidence: FloatArray) -> FloatArray:
    """Log-odds of confidences, from their logarithms ``(n,)``; finite for 1 too."""
    return np.asarray(log_confidence - np.log(np.maximum(-np.expm1(log_confidence), SUREST)))


def _token_arrays(token_probs: Answers) -> list[FloatArray]:
    if isinstance(token_probs, (Tensor, np.ndarray)) and token_probs.dtype != object:
        raise ValueError(
            f"token_probs is one array of shape {tuple(token_probs.shape)}: pass a list with an "
            "array for each answer, without padding"
        )
    try:
        answers = [as_float64(one) for one in token_probs]
        for number, one in enumerate(answers):
            if one.ndim != 1:
                raise ValueError(f"answer {number} has shape {one.shape}")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"token_probs must have an array (tokens,) of probabilities for each answer ({error}); "
            "from ask, pass [answer.probs for answer in answers]"
        ) from error
    if not answers:
        raise ValueError("token_probs holds no answer: at least one is needed")
    empty = [number for number, one in enumerate(answers) if not one.size]
    if empty:
        raise ValueError(
            f"answer {empty[0]} has no tokens ({len(empty)} of {len(answers)} have none): drop "
            "such answers and count them as wrong, or keep the end token of every answer"
        )
    return answers


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
    member = np.arange(claimed.size) if groups is None else as_keys(groups)
    if member.shape != claimed.shape:
        raise ValueError(
            f"groups must have one value for each of {claimed.size} answers, got {member.shape}"
        )
    if np.unique(member).size < claimed.size:
        options: Any = {"bins": bins, "level": level, "seed": seed}
        losses = -np.log(np.maximum(np.where(outcome == 1, claimed, 1 - claimed), SMALLEST))
        found = evaluate_tokens(claimed, outcome, member, nll=losses, **options)
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
