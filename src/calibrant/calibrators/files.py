"""Calibrators over prediction files of any size: fit, apply, before and after."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from calibrant._checks import IGNORED, IntArray, Values, spread
from calibrant._partition import Records
from calibrant._walk import examples
from calibrant.calibrators import CALIBRATORS
from calibrant.calibrators.base import Calibrator, RecordsCalibrator, TemperatureCalibrator
from calibrant.calibrators.source import (
    Array,
    Block,
    Data,
    Progress,
    Source,
    opened,
    placed,
    warn_of_zeros,
)
from calibrant.data import PredictionFile, Split, Stored, open_predictions, save_predictions
from calibrant.data.formats import FORMATS, gathered, listed
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.stream import Accumulator

COPIED = 1 << 22
"""Numbers that are copied at a time."""


# Calibrators by name.


def make_calibrator(
    method: str | Calibrator, options: Mapping[str, Any] | None = None
) -> Calibrator:
    """Return an unfitted calibrator by its name and the arguments of its constructor.

    >>> make_calibrator("ts", {"objective": "brier"})
    TemperatureScaling(objective='brier', not fitted)
    """
    if isinstance(method, Calibrator):
        if options:
            raise TypeError(
                f"options go with the name of a method, got {listed(options)} beside a "
                f"{type(method).__name__}: pass them to its constructor"
            )
        return method
    if method not in CALIBRATORS:
        near = difflib.get_close_matches(str(method), CALIBRATORS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown method {method!r}: {hint}choose from {listed(CALIBRATORS)}")
    _check_options(method, options or {})
    return CALIBRATORS[method](**(options or {}))


def _check_options(method: str, options: Mapping[str, Any]) -> None:
    known = inspect.signature(CALIBRATORS[method]).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        choices = [f"{name} (default {known[name].default!r})" for name in known]
        has = f"its options are {listed(choices)}" if choices else "it has none"
        raise ValueError(f"{method} has no option {unknown[0]!r}: {has}")


def calibrated(calibrator: Calibrator, logits: Values, features: Values | None = None) -> Tensor:
    """Calibrated logits of checked input, on the device of the input.

    >>> from calibrant.calibrators import Identity
    >>> calibrated(Identity().fit([[2.0, 1.0]], [0]), [[5.0, 3.0]])
    tensor([[ 0., -2.]], dtype=torch.float64)
    """
    scores = calibrator._scores(logits)
    with torch.no_grad():
        return torch.as_tensor(calibrator(scores, calibrator._inputs_beside(scores, features)))


# Fit.


def fit_file(
    path: str | os.PathLike[str],
    method: str | Calibrator = "auto",
    *,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    weight: str | None = None,
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
    source = fit_source(path, split, weight, groups)
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
    weight: str | None = None,
    groups: str | None = None,
    metrics: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Fit as :func:`fit_file` does, and measure the same examples before and after.

    There are no intervals: figures of examples that a fit has seen flatter it.
    """
    calibrator = make_calibrator(method, options)
    source = fit_source(data, split, weight, groups)
    fit_on(calibrator, source, progress=progress)
    stream = Accumulator(pairs=True, metrics=metrics, level=None)
    effect, _ = measured([calibrator], source, stream, progress)
    return Fit(calibrator, effect, source.split.name)


def fit_source(
    data: Data, split: str | None = None, weight: str | None = None, groups: str | None = None
) -> Source:
    """Return the rows that a fit uses: val, else the plain arrays; never test unasked."""
    file = opened(data)
    if split is None and not {"val", ""} & set(file.splits) and file.splits:
        found = listed(f"'{name}'" for name in file.splits)
        raise ValueError(
            f"{file.path} has no split 'val' and no plain arrays to fit on, only {found}: a test "
            "set that was fitted on measures nothing; name a split (--split), or fit and measure "
            "on the same examples by cross-fitting (--cross-fit)"
        )
    return Source(file, file.split(split, ("val", "")), weight, groups)


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
            f"every shard, only {listed(source.split.keys)}; save the inputs of the last layer "
            "under that name"
        )


# Before and after.


