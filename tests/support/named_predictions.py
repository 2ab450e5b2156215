"""Predictions by name: random ones that are over-confident, and the sample of the package."""

from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from calibrant.data import sample_path

TIGHT = 1e-12
"""Float64 sums in another order."""

RANDOM = {
    "2 classes": (3000, 2, 1.0),
    "3 classes, few rows": (60, 3, 1.0),
    "10 classes": (2025, 10, 2.0),
    "100 classes": (750, 100, 3.0),
}

every = pytest.mark.parametrize("name", [*RANDOM, "val", "test"])
random_only = pytest.mark.parametrize("name", RANDOM)
sample_only = pytest.mark.parametrize("name", ["val", "test"])
weights_and_ties = pytest.mark.parametrize(
    ("name", "weigh", "digits"),
    [
        ("2 classes", False, None),
        ("3 classes, few rows", True, 2),
        ("10 classes", True, None),
        ("100 classes", False, 2),
        ("val", True, 2),
        ("test", False, None),
    ],
)
"""Each predictions, with or without weights, with distinct or tied confidences: pairwise."""


def predictions(name: str) -> tuple[Any, Any]:
    """Logits and labels; the random ones are drawn at twice the temperature."""
    if name not in RANDOM:
        with np.load(sample_path()) as arrays:
            logits, labels = arrays[f"{name}_logits"], arrays[f"{name}_labels"]
        return logits.astype(np.float64), labels.astype(np.int64)
    rng = np.random.default_rng(7)
    n, classes, scale = RANDOM[name]
    logits = rng.normal(0, scale, (n, classes))
    return logits, (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)


def pairs_of(logits, labels, digits=None):
    """Top-label pairs without calibrant, rounded so that many tie."""
    probs = softmax(logits, axis=-1)
    confidence = probs.max(-1)
    return (confidence if digits is None else confidence.round(digits)), probs.argmax(-1) == labels


def weights_of(rng, size, weigh):
    return rng.exponential(size=size) if weigh else None
