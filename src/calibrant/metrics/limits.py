"""Limits that the figures of an evaluation have to keep, as in continuous integration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from calibrant._core.messages import did_you_mean, printable_name
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.registry import METRICS

FEWEST = 30
"""Examples of the smallest subgroups that limits are compared with."""


class Limit(NamedTuple):
    """The largest value that a metric may have; the smallest one if larger values are better.

    Attributes
    ----------
    metric : str
    end : {"value", "low", "high"}
        What is compared: the value, or the worse end of its interval.
    bound : float
    """

    metric: str
    end: str
    bound: float


class CheckedLimit(NamedTuple):
    """A limit beside the figure that it is about; printing it gives a sentence.

    Attributes
    ----------
    subgroup : str or None
        None for all examples.
    n : int
        Number of examples.
    metric, end, limit
        As in the limit.
    value : float
        The figure that is compared; NaN where it is undefined.
    exceeded : bool
        True if the figure is beyond the limit. An undefined figure of all examples is, and so is
        the end of an interval that nothing is known of: where it is undefined, or a subgroup has
        fewer than 30 examples.
    judged : bool
        False where the figure is undefined, or a subgroup has fewer than 30 examples.
    """

    subgroup: str | None
    n: int
    metric: str
    end: str
    limit: float
    value: float
    exceeded: bool
    judged: bool

    def __str__(self) -> str:
        metric, limit = METRICS[self.metric], f"the limit of {self.limit:g}"
        ends = {"low": "the lower end of ", "high": "the upper end of "}
        where = "" if self.subgroup is None else f"subgroup {printable_name(self.subgroup)}: "
        name = f"{where}{ends.get(self.end, '')}{metric.title}"
        if not self.judged:
            known = "is undefined" if math.isnan(self.value) else "is that of too few"
            return f"{name} {known} in {self.n:,} examples, and cannot be compared with {limit}"
        if not self.exceeded:
            return f"{name} {self.value:.4f} keeps {limit}"
        passes = "is below" if metric.higher_is_better else "exceeds"
        return f"{name} {self.value:.4f} {passes} {limit} by {abs(self.value - self.limit):.4f}"


def limits_of(
    most: Mapping[str, float] | None = None, least: Mapping[str, float] | None = None
) -> list[Limit]:
    """Return limits by name: ``ece``, or ``ece.high`` for the upper end of the interval.

    >>> limits_of({"ece.high": 0.05}, {"accuracy": 0.9})
    [Limit(metric='ece', end='high', bound=0.05), Limit(metric='accuracy', end='value', bound=0.9)]
    """
    sets = {("largest", "high"): most or {}, ("smallest", "low"): least or {}}
    return [
        _limit(name, bound, which, end)
        for (which, end), limits in sets.items()
        for name, bound in limits.items()
    ]


def _limit(text: str, bound: float, which: str, end: str) -> Limit:
    typed, dot, asked = text.partition(".")
    name = METRICS.name(typed)
    metric = METRICS[name]
    if metric.two_sided:
        raise ValueError(f"{name} is best in the middle, and takes no limit: limit ici or ece")
    if metric.higher_is_better != (which == "smallest"):
        remedy = ("larger", "smallest", "--min, least=")
        if not metric.higher_is_better:
            remedy = ("smaller", "largest", "--max, most=")
        better, other, option = remedy
        raise ValueError(
            f"{name} is better if it is {better}: give the {other} value that it may have "
            f"({option}), not the {which}"
        )
    if dot and asked != end:
        raise ValueError(
            f"{text}: {did_you_mean(asked, [end])}a limit is on {name}, or on {name}.{end}, the "
            "worse end of its interval"
        )
    if metric.percent and not 0 <= bound <= 1:
        raise ValueError(f"the limit of {name} must be a fraction (0.03 is 3 %), got {bound:g}")
    if not math.isfinite(bound):
        raise ValueError(f"the limit of {name} must be a finite number, got {bound:g}")
    return Limit(name, asked or "value", float(bound))


def _compared(
    limits: Sequence[Limit],
    metrics: Mapping[str, Estimate],
    n: int,
    subgroup: str | None,
    level: float | None,
) -> list[CheckedLimit]:
    """Return the limits beside the figures of all examples, or of a subgroup."""
    results = []
    for metric, end, bound in limits:
        if metric not in metrics:
            raise ValueError(
                f"the limit of {metric} needs {metric} among the metrics that are measured; they "
                f"are {', '.join(metrics)}"
            )
        if end != "value" and not level:
            raise ValueError(f"the limit of {metric}.{end} needs intervals: pass a level above 0")
        value = float(getattr(metrics[metric], end))
        beyond = value < bound if METRICS[metric].higher_is_better else value > bound
        judged = not math.isnan(value) and (subgroup is None or n >= FEWEST)
        certain = subgroup is None or end != "value"
        results.append(
            CheckedLimit(
                *(subgroup, n, metric, end, bound, value),
                exceeded=beyond if judged else certain,
                judged=judged,
            )
        )
    return results
