"""Probabilities: their logarithms, zeros among them, and rows that must sum to one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from calibrant._core.checks import FloatArray, Values, _place, as_float64, as_scores, float_info

_MAX_ROUNDING = 0.01  # by which a printed row may miss a sum of 1
LEAST = math.exp(-100)
"""Probabilities count as at least this: a label costs at most 100 nats, as in torch's
binary_cross_entropy."""
_NEGLIGIBLE = 1e-12
"""A fit takes smaller probabilities for 0."""


def logits_from_probs(probs: Values, *, tags: bool = False, floor: float = 0.0) -> FloatArray:
    """Return the logarithms of probabilities, of which those below ``floor`` count as that.

    A stored zero is an improbable class, not a masked one. Without a floor it counts as half of the
    smallest number of its dtype, or as ``LEAST`` if that is more. One column of probabilities,
    ``(n,)``, is P(y = 1) and becomes its log-odds; so does every number where the columns are
    ``tags``.
    """
    scores = as_scores(probs, "probs")
    exact, info = as_float64(scores), float_info(scores)
    check_range(exact, float(info.eps))
    one_each = tags or exact.ndim == 1
    if not one_each:
        check_columns(exact, "probs")
    rows = np.stack([1 - exact, exact], axis=-1) if one_each else exact
    check_sums(rows, float(info.eps))
    least = floor or max(float(info.tiny) * float(info.eps) / 2, LEAST)
    logs = np.log(np.maximum(rows, least))
    return np.asarray(logs[..., 1] - logs[..., 0] if one_each else logs)


class Zeros(NamedTuple):
    """Zeros among probabilities of examples, from which follows what a fit takes them for.

    Trees and neighbours give 0 to classes without a vote, which may be merely rare; a 0 in the
    softmax of a network is smaller than any number of its dtype. The other probabilities tell which
    it is: the smallest of them is that of a vote, or negligible.
    """

    exact: int = 0  # number of zeros themselves
    total: int = 0
    negligible: bool = False  # are any, zeros included
    smallest: float = 1.0  # that is not negligible

    @classmethod
    def among(cls, probs: Values) -> Zeros:
        """Return those of probabilities ``(n, classes)``, or ``(n,)`` of class 1 or of tags."""
        scores = as_scores(probs, "probs")
        values, least = as_float64(scores), _NEGLIGIBLE
        if values.ndim == 1:
            values = np.stack([1 - values, values])
            least = max(least, float(float_info(scores).eps))  # 1 - p is rounded as p is
        others = values[values >= least]
        exact, negligible = int((values == 0).sum()), others.size < values.size
        return cls(exact, values.size, negligible, float(others.min(initial=1.0)))

    def plus(self, other: Zeros) -> Zeros:
        """Return those of both."""
        smallest = min(self.smallest, other.smallest)
        negligible = self.negligible or other.negligible
        return Zeros(self.exact + other.exact, self.total + other.total, negligible, smallest)

    def floor(self, classes: int) -> float:
        """Return half of the smallest other probability, but less than an equal share."""
        return min(self.smallest, 1 / classes) / 2 if self.negligible else _NEGLIGIBLE


def check_columns(scores: FloatArray, name: str) -> None:
    """Raise unless scores are ``(..., classes)``, with two classes or more."""
    if scores.ndim < 2 or scores.shape[-1] < 2:
        of_one = "P(y = 1)" if name == "probs" else "log-odds"
        raise ValueError(
            f"{name} must be (n,) or (..., classes) with two classes or more, got {scores.shape}: "
            f"one column of {of_one} goes in as {name}.squeeze(-1)"
        )


def check_range(probs: FloatArray, eps: float) -> None:
    """Raise unless all probabilities of a precision ``eps`` are in [0, 1], but for rounding."""
    wrong = ~((probs >= 0) & (probs <= 1 + 4 * eps))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        value, remedy = probs[at], "divide percentages by 100, and pass other scores as logits"
        if math.isnan(value):
            remedy = "leave out examples without a prediction"
        elif value < 0:
            remedy = "pass logarithms, and other scores that are not probabilities, as logits"
        where = _place(at[:1] if probs.ndim < 3 else at[:-1])
        raise ValueError(
            f"probs must be in [0, 1], got {'NaN' if math.isnan(value) else f'{value:.6g}'} at "
            f"{where}: {remedy}"
        )


def check_sums(probs: FloatArray, eps: float) -> None:
    """Raise unless rows of probabilities of a precision ``eps`` sum to one, but for rounding."""
    # each entry is rounded by half an eps at most, so a row of honest entries is off by less
    tolerance = max(1e-4, 4 * eps)
    off = np.abs(probs.sum(-1) - 1)
    wrong = off > tolerance
    if wrong.any():
        # Digits that were rounded for print move a sum by up to half a unit of the last one for
        # each class, and at most by a hundredth: beyond, a class may be missing as well.
        rows, allowed = probs[wrong], np.zeros(int(wrong.sum()))
        for digits in range(6, 1, -1):  # fewer digits allow more
            unit = 10.0**-digits
            if unit > 100 * eps:  # else any number of this precision would be near such a decimal
                printed = (np.abs(rows - rows.round(digits)) <= eps).all(-1)
                allowed[printed] = min(rows.shape[-1] * unit / 2, _MAX_ROUNDING)
        wrong[wrong] = off[wrong] > allowed * (1 + 1e-6)  # the sum itself is rounded too
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"probs must sum to one in each row, got {probs[at].sum():.6g} at {_place(at)}: "
            "normalise them, or pass the scores as logits"
        )
