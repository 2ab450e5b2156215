"""One walk over the logits: each row is reduced to what the metrics need of it.

The softmax of blocks of rows that fit the cache is computed in float64 whatever comes in, on
one thread per core. Nothing of the size of the logits is ever allocated, so memory-mapped and
half-precision arrays are measured as exactly as any other, and a result does not depend on how
the rows were cut into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant._checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    IntArray,
    Logits,
    as_labels,
    as_scores,
    as_weight,
    bad_row,
    check_labels,
    check_shapes,
    check_some,
)
from calibrant.metrics.classwise import ClassBins

T = TypeVar("T")

Estimand = Literal["top_label", "binary", "multilabel"]
"""Which probability is compared with which event.

- ``top_label``: the largest probability, and whether its class is the label;
- ``binary``: the probability of class 1 of two, and whether the label is 1;
- ``multilabel``: every cell of ``(..., tags)`` logits is a binary problem of its own.
"""

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements of logits in a block: two megabytes of float64 stay in a core's cache."""


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


class Examples(NamedTuple):
    """Checked input: ``logits`` of any shape over flat ``labels`` and ``weight`` ``(n,)``."""

    logits: Logits
    labels: IntArray
    weight: FloatArray | None
    estimand: Estimand

    @property
    def one_logit(self) -> bool:
        """Whether each number is a problem of its own: the log-odds z stand for (0, z)."""
        return self.logits.ndim == 1 or self.estimand == "multilabel"

    @property
    def classes(self) -> int:
        """Number of classes; two where there is one logit."""
        return 2 if self.one_logit else int(self.logits.shape[-1])

    @property
    def columns(self) -> int:
        """Number of one-vs-rest problems: the tags where there are several, else the classes."""
        return int(self.logits.shape[-1]) if self.estimand == "multilabel" else self.classes

    def labelled_weight(self) -> FloatArray | None:
        """Weights of the examples that a walk returns."""
        return None if self.weight is None else self.weight[self.labels != IGNORED]


def examples(
    logits: Tensor | ArrayLike,
    labels: Tensor | ArrayLike,
    weight: Tensor | ArrayLike | None = None,
    estimand: Estimand = "top_label",
) -> Examples:
    """Check logits ``(..., classes)``, labels ``(...)`` and weights against each other."""
    scores, targets = as_scores(logits), as_labels(labels)
    if estimand not in get_args(Estimand):
        raise ValueError(f"estimand must be one of {get_args(Estimand)}, got {estimand!r}")
    given = Examples(scores, targets, None, estimand)
    if not given.one_logit:
        check_shapes(scores, targets)
    elif tuple(scores.shape) != targets.shape:
        raise ValueError(
            f"one logit per label is wanted, got logits {tuple(scores.shape)} and labels "
            f"{targets.shape}: (n,) logits are log-odds, {estimand} ones have a label per cell"
        )
    if estimand == "multilabel" and scores.ndim < 2:
        raise ValueError(
            f"multilabel logits must be (..., tags), got {tuple(scores.shape)}: one logit per "
            'example is estimand="binary"'
        )
    if estimand == "binary" and given.classes > 2:
        raise ValueError(
            f"the binary estimand needs (n,) or (n, 2) logits, got {tuple(scores.shape)}: use "
            "calibrant.one_vs_rest(logits, labels, k) for one class of several"
        )
    if given.classes < 2:
        raise ValueError(
            f"logits must have at least two classes, got {tuple(scores.shape)}: one column of "
            "log-odds goes in as logits.squeeze(-1)"
        )
    check_labels(targets, given.classes)
    if weight is None:
        return given._replace(labels=targets.reshape(-1))
    weights = as_weight(weight, targets.shape)
    flat = np.where(weights > 0, targets.reshape(-1), IGNORED)  # weight zero: as if not there
    return given._replace(labels=flat, weight=weights)


