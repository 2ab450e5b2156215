"""Fit a calibrator on predictions of any size, and measure it on them or out of fold."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import (
    IGNORED,
    IntArray,
    Values,
    known_rows,
    spread,
    warnings_at_caller,
)
from calibrant._core.chunks import (
    EstimandChoice,
    Examples,
    examples as check_examples,
)
from calibrant._core.class_names import kept_names
from calibrant._core.messages import comma_separated, printable
from calibrant._core.showing import as_html, one_line
from calibrant.calibrators import fit_inputs
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.fit_inputs import folds as folds_of
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.records import RecordsCalibrator, bounded, records_of
from calibrant.calibrators.registry import make_calibrator
from calibrant.data.dataset import FIT_SPLITS, Dataset, Split
from calibrant.data.files import Data, as_dataset
from calibrant.data.formats import Array
from calibrant.data.shards import full_key, located
from calibrant.metrics.accumulator import Accumulator
from calibrant.workflows.effect import (
    Effect,
    _check_inputs,
    _effect_of,
    input_names,
    method_in_use,
    whole_inputs,
)
from calibrant.workflows.large import (
    ShardPasses,
    _in_memory,
    _is_large,
    _is_many,
    _sampled_arrays,
    _warn_of_sample,
)

if TYPE_CHECKING:
    import pandas as pd

WHOLE = 1 << 27
"""Number of logits up to which a split is read whole for a method that the table would do for."""


def fit(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    method: str | Calibrator = "auto",
    probs: Values | None = None,
    features: Values | None = None,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    estimand: EstimandChoice = "auto",
) -> Calibrator:
    """Fit a calibrator on logits and labels, or on a prediction file of any size.

    It ends on the device of the logits. Methods that give each row a temperature are fitted from
    the log-partition table, a few hundred bytes per row; the others read the split whole. ``auto``
    reads it whole if it has at most 2^27 logits; beyond, it chooses among the methods that the
    table suffices for.

    Of more than 2^22 rows the table is that of a random sample; a warning states what this costs.
    Splits of more than 2^30 logits are not read whole: ``vector``, ``matrix``, ``dirichlet`` and
    the methods for tags are fitted by sums over the shards, pass after pass, with penalties that
    are chosen on a sample, and the others on a sample.

    Parameters
    ----------
    data : logits (..., classes) or (n,), path, Dataset, mapping or data frame
        As for :func:`calibrant.evaluate`: a prediction file may be a folder or a glob of shards.
    labels : (...) integers
        With logits; -100 is ignored.
    method : str or Calibrator
        A name from ``CALIBRATORS``, or from ``TAG_CALIBRATORS`` for tags, or a calibrator, which
        is then fitted in place.
    probs, features : optional
        Probabilities instead of logits, and inputs of the last layer, beside arrays.
    split : str, optional
        Split to fit on; ``val``, else the unnamed split, by default. Never ``test`` unless named.
    options : dict, optional
        Arguments of the constructor, if the method is a name.
    sample_weight, groups : str or array, optional
        Names of columns or, beside arrays, values for each example. Examples of one group stay
        together where a method cross-validates; with groups the split is read whole.
    estimand : {"auto", "multilabel"}
        ``"multilabel"`` if each column is a tag with labels 0 and 1 of its own. Other estimands
        of :func:`calibrant.evaluate` make no difference to a fit.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> fitted = fit(sample_path(), method="ts")
    >>> round(float(fitted.temperature_), 2)
    1.83
    """
    calibrator = make_calibrator(method, options, estimand)
    beside: Any = {"probs": probs, "features": features}
    beside |= {"sample_weight": sample_weight, "groups": groups}
    dataset = as_dataset(data, labels, multilabel=calibrator.multilabel, **beside)
    examples = _fitted(dataset, calibrator, split)
    return calibrator.to(_device(calibrator, examples, data, probs))


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted calibrator, its effect on the examples of the fit, and the name of their split."""

    calibrator: Calibrator
    effect: Effect
    split: str

    def describe(self) -> Iterator[str]:
        """Yield lines about what was learned."""
        if reasons := getattr(self.calibrator, "reasons_", ""):
            said = self.calibrator.left_out()  # of which the fit has warned
            yield "\n".join(line for line in reasons.splitlines() if line not in said)
        counted = "labels" if self.calibrator.multilabel else "examples"
        yield f"{self.effect.before.n:,} {counted}; {method_in_use(self.calibrator).describe()}"
        low, high = self.effect.temperatures or (1.0, 1.0)
        if low < high:
            yield f"temperatures of the examples from {low:.4g} to {high:.4g}"
        if changed := self.effect.argmax_changed:
            what = "prediction" if self.calibrator.multilabel else "predicted class"
            yield f"the {what} of {changed:,} {counted} changes"

    def __repr__(self) -> str:
        return one_line(self, repr(self.calibrator), repr(self.effect))

    def __str__(self) -> str:
        return printable("\n".join([*self.describe(), str(self.effect)]))

    _repr_html_ = as_html

    def to_frame(self) -> pd.DataFrame:
        """Return the metrics before and after, as a frame with a row for each. Needs pandas."""
        return self.effect.to_frame()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        before, after, argmax_changed, temperatures = self.effect
        return {
            "split": self.split or None,
            "n": before.n,
            "classes": before.classes,
            "estimand": before.estimand,
            "parameters": self.calibrator.size(before.classes),
            "learned": self.calibrator.learned(),
            "temperature": dict(zip(("low", "high"), temperatures or (None, None), strict=True)),
            "argmax_changed": argmax_changed,
            "before": before.to_dict()["metrics"],
            "after": after.to_dict()["metrics"],
        }


