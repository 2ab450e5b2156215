"""Measure how well the confidences of answers, each right or wrong, are calibrated."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from calibrant._core.checks import FloatArray, Values, as_keys, as_pairs, known_rows
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


def log_odds(log_confidence: FloatArray) -> FloatArray:
    """Log-odds of confidences, from their logarithms ``(n,)``; finite for 1 too."""
    return np.asarray(log_confidence - np.log(np.maximum(-np.expm1(log_confidence), SUREST)))


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
