"""Checks and warnings about the examples of a fit, folds, and passes over more than memory holds.

A fit warns of mistakes that its examples show, and of errors that it leaves.

:class:`~calibrant.calibrators.base.Calibrator` has the first three functions as methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import FEW, IGNORED, FloatArray, IntArray, Logits, Values, warn
from calibrant._core.chunks import Examples, as_tensor, mask_gap, picked, range_of, with_masks
from calibrant.metrics.evaluation import ENOUGH, Figures, Ranks, mistake_in
from calibrant.metrics.ranking import roc_auc

MIN_PER_PARAMETER = 5  # examples, below which a fit warns
_MAX_EXAMPLES, _MAX_LOGITS = 10_000, 1 << 18
"""Number of examples, and of logits, that are looked at for mistakes."""
_OFF, _HALF_OR_TWICE, _SIGNIFICANT = 0.1, 0.02, 1e-3
"""By how much the share of a class must be off: in any case, where it is half or twice the right
one, and at which level."""
_TOLD: ContextVar[bool] = ContextVar("told", default=False)


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
    if logits.device != (home := calibrator.device):
        raise ValueError(
            f"this {name} is on {home}, the logits are on {logits.device}: pass "
            f"logits.to('{home}'), or move it with .to('{logits.device}')"
        )


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
    distinct = len({row.tobytes() for row in rows + 0.0})  # the two zeros are one
    return distinct if len(rows) >= FEW and distinct < len(rows) / 2 else None


def _warn_of_few(calibrator: Any, count: int, classes: int, distinct: int | None) -> None:
    """Warn where a method has more parameters than examples support, or than distinct rows."""
    size = calibrator.size(classes)
    # one parameter is not led astray by copies
    effective = count if distinct is None or size == 1 else distinct
    if effective < MIN_PER_PARAMETER * calibrator.effective_size(classes):
        fewest = "pooled has two" if calibrator.multilabel else "ts has one"
        remedy = f"; a method with fewer parameters ({fewest}) is safer" if size > 1 else ""
        same = f" ({effective:,} of the first are not alike)" if effective < count else ""
        has = f"{size:,} parameter{'s' * (size > 1)} for {count:,} examples{same}"
        warn(f"{type(calibrator).__name__} has {has}: it may fit their noise{remedy}")


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


@contextmanager
def watched(calibrator: Any, examples: Examples, features: Logits | None = None) -> Iterator[None]:
    """Warn of what the examples of the fit inside show, and of what it leaves undone.

    Where they are a mistake, the fit is silent: what it would complain of follows from that.
    """
    if _TOLD.get():
        yield
    elif mistake := mistake_of(examples):
        warn(mistake)
        with told(mistake):
            yield
    else:
        yield
        notes = [off_shares(calibrator, examples, features), *calibrator.left_out()]
        if any(notes):
            warn("; ".join(filter(None, notes)))


@contextmanager
def told(mistake: str = "") -> Iterator[None]:
    """Do not watch the fits inside: who makes several of the same examples tells it once.

    They are silent if that is a mistake.
    """
    token = _TOLD.set(True)
    try:
        with checks.silenced() if mistake else nullcontext():
            yield
    finally:
        _TOLD.reset(token)


def most_rows(classes: int) -> int:
    """Return how many examples are looked at: of many classes few, but enough to tell."""
    return max(2 * ENOUGH, min(_MAX_EXAMPLES, _MAX_LOGITS // classes))


def _looked_at(examples: Examples) -> tuple[Examples, IntArray]:
    """Return some of the labelled examples, evenly spread, and the numbers of their rows."""
    rows = np.flatnonzero(examples.labels != IGNORED)
    checks.check_some(len(rows))
    rows = rows[:: max(1, -(-len(rows) // most_rows(examples.classes)))]
    weight = None if examples.weight is None else examples.weight[rows]
    logits = picked(examples.logits, rows, flat=examples.one_logit)
    return Examples(logits, examples.labels[rows], weight, examples.estimand), rows


def mistake_of(examples: Examples) -> str:
    """Return the mistake that examples show, with its remedy; empty for sound ones.

    Of tags, only labels that are all the same are one.
    """
    same = _one_label(examples.labels[examples.labels != IGNORED])
    if same or examples.estimand == "multilabel":
        return same
    return mistake_in(_figures_of(_looked_at(examples)[0]))


def _figures_of(examples: Examples) -> Figures:
    """Return the figures of some labelled examples in which mistakes show.

    Rows without a softmax, which a fit refuses, are left out.
    """
    odds = checks.as_float64(examples.logits)
    odds = np.stack([np.zeros_like(odds), odds], -1) if examples.one_logit else odds
    probs = torch.from_numpy(odds).softmax(-1).numpy()
    kept = np.isfinite(probs).all(-1)
    probs, labels = probs[kept], examples.labels[kept]
    weight = np.ones(len(labels)) if examples.weight is None else examples.weight[kept]
    share = weight / max(weight.sum(), 1e-300)
    frequency = np.bincount(labels, share, examples.classes)
    ranks = None
    if examples.classes == 2 and frequency.all():
        area = roc_auc(probs=probs[:, 1], labels=labels, sample_weight=weight)
        ranks = Ranks(float(frequency[1]), area, float(probs[:, 1].std()))
    return Figures(
        n=float(weight.sum() ** 2 / max(weight @ weight, 1e-300)),
        accuracy=float(share @ (probs.argmax(-1) == labels)),
        confidence=float(share @ probs.max(-1)),
        chance=max(float(share @ probs @ frequency), 1 / examples.classes),
        ranks=ranks,
    )


def off_shares(calibrator: Any, examples: Examples, features: Logits | None = None) -> str:
    """Return how far a fit that keeps predictions leaves a class off, if one clearly is.

    That is, how far its mean probability is from its share of the labels.
    """
    tags = examples.estimand == "multilabel"
    if tags or not calibrator.keeps_argmax or not calibrator.size(examples.columns):
        return ""
    some, rows = _looked_at(examples)
    inputs = None if features is None else as_tensor(picked(features, rows))
    residual = calibrator.probs_of_classes(some.logits, inputs)
    residual[np.arange(len(residual)), some.labels] -= 1
    weight = np.ones(len(residual)) if some.weight is None else some.weight
    share = weight / weight.sum()
    labelled, gap = np.bincount(some.labels, share, some.classes), share @ residual
    residual -= gap
    noise = np.sqrt(share**2 @ np.square(residual, out=residual))
    claimed = labelled + gap
    twice = np.maximum(claimed, labelled) >= 2 * np.minimum(claimed, labelled)
    beyond_noise = -ndtri(_SIGNIFICANT / 2 / some.classes) * noise
    least = np.maximum(np.where(twice, _HALF_OR_TWICE, _OFF), beyond_noise)
    off = np.flatnonzero(np.abs(gap) >= least)
    if not off.size:
        return ""
    worst = off[np.abs(gap[off]).argmax()]
    others = f" ({off.size - 1:,} more classes are off)" if off.size > 1 else ""
    several = "auto with keep_argmax=False, vector, dirichlet or sms"
    return (
        f"{type(calibrator).__name__} keeps predictions, so that after the fit the mean "
        f"probability of class {worst} is {100 * claimed[worst]:.1f} % where "
        f"{100 * labelled[worst]:.1f} % of the labels are {worst}{others}: if the model was "
        "trained with class weights or on other class frequencies, use a method that corrects "
        f"these, such as {'auto or sigmoid' if some.classes == 2 else several}"
    )
