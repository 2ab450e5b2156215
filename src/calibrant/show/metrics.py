"""Evaluations and the curves of metrics: their boxes, charts and figures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrant.metrics.clinical import DecisionCurve
from calibrant.metrics.clustered import ConfidenceEvaluation
from calibrant.metrics.curves import (
    ClassReliability,
    Histogram,
    MarginReliability,
    SmoothReliability,
)
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.ranking import RiskCoverage
from calibrant.metrics.registry import METRICS
from calibrant.metrics.reliability import Reliability
from calibrant.show.box import Beside, Box, Callout, Chart, Part, _drawing_of, box_of
from calibrant.show.charts import Line, histogram_chart, line_chart, reliability_chart
from calibrant.show.charts.axes import _axis_names
from calibrant.show.figures.reliability import (
    confidence_histogram,
    reliability_diagram,
    reliability_diagrams,
    smooth_diagram,
)
from calibrant.show.figures.selective import decision_curve_plot, risk_coverage_plot
from calibrant.show.html import Html
from calibrant.show.tables import LONGEST, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@box_of.register(Evaluation)
def evaluation_box(evaluation: Evaluation, charts: Sequence[Part] = ()) -> Box:
    """Return the test, the metrics beside their diagram, and subgroups.

    Further ``charts`` stand below the metrics.
    """
    rejected = evaluation.test is not None and evaluation.test.p_value < 0.05
    callouts = [
        Callout(evaluation.verdict(), "bad" if rejected else "good"),
        Callout(evaluation.hint(), "warn"),
    ]
    figures = Box(parts=[_metrics_table(evaluation), *charts])
    parts = [Beside([figures, Chart(diagram, evaluation)])]
    return Box(
        re.sub("(?<=[a-z])(?=[A-Z])", " ", type(evaluation).__name__).capitalize(),
        [evaluation.describe()],
        callouts,
        [*parts, *([_subgroup_table(evaluation)] if evaluation.by else [])],
        [evaluation.search],
    )


def _metrics_table(evaluation: Evaluation) -> Table:
    """Return a row for each metric: its value and interval."""
    of = evaluation.probability
    title = f"calibration of {of}" if of else "metric"
    return Table((title, "value", evaluation.interval_heading), evaluation.table())


def _subgroup_table(evaluation: Evaluation) -> Table:
    """Return a row for each subgroup with three metrics, the first with its interval."""
    usual = [name for name in ("ece", "accuracy", "nll") if name in evaluation]
    first, *others = usual or list(evaluation)[:3]
    titles = [METRICS[name].title for name in (first, *others)]
    headings = ("subgroup", "examples", titles[0], evaluation.interval_heading, *titles[1:])
    rows = []
    for value, part in evaluation.by.items():
        cells = dict(zip(part, part.table(), strict=True))
        figures = (*cells[first][1:], *(cells[name][1] for name in others))
        rows.append((value, f"{part.n:,}", *figures))
    return Table(headings, rows, longest=LONGEST)


def diagram(evaluation: Evaluation, title: str = "") -> Html:
    """Return the reliability diagram, with the title and the ECE above."""
    rows = dict(zip(evaluation, evaluation.table(), strict=True))
    error = " ".join(rows["ece"]).rstrip() if "ece" in rows else ""
    return _reliability_svg(evaluation.reliability(), ": ".join(filter(None, [title, error])))


def _reliability_svg(curve: Reliability, note: str = "") -> Html:
    """Return a reliability diagram with a note above."""
    claim, event = _axis_names(curve.probability)
    return reliability_chart(*curve[:6], claim=claim, event=event, note=note)


@box_of.register(Reliability)
def _reliability(curve: Reliability) -> Box:
    return Box(parts=[_reliability_svg(curve)])


@box_of.register(MarginReliability)
def _margin_reliability(curve: MarginReliability) -> Box:
    note = f"margin {curve.low:.4g} to {curve.high:.4g}"
    return Box(parts=[_reliability_svg(curve.reliability, note)])


@box_of.register(ClassReliability)
def _class_reliability(curve: ClassReliability) -> Box:
    return Box(parts=[_reliability_svg(curve.reliability, f"class {curve.number}")])


@box_of.register(SmoothReliability)
def _smooth_reliability(curve: SmoothReliability) -> Box:
    claim, event = _axis_names(curve.probability)
    # where less than a thousandth of the peak density lies, the curve is extrapolation
    seen = np.where(curve.density > 1e-3 * curve.density.max(), 1.0, np.nan)
    low, high = seen * curve.low, seen * curve.high
    line = Line(event, curve.confidence, seen * curve.accuracy, low, high)
    ideal = Line("ideal", [0, 1], [0, 1], colour="ink", dashed=True)
    chart = line_chart([line, ideal], x_label=claim, y_label=event, y_range=(0, 1))
    return Box(parts=[chart])


@box_of.register(Histogram)
def _histogram(shares: Histogram) -> Box:
    chart = histogram_chart(shares.edges, {"right": shares.right, "wrong": shares.wrong})
    return Box(parts=[chart])


@box_of.register(RiskCoverage)
def _risk_coverage(curve: RiskCoverage) -> Box:
    return Box(parts=[risk_chart(curve)])


@box_of.register(ConfidenceEvaluation)
def _confidence_box(evaluation: ConfidenceEvaluation) -> Box:
    """Return the box of an evaluation, with the risk-coverage curve."""
    curve = evaluation.risk_coverage
    return evaluation_box(evaluation, [] if curve is None else [risk_chart(curve)])


def risk_chart(curve: RiskCoverage) -> Html:
    """Return a risk-coverage curve, with that of no order and that of the best one."""
    whole = float(curve.risk[-1]) if curve.risk.size else math.nan
    # with all wrong answers last, errors begin when only they are left
    kept = np.linspace(0.01, 1, 100)
    best = np.maximum(kept - (1 - whole), 0) / kept
    known = not math.isnan(curve.level)
    interval = f", {100 * curve.level:g} % interval at each point" if known else ""
    lines = [
        Line(f"by confidence{interval}", curve.coverage, curve.risk, curve.low, curve.high),
        Line("best order", kept, best, colour="good", dashed=True),
        Line("no order", [0, 1], [whole, whole], colour="muted", dashed=True),
    ]
    return line_chart(lines, x_label="coverage", y_label="risk")


@box_of.register(DecisionCurve)
def _decision_curve(curve: DecisionCurve) -> Box:
    x, low = curve.threshold, -0.25 * float(max(curve.high.max(), 0.01))
    interval = f", {100 * curve.level:g} % interval at each point"
    lines = [
        Line(f"by probability{interval}", x, curve.net_benefit, curve.low, curve.high),
        Line("act always", x, np.maximum(curve.treat_all, low), colour="good", dashed=True),
        Line("act never", [0, 1], [0, 0], colour="muted", dashed=True),
    ]
    return Box(parts=[line_chart(lines, x_label="threshold", y_label="net benefit")])


@_drawing_of.register(Evaluation)
def _evaluation_plot(
    evaluation: Evaluation, ax: Axes | None = None, *, most: int = 8, **options: Any
) -> Axes | Figure:
    """Draw the diagram; with subgroups, and without ``ax``, one for each."""
    if not evaluation.by or ax is not None:
        return reliability_diagram(evaluation, ax, **options)
    parts = {"all": evaluation, **dict(list(evaluation.by.items())[:most])}
    return reliability_diagrams({f"{name} (n = {e.n:,})": e for name, e in parts.items()})


_drawing_of.register(Reliability, reliability_diagram)
_drawing_of.register(SmoothReliability, smooth_diagram)
_drawing_of.register(Histogram, confidence_histogram)
_drawing_of.register(RiskCoverage, risk_coverage_plot)
_drawing_of.register(DecisionCurve, decision_curve_plot)
