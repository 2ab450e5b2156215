"""Reports of a monitor: windows, alarm, and estimates of a drift."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrant._core.binning import uniform_edges
from calibrant._core.checks import IGNORED, FloatArray, check_whole
from calibrant._core.showing import as_drawing, as_html, as_latex, as_text, frame, one_line, plain
from calibrant.metrics.evaluation import Figures, mistake_in
from calibrant.metrics.intervals import share_intervals
from calibrant.monitor.e_process import TILTS, EProcess, _bin_ranges
from calibrant.monitor.stream_windows import Tolerated, Window, Windows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 10
"""Bins with fewer examples, or with less than 1 % of them, are not reported."""
COUNTS = {
    "pending": "predictions that wait for a label",
    "dropped": "predictions dropped before a label came (pending sets how many may wait)",
    "repeated": "ids predicted again before their label came (the last one counts)",
    "unknown": "labels with an id that is not waiting",
    "ignored": f"examples without a label so far ({IGNORED})",
    "late": "labels that came later and joined their examples",
    "again": "labels that were delivered again (each counts once)",
    "lost": "labels that came after their window was summed up (keep sets how many are kept)",
    "alike": "examples with equal scores (if files come again in part, recognise them by ids)",
}


class Alarm(NamedTuple):
    """The first time that the e-value reached its limit."""

    window: str
    examples: int
    e_value: float

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Alarm:
        """Make the alarm of a saved state."""
        alarm = cls(**state)
        check_whole("examples", alarm.examples)
        if not (isinstance(alarm.window, str) and 0 <= alarm.e_value < math.inf):
            raise ValueError(f"an alarm has a window and an e-value, got {state!r:.200}")
        return alarm._replace(e_value=float(alarm.e_value))


class Drift(NamedTuple):
    """The most successful bet: what has changed, where and since when."""

    direction: str  # "over" or "under"
    since: str
    low: float  # ends of the range of confidence
    high: float
    n: int  # examples in that range since then
    confidence: float
    accuracy: float


@dataclass(frozen=True, eq=False)
class MonitorReport:
    """State of a monitor; printing it gives a table and a verdict.

    ``windows`` has ``window``, ``n``, ``accuracy``, ``confidence``, ``gap`` (confidence -
    accuracy), ``ece`` and ``e_value`` of each window that is kept, and where an estimator was used
    ``estimate``, ``estimate_low``, ``estimate_high`` and ``promise``. ``e_value`` is the evidence
    against calibration, 1 at the start, ``limit`` its value for an alarm, and ``alarm`` the first
    time that this was reached. Then ``drift`` is an estimate of what has changed, ``bins`` has the
    bins that have been beyond the tolerance and beyond chance since, and ``doubt`` names a mistake
    in the data that the drift looks like.
    """

    n: int  # labelled examples so far
    windows: list[dict[str, Any]]
    e_value: float
    limit: float
    alarm: Alarm | None
    drift: Drift | None
    bins: list[dict[str, float]]
    false_alarms: float
    tolerance: float
    reference: bool  # True if gaps are compared with those of a reference
    counts: dict[str, int]  # by the keys of COUNTS
    doubt: str  # mistake in the data that the drift looks like; empty without one
    probability: str  # P(y = 1) where that is watched, empty for the confidence of predictions
    columns: list[str]  # options that named the columns of the last file
    ids: str | None  # column of the ids of the last file
    calibrated: bool  # True if a calibrator was applied

    @property
    def estimated(self) -> bool:
        """True if the accuracy of a window was estimated without labels."""
        return any("estimate" in row for row in self.windows)

    def with_short_names(self) -> MonitorReport:
        """Return the same with windows named without the folder and file that all share."""
        start, names = "", [str(row["window"]) for row in self.windows]
        for end in ("/", ", "):  # of the folder, and of the file if all are splits of one
            starts = {name.rpartition(end)[0] for name in names}
            if len(starts) == 1 and all(starts):
                start = f"{starts.pop()}{end}"
        windows = [{**row, "window": row["window"].removeprefix(start)} for row in self.windows]
        alarm, drift = self.alarm, self.drift
        return replace(
            self,
            windows=windows,
            alarm=alarm and alarm._replace(window=alarm.window.removeprefix(start)),
            drift=drift and drift._replace(since=drift.since.removeprefix(start)),
        )

    def advice(self) -> str:
        """Return the verdict in words."""
        if self.alarm is None or self.drift is None:
            return f"No drift detected: the e-value is {self.e_value:.3g} (limit {self.limit:g})."
        drift, alarm = self.drift, self.alarm
        changed, claim = f"{drift.direction}-confident", "confidence"
        if self.probability:
            height = "high" if drift.direction == "over" else "low"
            changed, claim = f"{self.probability} is too {height}", "it"
        lead = f"Recommend a refit: {changed}"
        if self.doubt:
            doubt, changed = (f"{text[0].upper()}{text[1:]}" for text in (self.doubt, changed))
            lead = f"Check the data before a refit. {doubt}. {changed}"
        return (
            f"{lead} since window {drift.since}, most clearly where {claim} is "
            f"{100 * drift.low:.0f} to {100 * drift.high:.0f} %: {self._shares(drift._asdict())} "
            f"in {drift.n:,} examples. Alarm at window {alarm.window}, after {alarm.examples:,} "
            f"examples, with an e-value of {alarm.e_value:.3g} (limit "
            f"{self.limit:g}; now {self.e_value:.3g})."
        )

    def describe(self) -> str:
        """Describe the examples, the rate of false alarms and the e-value."""
        within = f"within {100 * self.tolerance:g} points"
        state = f"{within} of its reference" if self.reference else f"calibrated {within}"
        model = f"model whose {self.probability}" if self.probability else "model that"
        return (
            f"{self.n:,} labelled examples; a {model} stays {state} raises an alarm, ever, with "
            f"a probability of at most {100 * self.false_alarms:g} %. The e-value measures the "
            f"evidence that it does not: 1 at the start, {self.limit:g} for an alarm"
        )

    def remarks(self) -> list[str]:
        """Return bins that are off, and counts of ids and labels that were not matched."""
        off = [
            f"{self.probability or 'confidence'} {100 * b['low']:.0f} to {100 * b['high']:.0f} %: "
            f"{self._shares(b)} "
            f"({b['n']:,} examples)"
            for b in self.bins
        ]
        return off + [f"{text}: {self.counts[k]:,}" for k, text in COUNTS.items() if self.counts[k]]

    __str__ = as_text
    _repr_html_ = as_html
    to_latex = as_latex

    def __repr__(self) -> str:
        state = "no drift detected" if self.alarm is None else f"alarm at {self.alarm.window}"
        counted = f"{self.n:,} labelled examples in {len(self.windows)} windows"
        return one_line(self, counted, state, f"e-value {self.e_value:.3g} of {self.limit:g}")

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON: errors as fractions, undefined values as None."""
        values = asdict(self)
        values["alarm"] = self.alarm and self.alarm._asdict()
        values["drift"] = self.drift and self.drift._asdict()
        return dict(plain({**values, "advice": self.advice()}))

    def to_frame(self) -> pd.DataFrame:
        """Return ``windows`` as a frame, with a row for each. Needs pandas."""
        return frame(self.windows)

    def accuracy_intervals(self, level: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Return both ends of Wilson's intervals of the accuracy of each window."""
        accuracy, n = (np.array([row[k] for row in self.windows], float) for k in ("accuracy", "n"))
        return share_intervals(accuracy, np.maximum(n, 1), level)

    def plot(self, ax: Axes | None = None) -> Axes | Figure:
        """Draw accuracy and confidence by window, and below them the e-value with its limit.

        Accuracies that were estimated without labels are drawn too. With ``ax`` only the shares
        are drawn. Needs matplotlib.
        """
        drawn: Axes | Figure = as_drawing(self, ax)
        return drawn

    def _shares(self, values: dict[str, float]) -> str:
        claimed, happened = (f"{100 * values[key]:.1f} %" for key in ("confidence", "accuracy"))
        if self.probability:
            return f"mean {self.probability} {claimed}, and y = 1 in {happened}"
        return f"mean confidence {claimed}, accuracy {happened}"


def _find_drift(windows: Windows, state: EProcess) -> tuple[Drift, Window]:
    """Return the most successful bet, and the sum of all windows since it began to win."""
    shares = state.log_shares()
    tilt, best = np.unravel_index(int(shares.argmax()), shares.shape)
    low, high = (int(ends[best]) for ends in _bin_ranges(state.bins)[:2])
    numbers = sorted(windows.kept)
    gains = [windows.kept[k].log_factors()[tilt, low:high].sum() for k in numbers]
    positions = np.array([windows.position(k) for k in numbers], dtype=float)
    won = np.cumsum(gains[::-1])[::-1] - np.log(positions * (positions + 1))
    begin = int(won.argmax())
    total = Window.empty(state.bins, name=windows.kept[numbers[begin]].name)
    for number in numbers[begin:]:
        total += windows.kept[number]
    edges, n = uniform_edges(state.bins), int(total.count[low:high].sum())
    drift = Drift(
        "over" if TILTS[tilt] < 0 else "under",
        total.name + " or earlier" * (begin == 0 and windows.summed.position > 0),
        float(edges[low]),
        float(edges[high]),
        n,
        float(total.claimed[low:high].sum() / (n or math.nan)),
        float(total.right[low:high].sum() / (n or math.nan)),
    )
    return drift, total


def _doubt(total: Window, classes: int) -> str:
    """Return the mistake in the data that examples show, as an evaluation does; empty without."""
    if not classes:  # pairs of any kind of prediction
        return ""
    figures = total.figures()
    return mistake_in(Figures(total.n, figures["accuracy"], figures["confidence"], 1 / classes))


def _bins_off(total: Window, tolerated: Tolerated) -> list[dict[str, float]]:
    """Return bins whose accuracy is beyond the tolerance by more than two standard errors."""
    off: list[dict[str, float]] = []
    edges = uniform_edges(total.count.size)
    for b in np.flatnonzero(total.count >= max(FEW, 0.01 * total.n)).tolist():
        n = int(total.count[b])
        confidence, accuracy = float(total.claimed[b] / n), float(total.right[b] / n)
        low, high = tolerated.accuracy(confidence, b)
        limit = min(max(accuracy, low), high)
        if abs(accuracy - limit) > 2 * math.sqrt(max(limit * (1 - limit), 1 / n) / n):
            ends = {"low": float(edges[b]), "high": float(edges[b + 1]), "n": n}
            off.append({**ends, "confidence": confidence, "accuracy": accuracy})
    return off
