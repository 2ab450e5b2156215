"""Measure predictions before and after calibration, and how much it lowers the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    Features,
    FloatArray,
    IntArray,
    Values,
    as_weight,
    spread,
    warnings_at_caller,
)
from calibrant._core.chunks import EstimandChoice, joined
from calibrant._core.messages import comma_separated
from calibrant._core.showing import as_drawing, as_html, as_text, frame, one_line
from calibrant.calibrators.base import Calibrator, check_calibrator, feature_rows
from calibrant.calibrators.features import Multicalibration
from calibrant.calibrators.records import TemperatureCalibrator
from calibrant.data.dataset import TEST_SPLITS, S, Split
from calibrant.data.files import Data, as_dataset
from calibrant.data.formats import Array
from calibrant.data.shards import counted, full_key
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation, shown
from calibrant.metrics.reductions import Reduced, labelled_examples, reduce_examples
from calibrant.metrics.registry import METRICS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


POWER, MAX_RATIO = 0.8, 30.0
"""Probability with which a gain is seen on the examples that it needs; and the share of its
standard error beyond which it is none to speak of."""


def method_in_use(calibrator: Calibrator) -> Calibrator:
    """Return the method that ``auto`` chose, or the calibrator itself."""
    chosen = getattr(calibrator, "chosen_", None)
    return calibrator if chosen is None else chosen


class Effect(NamedTuple):
    """Metrics before and after calibration, and the number of predictions that changed.

    The predicted class of an example, or whether it has a tag: above a probability of 0.5.
    ``temperatures`` are the smallest and the largest of an example; None for methods without.
    """

    before: Evaluation
    after: Evaluation
    argmax_changed: int
    temperatures: tuple[float, float] | None

    def __repr__(self) -> str:
        return one_line(self, f"{self.before.n:,} examples", self.headline())

    def headline(self) -> str:
        """Return ECE and NLL, if they are known, before and after, and what changed."""
        names = [name for name in ("ece", "nll") if name in self.before.metrics]
        figures = (
            f"{METRICS[name].title} {shown(name, self.before[name].value)} → "
            f"{shown(name, self.after[name].value)}"
            for name in names or list(self.before)[:1]
        )
        return ", ".join([*figures, self.changes()])

    @property
    def improves(self) -> bool:
        """True if the log-likelihood is not worse than before."""
        if "nll" not in self.before.metrics:
            return True
        return not self.after["nll"].value > self.before["nll"].value

    def changes(self) -> str:
        """Return in words how many predictions changed."""
        counted = "labels" if self.before.estimand == "multilabel" else "examples"
        if not self.argmax_changed:
            return "no prediction changed"
        return f"the prediction of {self.argmax_changed:,} {counted} changed"

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: errors as fractions, undefined values as None."""
        low, high = self.temperatures or (None, None)
        return {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "argmax_changed": self.argmax_changed,
            "temperature": {"low": low, "high": high},
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each metric.

        Columns are ``metric``, and ``NAME``, ``NAME_low`` and ``NAME_high`` for before and after.
        Errors are fractions, undefined values NaN. Needs pandas.
        """
        return frame(
            {"metric": metric}
            | {
                name + end: value
                for name, part in (("before", self.before), ("after", self.after))
                for end, value in zip(("", "_low", "_high"), part[metric], strict=True)
            }
            for metric in self.before
        )

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes | Figure:
        """Draw reliability diagrams before and after, side by side; with ``ax`` that after.

        Options are those of :func:`calibrant.show.figures.reliability_diagram`. Needs matplotlib.
        """
        drawn: Axes | Figure = as_drawing(self, ax, **options)
        return drawn


@warnings_at_caller()
def effect(
    calibrator: Calibrator,
    data: Data | Values,
    labels: Values | None = None,
    *,
    features: Values | None = None,
    split: str | None = None,
    sample_weight: Values | str | None = None,
    estimand: EstimandChoice = "auto",
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
) -> Effect:
    """Measure predictions before and after calibration; logits are never held whole.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    data : logits, path, Dataset, mapping or data frame
        As for :func:`calibrant.evaluate`.
    labels : (...) integers
        With logits; -100 is ignored.
    features : (..., width), optional
        With logits, for calibrators that need them.
    split, sample_weight, estimand, bins, metrics, level, seed
        As in :func:`calibrant.evaluate`.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> from calibrant.data import open_dataset, sample_path
    >>> data = open_dataset(sample_path())
    >>> val = data.split("val")
    >>> changed = effect(TemperatureScaling().fit(val.logits, val.labels), data, level=None)
    >>> [round(e["ece"].value, 4) for e in (changed.before, changed.after)]
    [0.0424, 0.0091]
    """
    check_calibrator(calibrator)
    estimand = calibrator.estimand_for(estimand)
    dataset = as_dataset(
        data,
        labels,
        features=features,
        sample_weight=sample_weight,
        multilabel=calibrator.multilabel,
    )
    examples = dataset.in_order(calibrator.class_names_).split(split, TEST_SPLITS)
    examples.warn_of_mistakes()
    stream = Accumulator(
        bins=bins, estimand=estimand, pairs=True, metrics=metrics, level=level, seed=seed
    )
    return _effect_of([calibrator], examples, stream)


def _effect_of(calibrators: Sequence[Calibrator], split: Split, stream: Accumulator) -> Effect:
    """Measure a split before and after calibration, by streams of the form of an empty one."""
    in_use = list(map(method_in_use, calibrators))
    sums = calibrated_sums(in_use, split, stream.like(), before=stream.like())
    assert sums.before is not None
    temperatures = (sums.low, sums.high) if sums.low <= sums.high else None
    return Effect(sums.before.compute(), sums.after.compute(), sums.changed, temperatures)


class KeptLosses:
    """Predictions and losses of every example, collected over chunks and shards."""

    def __init__(self, estimand: EstimandChoice) -> None:
        self.estimand = estimand
        self._parts: list[Reduced] = []

    def like(self) -> KeptLosses:
        """Return losses of the same form, of no examples."""
        return KeptLosses(self.estimand)

    def merge(self, other: KeptLosses) -> None:
        """Add the losses of other examples."""
        self._parts += other._parts

    def add(self, logits: Any = None, labels: Any = None, **others: Any) -> None:
        """Add the losses of a batch."""
        checked, _ = labelled_examples(logits, labels, estimand=self.estimand, **others)
        self._parts.append(reduce_examples(checked))

    def joined(self) -> Reduced:
        """Return the numbers of all examples, ``(n,)`` each."""
        return Reduced(*joined(self._parts))


class _CalibratedSums(Generic[S]):
    """Sums of predictions after calibration, and before it if that is asked for.

    One calibrator serves all rows, several serve a fold each.
    """

    def __init__(
        self,
        calibrators: Sequence[Calibrator],
        after: S,
        before: S | None = None,
    ) -> None:
        self.calibrators, self.after, self.before = calibrators, after, before
        self.changed = 0
        self.low, self.high = math.inf, -math.inf  # temperatures

    def like(self) -> _CalibratedSums[S]:
        """Return sums of the same form that have seen nothing."""
        before = None if self.before is None else self.before.like()
        return _CalibratedSums(self.calibrators, self.after.like(), before)

    def merge(self, other: _CalibratedSums[S]) -> None:
        """Add the sums of other rows."""
        self.after.merge(other.after)
        if self.before is not None and other.before is not None:
            self.before.merge(other.before)
        self.changed += other.changed
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def add(self, **columns: Array) -> None:
        """Add rows, each calibrated by the calibrator of its fold."""
        weight = columns.get("sample_weight")
        if self.before is not None:
            domain = "probs" if "probs" in columns else "logits"
            stated = {domain: columns[domain]}
            self.before.add(labels=columns["labels"], sample_weight=weight, **stated)
        kept = counted(columns)
        if not kept.any():
            return
        logits, labels = columns["logits"], columns["labels"]
        tags = self.calibrators[0].multilabel
        if tags:  # rows stay whole, without what may be anything
            logits, labels = np.where(kept, logits, 0), np.where(kept, labels, IGNORED)
        rows = np.asarray(kept.any(-1)) if tags else kept
        before, labels = logits[rows], labels[rows]
        after = np.empty(before.shape, np.float32 if before.dtype.itemsize <= 4 else np.float64)
        fold = columns.get("fold")
        folds = None if fold is None else spread(fold, rows.shape, "fold")[rows]
        for i, calibrator in enumerate(self.calibrators):
            own = slice(None) if folds is None else folds == i
            if not len(before[own]):
                continue
            if self.before is None or not isinstance(calibrator, TemperatureCalibrator):
                inputs = calibrator.input_features(columns, rows)
                after[own] = calibrator.transform(before[own], feature_rows(inputs, own))
            else:
                after[own], temperatures = calibrator.transform_with_temperature(before[own])
                self.low = min(self.low, float(temperatures.min()))
                self.high = max(self.high, float(temperatures.max()))
        weights = None if weight is None else spread(weight, kept.shape, "sample_weight")[rows]
        self.after.add(after, labels, sample_weight=weights)
        changed = _predicted(before, tags=tags) != _predicted(after, tags=tags)
        self.changed += int((changed & kept[rows]).sum())


def calibrated_sums(
    calibrators: Sequence[Calibrator],
    split: Split,
    after: S,
    before: S | None = None,
) -> _CalibratedSums[S]:
    """Add a split to streams; one calibrator serves all rows, several serve a fold each."""
    for calibrator in calibrators:
        _check_inputs(calibrator, split)
    columns = ["logits", "labels", "sample_weight", *input_names(*calibrators)]
    columns += ["fold"] if len(calibrators) > 1 else []
    # before calibration, probabilities are measured as they are stated
    columns += ["probs"] if before is not None and split.domain == "probs" else []
    return split.reduce(_CalibratedSums(calibrators, after, before), *columns)


def _predicted(logits: Array, *, tags: bool) -> Array:
    """Return the predicted class, or tags; one logit is that of class 1 against 0."""
    return np.asarray(logits > 0 if tags or logits.ndim == 1 else logits.argmax(-1))


def _check_inputs(calibrator: Calibrator, split: Split) -> None:
    """Raise unless every shard of a split has the columns that a calibrator reads."""
    lacking = [name for name in calibrator.input_columns if name not in split.keys]
    if not lacking:
        return
    keys = comma_separated(full_key(split.name, name) for name in lacking)
    name, has = type(calibrator).__name__, comma_separated(split.keys)
    if lacking == ["features"]:
        columns = "name metadata columns with columns= or --columns, or "
        other = columns if isinstance(calibrator, Multicalibration) else ""
        raise ValueError(
            f"{name} needs features: {split.path} has no {keys} in every shard, only {has}; "
            f"{other}save the inputs of the last layer as {keys}"
        )
    raise ValueError(
        f"{name} reads the metadata columns {comma_separated(calibrator.input_columns)}: "
        f"{split.path} has no {keys} in every shard, only {has}; add what is missing"
    )


def input_names(*calibrators: Calibrator | None) -> list[str]:
    """Return the columns that calibrators read beside the logits, each once."""
    used = [calibrator for calibrator in calibrators if calibrator is not None]
    return list(dict.fromkeys(name for one in used for name in one.input_columns))


def whole_inputs(calibrator: Calibrator, split: Split, rows: Any = None) -> Features | None:
    """Return the ``features=`` of a calibrator for a split, or some of its rows, read whole."""
    arrays = {
        name: split.features if name == "features" else split.read(name)
        for name in calibrator.input_columns
    }
    return calibrator.input_features(arrays, rows)


@dataclass(frozen=True)
class LossReduction:
    """By how much calibration lowers the log loss of an example, on average.

    The interval is that of the differences between pairs of losses, of the same examples.
    """

    value: float
    low: float
    high: float
    needed: int | None
    """Examples that would probably show a gain of this size; None if there is none to show."""

    def __str__(self) -> str:
        value, low, high = self.value, self.low, self.high
        if value < 0:
            value, low, high = -value, -high, -low
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"


class PairedLosses(NamedTuple):
    """Examples after calibration ``(n,)``, and how much lower the loss of each is than before.

    Examples of one ``unit``, numbered from 0, depend on each other: tags of an example, tokens of a
    text and members of a group.
    """

    top: FloatArray
    correct: BoolArray
    lower: FloatArray
    weight: FloatArray | None
    unit: IntArray

    def reduction(self, level: float) -> LossReduction:
        """Return by how much losses are lower on average, with an interval by units."""
        mean, reach, error = mean_by_units(self.lower, self.weight, self.unit, level)
        # to be seen with a probability of 0.8, a gain must be so many of its standard errors
        ratio = (reach + float(ndtri(POWER))) * error / mean if mean > 0 else math.inf
        needed = math.ceil(self.lower.size * ratio**2) if ratio < MAX_RATIO else None
        return LossReduction(mean, mean - reach * error, mean + reach * error, needed)


def mean_by_units(
    values: FloatArray, weight: FloatArray | None, unit: IntArray, level: float
) -> tuple[float, float, float]:
    """Return the mean of values ``(n,)``, its reach in standard errors, and the standard error.

    Values of one ``unit``, numbered from 0, depend on each other. The error of one unit alone is
    infinite.
    """
    share = np.full(values.size, 1 / values.size) if weight is None else weight / weight.sum()
    mean = float(share @ values)
    by_unit = np.bincount(unit, share * (values - mean))
    units = by_unit.size
    if units < 2:
        return mean, 1.0, math.inf
    error = math.sqrt(float(by_unit @ by_unit) * units / (units - 1))
    return mean, float(stdtrit(units - 1, (1 + level) / 2)), error


def weights_and_units(split: Split) -> tuple[FloatArray | None, IntArray]:
    """Return the weights of the labels of a split, and numbers of what depends on each other."""
    kept, weight = split.labels != IGNORED, None
    if split.weights is not None:
        weight = as_weight(split.weights, kept.shape).reshape(kept.shape)[kept]
    row = np.nonzero(kept)[0]
    unit = row if split.groups is None else split.groups[row]
    return weight, np.unique(unit, return_inverse=True)[1]


def paired_losses(calibrators: Sequence[Calibrator], split: Split) -> PairedLosses:
    """Return the losses of a split; one calibrator serves all rows, several serve a fold each."""
    estimand: EstimandChoice = "multilabel" if calibrators[0].multilabel else "top_label"
    losses, stated = KeptLosses(estimand), KeptLosses(estimand)
    calibrated_sums(calibrators, split, losses, before=stated)
    after, before = losses.joined(), stated.joined()
    return PairedLosses(after.top, after.correct, before.nll - after.nll, *weights_and_units(split))
