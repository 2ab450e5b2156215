"""Checked probabilities from logits or ``probs=``, and results in the form of the input."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import FloatArray, Logits
from calibrant._core.probs import check_columns, check_range, check_sums
from calibrant.metrics.reductions import Input, check_one_input

T = TypeVar("T", bound=np.generic)


def probabilities(logits: Input, probs: Input) -> tuple[FloatArray, Logits]:
    """Probabilities ``(..., classes)`` in float64, and the input as an array or a tensor.

    One number per example, log-odds or P(y = 1), gives the probabilities of both classes.
    """
    check_one_input(logits, probs)
    name, values = ("logits", logits) if probs is None else ("probs", probs)
    scores = checks.as_scores(values, name)  # type: ignore[arg-type]  # one is not None
    rows, eps = checks.as_float64(scores), float(checks.float_info(scores).eps)
    if probs is None and (np.isnan(rows).any() or np.isposinf(rows).any()):
        raise ValueError("logits must be finite, or -inf for masked classes, got NaN or +inf")
    if probs is not None:
        check_range(rows, eps)
    if rows.ndim == 1:
        rows = np.stack([np.zeros_like(rows) if probs is None else 1 - rows, rows], -1)
    check_columns(rows, name)
    if probs is None:
        remedy = "if they are, pass them as probs="
        checks.warn_of_probs(scores, remedy, checks.MANY_ODDS)
        return np.asarray(softmax(rows, -1)), scores
    check_sums(rows, eps)
    return rows, scores


def _in_form_of(scores: Logits, values: NDArray[T]) -> Tensor | NDArray[T]:
    """NumPy for NumPy; for a tensor one on its device, where floats have its precision."""
    if not isinstance(scores, Tensor):
        return values
    dtype = scores.dtype if values.dtype.kind == "f" else None
    return torch.from_numpy(values).to(dtype=dtype).to(scores.device)  # some have no float64


def check_share(value: float, name: str, example: str) -> None:
    """Raise unless a share is strictly between 0 and 1."""
    if not isinstance(value, (int, float, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}: {example}")
    if not 0 < 1 - value < 1:  # 1 - 1e-17 is 1: such a share cannot be asked for
        raise ValueError(f"{name} must be between 0 and 1, got {value}: {example}")
