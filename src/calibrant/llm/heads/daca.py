r"""A global temperature without labels, from a base model that is calibrated already (DACA).

Alignment makes a model over-confident, its base model mostly is not. Where both prefer the same
token, the chat model can be brought to the confidence of the base model; where they differ that
would only make it under-confident, so those tokens are left out (Luo et al. 2025).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import expit
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, warn
from calibrant._core.chunks import examples
from calibrant._core.logpartition import Records, tabulate
from calibrant._core.solve import Solution, minimise_scalar
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads.modules import LIMIT

HELD = 1 << 22
"""Numbers of a distribution that are in memory in double precision at once: 32 MB."""


class Agreement(NamedTuple):
    """A temperature for the chat model, and how many of the tokens it comes from."""

    temperature: float
    agreed: int
    tokens: int


def daca(base: Tensor | ArrayLike, chat: Tensor | ArrayLike) -> Agreement:
    r"""The temperature that brings a chat model's distribution to that of its base model.

    .. math::
        \min_T \sum_{i:\, \arg\max z^b_i = \arg\max z^c_i}
            \mathrm{CE}(\mathrm{softmax}(z^b_i), \mathrm{softmax}(z^c_i / T))

    The sum is convex in :math:`1/T` and is solved to rounding error: it is the negative
    log-likelihood in which the gap of the label is replaced by the gap that the base model expects,
    :math:`\sum_k p^b_k d^c_k`.

    Parameters
    ----------
    base, chat : (..., vocabulary)
        Logits of both models for the same tokens.

    Returns
    -------
    Agreement
        For use with a model: ``FittedHead.of_temperature(found.temperature, mark_of(chat_model))``.

    Examples
    --------
    >>> logits = torch.randn(500, 10, generator=torch.Generator().manual_seed(0))
    >>> daca(logits, 2.5 * logits).temperature
    2.5
    """
    ours, theirs = (torch.as_tensor(logits).detach() for logits in (base, chat))
    if ours.shape != theirs.shape or ours.ndim < 2:
        raise ValueError(
            "base and chat must be logits (..., vocabulary) of the same tokens, got "
            f"{tuple(ours.shape)} and {tuple(theirs.shape)}"
        )
    ours, theirs = ours.flatten(0, -2), theirs.flatten(0, -2)
    for name, logits in (("base", ours), ("chat", theirs)):
        _check_numbers(name, logits)
    agree = ours.argmax(-1) == theirs.argmax(-1)
    _check_agreement(agree.cpu().numpy())
    ours, theirs = ours[agree], theirs[agree]
    records = tabulate(examples(theirs, theirs.argmax(-1)))
    found = best_sharpness(replace(records, own_gap=_expected_gaps(ours, theirs)))
    return _told(found, int(agree.sum()), len(agree))


def daca_of_records(base: Records, chat: Records, agree: BoolArray) -> Agreement:
    r"""The same from token tables, which know the confidences but not whole distributions.

    The cross-entropy is that of two events, the top token or any other:
    :math:`-p^b \log p^c(T) - (1 - p^b) \log(1 - p^c(T))`. It has the same optimum where the
    models differ by a temperature alone.

    Parameters
    ----------
    base, chat : Records
        Of the same ``n`` tokens.
    agree : (n,) bool
        Whether both models prefer the same token. ``base.correct & chat.correct`` is that for
        tokens that one of them has right; where both are wrong the records do not tell, and the
        tokens are better left out than guessed.

    Examples
    --------
    >>> logits = np.random.default_rng(0).normal(size=(500, 10))
    >>> base, chat = (tabulate(examples(b * logits, logits.argmax(-1))) for b in (1.0, 2.5))
    >>> round(daca_of_records(base, chat, base.correct & chat.correct).temperature, 3)
    2.5
    """
    agree = np.asarray(agree, dtype=bool)
    if not len(base) == len(chat) == len(agree):
        raise ValueError(
            "base, chat and agree must be of the same tokens, got "
            f"{len(base)}, {len(chat)} and {len(agree)}"
        )
    _check_agreement(agree)
    ours, theirs = base.take(agree), chat.take(agree)
    trust = expit(-ours.log_rest(1.0).value)

    def cross_entropy(u: float) -> float:
        rest = theirs.log_rest(math.exp(u)).value
        return float(np.mean(trust * np.logaddexp(0, rest) + (1 - trust) * np.logaddexp(0, -rest)))

    found = minimise_scalar(cross_entropy, -LIMIT, LIMIT)
    return _told(found, int(agree.sum()), len(agree))


def _expected_gaps(base: Tensor, chat: Tensor) -> FloatArray:
    """Gaps of the chat model under the distribution of the base model, ``(n,)``."""
    found, rows = [], max(1, HELD // base.shape[-1])
    for ours, theirs in zip(base.split(rows), chat.split(rows), strict=True):
        probs = ours.double().softmax(-1)
        gaps = theirs.double().amax(-1, keepdim=True) - theirs.double()
        # a token that both rule out adds nothing
        found.append(torch.where(probs > 0, probs * gaps, 0).sum(-1))
    gaps = torch.cat(found)
    if not torch.isfinite(gaps).all():
        raise ValueError(
            "the chat model rules out a token that its base model does not: mask both alike"
        )
    return np.asarray(gaps.cpu().numpy())


def _check_numbers(name: str, logits: Tensor) -> None:
    bad = logits.amax(-1).isnan()  # a NaN anywhere is the largest
    if bad.any():
        raise ValueError(
            f"{name} must be logits, got NaN for {int(bad.sum())} of {len(bad)} tokens: leave "
            "those out, or run the model in higher precision"
        )


def _check_agreement(agree: BoolArray) -> None:
    if not agree.any():
        raise ValueError(
            f"base and chat prefer the same token for none of {len(agree)} tokens: are they logits "
            "of the same tokens, with the same vocabulary?"
        )


def _told(found: Solution, agreed: int, tokens: int) -> Agreement:
    if not found.converged:
        warn("no temperature between 0.05 and 20 brings the chat model to its base model")
    u = float(np.clip(found.x[0], -LIMIT, LIMIT))
    return Agreement(math.exp(-u), agreed, tokens)
