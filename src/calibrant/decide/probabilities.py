"""Probabilities from logits or ``probs=``, checked, and results in the form of the input."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from calibrant._core.checks import (
    FloatArray,
    Logits,
    Values,
    as_float64,
    as_scores,
    check_sums,
    float_info,
)

T = TypeVar("T", bound=np.generic)


def one_input(logits: Values | None, probs: Values | None) -> Logits:
    """Return the one of the two that was passed, as an array or a tensor of floats."""
    if (logits is None) == (probs is None):
        problem = "got neither" if logits is None else "got both"
        raise TypeError(f"pass either logits or probs=, {problem}")
    return as_scores(probs, "probs") if logits is None else as_scores(logits)  # type: ignore[arg-type]


def probabilities(logits: Values | None, probs: Values | None) -> FloatArray:
    """Probabilities ``(..., classes)`` in float64; of one number per example, both classes."""
    given = one_input(logits, probs)
    exact = as_float64(given)
    if probs is not None:
        return _checked_probs(exact, float(float_info(given).eps))
    if np.isnan(exact).any() or np.isposinf(exact).any():
        raise ValueError("logits must be finite, or -inf for masked classes, got NaN or +inf")
    rows = np.stack([np.zeros_like(exact), exact], -1) if exact.ndim == 1 else exact
    if rows.ndim < 2 or rows.shape[-1] < 2:
        raise ValueError(f"logits must be (..., classes) or (n,), got {exact.shape}")
    return np.asarray(softmax(rows, -1))


def _checked_probs(exact: FloatArray, eps: float) -> FloatArray:
    if not ((exact >= 0) & (exact <= 1 + 4 * eps)).all():
        raise ValueError(
            "probs must be in [0, 1], got NaN, negative or larger values: pass scores that are "
            "not probabilities as logits"
        )
    rows = np.stack([1 - exact, exact], -1) if exact.ndim == 1 else exact
    if rows.ndim < 2 or rows.shape[-1] < 2:
        raise ValueError(f"probs must be (..., classes) or (n,), got {exact.shape}")
    check_sums(rows, eps)
    return rows


def in_form_of(given: Values, values: NDArray[T]) -> Tensor | NDArray[T]:
    """NumPy for NumPy; for a tensor one on its device, of its precision unless boolean."""
    if not isinstance(given, Tensor):
        return values
    dtype = torch.bool if values.dtype == np.bool_ else given.dtype
    return torch.from_numpy(values).to(dtype).to(given.device)  # not every device has float64


def check_share(value: float, name: str, example: str) -> None:
    """Raise unless a share is strictly between 0 and 1."""
    if not isinstance(value, (int, float, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}: {example}")
    if not 0 < 1 - value < 1:  # 1 - 1e-17 is 1: such a share cannot be asked for
        raise ValueError(f"{name} must be between 0 and 1, got {value}: {example}")
