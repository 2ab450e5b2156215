"""Comparisons, fits and applied rules as boxes and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from calibrant.metrics.evaluation import shown
from calibrant.metrics.registry import METRICS
from calibrant.show.box import Beside, Box, Callout, Chart, Kind, _drawing_of, box, box_of
from calibrant.show.charts import forest_chart
from calibrant.show.decide import rule_box
from calibrant.show.figures.comparison import forest_plot, forest_plots
from calibrant.show.figures.reliability import before_and_after, reliability_diagram
from calibrant.show.html import Html
from calibrant.show.metrics import diagram, evaluation_box
from calibrant.show.tables import LONGEST, Table
from calibrant.workflows.comparison import Comparison, Row
from calibrant.workflows.decide import AppliedRule, FittedRule
from calibrant.workflows.effect import Effect
from calibrant.workflows.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@box_of.register(Comparison)
def comparison_box(comparison: Comparison) -> Box:
    """Return the methods in a table, and the intervals of ECE and NLL in charts."""
    chosen = comparison.choice()
    kind: Kind = "good" if chosen in comparison.measured else "warn"
    helps = comparison.gain is None or comparison.gain.low > 0
    said = Callout(comparison.advice(), kind if helps else "")
    shown = [name for name in ("ece", "nll") if _ordered(comparison, name)]
    charts = Beside([Chart(_intervals_chart, comparison, name) for name in shown])
    return Box(
        "Comparison",
        [comparison.describe()],
        [said],
        [_methods_table(comparison), charts],
        [f"Bold type or a star: {comparison.legend()}.", *comparison.remarks()],
    )


def _methods_table(comparison: Comparison) -> Table:
    """Return a row for each method; a star marks what :meth:`Comparison.best` returns."""
    interval = "" if comparison.level is None else f"{100 * comparison.level:g} % interval"
    headings = ("method", "ECE %", interval, "NLL", "Brier", "acc. %", "changed", "fit")
    best = {name: comparison.best(name) for name in ("ece", "nll")}
    rows = [
        _cells(row, [name for name in best if row.method in best[name]]) for row in comparison.rows
    ]
    chosen = [k for k, row in enumerate(comparison.rows) if row.method == comparison.choice()]
    return Table(headings, rows, highlighted=chosen)


def _cells(row: Row, best: Sequence[str]) -> tuple[str, ...]:
    seconds = f"{row.fit_seconds:.2f} s" if row.fit_seconds < 10 else f"{row.fit_seconds:.0f} s"
    if row.evaluation is None:
        return (row.method, "failed", "", "", "", "", "", seconds)
    figures = dict(zip(row.evaluation, row.evaluation.table(), strict=True))
    ece, nll, brier, accuracy = (
        "*" * (name in best) + figures[name][1].removesuffix(" %")
        for name in ("ece", "nll", "brier", "accuracy")
    )
    changed = f"{row.argmax_changed:,}"
    return (row.method, ece, figures["ece"][2], nll, brier, accuracy, changed, seconds)


def _intervals_chart(comparison: Comparison, metric: str) -> Html:
    """Return the intervals of the best methods, with that of no calibration as a line."""
    names = [m for m in _ordered(comparison, metric) if metric in comparison.measured[m]][:LONGEST]
    known = {name: comparison.measured[name][metric] for name in comparison.measured}
    before = known["none"].value if "none" in known else math.nan
    return forest_chart(
        names,
        *zip(*(known[name] for name in names), strict=True),
        label=METRICS[metric].title,
        form=partial(shown, metric),
        highlighted=comparison.choice(),
        reference=None if math.isnan(before) else before,
    )


def _ordered(comparison: Comparison, metric: str) -> list[str]:
    """Return the methods that did not fail, from good to bad, those without a value last."""
    sign = -1 if METRICS[metric].higher_is_better else 1

    def badness(method: str) -> tuple[bool, float]:
        value = comparison.measured[method][metric].value
        return math.isnan(value), sign * value

    known = [method for method, found in comparison.measured.items() if metric in found]
    return sorted(known, key=badness)


@_drawing_of.register(Comparison)
def _comparison_plot(
    comparison: Comparison, ax: Axes | None = None, *, metrics: Sequence[str] = ("ece", "nll")
) -> Axes | Figure:
    names = [METRICS[name].name for name in metrics]
    if not names:
        raise ValueError("metrics must name at least one, as in metrics=['ece']")
    order = _ordered(comparison, names[0])
    columns: dict[str, dict[str, Any]] = {
        METRICS[name].title: {
            "rows": {method: comparison.measured[method][name] for method in order},
            "percent": METRICS[name].percent,
            "best": comparison.best(name),
            "chosen": comparison.choice(),
            "level": comparison.level,
        }
        for name in names
    }
    if ax is None and len(columns) > 1:
        return forest_plots(columns)
    title, options = next(iter(columns.items()))
    return forest_plot(**options, ax=ax, title=title)


@box_of.register(Row)
def row_box(row: Row) -> Box:
    """Return what a method made of the examples, or why it failed."""
    about = [] if row.calibrator is None else [row.calibrator.describe()]
    about += [f"fitted in {row.fit_seconds:.2f} s", *row.notes]
    parts = [] if row.evaluation is None else [evaluation_box(row.evaluation)]
    return Box(row.method, about, [Callout(row.error or "", "bad")], parts)


@box_of.register(Effect)
def effect_box(effect: Effect) -> Box:
    """Return the metrics and the diagrams before and after calibration."""
    tested = effect.after.verdict()
    about = [effect.after.describe(), f"After calibration: {tested}" if tested else ""]
    said = Callout(effect.headline(), "good" if effect.improves else "warn")
    diagrams = Beside(
        [Chart(diagram, effect.before, "before"), Chart(diagram, effect.after, "after")]
    )
    return Box("Before and after calibration", about, [said], [_effect_table(effect), diagrams])


def _effect_table(effect: Effect) -> Table:
    """Return each metric and its interval before and after."""
    interval = effect.before.interval_heading
    pairs = list(zip(effect.before.table(), effect.after.table(), strict=True))
    if not interval:
        plain = [(*before[:2], after[1]) for before, after in pairs]
        return Table(("metric", "before", "after"), plain)
    headings = ("metric", "before", interval, "after", interval)
    return Table(headings, [(*before, *after[1:]) for before, after in pairs])


@_drawing_of.register(Effect)
def _effect_plot(effect: Effect, ax: Axes | None = None, **options: Any) -> Axes | Figure:
    if ax is None:
        return before_and_after(effect.before, effect.after)
    return reliability_diagram(effect.after, ax, **options)


@box_of.register(Fit)
def fit_box(fit: Fit) -> Box:
    """Return the calibrator, and its effect on the examples of the fit."""
    return Box(parts=[box(fit.calibrator), effect_box(fit.effect)])


@box_of.register(FittedRule)
@box_of.register(AppliedRule)
def checked_rule_box(result: FittedRule | AppliedRule) -> Box:
    """Return a rule, what it did with examples, and whether their labels agree with it."""
    about = rule_box(result.rule)
    kind: Kind = "bad" if "contradict" in result.verdict() else "good"
    rows = [(name, *result.rule.cells(tally)) for name, tally in result.tallies.items()]
    table = Table(("", *result.rule.headings), rows)
    return Box(parts=[about, Box(callouts=[Callout(result.verdict(), kind)], parts=[table])])
