"""Losses that weigh examples by the probability of the label."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.checks import Values
from calibrant._core.options import Count, NonNegative, Positive, WithOptions
from calibrant.losses.entries import Batch, Extra, Loss, at, batch_of, mean_of


def focal(logits: Tensor, labels: Tensor, *, gamma: NonNegative = 3.0) -> Tensor:
    r"""Focal loss of each example, :math:`-(1 - p_y)^\gamma \log p_y`.

    Gradients are finite for every ``gamma`` from 0 on, which is cross-entropy, and every logit.
    Returns ``(...)`` for logits ``(..., classes)``.

    >>> focal(torch.tensor([[0.0, 0.0]]), torch.tensor([0]), gamma=1.0)
    tensor([0.3466])
    """
    _check_gamma(gamma)
    batch = batch_of(logits, labels)
    return batch.shaped(_focal(batch, gamma))


def flsd(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Focal loss with :math:`\gamma = 5` where :math:`p_y < 0.2` and 3 elsewhere (FLSD-53).

    >>> flsd(torch.tensor([[0.0, 3.0], [0.0, 0.0]]), torch.tensor([0, 0]))
    tensor([2.3911, 0.0866])
    """
    batch = batch_of(logits, labels)
    gamma = torch.where(batch.own.detach().exp() < 0.2, 5.0, 3.0)
    return batch.shaped(_focal(batch, gamma))


def dual_focal(logits: Tensor, labels: Tensor, *, gamma: NonNegative = 5.0) -> Tensor:
    r"""Dual focal loss, :math:`-(1 - p_y + p_j)^\gamma \log p_y`.

    :math:`p_j` is the largest probability that is below :math:`p_y`, 0 where there is none;
    gradients go through it.

    >>> dual_focal(torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([0]), gamma=1.0)
    tensor([0.6319])
    """
    _check_gamma(gamma)
    batch = batch_of(logits, labels)
    log_probs, own = batch.log_probs, batch.own
    lower = log_probs < own[:, None]
    below = log_probs.masked_fill(~lower, -torch.inf)
    # for a label that is the least likely nothing is below; any finite stand-in will do there
    some = lower.any(-1)
    runner_up = at(log_probs, torch.where(some, below.argmax(-1), batch.labels))
    others = _log_others(log_probs, batch.labels)
    base = torch.where(some, torch.logaddexp(others, runner_up), others)
    return batch.shaped(-(gamma * base).exp() * own)


def _focal(batch: Batch, gamma: float | Tensor) -> Tensor:
    return -(gamma * _log_others(batch.log_probs, batch.labels)).exp() * batch.own


def _log_others(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithm of 1 - p of the label ``(n,)``, exact in both tails."""
    chosen = F.one_hot(labels, log_probs.shape[-1]).bool()
    return log_probs.masked_fill(chosen, -torch.inf).logsumexp(-1)


def _check_gamma(gamma: float) -> None:
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")


class AdaFocal(WithOptions, nn.Module):
    r"""Focal loss whose exponents follow the calibration of a validation set.

    Bins of equal mass hold the validation confidences; call :meth:`observe` with validation
    logits after each epoch. With the gap of confidence over accuracy :math:`e_b` of a bin

    .. math:: \gamma_b \leftarrow \gamma_b\, e^{\lambda e_b} \quad (\gamma_b > 0), \qquad
        \gamma_b \leftarrow \gamma_b\, e^{-\lambda e_b} \quad (\gamma_b < 0),

    a bin whose :math:`|\gamma|` falls below 0.2 changes sign, and the loss of an example whose
    true-class probability lies in the bin is :math:`-(1 - p_y)^{\gamma} \log p_y`, or with
    :math:`(1 + p_y)^{|\gamma|}` where :math:`\gamma < 0`. The validation set takes part in
    training: measure on another one.

    Parameters
    ----------
    bins : int
    rate : float
        :math:`\lambda`.
    start : float
        :math:`\gamma` of all bins at first.

    Examples
    --------
    >>> loss = AdaFocal(bins=2)
    >>> logits, labels = torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    >>> loss(logits, labels)
    tensor(0.4876)
    >>> loss.observe(logits, labels)
    >>> loss.gamma_
    tensor([2.0773, 0.8876])
    """

    LIMITS = (-2.0, 20.0)
    LEAST = 0.2

    edges_: Tensor
    gamma_: Tensor

    def __init__(self, *, bins: Count = 15, rate: Positive = 1.0, start: float = 1.0) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("edges_", torch.linspace(0, 1, bins + 1)[1:-1])
        self.register_buffer("gamma_", torch.full((bins,), float(start)))

    def forward(
        self, logits: Tensor, labels: Tensor, features: Extra = None, indices: Extra = None
    ) -> Tensor:
        """Mean loss of a batch; features and indices are not used."""
        batch = batch_of(logits, labels)
        gamma = self.gamma_[torch.bucketize(batch.own.detach().exp(), self.edges_)]
        sharper = _focal(batch, gamma.clamp(min=0))
        softer = -(-gamma.clamp(max=0) * batch.own.exp().log1p()).exp() * batch.own
        return batch.mean(torch.where(gamma >= 0, sharper, softer))

    @torch.no_grad()
    def observe(self, logits: Values, labels: Values) -> None:
        """Update bins and exponents from validation logits ``(n, classes)``."""
        scores = torch.as_tensor(logits)
        batch = batch_of(scores, torch.as_tensor(labels).to(scores.device))
        kept = batch.mask.bool()
        confidence, correct = (v[kept].cpu().double() for v in (batch.confidence, batch.correct))
        groups = torch.tensor_split(torch.argsort(confidence), len(self.gamma_))
        ends = [float(confidence[group].max()) for group in groups[:-1] if len(group)]
        ends += [1.0] * (len(self.edges_) - len(ends))
        excess = confidence - correct
        gap = torch.tensor([float(excess[g].mean()) if len(g) else 0.0 for g in groups])
        self.edges_.copy_(torch.tensor(np.maximum.accumulate(ends)))
        self.gamma_.copy_(self._moved(self.gamma_, gap.to(self.gamma_)))

    def _moved(self, gamma: Tensor, gap: Tensor) -> Tensor:
        moved = gamma * torch.where(gamma > 0, self.rate * gap, -self.rate * gap).exp()
        flipped = torch.where(moved > 0, -self.LEAST, self.LEAST)
        return torch.where(moved.abs() < self.LEAST, flipped, moved).clamp(*self.LIMITS)


TABLE = {
    "focal": mean_of(focal, "Mukhoti et al. 2020", aliases=("focal_loss",)),
    "flsd": mean_of(flsd, "Mukhoti et al. 2020", aliases=("flsd53", "flsd_53")),
    "dual_focal": mean_of(dual_focal, "Tao et al. 2023", aliases=("dual_focal_loss", "dfl")),
    "adafocal": Loss(AdaFocal, AdaFocal, "Ghosh et al. 2022", aliases=("ada_focal",)),
}