def walk(given: Examples, classwise: ClassBins | None = None) -> Rows:
    """Reduce every labelled row; add its one-vs-rest pairs to ``classwise`` on the way."""
    strips = _strips(given)
    owned = [classwise and classwise.like() for _ in strips]
    parts = _on_threads(partial(_walk_strip, given), strips, owned)
    for sums in owned:
        if classwise is not None and sums is not None:
            classwise.add(sums)
    return Rows(*_joined(parts))


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
    return _pairs(given, lambda soft: (soft.probs[:, k], soft.block.labels == k))


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
        odds = _tensor(scores).double().cpu()
        gaps = torch.where(odds == math.inf, math.nan, odds.abs()).numpy()
    elif scores.shape[-1] == 1:
        gaps = np.full(shape, np.inf)
    else:
        runs = _slices(scores, int(scores.shape[-1]), 0, math.prod(shape))
        tops = [_tensor(rows).topk(2, dim=-1).values.double().cpu() for _, rows in runs]
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
        return lambda soft: (soft.confidence, soft.top == soft.block.labels)
    return lambda soft: (soft.probs[:, 1], soft.block.labels == 1)


def _pairs(given: Examples, claim: Claim | None = None) -> Pairs:
    task = partial(_pair_strip, given, claim or _claim(given.estimand))
    pairs = Pairs(*_joined(_on_threads(task, _strips(given))))
    check_some(pairs.outcome.size)
    return pairs


def _strips(given: Examples) -> list[tuple[int, int]]:
    """Cut the rows into one run per core; a GPU, or little work, takes them in one."""
    on_cpu = not isinstance(given.logits, Tensor) or given.logits.device.type == "cpu"
    worth_it = math.prod(given.logits.shape) >= 8 * BLOCK["cpu"]
    workers = torch.get_num_threads() if on_cpu and worth_it else 1
    cuts = np.linspace(0, given.labels.size, workers + 1).astype(int)
    return [(int(a), int(b)) for a, b in pairwise(cuts)]


