"""Forest plots: values with their intervals, one row for each method."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from calibrant.show.figures.look import _current, _dress, _in_look, _new_axes, _text_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibrant.metrics.reliability import Estimate

ROW = 1.9
"""Height of a row, in units of the text."""


@_in_look
def forest_plot(
    rows: Mapping[str, Estimate],
    ax: Axes | None = None,
    *,
    title: str,
    percent: bool = True,
    best: Collection[str] = (),
    chosen: str | None = None,
    reference: str | float | None = "none",
    level: float | None = None,
    longest: int = 20,
) -> Axes:
    """Values with their intervals, a row for each, from top to bottom in the order given.

    Parameters
    ----------
    rows : mapping of str to (value, low, high)
        NaN where there is none.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    title : str
        Name of the values, below the axis.
    percent : bool
        Values are shares, drawn in per cent.
    best, chosen : collection of str, and str
        Rows with a filled point, which are as good as the best, and one whose name is bold.
    reference : str or float, optional
        A value at which a line is drawn, or the row that has it.
    level : float, optional
        Coverage of the intervals.
    longest : int
        Characters of a name that are shown.

    Examples
    --------
    >>> from calibrant.metrics import Estimate
    >>> rows = {"none": Estimate(0.042, 0.038, 0.046), "ts": Estimate(0.009, 0.006, 0.012)}
    >>> forest_plot(rows, title="ECE").get_xlabel()
    'ECE (%)'
    """
    if not rows:
        raise ValueError("there is nothing to draw: no method was measured")
    axes = _new_axes(ax, height=_height(len(rows)))
    _rows(axes, rows, 100.0 if percent else 1.0, best, reference)
    _names(axes, rows, chosen, longest)
    interval = "" if level is None else f", {100 * level:g} % interval"
    axes.set_xlabel(f"{title}{' (%' if percent else ''}{')' if percent else ''}{interval}")
    return axes


@_in_look
def forest_plots(columns: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Forest plots side by side that share their rows.

    ``columns`` has the arguments of :func:`forest_plot` by title, with the same rows in each.
    """
    from matplotlib import pyplot as plt

    size, rows = _current().size, len(next(iter(columns.values()))["rows"])
    width = min(size.width, size.panel * len(columns))
    height = max(_height(rows) * size.panel, 0.3 * size.panel)
    figure, axes = plt.subplots(
        1, len(columns), figsize=(width, height), squeeze=False, layout="constrained"
    )
    for ax, (title, options) in zip(axes[0], columns.items(), strict=True):
        forest_plot(**{"title": title, **options}, ax=ax)
        if ax is not axes[0][0]:
            ax.set_yticklabels([])
    return figure


def _height(rows: int) -> float:
    """Height of a figure, in units of its width."""
    size = _current().size
    return (rows * ROW + 4) * size.text / 72 / size.panel


def _rows(
    axes: Axes,
    rows: Mapping[str, Estimate],
    scale: float,
    best: Collection[str],
    reference: str | float | None,
) -> None:
    look, paper = _current(), axes.figure.get_facecolor()
    for i, (name, estimate) in enumerate(rows.items()):
        if math.isnan(estimate.value):
            continue
        value, colour = scale * estimate.value, look.colours.right
        if math.isfinite(estimate.low):
            ends = [scale * estimate.low, scale * estimate.high]
            axes.plot(ends, [i, i], color=colour, lw=look.thick, solid_capstyle="butt")
        face = colour if name in best else paper
        marker: dict[str, Any] = {"ms": 2.6 * look.thick, "mew": look.thick * 0.7}
        axes.plot([value], [i], "o", color=colour, mfc=face, clip_on=False, zorder=3, **marker)
    if isinstance(reference, str):
        reference = rows[reference].value if reference in rows else None
    if reference is not None:
        line: dict[str, Any] = {"color": look.colours.muted, "lw": look.thin, "ls": ":"}
        axes.axvline(scale * reference, zorder=0.5, **line)


def _names(axes: Axes, rows: Mapping[str, Estimate], chosen: str | None, longest: int) -> None:
    _dress(axes)
    axes.set_yticks(range(len(rows)), [_text_of(name, longest) for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="y", color=_current().colours.grid, lw=_current().thin)
    axes.set_axisbelow(True)
    for name, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if name == chosen else "normal")
