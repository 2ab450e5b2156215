"""Answers with a judge's score, and human labels of some: what they say of systems and judge."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.messages import printable_name
from calibrant._core.showing import one_line
from calibrant.estimate.judge_report import JudgeReport
from calibrant.estimate.judges import PositionBias, agreement, length_bias, position_bias
from calibrant.estimate.success_rate import rate_difference, success_rate
from calibrant.llm.answers.rows import GRADES, AnswerRows, Scale, Source, read_answers

_VOTES: Scale = (0.0, 1.0)
_COPIES = 10
"""Graded answers that stand for one with a grade between 0 and 1."""


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

    def graded(self) -> AnswerRows:
        """Return the labelled answers with their shares as confidences, for a map of them.

        A grade between 0 and 1 becomes ten answers to one question, with its mean.
        """
        if not self.known.any():
            raise ValueError(
                f"none of {len(self.judge):,} answers has a human label: label some of them"
            )
        rows = []
        for i in np.flatnonzero(self.known):
            question = i if self.questions is None else self.questions[i]
            about = {"question": f"{question}", **self.source.row()}
            row = {**about, "confidence": float(self.shares[i])}
            grade = self.human[i]
            copies = 1 if grade in (0, 1) else _COPIES
            rows += [{**row, "correct": k < round(copies * grade)} for k in range(copies)]
        return AnswerRows.of(rows)

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.judge):,} answers", f"{int(self.known.sum()):,} labelled")


def read_judged(
    file: str | os.PathLike[str] | AnswerRows, *, scale: Scale | None = None
) -> JudgedAnswers:
    """Read judged answers from JSON lines, or from a CSV file with a line of names.

    Each row has ``judge``, a score on ``scale`` (lowest, highest; by default a vote, or a number in
    [0, 1]), and some have ``human``: true or false, or a grade in [0, 1]. Optional are
    ``label_probability``, that of being drawn for labelling; ``stratum``; ``question``;
    ``system``; ``length``, or else the ``answer``, whose characters are counted; and ``source``,
    the name of the judge, which must be the same for all.

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


def judge_report(
    judged: JudgedAnswers,
    *,
    cut: float | None = None,
    level: float = 0.9,
    position: PositionBias | None = None,
    width: float | None = None,
) -> JudgeReport:
    """Estimate success rates from judged answers, and measure the judge.

    Parameters
    ----------
    judged : JudgedAnswers
        From :func:`~calibrant.llm.read_judged`.
    cut : float, optional
        Scores from here on count as the verdict that an answer is right, for the agreement; by
        default the middle of the scale.
    level : float
        Coverage of the intervals.
    position : PositionBias, optional
        To report with the rest.
    width : float, optional
        Half-width of intervals, for which the report says how many labels it needs.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> right = rng.random(3000) < 0.7
    >>> judge = np.where(rng.random(3000) < 0.9, right, ~right).astype(float)
    >>> human = np.where(rng.random(3000) < 0.1, right, np.nan)
    >>> judge_report(JudgedAnswers(judge, human))
    JudgeReport(rate 71.1 %, kappa 0.76)
    """
    known = judged.known
    if not known.any():
        raise ValueError(
            f"none of {known.size:,} answers has a human label: label some of them, drawn at random"
        )
    systems = {"": judged}
    if judged.systems is not None:
        names = dict.fromkeys(judged.systems.tolist())  # in the order of the file
        systems = {name: judged.part(judged.systems == name) for name in names}
    rates = {}
    for name, part in systems.items():
        about: Any = {"probability": part.probability, "strata": part.strata}
        try:
            rates[name] = success_rate(
                part.judge, part.human, groups=part.questions, level=level, **about
            )
        except ValueError as error:
            if not name:
                raise
            raise ValueError(f"system {printable_name(name)}: {error}") from error
    first, *others = systems
    base, differences = systems[first].questions, {}
    for name in others:
        own = systems[name].questions
        pairs = None if own is None or base is None else (base, own)
        differences[name] = rate_difference(rates[first], rates[name], questions=pairs)
    found = agreement(
        judged.judge[known],
        judged.human[known],
        cut=sum(judged.scale) / 2 if cut is None else cut,
        sample_weight=_weights(judged),
        level=level,
    )
    length = None
    if judged.lengths is not None:
        length = length_bias(
            judged.shares[known], judged.human[known], judged.lengths[known], level=level
        )
    return JudgeReport(level, rates, differences, found, length, position, width)


def _weights(judged: JudgedAnswers) -> FloatArray | None:
    """Return how many answers each labelled one stands for; None if all stand for as many."""
    known = judged.known
    if judged.probability is not None:
        return 1 / judged.probability[known]
    if judged.strata is None:
        return None
    _, number = np.unique(judged.strata, return_inverse=True)
    ratio = np.bincount(number) / np.maximum(np.bincount(number, known), 1)
    return np.asarray(ratio[number[known]])


def pairs_of(answers: AnswerRows, level: float = 0.9) -> PositionBias | None:
    """Return the position bias of rows with ``winner`` and ``swapped_winner``; None without."""
    keys = ("winner", "swapped_winner")
    verdicts = [[row[key] for key in keys] for row in answers.rows if all(k in row for k in keys)]
    if not verdicts:
        return None
    winner, swapped = zip(*verdicts, strict=True)
    return position_bias(winner, swapped, level=level)
