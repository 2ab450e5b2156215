"""Losses that smooth labels or penalise confident predictions."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant._core.options import NonNegative, at_least, at_most
from calibrant.losses.entries import Batch, at, batch_of, mean_of


def ls(
    logits: Tensor, labels: Tensor, *, alpha: Annotated[float, at_least(0), at_most(1)] = 0.05
) -> Tensor:
    r"""Label smoothing, :math:`-(1 - \alpha) \log p_y - \frac{\alpha}{K} \sum_k \log p_k`.

    Returns ``(...)`` for logits ``(..., classes)``; ``alpha=0`` is cross-entropy.

    >>> ls(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), alpha=0.1)
    tensor([0.2269])
    """
    batch = batch_of(logits, labels)
    return batch.shaped((1 - alpha) * -batch.own - alpha * batch.log_probs.mean(-1))


def mbls(
    logits: Tensor, labels: Tensor, *, margin: NonNegative = 6.0, weight: NonNegative = 0.1
) -> Tensor:
    r"""Margin-based label smoothing.

    .. math:: -\log p_y + \lambda \frac1K \sum_k \max(\max_l z_l - z_k - m,\, 0)

    Gradients go through the largest logit. A margin that no logit reaches gives cross-entropy.

    >>> mbls(torch.tensor([[8.0, 0.0]]), torch.tensor([0]))
    tensor([0.1003])
    """
    batch = batch_of(logits, labels)
    return batch.shaped(-batch.own + weight * beyond_margin(batch, margin))


def acls(
    logits: Tensor,
    labels: Tensor,
    *,
    margin: NonNegative = 6.0,
    weight: NonNegative = 0.1,
    top: NonNegative = 1.0,
    others: NonNegative = 0.1,
) -> Tensor:
    r"""Adaptive and conditional label smoothing, as in the code of its authors.

    .. math:: -\log p_y + \lambda \Bigl[\lambda_1 \max(z_j - m, 0)^2 + \lambda_2
        \frac{1}{K - 1} \sum_{k \ne j} \max(\mathrm{sg}[z_j] - z_k - m, 0)^2\Bigr]

    with the largest logit :math:`z_j`, from which the second term takes no gradient. The first
    term looks at that logit itself: a constant added to all logits changes the loss.

    >>> acls(torch.tensor([[8.0, 0.0]]), torch.tensor([0]))
    tensor([0.4403])
    """
    batch = batch_of(logits, labels)
    best, chosen = batch.logits.max(-1)
    down = (best - margin).clamp(min=0).square()
    gap = (best.detach()[:, None] - batch.logits - margin).clamp(min=0).square()
    rest = (gap.sum(-1) - at(gap, chosen)) / max(batch.logits.shape[-1] - 1, 1)
    return batch.shaped(-batch.own + weight * (top * down + others * rest))


def ecp(logits: Tensor, labels: Tensor, *, weight: NonNegative = 0.1) -> Tensor:
    r"""Confidence penalty, :math:`-\log p_y - \lambda H(p)`.

    >>> ecp(torch.tensor([[0.0, 0.0]]), torch.tensor([0]), weight=1.0)
    tensor([0.])
    """
    batch = batch_of(logits, labels)
    return batch.shaped(-batch.own - weight * entropy(batch.log_probs))


def cpc(
    logits: Tensor,
    labels: Tensor,
    *,
    discrimination: NonNegative = 1.0,
    exclusion: NonNegative = 1.0,
) -> Tensor:
    r"""Calibration by pairwise constraints.

    .. math:: -\log p_y - \frac{\lambda_1}{K - 1} \sum_{j \ne y} \log \sigma(z_y - z_j)
        - \frac{\lambda_2}{2 (K - 1)(K - 2)} \sum_{i \ne j;\ i, j \ne y} \log \sigma(z_i - z_j)

    The label wins against every other class, and no other class wins against another. With two
    classes there are no others to compare. The pairs take memory for the square of the classes.

    >>> cpc(torch.zeros(1, 3), torch.tensor([0]))
    tensor([2.1383])
    """
    batch = batch_of(logits, labels)
    classes = batch.logits.shape[-1]
    apart = F.softplus(batch.logits - at(batch.logits, batch.labels)[:, None])
    pairs = F.softplus(batch.logits[:, None, :] - batch.logits[:, :, None])
    other = 1 - F.one_hot(batch.labels, classes).to(pairs.dtype)
    distinct = 1 - torch.eye(classes, dtype=pairs.dtype, device=pairs.device)
    both = other[:, :, None] * other[:, None, :] * distinct
    first = (apart * other).sum(-1) / max(classes - 1, 1)
    second = (pairs * both).sum((-1, -2)) / (2 * max((classes - 1) * (classes - 2), 1))
    return batch.shaped(-batch.own + discrimination * first + exclusion * second)


def beyond_margin(batch: Batch, margin: float) -> Tensor:
    """Return the mean excess over the margin of the gap to the largest logit, ``(n,)``."""
    gap = batch.logits.amax(-1, keepdim=True) - batch.logits
    return (gap - margin).clamp(min=0).mean(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy of each row in nats, ``(n,)``."""
    return -(log_probs.exp() * log_probs).sum(-1)


TABLE = {
    "ls": mean_of(ls, "Szegedy et al. 2016", aliases=("label_smoothing",)),
    "ecp": mean_of(ecp, "Pereyra et al. 2017", aliases=("confidence_penalty", "entropy_penalty")),
    "cpc": mean_of(cpc, "Cheng and Vasconcelos 2022"),
    "mbls": mean_of(mbls, "Liu et al. 2022", aliases=("margin_label_smoothing",)),
    "acls": mean_of(acls, "Park et al. 2023"),
}
