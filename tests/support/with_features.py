"""Calibrators that look at features, data with a last layer, and fits without a word."""

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from calibrant.calibrators.features import (
    FeatureClipping,
    GroupCalibration,
    ProCal,
)

METHODS: dict[str, Any] = {
    "gc": partial(GroupCalibration, partitions=4),
    "density_ratio": partial(ProCal, method="density_ratio"),
    "bin_mean_shift": ProCal,
    "fc": FeatureClipping,
}
every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
PROXIMITY = {name: METHODS[name] for name in ("density_ratio", "bin_mean_shift")}
every_proximity = pytest.mark.parametrize("method", PROXIMITY.values(), ids=PROXIMITY)


def linear_data(rng, n=600, classes=4, width=6, temperature=2.0):
    """Logits of a last layer, labels that it is too sure about, its inputs, and the layer."""
    features = rng.normal(size=(n, width))
    weight, bias = rng.normal(size=(classes, width)), rng.normal(size=classes)
    logits = features @ weight.T + bias
    labels = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(-1)
    return logits, labels, features, (weight, bias)


def quietly(module, *data, **named) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.fit(*data, **named)


def fitted(module, logits, labels, features, head=None, **named) -> Any:
    return quietly(module, logits, labels, features=features, head=head, **named)


def mean_nll(probs, labels):
    return -np.log(probs[np.arange(len(labels)), labels]).mean()


def near_and_far(rng, n, classes=5):
    """Samples far from the others are over-confident by a factor of 3; also the truth."""
    truth = 2 * rng.normal(size=(n, classes))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    far = rng.random(n) < 0.4
    features = rng.normal(size=(n, 4)) * np.where(far, 12.0, 1.0)[:, None]
    return truth * np.where(far, 3.0, 1.0)[:, None], labels, features, softmax(truth, -1).max(-1)
