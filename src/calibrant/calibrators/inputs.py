"""Checks of what a fit and a call get, and its conversion to tensors.

The functions are methods of :class:`~calibrant.calibrators.base.Calibrator`; some methods have
their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import Features, Logits, Values, as_scores
from calibrant._core.chunks import as_tensor, mask_gap, on_device, range_of, with_masks
from calibrant._core.torch_models import check_place
from calibrant.calibrators import data_checks


def check_logits(calibrator: Any, logits: Tensor) -> None:
    """Raise unless the calibrator is fitted, for logits of this shape, and where they are."""
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"a calibrator is called with tensors, got a {type(logits).__name__}: "
            "predict_proba(logits) and transform(logits) take arrays too"
        )
    name, classes = type(calibrator).__name__, calibrator._classes
    if classes == 0:
        raise RuntimeError(f"this {name} is not fitted: call fit(logits, labels) first")
    if classes > 1 and (logits.ndim == 0 or logits.shape[-1] != classes):
        raise ValueError(
            f"fitted for {classes} classes, got {logits.shape[-1] if logits.ndim else 1}:"
            f" logits must be (..., {classes}), as in fit, got {tuple(logits.shape)}"
        )
    check_place(calibrator, calibrator.device, logits)


def check_features(
    calibrator: Any, features: Logits | None, rows: tuple[int, ...], *, fitting: bool = False
) -> None:
    """Raise unless there are features, where needed, for logits with rows of a shape."""
    name, width = type(calibrator).__name__, 0 if fitting else calibrator._width
    if features is None:
        if calibrator.needs_features and not (fitting and calibrator.uses_features):
            raise ValueError(f"{name} needs features: pass features=, inputs of the last layer")
        return
    shape = tuple(features.shape)
    fits = shape and shape[:-1] == tuple(rows) and shape[-1] == (width or max(shape[-1], 1))
    if (calibrator.needs_features or calibrator.uses_features) and not fits:
        wanted = f"(..., {width}), as in fit," if width else "(..., width)"
        raise ValueError(
            f"features must be {wanted} with one row for each row of logits, got {shape} for "
            f"rows of shape {tuple(rows)}"
        )


def checked_logits(calibrator: Any, logits: Values) -> Tensor:
    """Logits as a tensor in which every row has a softmax."""
    given = as_scores(logits)
    scores: Tensor = calibrator._tensor(given)
    calibrator.check_logits(scores)
    one, gap = calibrator._classes == 1, mask_gap(given)
    if not one and range_of(scores) < gap:  # which is finite
        return scores
    rows = scores.reshape(-1, calibrator._classes)
    low, top = rows.aminmax(dim=-1)
    if one:  # log-odds z stand for (0, z)
        low, top = low.clamp(max=0), top.clamp(min=0)
    bad = ~torch.isfinite(top)
    if bad.any():
        at = int(bad.nonzero()[0])
        raise checks.bad_row(rows[at], 0, at)
    masked = top - low >= gap
    if calibrator._floor or not masked.any():
        return scores
    if not calibrator.accepts_masked:
        raise data_checks.masked_row(int(masked.nonzero()[0]))
    return scores if one else with_masks(rows, gap).reshape(scores.shape)


def checked_features(
    calibrator: Any, features: Features | None, device: torch.device
) -> Tensor | None:
    """Features as a finite tensor, for methods that need them."""
    if features is None or not calibrator.needs_features:
        return None
    inputs: Tensor = calibrator._tensor(calibrator.encoded(features), device)
    if inputs.ndim:
        calibrator._check_feature_values(inputs.reshape(-1, inputs.shape[-1]))
    return inputs


def tensor_of(calibrator: Any, values: Values, device: Any = None) -> Tensor:
    """A tensor as it is, and an array on a device, by default where the calibrator is."""
    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    plain = array.dtype in (np.float32, np.float64) and array.flags.carray  # need no copy
    tensor = torch.from_numpy(array) if plain else as_tensor(array)
    return on_device(tensor, device or calibrator.device)
