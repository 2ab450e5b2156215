"""Calibration of answers, with intervals."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np

from calibrant._core.checks import Values, as_pairs
from calibrant.llm.answers.calibrator import log_odds
from calibrant.llm.answers.confidence import SMALLEST
from calibrant.llm.tokens.evaluate import ConfidenceEvaluation
from calibrant.metrics import intervals, ranking
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.intervals import Estimate
from calibrant.workflows.evaluate import evaluate

ANSWER_METRICS = ("accuracy", "ece", "debiased_ece", "nll", "brier", "auroc", "aurc")


def evaluate_answers(
    confidence: Values,
    correct: Values,
    *,
    bins: int = 15,
    level: float | None = 0.9,
    seed: int = 0,
) -> ConfidenceEvaluation:
    """Measure the calibration of answers, with intervals for independent questions.

    Parameters
    ----------
    confidence : (n,) in [0, 1]
        Claimed chance that each answer is right.
    correct : (n,) 0 or 1
    bins, level, seed
        As for :func:`calibrant.evaluate`.

    Returns
    -------
    ConfidenceEvaluation
        accuracy, calibration errors, NLL and Brier score of "right or wrong", AUROC and AURC.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> confidence = rng.random(1000)
    >>> evaluate_answers(confidence, rng.random(1000) < confidence)["ece"].low
    0.0
    """
    claimed, outcome, _ = as_pairs(confidence, correct)
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
        estimates["brier"] = intervals.mean_interval(own["brier"], deviation, level)
        estimates["aurc"] = intervals.logit_interval(*area, level)
    rest = {f.name: getattr(binary, f.name) for f in fields(Evaluation)}
    rest["metrics"] = {name: estimates[name] for name in ANSWER_METRICS}
    return ConfidenceEvaluation(**rest)
