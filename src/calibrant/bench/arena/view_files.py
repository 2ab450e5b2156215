"""Views of the arena as files: Markdown, csv, and figures, which need matplotlib."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import comma_separated
from calibrant.bench.arena.views import View, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = "#2f7fb8"
FIGURES = (".png", ".svg", ".pdf")


def interval_figure(view: View) -> Figure:
    """Draw the value of each method as a point with its interval, the best on top."""
    if view.drawn is None:
        raise ValueError(f"there is no figure of {view.title.lower()}: draw wins, ranks or elo")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"figures need matplotlib ({error}): pip install 'calibrant[plot]'"
        raise ImportError(message) from error
    value, low, high = view.drawn
    figure = Figure(figsize=(6, 1.2 + 0.28 * len(value)), dpi=150, layout="constrained")
    axes, places = figure.subplots(), np.arange(len(value))
    reach = np.abs(np.stack([low, high]) - value)
    axes.errorbar(value, places, xerr=reach, fmt="o", ms=5, capsize=3, color=BLUE)
    axes.set_yticks(places, [line[0] for line in view.lines])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set(xlabel=view.axis, title=view.title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_view(view: View, path: Path) -> None:
    """Write a view as Markdown, as csv, or as a figure, by the suffix of the path."""
    if path.suffix not in (".md", ".csv", *FIGURES):
        known = comma_separated((".md", ".csv", *FIGURES))
        raise ValueError(f"cannot write {path}: the suffix must be one of {known}")
    figure = interval_figure(view) if path.suffix in FIGURES else None
    with replacing(path) as temporary:
        if figure is not None:
            figure.savefig(temporary, format=path.suffix[1:])
        elif path.suffix == ".md":
            temporary.write_text(markdown(view), "utf-8")
        else:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([view.headings, *view.lines])
