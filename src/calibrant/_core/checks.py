"""Validation of inputs, with errors that name the remedy.

Values of logits are not inspected here, since that would cost a pass over the whole matrix.
Functions that read them find a bad row in their sums and call :func:`bad_row` for the message.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant._core.messages import printable

IGNORED = -100  # label of an example that does not count, as in torch's cross_entropy
FEW = 10  # rows that may sum to one by chance, as made-up ones like [1.0, 0.0] do
MANY_ODDS = 100  # log-odds that are hardly all between 0 and 1 by chance
LOOKED_AT = 1000  # rows that tell whether logits look like probabilities
_MAX_FEATURE = 1e18  # float32 holds the squares of smaller ones
_MAX_ROWS, _MAX_NUMBERS = 100_000, 1 << 19
"""Rows, and numbers in them, that are looked at."""
_MIN_SHARE = 0.1  # of copies among the rows, below which they hardly matter
_SATURATED = 1e-9  # distance from 1 below which a probability has lost its digits
_MIN_DISTINCT = 10  # distinct rows, below which they may well be as frequent as one another
_MIN_MISTAKES = 5  # distinct rows, predicted wrongly, whose copies must all be wrong as well

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
Values: TypeAlias = Tensor | ArrayLike  # a tensor on any device, an array, or nested lists
Features: TypeAlias = Values | Mapping[str, Any]  # numbers (..., width), or metadata by name
Logits: TypeAlias = "Tensor | NDArray[Any]"  # a tensor on any device or an array, or memory-mapped


def as_scores(values: Values, name: str = "logits") -> Logits:
    """Return ``values`` as a tensor or array of floats, without copying either."""
    scores = _asarray(values)
    kind = _kind(scores)
    # the kind, not the name: arrays of ml_dtypes' bfloat16 are not of a floating kind
    floating = (
        scores.is_floating_point() if isinstance(scores, Tensor) else scores.dtype.kind == "f"
    )
    if not floating:
        remedy = "convert with .astype(float) or .float()"
        if kind == "object":
            remedy = "rows of different lengths or Python objects are not an array of numbers"
        raise TypeError(f"{name} must be floating point, got {kind}: {remedy}")
    return scores


def classes_last(values: Values, class_dim: int | None) -> Values:
    """Return scores with the dimension of the classes moved to the end; nothing is copied."""
    if class_dim is None:
        return values
    scores = _asarray(values)
    if not -scores.ndim <= class_dim < scores.ndim:
        raise ValueError(
            f"class_dim must be a dimension of the scores, got {class_dim} for the shape "
            f"{tuple(scores.shape)}: images (n, classes, height, width) have class_dim=1"
        )
    if isinstance(scores, Tensor):
        return scores.movedim(class_dim, -1)
    return np.moveaxis(scores, class_dim, -1)


def with_ignored(labels: Values, ignore_index: int | None) -> Values:
    """Return labels of which another one, such as 255, stands for ignored examples."""
    if ignore_index is None or ignore_index == IGNORED:
        return labels
    array = as_labels(labels)
    return np.where(array == ignore_index, IGNORED, array)


def check_order(logits: Values, labels: Values) -> None:
    """Raise if the first of (logits, labels) are integers and the second floats."""
    first, second = _asarray(logits), _asarray(labels)
    if "int" in _kind(first) and "float" in _kind(second) and second.ndim >= first.ndim:
        raise TypeError("logits and labels are swapped: pass floats first, then integers")


def as_labels(labels: Values, name: str = "labels") -> IntArray:
    """Return ``labels`` as an int64 array on the CPU; floats are refused, not rounded."""
    array = _asarray(labels)
    kind = _kind(array)
    if "int" not in kind and kind != "bool":
        remedy = "convert whole numbers with .astype(int) or .long()"
        values: Any = () if isinstance(array, Tensor) or "float" in kind else array.flat
        names = (str(value) for value in values if isinstance(value, (str, bytes)))
        if example := next(filter(None, names), ""):
            kind = f"names such as {example!r}"
            remedy = "pass the scores as a data frame with a column for each name, such as "
            remedy += "probs=pandas.DataFrame(P, columns=model.classes_), or number the names in "
            remedy += "the order of the columns"
        elif "float" in kind and array.ndim > 1 and bool((array.sum(-1) == 1).all()):
            remedy = f"for one-hot {name} pass {name}.argmax(-1)"
        raise TypeError(
            f"{name} must be integers, got {kind}: class indices with {IGNORED} for ignored "
            f"examples are wanted; {remedy}"
        )
    array = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
    return array.astype(np.int64, copy=False)


def _kind(values: Logits) -> str:
    dtype = values.dtype
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype.name


def check_shapes(logits: Logits, labels: IntArray, name: str = "logits") -> None:
    """Raise unless logits, or probs by ``name``, are ``(..., classes)`` and labels ``(...)``."""
    if tuple(logits.shape[:-1]) == labels.shape and logits.ndim >= 2:
        return
    shape, hint = tuple(logits.shape), f"one row of {name} is wanted for each label"
    if shape == labels.shape and logits.ndim >= 2:
        hint = "for one-hot labels pass labels.argmax(-1); if every column is a tag of its own, "
        hint += 'estimand="multilabel" (--multilabel)'
    elif labels.shape == (*shape[:-1], 1):
        hint = "for a column of labels pass labels.squeeze(-1)"
    elif logits.ndim == 2 and shape[1:] == labels.shape and 1 < shape[0] < shape[1]:
        hint = f"classes come last: pass {name}.T"
    elif logits.ndim > 2 and shape[:1] + shape[2:] == labels.shape:
        hint = f"classes come last: pass class_dim=1, or {name}.movedim(1, -1)"
    raise ValueError(
        f"{name} must be (..., classes) and labels (...), got {shape} and {labels.shape}: {hint}"
    )


def check_labels(labels: IntArray, classes: int) -> None:
    """Raise unless every label is in ``[0, classes)`` or :data:`IGNORED`."""
    if not labels.size or (labels.min() >= 0 and labels.max() < classes):
        return  # usually, and in less time
    wrong = ((labels < 0) | (labels >= classes)) & (labels != IGNORED)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        known = labels[labels != IGNORED]
        from_one = known.min() == 1 and known.max() == classes
        remedy = "; if they count from 1, pass labels - 1" if from_one else ""
        raise ValueError(
            f"labels must be in [0, {classes}) or {IGNORED} (ignored), got {labels[at]} at "
            f"{_place(at)}: the logits have {classes} classes{remedy}"
        )


def check_level(level: float) -> None:
    """Raise unless intervals support the coverage ``level``."""
    if not 0 < level <= 0.99:
        raise ValueError(f"level must be above 0 and at most 0.99, got {level}: 0.9 means 90 %")


def check_some(count: int) -> None:
    """Raise when no example is left to measure."""
    if count == 0:
        raise ValueError(
            "nothing to measure: there are no examples (empty arrays, or a file with only a "
            f"header), or every label is {IGNORED} (ignored) or every weight 0"
        )


_PENDING: ContextVar[dict[str, None] | None] = ContextVar("pending", default=None)


def warn(message: str, stacklevel: int = 3) -> None:
    """Warn the caller of the function that calls this; within a fit, when the fit is done."""
    pending = _PENDING.get()
    if pending is None:
        warnings.warn(printable(message), stacklevel=stacklevel)
    else:
        pending[message] = None


@contextmanager
def warnings_at_caller() -> Iterator[None]:
    """Collect warnings and issue each once at the end, at the line that called the function.

    Public functions wrap their body in this, so that :func:`warn` can be called at any depth.
    Within another such context nothing is issued: the outermost one points to the user.
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
        warnings.warn(printable(message), stacklevel=4)


