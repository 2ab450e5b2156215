"""Files of judged answers: the judge's score of each, and human labels of some."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.showing import one_line
from calibrant.llm.answers.calibrating import cross_validated
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.llm.answers.rows import GRADES, AnswerRows, Row, Source, read_answers
from calibrant.metrics.clustered import Evaluations

Scale: TypeAlias = tuple[float, float]
"""Lowest and highest score."""
_VOTES: Scale = (0.0, 1.0)


class JudgedAnswers(NamedTuple):
    """Answers that a judge scored, some of them with a human label. Arrays are ``(n,)``.

    Attributes
    ----------
    judge : scores
    human : labels in [0, 1]; NaN where there is none
    scale : (float, float)
        Lowest and highest score.
    source : Source
        ``confidence`` names the judge and the scale.
    probability : probability of being drawn for labelling, or None
    strata, questions, systems : texts, or None
    lengths : characters of the answers, or None
    """

    judge: FloatArray
    human: FloatArray
    scale: Scale = _VOTES
    source: Source = Source()
    probability: FloatArray | None = None
    strata: NDArray[Any] | None = None
    questions: NDArray[Any] | None = None
    systems: NDArray[Any] | None = None
    lengths: FloatArray | None = None

    @property
    def known(self) -> BoolArray:
        """True for answers with a label."""
        return ~np.isnan(self.human)

    @property
    def shares(self) -> FloatArray:
        """Scores as shares of their scale, in [0, 1]."""
        low, high = self.scale
        return (self.judge - low) / (high - low)

    def part(self, rows: BoolArray) -> JudgedAnswers:
        """Return some of the answers."""
        columns = ("judge", "human", "probability", "strata", "questions", "systems", "lengths")
        values = {name: getattr(self, name) for name in columns}
        kept: Any = {name: v if v is None else v[rows] for name, v in values.items()}
        return self._replace(**kept)

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.judge):,} answers", f"{int(self.known.sum()):,} labelled")


def read_judged(
    file: str | os.PathLike[str] | AnswerRows, *, scale: Scale | None = None
) -> JudgedAnswers:
    """Read judged answers from JSON lines, or from a CSV file with a line of names.

    Each row has ``judge``, a score or vote, and some have ``human``: true or false (1 or 0, yes or
    no, right or wrong), or a grade in [0, 1]. Optional are ``label_probability``, that of being
    drawn for labelling; ``stratum``; ``question``; ``system``; ``length``, or else the ``answer``,
    whose characters are counted; and ``source``, the name of the judge, which must be the same for
    all.

    Parameters
    ----------
    file : path or AnswerRows
        ``.jsonl`` or ``.csv``, or its rows.
    scale : (float, float), optional
        Lowest and highest score. By default scores are votes, or numbers in [0, 1].

    Examples
    --------
    >>> rows = AnswerRows.of([{"judge": 7, "human": "yes"}, {"judge": 3}])
    >>> judged = read_judged(rows, scale=(1, 10))
    >>> judged.judge, judged.human
    (array([7., 3.]), array([ 1., nan]))
    """
    answers = file if isinstance(file, AnswerRows) else read_answers(file)
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

    every, nothing = np.ones(len(answers.rows), dtype=bool), [""] * len(answers.rows)
    known = np.array([row.get("human") not in (None, "") for row in answers.rows])
    remedy = "state another scale, as 1,10" if scale is None else "correct the scale or the score"
    wanted = f"must be a score from {low:g} to {high:g}, got {{}}: {remedy}"
    judge = _numbers(answers, "judge", every, wanted, lambda x: low <= x <= high, scale is None)
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
    origin = answers.source()
    return JudgedAnswers(
        judge,
        human,
        (low, high),
        origin._replace(confidence=f"{origin.confidence or 'judge'}, {low:g} to {high:g}"),
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
        except (TypeError, ValueError):
            number = math.nan
        values[i] = number if known is None else known
        if not is_legal(values[i]):  # nor is NaN
            raise ValueError(f"{key} of {answers.places[i]} {wanted.format(f'{value!r:.40}')}")
    return values


_COPIES = 10
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
    if labels.size < 2 or not np.ptp(labels):
        told = f"all {labels.size:,} are {labels[0]:g}" if labels.size else "there are none"
        raise ValueError(
            f"human labels must differ to calibrate a judge, and {told}: label more answers"
        )
    if not _plain(labels):  # ten labels of 0 and 1 for each grade, with its mean
        right = np.round(_COPIES * labels)[:, None]
        shares = np.repeat(shares, _COPIES)
        labels = (np.arange(_COPIES) < right).reshape(-1).astype(np.float64)
    return AnswerCalibrator(None, stage=stage).fit(shares, labels, source=judged.source)


def _plain(labels: FloatArray) -> bool:
    return bool(((labels == 0) | (labels == 1)).all())


def cross_validated_judge(judged: JudgedAnswers, *, stage: Map = "beta") -> Evaluations:
    """Measure scores, as shares of their scale, and the chances of maps of other folds.

    Empty for grades between 0 and 1, which are no outcomes.
    """
    known = judged.known
    labels = judged.human[known]
    if not _plain(labels):
        return {}
    groups = np.arange(len(labels))
    return cross_validated(judged.shares[known], labels == 1, groups, judged.source, stage)


def apply_judge(
    calibrator: AnswerCalibrator, answers: AnswerRows, scale: Scale | None = None
) -> list[Row]:
    """Add the chance of each answer to be right to its row, as ``calibrated``."""
    judged = read_judged(answers, scale=scale)
    calibrator.source_.check(judged.source, "fit one on scores of this judge and scale")
    chances = calibrator.predict_confidences(judged.shares)
    return [{**row, "calibrated": float(p)} for row, p in zip(answers.rows, chances, strict=True)]
