"""Fit a calibrator on predictions of any size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, cast

from calibrant._core.checks import IntArray, spread
from calibrant._core.logpartition import Records
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator, RecordsCalibrator
from calibrant.calibrators.registry import make_calibrator
from calibrant.data.dataset import (
    Data,
    Progress,
    Source,
    opened,
    placed,
)
from calibrant.metrics.accumulator import Accumulator
from calibrant.workflows.effect import Effect, measured

# Fit.


def fit_file(
    path: str | os.PathLike[str],
    method: str | Calibrator = "auto",
    *,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: str | None = None,
    groups: str | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Calibrator:
    """Fit a calibrator on a prediction file, or on a folder or glob of shards.

    Methods that give each row a temperature are fitted from the log-partition table, a few
    hundred bytes per row, so that logits are never held whole. The others read the split whole.

    Parameters
    ----------
    path : path
        A prediction file, a folder, or a glob.
    method : str or Calibrator
        A name from ``CALIBRATORS``, or a calibrator, which is then fitted in place.
    split : str, optional
        Which split; ``val``, else the plain arrays, by default. Never ``test`` unless named.
    options : dict, optional
        Arguments of the constructor of a method that is given by name.
    weight, groups : str, optional
        Names of further columns of the file, with one value per example. Examples of one group
        stay together where a method cross-validates; with groups the split is read whole.
    executor : concurrent.futures.Executor, optional
        Each shard becomes a task, for methods that use the table.
    progress : callable, optional
        Called with (examples done, examples in all) after each block or shard.

    Returns
    -------
    Calibrator
        Fitted.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> fitted = fit_file(sample_path(), "ts")
    >>> round(float(fitted.temperature_), 2)
    1.83
    """
    calibrator = make_calibrator(method, options)
    source = fit_source(path, split, sample_weight, groups)
    return fit_on(calibrator, source, executor=executor, progress=progress)


class Fit(NamedTuple):
    """A fitted calibrator, and what it does to the examples of the fit.

    Attributes
    ----------
    calibrator : Calibrator
    effect : Effect
        Before and after, on examples that the fit has seen.
    split : str
        The split that was fitted on; ``""`` are the plain arrays.
    """

    calibrator: Calibrator
    effect: Effect
    split: str


def fit_and_measure(
    data: Data,
    method: str | Calibrator = "auto",
    *,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: str | None = None,
    groups: str | None = None,
    metrics: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Fit as :func:`fit_file` does, and measure the same examples before and after.

    There are no intervals: figures of examples that a fit has seen flatter it.
    """
    calibrator = make_calibrator(method, options)
    source = fit_source(data, split, sample_weight, groups)
    fit_on(calibrator, source, progress=progress)
    stream = Accumulator(pairs=True, metrics=metrics, level=None)
    effect, _ = measured([calibrator], source, stream, progress)
    return Fit(calibrator, effect, source.split.name)


def fit_source(
    data: Data,
    split: str | None = None,
    sample_weight: str | None = None,
    groups: str | None = None,
) -> Source:
    """Return the rows that a fit uses: val, else the plain arrays; never test unasked."""
    file = opened(data)
    if split is None and not {"val", ""} & set(file.splits) and file.splits:
        found = comma_separated(f"'{name}'" for name in file.splits)
        raise ValueError(
            f"{file.path} has no split 'val' and no plain arrays to fit on, only {found}: a test "
            "set that was fitted on measures nothing; name a split (--split), or fit and measure "
            "on the same examples by cross-fitting (--cross-fit)"
        )
    return Source(file, file.split(split, ("val", "")), sample_weight, groups)


def fit_on(
    calibrator: Calibrator,
    source: Source,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Calibrator:
    """Fit on the rows of a source, from the table where that suffices."""
    if not fits_from_table(calibrator, source):
        return fit_whole(calibrator, source)
    return fit_table(calibrator, source, source.records(executor, progress))


def fits_from_table(calibrator: Calibrator, source: Source) -> bool:
    """Whether the table of a source has all that a fit looks at: no groups, no features."""
    features = calibrator.uses_features and source.has_features
    return calibrator.fits_records and source.groups is None and not features


def fit_table(calibrator: Calibrator, source: Source, records: Records) -> Calibrator:
    """Fit on records that came from a source."""
    fitting = cast(RecordsCalibrator, calibrator)
    return fitting.fit_records(records, one_logit=not source.split.shape)


def fit_whole(calibrator: Calibrator, source: Source, labels: IntArray | None = None) -> Calibrator:
    """Fit on the arrays of a source; other labels may leave out some of its rows."""
    logits, targets = source.logits, source.labels if labels is None else labels
    given: dict[str, Any] = {}
    if source.has_features if calibrator.uses_features else calibrator.needs_features:
        _check_features(calibrator, source)
        head = source.file.last_layer() if source.has_head else None
        given = {"features": source.features, "head": head}
    if source.weight is not None:
        given["sample_weight"] = source.split.read(source.weight)
    if source.group_values is not None:
        given["groups"] = spread(source.group_values, targets.shape, "groups")
    with placed(source.file.path):
        return calibrator.fit(logits, targets, **given)


def _check_features(calibrator: Calibrator, source: Source) -> None:
    if not source.has_features:
        name = f"{source.split.name}_features" if source.split.name else "features"
        raise ValueError(
            f"{type(calibrator).__name__} needs features: {source.file.path} has no {name} in "
            f"every shard, only {comma_separated(source.split.keys)}; save the inputs of the last layer "
            "under that name"
        )