def _on_threads(task: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Call ``task`` with each set of arguments, each on a thread of its own."""
    if len(arguments[0]) == 1:
        return [task(*(column[0] for column in arguments))]
    before = torch.get_num_threads()
    # Small operations on several OpenMP threads collapse when the cores are shared, so each
    # worker runs on one. torch keeps the last number set for threads to come: put it back.
    try:
        with ThreadPoolExecutor(
            len(arguments[0]), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return list(pool.map(task, *arguments))
    finally:
        torch.set_num_threads(before)


class _Block(NamedTuple):
    logits: Tensor  # (rows, classes)
    labels: Tensor  # (rows,)
    weight: Tensor | None  # (rows,)
    column: Tensor | None  # (rows,) the tag of each cell of multi-label logits
    number: IntArray  # (rows,) where the rows stand in the input


def _walk_strip(given: Examples, strip: tuple[int, int], classwise: ClassBins | None) -> Rows:
    parts = [_reduce(soft, given, classwise) for soft in _softmaxes(given, strip)]
    return Rows(*_joined([_NO_ROWS, *parts]))


def _pair_strip(given: Examples, claim: Claim, strip: tuple[int, int]) -> Pairs:
    parts = [Pairs(*map(_array, claim(soft))) for soft in _softmaxes(given, strip)]
    return Pairs(*_joined([_NO_PAIRS, *parts]))


def _blocks(given: Examples, start: int, stop: int) -> Iterator[_Block]:
    """Yield the labelled rows between ``start`` and ``stop``."""
    width = 1 if given.one_logit else given.classes
    for first, values in _slices(given.logits, width, start, stop):
        number = np.arange(first, first + len(values))
        block = _tensor(values)
        kept = given.labels[first : first + len(values)] != IGNORED
        if not kept.all():
            number, block = number[kept], block[torch.from_numpy(kept).to(block.device)]
        if given.one_logit:
            block = torch.cat([torch.zeros_like(block), block], dim=-1)
        yield _Block(
            block,
            torch.from_numpy(given.labels[number]).to(block.device),
            None if given.weight is None else torch.from_numpy(given.weight[number]),
            torch.from_numpy(number % given.columns) if given.estimand == "multilabel" else None,
            number,
        )


def _slices(
    logits: Logits, width: int, start: int, stop: int, first: int = 0
) -> Iterator[tuple[int, Logits]]:
    """Yield runs ``(rows, width)`` between ``start`` and ``stop``, each with its first number.

    Leading dimensions are descended into rather than flattened: flattening a view whose
    classes were moved to the end would copy all of it.
    """
    inner = math.prod(logits.shape[1:]) // width  # rows per index of the first dimension
    if inner == 0:
        return
    device = logits.device.type if isinstance(logits, Tensor) else "cpu"
    step = BLOCK.get(device, BLOCK["cpu"]) // (inner * width)
    low = max(0, (start - first) // inner)
    high = min(len(logits), -((first - stop) // inner))
    if step == 0 and inner > 1:
        for i in range(low, high):
            yield from _slices(logits[i], width, start, stop, first + i * inner)
        return
    for i in range(low, high, max(step, 1)):
        at = first + i * inner
        rows = logits[i : min(i + max(step, 1), high)].reshape(-1, width)
        yield max(at, start), rows[max(0, start - at) : stop - at]


def _tensor(values: Logits) -> Tensor:
    """A block as a tensor: of single precision at least, where numpy and torch agree on dtypes."""
    if not isinstance(values, Tensor):
        # a copy, since torch does not take read-only or foreign-endian memory
        exact = np.float32 if values.dtype == np.float16 else np.float64
        wanted = values.dtype if values.dtype == np.float32 else exact
        return torch.from_numpy(np.array(values, dtype=np.dtype(wanted).newbyteorder("=")))
    block = values.detach()
    if block.device.type == "mps":  # has no float64
        block = block.cpu()
    return block.float() if block.dtype.itemsize < 4 else block


def _top(block: Tensor) -> Tensor:
    """Class of the largest logit, the first of equals; numpy is several times faster."""
    if block.device.type == "cpu":
        return torch.from_numpy(block.numpy().argmax(-1))
    return block.argmax(-1)


class _Softmax(NamedTuple):
    block: _Block
    top: Tensor  # (rows,) class of the largest logit, the first of equals
    confidence: Tensor  # (rows,) its probability
    probs: Tensor  # (rows, classes), overwritten by the next block
    nll: Tensor  # (rows,) of the label


def _softmaxes(given: Examples, strip: tuple[int, int]) -> Iterator[_Softmax]:
    """Yield the softmax of every block; a row that has none is refused."""
    # one buffer for all blocks: fresh memory of this size costs more than the softmax
    buffer = torch.empty(0, dtype=torch.float64)
    for block in _blocks(given, *strip):
        if buffer.numel() < block.logits.numel() or buffer.device != block.logits.device:
            size, device = block.logits.numel(), block.logits.device
            buffer = torch.empty(size, dtype=torch.float64, device=device)
        probs = buffer[: block.logits.numel()].view_as(block.logits)
        yield _softmax(block, given, probs)


def _softmax(block: _Block, given: Examples, out: Tensor) -> _Softmax:
    top = _top(block.logits)
    # each row is read before it is written, so the softmax may overwrite its input
    probs = torch.softmax(out.copy_(block.logits), -1, out=out)
    best, own = (block.logits.gather(-1, i[:, None])[:, 0].double() for i in (top, block.labels))
    confidence = probs.gather(-1, top[:, None])[:, 0]
    nll = (best - own) - confidence.log()  # finite also where the probability underflows
    if not torch.isfinite(nll).all():
        raise _explained(given, int(block.number[~torch.isfinite(nll).cpu().numpy()][0]))
    return _Softmax(block, top, confidence, probs, nll)


def _reduce(soft: _Softmax, given: Examples, classwise: ClassBins | None) -> Rows:
    block, top, _, probs, nll = soft
    confidence, outcome = _claim(given.estimand)(soft)
    true = probs.gather(-1, block.labels[:, None])[:, 0]
    brier = 1 - 2 * true + torch.linalg.vector_norm(probs, dim=-1) ** 2
    if classwise is not None:
        classwise.update(probs, block.labels, block.weight, block.column)
    return Rows(*map(_array, (confidence, outcome, top == block.labels, nll, brier)))


def _explained(given: Examples, at: int) -> ValueError:
    width = 1 if given.one_logit else given.classes
    _, values = next(_slices(given.logits, width, at, at + 1))
    row = _tensor(values)[0]
    if given.one_logit:
        row = torch.cat([torch.zeros_like(row), row])
    return bad_row(row, int(given.labels[at]), at)


def _array(values: Tensor) -> NDArray[Any]:
    """Take values out of the buffer that the next block overwrites."""
    return values.cpu().numpy().copy()


def _joined(parts: Sequence[tuple[NDArray[Any], ...]]) -> list[NDArray[Any]]:
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


_NO_PAIRS = Pairs(np.zeros(0), np.zeros(0, dtype=bool))
_NO_ROWS = Rows(*_NO_PAIRS, np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
