"""The log-partition table of a split, and base classes of methods that are fitted on it alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED, FloatArray, Values
from calibrant._core.chunks import Examples, examples, full_precision
from calibrant._core.class_names import in_order
from calibrant.calibrators import fit_inputs, logpartition
from calibrant.calibrators.base import PASS_LOGARITHM, Calibrator, Context
from calibrant.calibrators.logpartition import Records, concatenate, tabulate
from calibrant.data.dataset import Split
from calibrant.data.formats import is_remote
from calibrant.data.shards import Chunk, Sample, Shard
from calibrant.data.tensor_files import write_safetensors

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_EXAMPLES = 1 << 22
"""Examples whose table is held in memory, some gigabytes. Of more, a fit uses a random sample."""
FORMAT = 1
_SETTINGS = ("LOWEST", "OCTAVES", "TOP", "LARGEST_GAP", "LEAST_REST")
"""Constants of the table: a file that was written with others is of no use."""


def records_of(split: Split) -> Records:
    """Return the table of all labelled rows of a split; logits are never held whole.

    If the dataset has a cache, the table of each shard is kept there, and read the next time.
    """
    columns = ("logits", "labels", "sample_weight")
    if split.dataset.cache is None:
        tables = [table for shard in split.walk(_tabulated, *columns) for table in shard]
    else:
        folder = Path(split.dataset.cache)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / _file_name(split, shard) for shard in split.shards]
        found = {path: known for path in paths if (known := _load(path)) is not None}
        missing = {p: s for p, s in zip(paths, split.shards, strict=True) if p not in found}
        rest = replace(split, shards=list(missing.values()))
        made = rest.walk(_tabulated, *columns) if missing else ()
        for path, shard in zip(missing, made, strict=True):
            _save(path, shard)  # at once, so that a killed run goes on from here
            found[path] = shard
        tables = [table for path in paths for table in found[path]]
    checks.check_some(len(tables))
    return concatenate(tables)


def _tabulated(chunks: Iterator[Chunk]) -> list[Records]:
    """Return the table of a shard; none without labels."""
    tables = []
    for chunk in chunks:
        checked = examples(chunk["logits"], chunk["labels"], chunk.get("sample_weight"))
        if (checked.labels != IGNORED).any():
            tables.append(tabulate(checked))
    return [concatenate(tables)] if tables else []


def bounded(split: Split, seed: int = 0, most: int | None = None) -> Split:
    """Return a split with a random sample of its labels, if it has more than ``most`` rows."""
    most = MAX_EXAMPLES if most is None else most
    if split.rows <= most:
        return split
    return replace(split, sample=Sample(most / split.rows, seed))


def _file_name(split: Split, shard: Shard) -> str:
    """Return the name of the file of a shard's table: a digest of all that it is made from."""
    settings = [FORMAT, *(getattr(logpartition, name) for name in _SETTINGS)]
    sampled = [] if split.sample is None else [*split.sample, shard.first]
    about = [split.domain, split.floor, split.dataset.multilabel, *sampled]
    names = {"logits": "logits", "labels": "labels", "weight": split.dataset.sample_weight}
    sources: dict[str, list[Any]] = {}
    for name, stored in names.items():
        column = shard.column(stored) if stored else None
        if column is not None and column.values is None:  # the file as it is now
            path = column.path if is_remote(column.path) else os.path.abspath(column.path)
            sources[name] = [path, column.key, list(column.fingerprint or ())]
        elif column is not None:
            values = np.ascontiguousarray(column.values)
            content = hashlib.sha256(values.tobytes()).hexdigest()
            sources[name] = [values.dtype.str, list(values.shape), content]
    key = json.dumps([settings, about, sources], sort_keys=True)
    return f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"


