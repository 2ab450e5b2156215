"""Warnings about data on which a fit is likely to go wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import FEW, LOOKED_AT, FloatArray, Logits, as_float64, warn

ENOUGH = 5
"""Examples per parameter below which a fit warns."""


def first_rows(logits: Logits) -> FloatArray:
    """Some of the first rows of logits ``(..., classes)``, or log-odds ``(n,)``."""
    if logits.ndim == 1:
        return as_float64(logits[:LOOKED_AT])[:, None]
    rows = max(FEW, min(LOOKED_AT, (1 << 17) // logits.shape[-1]))
    each = max(1, math.prod(logits.shape[1:-1]))  # tokens or pixels of one example
    return as_float64(logits[: -(-rows // each)]).reshape(-1, logits.shape[-1])[:rows]


def distinct_rows(rows: FloatArray) -> int | None:
    """Number of distinct rows; None where most of them are."""
    distinct = len(np.unique(rows, axis=0))
    return distinct if len(rows) >= FEW and distinct < len(rows) / 2 else None


def warn_of_few_examples(kind: str, size: int, count: int, distinct: int | None) -> None:
    """Warn where a method has ``size`` parameters for few examples, or few distinct ones."""
    # one parameter is not led astray by copies
    effective = count if distinct is None or size == 1 else distinct
    if effective < ENOUGH * size:
        remedy = "; a method with fewer parameters (ts has one) is safer" if size > 1 else ""
        same = f" ({effective:,} of the first are not alike)" if effective < count else ""
        warn(
            f"{kind} has {size:,} parameter{'s' * (size > 1)} for {count:,} samples{same}: it may "
            f"fit their noise{remedy}"
        )


def warn_of_one_label(labels: NDArray[Any]) -> None:
    """Warn where all labels are the same."""
    if len(labels) >= FEW and (labels == labels[0]).all():
        warn(
            f"all {len(labels):,} labels are {labels[0]}: what is learned of one class may be "
            "wrong for the others"
        )
