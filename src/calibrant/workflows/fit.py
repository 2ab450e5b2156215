"""Fit a calibrator on predictions of any size."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from calibrant._core.checks import IntArray, Values, spread
from calibrant._core.chunks import Progress
from calibrant._core.logpartition import Records
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator, RecordsCalibrator
from calibrant.calibrators.registry import make_calibrator
from calibrant.data.columns import full_key
from calibrant.data.dataset import FIT_SPLITS, Data, Split, as_dataset
from calibrant.data.shards import located
from calibrant.metrics.accumulator import Accumulator
from calibrant.workflows.effect import Effect, measure, method_in_use


def fit(
    data: Data,
    method: str | Calibrator = "auto",
    *,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Calibrator:
    """Fit a calibrator on a prediction file, or on a folder or glob of shards.

    Methods that give each row a temperature are fitted from the log-partition table, a few
    hundred bytes per row, so that logits are never held whole. The others read the split whole.

    Parameters
    ----------
    data : path, Dataset, or mapping
        A prediction file, a folder, a glob, or arrays by their keys in a file.
    method : str or Calibrator
        A name from ``CALIBRATORS``, or a calibrator, which is then fitted in place.
    split : str, optional
        Split to fit on; ``val``, else the plain arrays, by default. Never ``test`` unless named.
    options : dict, optional
        Arguments of the constructor, if the method is given by name.
    sample_weight, groups : str or array, optional
        Names of columns or, beside arrays, values for each example. Examples of one group stay
        together where a method cross-validates; with groups the split is read whole.
    executor : concurrent.futures.Executor, optional
        Each shard becomes a task, for methods that use the table.
    progress : callable, optional
        Called with (examples done, examples in all) after each chunk or shard.

    Returns
    -------
    Calibrator
        Fitted.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> fitted = fit(sample_path(), "ts")
    >>> round(float(fitted.temperature_), 2)
    1.83
    """
    calibrator = make_calibrator(method, options)
    examples = fit_split(data, split, sample_weight, groups)
    return fit_on(calibrator, examples, executor, progress)


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted calibrator, and its effect.

    Attributes
    ----------
    calibrator : Calibrator
    effect : Effect
        Before and after, on the examples of the fit.
    split : str
        The split that was fitted on; ``""`` are the plain arrays.
    """

    calibrator: Calibrator
    effect: Effect
    split: str

    @property
    def artifact(self) -> nn.Module:
        """What to save: the calibrator, or the retrained classifier that it wraps."""
        module: nn.Module = getattr(self.calibrator, "retrained", self.calibrator)
        return module

    def describe(self) -> Iterator[str]:
        """Yield lines about what was learned."""
        if reasons := getattr(self.calibrator, "reasons_", ""):
            yield reasons
        yield f"{self.effect.before.n:,} examples; {method_in_use(self.calibrator).describe()}"
        low, high = self.effect.temperatures or (1.0, 1.0)
        if low < high:
            yield f"temperatures of the examples from {low:.4g} to {high:.4g}"
        if self.effect.argmax_changed:
            yield f"the predicted class of {self.effect.argmax_changed:,} examples changes"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        before, after, argmax_changed, temperatures = self.effect
        low, high = temperatures or (None, None)
        return {
            "split": self.split or None,
            "n": before.n,
            "classes": before.classes,
            "parameters": self.calibrator.size(before.classes),
            "learned": self.calibrator.learned(),
            "temperature": {"low": low, "high": high},
            "argmax_changed": argmax_changed,
            "before": before.to_dict()["metrics"],
            "after": after.to_dict()["metrics"],
        }


def fit_and_measure(
    data: Data,
    method: str | Calibrator = "auto",
    *,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    metrics: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Fit as :func:`fit` does, and measure the same examples before and after.

    There are no intervals: figures of examples that a fit has seen are too good.
    """
    calibrator = make_calibrator(method, options)
    examples = fit_split(data, split, sample_weight, groups)
    fit_on(calibrator, examples, progress=progress)
    stream = Accumulator(pairs=True, metrics=metrics, level=None)
    meter = measure([calibrator], examples, stream, progress)
    return Fit(calibrator, meter.effect(), examples.name)


def fit_split(
    data: Data,
    split: str | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
) -> Split:
    """Return the split to fit on: val, else the plain arrays; never test unless named."""
    dataset = as_dataset(data, sample_weight=sample_weight, groups=groups)
    if split is None and dataset.splits and dataset.find(None, FIT_SPLITS) is None:
        raise ValueError(
            f"{dataset.path} has no split 'val' and no plain arrays to fit on, only "
            f"{comma_separated(dataset.splits)}: name a split (--split), or fit and measure on the "
            "same examples by cross-fitting (--cross-fit)"
        )
    return dataset.split(split, FIT_SPLITS)


def fit_on(
    calibrator: Calibrator,
    split: Split,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Calibrator:
    """Fit on a split, from the table if that suffices."""
    split.warn_if_probs()
    if not fits_from_table(calibrator, split):
        return fit_whole(calibrator, split)
    return fit_table(calibrator, split, split.records(executor, progress))


def fits_from_table(calibrator: Calibrator, split: Split) -> bool:
    """Whether the table of a split has all that a fit uses: no groups, no features."""
    features = calibrator.uses_features and split.has_features
    return calibrator.fits_records and split.dataset.groups is None and not features


def fit_table(calibrator: Calibrator, split: Split, records: Records) -> Calibrator:
    """Fit on records of a split."""
    return cast(RecordsCalibrator, calibrator).fit_records(records, one_logit=not split.shape)


def fit_whole(calibrator: Calibrator, split: Split, labels: IntArray | None = None) -> Calibrator:
    """Fit on the arrays of a split; other labels may leave out some of its rows."""
    targets = split.labels if labels is None else labels
    beside: dict[str, Any] = {"sample_weight": split.weights}
    if split.has_features if calibrator.uses_features else calibrator.needs_features:
        check_features(calibrator, split)
        beside |= {"features": split.features, "head": split.dataset.head}
    if split.groups is not None:
        beside["groups"] = spread(split.groups, targets.shape, "groups")
    logits = split.logits
    with located(split.path), warnings.catch_warnings():
        # the split has warned of that itself, with the name of the file
        warnings.filterwarnings("ignore", "logits look like probabilities")
        return calibrator.fit(logits, targets, **beside)


def check_features(calibrator: Calibrator, split: Split) -> None:
    """Raise unless every shard of a split has features."""
    if not split.has_features:
        raise ValueError(
            f"{type(calibrator).__name__} needs features: {split.path} has no "
            f"{full_key(split.name, 'features')} in every shard, only "
            f"{comma_separated(split.keys)}; save the inputs of the last layer under that name"
        )
