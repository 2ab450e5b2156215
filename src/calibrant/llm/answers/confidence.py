"""Confidence of generated answers, from their token probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import FloatArray, Values, as_float64
from calibrant.workflows.evaluate_answers import SMALLEST

Answers: TypeAlias = Sequence[Values]
"""Probabilities of the tokens of each answer, ``(tokens,)``."""
Aggregator = Literal["geometric", "product", "arithmetic", "first", "minimum"]
AGGREGATORS: tuple[Aggregator, ...] = get_args(Aggregator)


def answer_confidence(token_probs: Answers, aggregate: Aggregator = "geometric") -> FloatArray:
    r"""Aggregate the token probabilities of each answer to one confidence.

    With the probabilities :math:`p_1, \ldots, p_m` of the tokens of an answer,

    - ``geometric``: :math:`(p_1 \cdots p_m)^{1/m}`, which does not depend on the length;
    - ``product``: :math:`p_1 \cdots p_m`, the probability of the whole text;
    - ``arithmetic``: :math:`(p_1 + \ldots + p_m) / m`, as in the ATS paper (Xie et al. 2024);
    - ``first``: :math:`p_1`;
    - ``minimum``: :math:`\min_t p_t`.

    None of them is the chance that the answer is right:
    :class:`~calibrant.llm.AnswerCalibrator` learns that.

    Parameters
    ----------
    token_probs : list of (tokens,)
        Probabilities, not logarithms, of the tokens of each answer.
    aggregate : str

    Examples
    --------
    >>> answer_confidence([[0.9, 0.4], [0.5]])
    array([0.6, 0.5])
    """
    checks.check_choice("aggregate", aggregate, AGGREGATORS)
    answers = _token_arrays(token_probs)
    probs, lengths = np.concatenate(answers), np.array([*map(len, answers)])
    if not ((probs >= 0) & (probs <= 1 + 1e-6)).all():
        raise ValueError(
            "token_probs must be in [0, 1] and not NaN; for log-probabilities pass np.exp of them"
        )
    starts, logs = np.cumsum(lengths) - lengths, np.log(np.maximum(probs, SMALLEST))
    match aggregate:
        case "geometric":
            found = np.add.reduceat(logs, starts) / lengths
        case "product":
            found = np.add.reduceat(logs, starts)
        case "arithmetic":
            mean = np.add.reduceat(probs, starts) / lengths
            found = np.log(np.clip(mean, SMALLEST, 1.0))
        case "first":
            found = logs[starts]
        case _:
            found = np.minimum.reduceat(logs, starts)
    return np.asarray(np.exp(np.minimum(found, 0.0)))


def _token_arrays(token_probs: Answers) -> list[FloatArray]:
    if isinstance(token_probs, (Tensor, np.ndarray)) and token_probs.dtype != object:
        raise ValueError(
            f"token_probs is one array of shape {tuple(token_probs.shape)}: pass a list with an "
            "array for each answer, without padding"
        )
    try:
        answers = [as_float64(one) for one in token_probs]
        for number, one in enumerate(answers):
            if one.ndim != 1:
                raise ValueError(f"answer {number} has shape {one.shape}")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"token_probs must have an array (tokens,) of probabilities for each answer ({error}); "
            "from ask, pass [answer.probs for answer in answers]"
        ) from error
    if not answers:
        raise ValueError("token_probs holds no answer: at least one is needed")
    empty = [number for number, one in enumerate(answers) if not one.size]
    if empty:
        raise ValueError(
            f"answer {empty[0]} has no tokens ({len(empty)} of {len(answers)} have none): drop "
            "such answers and count them as wrong, or keep the end token of every answer"
        )
    return answers
