"""Thresholds, conformal sets and decision rules as boxes and figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrant._core.showing import threshold_text
from calibrant.decide.conformal_sets import ConformalSets, SetSizes
from calibrant.decide.priors import PriorCorrection
from calibrant.decide.rules import DecisionRule
from calibrant.decide.threshold_results import Threshold
from calibrant.metrics.ranking import risk_coverage
from calibrant.metrics.reductions import Input
from calibrant.show.box import Box, Callout, Chart, _drawing_of, box_of
from calibrant.show.calibrators import _charts
from calibrant.show.charts import bar_chart
from calibrant.show.figures.selective import set_size_plot, threshold_plot
from calibrant.show.tables import LONGEST, facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@box_of.register(Threshold)
def threshold_box(limit: Threshold) -> Box:
    """Return what a threshold guarantees, and what it does with the examples of its fit."""
    answers = limit.about_answers
    values = {
        f"{'accept' if answers else 'flag'} from": threshold_text(limit.threshold),
        f"share {'accepted' if answers else 'flagged'}": f"{100 * limit.coverage:.1f} %",
    }
    for one in limit.limits:
        values[one.name] = one.amount(one.found)
        if not math.isnan(one.bound):
            values[f"bound of the {one.name}"] = one.amount(one.bound)
    known = [facts(values)] if limit.coverage else []
    said = f"Nothing is {'accepted' if answers else 'flagged'}: {limit.needs()}."
    if limit.threshold < math.inf:
        why = limit.needs() or "no limit was asked for"
        said = f"The cheapest threshold in these examples, without a guarantee: {why}."
    return Box("Threshold", [f"{limit.n:,} examples"], [Callout(limit.promise() or said)], known)


@box_of.register(ConformalSets)
def sets_box(sets: ConformalSets) -> Box:
    """Return what the sets guarantee, and their size."""
    limit = f"{sets.limit:.4g}" if math.isfinite(sets.limit) else "none: sets hold all classes"
    values = {
        "mean set size": f"{sets.mean_size:.2f} classes",
        **{"score": sets.score, "limit of the score": limit, "seed": sets.seed},
    }
    about = [f"{sets.n:,} examples of {sets.classes} classes"]
    return Box("Conformal sets", about, [Callout(sets.promise())], [facts(values)])


@box_of.register(DecisionRule)
def rule_box(rule: DecisionRule) -> Box:
    """Return what a rule does, and what it guarantees."""
    about = [rule.instruction(), rule.describe()]
    return Box("Decision rule", about, [Callout(rule.promise())])


@_charts.register(PriorCorrection)
def _change_chart(calibrator: PriorCorrection) -> list[Chart]:
    """Return the change of the classes whose share changes most."""
    if not calibrator.old_prior_.numel():
        return []
    change = (calibrator.new_prior_ - calibrator.old_prior_).cpu().numpy()
    most = np.argsort(-np.abs(change), kind="stable")[:LONGEST]
    names = [f"class {k}" for k in most]
    return [Chart(bar_chart, names, change[most], label="change of the share")]


@_drawing_of.register(Threshold)
def _threshold_plot(
    limit: Threshold, logits: Input = None, labels: Input = None, **data: Any
) -> Figure:
    if not limit.about_answers:
        raise TypeError("the figure is of accepted answers: this threshold flags a class")
    return threshold_plot(risk_coverage(logits, labels, **data), limit=limit)


_drawing_of.register(SetSizes, set_size_plot)
