"""Calibrate prediction files."""

from __future__ import annotations

import fnmatch
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator
from calibrant.data import PredictionFile, Split, Stored, open_predictions, save_predictions
from calibrant.data.dataset import (
    Array,
    Block,
    Progress,
    Source,
    placed,
)
from calibrant.data.formats import FORMATS, gathered
from calibrant.workflows.effect import calibrated
from calibrant.workflows.fit import _check_features

COPIED = 1 << 22
"""Numbers that are copied at a time."""


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
        known = comma_separated(suffix for suffix, form in FORMATS.items() if form.write)
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
    calibrator.check_logits(torch.zeros(1, *shape))
    if calibrator.needs_features:
        _check_features(calibrator, source)
        widths = source.split.parts[0].stored("features").shape[1:]
        with placed(source.file.path):
            calibrator.check_features(torch.empty(1, *widths), (1, *shape[:-1]))
    if calibrator.classes == 1 and shape:
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
            f"left out: {comma_separated(dropped)}; Python objects, and columns that not every shard has, "
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
