"""Proper scores: cross-entropy and the Brier score."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from calibrant.losses.base import batch_of, shaped


def ce(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Cross-entropy of each example, :math:`-\log p_y`.

    Parameters
    ----------
    logits : (..., classes)
    labels : (...) integers, -100 ignored

    Returns
    -------
    (...)
        0 where the label is ignored.

    Examples
    --------
    >>> import torch
    >>> ce(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([0, -100]))
    tensor([0.6931, 0.0000])
    """
    batch = batch_of(logits, labels)
    return shaped(-batch.own, batch, labels)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Brier score of each example, :math:`\sum_k (p_k - [k = y])^2`, between 0 and 2.

    Examples
    --------
    >>> import torch
    >>> brier(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    tensor([0.5000])
    """
    batch = batch_of(logits, labels)
    probs = batch.log_probs.exp()
    target = F.one_hot(batch.labels, probs.shape[-1])
    return shaped((probs - target).square().sum(-1), batch, labels)
