"""Maps from the scores of a judge to the chance that people call an answer right."""

from __future__ import annotations

import numpy as np

from calibrant._core.checks import FloatArray
from calibrant.llm.answers.calibrating import calibrated, cross_validated_answers
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.llm.answers.graded import AnswerRows, GradedAnswers, Row
from calibrant.llm.answers.judges.judged import JudgedAnswers, Scale, judged_answers
from calibrant.llm.answers.calibrating import Evaluations, calibrated, cross_validated_answers

COPIES = 10
"""Answers that stand for one with a grade between 0 and 1."""


def fit_judge(judged: JudgedAnswers, *, stage: Map = "beta") -> AnswerCalibrator:
    """Fit a map from the scores of a judge to the chance that a person calls the answer right.

    Of grades between 0 and 1 it predicts the mean. The map keeps the judge and its scale, and
    refuses others.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> right = rng.random(400) < 0.5
    >>> score = np.clip(np.round(5 + 3 * right + rng.normal(size=400)), 1, 10)
    >>> fitted = fit_judge(JudgedAnswers(score, right.astype(float), (1, 10)), stage="sigmoid")
    >>> bool(fitted.predict([1.0])[0] > 0.95)  # of the highest score
    True
    """
    known = judged.known
    shares, labels = judged.shares[known], judged.human[known]
    check_map(labels)
    if not _plain(labels):
        shares, labels = np.repeat(shares, COPIES), _copies(labels)
    return AnswerCalibrator(None, stage=stage).fit(shares, labels, source=judged.source)


def check_map(labels: FloatArray) -> None:
    """Raise unless labels tell right answers from wrong ones."""
    if labels.size < 2 or not np.ptp(labels):
        known = f"all {labels.size:,} are {labels[0]:g}" if labels.size else "there are none"
        raise ValueError(
            f"human labels must differ to calibrate a judge, and {known}: label more answers"
        )


def _plain(labels: FloatArray) -> bool:
    return bool(((labels == 0) | (labels == 1)).all())


def _copies(labels: FloatArray) -> FloatArray:
    """Return labels of 0 and 1, ten for each grade, with its mean."""
    right = np.round(COPIES * labels)
    return (np.arange(COPIES) < right[:, None]).reshape(-1).astype(np.float64)


def cross_validated_judge(judged: JudgedAnswers, *, stage: Map = "beta") -> Evaluations:
    """Measure scores, as shares of their scale, and the chances of maps of other folds.

    Empty for grades between 0 and 1, which are no outcomes.
    """
    known = judged.known
    labels, texts = judged.human[known], [""] * int(known.sum())
    if not _plain(labels):
        return {}
    graded = GradedAnswers(texts, texts, judged.shares[known], labels == 1, judged.source)
    return cross_validated_answers(graded, stage=stage)


def apply_judge(
    calibrator: AnswerCalibrator, answers: AnswerRows, scale: Scale | None = None
) -> list[Row]:
    """Add the chance of each answer to be right to its row, as ``calibrated``."""
    judged = judged_answers(answers, scale)
    calibrator.source_.check(judged.source, "fit one on scores of this judge and scale")
    chances = calibrated(calibrator, judged.shares)
    return [{**row, "calibrated": float(p)} for row, p in zip(answers.rows, chances, strict=True)]
