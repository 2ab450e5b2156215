"""Maps from the confidence of claims to the chance that they are right."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import BoolArray, FloatArray, Values
from calibrant.display.html import Html, page
from calibrant.display.results import heading, remarks
from calibrant.display.tokens import shaded_tokens, token_scale, token_table
from calibrant.llm.answers.calibrating import calibrated
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.llm.answers.confidence import SMALLEST, Aggregator
from calibrant.llm.answers.graded import AnswerRows, Row
from calibrant.llm.answers.grading import FOLDS
from calibrant.llm.answers.shading import ShadedText, shaded_text
from calibrant.llm.answers.sources import Source
from calibrant.llm.claims.claimed import ClaimedAnswer, ClaimedAnswers, claim_rows, claimed_answers
from calibrant.llm.heads.evaluate import ConfidenceEvaluation, Evaluations, evaluate_tokens

SHOWN = 100
"""Answers on a page."""
PREFIX = "claims, "
"""Before the aggregate, in the name of a source."""


def fit_claims(
    claims: ClaimedAnswers, *, aggregate: Aggregator = "geometric", stage: Map = "beta"
) -> AnswerCalibrator:
    """Fit a map from the confidence of graded claims to the chance that they are right.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> answers = []
    >>> for _ in range(200):
    ...     probs = rng.beta(4, 1, size=4)
    ...     grades = [bool(rng.random() < probs[i : i + 2].prod()) for i in (0, 2)]
    ...     text = ["It", " is.", " So", " it is."]
    ...     answers.append(ClaimedAnswer("".join(text), 0, text, probs, [(0, 6), (7, 16)], grades))
    >>> fit_claims(ClaimedAnswers(answers, Source())).describe()
    'beta map from confidences to the probability of a correct answer'
    """
    known = claims.graded()
    if not known.any():
        raise ValueError("no claim has a grade: set correct to true or false for some of them")
    source = claims_source(claims.source, aggregate)
    confidence = claims.confidence(aggregate)[known]
    return AnswerCalibrator(None, stage=stage).fit(confidence, claims.correct(), source=source)


def claims_source(source: Source, aggregate: str) -> Source:
    """Return the source of the confidences of claims."""
    return source._replace(confidence=f"{PREFIX}{aggregate}")


def cross_validated_claims(
    claims: ClaimedAnswers, *, aggregate: Aggregator = "geometric", stage: Map = "beta"
) -> Evaluations:
    """Measure the confidences of claims ``before`` and, by maps of other answers, ``after``.

    All claims of an answer are in one fold, and the intervals are those of independent answers.
    Without ``after`` if fewer than ten answers have graded claims.
    """
    known = claims.graded()
    confidence, correct = claims.confidence(aggregate)[known], claims.correct()
    names, number = np.unique(claims.numbers()[known], return_inverse=True)
    evaluations = {"before": _measured(confidence, correct, number)}
    if names.size < 2 * FOLDS:
        return evaluations
    folds = (np.random.default_rng(0).permutation(names.size) % FOLDS)[number]
    after = np.empty_like(confidence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fit to all claims repeats what is worth saying
        for fold in range(FOLDS):
            others = folds != fold
            fitted = AnswerCalibrator(None, stage=stage).fit(confidence[others], correct[others])
            after[~others] = fitted.predict(confidence[~others])
    return evaluations | {"after": _measured(after, correct, number)}


def _measured(confidence: FloatArray, correct: BoolArray, number: Values) -> ConfidenceEvaluation:
    said = np.where(correct, confidence, 1 - confidence)
    nll = -np.log(np.maximum(said, SMALLEST))
    return replace(evaluate_tokens(confidence, correct, number, nll=nll), unit="claims")


def split_claims(answers: AnswerRows, aggregate: Aggregator = "geometric") -> list[Row]:
    """Add the sentences of answers to their rows as ``claims``, with confidences, to be graded."""
    return claim_rows(answers, {"confidence": claimed_answers(answers).confidence(aggregate)})


def apply_claims(calibrator: AnswerCalibrator, answers: AnswerRows) -> list[Row]:
    """Add the chance of each claim to be right to the claims of each row, as ``calibrated``.

    Raises if the tokens are of another source than those of the fit.
    """
    claims = claimed_answers(answers)
    confidence, chance = _chances(calibrator, claims)
    return claim_rows(answers, {"confidence": confidence, "calibrated": chance})


def _chances(calibrator: AnswerCalibrator, claims: ClaimedAnswers) -> tuple[FloatArray, FloatArray]:
    """Confidence of each claim, and its chance to be right."""
    known = calibrator.source_.confidence
    if not known.startswith(PREFIX):
        raise ValueError("the map is not one of claims: fit one by calibrant llm claims fit")
    aggregate: Aggregator = known.removeprefix(PREFIX)  # type: ignore[assignment]
    calibrator.source_.check(claims_source(claims.source, aggregate))
    confidence = claims.confidence(aggregate)
    return confidence, calibrated(calibrator, confidence) if confidence.size else confidence


def shaded_claims(calibrator: AnswerCalibrator, claims: ClaimedAnswers) -> list[ShadedText]:
    """Return the texts of answers, their claims shaded by the chance to be right."""
    _, chances = _chances(calibrator, claims)
    numbers = claims.numbers()
    return [_shaded(answer, chances[numbers == i]) for i, answer in enumerate(claims.answers)]


def write_page(
    file: str | os.PathLike[str], calibrator: AnswerCalibrator, answers: AnswerRows
) -> None:
    """Write a page of HTML with the first answers of a file, their claims shaded."""
    claims = claimed_answers(answers)
    some = claims._replace(answers=claims.answers[:SHOWN])
    titles = [
        str(row.get("question", "")) or f"answer {n}" for n, row in enumerate(answers.rows, 1)
    ]
    parts: list[Html] = [token_scale("claim")]
    for title, shaded in zip(titles, shaded_claims(calibrator, some), strict=False):
        probs = shaded.probs.tolist()
        parts += [heading(title), shaded_tokens(shaded.tokens, probs)]
        parts.append(token_table(shaded.tokens, probs, "claim"))
    left = len(titles) - len(some.answers)
    parts.append(remarks([f"and {left:,} more answers"] if left else []))
    with replacing(Path(file)) as temporary:
        temporary.write_text(page("Claims", *parts), encoding="utf-8")


def _shaded(answer: ClaimedAnswer, chances: FloatArray) -> ShadedText:
    """Cut the text where claims begin and end; what several cover has the lowest chance of them."""
    cuts = sorted({0, len(answer.text), *(end for span in answer.spans for end in span)})
    parts, lowest = [], []
    for start, end in pairwise(cuts):
        covering = [
            chance
            for (a, b), chance in zip(answer.spans, chances, strict=True)
            if a <= start and end <= b
        ]
        parts.append(answer.text[start:end])
        lowest.append(min(covering, default=np.nan))
    return shaded_text(parts, lowest, unit="claim")
