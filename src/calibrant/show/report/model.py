"""The data of a report: aggregates of examples, which the page, Markdown and JSON show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from scipy.special import betainc

from calibrant._core.binning import Bins
from calibrant.calibrators.auto import Auto, KeepArgmax
from calibrant.calibrators.scaling import Identity
from calibrant.data.tables import ColumnNames
from calibrant.decide.threshold_results import Threshold
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.reductions import event_probability
from calibrant.metrics.reliability import Reliability, reliability_of
from calibrant.show.style import percent
from calibrant.slices import Slices
from calibrant.workflows.comparison import Comparison, Row
from calibrant.workflows.effect import LossReduction, method_in_use

MIN_EXAMPLES_OF_CLASS = 10
"""Examples of a class that is shown and tested; the figures of fewer are noise."""
MIN_EXAMPLES_OF_BIN = 25
"""Examples that a bin of the diagrams and tables has; the ECE keeps the bins of ``evaluate``."""


@dataclass(frozen=True)
class Part:
    """Examples that belong together, such as a range of confidence or a predicted class."""

    name: str
    n: int
    share: float
    """Of all examples, by weight."""
    confidence: float
    """Mean of what was claimed."""
    accuracy: float
    """Share in which that happened."""
    low: float
    high: float
    """Interval of the accuracy (Clopper and Pearson)."""
    p_value: float
    """Of a binomial test that confidences are probabilities."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {**vars(self), "gap": self.gap}

    @property
    def gap(self) -> float:
        """Confidence less accuracy: positive where a model is over-confident."""
        return self.confidence - self.accuracy

    @property
    def gap_ends(self) -> tuple[float, float]:
        """Interval of the gap."""
        return self.confidence - self.high, self.confidence - self.low


@dataclass(frozen=True)
class ClassFigures:
    """A class, or a tag."""

    part: Part
    """The examples that are predicted to be in the class, or all examples of the tag."""
    labelled: float
    """Share of the examples that have this label."""
    claimed: float
    """Mean probability of this class; NaN where it was not summed."""
    bias_p_value: float
    """Of a binomial test that ``claimed`` equals ``labelled``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON, those of the part among them."""
        figures = dict(vars(self))
        return {**figures.pop("part").to_dict(), **figures}


@dataclass(frozen=True)
class Coverage:
    """A threshold of confidence: share of the examples that reach it, and errors among them."""

    threshold: float
    coverage: float
    error: float
    expected: float
    """Share of errors that the confidences of these examples imply."""


