r"""Bounds on calibrated confidences from the top probabilities that a service returns.

A temperature needs the sum :math:`\sum_j p_j^\beta` over the whole vocabulary, with
:math:`\beta = 1 / T`. Of the hidden tokens only the number n, the sum r of their probabilities and
a bound q of each (the smallest that is shown) are known. Among all distributions that agree with
this, the sum over them is extreme if they are all equal, :math:`n^{1 - \beta} r^\beta`, and if as
few of them as possible hold all, :math:`m q^\beta + (r - m q)^\beta` with
:math:`m = \lfloor r / q \rfloor`: the power is concave for :math:`\beta < 1` and convex above. Both
bounds are reached, so they cannot be improved without assumptions. Renormalising the shown tokens,
as if the others were impossible, lies outside the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from calibrant._core.checks import FloatArray, IntArray, Values, as_float64

TopLogprobs: TypeAlias = Any
"""Top tokens of each position, as services and their clients return them: see top_confidence."""

_ROUNDING = 1e-6
"""Error of log-probabilities that were computed in single precision."""
_SLACK = 1e-3
"""Allowed excess of the sum of the shown probabilities over 1, besides rounding."""


class Bounds(NamedTuple):
    """Bounds of a number and their midpoint, each ``(n,)``."""

    low: FloatArray
    middle: FloatArray
    high: FloatArray


def top_confidence(
    top: TopLogprobs | Values,
    temperature: float | Values,
    *,
    vocabulary: int,
    k: int | None = None,
    rounding: float = _ROUNDING,
) -> Bounds:
    """Bound the probability of the likeliest token under a temperature.

    Parameters
    ----------
    top : top tokens of each position, or (n, k) log-probabilities
        In any order; -inf pads rows of an array. Objects of clients and their JSON are taken:
        ``choices[0].logprobs`` of OpenAI chats and completions, or its ``content``; ``logprobs``
        of an output of vLLM, a list of ``{token_id: Logprob}``; or a list of ``{token: logprob}``.
    temperature : float or (n,)
        Divisor of the logits, above 0.
    vocabulary : int
        Number of tokens of the model.
    k : int, optional
        Number of tokens that are certainly the likeliest. Some services add the token that was
        drawn, however unlikely: then pass the number that was requested.
    rounding : float
        Largest error of each log-probability: 0.005 for two digits after the point. It matters if
        the shown tokens hold nearly everything, and at temperatures close to 0.

    Returns
    -------
    Bounds
        Of every distribution that agrees with ``top`` up to ``rounding``.

    Examples
    --------
    >>> top = [{"Paris": -0.2, "Lyon": -2.5, "the": -4.0}]
    >>> [round(float(x[0]), 2) for x in top_confidence(top, 1.5, vocabulary=50_000)]
    [0.11, 0.36, 0.6]
    """
    logs, values = _top_logprobs(top, rounding=rounding), as_float64(temperature)
    if values.shape not in ((), (len(logs),)) or not ((values > 0) & np.isfinite(values)).all():
        raise ValueError(
            f"temperature must be one number above 0 or one for each of {len(logs)} positions, "
            f"got {temperature!r:.60}"
        )
    sharpness = np.broadcast_to(1 / values, len(logs))
    low, high = _log_partition_bounds(
        logs, sharpness, vocabulary=vocabulary, k=k, rounding=rounding
    )
    less, more = (np.exp(sharpness * (logs[:, 0] + off)) for off in (-rounding, rounding))
    # the sums take the token itself as rounded the other way, but it has one probability
    least, most = (
        own / (own + np.maximum(others, 0.0))
        for own, others in ((less, np.exp(high) - more), (more, np.exp(low) - less))
    )
    most = np.maximum(least, most)  # if nothing is hidden they may differ by a last digit
    return Bounds(least, (least + most) / 2, most)


def _log_partition_bounds(
    logprobs: FloatArray,
    sharpness: float | FloatArray,
    *,
    vocabulary: int,
    k: int | None = None,
    rounding: float = _ROUNDING,
) -> tuple[FloatArray, FloatArray]:
    r"""Bound :math:`\log \sum_j p_j^\beta` over the vocabulary: lower and upper, each ``(n,)``.

    ``logprobs`` ``(n, k)`` are those of :func:`_top_logprobs`, ``sharpness`` is :math:`\beta`. The
    bounds allow for ``rounding`` of the sum.
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
    # the rest within rounding; hidden tokens hold at least nothing and at most their limit each
    least, most = (
        np.clip(1 - probs.sum(1) * np.exp(off), 0.0, hidden * limit)
        for off in (rounding, -rounding)
    )

    def tails(rest: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Sums of the powers if hidden tokens are equal, or if as few as possible hold the rest."""
        many, full = np.maximum(hidden, 1), np.floor(rest / limit)
        left = np.maximum(rest - full * limit, 0.0)
        return many * (rest / many) ** beta, full * limit**beta + left**beta

    low, high = np.minimum(*tails(least)), np.maximum(*tails(most))
    wider = np.exp(beta * rounding)
    return np.log(known / wider + low), np.log(known * wider + high)


def _top_logprobs(top: TopLogprobs | Values, *, rounding: float = _ROUNDING) -> FloatArray:
    """Sort the log-probabilities of each position, ``(n, k)``, largest first, padded with -inf.

    Raises if the probabilities sum to more than ``rounding`` explains.
    """
    shown = _shown_tokens(top)
    if shown is None:
        try:
            logs = as_float64(top)
        except (TypeError, ValueError, OverflowError) as error:
            wanted = "log-probabilities (n, k), or a list of {token: logprob}"
            raise ValueError(f"top must be {wanted}, got {top!r:.80} ({error})") from error
    else:
        rows = [[value for _, value in row] for row in shown]
        width = max(map(len, rows), default=0)
        logs = np.array([row + [-np.inf] * (width - len(row)) for row in rows], dtype=np.float64)
    if logs.ndim != 2 or not logs.size:
        raise ValueError(f"top must be (n, k), or a list of {{token: logprob}}, got {logs.shape}")
    # some services write -9999 for a token that is not there
    logs = -np.sort(-np.where(np.exp(logs) == 0, -np.inf, logs), axis=1)
    total = np.exp(logs).sum(1)
    bad = ~(np.isfinite(logs[:, 0]) & (total <= np.exp(rounding + _SLACK)))
    if bad.any():
        at = int(bad.nonzero()[0][0])
        raise ValueError(
            f"position {at} of top must have natural logarithms of probabilities, got a sum of "
            f"{total[at]:.4g}; if they are rounded by more than {rounding:g}, pass rounding"
        )
    return np.asarray(logs)


def _by_token(shown: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return ``{token: logprob}`` of one position of :func:`_shown_tokens`.

    Tokens with the same text, such as parts of a character, are added.
    """
    total: dict[str, float] = {}
    for token, value in shown:
        total[token] = float(np.logaddexp(total.get(token, -np.inf), value))
    return total


def _shown_tokens(top: TopLogprobs) -> list[list[tuple[str, float]]] | None:
    """Return the tokens and log-probabilities of each position; None for an array of numbers."""
    for name in ("content", "top_logprobs"):  # the whole ``logprobs`` of a chat, of a completion
        inside = _field(top, name)
        if isinstance(inside, Sequence):
            top = inside
            break
    # vLLM has a sequence of its own
    if not isinstance(top, Sequence) or not top:
        return None
    if isinstance(top[0], (int, float, Sequence)) or hasattr(top[0], "__array__"):
        return None
    return [_shown(position, number) for number, position in enumerate(top)]


def _shown(position: Any, number: int) -> list[tuple[str, float]]:
    entries = _field(position, "top_logprobs")
    try:
        if isinstance(entries, Sequence) and entries:
            pairs = ((_field(one, "token"), _field(one, "logprob")) for one in entries)
            return [(str(token or ""), float(logprob)) for token, logprob in pairs]
        # a token of vLLM is an id, its text and log-probability are fields of the value
        return [
            (
                _field(value, "decoded_token") or str(token),
                float(value if (own := _field(value, "logprob")) is None else own),
            )
            for token, value in position.items()
        ]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"position {number} of top has no top tokens, got {position!r:.80}: request them from "
            "the service (logprobs=True and top_logprobs=20 for chats, logprobs=20 for completions)"
        ) from error


def _field(one: Any, name: str) -> Any:
    """Return a field of an object of a client, or of its JSON; None if it is not there."""
    return one.get(name) if isinstance(one, Mapping) else getattr(one, name, None)
