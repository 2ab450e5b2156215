"""Known groups side by side: calibration and rates of decisions, before and after a calibrator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from calibrant._core.checks import FloatArray, Values, check_level, warnings_at_caller
from calibrant._core.class_names import is_frame
from calibrant._core.messages import unknown_name
from calibrant._core.showing import as_html, as_latex, as_text, frame, one_line, plain
from calibrant.calibrators.base import Calibrator
from calibrant.data.dataset import Split
from calibrant.data.files import Data, is_data
from calibrant.data.metadata import MetadataColumn, learn_column
from calibrant.metrics.intervals import Estimate
from calibrant.slices.examples import Reading, _draw_sample
from calibrant.slices.find import _open_examples, _sum_tables, check_one_label
from calibrant.slices.result import _count_off, _off_alike
from calibrant.slices.search import OF_ESTIMAND, SHARED, _gaps_of, _Tables

if TYPE_CHECKING:
    import pandas as pd

RATES = ("accuracy", "selected", "true_positive_rate", "false_positive_rate")
"""Figures of decisions."""


class Group(NamedTuple):
    """Figures of a group.

    Attributes
    ----------
    n, share : int and float
        Number of examples, and their share of all (of the weights).
    claimed, observed : float
        Mean of P(y = 1) and share of y = 1; for more than two classes, mean confidence and
        accuracy.
    gap : Estimate
        ``claimed - observed``. The intervals of all groups hold together.
    accuracy : float
    selected, true_positive_rate, false_positive_rate : float
        Of two classes: shares that are predicted to be 1 among all, among y = 1 and among y = 0.
        NaN for more classes.
    """

    n: int
    share: float
    claimed: float
    observed: float
    gap: Estimate
    accuracy: float
    selected: float = math.nan
    true_positive_rate: float = math.nan
    false_positive_rate: float = math.nan


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups by the value of a column, before and, with a calibrator, after calibration.

    Attributes
    ----------
    column : str
        Its name.
    before, after : dict of str to Group
        By value; ``after`` is empty without a calibrator.
    level : float
        Probability with which all intervals of a set hold.
    """

    column: str
    classes: int
    before: dict[str, Group]
    after: dict[str, Group]
    level: float

    @property
    def sets(self) -> dict[str, dict[str, Group]]:
        """Groups by the name of the predictions; without a calibrator there is one set."""
        return {"before": self.before, "after": self.after} if self.after else {"": self.before}

    def differences(self) -> dict[str, dict[str, float]]:
        """Return the largest less the smallest figure of a group, by set and figure."""
        names = ("claimed", "observed", *(RATES if self.classes == 2 else ()))
        return {
            name: {
                "gap": _range([group.gap.value for group in groups.values()]),
                **{
                    figure: _range([getattr(group, figure) for group in groups.values()])
                    for figure in names
                },
            }
            for name, groups in self.sets.items()
        }

    def describe(self) -> str:
        """Return what was measured."""
        count = sum(group.n for group in self.before.values())
        of = "P(y = 1)" if self.classes == 2 else "the confidence"
        return f"{count:,} examples in {len(self.before)} groups of {self.column}; {of} is compared"

    def verdict(self) -> str:
        """Return how many groups are miscalibrated, and whether the whole model is."""
        parts, together = [], []
        for name, groups in self.sets.items():
            gaps = np.array([group.gap for group in groups.values()]).T
            off = _count_off("binary" if self.classes == 2 else "top_label", gaps)
            if any(each.number == each.searched > 1 for each in off):
                alike = f"groups {name} calibration" if name else "groups"
                together.append(f"{_off_alike(off[0], alike, 'P(y = 1)')}.")
            wrong, largest = sum(each.number for each in off), 100 * np.abs(gaps[0]).max()
            when = f", {name}" if name else ""
            parts.append(f"{wrong} of {len(groups)}{when} (largest gap {largest:.1f} points)")
        counted = f"Groups that are miscalibrated on average: {'; '.join(parts)}."
        return " ".join(together if len(together) == len(parts) else [*together, counted])

    def remarks(self) -> list[str]:
        """Return what the last rows and the columns mean."""
        lines = ["The last rows have the largest less the smallest figure of a group."]
        if self.classes == 2:
            lines.append(
                "Selected: predicted to be 1, as P(y = 1) is at least 0.5; TPR and FPR are the "
                "shares of that among y = 1 and y = 0."
            )
        return lines

    __str__ = as_text
    _repr_html_ = as_html
    to_latex = as_latex

    def __repr__(self) -> str:
        return one_line(self, self.describe().partition(";")[0], self.verdict().rstrip("."))

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON: fractions, undefined values as None."""
        sets = {
            name or "before": {
                value: {**group._asdict(), "gap": group.gap._asdict()}
                for value, group in groups.items()
            }
            for name, groups in self.sets.items()
        }
        differences = {name or "before": each for name, each in self.differences().items()}
        about = {"column": self.column, "classes": self.classes, "level": self.level}
        values = {**about, **sets, "verdict": self.verdict(), "differences": differences}
        return dict(plain(values))

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each group and set. Needs pandas."""
        return frame(
            {
                **{self.column: value, "predictions": name or "before"},
                **{key: v for key, v in group._asdict().items() if key != "gap"},
                **{"gap": group.gap.value, "gap_low": group.gap.low, "gap_high": group.gap.high},
            }
            for name, groups in self.sets.items()
            for value, group in groups.items()
        )


