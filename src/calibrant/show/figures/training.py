"""Figures of trainings: the gate of FeDLaS and the keep-rate of MaC-Cal by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calibrant._core.messages import comma_separated
from calibrant.show.figures.look import in_look, new_axes
from calibrant.show.figures.maps import draw_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from calibrant.calibrators.maccal import Epoch

GATE = {
    "gate_positive": "gate at +1",
    "gate_flips": "gate changed",
    "smoothing_lowered": "smoothing lowered",
}
"""Columns of a training log with FeDLaS, and their titles in a plot."""


@in_look
def gate_plot(log: Sequence[Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Gate of FeDLaS by epoch, from the rows of the ``log.csv`` of a training."""
    missing = [name for name in GATE if not log or name not in log[0]]
    if missing:
        names = comma_separated(missing)
        raise ValueError(f"the log must be of a training with FeDLaS, it has no {names}")
    axes, epochs = new_axes(ax), [int(row["epoch"]) for row in log]
    shares = {name: [100 * float(row[name]) for row in log] for name in GATE}
    draw_lines(axes, {GATE[name]: (epochs, values) for name, values in shares.items()})
    axes.set(xlabel="epoch", ylabel="training examples (%)", ylim=(0, 100))
    return axes


@in_look
def keep_plot(history: Sequence[Epoch], ax: Axes | None = None) -> Axes:
    """Keep-rate, confidence and accuracy of a :class:`calibrant.MaCCal` in each epoch."""
    axes, epochs = new_axes(ax), range(1, len(history) + 1)
    columns = {"keep-rate q": "keep", "confidence": "confidence", "accuracy": "accuracy"}
    values = {k: [100 * getattr(epoch, name) for epoch in history] for k, name in columns.items()}
    draw_lines(axes, {title: (epochs, y) for title, y in values.items()})
    axes.set(xlabel="epoch", ylabel="%", ylim=(0, 102))
    return axes
