"""One walk over the logits: each row is reduced to what the metrics need of it.

Blocks of rows that fit the cache are computed in float64 whatever comes in, on one thread per
core. Nothing of the size of the logits is ever allocated, so memory-mapped and half-precision
arrays are measured as exactly as any other, and a result does not depend on how the rows were
cut into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from calibrant._checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    IntArray,
    Logits,
    as_labels,
    as_scores,
    bad_row,
    check_labels,
    check_shapes,
    check_some,
)
from calibrant.metrics.classwise import ClassBins

Estimand = Literal["top_label", "binary", "multilabel"]
"""Which probability is compared with which event.

- ``top_label``: the largest probability, and whether its class is the label;
- ``binary``: the probability of class 1 of two, and whether the label is 1;
- ``multilabel``: every cell of ``(..., tags)`` logits is a binary problem of its own.
"""

BLOCK = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements of logits in a block: half a megabyte of float64 stays in a core's cache."""


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
    weight: FloatArray | None = None,
    estimand: Estimand = "top_label",
) -> Examples:
    """Check logits ``(..., classes)`` and labels ``(...)`` against each other."""
    scores, targets = as_scores(logits), as_labels(labels)
    if estimand not in get_args(Estimand):
        raise ValueError(f"estimand must be one of {get_args(Estimand)}, got {estimand!r}")
    given = Examples(scores, targets, weight, estimand)
    if not given.one_logit:
        check_shapes(scores, targets)
    elif tuple(scores.shape) != targets.shape:
        raise ValueError(
            f"one logit per label is wanted, got logits {tuple(scores.shape)} and labels "
            f"{targets.shape}: (n,) logits are log-odds, {estimand} ones have a label per cell"
        )
    if estimand == "binary" and given.classes != 2:
        raise ValueError(
            f"the binary estimand needs (n,) or (n, 2) logits, got {tuple(scores.shape)}: use "
            "calibrant.one_vs_rest(logits, labels, k) for one class of several"
        )
    check_labels(targets, given.classes)
    flat = targets.reshape(-1)
    if weight is not None and not weight.all():  # weight zero: as if not there
        flat = np.where(weight > 0, flat, IGNORED)
    return given._replace(labels=flat)


