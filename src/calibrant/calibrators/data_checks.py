"""Checks of the data of a fit, and warnings where it is likely to go wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import FEW, IGNORED, FloatArray, Logits, Values, warn
from calibrant._core.chunks import Examples

ENOUGH = 5  # examples per parameter below which a fit warns


def first_rows(logits: Logits) -> FloatArray:
    """Some of the first rows of logits ``(..., classes)``, or log-odds ``(n,)``."""
    if logits.ndim == 1:
        return checks.as_float64(logits[: checks.LOOKED_AT])[:, None]
    rows = max(FEW, min(checks.LOOKED_AT, (1 << 17) // logits.shape[-1]))
    each = max(1, math.prod(logits.shape[1:-1]))  # tokens or pixels of one example
    return checks.as_float64(logits[: -(-rows // each)]).reshape(-1, logits.shape[-1])[:rows]


def distinct_rows(rows: FloatArray) -> int | None:
    """Number of distinct rows; None where most of them are."""
    distinct = len(np.unique(rows, axis=0))
    return distinct if len(rows) >= FEW and distinct < len(rows) / 2 else None


def warn_of_few_examples(
    kind: str, size: int, count: int, distinct: int | None, *, enough: int, fewest: str
) -> None:
    """Warn where a method with ``size`` parameters has not ``enough`` examples, or copies.

    ``fewest`` tells which method has the fewest parameters.
    """
    # one parameter is not led astray by copies
    effective = count if distinct is None or size == 1 else distinct
    if effective < enough:
        remedy = f"; a method with fewer parameters ({fewest}) is safer" if size > 1 else ""
        same = f" ({effective:,} of the first are not alike)" if effective < count else ""
        has = f"{kind} has {size:,} parameter{'s' * (size > 1)} for {count:,} examples{same}"
        warn(f"{has}: it may fit their noise{remedy}")


def one_label(labels: NDArray[Any]) -> str:
    """Return that all labels are the same, if they are."""
    if len(labels) < FEW or np.ptp(labels):
        return ""
    which = f"all {len(labels):,} labels are {labels[0]}"
    return f"{which}: what is learned of one class may be wrong for the others"


def masked_row(at: int) -> ValueError:
    """Error for a masked class in a row of logits, where none may be."""
    return ValueError(
        f"logits must be finite here, row {at} has -inf or a class far below the others: masked "
        "classes need a temperature method, such as ts"
    )


def missing_classes(examples: Examples, consequence: str) -> list[str]:
    """Note about classes without an example, if there are any, and what becomes of them."""
    labels = examples.labels[examples.labels != IGNORED]
    return absent_classes(np.bincount(labels, minlength=examples.classes), consequence)


def absent_classes(count: NDArray[Any], consequence: str) -> list[str]:
    """Note about classes whose count ``(classes,)`` is 0, if there are any."""
    absent = np.flatnonzero(count == 0)
    if absent.size == 0:
        return []
    named = ", ".join(map(str, absent[:5])) + (", ..." if absent.size > 5 else "")
    what = f"{absent.size:,} of {len(count):,} classes have no example ({named})"
    return [f"{what}: {consequence}"]


def warn_together(calibrator: object, notes: list[str]) -> None:
    """Issue all notes about a calibrator in one warning."""
    if notes:
        warn(f"{type(calibrator).__name__}: {'; '.join(notes)}")


def flat_groups(groups: Values, shape: tuple[int, ...]) -> NDArray[Any]:
    """Groups as a flat array; one value per row of labels serves all of the row."""
    return checks.spread(checks.as_keys(groups), shape, "groups").reshape(-1)


def warn_of_constant(name: str, features: Tensor) -> None:
    """Warn where features ``(n, width)`` do not tell examples apart."""
    if len(features) > 1 and bool((features == features[:1]).all()):
        which = f"{name}: all {len(features):,} examples have the same features"
        warn(f"{which}; are these the inputs of the last layer?")