@contextmanager
def silenced() -> Iterator[None]:
    """Drop the messages of :func:`warn`."""
    token = _PENDING.set({})
    try:
        yield
    finally:
        _PENDING.reset(token)


_KNOWN_ROWS: ContextVar[bool] = ContextVar("known_rows", default=False)


@contextmanager
def known_rows() -> Iterator[None]:
    """Do not warn about how rows look: the caller has warned already, or made them."""
    token = _KNOWN_ROWS.set(True)
    try:
        yield
    finally:
        _KNOWN_ROWS.reset(token)


def float_info(values: Logits) -> np.finfo[Any] | torch.finfo:
    """Return the limits of the dtype of scores."""
    return torch.finfo(values.dtype) if isinstance(values, Tensor) else np.finfo(values.dtype)


def look_like_probs(logits: Logits, fewest_odds: int = FEW) -> str:
    """Return why the first 1,000 rows ``(..., classes)``, or log-odds ``(n,)``, may be probs.

    The text is empty where they cannot be, and for fewer log-odds.
    """
    if logits.ndim == 1 and len(logits) >= fewest_odds:
        odds = as_float64(logits[:LOOKED_AT])
        inside = (odds >= 0).all() and (odds <= 1).all() and odds.min() < odds.max()
        return "every number is between 0 and 1" if inside else ""
    if logits.ndim < 2 or math.prod(logits.shape[:-1]) < FEW:
        return ""
    if (logits[(0,) * (logits.ndim - 1)] < 0).any():  # the first row tells most, in less time
        return ""
    each = math.prod(logits.shape[1:-1])  # tokens or pixels of one example
    first = logits[: -(-LOOKED_AT // each)].reshape(-1, logits.shape[-1])[:LOOKED_AT]
    rows = as_float64(first)
    # entries of bfloat16 are off by more than a thousandth
    tolerance = max(1e-3, float(float_info(first).eps))
    summing = (rows >= 0).all() and (np.abs(rows.sum(-1) - 1) <= tolerance).all()
    return "every row is nonnegative and sums to one" if summing else ""


def warn_of_probs(logits: Logits, remedy: str, fewest_odds: int = FEW) -> None:
    """Warn of logits that look like probabilities; public functions call this on their input.

    A batch of predictions may well be surely of class 1, unlike a set with labels: where these
    are not known, ``fewest_odds`` is :data:`MANY_ODDS`.
    """
    if _KNOWN_ROWS.get():
        return
    if reason := look_like_probs(logits, fewest_odds):
        warn(f"logits look like probabilities: {reason}; {remedy}", stacklevel=5)


def warn_of_copies(scores: Logits, labels: IntArray, *, probs: bool = False) -> None:
    """Warn if many of the first rows of logits ``(n, classes)`` or ``(n,)``, or probs, are copies.

    Tokens are left alone: those of one beginning are rightly alike. So are probs so near
    to 1 that different scores are rounded to one number.
    """
    tokens = labels.ndim != 1 or scores.shape[:1] != labels.shape or scores.ndim > 2
    if tokens or _KNOWN_ROWS.get():
        return
    rows = first_rows(tuple(scores.shape[1:]))
    if not rows:
        return
    kept = labels[:rows] != IGNORED
    if scores.ndim == 2 and not probs:  # rows that are copies are so in their first column
        column = as_float64(scores[:rows, 0])[kept]
        if len(column) - len(np.unique(column)) < _MIN_SHARE * len(column):
            return  # usually, and in less time
    values, targets = as_float64(scores[:rows])[kept], labels[:rows][kept]
    count = len(values)
    if values.ndim == 1:
        values = np.stack([1 - values if probs else np.zeros_like(values), values], -1)
    if probs:
        unsaturated = 1 - values.max(-1) > max(_SATURATED, 10 * float(float_info(scores).eps))
        values, targets = values[unsaturated], targets[unsaturated]
    copies = _count_copies(values, targets)
    if copies:
        warn(
            f"{copies:,} of the first {count:,} rows are copies of other rows: intervals are too "
            "narrow, and cross-validation sees what it holds out; keep one of each, or name the "
            "originals as groups= (--groups) where a method is fitted"
        )


def first_rows(shape: tuple[int, ...]) -> int:
    """Return how many rows of a shape are looked at; 0 where they are too large."""
    return min(_MAX_ROWS, _MAX_NUMBERS // max(1, math.prod(shape)))


def _count_copies(scores: FloatArray, labels: IntArray) -> int:
    """Return how many rows ``(n, classes)`` are copies of others; 0 where they may be honest.

    Equal scores are no proof: trees, votes and rounded probabilities have few values, at which
    labels differ. Copies give themselves away as rows that all occur equally often, or as
    mistakes that are repeated with the same label while no row has two labels.
    """
    bits = (scores + 0.0).view(np.uint64)  # the two zeros are one
    random = np.random.default_rng(0).integers(2**63, size=bits.shape[1], dtype=np.uint64)
    mixed = (bits ^ (bits >> np.uint64(32))) * (2 * random + np.uint64(1))
    # a number for each row: equal ones of equal rows, and only of these
    of_row = (mixed ^ (mixed >> np.uint64(29))).sum(-1, dtype=np.uint64)
    distinct, index, count = np.unique(of_row, return_inverse=True, return_counts=True)
    copies = len(scores) - len(distinct)
    if copies < _MIN_SHARE * len(scores) or len(distinct) < _MIN_DISTINCT:
        return 0  # also if there are no rows
    if count.min() == count.max():
        return copies
    if not np.ptp(labels):
        return 0
    first = np.zeros(len(distinct), np.int64)
    first[index] = labels
    repeated: BoolArray = (count > 1)[index] & (scores.argmax(-1) != labels)
    mistakes = len(np.unique(index[repeated]))
    return copies if mistakes >= _MIN_MISTAKES and (first[index] == labels).all() else 0


def bad_row(row: Tensor, label: int, at: int) -> ValueError:
    """Return the error for one row of logits that has no finite softmax or loss."""
    if torch.isnan(row).any():
        wrong, remedy = "NaN", "find the layer or the example that overflowed"
    elif torch.isposinf(row).any():
        wrong, remedy = "+inf", "clip the logits, or pass log-probabilities"
    elif torch.isneginf(row).all():
        wrong, remedy = "-inf in every class", "at least one class must be possible"
    elif torch.isneginf(row[label]):
        wrong = f"-inf at its own label {label}"
        remedy = "a masked class cannot be the answer: correct the mask or the label, or pass "
        remedy += "probabilities as probs, not as their logarithms"
    else:
        wrong = f"{float(row[label]):.2g} at its own label {label}, and {float(row.max()):.2g}"
        remedy = "so far down a class is masked and cannot be the answer; correct the mask or the "
        remedy += "label, or scale the logits down"
    return ValueError(
        f"logits must be finite, or -inf for masked classes; row {at} has {wrong}: {remedy}"
    )


def as_pairs(
    confidence: Values, outcome: Values, weight: Values | None = None
) -> tuple[FloatArray, FloatArray, FloatArray | None]:
    """Return confidences, outcomes and weights as flat float64 arrays on the CPU."""
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
    wrong = claimed[~((claimed >= 0) & (claimed <= 1))]
    if wrong.size:
        raise ValueError(
            f"confidence must be in [0, 1], got {float(wrong[0])!r}: reduce logits with "
            "calibrant.top_label(logits, labels) first"
        )
    wrong = happened[(happened != 0) & (happened != 1)]
    if wrong.size:
        raise ValueError(
            f"outcome must be 0 or 1 (did it happen?), got {wrong[0]:g}: class labels are not "
            "outcomes"
        )
    return claimed, happened, weights


def as_weight(weight: Values, shape: tuple[int, ...]) -> FloatArray:
    """Return weights of examples of a shape as a flat float64 array; 0 leaves an example out.

    One weight per row serves all tokens, pixels or tags of that row.
    """
    if isinstance(weight, str):
        raise TypeError(f"sample_weight must be numbers here, got {weight!r}: pass the values")
    if not isinstance(weight, Tensor) and np.asarray(weight).dtype.kind == "U":
        raise ValueError("sample_weight must be numbers, got text or missing values")
    weights = spread(as_float64(weight), shape, "sample_weight")
    wrong = weights[(weights != 0) & ~((weights > 1e-100) & (weights < 1e100))]
    if wrong.size:
        got = float(wrong[0])
        remedy = ": divide them by their mean, as only their ratios matter" if got > 0 else ""
        wanted = "sample_weight must be 0 (leaves out) or in (1e-100, 1e100)"
        raise ValueError(f"{wanted}, got {got!r}{remedy}")
    return weights.reshape(-1)


def spread(values: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Repeat values of shape ``(n, ...)`` over the remaining dimensions of the examples."""
    if values.ndim == 0 or values.shape != shape[: values.ndim]:
        raise ValueError(
            f"{name} must have one value per example or per row, got {values.shape} for {shape}"
        )
    widened = values.reshape(values.shape + (1,) * (len(shape) - values.ndim))
    return np.broadcast_to(widened, shape)


def as_keys(values: Values) -> NDArray[Any]:
    """Return keys of examples, such as subgroups, that can be sorted: bytes and objects as text."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4  # NumPy lacks some
        keys = (tensor.float() if narrow else tensor).numpy()
    else:
        keys = np.asarray(values)
    if keys.dtype.kind in "OS":
        texts = [k.decode(errors="replace") if isinstance(k, bytes) else str(k) for k in keys.flat]
        keys = np.array(texts, dtype=str).reshape(keys.shape)
    return keys


def as_values(values: Values, name: str) -> FloatArray:
    """Return a flat float64 array of scores; infinite ones have an order too."""
    flat = as_float64(values).reshape(-1)
    check_some(flat.size)
    if np.isnan(flat).any():
        raise ValueError(f"{name} must not hold NaN: drop or repair those examples first")
    return flat


def _asarray(values: Values) -> Logits:
    try:
        return values if isinstance(values, Tensor) else np.asarray(values)
    except ValueError:  # ragged lists: numpy's message names no argument, so the caller's will
        return np.empty(0, dtype=object)


def as_float64(values: Values) -> FloatArray:
    """Return values as a float64 array on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()  # not every device has float64
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
    bad = ~(features.abs() < _MAX_FEATURE).all(-1)
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(
            f"features must be finite, row {at if numbers is None else numbers[at]} has NaN or "
            f"numbers beyond {_MAX_FEATURE:g}: find the layer or the sample that overflowed"
        )
