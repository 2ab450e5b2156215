"""Checked features and labels, of which only a batch at a time is converted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import (
    IGNORED,
    FloatArray,
    IntArray,
    Logits,
    Values,
    as_labels,
    as_scores,
    as_weight,
)
from calibrant._core.chunks import as_tensor
from calibrant.calibrators.data_checks import check_finite_features

BLOCK = 4096
"""Rows that are looked at together where nothing is learned from them."""


class Batch(NamedTuple):
    """Rows to learn from, ``(n, width)``, ``(n,)`` and ``(n,)``, on one device."""

    features: Tensor
    labels: Tensor
    weight: Tensor


class Rows(NamedTuple):
    """Checked features, as they came, of which only the rows of a batch are ever converted."""

    features: Logits  # (n, width)
    labels: IntArray
    weight: FloatArray
    kept: IntArray  # rows that count

    def batch(self, index: IntArray, device: torch.device) -> Batch:
        """The rows at an index."""
        at = torch.from_numpy(index) if isinstance(self.features, Tensor) else index
        return Batch(
            as_tensor(self.features[at]).to(device, torch.float32),
            torch.from_numpy(self.labels[index]).to(device),
            torch.from_numpy(self.weight[index]).to(device, torch.float32),
        )

    def blocks(self, device: torch.device) -> Iterator[Batch]:
        """All rows that count, in order."""
        for start in range(0, len(self.kept), BLOCK):
            yield self.batch(self.kept[start : start + BLOCK], device)

    def without(self, index: IntArray) -> Rows:
        """All but some."""
        return self._replace(kept=np.setdiff1d(self.kept, index))

    def digest(self) -> str:
        """Tells these data from others, without a look at all of them."""
        told = (self.labels, self.weight, self.kept)
        seen = hashlib.sha256(b"".join(values.tobytes() for values in told))
        some = np.unique(np.linspace(0, len(self.labels) - 1, 64).astype(np.int64))
        seen.update(self.batch(some, torch.device("cpu")).features.numpy().tobytes())
        return seen.hexdigest()


def as_rows(features: Values, labels: Values, weight: Values | None, name: str = "") -> Rows:
    """Check features ``(..., width)``, labels ``(...)`` and weights against each other."""
    inputs, targets = as_scores(features, f"{name}features"), as_labels(labels, f"{name}labels")
    shape = tuple(inputs.shape)
    if len(shape) < 2 or shape[:-1] != targets.shape or not shape[-1]:
        raise ValueError(
            f"{name}features must be (..., width) and {name}labels (...), got {shape} and "
            f"{targets.shape}: one row of features is wanted for each label"
        )
    weights = np.ones(targets.size) if weight is None else as_weight(weight, targets.shape)
    flat = targets.reshape(-1)
    kept = np.flatnonzero((flat != IGNORED) & (weights > 0))
    if not len(kept):
        raise ValueError(
            f"{name}features and {name}labels are empty: no example has a label other than "
            f"{IGNORED} (ignored) and a weight above 0"
        )
    found = Rows(inputs.reshape(-1, shape[-1]), flat, weights, kept)
    place = inputs.device if isinstance(inputs, Tensor) else torch.device("cpu")
    for start in range(0, len(kept), BLOCK):
        some = kept[start : start + BLOCK]
        check_finite_features(found.batch(some, place).features, some)
    return found


def count_labels(labels: IntArray, classes: int | None) -> int:
    """Number of classes; at least two must occur."""
    present = np.unique(labels)
    if len(present) < 2:
        raise ValueError(
            f"labels must have two classes at least, got only {present[0]}: a head that has seen "
            "one class can only be sure of it"
        )
    return int(present[-1]) + 1 if classes is None else classes
