"""Warnings about the scores of a dataset."""

from __future__ import annotations

from calibrant._core import checks
from calibrant._core.checks import Logits, warn


def warn_of_zeros(count: int) -> None:
    """Warn of probabilities that had to be changed to have a logarithm."""
    if count:
        problem = f"{count} probabilities are exactly 0 and were floored"
        warn(f"{problem}: the result depends on the floor; save logits to avoid it", stacklevel=5)


def warn_if_probs(logits: Logits, name: str, remedy: str) -> None:
    """Warn if the first rows of logits look like probabilities."""
    if reason := checks.look_like_probs(logits):
        problem = f"{name} look like probabilities: {reason}"
        warn(f"{problem}; if they are, {remedy}", stacklevel=5)
