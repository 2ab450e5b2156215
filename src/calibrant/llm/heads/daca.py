r"""A global temperature without labels, from a calibrated base model (DACA, Luo et al. 2025).

Alignment makes a model over-confident; its base model mostly is not. The chat model is matched to
the base model where both prefer the same token; elsewhere this would make it under-confident.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from calibrant._core.checks import FloatArray, warn
from calibrant._core.chunks import as_tensor, examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads.modules import LIMIT

_MAX_ELEMENTS = 1 << 22  # probabilities in memory at a time: 32 MB in double precision


class Agreement(NamedTuple):
    """A temperature for the chat model, and the number of tokens, of all, that it is based on."""

    temperature: float
    agreed: int
    tokens: int


def daca(base: Tensor | ArrayLike, chat: Tensor | ArrayLike) -> Agreement:
    r"""Find the temperature that matches a chat model's distribution to that of its base model.

    .. math::
        \min_T \sum_{i:\, \arg\max z^b_i = \arg\max z^c_i}
            \mathrm{CE}(\mathrm{softmax}(z^b_i), \mathrm{softmax}(z^c_i / T))

    It is the negative log-likelihood with the gap that the base model expects,
    :math:`\sum_k p^b_k d^c_k`, in place of that of the label: convex in :math:`1/T`.
    ``base`` and ``chat`` ``(..., vocabulary)`` are the logits of both models for the same tokens.
    ``FittedHead.from_temperature`` makes a head of the temperature.

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
        bad = logits.amax(-1).isnan()  # a NaN anywhere is the largest
        if bad.any():
            raise ValueError(
                f"{name} must be logits, got NaN for {int(bad.sum())} of {len(bad)} tokens: drop "
                "them, or run the model in higher precision"
            )
    agree = ours.argmax(-1) == theirs.argmax(-1)
    if not agree.any():
        raise ValueError(
            f"base and chat agree on none of {len(agree)} tokens: pass logits of the same tokens, "
            "with the same vocabulary"
        )
    ours, theirs = ours[agree], theirs[agree]
    records = tabulate(examples(theirs, theirs.argmax(-1)))
    solution = best_sharpness(replace(records, own_gap=_expected_gaps(ours, theirs)))
    if not solution.converged:
        warn("no temperature between 0.05 and 20 matches the chat model to its base model")
    u = float(np.clip(solution.x[0], -LIMIT, LIMIT))
    return Agreement(math.exp(-u), int(agree.sum()), len(agree))


def _expected_gaps(base: Tensor, chat: Tensor) -> FloatArray:
    """Gaps of the chat model under the distribution of the base model, ``(n,)``."""
    parts, rows = [], max(1, _MAX_ELEMENTS // base.shape[-1])
    for ours, theirs in zip(base.split(rows), chat.split(rows), strict=True):
        wide = as_tensor(theirs).double()
        probs, gaps = as_tensor(ours).double().softmax(-1), wide.amax(-1, keepdim=True) - wide
        # a token that both mask adds nothing
        parts.append(torch.where(probs > 0, probs * gaps, 0).sum(-1))
    gaps = torch.cat(parts)
    if not torch.isfinite(gaps).all():
        raise ValueError("the chat model masks a token that its base does not: mask both alike")
    return np.asarray(gaps.cpu().numpy())
