"""Figures of what was learned: maps and temperatures of calibrators, and trainings by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibrant._core.messages import comma_separated
from calibrant.show.figures.look import _current, _in_look, _new_axes, _text_of, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from calibrant.calibrators.learned_curves import LearnedMap, MarginChange, MarginTemperature
    from calibrant.calibrators.maccal import Epoch

MARGIN = "margin of the top two logits"


@_in_look
def temperature_plot(
    curve: MarginTemperature,
    ax: Axes | None = None,
    *,
    label: str = "temperature",
    band: str = "",
) -> Axes:
    """Temperature against margin (SMART, figure 16), with the middle nine tenths shaded.

    Parameters
    ----------
    curve : MarginTemperature
        From :func:`calibrant.calibrators.learned_curves.margin_temperature`.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    label, band : str
        Names of the line and of what is shaded.
    """
    axes, look = _new_axes(ax), _current()
    colour = look.colours.right
    shaded = band or "nine tenths of the examples"
    wide = bool((curve.high - curve.low > 1e-3 * curve.temperature).any())
    area: dict[str, Any] = {"color": colour, "alpha": 0.25, "lw": 0}
    axes.plot(curve.margin, curve.temperature, color=colour, lw=look.thick, label=_text_of(label))
    axes.fill_between(
        curve.margin, curve.low, curve.high, label=shaded if wide else "_hidden", **area
    )
    axes.axhline(1, color=look.colours.ink, lw=look.thin, ls="--", label="unchanged")
    axes.set(xlabel=MARGIN, ylabel="temperature")
    legend(axes)
    return axes


@_in_look
def adjustment_plot(changes: Mapping[str, MarginChange], ax: Axes | None = None) -> Axes:
    """Mean change of the confidence against the margin, one line for each method."""
    axes, look = _new_axes(ax), _current()
    axes.axhline(0, color=look.colours.ink, lw=look.thin)
    lines = {name: (curve.margin, 100 * curve.change) for name, curve in changes.items()}
    _draw_lines(axes, lines)
    axes.set(xlabel=MARGIN, ylabel="change of confidence (points)")
    return axes


@_in_look
def map_plot(curve: LearnedMap, ax: Axes | None = None, *, label: str = "calibrated") -> Axes:
    """Confidence after calibration against that before, as a calibrator has learned it.

    ``curve`` is from :func:`calibrant.calibrators.learned_curves.learned_map`.
    """
    axes, look = _new_axes(ax, height=1.0), _current()
    colour, name = look.colours.right, curve.probability or "confidence"
    axes.plot(curve.before, curve.after, color=colour, lw=look.thick, label=_text_of(label))
    if bool((curve.high - curve.low > 1e-3).any()):
        area: dict[str, Any] = {"color": colour, "alpha": 0.25, "lw": 0}
        axes.fill_between(curve.before, curve.low, curve.high, label=curve.spread, **area)
    axes.plot([0, 1], [0, 1], color=look.colours.ink, lw=look.thin, ls="--", label="unchanged")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.set(xlabel=f"{name} before", ylabel=f"{name} after")
    legend(axes, "upper left")
    return axes


def _draw_lines(axes: Axes, lines: Mapping[str, tuple[Any, Any]]) -> None:
    """Draw lines ``{title: (x, y)}`` that can be told apart without their colours."""
    look = _current()
    for (title, (x, y)), (colour, dashes) in zip(
        lines.items(), look.series(len(lines)), strict=True
    ):
        axes.plot(x, y, lw=look.thick, color=colour, ls=dashes, label=_text_of(title))
    legend(axes)


GATE = {
    "gate_positive": "gate at +1",
    "gate_flips": "gate changed",
    "smoothing_lowered": "smoothing lowered",
}
"""Columns of a training log with FeDLaS, and their titles in a plot."""


@_in_look
def gate_plot(log: Sequence[Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Gate of FeDLaS by epoch, from the rows of the ``log.csv`` of a training."""
    missing = [name for name in GATE if not log or name not in log[0]]
    if missing:
        names = comma_separated(missing)
        raise ValueError(f"the log must be of a training with FeDLaS, it has no {names}")
    axes, epochs = _new_axes(ax), [int(row["epoch"]) for row in log]
    shares = {name: [100 * float(row[name]) for row in log] for name in GATE}
    _draw_lines(axes, {GATE[name]: (epochs, values) for name, values in shares.items()})
    axes.set(xlabel="epoch", ylabel="training examples (%)", ylim=(0, 100))
    return axes


@_in_look
def keep_plot(history: Sequence[Epoch], ax: Axes | None = None) -> Axes:
    """Keep-rate, confidence and accuracy of a :class:`calibrant.MaCCal` in each epoch."""
    axes, epochs = _new_axes(ax), range(1, len(history) + 1)
    columns = {"keep-rate q": "keep", "confidence": "confidence", "accuracy": "accuracy"}
    values = {k: [100 * getattr(epoch, name) for epoch in history] for k, name in columns.items()}
    _draw_lines(axes, {title: (epochs, y) for title, y in values.items()})
    axes.set(xlabel="epoch", ylabel="%", ylim=(0, 102))
    return axes
