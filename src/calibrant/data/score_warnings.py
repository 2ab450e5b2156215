"""Warnings about the scores of a dataset."""

from __future__ import annotations

from calibrant._core import checks
from calibrant._core.checks import Logits, Zeros, warn


def warn_of_zeros(zeros: Zeros, floor: float) -> None:
    """Warn of probabilities of a fit that have no logarithm."""
    if zeros.exact:
        problem = f"{zeros.exact:,} of {zeros.total:,} probabilities are 0 and have no logarithm"
        meaning = f"they count as {floor:.2g} in the fit and after it, as smaller ones do"
        warn(f"{problem}: {meaning}; save logits to avoid it", stacklevel=6)


def warn_if_probs(logits: Logits, name: str, remedy: str) -> None:
    """Warn if the first rows of logits look like probabilities."""
    if reason := checks.look_like_probs(logits):
        problem = f"{name} look like probabilities: {reason}"
        warn(f"{problem}; if they are, {remedy}", stacklevel=5)