def fit_and_measure(
    data: Data,
    *,
    method: str | Calibrator = "auto",
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    estimand: EstimandChoice = "auto",
    metrics: Sequence[str] | None = None,
) -> Fit:
    """Fit as :func:`fit` does, and measure the same examples before and after.

    There are no intervals: figures of examples that a fit has seen are too good.
    """
    calibrator = make_calibrator(method, options, estimand)
    estimand = calibrator.estimand_for(estimand)
    beside: Any = {"sample_weight": sample_weight, "groups": groups}
    dataset = as_dataset(data, multilabel=calibrator.multilabel, **beside)
    examples = _fitted(dataset, calibrator, split)
    stream = Accumulator(estimand=estimand, pairs=True, metrics=metrics, level=None)
    effect = _effect_of([calibrator], examples, stream)
    return Fit(calibrator.to(_device(calibrator, examples, data)), effect, examples.name)


def _device(
    calibrator: Calibrator, split: Split, data: Data | Values | None, probs: Values | None = None
) -> torch.device:
    """Device of the scores of a split, which datasets hold as arrays, or else of a calibrator."""
    scores = data if probs is None else probs
    if isinstance(data, Mapping):
        scores = data.get(full_key(split.name, split.domain))
    return scores.device if isinstance(scores, Tensor) else calibrator.device


def _fitted(dataset: Dataset, calibrator: Calibrator, split: str | None) -> Split:
    """Fit on a split, from the table if that suffices, and return the split."""
    if split is None and dataset.splits and dataset.find(None, FIT_SPLITS) is None:
        raise ValueError(
            f"{dataset.path} has no split 'val' and no unnamed split to fit on, only "
            f"{comma_separated(dataset.splits)}: name a split (split=, --fit-split), or use "
            "--cross-fit"
        )
    examples = dataset.split(split, FIT_SPLITS)
    examples.warn_of_mistakes()
    floored = examples.floored()
    if _fits_from_table(calibrator, floored):
        some = bounded(floored)
        records = records_of(some)
        _fit_watched(calibrator, floored, records)
        if some is not floored:
            _warn_of_sample(calibrator, len(records), floored)
    elif _is_large(floored):
        _fit_large(calibrator, floored)
    else:
        _fit_whole(calibrator, floored)
    return examples


def _fit_large(calibrator: Calibrator, split: Split) -> None:
    """Fit on a sample and then, if sums suffice, on all examples."""
    _check_inputs(calibrator, split)
    sample = _in_memory(split, columns=input_names(calibrator))
    if not calibrator.fits_passes:
        _fit_whole(calibrator, sample)
        _warn_of_sample(calibrator, sample.rows, split)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all examples may have what the sample lacks
        _fit_whole(calibrator, sample)
    calibrator.refine(ShardPasses(split))