class Effect(NamedTuple):
    """What a calibrator does to some examples.

    Attributes
    ----------
    before, after : Evaluation
        Metrics of the logits as they were and of the calibrated ones.
    argmax_changed : int
        Number of examples whose predicted class changed.
    temperatures : (float, float) or None
        The smallest and the largest temperature given to an example; None for methods without.
    """

    before: Evaluation
    after: Evaluation
    argmax_changed: int
    temperatures: tuple[float, float] | None


def effect_file(
    calibrator: Calibrator,
    data: Data,
    *,
    split: str | None = None,
    weight: str | None = None,
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
    progress: Progress | None = None,
) -> Effect:
    """Measure a prediction file before and after calibration; logits are never held whole.

    Parameters that are not listed are those of :func:`calibrant.evaluate_file`.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    data : path or mapping
        A prediction file, a folder, a glob, or arrays by their names in a file.
    split : str, optional
        Which split; ``test``, else the plain arrays, by default.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> found = effect_file(fit_file(sample_path(), "ts"), sample_path(), level=None)
    >>> [round(e["ece"].value, 4) for e in (found.before, found.after)], found.argmax_changed
    ([0.0424, 0.0091], 0)
    """
    file = opened(data)
    source = Source(file, file.split(split, ("test", "")), weight)
    stream = Accumulator(bins=bins, pairs=True, metrics=metrics, level=level, seed=seed)
    found, zeros = measured([calibrator], source, stream, progress)
    warn_of_zeros(zeros)
    return found


def measured(
    calibrators: Sequence[Calibrator],
    source: Source,
    stream: Accumulator,
    progress: Progress | None = None,
) -> tuple[Effect, int]:
    """Before and after on the rows of a source; one calibrator for all, or one for each fold.

    Also returns how many probabilities of zero there were; a fit on them has warned already.
    """
    meter = Meter(calibrators, stream.like(), stream.like())
    source.walk(meter, *meter.columns(), progress=progress)
    return meter.effect(), meter.floored


@dataclass
class Meter:
    """Adds up predictions block by block, before and after calibration.

    With several calibrators, each serves the rows of its fold.
    """

    calibrators: Sequence[Calibrator]
    after: Accumulator
    before: Accumulator | None = None
    changed: int = 0
    low: float = math.inf
    high: float = -math.inf
    floored: int = 0

    def columns(self) -> list[str]:
        """Columns that a block must have."""
        wanted = ["features"] if any(c.needs_features for c in self.calibrators) else []
        wanted += ["fold"] if len(self.calibrators) > 1 else []
        return ["labels", *wanted]

    def __call__(self, block: Block) -> None:
        """Add a block."""
        kept = _labelled(block)
        self.floored += block.floored
        if not len(kept.labels):
            return
        found = np.empty(kept.logits.shape, np.float32 if _narrow(kept.logits) else np.float64)
        for i, calibrator in enumerate(self.calibrators):
            rows = slice(None) if kept.fold is None else kept.fold == i
            if len(kept.logits[rows]):
                found[rows] = self._calibrated(calibrator, kept, rows)
        self.after.update(found, kept.labels, weight=kept.weight)
        self.changed += int((_top(kept.logits) != _top(found)).sum())
        if self.before is not None:
            self.before.update(kept.logits, kept.labels, weight=kept.weight)

    def _calibrated(self, calibrator: Calibrator, kept: Block, rows: Any) -> Array:
        logits = kept.logits[rows]
        if self.before is not None and isinstance(calibrator, TemperatureCalibrator):
            temperatures = calibrator.temperature(logits)
            self.low = min(self.low, float(temperatures.min()))
            self.high = max(self.high, float(temperatures.max()))
        features = None if kept.features is None else kept.features[rows]
        return np.asarray(calibrated(calibrator, logits, features).cpu())

    def effect(self) -> Effect:
        """Everything added up."""
        assert self.before is not None
        temperatures = (self.low, self.high) if self.low <= self.high else None
        return Effect(self.before.result(), self.after.result(), self.changed, temperatures)


