"""Cross-fitting: one set of examples to fit on and, out of fold, to measure."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import IGNORED, IntArray, spread
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.folds import folds as folds_of
from calibrant.calibrators.registry import make_calibrator
from calibrant.data.dataset import Data, Progress, Source, opened
from calibrant.metrics.accumulator import Accumulator
from calibrant.workflows.effect import Effect, measured
from calibrant.workflows.fit import fit_table, fit_whole, fits_from_table


class CrossFit(NamedTuple):
    """A calibrator fitted on all examples, and how its method does on examples it did not see.

    Attributes
    ----------
    calibrator : Calibrator
        Fitted on everything.
    effect : Effect
        Before and after; each example was calibrated by a fit on the other folds.
    split : str
        The split that was used; ``""`` are the plain arrays.
    folds : (rows,) int
        Number of the fold that each row of the split is in; -1 where it has no label.
    calibrators : list of Calibrator
        One for each fold, fitted on the others.
    """

    calibrator: Calibrator
    effect: Effect
    split: str
    folds: IntArray
    calibrators: list[Calibrator]


def cross_fit(
    data: Data,
    method: str | Calibrator = "auto",
    *,
    folds: int = 5,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: str | None = None,
    groups: str | None = None,
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
    data : path or mapping
        A prediction file, a folder, a glob, or arrays by their names in a file.
    method, options, weight
        As in :func:`fit_file`.
    folds : int
        Number of folds, at least 2.
    split : str, optional
        Which split; ``val``, else the plain arrays, else ``test``, by default.
    groups : str, optional
        Name of a column; the rows of one group are in one fold, and classes left to chance.
    bins, metrics, level
        As in :func:`calibrant.evaluate`.
    seed : int
        Of the folds and of the draws behind the intervals.
    progress : callable, optional
        Called with (examples done, examples in all) during each walk over the logits.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> honest = 2 * rng.normal(size=(2000, 5))
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> found = cross_fit({"logits": 2 * honest, "labels": labels}, "ts", level=None)
    >>> round(float(found.calibrator.temperature_), 1)
    2.0
    >>> found.effect.after["ece"].value < found.effect.before["ece"].value / 4
    True
    """
    calibrator, file = make_calibrator(method, options), opened(data)
    source = Source(file, file.split(split, ("val", "", "test")), sample_weight, groups)
    fold = row_folds(source, folds, seed)
    fitted = _fit_folds(calibrator, source, fold, folds, progress)
    stream = Accumulator(bins=bins, pairs=True, metrics=metrics, level=level, seed=seed)
    effect, _ = measured(fitted, source.with_column("fold", fold), stream, progress)
    return CrossFit(calibrator, effect, source.split.name, fold, fitted)


def _fit_folds(
    calibrator: Calibrator,
    source: Source,
    fold: IntArray,
    folds: int,
    progress: Progress | None,
) -> list[Calibrator]:
    """Fit the calibrator on everything; return copies of it, each fitted without one fold."""
    places = spread(fold, source.labels.shape, "fold")
    tabled = fits_from_table(calibrator, source)
    records = source.records(progress=progress) if tabled else None
    of_record = places[source.labels != IGNORED]

    def fit_without(one: Calibrator, left_out: int) -> Calibrator:
        if records is not None:
            return fit_table(one, source, records.take(of_record != left_out))
        return fit_whole(one, source, np.where(places == left_out, IGNORED, source.labels))

    copies = [copy.deepcopy(calibrator) for _ in range(folds)]
    fit_without(calibrator, folds)  # leaves out nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is odd about the data was said by the first fit
        return [fit_without(one, i) for i, one in enumerate(copies)]


def row_folds(source: Source, count: int, seed: int) -> IntArray:
    """Return the fold of each row, -1 for rows without label.

    Classes are dealt out in equal shares. Groups stay together, and classes are left to chance.
    """
    labels, groups = source.labels, source.group_values
    labelled = np.flatnonzero((labels != IGNORED).reshape(len(labels), -1).any(1))
    if groups is not None and groups.shape != (len(labels),):
        raise ValueError(f"groups must be one value per row, got {groups.shape}")
    kept = None if groups is None else groups[labelled]
    units = len(labelled) if kept is None else len(np.unique(kept))
    if not 2 <= count <= units:
        what = "labelled rows" if kept is None else f"values of {source.groups}"
        raise ValueError(f"folds must be from 2 to the number of {what}, {units}, got {count}")
    strata = labels[labelled] if labels.ndim == 1 else np.zeros_like(labelled)  # tokens: no class
    found = np.full(len(labels), -1)
    for i, rows in enumerate(folds_of(strata, count, groups=kept, seed=seed)):
        found[labelled[rows]] = i
    return found
