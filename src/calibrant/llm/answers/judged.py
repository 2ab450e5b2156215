"""Answers with a judge's score, and human labels of some: what they say of systems and judge."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.messages import printable_name
from calibrant._core.showing import as_html, frame, one_line
from calibrant.estimate.judges import (
    JudgeAgreement,
    PositionBias,
    agreement,
    length_bias,
    position_bias,
)
from calibrant.estimate.success_rate import RateEstimate, rate_difference, success_rate
from calibrant.llm.answers.rows import GRADES, AnswerRows, Scale, Source, read_answers
from calibrant.metrics.intervals import Estimate
from calibrant.show.box import Box, box_of
from calibrant.show.style import percent
from calibrant.show.tables import Table

if TYPE_CHECKING:
    import pandas as pd

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


# ------------------------------------------------------------------------------------------ report


@dataclass(frozen=True, repr=False)
class JudgeReport:
    """Success rates, their differences, and the quality of the judge.

    Attributes
    ----------
    level : float
        Coverage of the intervals.
    rates : dict of RateEstimate
        By system; "" if there is only one.
    differences : dict of Estimate
        Rate of each further system minus that of the first, by its name; of answers to the same
        questions if these are known.
    agreement : JudgeAgreement or None
        None if there are only verdicts on pairs.
    length : Estimate or None
        Factor on the odds of a high score for twice the length; None without lengths.
    position : PositionBias or None
        None without verdicts on swapped pairs.
    width : float or None
        Half-width of the intervals that are wanted.
    """

    level: float
    rates: dict[str, RateEstimate] = field(default_factory=dict)
    differences: dict[str, Estimate] = field(default_factory=dict)
    agreement: JudgeAgreement | None = None
    length: Estimate | None = None
    position: PositionBias | None = None
    width: float | None = None

    def __repr__(self) -> str:
        rates = [f"{name or 'rate'} {percent(r.rate.value)}" for name, r in self.rates.items()]
        found = self.agreement
        return one_line(self, *rates, f"kappa {found.kappa.value:.2f}" if found else "")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        position = {"position_bias": self.position and _plain(self.position)}
        if self.agreement is None:
            return {"level": self.level, **position}
        length = self.length and {"odds_ratio": self.length._asdict(), "n": self.agreement.n}
        return {
            "level": self.level,
            "rates": {name: self._figures(rate) for name, rate in self.rates.items()},
            "differences": {name: each._asdict() for name, each in self.differences.items()},
            "agreement": _plain(self.agreement),
            "length_bias": length,
            **position,
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each system. Needs pandas."""
        return frame({"system": name, **self._figures(rate)} for name, rate in self.rates.items())

    def _figures(self, rate: RateEstimate) -> dict[str, Any]:
        names = ("n", "labelled", "worth", "slope")
        content = {name: getattr(rate, name) for name in names}
        content |= {"rate": rate.rate._asdict(), "labels_alone": rate.labels_alone._asdict()}
        if self.width is not None:
            needed = rate.labels_needed(self.width)
            answers = rate.answers_needed(self.width) if needed is None else rate.n
            content |= {"labels_needed": needed, "answers_needed": answers}
        return content

    def _repr_html_(self) -> str:
        return as_html(self)


def _plain(record: NamedTuple) -> dict[str, Any]:
    """Return the fields of a result as plain values, for JSON."""
    values = record._asdict().items()
    return {name: v._asdict() if isinstance(v, Estimate) else v for name, v in values}


@box_of.register(JudgeReport)
def _box(report: JudgeReport) -> Box:
    """Return the figures with their intervals, and what the judge is worth."""
    rows: list[tuple[str, str, str]] = []

    def add(name: str, estimate: Estimate, scale: int = 100) -> None:
        """Add a line, of a share in percent or of a factor as it is."""
        unit, form = (" %", ".1f") if scale == 100 else ("", ".2f")
        value, low, high = (f"{scale * x:{form}}" for x in estimate)
        shown = "-" if math.isnan(estimate.value) else value + unit
        rows.append((name, shown, "" if math.isnan(estimate.low) else f"[{low}, {high}]"))

    for name, rate in report.rates.items():
        add(_named("success rate", name), rate.rate)
        add(_named("from labels alone", name), rate.labels_alone)
    for name, difference in report.differences.items():
        add(f"{name} minus {next(iter(report.rates))}", difference)
    if report.agreement is not None:
        add("verdicts equal to people's", report.agreement.raw)
        add("Cohen's kappa", report.agreement.kappa, 1)
        add("AUROC of the scores", report.agreement.auroc)
        rows.append(("wrong answers judged right", percent(report.agreement.lenient), ""))
        rows.append(("right answers judged wrong", percent(report.agreement.strict), ""))
    if report.length is not None:
        add("odds, twice the length", report.length, 1)
    if report.position is not None:
        add("verdicts that flip with the order", report.position.flips)
        add("wins of the answer shown first", report.position.first)
    table = Table(("", "value", f"{100 * report.level:g} % interval"), rows)
    remarks = [
        _named(text, name)
        for name, rate in report.rates.items()
        for text in _worth(rate, report.width)
    ]
    return Box("Judged answers", parts=[table], remarks=remarks)


def _worth(rate: RateEstimate, width: float | None) -> list[str]:
    """Return what the judge is worth and, for a half-width, the labels that it needs."""
    worth = f"with the judge they are worth {rate.worth:,.0f} labels"
    count = f"{rate.labelled:,} of {rate.n:,} answers have a human label"
    said = [f"{count}; {worth if rate.slope else 'the judge is not used'}"]
    if width is None:
        return said
    points, needed = f"a half-width of {100 * width:g} points", rate.labels_needed(width)
    if needed is None:
        total = rate.answers_needed(width)
        return [*said, f"{points} needs more answers: about {total:,} if all have labels"]
    if needed == rate.labelled:
        return [*said, f"{points} needs no more labels: it is {100 * rate.half_width:.2g} now"]
    more = f"{needed - rate.labelled:,} more labels, {needed:,} in total"
    return [*said, f"{points} needs about {more}"]


def _named(text: str, system: str) -> str:
    return f"{system}: {text}" if system else text


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