@dataclass(frozen=True)
class SourceFile:
    """A file that was read."""

    path: str
    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Remedy:
    """Methods that were tried, and what the chosen one does."""

    comparison: Comparison
    coverage: list[Coverage] = field(default_factory=list)
    """Answers after calibration, on the examples that methods were measured on."""
    thresholds: list[Threshold] = field(default_factory=list)
    """Guaranteed error rates after calibration; none of a single split, which was fitted too."""
    fit_split: str = ""
    """Name of the split that methods were fitted on; empty for the unnamed split."""
    gain: LossReduction | None = None
    """Of the chosen method; None where it changes nothing, or could not be measured."""
    doubts: list[str] = field(default_factory=list)
    """Mistakes in the examples of the fit, where these are not the ones measured."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "comparison": self.comparison.to_dict(),
            "chosen": self.chosen.method if self.chosen else None,
            "helps": self.helps,
            "gain": None if self.gain is None else vars(self.gain),
            "coverage": self.coverage,
            "thresholds": [each.state() for each in self.thresholds],
        }

    @property
    def helps(self) -> bool:
        """True if the chosen method lowers log loss and ECE, and the log loss beyond noise."""
        if self.gain is None or self.before is None or self.after is None:
            return False
        return self.gain.low > 0 and self.after["ece"].value < self.before["ece"].value

    @property
    def chosen(self) -> Row | None:
        """The method that is advised; None where no method could be chosen."""
        method = self.comparison.choice()
        return None if method is None else self.comparison[method]

    @property
    def before(self) -> Evaluation | None:
        """Figures without calibration, of the same examples."""
        return self.comparison.measured.get("none")

    @property
    def after(self) -> Evaluation | None:
        """Figures with the chosen method."""
        return self.chosen.evaluation if self.chosen is not None else None

    def price(self, counted: str) -> str:
        """Return in words what the chosen method does to accuracy and predictions."""
        if self.chosen is None or self.before is None or self.after is None:
            return ""
        before, after = self.before["accuracy"].value, self.after["accuracy"].value
        if not self.chosen.argmax_changed:
            return f"Accuracy stays at {percent(before)}: no prediction changes."
        changed = f"{self.chosen.argmax_changed:,} of {self.comparison.n_test:,} {counted}"
        if percent(before) == percent(after):
            return f"Accuracy stays at {percent(before)}; the predictions of {changed} change."
        does = "rises" if after > before else "falls"
        change = f"from {percent(before)} to {percent(after)}"
        return f"Accuracy {does} {change}: the predictions of {changed} change."

    @property
    def keep_argmax(self) -> KeepArgmax:
        """The option of that name of ``auto``; its default if another method was chosen."""
        calibrator = self.chosen.calibrator if self.chosen is not None else None
        return calibrator.keep_argmax if isinstance(calibrator, Auto) else "auto"

    @property
    def changes_nothing(self) -> bool:
        """True if the advice is to leave the model as it is, or there is none."""
        if self.chosen is None or self.chosen.calibrator is None:
            return True
        return method_in_use(self.chosen.calibrator).name == Identity.name


@dataclass(frozen=True)
class Subject:
    """One set of predictions and everything that a report says about it, but for the words."""

    name: str
    path: str
    split: str
    files: list[SourceFile]
    columns: ColumnNames
    """Columns that the user has named, as the advised commands do."""
    probs_stored: bool
    """Whether the predictions are probabilities instead of logits."""
    class_names: list[str] | None
    evaluation: Evaluation
    answers: Part
    """All examples, with the confidence in the predicted class."""
    sure: Part
    """The answers with a confidence above 0.9."""
    certain: float
    """Share of the answers with a confidence of exactly 1."""
    ranges: list[Part]
    """By range of confidence, of the estimand of the evaluation."""
    classes: list[ClassFigures]
    margins: list[Part]
    """By difference of the two largest logits; empty for two classes and tags."""
    coverage: list[Coverage]
    weighted: bool
    ignored: int
    """Labels that were left out."""
    by: str | None
    """Column of the subgroups."""
    slices: Slices | None = None
    """Subgroups that were found; None where nothing was searched."""
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """The number of bad shards that were left out, then a line about each."""
    remedy: Remedy | None = None
    remedy_error: str = ""
    """Why no method was tried."""
    first: tuple[str, Estimate] | None = None
    """Name and ECE of the first set of predictions of the same report; None for that itself."""

    @property
    def word(self) -> str:
        """Class or tag."""
        return "tag" if self.evaluation.estimand == "multilabel" else "class"

    @property
    def counted(self) -> str:
        """What the numbers of examples count."""
        return "labels" if self.word == "tag" else "examples"

    @property
    def compared(self) -> str:
        """What a margin is the difference of."""
        return "log-probabilities" if self.probs_stored else "logits"

    @property
    def probability(self) -> str:
        """Name of what is measured, for sentences."""
        if self.word == "tag":
            return "probability of a tag"
        return self.with_names(self.evaluation.probability) or "confidence"

    def with_names(self, text: str) -> str:
        """Return a text about two classes with the name of the second one, if it is known."""
        if not self.class_names or self.evaluation.estimand != "binary":
            return text
        name = self.class_names[1]
        return text.replace("P(y = 1)", f"P({name})").replace("y = 1", name)

    def curve(self, evaluation: Evaluation | None = None) -> Reliability:
        """Return the numbers of a reliability diagram, in bins of enough examples."""
        one = evaluation or self.evaluation
        curve = reliability_of(
            _merged_bins(one.bins),
            level=one.level,
            probability=event_probability(one.estimand),
            ece=one.metrics.get("ece"),
        )
        return curve._replace(probability=self.with_names(curve.probability))

    @property
    def usual_error(self) -> str:
        """Return how large the ECE of a calibrated model would be; empty for many examples."""
        bins, n = self.evaluation.bins, self.evaluation.n
        if n >= MIN_EXAMPLES_OF_BIN * bins.count.size:
            return ""
        usual = percent(_noise(bins), 0)
        return f"By chance, a calibrated model shows about {usual} on {n:,} {self.counted}"


def _merged_bins(bins: Bins) -> Bins:
    """Join neighbouring bins until each that has examples has enough of them to show something.

    Empty stretches stay bins of their own.
    """
    filled = np.flatnonzero(bins.count)
    if not filled.size:
        return bins
    starts, total = [0], 0
    for i, count in enumerate(bins.count[: filled[-1] + 1].tolist()):
        if total >= MIN_EXAMPLES_OF_BIN or (total == 0 < count and i > 0):
            starts.append(i)
            total = 0
        total += count
    before = np.add.reduceat(bins.count, starts)[:-1]
    if total < MIN_EXAMPLES_OF_BIN and before.any():  # too few at the end to be a bin
        starts = starts[: int(np.flatnonzero(before)[-1]) + 1]
    if filled[-1] + 1 < bins.count.size:
        starts.append(int(filled[-1]) + 1)
    edges = np.append(bins.edges[starts], bins.edges[-1])
    return Bins(edges, *(np.add.reduceat(getattr(bins, f.name), starts) for f in fields(bins)[1:]))


def _noise(bins: Bins) -> float:
    """Return about the ECE that noise gives a calibrated model.

    It is the mean deviation of shares of events: of normal ones, but no more than of one event.
    """
    filled = bins.count > 0
    n, weight = bins.effective[filled], bins.weight[filled]
    p = np.clip(bins.claimed[filled] / weight, 0.0, 1.0)
    deviation = np.minimum(np.sqrt(2 / math.pi * p * (1 - p) / n), 2 * p * (1 - p))
    return float((weight / weight.sum()) @ deviation)


def _parts_of(bins: Bins, names: Sequence[str], level: float | None) -> list[Part]:
    """Return the parts of an evaluation from sums; empty ones are left out."""
    if not bins.count.any():
        return []
    curve, worth = reliability_of(bins, level=level or 0.9), bins.effective
    parts = []
    for i in np.flatnonzero(bins.count).tolist():
        confidence, accuracy, low, high = (min(max(float(x[i]), 0.0), 1.0) for x in curve[1:5])
        p_value = binomial_test(accuracy * float(worth[i]), float(worth[i]), confidence)
        sums = int(bins.count[i]), float(curve.share[i])
        parts.append(Part(names[i], *sums, confidence, accuracy, low, high, p_value))
    return parts


def _empty_part(name: str) -> Part:
    """Return a part without examples."""
    return Part(name, 0, 0.0, math.nan, math.nan, math.nan, math.nan, 1.0)


def binomial_test(right: float, n: float, probability: float) -> float:
    """Return the two-sided p-value of ``right`` events in ``n`` with a mean probability.

    Where the probabilities differ, the sum of events varies less than a binomial one (Hoeffding
    1956), so that the test is valid, and cautious.

    >>> round(binomial_test(60, 100, 0.5), 4), binomial_test(5, 5, 1.0)
    (0.0569, 1.0)
    """
    p = min(max(probability, 0.0), 1.0)
    # tails of the binomial distribution; scipy.stats would take a second for 5,000 classes
    at_least = float(betainc(right, n - right + 1, p)) if right > 0 else 1.0
    at_most = float(betainc(n - right, right + 1, 1 - p)) if right < n else 1.0
    return min(1.0, 2 * min(at_least, at_most))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979).

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    order = np.argsort(p_values, kind="stable")
    adjusted, running = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order.tolist()):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
