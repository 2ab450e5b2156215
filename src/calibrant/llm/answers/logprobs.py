"""Token probabilities in the forms in which services return log-probabilities."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any

from calibrant.llm.answers import topk
from calibrant.llm.heads.documents import BadDocument


def _probability(logprob: Any, what: str, place: str) -> float:
    """Return the probability of a logarithm that a log has; raise unless it is one."""
    try:
        value = float(logprob)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not value <= 1e-6:  # NaN too
        raise BadDocument(
            place,
            f"has a log-probability of {what} that is not a number up to 0, got {logprob!r:.30}",
        )
    return math.exp(min(value, 0.0))


def token_material(logprobs: Any, place: str) -> dict[str, Any]:
    """Return ``tokens``, their ``token_probs`` and ``top_logprobs`` that a service returned.

    ``logprobs`` has ``content``, a list of ``{"token", "logprob", "top_logprobs"}``, or is that
    list, or has the lists ``tokens`` and ``token_logprobs``; nothing comes of null.
    """
    content = logprobs
    if isinstance(logprobs, Mapping):
        content = logprobs.get("content") or [
            {"token": token, "logprob": value}
            for token, value in zip(
                logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True
            )
        ]
    if not content:
        return {}
    probs = [
        _probability(one.get("logprob"), f"token {n} ({one.get('token', '')!r:.20})", place)
        for n, one in enumerate(content, start=1)
    ]
    row: dict[str, Any] = {"tokens": _token_texts(content), "token_probs": probs}
    shown = [
        top_of_position(one, n, place) if one.get("top_logprobs") else {}
        for n, one in enumerate(content)
    ]
    return {**row, "top_logprobs": shown} if any(shown) else row


def top_of_position(position: Any, number: int, place: str) -> dict[str, float]:
    """Return the log-probabilities of the top tokens of a position; raise unless they are such."""
    shown = topk._shown(position, number)
    for token, logprob in shown:
        _probability(logprob, f"the top token {token!r:.20}", place)
    return topk._by_token(shown)


def _token_texts(content: Sequence[Mapping[str, Any]]) -> list[str]:
    r"""Return the texts of tokens; a character of several tokens comes with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [
        decoder.decode(bytes(one["bytes"]))
        if isinstance(one.get("bytes"), list)
        else str(one.get("token", ""))
        for one in content
    ]
