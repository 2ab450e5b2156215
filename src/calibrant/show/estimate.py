"""Estimated performance and success rates as boxes and figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from calibrant.estimate.judge_report import JudgeReport
from calibrant.estimate.performance_estimate import TITLES, PerformanceEstimate, Status
from calibrant.estimate.success_rate import RateEstimate
from calibrant.metrics.intervals import Estimate
from calibrant.show.box import Box, Callout, Kind, _drawing_of, box_of
from calibrant.show.figures.comparison import forest_plot
from calibrant.show.style import percent
from calibrant.show.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBERS = ("brier", "nll", "auroc", "f1")
"""Metrics that are shown as numbers, not in percent; counts are whole numbers."""
COUNTS = tuple(name for name in TITLES if name.endswith("tives"))
KINDS: dict[Status, Kind] = {
    "holds": "good",
    "labels": "good",
    "unchecked": "warn",
    "widened": "warn",
    "withdrawn": "bad",
    "contradicted": "bad",
}


@box_of.register(PerformanceEstimate)
def estimate_box(estimate: PerformanceEstimate) -> Box:
    """Return the metrics, and the guarantee behind them."""
    said = Callout(estimate.verdict(), KINDS[estimate.status])
    remarks = [*estimate.remarks(), estimate.assumption()]
    parts = [_estimates_table(estimate)]
    return Box("Estimated performance", [estimate.describe()], [said], parts, remarks)


def _estimates_table(estimate: PerformanceEstimate) -> Table:
    """Return a row for each metric; without an interval where nothing supports one."""
    if estimate.status == "unchecked":
        values = [(TITLES[name], _shown(name, e.value)) for name, e in estimate.items()]
        return Table(("metric", "if confidences are right"), values)
    rows = []
    for name, each in estimate.items():
        value, low, high = (_shown(name, x) for x in each)
        rows.append((TITLES[name], value, "-" if math.isnan(each.low) else f"{low} to {high}"))
    return Table(("metric", "estimate", f"{100 * estimate.level:g} % interval"), rows)


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if name in COUNTS:
        return f"{value:,.0f}"
    return f"{value:.4f}" if name in NUMBERS else f"{100 * value:.2f} %"


@_drawing_of.register(PerformanceEstimate)
def _shares_plot(estimate: PerformanceEstimate, ax: Axes | None = None) -> Axes:
    shares = [name for name in estimate if name not in (*COUNTS, "brier", "nll")]
    rows = {TITLES[name]: estimate[name] for name in shares}
    return forest_plot(rows, ax, title="estimate", reference=None, level=estimate.level)


@box_of.register(JudgeReport)
def judge_box(report: JudgeReport) -> Box:
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