@warnings_at_caller()
def measure_groups(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    by: Values | str,
    probs: Values | None = None,
    features: Values | None = None,
    sample_weight: Values | str | None = None,
    calibrator: Calibrator | None = None,
    split: str | None = None,
    level: float = 0.9,
) -> Groups:
    """Compare calibration and decisions of known groups, before and after a calibrator.

    Parameters
    ----------
    data, labels, probs, features, sample_weight, split
        As for :func:`calibrant.find_slices`.
    by : (n,) values, or the name of a column
        Groups: its 100 most frequent values, or ranges of numbers.
    calibrator : Calibrator, optional
        Figures after calibration are added to those before.
    level : float
        Probability with which the intervals of all groups hold.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> site, probs = rng.choice(["A", "B"], 4000), rng.uniform(size=4000)
    >>> happens = np.where(site == "B", probs**2, probs)
    >>> labels = (rng.uniform(size=4000) < happens).astype(int)
    >>> groups = measure_groups(probs=probs, labels=labels, by=site)
    >>> {value: round(group.gap.value, 2) for value, group in groups.before.items()}
    {'A': 0.01, 'B': 0.18}
    """
    check_level(level)
    if isinstance(by, str) and not (is_data(data) or is_frame(data)):
        raise TypeError(f"arrays have no columns, got by={by!r}: pass its values, or a file")
    name = by if isinstance(by, str) else str(getattr(by, "name", None) or "group")
    metadata = None if isinstance(by, str) else {name: by}
    chosen, names = _open_examples(
        data, labels, probs, metadata, features, sample_weight, split, calibrator
    )
    if name not in names:
        raise unknown_name("column", name, names)
    reading = Reading({name: names[name]}, chosen.classes, chosen.dataset.class_names)
    reading.check_names()
    check_one_label(chosen)
    sample = _draw_sample(reading, chosen, clusters=False, seed=0)
    column = learn_column(name, sample.values[name])
    if column is None:
        raise ValueError(f"{chosen.path}: {name} has no different values, so there are no groups")
    half = MetadataColumn(reading.probability, "number", cuts=(0.5,))
    reading = replace(reading, columns=(column, half) if reading.classes == 2 else (column,))
    before = _measured(reading, chosen, level)
    after = {}
    if calibrator is not None:
        after = _measured(reading.calibrated_by(calibrator, names), chosen, level)
    return Groups(name, chosen.classes, before, after, level)


def _measured(reading: Reading, split: Split, level: float) -> dict[str, Group]:
    """Return the figures of all groups that have examples."""
    tables = _sum_tables(split, reading, len(reading.columns))
    (column, *_) = reading.columns
    used = np.flatnonzero(tables.sums[(0,)][0])
    critical = float(-ndtri((1 - level) / (2 * used.size)))  # Bonferroni: groups do not overlap
    sums = tables.sums[(0,)][:, used]
    first = _gaps_of((0,), "", used[:, None], sums, 0)
    low, high = first.intervals(critical)
    weight = sums[SHARED.index("weight")]
    rates = _rates(tables, used) if reading.classes == 2 else [{} for _ in used]
    return {
        column.text(int(code), int(code) + 1).removeprefix(f"{column.name} = "): Group(
            n=round(float(first.number[i])),
            share=float(weight[i] / weight.sum()),
            claimed=float(first.claimed[i]),
            observed=float(first.happened[i]),
            gap=Estimate(float(first.gap[i]), float(low[i]), float(high[i])),
            **{"accuracy": float(first.happened[i]), **rates[i]},
        )
        for i, code in enumerate(used.tolist())
    }


def _rates(tables: _Tables, used: Any) -> list[dict[str, float]]:
    """Return rates of decisions of each group, from sums by group and by P(y = 1) >= 0.5."""
    table = tables.sums[(0, 1)]
    weight = table[SHARED.index("weight")]
    events = table[len(SHARED) + OF_ESTIMAND.index("happened")]
    shares = {
        "accuracy": (events[:, 1] + (weight - events)[:, 0]) / np.maximum(weight.sum(1), 1e-300),
        "selected": _share(weight),
        "true_positive_rate": _share(events),
        "false_positive_rate": _share(weight - events),
    }
    return [{name: float(values[code]) for name, values in shares.items()} for code in used]


def _share(by_half: FloatArray) -> FloatArray:
    """Return the share of the upper half in each row; NaN for rows without anything."""
    total = by_half.sum(1)
    shares = np.full(total.shape, math.nan)
    np.divide(by_half[:, 1], total, out=shares, where=total > 0)
    return shares


def _range(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return max(known) - min(known) if known else math.nan
