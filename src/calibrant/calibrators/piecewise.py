"""Step functions and broken lines.

Graphs have loops for what ``torch.searchsorted`` does, which is missing in some export formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import FloatArray
from calibrant._core.chunks import has_numbers

BEYOND = 3e38
"""Stands for infinity in rows of edges that are filled up: learned values are kept finite."""


def _filled(rows: Sequence[FloatArray], value: float) -> FloatArray:
    """Rows of different lengths as one array, the short ones filled up with a value."""
    width = max(len(row) for row in rows)
    return np.stack([np.pad(x, (0, width - len(x)), constant_values=value) for x in rows])


def _place(values: Tensor, edges: Tensor) -> Tensor:
    """Number of edges below each value: the place of its bin ``(low, high]``.

    Edges are sorted, ``(m,)`` or, one row per class, ``(classes, m)`` filled up with ``BEYOND``.
    """
    if edges.ndim == 1 and has_numbers(values):
        return torch.searchsorted(edges.to(values.dtype), values.contiguous())
    # while torch.jit.trace records, sizes are tensors
    left, flat = int(edges.shape[-1]), edges.to(values.dtype).reshape(-1)
    start = _row(edges) - 1  # the place of the last edge that is known to be below
    last = torch.zeros_like(values, dtype=torch.int64) + start
    while left:  # edges behind it that may be below: as many for all values, so none is beyond
        ahead = last + (left + 1) // 2
        last = torch.where(flat[ahead] < values, ahead, last)
        left //= 2
    return last - start


def _at_place(table: Tensor, index: Tensor) -> Tensor:
    """Entry of a table ``(m,)``, or of the row of each class ``(classes, m)``."""
    if table.ndim == 1 and has_numbers(table):
        return table.take(index)
    return table.reshape(-1)[_row(table) + index]


def _interpolate(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The broken line through points, level beyond the first and the last of them.

    Points are ``(m,)`` or ``(classes, m)``, where short rows repeat their last point.
    """
    x, y = x.to(values.dtype), y.to(values.dtype)
    last = x.shape[-1] - 1
    after = _place(values, x).clamp(min(1, last), last)
    before = (after - 1).clamp(min=0)
    low, high = _at_place(x, before), _at_place(x, after)
    width = high - low
    share = ((values - low) / torch.where(width > 0, width, 1)).clamp(0, 1)
    # where two points share their x, values beyond take the later one
    share = torch.where(width > 0, share, (values > low).to(values.dtype))
    return torch.lerp(_at_place(y, before), _at_place(y, after), share)


def _row(table: Tensor) -> Tensor | int:
    """Start of the row of each class in the flat table."""
    if table.ndim == 1:
        return 0
    return torch.arange(table.shape[0], device=table.device) * table.shape[1]
