"""Measure predictions before and after calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import IGNORED, Values, spread
from calibrant._core.chunks import examples
from calibrant.calibrators.base import Calibrator
from calibrant.data.dataset import (
    Array,
    Block,
    Data,
    Progress,
    Source,
    opened,
    warn_of_zeros,
)
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation


def calibrated(calibrator: Calibrator, logits: Values, features: Values | None = None) -> Tensor:
    """Calibrated logits of checked input, on the device of the input.

    >>> from calibrant.calibrators import Identity
    >>> calibrated(Identity().fit([[2.0, 1.0]], [0]), [[5.0, 3.0]])
    tensor([[ 0., -2.]], dtype=torch.float64)
    """
    return torch.as_tensor(calibrator.transform(logits, features))


# Before and after.


class Effect(NamedTuple):
    """What a calibrator does to some examples.

    Attributes
    ----------
    before, after : Evaluation
        Metrics of the logits as they were and of the calibrated ones.
    argmax_changed : int
        Number of examples whose predicted class changed.
    temperatures : (float, float) or None
        The smallest and the largest temperature given to an example; None for methods without.
    """

    before: Evaluation
    after: Evaluation
    argmax_changed: int
    temperatures: tuple[float, float] | None


def effect_file(
    calibrator: Calibrator,
    data: Data,
    *,
    split: str | None = None,
    sample_weight: str | None = None,
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
    progress: Progress | None = None,
) -> Effect:
    """Measure a prediction file before and after calibration; logits are never held whole.

    Parameters that are not listed are those of :func:`calibrant.evaluate_file`.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    data : path or mapping
        A prediction file, a folder, a glob, or arrays by their names in a file.
    split : str, optional
        Which split; ``test``, else the plain arrays, by default.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> found = effect_file(fit_file(sample_path(), "ts"), sample_path(), level=None)
    >>> [round(e["ece"].value, 4) for e in (found.before, found.after)], found.argmax_changed
    ([0.0424, 0.0091], 0)
    """
    file = opened(data)
    source = Source(file, file.split(split, ("test", "")), sample_weight)
    stream = Accumulator(bins=bins, pairs=True, metrics=metrics, level=level, seed=seed)
    found, zeros = measured([calibrator], source, stream, progress)
    warn_of_zeros(zeros)
    return found


def measured(
    calibrators: Sequence[Calibrator],
    source: Source,
    stream: Accumulator,
    progress: Progress | None = None,
) -> tuple[Effect, int]:
    """Before and after on the rows of a source; one calibrator for all, or one for each fold.

    Also returns how many probabilities of zero there were; a fit on them has warned already.
    """
    meter = Meter(calibrators, stream.like(), stream.like())
    source.walk(meter, *meter.columns(), progress=progress)
    return meter.effect(), meter.floored


@dataclass
class Meter:
    """Adds up predictions block by block, before and after calibration.

    With several calibrators, each serves the rows of its fold.
    """

    calibrators: Sequence[Calibrator]
    after: Accumulator
    before: Accumulator | None = None
    changed: int = 0
    low: float = math.inf
    high: float = -math.inf
    floored: int = 0

    def columns(self) -> list[str]:
        """Columns that a block must have."""
        wanted = ["features"] if any(c.needs_features for c in self.calibrators) else []
        wanted += ["fold"] if len(self.calibrators) > 1 else []
        return ["labels", *wanted]

    def __call__(self, block: Block) -> None:
        """Add a block."""
        kept = _labelled(block)
        self.floored += block.floored
        if not len(kept.labels):
            return
        found = np.empty(kept.logits.shape, np.float32 if _narrow(kept.logits) else np.float64)
        for i, calibrator in enumerate(self.calibrators):
            rows = slice(None) if kept.fold is None else kept.fold == i
            if len(kept.logits[rows]):
                found[rows] = self._calibrated(calibrator, kept, rows)
        self.after.update(found, kept.labels, sample_weight=kept.weight)
        self.changed += int((_top(kept.logits) != _top(found)).sum())
        if self.before is not None:
            self.before.update(kept.logits, kept.labels, sample_weight=kept.weight)

    def _calibrated(self, calibrator: Calibrator, kept: Block, rows: Any) -> Array:
        logits = kept.logits[rows]
        temperature = getattr(calibrator, "temperature", None)
        if self.before is not None and callable(temperature):
            temperatures = temperature(logits)
            self.low = min(self.low, float(temperatures.min()))
            self.high = max(self.high, float(temperatures.max()))
        features = None if kept.features is None else kept.features[rows]
        return np.asarray(calibrated(calibrator, logits, features).cpu())

    def effect(self) -> Effect:
        """Everything added up."""
        assert self.before is not None
        temperatures = (self.low, self.high) if self.low <= self.high else None
        return Effect(self.before.compute(), self.after.compute(), self.changed, temperatures)


def _labelled(block: Block) -> Block:
    """Return the examples that count, in one dimension; what the others hold does not matter."""
    given = examples(block.logits, block.labels, block.weight)
    shape = block.labels.shape
    kept = (given.labels != IGNORED).reshape(shape)
    return Block(
        block.logits[kept],
        given.labels[kept.reshape(-1)],
        given.labelled_weight(),
        None if block.features is None else block.features[kept],
        None if block.fold is None else spread(block.fold, shape, "fold")[kept],
    )


def _narrow(logits: Array) -> bool:
    return logits.dtype.itemsize <= 4


def _top(logits: Array) -> Array:
    """The predicted class; one logit is that of class 1 against 0."""
    return np.asarray(logits > 0 if logits.ndim == 1 else logits.argmax(-1))
