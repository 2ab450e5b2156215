"""Fits on splits that are too large to be held in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibrant._core import checks
from calibrant._core.checks import IGNORED, FloatArray, warn
from calibrant._core.chunks import EstimandChoice, examples
from calibrant._core.engines import silently
from calibrant._core.rows import Sample
from calibrant.calibrators import records
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.passes import Task
from calibrant.data.dataset import ROLES, Split
from calibrant.data.formats import Array
from calibrant.data.opening import as_dataset
from calibrant.data.shards import Chunk

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
    kept = (chunk.labels != IGNORED).reshape(len(chunk), -1).any(1)
    return {name: values[kept] for name, values in chunk.columns.items()}


def _warn_of_sample(calibrator: Calibrator, used: int, split: Split) -> None:
    """State how far a fit on some examples is from one on all."""
    # the loss of a fit on n examples exceeds the lowest by p / 2n on average (Akaike 1974)
    size = calibrator.effective_size(split.classes)
    excess = size / 2 * (1 / used - 1 / split.rows)
    warn(
        f"{type(calibrator).__name__} is fitted on a random sample of {used:,} of {split.rows:,} "
        f"examples, which costs about {excess:.1g} in NLL: that of all is too large for memory"
    )
