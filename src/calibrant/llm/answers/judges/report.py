"""Everything that judged answers say, about the systems that wrote them and about the judge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrant._core.checks import FloatArray
from calibrant._core.messages import printable_name
from calibrant._core.showing import frame, one_line
from calibrant.llm.answers.judges.biases import (
    JudgeAgreement,
    PositionBias,
    agreement,
    length_bias,
    position_bias,
)
from calibrant.llm.answers.judges.judged import JudgedAnswers
from calibrant.llm.answers.judges.rates import RateEstimate, rate_difference, success_rate
from calibrant.llm.answers.rows import AnswerRows
from calibrant.metrics.intervals import Estimate
from calibrant.show.box import Box
from calibrant.show.tables import Table

if TYPE_CHECKING:
    import pandas as pd


def figures_of(record: JudgeAgreement | PositionBias) -> dict[str, Any]:
    """Return the fields of a result as plain values, for JSON."""
    values = record._asdict().items()
    return {name: v._asdict() if isinstance(v, Estimate) else v for name, v in values}


TableRow = tuple[str, str, str]
"""A name, a value and its interval, in words."""


class JudgeReport(NamedTuple):
    """Success rates, their differences, and the quality of the judge.

    Attributes
    ----------
    rates : dict of RateEstimate
        By system; "" if there is only one.
    differences : dict of Estimate
        Rate of each further system minus that of the first, by its name; of answers to the same
        questions if these are known.
    agreement : JudgeAgreement
    length : Estimate or None
        Factor on the odds of a high score for twice the length; None without lengths.
    position : PositionBias or None
        None without verdicts on swapped pairs.
    level : float
        Coverage of the intervals.
    """

    rates: dict[str, RateEstimate]
    differences: dict[str, Estimate]
    agreement: JudgeAgreement
    length: Estimate | None
    position: PositionBias | None
    level: float

    def __repr__(self) -> str:
        rates = [f"{name or 'rate'} {100 * r.rate.value:.1f} %" for name, r in self.rates.items()]
        return one_line(self, *rates, f"kappa {self.agreement.kappa.value:.2f}")

    def table(self) -> list[TableRow]:
        """Return names, values and intervals in words."""
        rows: list[TableRow] = []
        for name, rate in self.rates.items():
            rows.append(_percent(_named("success rate", name), rate.rate))
            rows.append(_percent(_named("from labels alone", name), rate.labels_alone))
        for name, difference in self.differences.items():
            rows.append(_percent(f"{name} minus {next(iter(self.rates))}", difference))
        found = self.agreement
        rows.append(_percent("verdicts equal to people's", found.raw))
        rows.append(_plain("Cohen's kappa", found.kappa))
        rows.append(_percent("AUROC of the scores", found.auroc))
        rows.append(("wrong answers judged right", _share(found.lenient), ""))
        rows.append(("right answers judged wrong", _share(found.strict), ""))
        if self.length is not None:
            rows.append(_plain("odds, twice the length", self.length))
        return rows + position_rows(self.position)

    def remarks(self, width: float | None = None) -> list[str]:
        """Return sentences on what the judge is worth and, for a half-width, on labels needed."""
        lines = []
        for name, rate in self.rates.items():
            count = f"{rate.labelled:,} of {rate.n:,} answers have a human label"
            worth = f"with the judge they are worth {rate.worth:,.0f} labels"
            said = [f"{count}; {worth if rate.slope else 'the judge is not used'}"]
            if width is not None:
                points, needed = (
                    f"a half-width of {100 * width:g} points",
                    rate.labels_needed(width),
                )
                if needed is None:
                    total = rate.answers_needed(width)
                    said.append(f"{points} needs more answers: about {total:,} if all have labels")
                elif needed == rate.labelled:
                    now = f"{100 * rate.half_width:.2g}"
                    said.append(f"{points} needs no more labels: it is {now} now")
                else:
                    more = f"{needed - rate.labelled:,} more labels, {needed:,} in total"
                    said.append(f"{points} needs about {more}")
            lines += [_named(text, name) for text in said]
        return lines

    def to_dict(self, width: float | None = None) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "level": self.level,
            "rates": {name: _rate_dict(rate, width) for name, rate in self.rates.items()},
            "differences": {name: each._asdict() for name, each in self.differences.items()},
            "agreement": figures_of(self.agreement),
            "length_bias": self.length
            and {"odds_ratio": self.length._asdict(), "n": self.agreement.n},
            "position_bias": self.position and figures_of(self.position),
        }

    def _repr_html_(self) -> str:
        headings = ("", "value", f"{100 * self.level:g} % interval")
        parts = [Table(headings, self.table())]
        return Box("Judged answers", parts=parts, remarks=self.remarks()).notebook()

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each system. Needs pandas."""
        return frame({"system": name, **_rate_dict(rate)} for name, rate in self.rates.items())


def judge_report(
    judged: JudgedAnswers,
    *,
    cut: float | None = None,
    level: float = 0.9,
    position: PositionBias | None = None,
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
    return JudgeReport(rates, differences, found, length, position, level)


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


def position_rows(position: PositionBias | None) -> list[TableRow]:
    """Return the lines of a table on the order of answers."""
    if position is None:
        return []
    flips = _percent("verdicts that flip with the order", position.flips)
    return [flips, _percent("wins of the answer shown first", position.first)]


def _named(text: str, system: str) -> str:
    return f"{system}: {text}" if system else text


def _rate_dict(rate: RateEstimate, width: float | None = None) -> dict[str, Any]:
    content = {
        "rate": rate.rate._asdict(),
        "labels_alone": rate.labels_alone._asdict(),
        "n": rate.n,
        "labelled": rate.labelled,
        "worth": rate.worth,
        "slope": rate.slope,
    }
    if width is not None:
        needed = rate.labels_needed(width)
        content["labels_needed"] = needed
        content["answers_needed"] = rate.answers_needed(width) if needed is None else rate.n
    return content


def _percent(name: str, estimate: Estimate) -> TableRow:
    low, high = 100 * estimate.low, 100 * estimate.high
    return name, _share(estimate.value), "" if math.isnan(low) else f"[{low:.1f}, {high:.1f}]"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _plain(name: str, estimate: Estimate) -> TableRow:
    value, low, high = estimate
    shown = "-" if math.isnan(value) else f"{value:.2f}"
    return name, shown, "" if math.isnan(low) else f"[{low:.2f}, {high:.2f}]"
