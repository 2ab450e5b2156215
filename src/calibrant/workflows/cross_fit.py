"""Cross-fitting: fit and measure on the same examples, out of fold."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrant._core.checks import IGNORED, IntArray, Values, spread
from calibrant._core.chunks import Progress
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.folds import folds as folds_of
from calibrant.calibrators.registry import make_calibrator
from calibrant.data.dataset import FIT_SPLITS, Data, Split, as_dataset
from calibrant.metrics.accumulator import Accumulator
from calibrant.workflows.effect import measure
from calibrant.workflows.fit import Fit, fit_table, fit_whole, fits_from_table


@dataclass(frozen=True, eq=False)
class CrossFit(Fit):
    """A calibrator fitted on all examples, and its method measured out of fold.

    Attributes
    ----------
    calibrator : Calibrator
        Fitted on everything.
    effect : Effect
        Before and after; each example was calibrated by a fit on the other folds.
    split : str
        The split that was used; ``""`` are the plain arrays.
    folds : (rows,) int
        Number of the fold of each row; -1 if it has no label.
    calibrators : list of Calibrator
        One for each fold, fitted on the others.
    """

    folds: IntArray
    calibrators: list[Calibrator]


def cross_fit(
    data: Data,
    method: str | Calibrator = "auto",
    *,
    folds: int = 5,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
    progress: Progress | None = None,
) -> CrossFit:
    """Fit on all examples, and measure the method on the same ones out of fold.

    For predictions without a validation set. The examples are cut into folds in which every
    class has its share, and each fold is calibrated by a fit on the others, so that no example
    is measured by a calibrator that has seen it. The figures describe the method, fitted on
    ``(folds - 1) / folds`` of the examples; the calibrator for use is fitted on all of them.

    Parameters
    ----------
    data, method, options, sample_weight
        As in :func:`fit`.
    folds : int
        Number of folds, at least 2.
    split : str, optional
        Split to use; ``val``, else the plain arrays, else ``test``, by default.
    groups : str or array, optional
        A column; the rows of one group are in one fold, and classes are left to chance.
    bins, metrics, level
        As in :func:`calibrant.evaluate`.
    seed : int
        Seed of the folds and of the draws behind the intervals.
    progress : callable, optional
        Called with (examples done, examples in all) during each walk over the logits.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> honest = 2 * rng.normal(size=(2000, 5))
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> fitted = cross_fit({"logits": 2 * honest, "labels": labels}, "ts", level=None)
    >>> round(float(fitted.calibrator.temperature_), 1)
    2.0
    >>> fitted.effect.after["ece"].value < fitted.effect.before["ece"].value / 4
    True
    """
    calibrator = make_calibrator(method, options)
    dataset = as_dataset(data, sample_weight=sample_weight, groups=groups)
    examples = dataset.split(split, (*FIT_SPLITS, "test"))
    examples.warn_if_probs()
    fold = row_folds(examples, folds, seed)
    calibrators = _fit_folds(calibrator, examples, fold, folds, progress)
    stream = Accumulator(bins=bins, pairs=True, metrics=metrics, level=level, seed=seed)
    meter = measure(calibrators, examples.with_column("fold", fold), stream, progress)
    return CrossFit(calibrator, meter.effect(), examples.name, fold, calibrators)


def _fit_folds(
    calibrator: Calibrator,
    split: Split,
    fold: IntArray,
    folds: int,
    progress: Progress | None,
) -> list[Calibrator]:
    """Fit the calibrator on everything; return copies of it, each fitted without one fold."""
    of_label = spread(fold, split.labels.shape, "fold")
    of_record = of_label[split.labels != IGNORED]
    records = split.records(progress=progress) if fits_from_table(calibrator, split) else None

    def fit_without(one: Calibrator, left_out: int) -> Calibrator:
        if records is not None:
            return fit_table(one, split, records.take(of_record != left_out))
        return fit_whole(one, split, np.where(of_label == left_out, IGNORED, split.labels))

    copies = [copy.deepcopy(calibrator) for _ in range(folds)]
    fit_without(calibrator, folds)  # leaves out nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fit on everything has given them
        return [fit_without(one, i) for i, one in enumerate(copies)]


def row_folds(split: Split, count: int, seed: int) -> IntArray:
    """Return the fold of each row, -1 for rows without label.

    Classes are dealt out in equal shares. Groups stay together, and classes are left to chance.
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
    strata = labels[labelled] if labels.ndim == 1 else np.zeros_like(labelled)  # tokens: no class
    fold = np.full(len(labels), -1)
    for i, rows in enumerate(folds_of(strata, count, groups=kept, seed=seed)):
        fold[labelled[rows]] = i
    return fold
