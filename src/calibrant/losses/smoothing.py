"""Losses that smooth labels or penalise confident predictions."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.checks import check_choice, check_whole
from calibrant.losses.base import Batch, Extra, Loss, at, batch_of, mean_of, summed_over_ranks


def ls(logits: Tensor, labels: Tensor, *, alpha: float = 0.05) -> Tensor:
    r"""Label smoothing, :math:`-(1 - \alpha) \log p_y - \frac{\alpha}{K} \sum_k \log p_k`.

    Returns ``(...)`` for logits ``(..., classes)``; ``alpha=0`` is cross-entropy.

    >>> ls(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), alpha=0.1)
    tensor([0.2269])
    """
    batch = batch_of(logits, labels)
    return batch.shaped((1 - alpha) * -batch.own - alpha * batch.log_probs.mean(-1))


def mbls(logits: Tensor, labels: Tensor, *, margin: float = 6.0, weight: float = 0.1) -> Tensor:
    r"""Margin-based label smoothing.

    .. math:: -\log p_y + \lambda \frac1K \sum_k \max(\max_l z_l - z_k - m,\, 0)

    Gradients go through the largest logit. A margin that no logit reaches gives cross-entropy.

    >>> mbls(torch.tensor([[8.0, 0.0]]), torch.tensor([0]))
    tensor([0.1003])
    """
    batch = batch_of(logits, labels)
    return batch.shaped(-batch.own + weight * _beyond_margin(batch, margin))


def acls(
    logits: Tensor,
    labels: Tensor,
    *,
    margin: float = 6.0,
    weight: float = 0.1,
    top: float = 1.0,
    others: float = 0.1,
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


def ecp(logits: Tensor, labels: Tensor, *, weight: float = 0.1) -> Tensor:
    r"""Confidence penalty, :math:`-\log p_y - \lambda H(p)`.

    >>> ecp(torch.tensor([[0.0, 0.0]]), torch.tensor([0]), weight=1.0)
    tensor([0.])
    """
    batch = batch_of(logits, labels)
    return batch.shaped(-batch.own - weight * entropy(batch.log_probs))


def cpc(
    logits: Tensor, labels: Tensor, *, discrimination: float = 1.0, exclusion: float = 1.0
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
    both = other[:, :, None] * other[:, None, :] * (1 - torch.eye(classes).to(pairs))
    first = (apart * other).sum(-1) / max(classes - 1, 1)
    second = (pairs * both).sum((-1, -2)) / (2 * max((classes - 1) * (classes - 2), 1))
    return batch.shaped(-batch.own + discrimination * first + exclusion * second)


def _beyond_margin(batch: Batch, margin: float) -> Tensor:
    """Mean excess over the margin of the distance to the largest logit, ``(n,)``."""
    gap = batch.logits.amax(-1, keepdim=True) - batch.logits
    return (gap - margin).clamp(min=0).mean(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy of each row in nats, ``(n,)``."""
    return -(log_probs.exp() * log_probs).sum(-1)


