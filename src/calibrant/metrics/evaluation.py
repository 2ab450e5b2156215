"""The result of an evaluation, as numbers and as text, and limits that its figures have to keep."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import betainc

from calibrant._core.binning import RULE, Bins
from calibrant._core.chunks import Estimand
from calibrant._core.messages import did_you_mean, printable_name
from calibrant._core.showing import as_drawing, as_html, as_latex, as_text, frame, one_line
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.reductions import ESTIMANDS, event_probability, probability_of
from calibrant.metrics.registry import METRICS
from calibrant.metrics.reliability import Reliability, reliability_of
from calibrant.metrics.smooth import CalibrationTest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENOUGH = 100  # examples, below which chance may look like anything
UNLIKELY = 0.01  # p-value of a test
HELD_OUT = (
    "use held-out examples if the model was trained on these, and the true labels if these are its "
    "own predictions"
)
ORDER = (
    "check that labels are in the order of the rows, count from 0, and number the classes in the "
    "order of the columns"
)


@dataclass(frozen=True, eq=False)
class Evaluation(Mapping[str, Estimate]):
    """Metrics of one set of predictions: a mapping from name to ``(value, low, high)``.

    Printing it gives a table.
    """

    metrics: dict[str, Estimate]
    n: int
    """Labelled examples."""
    classes: int
    """Number of classes, or of tags."""
    estimand: Estimand
    """Which probability the calibration errors and the test are about."""
    bins: Bins
    """Sums per equal-width bin, for diagrams."""
    level: float | None
    """Coverage of the intervals."""
    test: CalibrationTest | None = None
    """Of whether the model is miscalibrated at all; None in a stream without pairs."""
    by: dict[str, Evaluation] = field(default_factory=dict)
    """The same by subgroup, worst first; empty without ``by=``."""
    chance: float = math.nan
    """Accuracy of predictions that have nothing to do with the labels; NaN where it was not
    summed."""
    groups: int = 0
    """Groups of examples that depend on each other, if intervals allow for them."""
    search: str = ""
    """What the search for subgroups says that ``by="auto"`` makes in half of the examples; else
    empty."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, where they are known."""

    def __getitem__(self, name: str) -> Estimate:
        return self.metrics[METRICS[name].name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    @property
    def binning(self) -> str:
        """Number of bins and the binning rule."""
        return f"{self.bins.count.size} equal-width bins {RULE}"

    def describe(self) -> str:
        """Number of examples, the probability that is measured, and bins, in one line."""
        counted = f"{self.n:,} examples, {self.classes} classes"
        if self.estimand == "multilabel":
            counted = f"{self.n:,} labels of {self.classes} tags"
        if self.groups:
            counted += f", in {self.groups:,} groups"
        measured = self.probability or ESTIMANDS[self.estimand]
        return f"{counted}; calibration of {measured}; {self.binning}"

    @property
    def probability(self) -> str:
        """The probability that is measured, where it is that of one class, else empty.

        P(y = 1), or P(yes) if the classes are no and yes.
        """
        return self._with_names(probability_of(self.estimand))

    def _with_names(self, text: str) -> str:
        """Return a text about two classes with their names, if they are known."""
        if self.class_names is None or self.estimand != "binary":
            return text
        zero, one = self.class_names
        replaced = {"P(y = 1)": f"P({one})", "y = 0": f"the label is {zero}", "class 1": one}
        return re.sub("|".join(map(re.escape, replaced)), lambda found: replaced[found[0]], text)

    def reliability(self) -> Reliability:
        """Return the numbers of a reliability diagram; the ECE with its interval if it is there."""
        probability = self._with_names(event_probability(self.estimand))
        ece = self.metrics.get("ece")
        return reliability_of(self.bins, level=self.level, probability=probability, ece=ece)

    def plot(self, ax: Axes | None = None, *, most: int = 8, **options: Any) -> Axes | Figure:
        """Draw a reliability diagram; with subgroups, and without ``ax``, one for each.

        At most ``most`` subgroups are drawn, beside all examples and worst first. Options are
        those of :func:`calibrant.show.figures.reliability_diagram`. Needs matplotlib.
        """
        drawn: Axes | Figure = as_drawing(self, ax, most=most, **options)
        return drawn

    def verdict(self) -> str:
        """The test of calibration in words; empty without one."""
        if self.test is None:
            return ""
        p = self.test.p_value
        chance = f"p {'<=' if p <= 0.001 else '='} {p:.2g}"
        if p < 0.05:
            what = f"{self.probability} is miscalibrated" if self.probability else "Miscalibrated"
            return f"{what} ({chance})"
        of = f" of {self.probability}" if self.probability else ""
        return f"No evidence of miscalibration{of} in {self.n:,} examples ({chance})"

    def hint(self) -> str:
        """A mistake in the data that the figures look like, with its remedy; empty without one."""
        if self.estimand == "multilabel" or "accuracy" not in self.metrics:
            return ""
        bins, accuracy, ranks = self.bins, self.metrics["accuracy"].value, None
        n, claimed = bins.total**2 / float(bins.squares.sum()), bins.claimed
        if self.estimand == "binary":
            claimed = claimed.clip(min=bins.weight - claimed)  # of the predicted class
            mean, means = bins.claimed.sum() / bins.total, bins.claimed / bins.weight.clip(1e-300)
            # of P(y = 1), but for that within bins
            spread = math.sqrt(float(bins.weight / bins.total @ (means - mean) ** 2))
            area = self.metrics["roc_auc"].value if "roc_auc" in self.metrics else math.nan
            ranks = Ranks(float(bins.observed.sum()) / bins.total, area, spread)
        guessing = float(np.fmax(self.chance, 1 / self.classes))  # NaN where it was not summed
        figures = Figures(n, accuracy, float(claimed.sum() / bins.total), guessing, ranks)
        if n >= ENOUGH and accuracy >= 0.998 and figures.confidence >= 0.99:
            return _all_right(figures)
        return self._with_names(mistake_in(figures))

    def check_limits(
        self,
        most: Mapping[str, float] | None = None,
        least: Mapping[str, float] | None = None,
    ) -> list[CheckedLimit]:
        """Compare figures with limits, those of all examples first and then of each subgroup.

        Parameters
        ----------
        most : dict of str to float
            The largest value of a metric, as in ``{"ece": 0.05}``. ``"ece.high"`` is the upper end
            of its interval: a model with too few examples to tell exceeds the limit.
            ``"ece.low"`` is the lower end, which exceeds it only if the data show that.
        least : dict of str to float
            The smallest value of metrics of which more is better, such as ``{"accuracy": 0.9}``,
            ``"accuracy.low"`` or ``"accuracy.high"``.

        Examples
        --------
        >>> from calibrant.metrics.accumulator import Accumulator
        >>> stream = Accumulator(level=None, metrics=["ece", "accuracy"])
        >>> result = stream.update([[2.0, 0.0], [1.0, 0.0]], [0, 1]).compute()
        >>> for each in result.check_limits({"ece": 0.05}, {"accuracy": 0.4}):
        ...     print(each.exceeded, each)
        True ECE 0.4250 exceeds the limit of 0.05 by 0.3750
        False accuracy 0.5000 keeps the limit of 0.4
        """
        limits = limits_of(most, least)
        sets: list[tuple[str | None, Evaluation]] = [(None, self), *self.by.items()]
        checked = []
        for subgroup, part in sets:
            for metric, end, bound in limits:
                if metric not in part.metrics:
                    raise ValueError(
                        f"the limit of {metric} needs {metric} among the metrics that are "
                        f"measured; they are {', '.join(part.metrics)}"
                    )
                if end != "value" and not self.level:
                    raise ValueError(
                        f"the limit of {metric}.{end} needs intervals: pass a level above 0"
                    )
                value = float(getattr(part.metrics[metric], end))
                more_is_better = METRICS[metric].higher_is_better
                beyond = value < bound if more_is_better else value > bound
                judged = not math.isnan(value) and (subgroup is None or part.n >= FEWEST)
                worse_end = "low" if more_is_better else "high"
                exceeded = beyond if judged else subgroup is None or end == worse_end
                figure = (subgroup, part.n, metric, end, bound, value)
                checked.append(CheckedLimit(*figure, exceeded=exceeded, judged=judged))
        return checked

    def table(self) -> list[tuple[str, str, str]]:
        """Title, value and interval of each metric, as text."""
        rows = []
        for name, (value, *ends) in self.metrics.items():
            low, high = (shown(name, end).removesuffix(" %") for end in ends)
            interval = "" if math.isnan(ends[0]) else f"[{low}, {high}]"
            rows.append((METRICS[name].title, shown(name, value), interval))
        return rows

    @property
    def interval_heading(self) -> str:
        """Heading of the intervals; empty without any."""
        return "" if self.level is None else f"{100 * self.level:g} % interval"

    __str__ = as_text
    _repr_html_ = as_html

    def __repr__(self) -> str:
        return one_line(self, self.describe().partition(";")[0], self.headline())

    def headline(self) -> str:
        """Up to three figures in a line: ECE with its interval, accuracy and NLL if they are known.

        >>> from calibrant.metrics.accumulator import Accumulator
        >>> stream = Accumulator(level=None, metrics=["ece", "accuracy"])
        >>> stream.update([[2.0, 0.0], [1.0, 0.0]], [0, 1]).compute().headline()
        'ECE 42.50 %, accuracy 50.00 %'
        """
        usual = [name for name in ("ece", "accuracy", "nll") if name in self.metrics]
        rows = dict(zip(self, self.table(), strict=True))
        figures = [rows[name] for name in usual or list(self)[:3]]
        first = " ".join(figures[0]).rstrip() if figures else ""
        return ", ".join(filter(None, [first, *(f"{t} {value}" for t, value, _ in figures[1:])]))

    def to_dict(self) -> dict[str, Any]:
        """JSON form: errors as fractions, undefined values as None."""
        names = ("n", "classes", "estimand", "binning", "level")
        result: dict[str, Any] = {name: getattr(self, name) for name in names}
        result["metrics"] = {
            name: {key: v if math.isfinite(v) else None for key, v in e._asdict().items()}
            for name, e in self.metrics.items()
        }
        result["test"] = None if self.test is None else self.test._asdict()
        result["hint"] = self.hint() or None
        if self.groups:
            result["groups"] = self.groups
        if self.search:
            result["search"] = self.search
        if self.by:
            result["by"] = {name: part.to_dict() for name, part in self.by.items()}
        return result

    def to_frame(self) -> pd.DataFrame:
        """Frame with a row for each metric: ``metric``, ``n``, ``value``, ``low`` and ``high``.

        With ``by=`` the metrics of each subgroup follow, and ``subgroup`` has their names, None
        for all examples. Errors are fractions, undefined values NaN. Needs pandas.
        """
        sets: list[tuple[str | None, Evaluation]] = [(None, self), *self.by.items()]
        return frame(
            {
                **({"subgroup": name} if self.by else {}),
                **{"metric": metric, "n": part.n, **estimate._asdict()},
            }
            for name, part in sets
            for metric, estimate in part.metrics.items()
        )

    to_latex = as_latex


def shown(name: str, value: float) -> str:
    """Value of a metric as text, as all tables have it; a dash where it is undefined.

    >>> shown("ece", 0.0424), shown("nll", 0.25)
    ('4.24 %', '0.2500')
    """
    if math.isnan(value):
        return "-"
    if METRICS[name].percent:
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


class Ranks(NamedTuple):
    """How P(y = 1) and the labels of two classes go together."""

    positive: float  # share of class 1
    area: float  # under the ROC curve
    spread: float  # standard deviation of P(y = 1)


class Figures(NamedTuple):
    """What tells a mistake in the data of exclusive classes."""

    n: float  # examples; weighted ones are worth fewer
    accuracy: float
    confidence: float  # mean probability of the predicted class
    chance: float  # accuracy of predictions that have nothing to do with the labels
    ranks: Ranks | None = None  # of two classes


def mistake_in(figures: Figures) -> str:
    """Return the mistake that the figures show, with its remedy; empty for sound ones.

    A training set makes everything right. Labels in another order make accuracy that of guessing:
    not better than chance, and not halfway from chance to what the confidences claim.
    """
    n, accuracy, confidence, chance, ranks = figures
    if n < ENOUGH:
        return ""
    if accuracy >= 1 - 1e-9:
        return _all_right(figures)
    if ranks is not None:
        return _mistake_in_ranks(n, ranks)
    claimed = (chance + confidence) / 2
    if _at_least(accuracy, n, chance) > UNLIKELY > 1 - _at_least(accuracy + 1 / n, n, claimed):
        guessing = f"that of guessing ({100 * chance:.1f} %), at a mean confidence"
        least = f"accuracy ({100 * accuracy:.1f} %) is no better than {guessing}"
        return f"{least} of {100 * confidence:.1f} %: {ORDER}"
    return ""


def _all_right(figures: Figures) -> str:
    every = figures.accuracy >= 1 - 1e-9
    which = "all" if every else f"{100 * figures.accuracy:.2f} % of the"
    at = f"at a mean confidence of {100 * figures.confidence:.1f} %"
    return f"{which} predictions are right, {at}: {HELD_OUT}"


def _mistake_in_ranks(n: float, ranks: Ranks) -> str:
    """Return the mistake that P(y = 1) does not tell two classes apart, or the wrong way round."""
    positive, area, spread = ranks
    if math.isnan(area) or not 0 < positive < 1:
        return ""
    # of the area where ranks are drawn at random
    deviation = math.sqrt((n + 1) / (12 * n * n * positive * (1 - positive)))
    shown = f"ROC AUC {100 * area:.1f} %"
    if area < min(0.3, 0.5 - 5 * deviation):
        return f"P(y = 1) is higher where y = 0 ({shown}): check that class 1 is the second column"
    if abs(area - 0.5) <= 2.5 * deviation <= 0.1 and spread >= 0.15:
        return f"P(y = 1) varies, but does not tell the classes apart ({shown}): {ORDER}"
    return ""


def _at_least(share: float, n: float, probability: float) -> float:
    """Return the probability of at least a share of n binomial events."""
    right = share * n
    return 1.0 if right <= 0 else float(betainc(right, max(n - right, 0) + 1, probability))


FEWEST = 30
"""Examples of the smallest subgroups that limits are compared with."""
ENDS = {"low": "the lower end of ", "high": "the upper end of "}
"""Ends of an interval that limits may be on, in words."""


class Limit(NamedTuple):
    """The largest value that a metric may have; the smallest one if larger values are better.

    Attributes
    ----------
    metric : str
    end : {"value", "low", "high"}
        What is compared: the value, or an end of its interval.
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
        the worse end of an interval that nothing is known of: where it is undefined, or a subgroup
        has fewer than 30 examples.
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
        where = "" if self.subgroup is None else f"subgroup {printable_name(self.subgroup)}: "
        name = f"{where}{ENDS.get(self.end, '')}{metric.title}"
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
    """Return limits by name: ``ece``, or ``ece.high`` and ``ece.low`` for ends of the interval.

    >>> limits_of({"ece.high": 0.05}, {"accuracy": 0.9})
    [Limit(metric='ece', end='high', bound=0.05), Limit(metric='accuracy', end='value', bound=0.9)]
    """
    sets = {"largest": most or {}, "smallest": least or {}}
    return [
        _limit(name, bound, which)
        for which, limits in sets.items()
        for name, bound in limits.items()
    ]


def _limit(text: str, bound: float, which: str) -> Limit:
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
    if dot and asked not in ENDS:
        raise ValueError(
            f"{text}: {did_you_mean(asked, ENDS)}a limit is on {name}, or on an end of its "
            f"interval, {name}.low or {name}.high"
        )
    if metric.percent and not 0 <= bound <= 1:
        raise ValueError(f"the limit of {name} must be a fraction (0.03 is 3 %), got {bound:g}")
    if not math.isfinite(bound):
        raise ValueError(f"the limit of {name} must be a finite number, got {bound:g}")
    return Limit(name, asked or "value", float(bound))
