"""Subgroups whose confidence is wrong: the result of a search, worst first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrant._core.checks import FloatArray
from calibrant._core.messages import comma_separated
from calibrant._core.showing import as_axes, as_html, as_latex, as_text, frame, one_line
from calibrant.data.metadata import Condition
from calibrant.metrics.intervals import Estimate

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


class Slice(NamedTuple):
    """A subgroup of the examples, and the gap between what is claimed and what happens.

    Attributes
    ----------
    name : str
        Its conditions in words, such as ``age < 30 and site = B``.
    n, share : int and float
        Number of examples, and their share of all (of the weights, if there are any).
    estimand : str
        ``"top_label"`` if confidences are compared with right answers, ``"binary"`` if P(y = 1) is
        compared with y = 1.
    claimed, observed : float
        Mean probability, and share of events.
    gap : Estimate
        ``claimed - observed``, positive if the claims are too high. The intervals of all
        subgroups that were searched hold together, with the probability ``level``.
    conditions : tuple of Condition
        Ranges of codes of columns.
    """

    name: str
    n: int
    share: float
    estimand: str
    claimed: float
    observed: float
    gap: Estimate
    conditions: tuple[Condition, ...] = ()

    def __repr__(self) -> str:
        return one_line(self, self.name, f"{self.n:,} examples", self.finding())

    @property
    def least(self) -> float:
        """The gap, without its sign, that there is at least."""
        return max(self.gap.low, -self.gap.high, 0.0)

    def finding(self) -> str:
        """Return in words the stated and the observed share, and by how much they differ."""
        _, low, high = self.gap
        ends = (low, high) if low + high > 0 else (-high, -low)
        words = ("stated", "observed", "too high", "too low")
        if self.estimand == "top_label":
            words = ("mean confidence", "accuracy", "over-confident", "under-confident")
        stated, observed, *directions = words
        direction = directions[low + high < 0]
        by = " to ".join(f"{max(0.0, 100 * end):.1f}" for end in ends)
        return (
            f"{stated} {100 * self.claimed:.1f} %, {observed} {100 * self.observed:.1f} %, "
            f"{direction} by {by} points"
        )


class Off(NamedTuple):
    """Subgroups that were searched and are off beyond noise, all in one direction.

    Attributes
    ----------
    estimand : str
    searched, number : int
        Number of subgroups of this estimand, and of those that are off.
    smallest, largest : float
        Their gaps; both are positive if the claims are too high, and both negative if too low.
    """

    estimand: str
    searched: int
    number: int
    smallest: float
    largest: float


def _count_off(estimand: str, gaps: FloatArray) -> list[Off]:
    """Return the groups that are off in each direction; ``gaps`` are values, low and high ends."""
    value, low, high = gaps
    sets = [value[low > 0], value[high < 0]]
    return [
        Off(estimand, value.size, each.size, *sorted(map(float, (each.min(), each.max())), key=abs))
        for each in sets
        if each.size
    ]


def _off_alike(off: Off, groups: str, probability: str) -> str:
    """Return in words that groups are off in the direction in which the whole model is.

    >>> _off_alike(Off("top_label", 9, 7, 0.14, 0.19), "groups", "")
    '7 of 9 groups are over-confident by 14.0 to 19.0 points, as the model is as a whole'
    >>> _off_alike(Off("binary", 3, 3, -0.01, -0.02), "groups", "P(y = 1)")
    'P(y = 1) is too low by 1.0 to 2.0 points in all 3 groups, as it is over all examples'
    """
    which = (
        f"all {off.number:,}"
        if off.number == off.searched
        else f"{off.number:,} of {off.searched:,}"
    )
    by = f"by {100 * abs(off.smallest):.1f} to {100 * abs(off.largest):.1f} points"
    if off.estimand == "binary":
        direction = "high" if off.smallest > 0 else "low"
        where = f"in {which} {groups}, as it is over all examples"
        return f"{probability} is too {direction} {by} {where}"
    direction = "over" if off.smallest > 0 else "under"
    which = f"{which[0].upper()}{which[1:]}"
    return f"{which} {groups} are {direction}-confident {by}, as the model is as a whole"


@dataclass(frozen=True, eq=False)
class Slices:
    """Subgroups that are miscalibrated, worst first; printing it gives a table.

    Attributes
    ----------
    slices : list of Slice
        By the gap that they have at least. Those that follow from others are left out.
    whole : list of Slice
        All examples, for each estimand.
    off : list of Off
        How many of the subgroups are off, those included that follow from others.
    off_as_a_whole : list of str
        Estimands that are off over all examples, beyond what single subgroups explain.
    searched : int
        Number of subgroups, and estimands, that were looked at.
    columns, left_out : list of str
        Columns that subgroups were formed of, and those of which no value is frequent, or each is
        different.
    level : float
        Probability with which all intervals hold.
    critical : float
        Standard deviations of a gap that this takes; one subgroup alone would need 1.64 for 90 %.
    notes : list of str
        Remarks about the columns.
    """

    slices: list[Slice]
    whole: list[Slice]
    off: list[Off]
    off_as_a_whole: list[str]
    n: int
    classes: int
    searched: int
    columns: list[str]
    left_out: list[str]
    level: float
    critical: float
    min_size: int
    probability: str  # name of P(y = 1)
    notes: list[str]

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, number: int) -> Slice:
        return self.slices[number]

    @property
    def is_off(self) -> bool:
        """True if subgroups or all examples are miscalibrated."""
        return bool(self.slices or self.off_as_a_whole)

    def describe(self) -> str:
        """Return what was searched."""
        return (
            f"{self.n:,} examples, {self.classes} classes; searched {self.searched:,} subgroups of "
            f"at least {self.min_size:,} examples, by {comma_separated(self.columns)}"
        )

    def verdict(self) -> str:
        """Return the outcome of the search in words, the whole model first if that is off."""
        general = []
        for one in self.whole:
            if one.estimand in self.off_as_a_whole:
                alike = (
                    f"{_off_alike(off, 'subgroups', self.probability)}."
                    for off in self.off
                    if off.estimand == one.estimand and off.smallest * one.gap.value > 0
                )
                general.append(next(alike, f"Over all examples: {one.finding()}."))
        if not self.slices:
            if general and self.off:
                general.append("No subgroup is shown to be off by more than that explains.")
            return " ".join(general) or "No subgroup is shown to be miscalibrated."
        worst, count = self.slices[0], len(self.slices)
        named = f"{worst.name} ({worst.n:,} examples): {worst.finding()}."
        if count > 1:
            named = f"the gap furthest beyond noise is that of {named}"
        if general:
            found = "One subgroup is" if count == 1 else f"{count} subgroups are"
            return " ".join([*general, f"{found} off by more than that explains: {named}"])
        off = sum(each.number for each in self.off)
        found = "One subgroup is" if off == 1 else f"{off:,} of {self.searched:,} subgroups are"
        return f"{found} miscalibrated: {named}"

    def remarks(self) -> list[str]:
        """Return what the intervals mean, and what was left out."""
        lines = [
            f"With {100 * self.level:g} % probability all intervals hold together, also those of "
            "subgroups that are not shown. Subgroups that follow from others are left out.",
            *self.notes,
        ]
        if any(one.gap.excludes(0) for one in self.whole):
            lines.insert(
                0,
                "All examples together are miscalibrated too: calibrate first (calibrant fit), "
                "then search what is left.",
            )
        if self.left_out:
            names = comma_separated(self.left_out)
            lines.append(f"Left out, as identifiers or for want of frequent values: {names}.")
        if not self.searched:
            lines.append(f"Nothing was searched: no subgroup has {self.min_size:,} examples.")
        return lines

    __str__ = as_text
    _repr_html_ = as_html
    to_latex = as_latex

    def __repr__(self) -> str:
        return one_line(self, f"{self.n:,} examples", self.verdict().rstrip("."))

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON: shares and gaps as fractions."""
        return {
            "n": self.n,
            "classes": self.classes,
            "searched": self.searched,
            "columns": self.columns,
            "left_out": self.left_out,
            "level": self.level,
            "critical": self.critical,
            "min_size": self.min_size,
            "notes": self.notes,
            "verdict": self.verdict(),
            "off": [one._asdict() for one in self.off],
            "off_as_a_whole": self.off_as_a_whole,
            "whole": [_plain(one) for one in self.whole],
            "slices": [_plain(one) for one in self.slices],
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each subgroup, all examples first. Needs pandas."""
        return frame(
            {
                **{name: getattr(one, name) for name in one._fields[:-2]},
                **{"gap": one.gap.value, "gap_low": one.gap.low, "gap_high": one.gap.high},
            }
            for one in (*self.whole, *self.slices)
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the gaps with their intervals. Needs matplotlib."""
        return as_axes(self, ax)


def _plain(one: Slice) -> dict[str, Any]:
    values = one._asdict()
    del values["conditions"]
    return {**values, "gap": one.gap._asdict()}
