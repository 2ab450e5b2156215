"""Predictions as pairs of confidence and outcome, and predictions that wait for their labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from calibrant._core.checks import (
    IGNORED,
    Features,
    IntArray,
    Logits,
    Values,
    as_labels,
    check_whole,
)
from calibrant._core.chunks import as_tensor, examples, top_class
from calibrant._core.class_names import (
    as_array,
    class_names_of,
    in_order,
    numbered,
    numbers_in_order,
)
from calibrant.calibrators.base import Calibrator, feature_rows
from calibrant.metrics.reductions import Pairs, reduce_examples

Id = int | str


def _stream_order(
    calibrator: Calibrator | None, names: Sequence[str] | None
) -> Sequence[str] | None:
    """Return the order of classes in which examples are recognised, whatever that of a file."""
    known = None if calibrator is None else calibrator.class_names_
    return known or (None if names is None else sorted(names))


def _in_stream_order(
    calibrator: Calibrator | None, logits: Values | None, probs: Values | None, labels: Any = None
) -> tuple[Any, Any, Any]:
    """Return data frames as arrays in this order, and labels as numbers of its classes."""
    given: Any = logits if probs is None else probs
    if (names := class_names_of(given)) is None:
        return logits, probs, labels
    values, places = in_order(given, _stream_order(calibrator, names))
    if labels is not None:
        labels = numbered(labels, given)
        labels = labels if places is None else numbers_in_order(places, as_array(labels))
    return (values, None, labels) if probs is None else (None, values, labels)


def _labelled_pairs(
    calibrator: Calibrator | None, logits: Logits, labels: Values, features: Features | None
) -> Pairs:
    """Return pairs of the labelled examples; the others may hold anything."""
    checked = examples(logits, labels)
    if calibrator is not None:
        labelled = (checked.labels != IGNORED).reshape(as_labels(labels).shape)
        after = calibrator.transform(logits[labelled], feature_rows(features, labelled))
        checked = examples(after, checked.labels[labelled.reshape(-1)])
    reduced = reduce_examples(checked)
    return Pairs(reduced.confidence, reduced.outcome)


def _top_predictions(
    calibrator: Calibrator | None, logits: Logits, features: Features | None
) -> tuple[list[float], list[int]]:
    """Return confidence and predicted class of each row; one logit is that of class 1."""
    scores = logits if calibrator is None else calibrator.transform(logits, features)
    values = as_tensor(scores)
    top = ((values > 0).long() if values.ndim == 1 else top_class(values)[..., 0]).cpu().numpy()
    return reduce_examples(examples(scores, top)).confidence.tolist(), top.tolist()


def _class_count(logits: Logits) -> int:
    """Return the number of classes, or 0 if there are no examples to tell."""
    classes = 2 if logits.ndim == 1 else int(logits.shape[-1])
    return 0 if 0 in logits.shape else classes


def _is_empty(values: Values) -> bool:
    """Return True for no values at all."""
    shape = getattr(values, "shape", None)
    return isinstance(values, (list, tuple)) and not values if shape is None else 0 in shape


def _integer_labels(labels: Values) -> IntArray:
    """Return labels as integers, also those of an empty list, which NumPy takes for floats."""
    return np.zeros(0, np.int64) if _is_empty(labels) else as_labels(labels)


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

    def match(self, ids: Iterable[Id], labels: IntArray) -> tuple[list[Id], Pairs]:
        """Remove the predictions whose labels have come, and return their ids and pairs."""
        names, pairs = [], []
        for key, label in zip(ids, labels.tolist(), strict=True):
            prediction = self.waiting.pop(key, None)
            if prediction is None:
                self.counts["unknown"] += 1
            elif label == IGNORED:
                self.counts["ignored"] += 1
            else:
                names.append(key)
                pairs.append((prediction[0], prediction[1] == label))
        confidence, outcome = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return names, Pairs(confidence, outcome > 0)

    def merge(self, other: PendingPredictions) -> None:
        """Add the predictions and counts of another worker."""
        for key, count in other.counts.items():
            self.counts[key] += count
        self.counts["repeated"] += len(self.waiting.keys() & other.waiting.keys())
        self.waiting |= other.waiting
        self._drop()

    def restore(self, counts: dict[str, int], waiting: Iterable[tuple[Id, float, int]]) -> None:
        """Take over the counts and the waiting predictions of a saved state."""
        for name in self.counts:
            check_whole(name, counts[name], least=0)
            self.counts[name] = counts[name]
        for key, confidence, predicted in waiting:
            check_whole("predicted class", predicted, least=0)
            if not 0 <= confidence <= 1:
                raise ValueError(f"confidence must be in [0, 1], got {confidence!r:.60}")
            self.waiting[as_ids([key])[0]] = (float(confidence), predicted)

    def _drop(self) -> None:
        while len(self.waiting) > self.limit:
            del self.waiting[next(iter(self.waiting))]
            self.counts["dropped"] += 1


def as_ids(ids: Iterable[Id]) -> list[Id]:
    """Return ids as a list of plain numbers or strings, which JSON can hold."""
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"ids must be a list, one for each example, got {ids!r}")
    values = ids.tolist() if isinstance(ids, (np.ndarray, Tensor)) else list(ids)
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    for value in plain:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"ids must be whole numbers or text, got {value!r}: use str(id)")
    return plain
