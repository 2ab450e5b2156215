"""What the calibrators by features share."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, warn

PRIOR = 50.0
"""Examples that all others together count for in a group or bin: a small one ends near what is
best for all, an empty one there."""


def with_prior(weight: FloatArray, member: BoolArray) -> FloatArray:
    """Weights for the fit of a part: its own examples, and a little of all of them."""
    return np.asarray(weight * member + PRIOR * weight.mean() * weight / weight.sum())


def warn_of_constant(name: str, features: Tensor) -> None:
    """Warn where features ``(n, width)`` do not tell examples apart."""
    if len(features) > 1 and bool((features == features[:1]).all()):
        warn(
            f"{name}: all {len(features):,} examples have the same features, so nothing can be "
            "learned from them; are these the inputs of the last layer?"
        )
