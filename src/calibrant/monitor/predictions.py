"""Predictions of a batch or of a file as pairs of confidence and outcome."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    IntArray,
    Logits,
    Values,
    as_labels,
    as_scores,
)
from calibrant._core.chunks import as_tensor, examples, top_class
from calibrant.calibrators.base import Calibrator
from calibrant.data import Chunk
from calibrant.metrics.reductions import Pairs, reduce_examples
from calibrant.monitor.windows import Tolerated, Window


def shard_sums(
    calibrator: Calibrator | None, tolerated: Tolerated, chunks: Iterator[Chunk]
) -> list[tuple[Window, int]]:
    """Sums of each chunk of a shard, and its number of ignored labels."""
    sums = []
    for chunk in chunks:
        pairs = labelled_pairs(calibrator, chunk.logits, chunk.labels, chunk.get("features"))
        sums.append((tolerated.window(pairs), chunk.labels.size - pairs.outcome.size))
    return sums


def labelled_pairs(
    calibrator: Calibrator | None, logits: Logits, labels: Values, features: Values | None
) -> Pairs:
    """Pairs of the labelled examples; the others may hold anything."""
    checked = examples(logits, labels)
    if calibrator is not None:
        labelled = (checked.labels != IGNORED).reshape(as_labels(labels).shape)
        beside = None if features is None else _select(as_scores(features, "features"), labelled)
        after = calibrator.transform(_select(logits, labelled), beside)
        checked = examples(after, checked.labels[labelled.reshape(-1)])
    rows = reduce_examples(checked)
    return Pairs(rows.confidence, rows.outcome)


def top_predictions(
    calibrator: Calibrator | None, logits: Logits, features: Values | None
) -> tuple[list[float], list[int]]:
    """Confidence and predicted class of each row; one logit is that of class 1 against 0."""
    scores = logits if calibrator is None else calibrator.transform(logits, features)
    values = as_tensor(scores)
    top = ((values > 0).long() if values.ndim == 1 else top_class(values)).cpu().numpy()
    return reduce_examples(examples(scores, top)).confidence.tolist(), top.tolist()


def class_count(logits: Logits) -> int:
    """Number of classes; 0, for unknown, where there are no examples."""
    if 0 in logits.shape:
        return 0
    return 2 if logits.ndim == 1 else int(logits.shape[-1])


def is_empty(values: Values) -> bool:
    """Tell whether there are no values at all."""
    shape = getattr(values, "shape", None)
    return isinstance(values, (list, tuple)) and not values if shape is None else 0 in shape


def integer_labels(labels: Values) -> IntArray:
    """Labels as integers, also those of an empty list, which NumPy takes for floats."""
    return np.zeros(0, np.int64) if is_empty(labels) else as_labels(labels)


def _select(values: Logits, kept: BoolArray) -> Logits:
    return values[torch.from_numpy(kept) if isinstance(values, Tensor) else kept]
