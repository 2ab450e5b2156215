"""Calibrators as boxes, and what they have learned as figures."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrant._core.checks import Features, Values
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.learned_curves import (
    POINTS,
    LearnedMap,
    MarginChange,
    MarginTemperature,
    check_drawable,
    learned_map,
    margin_rows,
    margin_temperature,
)
from calibrant.calibrators.maccal import MaCCal
from calibrant.calibrators.smart import SMART
from calibrant.show.box import Beside, Box, Callout, Chart, _drawing_of, box_of
from calibrant.show.charts import Line, line_chart
from calibrant.show.figures.learned import adjustment_plot, map_plot, temperature_plot
from calibrant.show.style import _plain
from calibrant.show.tables import Table, facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@box_of.register(Calibrator)
def calibrator_box(calibrator: Calibrator) -> Box:
    """Return the classes, guarantees, learned values and charts of a calibrator."""
    name, description = type(calibrator).__name__, calibrator.describe()
    about = (description.removeprefix(f"{name} for "), calibrator.properties())
    if not calibrator.classes:
        return Box(name, about)
    held = {name: part.describe() for name, part in calibrator.held().items()}
    said = {name: words for name, words in held.items() if words not in description}
    table = facts({**calibrator.key_values(), **said})
    return Box(
        name, about, parts=[Beside([*([table] if table.rows else []), *_charts(calibrator)])]
    )


@box_of.register(Auto)
def auto_box(calibrator: Auto) -> Box:
    """Return the choice too: its reasons, and the figures of the candidates."""
    name, about, _, learned, _ = vars(calibrator_box(calibrator)).values()
    headings = ("candidate", "NLL", "ECE", "gain in NLL", "weight")
    rows = [
        (
            *(c.name, f"{c.nll:.4f}", f"{100 * c.ece:.2f} %"),
            *(f"{c.gain:.4f} ± {c.error:.4f}", f"{c.weight:.2f}"),
        )
        for c in calibrator.candidates_
    ]
    chosen = [k for k, c in enumerate(calibrator.candidates_) if c.weight > 0]
    table = Table(headings, rows, highlighted=chosen, caption="cross-validated")
    reasons = [Callout(line) for line in calibrator.findings]
    return Box(name, about, reasons, [*([table] if rows else []), *learned])


@singledispatch
def _charts(calibrator: Calibrator) -> list[Chart]:
    """Return charts of what a calibrator has learned; most have none."""
    return []


@_charts.register(SMART)
def _temperature_chart(calibrator: SMART) -> list[Chart]:
    values, temperature = calibrator.curve()
    if not values.size:
        return []
    line = [Line("temperature", values, temperature)]
    axis = calibrator.indicator.replace("_", " ")
    form: Any = {"x_format": _plain, "y_format": _plain}
    return [Chart(line_chart, line, x_label=axis, y_label="temperature", **form)]


@_charts.register(MaCCal)
def _epochs_chart(calibrator: MaCCal) -> list[Chart]:
    names = {"keep": "keep rate", "confidence": "confidence", "accuracy": "accuracy"}
    epochs = list(range(1, len(calibrator.history) + 1))
    lines = [
        Line(title, epochs, [getattr(epoch, name) for epoch in calibrator.history])
        for name, title in names.items()
    ]
    options: dict[str, Any] = {"x_format": _plain, "y_range": (0, 1)}
    return [Chart(line_chart, lines, x_label="epoch", y_label="share", **options)]


@_drawing_of.register(Calibrator)
def learned_plot(
    calibrator: Calibrator,
    logits: Values | None = None,
    *,
    features: Features | None = None,
    ax: Axes | None = None,
    label: str = "",
) -> Axes:
    """Draw temperature by margin if a calibrator has one that varies, else the learned map."""
    check_drawable(calibrator, logits, features)
    name = label or calibrator.name or type(calibrator).__name__
    if callable(getattr(calibrator, "temperature", None)):  # an option of some has that name
        rows = margin_rows(calibrator.classes) if logits is None else logits
        bins = POINTS if logits is None else 30
        curve = margin_temperature(calibrator, rows, bins=bins)  # type: ignore[arg-type]
        if np.ptp(curve.temperature) > 1e-4 * curve.temperature.max():
            return temperature_plot(curve, ax, label=name)
    return map_plot(learned_map(calibrator, logits, features=features), ax, label=name)


_drawing_of.register(LearnedMap, map_plot)
_drawing_of.register(MarginTemperature, temperature_plot)


@_drawing_of.register(MarginChange)
def _change_plot(change: MarginChange, ax: Axes | None = None, *, label: str) -> Axes:
    return adjustment_plot({label: change}, ax)
