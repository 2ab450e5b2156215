"""Checked batches for the losses: float32 or wider, and means without ignored rows.

Every loss takes ``logits (..., classes)`` and ``labels (...)`` with -100 ignored. Half precision
is widened to float32. Nothing here depends on the values, so ``torch.compile`` sees one graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant._core.checks import IGNORED


class Batch(NamedTuple):
    """Flattened examples of a batch.

    Attributes
    ----------
    logits : (n, classes), float32 or wider
    labels : (n,)
        0 where they are ignored.
    mask : (n,)
        1 for rows that count, 0 for ignored ones.
    """

    logits: Tensor
    labels: Tensor
    mask: Tensor

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities ``(n, classes)``."""
        return self.logits.log_softmax(-1)

    @property
    def own(self) -> Tensor:
        """Log-probability of the label ``(n,)``."""
        return at(self.log_probs, self.labels)

    @property
    def correct(self) -> Tensor:
        """1 where the largest logit is that of the label, ``(n,)``."""
        return (self.logits.argmax(-1) == self.labels).to(self.logits.dtype)

    @property
    def confidence(self) -> Tensor:
        """Largest probability ``(n,)``."""
        return self.log_probs.amax(-1).exp()

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the rows that count; 0 where there are none."""
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1)


def batch_of(logits: Tensor, labels: Tensor) -> Batch:
    """Check shapes and flatten.

    Labels out of range fail where they index the logits. Masked classes (-inf) suit the losses
    that look at the label alone; those that sum over classes become infinite.
    """
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        raise TypeError(
            f"logits and labels must be tensors, got {type(logits).__name__} and "
            f"{type(labels).__name__}: use torch.as_tensor"
        )
    if logits.ndim < 2 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            "logits must be (..., classes) and labels (...), with the classes last: got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}; images and segments want "
            "logits.movedim(1, -1)"
        )
    if labels.is_floating_point():
        raise TypeError(f"labels must be whole numbers, got {labels.dtype}")
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    rows, names = wide.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    kept = names != IGNORED
    return Batch(rows, torch.where(kept, names, 0), kept.to(rows.dtype))


def at(values: Tensor, index: Tensor) -> Tensor:
    """One entry of each row, ``(n, classes), (n,) -> (n,)``."""
    return values.gather(-1, index[:, None])[:, 0]


def log_others(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Logarithm of 1 - p of the label ``(n,)``, exact in both tails."""
    chosen = F.one_hot(labels, log_probs.shape[-1]).bool()
    return log_probs.masked_fill(chosen, -torch.inf).logsumexp(-1)


def shaped(values: Tensor, batch: Batch, labels: Tensor) -> Tensor:
    """Per-example values in the shape of the labels, 0 where they are ignored."""
    return (values * batch.mask).reshape(labels.shape)


def summed_over_ranks(values: Tensor) -> Tensor:
    """Sum over the processes that train together, in place."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values