def _fit_watched(calibrator: Calibrator, split: Split, records: Records) -> None:
    """Fit on records of a split, which warns as a fit on its arrays does.

    Unless it is too large to be read again for that.
    """
    with warnings_at_caller():
        if split.rows * math.prod(split.shape) > WHOLE:
            _fit_table(calibrator, split, records)
        else:
            with fit_inputs.watched(calibrator, _looked_at(split)[0]):
                _fit_table(calibrator, split, records)


def _looked_at(split: Split, *calibrators: Calibrator) -> tuple[Examples, dict[str, Array]]:
    """Return a sample of a split that is looked at for mistakes, checked and as arrays by name."""
    weight = [] if split.dataset.sample_weight is None else ["sample_weight"]
    columns = [name for name in input_names(*calibrators) if name in split.keys]
    most = fit_inputs.most_rows(split.classes) * split.classes
    arrays = _sampled_arrays(split, [*columns, *weight], most)
    estimand: EstimandChoice = "multilabel" if split.dataset.multilabel else "top_label"
    with located(split.path):
        scores = arrays["logits"], arrays["labels"], arrays.get("sample_weight")
        return check_examples(*scores, estimand), arrays


def _fits_from_table(calibrator: Calibrator, split: Split) -> bool:
    """Return True if the table of a split suffices: no groups, features or logits are used."""
    features = calibrator.uses_features and split.has_features
    logits = calibrator.uses_logits and split.rows * math.prod(split.shape) <= WHOLE
    return calibrator.fits_records and split.dataset.groups is None and not (features or logits)


def _fit_table(calibrator: Calibrator, split: Split, records: Records) -> Calibrator:
    """Fit on records of a split."""
    cast(RecordsCalibrator, calibrator).fit_records(records, one_logit=not split.shape)
    return _completed(calibrator, split)


def _fit_whole(calibrator: Calibrator, split: Split, labels: IntArray | None = None) -> Calibrator:
    """Fit on the arrays of a split; other labels may leave out some of its rows."""
    targets = split.labels if labels is None else labels
    beside: dict[str, Any] = {"sample_weight": split.weights}
    if calibrator.uses_features:
        features: Any = split.features if split.has_features else None
    else:
        _check_inputs(calibrator, split)
        features = whole_inputs(calibrator, split)
    if features is not None:
        beside |= {"features": features, "head": split.dataset.head}
    if split.groups is not None:
        beside["groups"] = spread(split.groups, targets.shape, "groups")
    logits = split.logits
    with located(split.path), known_rows():  # the split has told, with the name of the file
        calibrator.fit(logits, targets, **beside)
    return _completed(calibrator, split)


def _completed(calibrator: Calibrator, split: Split) -> Calibrator:
    """Give a calibrator what a split knows beside its arrays: names of classes, and the floor."""
    calibrator.class_names_ = kept_names(split.dataset.class_names)
    calibrator.set_floor(split.floor)
    return calibrator


@dataclass(frozen=True, eq=False, repr=False)
class CrossFit(Fit):
    """A calibrator fitted on all examples, and the effect of its method out of fold.

    ``folds`` (rows,) are the numbers of the folds, -1 for rows without label; ``calibrators`` has
    one for each fold, fitted on the others.
    """

    folds: IntArray
    calibrators: list[Calibrator]


