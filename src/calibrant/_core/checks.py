"""Validation of inputs: the one place that says what is legal, and what to do when it is not.

Values of logits are not inspected here. A separate scan would cost a pass over the whole
matrix, so the walk over the rows (:mod:`calibrant.metrics.reductions`) finds a bad row in the sums
that it computes anyway and calls :func:`bad_row` for the message.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

IGNORED = -100
"""Label of an example that does not count, as in ``torch.nn.functional.cross_entropy``."""
FEW = 10
"""Rows that may sum to one by chance, as made-up ones like [1.0, 0.0] do."""
LOOKED_AT = 1000
"""Rows that tell whether logits look like probabilities."""
SUMS_TO_ONE = "every row is nonnegative and sums to one"

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
Values: TypeAlias = Tensor | ArrayLike
"""What a user may pass: a tensor on any device, an array, or nested lists of numbers."""
Logits: TypeAlias = "Tensor | NDArray[Any]"
"""What the walk over rows accepts: a tensor on any device or an array, memory-mapped or not."""


def as_scores(values: Tensor | ArrayLike, name: str = "logits") -> Logits:
    """Return ``values`` as a tensor or array of floats, without copying either.

    >>> as_scores([[0.5, -1.0]]).shape
    (1, 2)
    >>> as_scores([[1, 2]])
    Traceback (most recent call last):
    ...
    TypeError: logits must be floating point, got int64: convert with .astype(float) or .float()
    """
    scores = values if isinstance(values, Tensor) else _asarray(values)
    floating = (
        scores.is_floating_point()
        if isinstance(scores, Tensor)
        else np.issubdtype(scores.dtype, np.floating)
    )
    if not floating:
        kind = str(scores.dtype).removeprefix("torch.")
        remedy = "convert with .astype(float) or .float()"
        if kind == "object":
            remedy = "rows of different lengths or Python objects are not an array of numbers"
        raise TypeError(f"{name} must be floating point, got {kind}: {remedy}")
    return scores


def as_labels(labels: Tensor | ArrayLike, name: str = "labels") -> IntArray:
    """Return ``labels`` as an int64 array on the CPU; floats are refused, not rounded.

    >>> as_labels([2, 0, -100])
    array([   2,    0, -100])
    """
    kind = str(labels.dtype) if isinstance(labels, Tensor) else _asarray(labels).dtype.name
    if not any(word in kind for word in ("int", "bool")):
        raise TypeError(
            f"{name} must be integers, got {kind.removeprefix('torch.')}: class indices with "
            f"{IGNORED} for ignored examples are wanted; convert with .astype(int) or .long() if "
            "they are whole numbers"
        )
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    return array.astype(np.int64, copy=False)


def check_shapes(logits: Logits, labels: IntArray) -> None:
    """Raise unless logits are ``(..., classes)`` and labels ``(...)``."""
    if tuple(logits.shape[:-1]) == labels.shape and logits.ndim >= 2:
        return
    hint = "one row of logits is wanted for each label"
    if tuple(logits.shape) == labels.shape and logits.ndim >= 2:
        hint = (
            "for one-hot labels pass labels.argmax(-1); if every column is a tag of its own, "
            'estimand="multilabel" (--multilabel)'
        )
    elif logits.ndim > 2 and tuple(logits.shape[:1] + logits.shape[2:]) == labels.shape:
        hint = "classes come last: pass logits.movedim(1, -1) or np.moveaxis(logits, 1, -1)"
    raise ValueError(
        f"logits must be (..., classes) and labels (...), got {tuple(logits.shape)} and "
        f"{labels.shape}: {hint}"
    )


def check_labels(labels: IntArray, classes: int) -> None:
    """Raise unless every label is in ``[0, classes)`` or :data:`IGNORED`."""
    wrong = ((labels < 0) | (labels >= classes)) & (labels != IGNORED)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"labels must be in [0, {classes}) or {IGNORED} (ignored), got {labels[at]} at "
            f"{_place(at)}: the logits have {classes} classes"
        )


def check_level(level: float) -> None:
    """Raise unless ``level`` is a coverage that the draws behind the intervals support."""
    if not 0 < level <= 0.99:
        raise ValueError(f"level must be above 0 and at most 0.99, got {level}: 0.9 means 90 %")


def check_some(count: int) -> None:
    """Raise when no example is left to measure."""
    if count == 0:
        raise ValueError(
            f"nothing to measure: the arrays are empty, or every label is {IGNORED} (ignored) or "
            "every weight 0"
        )


_PENDING: ContextVar[dict[str, None] | None] = ContextVar("pending", default=None)


def warn(message: str, stacklevel: int = 3) -> None:
    """Warn the caller of the function that calls this; within a fit, when the fit is done."""
    pending = _PENDING.get()
    if pending is None:
        warnings.warn(message, stacklevel=stacklevel)
    else:
        pending[message] = None


@contextmanager
def warnings_at_caller() -> Iterator[None]:
    """Collect warnings and issue each once at the end, at the line that called the function.

    Wrap the body of a public function in this: :func:`warn` can then be called at any depth.
    Within another such context nothing is issued here: the outermost one points to the user.
    """
    if _PENDING.get() is not None:
        yield
        return
    pending: dict[str, None] = {}
    token = _PENDING.set(pending)
    try:
        yield
    finally:
        _PENDING.reset(token)
    for message in pending:
        # frames: this generator, contextlib's __exit__, the function, its caller
        warnings.warn(message, stacklevel=4)


@contextmanager
def silenced() -> Iterator[None]:
    """Drop what :func:`warn` says."""
    token = _PENDING.set({})
    try:
        yield
    finally:
        _PENDING.reset(token)


def float_info(values: Logits) -> np.finfo[Any] | torch.finfo:
    """What the dtype of scores can hold."""
    return torch.finfo(values.dtype) if isinstance(values, Tensor) else np.finfo(values.dtype)


def look_like_probs(logits: Logits) -> bool:
    """Whether each of the first rows ``(..., classes)`` is nonnegative and sums to one.

    Log-probabilities and usual logits have negative values. Fewer than 10 rows tell nothing, and
    at most 1,000 are looked at.

    >>> probs = np.linspace([0.1, 0.9], [0.9, 0.1], 20)
    >>> look_like_probs(probs), look_like_probs(np.log(probs))
    (True, False)
    """
    if logits.ndim < 2 or math.prod(logits.shape[:-1]) < FEW:
        return False
    each = math.prod(logits.shape[1:-1])  # tokens or pixels of one example
    first = logits[: -(-LOOKED_AT // each)].reshape(-1, logits.shape[-1])[:LOOKED_AT]
    eps = float_info(first).eps
    rows = as_float64(first)
    # entries of bfloat16 are off by more than a thousandth
    off = np.abs(rows.sum(-1) - 1)
    return bool((rows >= 0).all() and (off <= max(1e-3, float(eps))).all())


def warn_of_probs(logits: Logits, remedy: str) -> None:
    """Warn of logits that look like probabilities; public functions call this on their input."""
    if look_like_probs(logits):
        warn(f"logits look like probabilities: {SUMS_TO_ONE}; {remedy}", stacklevel=4)


def bad_row(row: Tensor, label: int, at: int) -> ValueError:
    """Say what is wrong with one row of logits that has no finite softmax or loss."""
    if torch.isnan(row).any():
        wrong, remedy = "NaN", "find the layer or the example that overflowed"
    elif torch.isposinf(row).any():
        wrong, remedy = "+inf", "clip the logits, or pass log-probabilities"
    elif torch.isneginf(row).all():
        wrong, remedy = "-inf in every class", "at least one class must be possible"
    elif torch.isneginf(row[label]):
        wrong = f"-inf at its own label {label}"
        remedy = "a masked class cannot be the answer: correct the mask or the label"
    else:
        wrong, remedy = "values too far apart for float64", "scale the logits down"
    return ValueError(
        f"logits must be finite, or -inf for masked classes; row {at} has {wrong}: {remedy}"
    )


def as_pairs(
    confidence: Tensor | ArrayLike,
    outcome: Tensor | ArrayLike,
    weight: Tensor | ArrayLike | None = None,
) -> tuple[FloatArray, FloatArray, FloatArray | None]:
    """Return confidences, outcomes and weights as flat float64 arrays on the CPU.

    A confidence of low precision keeps the value it has; nothing is rounded.

    >>> as_pairs([0.9, 0.6], [True, False])
    (array([0.9, 0.6]), array([1., 0.]), None)
    """
    stated, events = as_float64(as_scores(confidence, "confidence")), as_float64(outcome)
    if stated.shape != events.shape:
        raise ValueError(
            f"confidence and outcome must have equal shapes, got {stated.shape} and {events.shape}"
        )
    claimed, happened = stated.reshape(-1), events.reshape(-1)
    weights = None if weight is None else as_weight(weight, stated.shape)
    if weights is not None and not weights.all():  # weight zero: as if not there
        claimed, happened, weights = (x[weights > 0] for x in (claimed, happened, weights))
    check_some(claimed.size)
    if not ((claimed >= 0) & (claimed <= 1)).all():
        worst = claimed[~((claimed >= 0) & (claimed <= 1))][0]
        raise ValueError(
            f"confidence must be in [0, 1], got {float(worst)!r}: reduce logits with "
            "calibrant.top_label(logits, labels) first"
        )
    if not np.isin(happened, (0.0, 1.0)).all():
        raise ValueError(
            "outcome must be 0 or 1 (did it happen?), got "
            f"{happened[~np.isin(happened, (0.0, 1.0))][0]:g}: class labels are not outcomes"
        )
    return claimed, happened, weights


def as_weight(weight: Tensor | ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    """Return weights of examples of a shape as a flat float64 array; 0 leaves an example out.

    One weight per row serves all tokens, pixels or tags of that row.

    >>> as_weight([1, 3], (2, 2))
    array([1., 1., 3., 3.])
    """
    weights = spread(as_float64(weight), shape, "sample_weight")
    usable = (weights == 0) | ((weights > 1e-100) & (weights < 1e100))
    if not usable.all():
        worst = float(weights[~usable][0])
        raise ValueError(
            f"sample_weight must be 0 (leaves out) or in (1e-100, 1e100), got {worst!r}"
        )
    return weights.reshape(-1)


def spread(values: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Repeat values of shape ``(n, ...)`` over the remaining dimensions of the examples."""
    if values.ndim == 0 or values.shape != shape[: values.ndim]:
        raise ValueError(
            f"{name} must have one value per example or per row, got {values.shape} for {shape}"
        )
    widened = values.reshape(values.shape + (1,) * (len(shape) - values.ndim))
    return np.broadcast_to(widened, shape)


