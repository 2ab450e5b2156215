"""Predictions of a split, calibrated and summed up chunk by chunk."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import (
    IGNORED,
    FloatArray,
    IntArray,
    Values,
    as_labels,
    as_weight,
    check_some,
)
from calibrant._core.class_names import is_frame
from calibrant.calibrators.base import Calibrator
from calibrant.data.dataset import TEST_SPLITS, Split
from calibrant.data.files import Data, as_dataset, is_data
from calibrant.data.shards import Chunk, located
from calibrant.decide.probabilities import probabilities
from calibrant.estimate.cells import (
    CELLS,
    _Cells,
    _effective,
    _event_cell,
    _fill_cells,
    _reduce_rows,
    _Rows,
)
from calibrant.estimate.shifts import _Seen, _seen_rows
from calibrant.metrics.reductions import check_one_input
from calibrant.workflows.apply import check_fits
from calibrant.workflows.effect import input_names

SAMPLE = 20_000
"""Rows whose probabilities and features are kept, for class frequencies and feature distances."""
NUMBERS = 4_000_000
"""Numbers that these rows may have."""
INCLUSION = "inclusion_probability"
"""Column with the probability with which an example was selected for labelling."""
NEVER = 2.0
"""Threshold that no confidence reaches."""


class _PredictionSummary(NamedTuple):
    """Sums over a split, its labelled rows, and a sample of all rows."""

    n: int
    unlabelled: _Cells
    labelled: _Cells
    square: float  # sum of squared weights
    margin: FloatArray
    predicted: FloatArray
    rows: _Rows  # with labels
    weight: FloatArray  # of these rows
    inclusion: FloatArray  # their probability of being labelled, up to a factor
    probs: FloatArray  # (sample, classes)
    features: FloatArray | None  # (sample, width)
    sample_weight: FloatArray
    sample_label: IntArray

    @property
    def selected(self) -> bool:
        """True if labels were selected with known probabilities."""
        return bool((self.inclusion < 1).any())

    @property
    def two_classes(self) -> bool:
        """True if the event is y = 1, and not that the answer is right."""
        return self.predicted.size == 2

    @property
    def cells(self) -> _Cells:
        """Sums of all examples."""
        return self.unlabelled.plus(self.labelled)

    def seen(self) -> _Seen:
        """Return the examples as the views of shifts see them."""
        cells = self.cells
        event = cells.weight.reshape(2, CELLS).sum(0)
        size = _effective(cells.weight.sum(), self.square)
        return _Seen(event, self.margin, self.predicted, size, self.features, self.sample_weight)

    def plus(self, other: _PredictionSummary) -> _PredictionSummary:
        """Return the sums of both."""

        def both(name: str) -> Any:
            return np.concatenate([getattr(self, name), getattr(other, name)])

        return _PredictionSummary(
            self.n + other.n,
            self.unlabelled.plus(other.unlabelled),
            self.labelled.plus(other.labelled),
            self.square + other.square,
            self.margin + other.margin,
            self.predicted + other.predicted,
            _Rows.join([self.rows, other.rows]),
            both("weight"),
            both("inclusion"),
            both("probs"),
            None if self.features is None else both("features"),
            both("sample_weight"),
            both("sample_label"),
        )


def _batch_split(
    data: Data | Values | None,
    *,
    probs: Values | None = None,
    features: Values | None = None,
    sample_weight: Values | str | None = None,
    split: str | None = None,
) -> Split:
    """Return the split of a file, or plain arrays without labels as one."""
    if not (is_data(data) or is_frame(data)):
        check_one_input(data, probs)
        data = {} if data is None else {"logits": data}
    columns: Any = {"probs": probs, "features": features, "sample_weight": sample_weight}
    return as_dataset(data, **columns).split(split, TEST_SPLITS)


def _summarise(
    split: Split,
    calibrator: Calibrator | None,
    *,
    threshold: float | None,
    labels: bool,
    labelled_only: bool = False,
) -> _PredictionSummary:
    """Sum up the predictions of a split, with its labels if they are to be used.

    ``labelled_only`` leaves out the other examples, as in a reference.
    """
    if calibrator is not None:
        check_fits(calibrator, split)
    columns = ["logits", "sample_weight"]
    columns += ["labels"] if labels else []
    columns += [INCLUSION] if labels and INCLUSION in split.keys else []
    columns += ["features"] if split.has_features and len(split.shape) < 2 else []
    columns += [name for name in input_names(calibrator) if name not in columns]
    width = split.classes + (split.shards[0].column("features").width if split.has_features else 0)
    step = math.ceil(split.rows / max(1, min(SAMPLE, NUMBERS // width)))
    reach = NEVER if threshold is None else threshold
    settings: dict[str, Any] = {"classes": split.classes, "step": max(step, 1)}
    settings |= {"threshold": reach, "labelled_only": labelled_only}
    task = partial(_chunk_summary, calibrator, **settings)
    parts = split.map(task, *columns, rows=split.chunk_rows)
    total: _PredictionSummary | None = None
    for part in parts:
        total = part if total is None else total.plus(part)
    with located(split.path):
        check_some(0 if total is None else total.n)
    assert total is not None
    return total


def _chunk_probs(calibrator: Calibrator | None, chunk: Chunk) -> FloatArray:
    """Return calibrated probabilities ``(n, classes)`` of a chunk."""
    scores = chunk["logits"]
    if calibrator is not None:
        scores = calibrator.transform(scores, calibrator.input_features(chunk))
    probs, _ = probabilities(scores, None)
    return probs.reshape(-1, probs.shape[-1])


def _chunk_summary(
    calibrator: Calibrator | None,
    chunk: Chunk,
    *,
    classes: int,
    step: int,
    threshold: float,
    labelled_only: bool,
) -> _PredictionSummary:
    """Sum up a chunk; every row whose place is a multiple of ``step`` is in the sample."""
    probs = _chunk_probs(calibrator, chunk)
    shape = chunk["logits"].shape[:1] if chunk["logits"].ndim < 3 else chunk["logits"].shape[:-1]
    weight, labels = chunk.get("sample_weight"), _chunk_labels(chunk, shape)
    weight = np.ones(math.prod(shape)) if weight is None else as_weight(weight, shape)
    rows = _reduce_rows(probs, labels)
    inclusion, given = np.ones(labels.size), chunk.get(INCLUSION)
    if given is not None:
        inclusion = np.asarray(given, np.float64).reshape(-1)
        if not ((inclusion[rows.labelled] > 0) & (inclusion[rows.labelled] <= 1)).all():
            raise ValueError(
                f"{INCLUSION} must be above 0 and at most 1 where there is a label: pass the "
                "probabilities with which the examples were selected"
            )
    if labelled_only:
        weight = np.where(rows.labelled, weight, 0)
    counted = weight > 0
    cell, known = _event_cell(rows, threshold), rows.labelled & counted
    unknown = counted & ~known
    seen = _seen_rows(rows, weight, classes, cell)
    sampled = counted & (np.arange(len(probs)) % step == 0)
    features = chunk.get("features")
    return _PredictionSummary(
        int(counted.sum()),
        _fill_cells(rows.take(unknown), cell[unknown], weight[unknown]),
        _fill_cells(rows.take(known), cell[known], weight[known]),
        float(weight @ weight),
        seen.margin,
        seen.predicted,
        rows.take(known),
        weight[known],
        inclusion[known],
        probs[sampled],
        None if features is None else np.asarray(features)[sampled],
        weight[sampled],
        rows.label[sampled],
    )


def _chunk_labels(chunk: Chunk, shape: tuple[int, ...]) -> IntArray:
    """Return the labels of a chunk, -100 without."""
    given = chunk.get("labels")
    if given is None:
        return np.full(math.prod(shape), IGNORED, np.int64)
    labels = as_labels(given)
    if labels.shape != shape:
        raise ValueError(f"one label per example is wanted, got {labels.shape} for {shape}")
    return labels.reshape(-1)
