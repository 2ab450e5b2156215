"""One walk over the logits: each row is reduced to what the metrics need of it.

The softmax of blocks of rows that fit the cache is computed in float64 whatever comes in, on
one thread per core. Nothing of the size of the logits is ever allocated, so memory-mapped and
half-precision arrays are measured as exactly as any other, and a result does not depend on how
the rows were cut into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, as_scores, check_some
from calibrant._core.chunks import (
    Chunk,
    Estimand,
    Examples,
    as_tensor,
    examples,
    explained,
    joined,
    labelled_chunks,
    on_threads,
    raw_chunks,
    thread_ranges,
    top_class,
)
from calibrant.metrics.classwise import ClassBins


class Pairs(NamedTuple):
    """A claimed probability and whether the event happened, one of each per example."""

    confidence: FloatArray
    outcome: BoolArray


class Rows(NamedTuple):
    """What is kept of each labelled example, each ``(n,)``."""

    confidence: FloatArray
    outcome: BoolArray
    correct: BoolArray
    nll: FloatArray
    brier: FloatArray


def walk(given: Examples, classwise: ClassBins | None = None) -> Rows:
    """Reduce every labelled row; add its one-vs-rest pairs to ``classwise`` on the way."""
    runs = thread_ranges(given)
    owned = [classwise and classwise.like() for _ in runs]
    parts = on_threads(partial(_walk_range, given), runs, owned)
    for sums in owned:
        if classwise is not None and sums is not None:
            classwise.add(sums)
    return Rows(*joined(parts))


def top_label(logits: Tensor | ArrayLike, labels: Tensor | ArrayLike) -> Pairs:
    """Confidence in the predicted class, and whether that class is the label.

    Parameters
    ----------
    logits : (..., classes) or, for log-odds of two classes, (n,)
    labels : (...) integers, -100 ignored

    Examples
    --------
    >>> top_label([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], [0, 1])
    Pairs(confidence=array([0.33333333, 0.99975324]), outcome=array([ True, False]))
    """
    return _pairs(examples(logits, labels))


def binary(logits: Tensor | ArrayLike, labels: Tensor | ArrayLike) -> Pairs:
    """Probability of class 1, and whether the label is 1.

    One logit ``z`` means the pair ``(0, z)``, so its probability is ``sigmoid(z)``.

    >>> binary([0.0, 2.0], [1, 0])
    Pairs(confidence=array([0.5       , 0.88079708]), outcome=array([ True, False]))
    """
    return _pairs(examples(logits, labels, estimand="binary"))


def multilabel(logits: Tensor | ArrayLike, labels: Tensor | ArrayLike) -> Pairs:
    """Probability ``sigmoid(z)`` of every tag of every example, and whether it applies.

    Parameters
    ----------
    logits : (..., tags)
    labels : (..., tags), 0, 1, or -100 for unknown

    Examples
    --------
    >>> multilabel([[0.0, 2.0]], [[1, -100]])
    Pairs(confidence=array([0.5]), outcome=array([ True]))
    """
    return _pairs(examples(logits, labels, estimand="multilabel"))


def one_vs_rest(logits: Tensor | ArrayLike, labels: Tensor | ArrayLike, k: int) -> Pairs:
    """Probability of class ``k``, and whether the label is ``k``.

    >>> one_vs_rest([[0.0, 0.0], [0.0, 2.0]], [0, 1], 1).outcome
    array([False,  True])
    """
    given = examples(logits, labels)
    if not 0 <= k < given.classes:
        raise ValueError(f"k must be a class in [0, {given.classes}), got {k}")
    return _pairs(given, lambda soft: (soft.probs[:, k], soft.chunk.labels == k))


def margins(logits: Tensor | ArrayLike) -> FloatArray:
    """Difference of the two largest logits of each row, ``(..., classes) -> (...)``.

    One logit z is the pair (0, z), so its margin is ``abs(z)``. It is inf where only one class
    is possible.

    >>> margins([[3.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    array([2., 0.])
    """
    scores = as_scores(logits)
    shape = tuple(scores.shape[:-1])
    if scores.ndim == 1:
        odds = as_tensor(scores).double().cpu()
        gaps = torch.where(odds == math.inf, math.nan, odds.abs()).numpy()
    elif scores.shape[-1] == 1:
        gaps = np.full(shape, np.inf)
    else:
        runs = raw_chunks(scores, int(scores.shape[-1]), 0, math.prod(shape))
        tops = [as_tensor(rows).topk(2, dim=-1).values.double().cpu() for _, rows in runs]
        pairs = torch.cat([torch.zeros(0, 2), *tops])
        # +inf has no softmax: NaN here, so that it is refused below
        gaps = torch.where(pairs[:, 0] == math.inf, math.nan, pairs[:, 0] - pairs[:, 1]).numpy()
    if np.isnan(gaps).any():
        raise ValueError(
            "logits must be finite, or -inf for masked classes; NaN or +inf was found at row "
            f"{int(np.flatnonzero(np.isnan(gaps))[0])}: find the sample that overflowed"
        )
    return gaps if scores.ndim == 1 else gaps.reshape(shape)


Claim = Callable[["_Softmax"], tuple[Tensor, Tensor]]
"""Confidence and outcome, each ``(rows,)``, of the softmax of a block."""


def _claim(estimand: Estimand) -> Claim:
    if estimand == "top_label":
        return lambda soft: (soft.confidence, soft.top == soft.chunk.labels)
    return lambda soft: (soft.probs[:, 1], soft.chunk.labels == 1)


def _pairs(given: Examples, claim: Claim | None = None) -> Pairs:
    task = partial(_pair_strip, given, claim or _claim(given.estimand))
    pairs = Pairs(*joined(on_threads(task, thread_ranges(given))))
    check_some(pairs.outcome.size)
    return pairs


def _walk_range(given: Examples, row_range: tuple[int, int], classwise: ClassBins | None) -> Rows:
    parts = [_reduce(soft, given, classwise) for soft in _softmaxes(given, row_range)]
    return Rows(*joined([_NO_ROWS, *parts]))


def _pair_strip(given: Examples, claim: Claim, row_range: tuple[int, int]) -> Pairs:
    parts = [Pairs(*map(_array, claim(soft))) for soft in _softmaxes(given, row_range)]
    return Pairs(*joined([_NO_PAIRS, *parts]))


class _Softmax(NamedTuple):
    chunk: Chunk
    top: Tensor  # (rows,) class of the largest logit, the first of equals
    confidence: Tensor  # (rows,) its probability
    probs: Tensor  # (rows, classes), overwritten by the next block
    nll: Tensor  # (rows,) of the label


def _softmaxes(given: Examples, row_range: tuple[int, int]) -> Iterator[_Softmax]:
    """Yield the softmax of every block; a row that has none is refused."""
    # one buffer for all blocks: fresh memory of this size costs more than the softmax
    buffer = torch.empty(0, dtype=torch.float64)
    for chunk in labelled_chunks(given, *row_range):
        if buffer.numel() < chunk.logits.numel() or buffer.device != chunk.logits.device:
            size, device = chunk.logits.numel(), chunk.logits.device
            buffer = torch.empty(size, dtype=torch.float64, device=device)
        probs = buffer[: chunk.logits.numel()].view_as(chunk.logits)
        yield _softmax(chunk, given, probs)


def _softmax(chunk: Chunk, given: Examples, out: Tensor) -> _Softmax:
    top = top_class(chunk.logits)
    # each row is read before it is written, so the softmax may overwrite its input
    probs = torch.softmax(out.copy_(chunk.logits), -1, out=out)
    best, own = (chunk.logits.gather(-1, i[:, None])[:, 0].double() for i in (top, chunk.labels))
    confidence = probs.gather(-1, top[:, None])[:, 0]
    nll = (best - own) - confidence.log()  # finite also where the probability underflows
    if not torch.isfinite(nll).all():
        raise explained(given, int(chunk.number[~torch.isfinite(nll).cpu().numpy()][0]))
    return _Softmax(chunk, top, confidence, probs, nll)


def _reduce(soft: _Softmax, given: Examples, classwise: ClassBins | None) -> Rows:
    chunk, top, _, probs, nll = soft
    confidence, outcome = _claim(given.estimand)(soft)
    true = probs.gather(-1, chunk.labels[:, None])[:, 0]
    brier = 1 - 2 * true + torch.linalg.vector_norm(probs, dim=-1) ** 2
    if classwise is not None:
        classwise.update(probs, chunk.labels, chunk.weight, chunk.column)
    return Rows(*map(_array, (confidence, outcome, top == chunk.labels, nll, brier)))


def _array(values: Tensor) -> NDArray[Any]:
    """Take values out of the buffer that the next block overwrites."""
    return values.cpu().numpy().copy()


_NO_PAIRS = Pairs(np.zeros(0), np.zeros(0, dtype=bool))
_NO_ROWS = Rows(*_NO_PAIRS, np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
