"""Calibration in Inspect: a scorer that adds the chance to be right, and the metric ECE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibrant._core.messages import needed
from calibrant.artifacts import load
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.grading import confidence_of
from calibrant.llm.answers.logprobs import token_material
from calibrant.llm.heads.documents import BadDocument
from calibrant.metrics.binned import ece as ece_of

with needed("this needs Inspect", "inspect-ai"):
    from inspect_ai.scorer import (
        Metric,
        SampleScore,
        Score,
        Scorer,
        Target,
        accuracy,
        metric,
        scorer,
        value_to_float,
    )
    from inspect_ai.solver import TaskState


@metric  # type: ignore[untyped-decorator]
def ece() -> Metric:
    """Return the calibration error of confidences that :func:`with_confidence` adds to scores.

    Scores without a confidence are left out; the result is NaN if there are none.
    """

    def compute(scores: list[SampleScore]) -> float:
        pairs = [_pair(one.score) for one in scores]
        known = [pair for pair in pairs if pair is not None]
        if not known:
            return float("nan")
        confidence, outcome = (np.array(values) for values in zip(*known, strict=True))
        return float(ece_of(confidence=confidence, outcome=outcome))

    return compute


def _pair(score: Score) -> tuple[float, float] | None:
    about = score.metadata or {}
    claimed = about.get("calibrated", about.get("confidence"))
    right = value_to_float()(score.value)
    return None if claimed is None or right not in (0, 1) else (float(claimed), right)


@scorer(metrics=[accuracy(), ece()])  # type: ignore[untyped-decorator]
def with_confidence(
    base: Scorer, calibrator: AnswerCalibrator | str | os.PathLike[str] | None = None
) -> Scorer:
    """Score by another scorer, and add the confidence in the answer to its metadata.

    The model must return log-probabilities (``logprobs=True`` in its ``GenerateConfig``). Metadata
    get ``confidence``, an aggregate of the token probabilities; with a calibrator also
    ``calibrated``, the chance that the answer is right, and ``abstains`` if the calibrator has a
    threshold. They are None where the model returned no log-probabilities.

    Parameters
    ----------
    base : Scorer
        Says if the answer is right, such as ``match()``.
    calibrator : AnswerCalibrator or path, optional
        Of ``calibrant llm answers report`` or ``fit``, for answers of this model.

    Examples
    --------
    ::

        task = Task(dataset, solver=generate(), scorer=with_confidence(match(), "report/map"))
        eval(task, model="openai/gpt-4o-mini", logprobs=True)
    """
    if isinstance(calibrator, (str, os.PathLike)):
        calibrator = load(calibrator, AnswerCalibrator)
    fitted: AnswerCalibrator | None = calibrator
    rule = confidence_of(fitted, None)
    if rule == "p_true":
        raise ValueError("the calibrator must be of token probabilities, not of P(True)")

    async def score(state: TaskState, target: Target) -> Score | None:
        graded = await base(state, target)
        if graded is None:
            return None
        added = _confidence(_token_probs(state), fitted, rule)
        return graded.model_copy(update={"metadata": {**(graded.metadata or {}), **added}})

    return score


def _token_probs(state: TaskState) -> Sequence[float]:
    choices = state.output.choices
    logprobs = choices[0].logprobs if choices else None
    if logprobs is None:
        return ()
    try:
        found = token_material(logprobs.model_dump(), f"sample {state.sample_id}")
    except BadDocument:  # NaN and the like: an answer of which nothing is known
        return ()
    return found.get("token_probs", ())  # type: ignore[no-any-return]


def _confidence(
    probs: Sequence[float], calibrator: AnswerCalibrator | None, rule: Any
) -> dict[str, Any]:
    names = ["confidence", *(["calibrated"] if calibrator is not None else [])]
    if not probs:
        return dict.fromkeys(names)
    confidence = answer_confidence([probs], rule)
    added: dict[str, Any] = {"confidence": float(confidence[0])}
    if calibrator is None:
        return added
    chance = calibrator.predict(confidence)
    added["calibrated"] = float(chance[0])
    if calibrator.threshold_ is not None:
        added["abstains"] = bool(calibrator.abstains(chance)[0])
    return added