class FeDLaS(nn.Module):
    r"""Feature-norm driven label smoothing with a learned two-way gate.

    The :math:`L_1` norm :math:`n_i` of the features before the last layer, standardised by moving
    averages over the batches, is

    .. math:: \gamma_i = \frac{n_i - \mu}{\sigma + 10^{-3}}, \qquad
        \mu \leftarrow \theta \hat m + (1 - \theta) \mu, \quad
        \sigma \leftarrow \theta \hat s + (1 - \theta) \sigma .

    A gate, a small network of the logits, gives a sign :math:`\psi_i`. Examples are smoothed by

    .. math:: \alpha_i = 2 \alpha\,\mathrm{sigmoid}(\beta \psi_i \gamma_i) \in (0, 2 \alpha), \qquad
        L = \operatorname{mean}_i \bigl[(1 - \alpha_i) \mathrm{CE}_i + \alpha_i R_i\bigr],

    where :math:`R` is the cross-entropy of the uniform distribution (``base="ls"``) or the excess
    over a margin (``base="mbls"``, mean over classes). The backbone gets no gradient through the
    weight. The sign passes the gradient on unchanged: put the parameters of the gate into the same
    optimiser. It is not needed at inference.

    Parameters
    ----------
    classes : int
    base : {"ls", "mbls"}
    alpha : float, optional
        Mean strength; 0.05 for ``ls`` and 0.1 for ``mbls`` by default.
    beta : float, optional
        Influence of the norm; 4 for ``ls`` and 0.5 for ``mbls`` by default; 0: plain smoothing.
    theta : float
        Weight of the current batch in the moving averages.
    margin : float
        Of ``mbls``.

    Attributes
    ----------
    mean_, deviation_ : scalar Tensors
        Moving averages of the norm. The first batch sets them; they are the same on all ranks.
    last : pair of Tensors
        Signs and weights of the last batch, each ``(n,)``.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> loss = FeDLaS(classes=3)
    >>> logits, features = torch.randn(8, 3), torch.randn(8, 16)
    >>> loss(logits, torch.zeros(8, dtype=torch.long), features).shape
    torch.Size([])
    """

    needs_features = True
    mean_: Tensor
    deviation_: Tensor
    started_: Tensor

    def __init__(
        self,
        classes: int,
        *,
        base: Literal["ls", "mbls"] = "ls",
        alpha: float | None = None,
        beta: float | None = None,
        theta: float = 0.5,
        margin: float = 6.0,
    ) -> None:
        super().__init__()
        check_choice("base", base, ("ls", "mbls"))
        check_whole("classes", classes, 2)
        if not 0 < theta <= 1:
            raise ValueError(f"theta must be above 0 and at most 1, got {theta}")
        usual = {"ls": (0.05, 4.0), "mbls": (0.1, 0.5)}[base]
        self.base, self.theta, self.margin = base, theta, margin
        self.alpha = usual[0] if alpha is None else alpha
        self.beta = usual[1] if beta is None else beta
        hidden = max(classes // 2, 1)
        self.gate = nn.Sequential(
            nn.Linear(classes, hidden), nn.LeakyReLU(0.01), nn.Linear(hidden, 2)
        )
        self.last = (torch.zeros(0), torch.zeros(0))
        for name, value in (("mean_", 0.0), ("deviation_", 1.0), ("started_", 0.0)):
            self.register_buffer(name, torch.tensor(value))

    def forward(
        self, logits: Tensor, labels: Tensor, features: Extra = None, indices: Extra = None
    ) -> Tensor:
        """Mean loss of a batch; ``features (..., width)`` are the inputs of the last layer."""
        batch = batch_of(logits, labels)
        if features is None or features.shape[:-1] != labels.shape:
            raise ValueError(
                f"FeDLaS needs features (..., width), the inputs of the last layer, for labels "
                f"{tuple(labels.shape)}, got {None if features is None else tuple(features.shape)}"
            )
        wanted, classes = self.gate[0].in_features, logits.shape[-1]
        if classes != wanted:
            raise ValueError(f"this FeDLaS was made for {wanted} classes, got logits of {classes}")
        weight = self.weights(logits, features, batch.mask)
        if self.base == "ls":
            penalty = -batch.log_probs.mean(-1)
        else:
            penalty = _beyond_margin(batch, self.margin)
        return batch.mean((1 - weight) * -batch.own + weight * penalty)

    def weights(self, logits: Tensor, features: Tensor, mask: Tensor | None = None) -> Tensor:
        r"""Smoothing :math:`\alpha_i` of each example, flat ``(n,)``.

        In training mode the moving averages are updated with this batch first.
        """
        norm = features.detach().reshape(-1, features.shape[-1]).float().abs().sum(-1)
        if self.training:
            self._update(norm, torch.ones_like(norm) if mask is None else mask.to(norm))
        surprise = (norm - self.mean_) / (self.deviation_ + 1e-3)
        signs = self.signs(logits)
        weights = 2 * self.alpha * (self.beta * signs * surprise).sigmoid()
        self.last = (signs.detach(), weights.detach())
        return weights

    def signs(self, logits: Tensor) -> Tensor:
        r"""The gate's :math:`\psi_i`, flat ``(n,)``: a sign whose gradient is the identity."""
        rows = logits.detach().reshape(-1, logits.shape[-1]).to(next(self.gate.parameters()).dtype)
        with torch.autocast(rows.device.type, enabled=False):
            first, second = self.gate(rows).softmax(-1).unbind(-1)
        lead = second - first
        signs: Tensor = lead + (lead.sign() - lead).detach()
        return signs

    @torch.no_grad()
    def _update(self, norm: Tensor, mask: Tensor) -> None:
        sums = torch.stack([mask.sum(), (mask * norm).sum(), (mask * norm.square()).sum()])
        count, total, squares = summed_over_ranks(sums.double())
        mean = total / count.clamp(min=1)
        # a batch of one example has no deviation of its own
        spread = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
        share = torch.where(self.started_ > 0, self.theta, 1.0) * (count > 0)
        self.mean_.lerp_(mean.float(), share)
        self.deviation_.lerp_(spread.sqrt().float(), share * (count > 1))
        self.started_.copy_(torch.maximum(self.started_, (count > 0).float()))


SMOOTHING_LOSSES = {
    "ls": mean_of(ls, "Szegedy et al. 2016", aliases=("label_smoothing",)),
    "ecp": mean_of(ecp, "Pereyra et al. 2017", aliases=("confidence_penalty", "entropy_penalty")),
    "cpc": mean_of(cpc, "Cheng and Vasconcelos 2022"),
    "mbls": mean_of(mbls, "Liu et al. 2022", aliases=("margin_label_smoothing",)),
    "acls": mean_of(acls, "Park et al. 2023"),
}
FEDLAS = {
    "fedlas_ls": Loss(partial(FeDLaS, base="ls"), FeDLaS, aliases=("fedlas",)),
    "fedlas_mbls": Loss(partial(FeDLaS, base="mbls"), FeDLaS),
}
