"""Subgroups as boxes and figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from calibrant.metrics.reliability import Estimate
from calibrant.show.box import Box, Callout, _drawing_of, box_of
from calibrant.show.figures.comparison import forest_plot
from calibrant.show.tables import LONGEST, Table
from calibrant.slices.groups import Group, Groups
from calibrant.slices.result import Slice, Slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = {
    "accuracy": "accuracy %",
    "selected": "selected %",
    "true_positive_rate": "TPR %",
    "false_positive_rate": "FPR %",
}
"""Figures of decisions, with their headings."""


@box_of.register(Slices)
def slices_box(found: Slices) -> Box:
    """Return the subgroups that are miscalibrated, worst first."""
    said = Callout(found.verdict(), "warn" if found.is_off else "good")
    return Box("Subgroups", [found.describe()], [said], [_slices_table(found)], found.remarks())


def _slices_table(found: Slices) -> Table:
    """Return a row for all examples, and one for each subgroup."""
    interval = f"{100 * found.level:g} % interval"
    headings = ("subgroup", "examples", "stated %", "observed %", "gap", interval)
    rows = [(_title(found, one), *_calibration(one)) for one in (*found.whole, *found.slices)]
    return Table(headings, rows, longest=LONGEST, bars=headings.index("gap"))


def _title(found: Slices, one: Slice) -> str:
    """Return the name of a subgroup, with the event where there are two."""
    if found.classes > 2:
        return one.name
    return f"{one.name}: {found.probability if one.estimand == 'binary' else 'confidence'}"


def _calibration(one: Slice | Group) -> tuple[str, ...]:
    value, low, high = (100 * x for x in one.gap)
    shares = (f"{100 * one.claimed:.1f}", f"{100 * one.observed:.1f}")
    return (f"{one.n:,}", *shares, _signed(value), f"[{low:.1f}, {high:.1f}]")


def _signed(points: float) -> str:
    """Return a gap with its sign; zero has none.

    >>> _signed(2.34), _signed(-0.01)
    ('+2.3', '0.0')
    """
    rounded = round(points, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


@_drawing_of.register(Slices)
def _gaps_plot(found: Slices, ax: Axes | None = None) -> Axes:
    rows: dict[str, Estimate] = {
        _title(found, one): one.gap for one in (*found.whole, *found.slices)
    }
    return forest_plot(rows, ax, title="gap", reference=0.0, level=found.level, longest=60)


@box_of.register(Groups)
def groups_box(groups: Groups) -> Box:
    """Return the calibration of each group and, for two classes, the rates of its decisions."""
    name, said = f"Groups of {groups.column}", Callout(groups.verdict())
    return Box(name, [groups.describe()], [said], _groups_tables(groups), groups.remarks())


def _groups_tables(groups: Groups) -> list[Table]:
    """Return a table of calibration and, for two classes, one of decisions."""
    interval = f"{100 * groups.level:g} % interval"
    headings = ("examples", "stated %", "observed %", "gap", interval)
    differences = {
        name: ("", *(_percent(ranges[figure]) for figure in ("claimed", "observed", "gap")), "")
        for name, ranges in groups.differences().items()
    }
    tables = [_table(groups, headings, _calibration, differences)]
    if groups.classes == 2:
        differences = {
            name: tuple(_percent(ranges[figure]) for figure in RATES)
            for name, ranges in groups.differences().items()
        }
        tables.append(_table(groups, tuple(RATES.values()), _decisions, differences))
    return tables


def _table(
    groups: Groups,
    headings: tuple[str, ...],
    cells: Callable[[Group], tuple[str, ...]],
    differences: dict[str, tuple[str, ...]],
) -> Table:
    """Return a row for each group and set of predictions, and the largest differences."""
    rows = [
        (f"{value} {name}".rstrip(), *cells(members[value]))
        for value in groups.before
        for name, members in groups.sets.items()
    ]
    last = [(f"difference {name}".rstrip(), *shown) for name, shown in differences.items()]
    return Table((groups.column, *headings), [*rows, *last], longest=LONGEST)


def _decisions(group: Group) -> tuple[str, ...]:
    return tuple(_percent(getattr(group, name)) for name in RATES)


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"
