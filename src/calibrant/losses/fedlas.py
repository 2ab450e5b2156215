"""FeDLaS: label smoothing of each example by its feature norm."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from calibrant._core.chunks import AUTOCAST_DEVICES
from calibrant._core.options import NonNegative, Share, WithOptions, at_least
from calibrant.losses.entries import Extra, Loss, batch_of, summed_over_ranks
from calibrant.losses.smoothing import beyond_margin


class FeDLaS(WithOptions, nn.Module):
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

    The gate learns to reduce smoothing, not to detect over-confidence: its gradient asks for less
    wherever :math:`R_i > \mathrm{CE}_i`, which nearly all examples satisfy once the network fits.

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
        classes: Annotated[int, at_least(2)],
        *,
        base: Literal["ls", "mbls"] = "ls",
        alpha: NonNegative | None = None,
        beta: NonNegative | None = None,
        theta: Share = 0.5,
        margin: NonNegative = 6.0,
    ) -> None:
        super().__init__()
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
            penalty = beyond_margin(batch, self.margin)
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
        kind = rows.device.type
        with torch.autocast(kind, enabled=False) if kind in AUTOCAST_DEVICES else nullcontext():
            first, second = self.gate(rows).softmax(-1).unbind(-1)
        lead = second - first
        signs: Tensor = lead + (lead.sign() - lead).detach()
        return signs

    @torch.no_grad()
    def _update(self, norm: Tensor, mask: Tensor) -> None:
        count, total = summed_over_ranks(torch.stack([mask.sum(), (mask * norm).sum()]))
        mean = total / count.clamp(min=1)
        # about the mean, since not every device has the digits for the mean of squares
        squares = summed_over_ranks((mask * (norm - mean).square()).sum())
        # a batch of one example has no deviation of its own
        spread = squares / (count - 1).clamp(min=1)
        share = torch.where(self.started_ > 0, self.theta, 1.0) * (count > 0)
        self.mean_.lerp_(mean, share)
        self.deviation_.lerp_(spread.sqrt(), share * (count > 1))
        self.started_.copy_(torch.maximum(self.started_, (count > 0).float()))


TABLE = {
    "fedlas_ls": Loss(partial(FeDLaS, base="ls"), FeDLaS, aliases=("fedlas",)),
    "fedlas_mbls": Loss(partial(FeDLaS, base="mbls"), FeDLaS),
}
