"""Large datasets: samples and passes of splits that do not fit into memory, and bad shards."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibrant._core import checks
from calibrant._core.checks import IGNORED, FloatArray, warn
from calibrant._core.chunks import EstimandChoice, examples
from calibrant._core.engines import silently
from calibrant.calibrators import records
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.fit_inputs import Task
from calibrant.data.dataset import ROLES, Dataset, Split
from calibrant.data.files import as_dataset, open_dataset
from calibrant.data.formats import Array
from calibrant.data.shards import SCORES, Chunk, Columns, NoGoodShard, Sample, columns_by_split
from calibrant.metrics.accumulator import Accumulator

LARGE = 1 << 30
"""Number of logits up to which a split is read whole, four gigabytes of float32."""


def _is_large(split: Split) -> bool:
    """Return True if the logits of a split are too many to be held in memory."""
    return split.rows * math.prod(split.shape) > LARGE


def _is_many(split: Split) -> bool:
    """Return True if the logits, or the records and labels, of a split are too many for memory."""
    return _is_large(split) or _rows(split) > records.MAX_EXAMPLES


def _rows(split: Split) -> float:
    """Return the number of rows, on average over seeds where the split is a sample."""
    return split.rows * (1.0 if split.sample is None else split.sample.share)


def _halves(split: Split, seed: int) -> tuple[Split, Split]:
    """Return two random halves of the rows, by their numbers: nothing is read or held."""
    first, second = Sample(0.5, seed), Sample(0.5, seed, start=0.5)
    return replace(split, sample=first), replace(split, sample=second)


class ShardPasses:
    """Passes over the shards of a split, for methods that need sums only."""

    def __init__(self, split: Split) -> None:
        self.split, self.classes = split, split.classes

    def sums(self, task: Task) -> list[FloatArray]:
        """Return the sums of ``task(examples)`` over all chunks of all shards."""
        total = _TaskSums(task, "multilabel" if self.split.dataset.multilabel else "top_label")
        with silently():
            self.split.reduce(total, "logits", "labels", "sample_weight")
        checks.check_some(len(total.values))
        return [np.asarray(value) for value in total.values]


class _TaskSums:
    """Sums of what a task makes of the labelled examples of chunks."""

    def __init__(self, task: Task, estimand: EstimandChoice) -> None:
        self.task, self.estimand = task, estimand
        self.values: list[Any] = []

    def like(self) -> _TaskSums:
        return _TaskSums(self.task, self.estimand)

    def add(self, logits: Array, labels: Array, sample_weight: Array | None = None) -> None:
        checked = examples(logits, labels, sample_weight, self.estimand)
        if (checked.labels != IGNORED).any():
            self._plus(list(self.task(checked)))

    def merge(self, other: _TaskSums) -> None:
        if other.values:
            self._plus(other.values)

    def _plus(self, more: list[Any]) -> None:
        pairs = zip(self.values, more, strict=True)
        self.values = [a + b for a, b in pairs] if self.values else more


def _in_memory(
    split: Split,
    seed: int = 0,
    columns: Sequence[str] = (),
) -> Split:
    """Return a random sample of the labelled rows of a split that fits into memory.

    It has features, if there are any, and further ``columns``.
    """
    roles = [role for role in ROLES if getattr(split.dataset, role) is not None]
    features = ["features"] if split.has_features else []
    arrays = _sampled_arrays(split, [*features, *roles, *columns], LARGE, seed)
    if split.dataset.head is not None:
        arrays |= dict(zip(("head_weight", "head_bias"), split.dataset.head, strict=True))
    beside = {role: arrays.pop(role) for role in roles}
    dataset = as_dataset(arrays, multilabel=split.dataset.multilabel, **beside)
    return replace(dataset.split(), floor=split.floor)


def _sampled_arrays(
    split: Split,
    columns: Sequence[str],
    most: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Return logits, labels and other columns of a random sample of the labelled rows.

    There are about ``most`` logits.
    """
    rows = max(1.0, _rows(split))
    share = min(1.0, most / (rows * max(1, math.prod(split.shape))), records.MAX_EXAMPLES / rows)
    whole = split.sample or Sample(1.0, seed)
    sampled = replace(split, sample=whole._replace(share=whole.share * share))
    names = list(dict.fromkeys(["logits", "labels", *columns]))
    with silently():
        parts = list(sampled.map(_labelled, *names))
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _labelled(chunk: Chunk) -> dict[str, Array]:
    """Return the rows of a chunk that have a label."""
    labels = chunk["labels"]
    kept = (labels != IGNORED).reshape(len(labels), -1).any(1)
    return {name: values[kept] for name, values in chunk.items()}


