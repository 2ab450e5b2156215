"""The forms in which every metric takes its examples, and errors for calls that mix them up."""

from __future__ import annotations

import warnings
from typing import TypeAlias, TypedDict

import numpy as np
from torch import Tensor

from calibrant._core.checks import Logits, Values, as_scores, logits_from_probs
from calibrant._core.chunks import Estimand, Examples, examples

FORMS = "(logits, labels), (probs=..., labels=...) or (confidence=..., outcome=...)"


Input: TypeAlias = Values | None
"""Logits, probabilities or labels in a call that may have them in another form."""


class Data(TypedDict, total=False):
    """Keyword arguments of the metrics that are functions of pairs.

    probs : (..., classes), or (n,) for P(y = 1), with labels (...)
    confidence : (...) in [0, 1], with outcome (...) 0 or 1
    sample_weight : (...), or one weight per row
    """

    probs: Input
    confidence: Input
    outcome: Input
    sample_weight: Input


def logits_or_probs(logits: Input, probs: Input, *, tags: bool = False) -> tuple[Logits, int]:
    """Return logits, and the number of zero probabilities that were floored to get them."""
    if (logits is None) == (probs is None):
        problem = "got neither" if logits is None else "got both"
        raise TypeError(f"pass either logits or probs=, {problem}")
    if probs is not None:
        return logits_from_probs(probs, tags=tags)
    assert logits is not None
    return as_scores(logits), 0


def labelled_examples(
    logits: Input,
    labels: Input,
    probs: Input = None,
    sample_weight: Input = None,
    estimand: Estimand = "top_label",
) -> tuple[Examples, int]:
    """Check logits or probs with their labels; also count the probabilities that were floored."""
    if labels is None:
        raise TypeError("labels are missing: pass (logits, labels) or (probs=..., labels=...)")
    if logits is not None and _is_floating(labels) and not _is_floating(logits):
        raise TypeError(
            "logits and labels are swapped: logits are floats (..., classes), labels integers (...)"
        )
    scores, floored = logits_or_probs(logits, probs, tags=estimand == "multilabel")
    return examples(scores, labels, sample_weight, estimand), floored


def warn_of_floor(floored: int) -> None:
    """Warn the caller's caller of zero probabilities."""
    if floored:
        warnings.warn(
            f"{floored} probabilities are exactly 0 and were floored: NLL depends on the floor; "
            "pass logits to avoid it",
            stacklevel=3,
        )


def _is_floating(values: Values) -> bool:
    if isinstance(values, Tensor):
        return values.is_floating_point()
    try:
        return np.asarray(values).dtype.kind == "f"
    except ValueError:  # ragged lists; the checks of each argument explain them
        return False