def _labelled(block: Block) -> Block:
    """Return the examples that count, in one dimension; what the others hold does not matter."""
    given = examples(block.logits, block.labels, block.weight)
    shape = block.labels.shape
    kept = (given.labels != IGNORED).reshape(shape)
    return Block(
        block.logits[kept],
        given.labels[kept.reshape(-1)],
        given.labelled_weight(),
        None if block.features is None else block.features[kept],
        None if block.fold is None else spread(block.fold, shape, "fold")[kept],
    )


def _narrow(logits: Array) -> bool:
    return logits.dtype.itemsize <= 4


def _top(logits: Array) -> Array:
    """The predicted class; one logit is that of class 1 against 0."""
    return np.asarray(logits > 0 if logits.ndim == 1 else logits.argmax(-1))


# Apply.


def apply_file(
    calibrator: Calibrator,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> None:
    """Calibrate every split of a prediction file, and write the result as one file.

    Logits become calibrated logits (float32), ``probs`` calibrated probabilities (float32 or
    wider). Labels, features and all other arrays are written as they are; the last layer too,
    though it is the layer that made the logits before. Single values stay out, and so do
    ``probs`` beside logits. The rows of shards follow one another.

    Rows are read and calibrated in blocks and gathered in a temporary folder beside ``out``, of
    the size of the result. From there ``.npz`` is written in blocks as well; the writers of
    ``.safetensors`` and ``.parquet`` hold the result in memory. A kill leaves the old ``out``
    or the new one, and perhaps the temporary folder, whose name starts with a dot.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    path : path
        A prediction file, a folder, or a glob.
    out : path
        Where to write; the suffix decides on the format. It may not be part of the input.
    progress : callable, optional
        Called with (examples done, examples in all) after each block.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> fitted = fit_file(sample_path(), "ts")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "calibrated.npz")
    ...     apply_file(fitted, sample_path(), out)
    ...     calibrated = open_predictions(out).split("test").read("logits")
    >>> calibrated.shape, float(calibrated.max())
    ((10000, 10), 0.0)
    """
    file, target = open_predictions(path), Path(out)
    _check_target(file, target)
    splits = [file.split(name) for name in file.splits]
    scored = [split for split in splits if split.parts[0].domain]
    for split in scored:
        _check_fits(calibrator, Source(file, split))
    if not scored:
        raise ValueError(f"{file.path} has no logits or probs to calibrate")
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        spool = _Spool(Path(folder))
        arrays = {key: spool.copied(pieces) for key, pieces in _others(file, splits).items()}
        total, before = sum(split.rows for split in scored), 0
        for split in scored:
            tell = progress and partial(_shifted, progress, before, total)
            arrays[_key(split, split.domain)] = _applied(
                calibrator, Source(file, split), spool, tell
            )
            before += split.rows
        save_predictions(target, {key: arrays[key] for key in _ordered(file, arrays)})


def _check_target(file: PredictionFile, target: Path) -> None:
    if target.suffix not in FORMATS or FORMATS[target.suffix].write is None:
        known = listed(suffix for suffix, form in FORMATS.items() if form.write)
        raise ValueError(f"cannot write {target}: the suffix must be one of {known}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    inputs = {os.path.realpath(found.path) for shard in file.shards for found in shard.values()}
    place, given = os.path.realpath(target), os.path.realpath(file.path)
    is_glob = not os.path.exists(file.path)
    inside = fnmatch.fnmatch(place, given) if is_glob else os.path.dirname(place) == given
    if place in inputs or inside:
        raise ValueError(
            f"{target} is part of the input {file.path}, which stays as it is: "
            "write to another place"
        )


def _check_fits(calibrator: Calibrator, source: Source) -> None:
    """Refuse what a walk would find out too late, or not at all."""
    shape = source.split.shape
    calibrator._check_input(torch.zeros(1, *shape))
    if calibrator.needs_features:
        _check_features(calibrator, source)
        widths = source.split.parts[0].stored("features").shape[1:]
        with placed(source.file.path):
            calibrator._check_features(torch.empty(1, *widths), (1, *shape[:-1]), calibrator._width)
    if calibrator._classes == 1 and shape:
        raise ValueError(
            f"{source.file.path} has {math.prod(shape)} scores per row, but this "
            f"{type(calibrator).__name__} was fitted on one logit per row"
        )


def _key(split: Split, column: str) -> str:
    return f"{split.name}_{column}" if split.name else column


def _others(file: PredictionFile, splits: Sequence[Split]) -> dict[str, list[Stored]]:
    """Everything but the scores, by key; what cannot be kept is named in a warning."""
    found = {
        _key(split, column): _pieces(split, column)
        for split in splits
        for column in dict.fromkeys(name for part in split.parts for name in part.columns)
        if column not in ("logits", "probs")
    }
    owned = {(s.path, s.key) for split in splits for p in split.parts for s in p.columns.values()}
    for shard in file.shards:
        for key, stored in shard.items():
            # class names, the last layer; single values have no rows to read
            if stored.shape and (stored.path, stored.key) not in owned:
                found.setdefault(key, [stored])
    dropped = [key for key, pieces in found.items() if not _writable(pieces)]
    if dropped:
        warnings.warn(
            f"left out: {listed(dropped)}; Python objects, and columns that not every shard has, "
            "cannot be copied",
            stacklevel=3,
        )
    return {key: pieces for key, pieces in found.items() if key not in dropped}


def _pieces(split: Split, column: str) -> list[Stored]:
    """Return the parts of a column; none where they do not make one value for each row."""
    found = [part.columns[column] for part in split.parts if column in part.columns]
    rows = [(part.rows,) for part in split.parts]
    agree = len({stored.shape[1:] for stored in found}) == 1
    aligned = agree and [stored.shape[:1] for stored in found] == rows
    return found if aligned or len(rows) == 1 else []


def _writable(pieces: Sequence[Stored]) -> bool:
    return bool(pieces) and not any(stored.dtype.hasobject for stored in pieces)


def _ordered(file: PredictionFile, keys: Iterable[str]) -> list[str]:
    """Keys in the order of the file."""
    place = {key: i for i, key in enumerate(key for shard in file.shards for key in shard)}
    return sorted(keys, key=lambda key: place.get(key, len(place)))


def _applied(
    calibrator: Calibrator, source: Source, spool: _Spool, progress: Progress | None
) -> Array:
    stored = source.split.parts[0].stored("logits")
    probs = source.split.domain == "probs"
    dtype = np.promote_types(stored.dtype, np.float32) if probs else np.dtype(np.float32)
    whole = spool.room((source.split.rows, *source.split.shape), dtype)
    start = 0

    def use(block: Block) -> None:
        nonlocal start
        found = calibrated(calibrator, block.logits, block.features)
        values = _as_probs(found) if probs else found
        whole[start : start + len(values)] = values.cpu().numpy()
        start += len(values)

    columns = ["features"] if calibrator.needs_features else []
    source.walk(use, *columns, progress=progress)
    return whole


def _as_probs(logits: Tensor) -> Tensor:
    wide = logits.double()
    return torch.sigmoid(wide) if logits.ndim == 1 else torch.softmax(wide, -1)


def _shifted(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


@dataclass
class _Spool:
    """Arrays in mapped files of a folder: their pages leave memory when it is short."""

    folder: Path
    count: int = 0

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An empty array."""
        if not math.prod(shape) or not dtype.itemsize:
            return np.empty(shape, dtype)
        self.count += 1
        return np.lib.format.open_memmap(self.folder / f"{self.count}.npy", "w+", dtype, shape)

    def copied(self, pieces: Sequence[Stored]) -> Array:
        """Stored arrays one after another."""
        dtype = np.result_type(*(piece.dtype for piece in pieces)).newbyteorder("=")
        if not dtype.itemsize or (len(pieces) == 1 and pieces[0].suffix == ".npy"):
            return gathered(pieces)  # text, whose length is unknown, or mapped already
        whole = self.room((sum(p.shape[0] for p in pieces), *pieces[0].shape[1:]), dtype)
        start = 0
        for piece in pieces:
            width = max(1, math.prod(piece.shape[1:]))
            for block in piece.blocks(max(1, COPIED // width)):
                whole[start : start + len(block)] = block
                start += len(block)
        return whole
