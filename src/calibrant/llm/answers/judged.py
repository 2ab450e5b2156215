"""Answers with a judge's score, and human labels of some: as rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import BoolArray, FloatArray
from calibrant.estimate.judge_report import JudgedAnswers
from calibrant.estimate.judges import PositionBias, position_bias
from calibrant.llm.answers.rows import GRADES, AnswerRows, Scale, Source, read_answers

_VOTES: Scale = (0.0, 1.0)
_COPIES = 10
"""Graded answers that stand for one with a grade between 0 and 1."""


def read_judged(
    file: str | os.PathLike[str] | AnswerRows, *, scale: Scale | None = None
) -> JudgedAnswers:
    """Read judged answers from JSON lines, or from a CSV file with a line of names.

    Each row has ``judge``, a score on ``scale`` (lowest, highest; by default a vote, or a number in
    [0, 1]), and some have ``human``: true or false, or a grade in [0, 1]. The guide to judges lists
    the other keys.

    Examples
    --------
    >>> rows = AnswerRows.of([{"judge": 7, "human": "yes"}, {"judge": 3}])
    >>> judged = read_judged(rows, scale=(1, 10))
    >>> judged.judge, judged.human
    (array([7., 3.]), array([ 1., nan]))
    """
    answers = file if isinstance(file, AnswerRows) else read_answers(file)
    answers.source()  # of one judge
    low, high = _VOTES if scale is None else (float(end) for end in scale)
    if not (np.isfinite([low, high]).all() and low < high):
        raise ValueError(f"scale must be the lowest and the highest score, got {low:g},{high:g}")
    keys = {key for row in answers.rows for key in row}
    if "judge" not in keys:
        raise ValueError(
            f"{answers.places[0]} has no judge: each row needs the score or vote of the judge"
        )

    def texts(key: str, instead: Sequence[str]) -> NDArray[Any] | None:
        """Return the texts under a key, or others where a row has none; None if no row has one."""
        pairs = zip(answers.rows, instead, strict=True)
        return (
            np.array([str(row.get(key) or other) for row, other in pairs]) if key in keys else None
        )

    words = (low, high) == _VOTES
    every, nothing = np.ones(len(answers.rows), dtype=bool), [""] * len(answers.rows)
    known = np.array([row.get("human") not in (None, "") for row in answers.rows])
    remedy = "state another scale, as 1,10" if scale is None else "correct the scale or the score"
    wanted = f"must be a score from {low:g} to {high:g}, got {{}}: {remedy}"
    judge = _numbers(answers, "judge", every, wanted, lambda x: low <= x <= high, words)
    wanted = "must be true or false, or a grade from 0 to 1, got {}"
    human = _numbers(answers, "human", known, wanted, lambda x: 0 <= x <= 1, True)
    probability = lengths = None
    if "label_probability" in keys:
        wanted = "must be above 0 and at most 1, got {}"
        probability = _numbers(answers, "label_probability", known, wanted, lambda x: 0 < x <= 1)
    if "length" in keys:
        wanted = "must be a number above 0, got {}"
        lengths = _numbers(answers, "length", every, wanted, lambda x: x > 0)
    elif "answer" in keys:
        lengths = np.array([max(1.0, len(str(row.get("answer", "")))) for row in answers.rows])
    return JudgedAnswers(
        judge,
        human,
        (low, high),
        probability,
        texts("stratum", nothing),
        texts("question", answers.places),
        texts("system", nothing),
        lengths,
    )


def _numbers(
    answers: AnswerRows,
    key: str,
    where: BoolArray,
    wanted: str,
    is_legal: Callable[[float], bool],
    words: bool = False,
) -> FloatArray:
    """Return the numbers of some rows, and NaN elsewhere; raise if one is not legal."""
    values = np.full(len(answers.rows), math.nan)
    for i in np.flatnonzero(where):
        value = answers.rows[i].get(key)
        known = GRADES.get(str(value).strip().lower()) if words else None
        try:
            number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        values[i] = number if known is None else known
        if not is_legal(values[i]):  # nor is NaN
            raise ValueError(f"{key} of {answers.places[i]} {wanted.format(f'{value!r:.40}')}")
    return values


def judged_source(answers: AnswerRows, scale: Scale) -> Source:
    """Return the source of judged answers; ``confidence`` names the judge and the scale."""
    origin = answers.source()
    name = f"{origin.confidence or 'judge'}, {scale[0]:g} to {scale[1]:g}"
    return origin._replace(confidence=name)


def graded_by_people(answers: AnswerRows, *, scale: Scale | None = None) -> AnswerRows:
    """Return the answers that people labelled, with shares of the scale as confidences, for a map.

    A grade between 0 and 1 becomes ten answers to one question, with its mean.
    """
    judged = read_judged(answers, scale=scale)
    if not judged.known.any():
        raise ValueError(f"none of {len(judged.judge):,} answers has a human label: label some")
    source, rows = judged_source(answers, judged.scale).row(), []
    for i in np.flatnonzero(judged.known):
        question = i if judged.questions is None else judged.questions[i]
        row = {"question": f"{question}", **source, "confidence": float(judged.shares[i])}
        grade = judged.human[i]
        copies = 1 if grade in (0, 1) else _COPIES
        rows += [{**row, "correct": k < round(copies * grade)} for k in range(copies)]
    return AnswerRows.of(rows)


def pairs_of(answers: AnswerRows, level: float = 0.9) -> PositionBias | None:
    """Return the position bias of rows with ``winner`` and ``swapped_winner``; None without."""
    keys = ("winner", "swapped_winner")
    verdicts = [[row[key] for key in keys] for row in answers.rows if all(k in row for k in keys)]
    if not verdicts:
        return None
    winner, swapped = zip(*verdicts, strict=True)
    return position_bias(winner, swapped, level=level)