def walk(given: Examples, classwise: ClassBins | None = None) -> Rows:
    """Reduce every labelled row; add its one-vs-rest pairs to ``classwise`` on the way."""
    if given.labels.size == 0:
        return _joined([])
    strips = _strips(given)
    if len(strips) == 1:
        return _walk_strip(given, strips[0], classwise)
    owned = [classwise and classwise.like() for _ in strips]
    before = torch.get_num_threads()
    # Small operations on several OpenMP threads collapse when the cores are shared, so each
    # worker runs on one. torch keeps the last number set for threads to come: put it back.
    try:
        with ThreadPoolExecutor(
            len(strips), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            parts = list(pool.map(partial(_walk_strip, given), strips, owned))
    finally:
        torch.set_num_threads(before)
    for sums in owned:
        if classwise is not None and sums is not None:
            classwise.add(sums)
    return _joined(parts)


def top_label(logits: Tensor | ArrayLike, labels: Tensor | ArrayLike) -> Pairs:
    """Confidence in the predicted class, and whether that class is the label.

    Parameters
    ----------
    logits : (..., classes) or, for log-odds of two classes, (n,)
    labels : (...) integers, -100 ignored

    Examples
    --------
    >>> top_label([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], [0, 1])
    Pairs(confidence=array([0.33333333, 0.99975326]), outcome=array([ True, False]))
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
    blocks = _blocks(given, 0, given.labels.size)
    claimed = [_softmax(block, given).probs[:, k].cpu().numpy() for block in blocks]
    check_some(sum(part.size for part in claimed))
    return Pairs(np.concatenate(claimed), given.labels[given.labels != IGNORED] == k)


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
        gaps = _float64(scores).abs().cpu().numpy()
    elif scores.shape[-1] == 1:
        gaps = np.full(shape, np.inf)
    else:
        runs = _slices(scores, int(scores.shape[-1]), 0, math.prod(shape))
        tops = [_float64(rows).topk(2, dim=-1).values.cpu() for _, rows in runs]
        gaps = torch.cat([torch.zeros(0), *(top[:, 0] - top[:, 1] for top in tops)]).numpy()
    if np.isnan(gaps).any():
        raise ValueError(
            "logits must be finite, or -inf for masked classes; NaN or +inf was found at row "
            f"{int(np.flatnonzero(np.isnan(gaps))[0])}: find the sample that overflowed"
        )
    return gaps if scores.ndim == 1 else gaps.reshape(shape)


def _pairs(given: Examples) -> Pairs:
    rows = walk(given)
    check_some(rows.outcome.size)
    return Pairs(rows.confidence, rows.outcome)


def _strips(given: Examples) -> list[tuple[int, int]]:
    """Cut the rows into one run per core; a GPU, or little work, takes them in one."""
    count = given.labels.size
    on_cpu = not isinstance(given.logits, Tensor) or given.logits.device.type == "cpu"
    worth_it = math.prod(given.logits.shape) >= 8 * BLOCK["cpu"]
    workers = torch.get_num_threads() if on_cpu and worth_it else 1
    cuts = np.linspace(0, count, workers + 1).astype(int)
    return [(int(a), int(b)) for a, b in pairwise(cuts) if b > a]


class _Block(NamedTuple):
    logits: Tensor  # (rows, classes) float64, ours to overwrite
    labels: Tensor  # (rows,)
    weight: Tensor | None  # (rows,)
    column: Tensor | None  # (rows,) the tag of each cell of multi-label logits
    number: IntArray  # (rows,) where the rows stand in the input


def _walk_strip(given: Examples, strip: tuple[int, int], classwise: ClassBins | None) -> Rows:
    return _joined([_reduce(block, given, classwise) for block in _blocks(given, *strip)])


def _blocks(given: Examples, start: int, stop: int) -> Iterator[_Block]:
    """Yield the labelled rows between ``start`` and ``stop``."""
    width = 1 if given.one_logit else given.classes
    for first, values in _slices(given.logits, width, start, stop):
        number = np.arange(first, first + len(values))
        block = _float64(values)
        kept = given.labels[number] != IGNORED
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


def _float64(values: Logits) -> Tensor:
    """Copy rows to a float64 block; a device without float64 hands them to the CPU."""
    if isinstance(values, Tensor):
        values = values.detach()
        target = "cpu" if values.device.type == "mps" else values.device
        return values.to(target).to(torch.float64, copy=True)
    return torch.from_numpy(np.array(values, dtype=np.float64))


class _Softmax(NamedTuple):
    top: Tensor  # (rows,) class of the largest logit, the first of equals
    confidence: Tensor  # (rows,) its probability
    probs: Tensor  # (rows, classes)
    nll: Tensor  # (rows,) of the label


def _softmax(block: _Block, given: Examples) -> _Softmax:
    """Softmax of a block, in place of its logits; a row that has none is refused."""
    own = block.logits.gather(-1, block.labels[:, None])[:, 0]
    peak, top = block.logits.max(dim=-1)
    scaled = block.logits.sub_(peak[:, None]).exp_()
    norm = scaled.sum(-1)
    nll = norm.log() + (peak - own)
    if not torch.isfinite(nll).all():
        raise _explained(given, int(block.number[~torch.isfinite(nll).cpu().numpy()][0]))
    return _Softmax(top, 1 / norm, scaled.div_(norm[:, None]), nll)


def _reduce(block: _Block, given: Examples, classwise: ClassBins | None) -> Rows:
    top, confidence, probs, nll = _softmax(block, given)
    true = probs.gather(-1, block.labels[:, None])[:, 0]
    brier = 1 - 2 * true + torch.einsum("ij,ij->i", probs, probs)
    correct = outcome = top == block.labels
    if given.estimand != "top_label":
        confidence, outcome = probs[:, 1], block.labels == 1
    if classwise is not None:
        classwise.update(probs, block.labels, block.weight, block.column)
    return Rows(*(x.cpu().numpy() for x in (confidence, outcome, correct, nll, brier)))


def _explained(given: Examples, at: int) -> ValueError:
    width = 1 if given.one_logit else given.classes
    _, values = next(_slices(given.logits, width, at, at + 1))
    return bad_row(_float64(values)[0], int(given.labels[at]), at)


def _joined(parts: list[Rows]) -> Rows:
    if not parts:
        none, no = np.zeros(0), np.zeros(0, dtype=bool)
        return Rows(none, no, no, none, none)
    return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))
