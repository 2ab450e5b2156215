"""Predictions that wait for their labels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from calibrant._core.checks import IGNORED, IntArray
from calibrant.metrics.reductions import Pairs

Id = int | str


class PendingPredictions:
    """Confidence and predicted class of at most ``limit`` ids, the oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting: dict[Id, tuple[float, int]] = {}
        self.counts = dict.fromkeys(("dropped", "repeated", "unknown", "ignored"), 0)

    def add(self, ids: Iterable[Id], confidences: Iterable[float], classes: Iterable[int]) -> None:
        """Add predictions; an id that is waiting already is replaced."""
        for key, confidence, predicted in zip(ids, confidences, classes, strict=True):
            self.counts["repeated"] += self.waiting.pop(key, None) is not None
            self.waiting[key] = (confidence, predicted)
        self._drop()

    def match(self, ids: Iterable[Id], labels: IntArray) -> Pairs:
        """Remove the predictions whose labels have come, and return their pairs."""
        pairs = []
        for key, label in zip(ids, labels.tolist(), strict=True):
            prediction = self.waiting.pop(key, None)
            if prediction is None:
                self.counts["unknown"] += 1
            elif label == IGNORED:
                self.counts["ignored"] += 1
            else:
                pairs.append((prediction[0], prediction[1] == label))
        confidence, outcome = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return Pairs(confidence, outcome > 0)

    def merge(self, other: PendingPredictions) -> None:
        """Add the predictions and counts of another worker."""
        for key, count in other.counts.items():
            self.counts[key] += count
        self.counts["repeated"] += len(self.waiting.keys() & other.waiting.keys())
        self.waiting |= other.waiting
        self._drop()

    def _drop(self) -> None:
        while len(self.waiting) > self.limit:
            del self.waiting[next(iter(self.waiting))]
            self.counts["dropped"] += 1


def as_ids(ids: Iterable[Id]) -> list[Id]:
    """Ids as a list of plain numbers or strings, which JSON can hold."""
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"ids must be a list, one for each example, got {ids!r}")
    values = ids.tolist() if isinstance(ids, (np.ndarray, Tensor)) else list(ids)
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    for value in plain:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"ids must be whole numbers or text, got {value!r}: use str(id)")
    return plain