def _warn_of_sample(calibrator: Calibrator, used: int, split: Split) -> None:
    """State how far a fit on some examples is from one on all."""
    # the loss of a fit on n examples exceeds the lowest by p / 2n on average (Akaike 1974)
    size = calibrator.effective_size(split.classes)
    excess = size / 2 * (1 / used - 1 / split.rows)
    warn(
        f"{type(calibrator).__name__} is fitted on a random sample of {used:,} of {split.rows:,} "
        f"examples, which costs about {excess:.1g} in NLL: that of all is too large for memory"
    )


_MAX_LISTED = 20


def open_good_shards(
    path: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    estimand: EstimandChoice = "auto",
    **columns: Any,
) -> Dataset:
    """Open a dataset without its bad shards, which are read once to find them.

    A shard is bad if it cannot be read to its end, if a row is refused (a NaN, a label that is no
    class), or if its scores have another form than most rows of the dataset. It is left out as a
    whole: ``skipped`` of the dataset has the errors by path.

    Parameters
    ----------
    path
        A folder or glob of shards, or a file.
    cache
        As in :func:`calibrant.open_dataset`.
    estimand
        As in :func:`calibrant.evaluate`.
    columns
        Names of columns, ``labels``, ``logits`` and ``probs`` of :func:`calibrant.open_dataset`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from calibrant.data import save_predictions
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i, value in enumerate([0.0, np.nan]):
    ...         shard = {"logits": np.full((2, 3), value), "labels": np.zeros(2, int)}
    ...         save_predictions(os.path.join(folder, f"{i}.npz"), shard)
    ...     data = open_good_shards(folder)
    >>> data.split().rows, [os.path.basename(path) for path in data.skipped]
    (2, ['1.npz'])
    """
    dataset = _uniform(open_dataset(path, skip_bad=True, cache=cache, **columns))
    if estimand == "multilabel":
        dataset = replace(dataset, multilabel=True)
    skipped: dict[str, str] = {}
    for split in map(dataset.split, dataset.splits):
        if split.shards[0].domain and "labels" in split.keys:
            checked = Accumulator(estimand=estimand, metrics=["accuracy"], level=None)
            split.reduce(checked, split.domain, "labels", skipped=skipped)
    return _without(dataset, skipped)


def describe_skipped(skipped: Mapping[str, str], used: int) -> Iterator[str]:
    """Yield lines about shards that were left out, by their messages, beside those in use."""
    if not (count := len(skipped)):
        return
    yield f"skipped {count:,} bad shard{'s' * (count != 1)} of {count + used:,}:"
    for message in list(skipped.values())[:_MAX_LISTED]:
        yield f"  {message}"
    if count > _MAX_LISTED:
        yield f"  and {count - _MAX_LISTED:,} more"


def _uniform(dataset: Dataset) -> Dataset:
    """Leave out the files whose scores have another form than most rows of their split."""
    rows: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for file in dataset.files:
        for name, domain, shape in _forms(file):
            rows[name, domain, shape[1:]] += shape[0]
    usual = {}
    for (name, domain, shape), _ in reversed(rows.most_common()):
        usual[name] = domain, shape
    skipped = {}
    for file in dataset.files:
        for name, domain, shape in _forms(file):
            if shape[0] and usual[name] != (domain, shape[1:]):
                most = f"{usual[name][0]} of shape {('rows', *usual[name][1])}".replace("'", "")
                path = _path(file)
                skipped[path] = f"{path} has {domain} of shape {shape}, most shards have {most}"
    return _without(dataset, skipped)


def _forms(file: Columns) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield split, domain and shape of the scores of a file."""
    for name, columns in columns_by_split(file).items():
        domain = next((domain for domain in SCORES if domain in columns), None)
        if domain is not None:
            yield name, domain, columns[domain].shape


def _without(dataset: Dataset, skipped: dict[str, str]) -> Dataset:
    kept = [
        file for file in dataset.files if skipped.keys().isdisjoint(c.path for c in file.values())
    ]
    if not kept:
        raise NoGoodShard(dataset.path, next(iter(skipped.values())))
    return replace(dataset, files=kept, skipped={**dataset.skipped, **skipped})


def _path(file: Columns) -> str:
    return next(iter(file.values())).path
