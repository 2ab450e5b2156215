"""Checked probabilities."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import (
    FloatArray,
    Values,
    as_float64,
    as_scores,
    check_sums,
    float_info,
)

T = TypeVar("T", bound=np.generic)


# -------------------------------------------------------------------------------- what is passed


def _as_probs(probs: Values) -> FloatArray:
    """Probabilities ``(..., classes)`` in float64; of P(y = 1), ``(n,)``, both classes."""
    given = as_scores(probs, "probs")
    eps = float(float_info(given).eps)
    exact = as_float64(given)
    if not ((exact >= 0) & (exact <= 1 + 4 * eps)).all():
        raise ValueError(
            "probs must be in [0, 1]: NaN, negative or larger values were found; of logits take "
            "the softmax first, as calibrator.predict_proba does"
        )
    rows = np.stack([1 - exact, exact], -1) if exact.ndim == 1 else exact
    if rows.ndim < 2 or rows.shape[-1] < 2:
        raise ValueError(f"probs must be (..., classes) or (n,), got {exact.shape}")
    check_sums(rows, eps)
    return rows


def _as_given(values: NDArray[T], given: Values) -> Tensor | NDArray[T]:
    """NumPy for NumPy; for a tensor one on its device, of its precision unless boolean."""
    if not isinstance(given, Tensor):
        return values
    dtype = torch.bool if values.dtype == np.bool_ else given.dtype
    return torch.from_numpy(values).to(dtype).to(given.device)  # not every device has float64
