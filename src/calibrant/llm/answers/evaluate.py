"""Calibration of answers, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from calibrant._core.checks import Values, as_pairs
from calibrant.llm.answers.calibrator import log_odds
from calibrant.llm.answers.confidence import SMALLEST
from calibrant.metrics import intervals, ranking
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.intervals import Estimate
from calibrant.workflows.evaluate import evaluate

ANSWER_METRICS = ("ece", "debiased_ece", "nll", "auroc")


@dataclass(frozen=True, eq=False)
class ClaimsEvaluation(Evaluation):
    r"""Figures of claims "this is right": an :class:`Evaluation` of tokens or answers.

    ``accuracy`` is the share that is right, ``brier`` the mean of
    :math:`(\text{confidence} - \text{right})^2`, from 0 to 1.

    Attributes
    ----------
    documents : int
        Of the tokens; 0 for answers.
    """

    documents: int = 0

    def describe(self) -> str:
        """One line that says what was measured."""
        counted, claim = f"{self.n:,} answers", "the answer is right"
        if self.documents:
            counted = f"{self.n:,} tokens of {self.documents:,} documents"
            claim = "the likeliest token comes next"
        return f"{counted}; estimand: {claim}; {self.binning}"


# -------------------------------------------------------------------------------------- answers


def evaluate_answers(
    confidence: Values,
    correct: Values,
    *,
    bins: int = 15,
    level: float | None = 0.9,
    seed: int = 0,
) -> ClaimsEvaluation:
    """Measure confidences of answers, with intervals for independent questions.

    Parameters
    ----------
    confidence : (n,) in [0, 1]
        Chance that each answer is right, as claimed.
    correct : (n,) 0 or 1
    bins, level, seed
        As for :func:`calibrant.evaluate`.

    Returns
    -------
    ClaimsEvaluation
        accuracy, calibration errors, NLL and Brier score of "right or wrong", AUROC and AURC.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sure = rng.random(1000)
    >>> found = evaluate_answers(sure, rng.random(1000) < sure)
    >>> found["ece"].low
    0.0
    """
    claimed, happened, _ = as_pairs(confidence, correct)
    odds = log_odds(np.log(np.maximum(claimed, SMALLEST)))
    found = evaluate(
        odds,
        happened.astype(np.int64),
        estimand="binary",
        bins=bins,
        metrics=ANSWER_METRICS,
        level=level,
        seed=seed,
    )
    squares = (claimed - happened) ** 2
    right, area = float(happened.mean()), ranking.aurc_with_error(claimed, happened, None)
    own = {"accuracy": right, "brier": float(squares.mean()), "aurc": area.value}
    every = {**found.metrics, **{name: Estimate(value) for name, value in own.items()}}
    if level is not None and len(squares) > 1:
        spread = float(squares.std(ddof=1)) / math.sqrt(len(squares))
        every["accuracy"] = intervals.share_interval(right, len(squares), level)
        every["brier"] = intervals.mean_interval(own["brier"], spread, level)
        every["aurc"] = intervals.logit_interval(*area, level)
    kept = {f.name: getattr(found, f.name) for f in fields(Evaluation)}
    order = ("accuracy", "ece", "debiased_ece", "nll", "brier", "auroc", "aurc")
    return ClaimsEvaluation(**{**kept, "metrics": {name: every[name] for name in order}})