def cross_fit(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    method: str | Calibrator = "auto",
    probs: Values | None = None,
    features: Values | None = None,
    folds: int = 5,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    estimand: EstimandChoice = "auto",
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
) -> CrossFit:
    """Fit on all examples, and measure the method on the same ones out of fold.

    For predictions without a validation set. The examples are cut into folds in which every
    class has its share, and each fold is calibrated by a fit on the others. The figures describe
    the method, fitted on ``(folds - 1) / folds`` of the examples. Of more than 2^22 examples or
    2^30 logits a random sample is used; a warning states what this costs.

    Parameters
    ----------
    data, labels, method, probs, features, options, sample_weight
        As in :func:`fit`.
    folds : int
        Number of folds, at least 2.
    split : str, optional
        Split to use; ``val``, else the unnamed split, else ``test``, by default.
    groups : str or array, optional
        A column; the rows of one group are in one fold, and classes are left to chance.
    estimand, bins, metrics, level, seed
        As in :func:`calibrant.evaluate`; the seed is also that of the folds.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> honest = 2 * rng.normal(size=(2000, 5))
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> fitted = cross_fit(2 * honest, labels, method="ts", level=None)
    >>> round(float(fitted.calibrator.temperature_), 1)
    2.0
    >>> fitted.effect.after["ece"].value < fitted.effect.before["ece"].value / 4
    True
    """
    calibrator = make_calibrator(method, options, estimand)
    estimand = calibrator.estimand_for(estimand)
    beside: Any = {"probs": probs, "features": features}
    beside |= {"sample_weight": sample_weight, "groups": groups}
    dataset = as_dataset(data, labels, multilabel=calibrator.multilabel, **beside)
    examples = dataset.split(split, (*FIT_SPLITS, "test"))
    examples.warn_of_mistakes()
    name, device = examples.name, _device(calibrator, examples, data, probs)
    if _is_many(examples):
        _check_inputs(calibrator, examples)
        whole = examples.floored()
        examples = _in_memory(whole, seed, input_names(calibrator))
        _warn_of_sample(calibrator, examples.rows, whole)
    fold = _row_folds(examples, folds, seed)
    with warnings_at_caller():
        floored = examples.floored()
    calibrators = [copy.deepcopy(calibrator) for _ in range(folds)]
    from_table = _fits_from_table(calibrator, floored)
    records = records_of(floored) if from_table else None
    if records is None:
        _fit_whole(calibrator, floored)
    else:
        _fit_watched(calibrator, floored, records)
    with warnings.catch_warnings(), fit_inputs.told():
        warnings.simplefilter("ignore")  # the fit on everything has warned
        for i, one in enumerate(calibrators):
            _fit_without(one, floored, fold, i, records)
    stream = Accumulator(
        bins=bins, estimand=estimand, pairs=True, metrics=metrics, level=level, seed=seed
    )
    out_of_fold = _effect_of(calibrators, examples.with_column("fold", fold), stream)
    for one in (calibrator, *calibrators):
        one.to(device)
    return CrossFit(calibrator, out_of_fold, name, fold, calibrators)


def _fit_without(
    calibrator: Calibrator, split: Split, fold: IntArray, left_out: int, records: Records | None
) -> Calibrator:
    """Fit on all folds but one: on the records of a split or, without them, on its arrays.

    ``fold`` (rows,) is -1 for rows that are in none.
    """
    labels = split.labels
    of_label = spread(fold, labels.shape, "fold")
    seen = (of_label >= 0) & (of_label != left_out)
    if records is not None:
        return _fit_table(calibrator, split, records.take(seen[labels != IGNORED]))
    return _fit_whole(calibrator, split, np.where(seen, labels, IGNORED))


def _row_folds(split: Split, count: int, seed: int, *, stratified: bool = True) -> IntArray:
    """Return the fold of each row, -1 for rows without label; groups stay together.

    Each fold has its share of every class, unless that is left to chance.
    """
    labels, groups = split.labels, split.groups
    labelled = np.flatnonzero((labels != IGNORED).reshape(len(labels), -1).any(1))
    if groups is not None and groups.shape != (len(labels),):
        raise ValueError(f"groups must be one value per row, got {groups.shape}")
    kept = None if groups is None else groups[labelled]
    units = len(labelled) if kept is None else len(np.unique(kept))
    if not 2 <= count <= units:
        what = "labelled rows" if kept is None else f"values of {split.dataset.groups}"
        raise ValueError(f"folds must be from 2 to the number of {what}, {units}, got {count}")
    by_class = stratified and labels.ndim == 1  # tokens have no class
    strata = labels[labelled] if by_class else np.zeros_like(labelled)
    fold = np.full(len(labels), -1)
    for i, rows in enumerate(folds_of(strata, count, groups=kept, seed=seed)):
        fold[labelled[rows]] = i
    return fold
