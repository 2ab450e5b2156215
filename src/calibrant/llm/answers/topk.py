r"""What the largest probabilities of a token tell, where a service shows no others.

A temperature needs the sum :math:`\sum_j p_j^\beta` over the whole vocabulary, with
:math:`\beta = 1 / T`. Of the tokens that are not shown only the number n, the sum r of their
probabilities and a bound q of each (the smallest that is shown) are known. Among all
distributions that agree with this, the sum over them is extreme where they are all equal,
:math:`n^{1 - \beta} r^\beta`, and where as few of them as possible hold all,
:math:`m q^\beta + (r - m q)^\beta` with :math:`m = \lfloor r / q \rfloor`: the power is concave for
:math:`\beta < 1` and convex above, so the first is the largest for one and the smallest for the
other. Both bounds are reached, so nothing better can be said without assumptions.

To renormalise the tokens shown, as if the others were impossible, is too sure: it lies outside the
bounds, and far outside for temperatures above 1. Maps of the first probability alone
(:class:`~calibrant.llm.answers.AnswerCalibrator`) and choices among tokens that are shown
(:func:`~calibrant.llm.answers.choices.choice_logits_from_top`) are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from calibrant._core.checks import FloatArray, IntArray, Values, as_float64

TopLogprobs: TypeAlias = Sequence[Mapping[str, Any]]
"""For each position ``{token: logprob}``, or what the OpenAI API has: an entry of
``logprobs.content`` with its list ``top_logprobs`` of ``{"token": ..., "logprob": ...}``."""

ROUNDING = 1e-6
"""How far log-probabilities are off that were computed in single precision."""
SLACK = 1e-3
"""By how much more than everything the tokens shown may hold, besides their rounding."""


class Bounds(NamedTuple):
    """Between what a number lies; ``middle`` is off by at most half the width. All ``(n,)``."""

    low: FloatArray
    middle: FloatArray
    high: FloatArray


def top_confidence(
    top: TopLogprobs | Values,
    temperature: float | Values,
    *,
    vocabulary: int,
    k: int | None = None,
    rounding: float = ROUNDING,
) -> Bounds:
    """Probability of the likeliest token under a temperature, as far as it can be known.

    Parameters
    ----------
    top : list of {token: logprob}, or (n, k) log-probabilities
        The most likely tokens of each position, in any order; -inf fills up rows of an array.
    temperature : float or (n,)
        Above 0; by which a calibrator divides the logits.
    vocabulary : int
        Number of tokens of the model.
    k : int, optional
        How many of the tokens are surely the likeliest ones. Some services add the token that
        was drawn, however unlikely it was: then say how many were asked for.
    rounding : float
        By how much each log-probability may be off, either way: 0.005 for those with two digits
        after the point. It matters where the tokens shown hold nearly everything (a rest of a
        millionth, spread over a vocabulary, is much at temperature 2), and at temperatures
        close to 0, which blow up differences.

    Returns
    -------
    Bounds
        The confidence is within ``[low, high]`` for every distribution that agrees with ``top``
        up to ``rounding``.

    Examples
    --------
    >>> found = top_confidence([{"Paris": -0.2, "Lyon": -2.5, "the": -4.0}], 1.5, vocabulary=50_000)
    >>> [round(float(x[0]), 2) for x in found]
    [0.11, 0.36, 0.6]
    """
    logs = top_logprobs(top, rounding=rounding)
    sharpness = _sharpness(temperature, len(logs))
    low, high = log_partition_bounds(logs, sharpness, vocabulary=vocabulary, k=k, rounding=rounding)
    less, more = (np.exp(sharpness * (logs[:, 0] + off)) for off in (-rounding, rounding))
    # the sums count the token itself as off the other way, but it is as likely here as there
    least, most = _share(less, np.exp(high) - more), _share(more, np.exp(low) - less)
    most = np.maximum(least, most)  # where nothing is open they may differ by a last digit
    return Bounds(least, (least + most) / 2, most)


def log_partition_bounds(
    logprobs: FloatArray,
    sharpness: float | FloatArray,
    *,
    vocabulary: int,
    k: int | None = None,
    rounding: float = ROUNDING,
) -> tuple[FloatArray, FloatArray]:
    r"""Least and largest :math:`\log \sum_j p_j^\beta` over the vocabulary, each ``(n,)``.

    The calibrated log-probability of any shown token is :math:`\beta \log p` less this. The
    bounds allow for ``rounding``; where :math:`\log p` is rounded too, that comes on top.

    Parameters
    ----------
    logprobs : (n, k)
        Sorted from the largest, as :func:`top_logprobs` gives them.
    sharpness : float or (n,)
        :math:`\beta`, one over the temperature.
    vocabulary, k, rounding : as for top_confidence
    """
    shown: IntArray = np.isfinite(logprobs).sum(1)
    if vocabulary < shown.max():
        raise ValueError(f"vocabulary is {vocabulary}, but {shown.max()} tokens are shown")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    beta = np.broadcast_to(np.asarray(sharpness, dtype=np.float64), len(logprobs))
    probs = np.exp(logprobs)
    known = (probs ** beta[:, None]).sum(1, where=np.isfinite(logprobs), initial=0.0)
    surely = shown if k is None else np.minimum(shown, k)
    # the larger the limit, the fewer tokens hold the rest: the packed tail is then more extreme
    limit = probs[np.arange(len(probs)), surely - 1] * np.exp(rounding)
    hidden = vocabulary - shown
    # what is shown holds more or less than it says; hidden tokens hold no less than nothing, and
    # no more than each its limit
    least, most = (
        np.clip(1 - probs.sum(1) * np.exp(off), 0.0, hidden * limit)
        for off in (rounding, -rounding)
    )
    low = np.minimum(_equal_tail(least, hidden, beta), _packed_tail(least, limit, beta))
    high = np.maximum(_equal_tail(most, hidden, beta), _packed_tail(most, limit, beta))
    wider = np.exp(beta * rounding)
    return np.log(known / wider + low), np.log(known * wider + high)


def _share(own: FloatArray, others: FloatArray) -> FloatArray:
    return np.asarray(own / (own + np.maximum(others, 0.0)))


def _equal_tail(rest: FloatArray, hidden: IntArray, beta: FloatArray) -> FloatArray:
    """Sum of the powers where all hidden tokens are as likely."""
    many = np.maximum(hidden, 1)
    return np.asarray(many * (rest / many) ** beta)


def _packed_tail(rest: FloatArray, limit: FloatArray, beta: FloatArray) -> FloatArray:
    """Sum of the powers where as few tokens as possible hold the rest."""
    full = np.floor(rest / limit)
    return np.asarray(full * limit**beta + np.maximum(rest - full * limit, 0.0) ** beta)


def top_logprobs(top: TopLogprobs | Values, *, rounding: float = ROUNDING) -> FloatArray:
    """Log-probabilities ``(n, k)`` of each position, the largest first, -inf where there are fewer.

    Those whose probabilities sum to more than ``rounding`` explains are refused.

    >>> top_logprobs([{"b": -2.0, "a": -0.5}, {"c": -0.1}])
    array([[-0.5, -2. ],
           [-0.1, -inf]])
    """
    if _is_list_of_mappings(top):
        rows = [[value for _, value in _shown(row)] for row in top]  # type: ignore[union-attr, arg-type]
        width = max(map(len, rows), default=0)
        logs = np.array([row + [-np.inf] * (width - len(row)) for row in rows], dtype=np.float64)
    else:
        logs = as_float64(top)  # type: ignore[arg-type]
    if logs.ndim != 2 or not logs.size:
        raise ValueError(
            f"top must be (n, k) log-probabilities or a list of {{token: logprob}}, got shape "
            f"{logs.shape}"
        )
    # some services write -9999 for a token that is not there
    logs = -np.sort(-np.where(np.exp(logs) == 0, -np.inf, logs), axis=1)
    total = np.exp(logs).sum(1)
    bad = ~(np.isfinite(logs[:, 0]) & (total <= np.exp(rounding + SLACK)))
    if bad.any():
        at = int(bad.nonzero()[0][0])
        raise ValueError(
            f"position {at} of top has probabilities that sum to {total[at]:.4g}: natural "
            "logarithms of probabilities are wanted, at least one per position, not logits; if "
            f"they are rounded by more than {rounding:g}, say so by rounding"
        )
    return np.asarray(logs)


def by_token(position: Mapping[str, Any]) -> dict[str, float]:
    """``{token: logprob}`` of one position in either form of :data:`TopLogprobs`.

    Tokens that are written alike, as broken pieces of a character are, count together.
    """
    found: dict[str, float] = {}
    for token, value in _shown(position):
        found[token] = float(np.logaddexp(found.get(token, -np.inf), value))
    return found


def _shown(position: Mapping[str, Any]) -> list[tuple[str, float]]:
    listed = position.get("top_logprobs")
    if isinstance(listed, (list, tuple)):
        return [(one["token"], float(one["logprob"])) for one in listed]
    return [(token, float(value)) for token, value in position.items()]


def _is_list_of_mappings(top: object) -> bool:
    return isinstance(top, (list, tuple)) and bool(top) and isinstance(top[0], Mapping)


def _sharpness(temperature: float | Values, positions: int) -> FloatArray:
    given = as_float64(temperature)
    if given.shape not in ((), (positions,)) or not ((given > 0) & np.isfinite(given)).all():
        raise ValueError(
            f"temperature must be one number above 0 or one for each of {positions} positions, "
            f"got shape {given.shape} with the least {given.min() if given.size else None}"
        )
    return np.broadcast_to(1 / given, (positions,))