def as_values(values: Tensor | ArrayLike, name: str) -> FloatArray:
    """Return a flat float64 array of scores; infinite ones have an order too."""
    flat = as_float64(values).reshape(-1)
    check_some(flat.size)
    if np.isnan(flat).any():
        raise ValueError(f"{name} must not hold NaN: drop or repair those examples first")
    return flat


def logits_from_probs(probs: Tensor | ArrayLike, *, tags: bool = False) -> tuple[FloatArray, int]:
    """Return log-probabilities and the number of zeros that had to be floored.

    A stored zero is a probability too small for its dtype, not a masked class: it becomes half of
    the smallest number that the dtype can hold. One column of probabilities, ``(n,)``, is
    P(y = 1) and becomes its log-odds; so does every number where the columns are ``tags``.

    >>> logits, floored = logits_from_probs(np.array([[0.5, 0.5], [1.0, 0.0]]))
    >>> logits.shape, floored
    ((2, 2), 1)
    """
    scores = as_scores(probs, "probs")
    values = np.asarray(scores.detach().double().cpu() if isinstance(scores, Tensor) else scores)
    info = float_info(scores)
    if not ((values >= 0) & (values <= 1 + 4 * info.eps)).all():
        raise ValueError(
            "probs must be in [0, 1]: NaN, negative or larger values were found; scores that are "
            "not probabilities go in as logits"
        )
    exact = values.astype(np.float64)
    one_each = tags or exact.ndim == 1
    rows = np.stack([1 - exact, exact], axis=-1) if one_each else exact
    check_sums(rows, float(info.eps))
    floored = int((rows <= 0).sum())
    floor = max(float(info.tiny) * float(info.eps) / 2, math.ulp(0.0))
    logs = np.log(np.where(rows > 0, rows, floor))
    return np.asarray(logs[..., 1] - logs[..., 0] if one_each else logs), floored


