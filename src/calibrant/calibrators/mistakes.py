"""Warnings about mistakes in the examples of a fit, and about errors that a fit leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from calibrant._core import checks
from calibrant._core.checks import IGNORED, IntArray, Logits, warn
from calibrant._core.chunks import Examples, as_tensor, picked
from calibrant.calibrators.fit_inputs import _one_label
from calibrant.metrics.evaluation import ENOUGH, Figures, Ranks, mistake_in
from calibrant.metrics.ranking import roc_auc

_MAX_EXAMPLES, _MAX_LOGITS = 10_000, 1 << 18
"""Number of examples, and of logits, that are looked at for mistakes."""
_OFF, _HALF_OR_TWICE, _SIGNIFICANT = 0.1, 0.02, 1e-3
"""By how much the share of a class must be off: in any case, where it is half or twice the right
one, and at which level."""
_TOLD: ContextVar[bool] = ContextVar("told", default=False)


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
    probs = calibrator.probs_of_classes(some.logits, inputs)
    own = some.labels[:, None] == np.arange(some.classes)
    weight = np.ones(len(own)) if some.weight is None else some.weight
    share = weight / weight.sum()
    labelled, gap = share @ own, share @ (probs - own)
    noise = np.sqrt(share**2 @ (probs - own - gap) ** 2)
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
