"""Calibrators of four classes, one of them with features."""

from typing import Any

import numpy as np
import torch

from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.calibrators import EVERY_METHOD
from tests.support.simulate import drawn

CLASSES, WIDTH = 4, 6


def fitted(name, *, one_logit=False, **options):
    rng = np.random.default_rng(0)
    logits, labels = drawn(rng, 500, CLASSES, 2.0)
    if one_logit:
        logits, labels = logits[:, 0], (logits[:, 0] / 2 + rng.logistic(size=500) > 0.5).astype(int)
    kind: Any = EVERY_METHOD[name]
    return kind(**options).fit(logits, labels)


class Shifted(TemperatureScaling):
    """Adds the first feature to the first logit."""

    needs_features = True
    keeps_argmax = False

    def _fit(self, given, context):
        self._labelled_features(given, context)
        super()._fit(given, context)

    def _transform(self, logits, top, features):
        added = torch.zeros_like(logits)
        added[..., 0] = features[..., 0]
        return super()._transform(logits + added, top, None)


def shifted(*, one_logit=False):
    rng = np.random.default_rng(0)
    logits, labels = drawn(rng, 500, CLASSES, 2.0)
    features = rng.normal(size=(500, WIDTH))
    if one_logit:
        return Shifted().fit(logits[:, 0], logits[:, 1] < logits[:, 0], features=features)
    return Shifted().fit(logits, labels, features=features)
