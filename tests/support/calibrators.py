"""Calibrators that keep what they were fitted with."""

from typing import Any

import numpy as np
import torch

from calibrant._core.checks import IGNORED
from calibrant.calibrators.base import Calibrator, TemperatureCalibrator


class Shift(Calibrator):
    """Adds the logarithm of how often each class is the label: reads whole, changes the argmax."""

    shift_: torch.Tensor

    def __init__(self):
        super().__init__()
        self._store(shift_=torch.zeros(0))
        self.context: Any = None

    def size(self, classes):
        return 0

    def _fit(self, examples, context):
        kept = examples.labels[examples.labels != IGNORED]
        counts = np.bincount(kept, examples.labelled_weight(), minlength=examples.classes)
        self._store(shift_=np.log(counts + 1))
        self.context = context

    def _transform(self, logits, top, features):
        return logits + self.shift_


class Featured(Shift):
    """The same, with the first feature of a row added to its first class."""

    needs_features = True

    def _transform(self, logits, top, features):
        return (
            logits
            + self.shift_
            + torch.nn.functional.one_hot(torch.tensor(0), logits.shape[-1])
            * features[..., :1].to(logits.dtype)
        )


class PerRow(TemperatureCalibrator):
    """Divides each row by the distance of its two largest logits: a temperature of its own."""

    def size(self, classes):
        return 0

    def _fit_records(self, records):
        self.solution_ = None

    def _temperature(self, logits, top):
        two = logits.topk(2, -1).values
        return 1 + two[..., :1] - two[..., 1:]
