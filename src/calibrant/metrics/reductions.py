"""Reduction of logits to pairs and scores in one pass over the rows.

The softmax of blocks of rows that fit the cache is computed in float64, on one thread per core.
Nothing of the size of the logits is allocated, so memory-mapped and half-precision arrays are
measured as exactly as any other, and the result does not depend on the cut into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.binning import Bins, equal_mass_edges, fill
from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    Values,
    as_pairs,
    as_scores,
    check_some,
)
from calibrant._core.chunks import (
    Chunk,
    Estimand,
    Examples,
    as_tensor,
    explained,
    joined,
    labelled_chunks,
    on_threads,
    raw_chunks,
    thread_ranges,
    top_class,
)
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.inputs import FORMS, Data, Input, labelled_examples

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Pairs(NamedTuple):
    """A claimed probability and whether the event happened, one of each per example."""

    confidence: FloatArray
    outcome: BoolArray


class WeightedPairs(NamedTuple):
    """Checked pairs as flat float64 arrays, with weights where there are any."""

    confidence: FloatArray
    outcome: FloatArray
    weight: FloatArray | None

    def filled(self, edges: FloatArray) -> Bins:
        """Sums of the pairs per bin."""
        return fill(self.confidence, self.outcome, edges, self.weight)

    def equal_mass_edges(self, bins: int) -> FloatArray:
        """Edges of bins that hold about equally much weight each."""
        return equal_mass_edges(self.confidence, bins, self.weight)


def pairs_from(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> WeightedPairs:
    """Reduce examples in any of the three forms to pairs: the first step of most metrics.

    Logits and probabilities are reduced as by :func:`top_label`; pairs are checked only.

    >>> pairs_from(confidence=[0.9, 0.6], outcome=[True, False])
    WeightedPairs(confidence=array([0.9, 0.6]), outcome=array([1., 0.]), weight=None)
    """
    confidence, outcome = data.get("confidence"), data.get("outcome")
    probs, sample_weight = data.get("probs"), data.get("sample_weight")
    if confidence is None and outcome is None:
        given, _ = labelled_examples(logits, labels, probs, sample_weight)
        pairs = _pairs(given)
        return WeightedPairs(
            pairs.confidence, pairs.outcome.astype(np.float64), given.labelled_weight()
        )
    if confidence is None or outcome is None:
        raise TypeError(f"confidence= and outcome= go together: pass {FORMS}")
    if not (logits is labels is probs is None):
        raise TypeError(f"confidence= and outcome= stand alone: pass {FORMS}")
    return WeightedPairs(*as_pairs(confidence, outcome, sample_weight))


class Reduced(NamedTuple):
    """Numbers kept of each labelled example, each ``(n,)``."""

    confidence: FloatArray
    outcome: BoolArray
    correct: BoolArray
    nll: FloatArray
    brier: FloatArray


def reduce_examples(given: Examples, classwise: ClassBins | None = None) -> Reduced:
    """Reduce every labelled row; add its one-vs-rest pairs to ``classwise`` on the way."""
    runs = thread_ranges(given)
    owned = [classwise and classwise.like() for _ in runs]
    parts = on_threads(partial(_reduce_range, given), runs, owned)
    for sums in owned:
        if classwise is not None and sums is not None:
            classwise.add(sums)
    return Reduced(*joined(parts))


def top_label(logits: Input = None, labels: Input = None, *, probs: Input = None) -> Pairs:
    """Confidence in the predicted class, and whether that class is the label.

    Parameters
    ----------
    logits : (..., classes) or, for log-odds of two classes, (n,)
    labels : (...) integers, -100 ignored
    probs : (..., classes), or (n,) for P(y = 1)
        In place of logits.

    Examples
    --------
    >>> top_label([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], [0, 1])
    Pairs(confidence=array([0.33333333, 0.99975324]), outcome=array([ True, False]))
    """
    return _pairs(labelled_examples(logits, labels, probs)[0])


def positive_class(logits: Input = None, labels: Input = None, *, probs: Input = None) -> Pairs:
    """Probability of class 1 of two, and whether the label is 1.

    One logit ``z`` means the pair ``(0, z)``, so its probability is ``sigmoid(z)``.

    >>> positive_class([0.0, 2.0], [1, 0])
    Pairs(confidence=array([0.5       , 0.88079708]), outcome=array([ True, False]))
    """
    return _pairs(labelled_examples(logits, labels, probs, estimand="binary")[0])


def multilabel(logits: Input = None, labels: Input = None, *, probs: Input = None) -> Pairs:
    """Probability ``sigmoid(z)`` of every tag of every example, and whether it applies.

    Parameters
    ----------
    logits, probs : (..., tags)
    labels : (..., tags), 0, 1, or -100 for unknown

    Examples
    --------
    >>> multilabel([[0.0, 2.0]], [[1, -100]])
    Pairs(confidence=array([0.5]), outcome=array([ True]))
    """
    return _pairs(labelled_examples(logits, labels, probs, estimand="multilabel")[0])


def one_vs_rest(
    logits: Input = None, labels: Input = None, *, k: int, probs: Input = None
) -> Pairs:
    """Probability of class ``k``, and whether the label is ``k``.

    >>> one_vs_rest([[0.0, 0.0], [0.0, 2.0]], [0, 1], k=1).outcome
    array([False,  True])
    """
    given, _ = labelled_examples(logits, labels, probs)
    if not 0 <= k < given.classes:
        raise ValueError(f"k must be a class in [0, {given.classes}), got {k}")
    return _pairs(given, lambda soft: (soft.probs[:, k], soft.chunk.labels == k))


def margins(logits: Values) -> FloatArray:
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
            "logits must be finite, or -inf for masked classes, got NaN or +inf at row "
            f"{int(np.flatnonzero(np.isnan(gaps))[0])}: find the example that overflowed"
        )
    return gaps if scores.ndim == 1 else gaps.reshape(shape)


Event = Callable[["_Softmax"], tuple[Tensor, Tensor]]
"""Confidence and outcome, each ``(rows,)``, of the softmax of a block."""


def _event(estimand: Estimand) -> Event:
    if estimand == "top_label":
        return lambda soft: (soft.confidence, soft.top == soft.chunk.labels)
    return lambda soft: (soft.probs[:, 1], soft.chunk.labels == 1)


def _pairs(given: Examples, event: Event | None = None) -> Pairs:
    task = partial(_pair_range, given, event or _event(given.estimand))
    pairs = Pairs(*joined(on_threads(task, thread_ranges(given))))
    check_some(pairs.outcome.size)
    return pairs


def _reduce_range(
    given: Examples, row_range: tuple[int, int], classwise: ClassBins | None
) -> Reduced:
    parts = [_reduce(soft, given, classwise) for soft in _softmaxes(given, row_range)]
    return Reduced(*joined([_NOTHING, *parts]))


def _pair_range(given: Examples, event: Event, row_range: tuple[int, int]) -> Pairs:
    parts = [Pairs(*map(_array, event(soft))) for soft in _softmaxes(given, row_range)]
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


def _reduce(soft: _Softmax, given: Examples, classwise: ClassBins | None) -> Reduced:
    chunk, top, _, probs, nll = soft
    confidence, outcome = _event(given.estimand)(soft)
    true = probs.gather(-1, chunk.labels[:, None])[:, 0]
    brier = 1 - 2 * true + torch.linalg.vector_norm(probs, dim=-1) ** 2
    if classwise is not None:
        classwise.update(probs, chunk.labels, chunk.weight, chunk.column)
    return Reduced(*map(_array, (confidence, outcome, top == chunk.labels, nll, brier)))


def _array(values: Tensor) -> NDArray[Any]:
    """Take values out of the buffer that the next block overwrites."""
    return values.cpu().numpy().copy()


_NO_PAIRS = Pairs(np.zeros(0), np.zeros(0, dtype=bool))
_NOTHING = Reduced(*_NO_PAIRS, np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