def _load(path: Path) -> list[Records] | None:
    """Return what :func:`_save` wrote; None if there is no file, or if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
        classes = int(arrays.pop("classes"))
        return [Records(**arrays, classes=classes)] if classes else []
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _save(path: Path, shard: list[Records]) -> None:
    """Write the table of a shard, at once; no classes stand for no table."""
    arrays: dict[str, Any] = {"classes": np.array(0)}
    for records in shard:
        values = {field.name: getattr(records, field.name) for field in fields(Records)}
        arrays |= {name: np.asarray(value) for name, value in values.items()}
    with replacing(path) as temporary:
        write_safetensors(temporary, arrays)


class RecordPredictions(NamedTuple):
    """Predictions of a fitted calibrator for the examples of a table, each ``(n,)``."""

    confidence: FloatArray
    nll: FloatArray


class RecordsCalibrator(Calibrator):
    """A calibrator that is fitted on the log-partition table, whatever the number of classes."""

    keeps_argmax = True
    monotone = True

    fits_records = True

    def _fit_records(self, records: Records) -> None:
        raise NotImplementedError

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        raise NotImplementedError

    def _fit(self, examples: Examples, context: Context) -> None:
        self._fit_records(context.table(examples))

    def fit_records(
        self, records: Records, *, groups: NDArray[Any] | None = None, one_logit: bool = False
    ) -> Self:
        """Learn from records, such as those of all shards; of log-odds if ``one_logit``.

        ``groups`` has one value per record; only methods with folds use it.
        """
        with checks.warnings_at_caller(), full_precision():
            some = records.take(slice(checks.LOOKED_AT))
            rows = np.stack([some.top, some.mean_gap, some.margin], axis=1)
            self._warn_of_few(len(records), records.classes, fit_inputs._distinct_rows(rows))
            if same := fit_inputs._one_label(records.labels):
                checks.warn(same)
            self.set_floor(0)
            self._fit_records(records.scale_free())
            self._set_classes(1 if one_logit else records.classes)
            return self


class TemperatureCalibrator(RecordsCalibrator):
    """A calibrator that divides the logits of each row by a temperature of its own."""

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        """Temperatures ``(..., 1)`` of logits ``(..., classes)`` whose largest is 0."""
        raise NotImplementedError

    def _sharpness(self, records: Records) -> float | FloatArray:
        """Inverse temperatures, one or ``(n,)``, of the examples of a table."""
        raise NotImplementedError

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        sharpness = self._sharpness(records)
        value = records.log_partition(sharpness).value
        return RecordPredictions(np.exp(-value), sharpness * records.own_gap + value)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        return logits / self._temperature(logits, top)

    @overload
    def temperature(self, logits: Tensor) -> Tensor: ...
    @overload
    def temperature(self, logits: ArrayLike) -> NDArray[Any]: ...
    def temperature(self, logits: Values) -> Tensor | NDArray[Any]:
        """Temperature of each row, ``(..., classes) -> (...)``."""
        _warn_of_probs(logits)
        _, top, temperature = self._row_temperatures(logits)
        result = temperature.expand_as(top)[..., 0]
        return result if isinstance(logits, Tensor) else result.cpu().numpy()

    def transform_with_temperature(self, logits: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """Calibrated logits as :meth:`transform` gives them, and the temperature of each row."""
        wide, top, temperature = self._row_temperatures(logits)
        result = self._narrow(self._finished(wide, top, (wide - top) / temperature))
        return result.cpu().numpy(), temperature.expand_as(top)[..., 0].cpu().numpy()

    @torch.no_grad()
    @full_precision()
    def _row_temperatures(self, logits: Values) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of two classes or more, the largest of each row, and temperatures."""
        wide = self._wide(self._checked(in_order(logits, self.class_names_)[0]))
        top = wide.amax(-1, keepdim=True)
        return wide, top, self._temperature(wide - top, top)


def _warn_of_probs(logits: Values) -> None:
    """Warn at the caller of a public method, which calls this."""
    checks.warn_of_probs(checks.as_scores(logits), PASS_LOGARITHM, checks.MANY_ODDS)
