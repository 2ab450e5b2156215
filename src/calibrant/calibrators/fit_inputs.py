"""Checks and warnings about the examples of a fit, folds, and passes over more than memory holds.

:class:`~calibrant.calibrators.base.Calibrator` has the first three functions as methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import FEW, IGNORED, FloatArray, IntArray, Logits, Values, warn
from calibrant._core.chunks import Examples, mask_gap, range_of, with_masks
from calibrant._core.torch_models import check_place

ENOUGH = 5  # examples per parameter below which a fit warns


def _check_logits(calibrator: Any, logits: Tensor) -> None:
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


def _check_features(
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


def _checked_logits(calibrator: Any, logits: Values) -> Tensor:
    """Logits as a tensor in which every row has a softmax."""
    given = checks.as_scores(logits)
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
        raise _masked_row(int(masked.nonzero()[0]))
    return scores if one else with_masks(rows, gap).reshape(scores.shape)


def _first_rows(logits: Logits) -> FloatArray:
    """Some of the first rows of logits ``(..., classes)``, or log-odds ``(n,)``."""
    if logits.ndim == 1:
        return checks.as_float64(logits[: checks.LOOKED_AT])[:, None]
    rows = max(FEW, min(checks.LOOKED_AT, (1 << 17) // logits.shape[-1]))
    each = max(1, math.prod(logits.shape[1:-1]))  # tokens or pixels of one example
    return checks.as_float64(logits[: -(-rows // each)]).reshape(-1, logits.shape[-1])[:rows]


def _distinct_rows(rows: FloatArray) -> int | None:
    """Number of distinct rows; None where most of them are."""
    distinct = len(np.unique(rows, axis=0))
    return distinct if len(rows) >= FEW and distinct < len(rows) / 2 else None


def _warn_of_few_examples(
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


def _one_label(labels: NDArray[Any]) -> str:
    """Return that all labels are the same, if they are."""
    if len(labels) < FEW or np.ptp(labels):
        return ""
    which = f"all {len(labels):,} labels are {labels[0]}"
    return f"{which}: what is learned of one class may be wrong for the others"


def _masked_row(at: int) -> ValueError:
    """Error for a masked class in a row of logits, where none may be."""
    return ValueError(
        f"logits must be finite here, row {at} has -inf or a class far below the others: masked "
        "classes need a temperature method, such as ts"
    )


def _missing_classes(examples: Examples, consequence: str) -> list[str]:
    """Note about classes without an example, if there are any, and what becomes of them."""
    labels = examples.labels[examples.labels != IGNORED]
    return _absent_classes(np.bincount(labels, minlength=examples.classes), consequence)


def _absent_classes(count: NDArray[Any], consequence: str) -> list[str]:
    """Note about classes whose count ``(classes,)`` is 0, if there are any."""
    absent = np.flatnonzero(count == 0)
    if absent.size == 0:
        return []
    named = ", ".join(map(str, absent[:5])) + (", ..." if absent.size > 5 else "")
    what = f"{absent.size:,} of {len(count):,} classes have no example ({named})"
    return [f"{what}: {consequence}"]


def _warn_together(calibrator: object, notes: list[str]) -> None:
    """Issue all notes about a calibrator in one warning."""
    if notes:
        warn(f"{type(calibrator).__name__}: {'; '.join(notes)}")


def _warn_of_constant(name: str, features: Tensor) -> None:
    """Warn where features ``(n, width)`` do not tell examples apart."""
    if len(features) > 1 and bool((features == features[:1]).all()):
        which = f"{name}: all {len(features):,} examples have the same features"
        warn(f"{which}; are these the inputs of the last layer?")


def folds(
    labels: IntArray, count: int, *, groups: NDArray[Any] | None = None, seed: int = 0
) -> list[IntArray]:
    """Split examples into parts of nearly equal size, each with its share of every class.

    Returns the sorted indices of each part; fewer parts than ``count`` where there are fewer
    examples or groups. Examples of one group stay together; classes are then left to chance.
    """
    rng = np.random.default_rng(seed)
    if groups is None:
        # Dealing out the examples class by class gives each part its share of every class.
        order = np.lexsort((rng.random(len(labels)), labels))
        part = np.empty(len(labels), dtype=np.int64)
        part[order] = np.arange(len(labels)) % count
    else:
        names, member = np.unique(groups, return_inverse=True)
        part = (rng.permutation(len(names)) % count)[member]
    parts = [np.flatnonzero(part == i) for i in range(count)]
    return [indices for indices in parts if len(indices)]


Sums: TypeAlias = Sequence[Any]  # arrays and numbers, which add one by one
Task: TypeAlias = Callable[[Examples], Sums]


class Passes(Protocol):
    """All examples, some at a time, as often as a method asks."""

    classes: int

    def sums(self, task: Task) -> list[FloatArray]:
        """Return the sums of ``task(examples)`` over all examples; the task can be pickled."""
        ...
