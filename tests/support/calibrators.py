"""Calibrators that are quick to fit, and calibrators that keep what they were fitted with."""

from typing import Any

import numpy as np
import torch

from calibrant._core.checks import IGNORED
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.network import ParametrizedTemperatureScaling
from calibrant.calibrators.records import TemperatureCalibrator
from calibrant.calibrators.registry import CALIBRATORS, PARTS
from calibrant.calibrators.smart import SMART

EVERY_METHOD = {**CALIBRATORS, **PARTS}
"""Methods, and the parts of ``auto``, by name."""
QUICK: dict[str, dict[str, Any]] = {
    "auto": {"candidates": ("none", "ts", "beta")},
    "gc": {"partitions": 4},
    "maccal": {"bottleneck": 16, "epochs": 20, "batch_size": 64, "rate": 0.01},
    "multicalibration": {"base": "ts", "rounds": 5},
}
"""Options of methods whose fits take long."""


def features_of(logits) -> torch.Tensor:
    """Features whose last layer is the identity: centred logits, or halves of log-odds."""
    scores = torch.as_tensor(logits)
    scores = scores if scores.is_floating_point() else scores.double()
    return scores - scores.mean(-1, keepdim=True)


def beside(calibrator, logits) -> dict[str, Any]:
    """What a fit wants besides logits and labels."""
    if not calibrator.needs_features:
        return {}
    scores = torch.as_tensor(logits)
    if scores.ndim == 1:
        scores = torch.stack([torch.zeros_like(scores), scores], -1)
    width = scores.shape[-1]
    return {"features": features_of(scores), "head": (np.eye(width), np.zeros(width))}


def make(name) -> Any:
    """A calibrator that is quick to fit: few steps of networks, few candidates of ``auto``."""
    calibrator = EVERY_METHOD[name](**QUICK.get(name, {}))
    for part in calibrator.modules():
        if isinstance(part, SMART | ParametrizedTemperatureScaling):
            part.steps = 50
    return calibrator


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
