"""Confidence of a generated answer from its token probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    IntArray,
    Values,
    as_float64,
    as_labels,
    check_choice,
)

if TYPE_CHECKING:
    pass

SMALLEST = float(np.finfo(np.float32).tiny)
"""What a stored probability of zero is taken for: it was too small for its digits."""

Answers: TypeAlias = Sequence[Values] | Values
"""Answers as a list with an array for each, or all in one array; see answer_confidence."""

# ------------------------------------------------------------------------ tokens to an answer


class Tokens(NamedTuple):
    """Tokens of all answers in a row, ``(tokens,)``, and where each begins, ``(answers,)``."""

    probs: FloatArray
    starts: IntArray

    @property
    def logs(self) -> FloatArray:
        """Logarithms of the probabilities, finite."""
        return np.log(np.maximum(self.probs, SMALLEST))

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each answer."""
        return np.diff(self.starts, append=len(self.probs))


def _geometric(tokens: Tokens) -> FloatArray:
    return np.asarray(_product(tokens) / tokens.lengths)


def _product(tokens: Tokens) -> FloatArray:
    return np.asarray(np.add.reduceat(tokens.logs, tokens.starts))


def _arithmetic(tokens: Tokens) -> FloatArray:
    mean = np.add.reduceat(tokens.probs, tokens.starts) / tokens.lengths
    return np.log(np.clip(mean, SMALLEST, 1.0))


def _first(tokens: Tokens) -> FloatArray:
    return tokens.logs[tokens.starts]


def _minimum(tokens: Tokens) -> FloatArray:
    return np.asarray(np.minimum.reduceat(tokens.logs, tokens.starts))


Aggregator = Literal["geometric", "product", "arithmetic", "first", "minimum"]
AGGREGATORS: dict[str, Callable[[Tokens], FloatArray]] = {
    "geometric": _geometric,
    "product": _product,
    "arithmetic": _arithmetic,
    "first": _first,
    "minimum": _minimum,
}
"""Logarithm of the confidence of each answer, by the name of the rule."""


def answer_confidence(
    token_probs: Answers,
    how: Aggregator = "geometric",
    *,
    mask: Values | None = None,
    documents: Values | None = None,
) -> FloatArray:
    r"""One confidence for each answer, from the probabilities of its tokens.

    With the probabilities :math:`p_1, \ldots, p_m` that the model gave to the tokens of an
    answer when it wrote them,

    - ``geometric``: :math:`(p_1 \cdots p_m)^{1/m}`, which does not depend on the length;
    - ``product``: :math:`p_1 \cdots p_m`, the probability of the whole text;
    - ``arithmetic``: :math:`(p_1 + \ldots + p_m) / m`, as in the ATS paper (Xie et al. 2024);
    - ``first``: :math:`p_1`;
    - ``minimum``: :math:`\min_t p_t`.

    None of them is the chance that the answer is right: :class:`AnswerCalibrator` learns that.

    Parameters
    ----------
    token_probs : list of (m_i,), or (answers, tokens) with mask, or (tokens,) with documents
        Probabilities, not logarithms.
    how : str
    mask : (answers, tokens) of bool, optional
        Which tokens belong to the answer; the others are padding.
    documents : (tokens,) integers, optional
        Number of the answer of each token. Answers come back in the order of their numbers.

    Returns
    -------
    (answers,)

    Examples
    --------
    >>> answer_confidence([[0.9, 0.4], [0.5]])
    array([0.6, 0.5])
    >>> answer_confidence([0.9, 0.4, 0.5], "minimum", documents=[0, 0, 1])
    array([0.4, 0.5])
    """
    return np.exp(_log_confidence(token_probs, how, mask, documents))


def _log_confidence(
    token_probs: Answers, how: str, mask: Values | None, documents: Values | None
) -> FloatArray:
    check_choice("how", how, get_args(Aggregator))
    return np.minimum(AGGREGATORS[how](_as_tokens(token_probs, mask, documents)), 0.0)


def _as_tokens(token_probs: Answers, mask: Values | None, documents: Values | None) -> Tokens:
    if mask is not None and documents is not None:
        raise ValueError("pass mask with a padded array or documents with a flat one, not both")
    if documents is not None:
        found = _from_flat(as_float64(_one_array(token_probs)), as_labels(documents, "documents"))
    elif mask is not None:
        found = _from_padded(as_float64(_one_array(token_probs)), as_labels(mask, "mask") != 0)
    else:
        found = _from_list(token_probs)
    if not ((found.probs >= 0) & (found.probs <= 1 + 1e-6)).all():
        raise ValueError(
            "token_probs must be in [0, 1]: NaN, negative or larger values were found; of "
            "log-probabilities take np.exp first"
        )
    return found


def _one_array(token_probs: Answers) -> Values:
    return token_probs if isinstance(token_probs, Tensor) else np.asarray(token_probs)


def _from_list(token_probs: Answers) -> Tokens:
    if isinstance(token_probs, (Tensor, np.ndarray)) and token_probs.dtype != object:
        raise ValueError(
            f"token_probs is one array of shape {tuple(token_probs.shape)}: say which tokens "
            "belong to which answer by mask (answers, tokens) or documents (tokens,), or pass a "
            "list with an array for each answer"
        )
    try:
        answers = [as_float64(one) for one in token_probs]  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"token_probs must have the probabilities of its tokens for each answer ({error}); of "
            "what ask returned, pass [answer.probs for answer in answers]"
        ) from error
    odd = [i for i, one in enumerate(answers) if one.ndim != 1]
    if odd:
        raise ValueError(
            f"token_probs must have one array (tokens,) for each answer, got shape "
            f"{answers[odd[0]].shape} for answer {odd[0]}"
        )
    return _joined(answers)


def _from_padded(probs: FloatArray, mask: BoolArray) -> Tokens:
    if probs.ndim != 2 or probs.shape != mask.shape:
        raise ValueError(
            f"token_probs and mask must both be (answers, tokens), got {probs.shape} and "
            f"{mask.shape}"
        )
    _check_lengths(mask.sum(1))
    return Tokens(probs[mask], _starts(mask.sum(1)))


def _from_flat(probs: FloatArray, documents: IntArray) -> Tokens:
    if probs.ndim != 1 or probs.shape != documents.shape:
        raise ValueError(
            f"token_probs and documents must both be (tokens,), got {probs.shape} and "
            f"{documents.shape}"
        )
    order = np.argsort(documents, kind="stable")
    _, lengths = np.unique(documents, return_counts=True)
    _check_lengths(lengths)
    return Tokens(probs[order], _starts(lengths))


def _joined(answers: list[FloatArray]) -> Tokens:
    lengths = np.array([len(one) for one in answers], dtype=np.int64)
    _check_lengths(lengths)
    return Tokens(np.concatenate(answers), _starts(lengths))


def _starts(lengths: NDArray[Any]) -> IntArray:
    return np.asarray(np.cumsum(lengths, dtype=np.int64) - lengths)


def _check_lengths(lengths: NDArray[Any]) -> None:
    if not lengths.size:
        raise ValueError("token_probs holds no answer: at least one is wanted")
    if not lengths.all():
        at = np.flatnonzero(lengths == 0)
        raise ValueError(
            f"answer {at[0]} has no tokens ({at.size} of {lengths.size} have none): an empty text "
            "has no confidence; leave such answers out and count them as wrong, or keep the end "
            "token as part of every answer"
        )