def check_sums(probs: FloatArray, eps: float) -> None:
    """Raise unless rows of probabilities sum to one, up to what ``eps`` allows."""
    # each entry is rounded by half an eps at most, so a row of honest entries is off by less
    tolerance = max(1e-4, 4 * eps)
    off = np.abs(probs.sum(-1) - 1)
    if (off > tolerance).any():
        at = tuple(int(i) for i in np.argwhere(off > tolerance)[0])
        raise ValueError(
            f"probs must sum to one in each row, got {probs[at].sum():.6g} at {_place(at)}: "
            "normalise them, or pass the scores as logits"
        )


def _asarray(values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # ragged lists: numpy's message names no argument, so the caller's will
        return np.empty(0, dtype=object)


def as_float64(values: Tensor | ArrayLike) -> FloatArray:
    """Return values as a float64 array on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def _place(at: tuple[int, ...]) -> str:
    return f"row {at[0]}" if len(at) == 1 else f"position {at}"


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless an option is one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise unless an option is a whole number."""
    if not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")


def check_finite_rows(features: Tensor, numbers: IntArray | None = None) -> None:
    """Raise unless rows ``(n, width)`` are finite; ``numbers`` are the caller's row numbers."""
    bad = ~torch.isfinite(features).all(-1)
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(
            f"features must be finite, row {at if numbers is None else numbers[at]} has NaN or "
            "infinity: find the layer or the sample that overflowed"
        )
