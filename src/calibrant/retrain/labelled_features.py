"""Features with labels, checked once and converted one batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import IGNORED, FloatArray, IntArray, Logits, Values
from calibrant._core.chunks import as_tensor

CHUNK = 4096
"""Rows converted at a time for checks and predictions."""


class Batch(NamedTuple):
    """Features ``(n, width)``, labels ``(n,)`` and weights ``(n,)`` on one device."""

    features: Tensor
    labels: Tensor
    weight: Tensor


class LabelledFeatures(NamedTuple):
    """Features in their original dtype and place, of which only batches are converted."""

    features: Logits  # (n, width)
    labels: IntArray
    weight: FloatArray
    kept: IntArray  # rows with a label and a positive weight

    def batch(self, index: IntArray, device: torch.device) -> Batch:
        """Return the rows at an index."""
        at = torch.from_numpy(index) if isinstance(self.features, Tensor) else index
        return Batch(
            as_tensor(self.features[at]).to(device, torch.float32),
            torch.from_numpy(self.labels[index]).to(device),
            torch.from_numpy(self.weight[index]).to(device, torch.float32),
        )

    def chunks(self, device: torch.device) -> Iterator[Batch]:
        """Yield all kept rows, in order."""
        for start in range(0, len(self.kept), CHUNK):
            yield self.batch(self.kept[start : start + CHUNK], device)

    def fingerprint(self) -> str:
        """Digest of all labels and weights, and of the features of 64 rows."""
        columns = (self.labels, self.weight, self.kept)
        digest = hashlib.sha256(b"".join(values.tobytes() for values in columns))
        some = np.unique(np.linspace(0, len(self.labels) - 1, 64).astype(np.int64))
        digest.update(self.batch(some, torch.device("cpu")).features.numpy().tobytes())
        return digest.hexdigest()


def as_labelled_features(
    features: Values,
    labels: Values,
    sample_weight: Values | None = None,
    *,
    classes: int | None = None,
    name: str = "",
) -> LabelledFeatures:
    """Check features ``(..., width)``, labels ``(...)`` and weights against each other."""
    inputs = checks.as_scores(features, f"{name}features")
    targets = checks.as_labels(labels, f"{name}labels")
    if classes is not None:
        checks.check_labels(targets, classes)
    shape = tuple(inputs.shape)
    if len(shape) < 2 or shape[:-1] != targets.shape or not shape[-1]:
        raise ValueError(
            f"{name}features must be (..., width) and {name}labels (...), one row of features for "
            f"each label, got {shape} and {targets.shape}"
        )
    weight, flat = np.ones(targets.size), targets.reshape(-1)
    if sample_weight is not None:
        weight = checks.as_weight(sample_weight, targets.shape)
    kept = np.flatnonzero((flat != IGNORED) & (weight > 0))
    if not len(kept):
        raise ValueError(
            f"{name}features and {name}labels are empty: no example has a label other than "
            f"{IGNORED} and a weight above 0"
        )
    data = LabelledFeatures(inputs.reshape(-1, shape[-1]), flat, weight, kept)
    device = inputs.device if isinstance(inputs, Tensor) else torch.device("cpu")
    for number, batch in enumerate(data.chunks(device)):
        checks.check_finite_rows(batch.features, kept[number * CHUNK :])
    return data


def stratified_share(labels: IntArray, share: float, seed: int) -> IntArray:
    """Return the sorted places of a random share of the examples of each class.

    >>> stratified_share(np.array([0, 0, 0, 0, 1, 1]), 0.5, seed=0)
    array([0, 2, 5])
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen.append(members[: round(share * len(members))])
    return np.sort(np.concatenate(chosen))
