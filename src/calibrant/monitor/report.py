"""What a monitor has to say."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from calibrant._core.checks import IGNORED

SHOWN = 20
"""Windows that are printed."""


class Alarm(NamedTuple):
    """When the e-value first reached its limit."""

    window: str
    examples: int
    e_value: float


class Drift(NamedTuple):
    """The bet that has won most: what has changed, where and since when."""

    direction: str  # "over" or "under"
    since: str
    low: float  # ends of the range of confidence
    high: float
    n: int  # examples in that range since then
    confidence: float
    accuracy: float


@dataclass(frozen=True, eq=False)
class MonitorReport:
    """What a monitor has to say; printing it gives a table and a verdict.

    Attributes
    ----------
    n : int
        Labelled examples so far.
    windows : list of dict
        ``window``, ``n``, ``accuracy``, ``confidence``, ``gap`` (confidence - accuracy), ``ece``
        and ``e_value``, of the windows that are kept.
    e_value, limit : float
        The evidence now, and from which value on it is an alarm.
    alarm : Alarm or None
        The first time that the limit was reached.
    drift : Drift or None
        What has changed, if there was an alarm.
    bins : list of dict
        Bins that are beyond the tolerance and beyond chance since the drift began.
    false_alarms, tolerance : float
        What was asked for.
    reference : bool
        Whether the tolerance is about the gaps of a reference, not about none.
    counts : dict
        ``pending`` predictions; ``dropped``, ``repeated`` and ``unknown`` ids; ``ignored`` labels.
    """

    n: int
    windows: list[dict[str, Any]]
    e_value: float
    limit: float
    alarm: Alarm | None
    drift: Drift | None
    bins: list[dict[str, float]]
    false_alarms: float
    tolerance: float
    reference: bool
    counts: dict[str, int]

    def advice(self) -> str:
        """The verdict in words."""
        if self.alarm is None or self.drift is None:
            return (
                f"No drift shown: the e-value is {self.e_value:.3g}, an alarm needs {self.limit:g}."
            )
        found = self.drift
        return (
            f"Recommend a refit: {found.direction}-confident since window {found.since}, most "
            f"clearly where confidence is {100 * found.low:.0f} to {100 * found.high:.0f} %: "
            f"{100 * found.confidence:.1f} % claimed, {100 * found.accuracy:.1f} % right in "
            f"{found.n:,} examples. Alarm at window {self.alarm.window}, after "
            f"{self.alarm.examples:,} examples, with an e-value of {self.alarm.e_value:.3g} "
            f"(limit {self.limit:g}; now {self.e_value:.3g})."
        )

    def describe(self) -> str:
        """One line that says what was watched and what is promised."""
        within = f"within {100 * self.tolerance:g} points"
        state = f"{within} of its reference" if self.reference else f"calibrated {within}"
        return (
            f"{self.n:,} labelled examples; a model that stays {state} raises an alarm, ever, with "
            f"a probability of at most {100 * self.false_alarms:g} %"
        )

    def remarks(self) -> list[str]:
        """Bins that are off, and what happened to ids and labels."""
        off = [
            f"confidence {100 * b['low']:.0f} to {100 * b['high']:.0f} %: "
            f"{100 * b['confidence']:.1f} % claimed, {100 * b['accuracy']:.1f} % right "
            f"({b['n']:,} examples)"
            for b in self.bins
        ]
        texts = {
            "pending": "predictions that wait for a label",
            "dropped": "predictions dropped before a label came (pending sets how many may wait)",
            "repeated": "ids predicted again before their label came (the last one counts)",
            "unknown": "labels with an id that is not waiting",
            "ignored": f"labels of {IGNORED} (ignored)",
        }
        return off + [f"{text}: {self.counts[k]:,}" for k, text in texts.items() if self.counts[k]]

    def table(self) -> list[tuple[str, ...]]:
        """Headings and the last windows, as text."""
        headings = ("window", "examples", "accuracy", "confidence", "gap", "ECE", "e-value")
        rows: list[tuple[str, ...]] = [headings]
        for row in self.windows[-SHOWN:]:
            shares = (row[key] for key in ("accuracy", "confidence", "gap", "ece"))
            cells = ["-" if math.isnan(share) else f"{100 * share:.2f} %" for share in shares]
            cells[2] = cells[2] if cells[2][0] == "-" else f"+{cells[2]}"
            rows.append((row["window"], f"{row['n']:,}", *cells, f"{row['e_value']:.3g}"))
        return rows

    def __str__(self) -> str:
        table = self.table()
        wide = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            f"{row[0]:<{wide[0]}}  " + "  ".join(map(str.rjust, row[1:], wide[1:])) for row in table
        ]
        return "\n".join([self.describe(), *lines, *self.remarks(), self.advice()])

    def to_dict(self) -> dict[str, Any]:
        """JSON form: errors as fractions, undefined values as None."""
        found = asdict(self)
        found["alarm"] = self.alarm and self.alarm._asdict()
        found["drift"] = self.drift and self.drift._asdict()
        found["windows"] = [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            for row in self.windows
        ]
        return {**found, "advice": self.advice()}
