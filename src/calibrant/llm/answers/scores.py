"""Scores of judges, tokens and options as confidences in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from scipy.special import softmax, xlogy

from calibrant._core.checks import BoolArray, FloatArray, Values, as_float64, check_choice
from calibrant.llm.answers import topk
from calibrant.llm.answers.topk import TopLogprobs

Bound: TypeAlias = Literal["low", "middle"]
VOTES = {
    **dict.fromkeys(("yes", "true", "right", "correct", "pass"), 1.0),
    **dict.fromkeys(("no", "false", "wrong", "incorrect", "fail"), 0.0),
    **dict.fromkeys(("tie", "uncertain", "unsure", "partial"), 0.5),
}
"""Worth of a vote."""
LARGEST = 1 << 18
"""Tokens of the largest vocabularies in use."""


def judge_score(score: float, scale: tuple[float, float]) -> float:
    """Map a judge's score to [0, 1], of which ``scale`` has the worst and the best.

    >>> judge_score(8, (1, 10)), judge_score(2, (5, 1))  # the best of the second is 1
    (0.7777777777777778, 0.75)
    """
    worst, best = scale
    if not all(map(math.isfinite, scale)) or worst == best:
        raise ValueError(f"scale must be two different numbers, the worst first, got {scale}")
    if isinstance(score, bool) or not min(scale) <= score <= max(scale):
        raise ValueError(f"the score must be from {worst:g} to {best:g}, got {score!r}")
    return (score - worst) / (best - worst)


def vote_share(votes: Sequence[str]) -> float:
    """Compute the share of votes for an answer; ties count half.

    >>> vote_share(["yes", "no", "tie", "Yes"])
    0.625
    """
    if isinstance(votes, str) or not votes:
        raise ValueError(f"votes must be a list of yes, no and tie, got {votes!r:.80}")
    worth = [VOTES.get(str(vote).strip().lower()) for vote in votes]
    unknown = [vote for vote, value in zip(votes, worth, strict=True) if value is None]
    if unknown:
        raise ValueError(f"a vote must be one of {', '.join(VOTES)}, got {unknown[0]!r:.40}")
    return sum(value for value in worth if value is not None) / len(votes)


def option_confidence(logits: Values) -> tuple[float, float]:
    """Return the probability of the likeliest option, and its distance to the second.

    ``logits`` ``(options,)`` are logits or log-probabilities of the options of one question; -inf
    is an option that is not there.

    >>> option_confidence([1.0, 1.0])
    (0.5, 0.0)
    """
    values = as_float64(logits)
    if values.ndim != 1 or values.size < 2 or np.isnan(values).any() or values.max() == np.inf:
        raise ValueError(f"option logits must be two numbers or more, not NaN, got {logits!r:.80}")
    if values.max() == -np.inf:
        raise ValueError("option logits must not all be -inf")
    second, first = np.sort(softmax(values))[-2:]
    return float(first), float(first - second)


def top_token_confidence(
    top: TopLogprobs, *, vocabulary: int = LARGEST, bound: Bound = "low"
) -> dict[str, float]:
    r"""Compute confidences of an answer from the top tokens that a service shows.

    - ``top_probability``: geometric mean of the probabilities of the likeliest tokens;
    - ``top_margin``: mean of its distance to the second; left out if some position shows only one;
    - ``top_entropy``: :math:`e^{-H}`, with the mean entropy H of the positions.

    The first two are exact. The entropy depends on hidden tokens too: it is largest if they all are
    equally likely, and smallest if as few of them as possible hold the rest
    (:mod:`calibrant.llm.answers.topk`).

    Parameters
    ----------
    top : as for :func:`~calibrant.llm.top_confidence`
        Of the positions of one answer.
    vocabulary : int
        Number of tokens of the model; one that is too large lowers ``low`` slightly.
    bound : {"low", "middle"}
        ``top_entropy`` for the largest entropy, or the mean of those for the largest and the
        smallest. Use the same for the fit of a map and its use.

    Examples
    --------
    >>> found = top_token_confidence([{"Paris": -0.2, "Lyon": -2.5}, {".": -0.1, "!": -3.0}])
    >>> {name: round(value, 3) for name, value in found.items()}
    {'top_probability': 0.861, 'top_margin': 0.796, 'top_entropy': 0.249}
    """
    check_choice("bound", bound, ("low", "middle"))
    logs = topk.top_logprobs(top)
    shown = np.isfinite(logs)
    if vocabulary < shown.sum(1).max():
        raise ValueError(f"vocabulary is {vocabulary}, but {shown.sum(1).max()} tokens are shown")
    found = {"top_probability": float(np.exp(np.minimum(logs[:, 0], 0.0).mean()))}
    if shown.sum(1).min() > 1:
        found["top_margin"] = float(np.clip(np.exp(logs[:, 0]) - np.exp(logs[:, 1]), 0, 1).mean())
    smallest, largest = _entropy_bounds(logs, shown, vocabulary)
    low, high = np.exp(-largest.mean()), np.exp(-smallest.mean())
    return {**found, "top_entropy": float(low if bound == "low" else (low + high) / 2)}


def _entropy_bounds(
    logs: FloatArray, shown: BoolArray, vocabulary: int
) -> tuple[FloatArray, FloatArray]:
    """Smallest and largest entropy ``(n,)`` of each position."""
    probs = np.exp(logs)
    known = -xlogy(probs, probs).sum(1)
    hidden = vocabulary - shown.sum(1)
    least = np.where(shown, probs, np.inf).min(1)  # hidden tokens are no likelier
    rest = np.clip(1 - probs.sum(1), 0, hidden * least)
    full = np.floor(rest / least)
    left = np.maximum(rest - full * least, 0.0)
    packed = -full * xlogy(least, least) - xlogy(left, left)
    equal = -xlogy(rest, rest / np.maximum(hidden, 1))
    return known + packed, known + equal
