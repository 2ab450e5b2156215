"""Statistics of a batch that are 0 for a calibrated model, to be added to a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.options import Count, NonNegative, Positive, WithOptions
from calibrant.losses.entries import Batch, Extra, Loss, batch_of, regularised_by, summed_over_ranks
from calibrant.losses.smoothing import entropy


def mmce(
    logits: Tensor,
    labels: Tensor,
    *,
    width: Positive = 0.4,
    weighted: bool = True,
    twice: bool = False,
) -> Tensor:
    r"""Maximum mean calibration error of a batch.

    .. math:: \text{MMCE}^2 = \frac{1}{n^2} \sum_{ij} (c_i - a_i)(c_j - a_j)\, k(c_i, c_j), \qquad
        k = e^{-|c_i - c_j| / w}

    ``weighted`` gives right and wrong answers equal weight: with :math:`c_i - 1` of the :math:`m`
    right ones divided by :math:`m` and :math:`c_i` of the :math:`n - m` wrong ones by
    :math:`n - m`; it is 0 where one kind is missing. Published code divides by these numbers
    ``twice``, which makes the term vanish in large batches, and adds it with a weight of 2.

    >>> mmce(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]), weighted=False)
    tensor(1.0000e-05)
    """
    batch = batch_of(logits, labels)
    right = batch.correct * batch.mask
    wrong = batch.mask - right
    confidence = batch.confidence
    kernel = (-(confidence[:, None] - confidence).abs() / width).exp()
    if weighted:
        power = 2 if twice else 1
        share = sum(kind / kind.sum().clamp(min=1) ** power for kind in (right, wrong))
        both = (right.sum() > 0) & (wrong.sum() > 0)
    else:
        share = batch.mask / batch.mask.sum().clamp(min=1)
        both = batch.mask.sum() > 0
    gap = share * (confidence - right)
    error = (gap @ kernel @ gap).clamp(min=0).add(1e-10).sqrt()
    return torch.where(both, error, error * 0)


def mdca(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Difference of confidence and accuracy of every class.

    .. math:: \frac1K \sum_k \Bigl| \frac1n \sum_i p_{ik} - \frac1n \sum_i [y_i = k] \Bigr|

    >>> mdca(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 0]))
    tensor(0.5000)
    """
    batch = batch_of(logits, labels)
    share = batch.mask / batch.mask.sum().clamp(min=1)
    target = F.one_hot(batch.labels, batch.logits.shape[-1])
    return (share @ (batch.log_probs.exp() - target)).abs().mean()


def soft_ece(logits: Tensor, labels: Tensor, *, bins: Count = 15, sigma: Positive = 0.05) -> Tensor:
    r"""Soft-binned ECE, with squares of the gaps.

    .. math:: \sqrt{\sum_b \frac{n_b}{n} (C_b - A_b)^2}, \qquad
        w_{ib} \propto e^{-(c_i - \bar c_b)^2 / 2\sigma^2}

    with the mean confidence :math:`C_b` and accuracy :math:`A_b` under the memberships
    :math:`w_{ib}` of the soft bins.

    >>> soft_ece(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    tensor(0.4999)
    """
    batch = batch_of(logits, labels)
    confidence = batch.confidence
    centres = (torch.arange(bins, device=logits.device, dtype=confidence.dtype) + 0.5) / bins
    part = (-(confidence[:, None] - centres).square() / (2 * sigma**2)).softmax(-1)
    share = part * (batch.mask / batch.mask.sum().clamp(min=1))[:, None]
    mass = share.sum(0)
    gap = ((confidence - batch.correct)[:, None] * share).sum(0)
    return (gap.square() / mass.clamp(min=1e-6)).sum().add(1e-12).sqrt()


def avuc(logits: Tensor, labels: Tensor, *, threshold: NonNegative = 1.0) -> Tensor:
    r"""Accuracy versus uncertainty.

    With the entropy :math:`u` and confidence :math:`c` of an example,

    .. math:: \log\Bigl(1 + \frac{n_{AU} + n_{IC}}{n_{AC} + n_{IU}}\Bigr)

    where accurate and inaccurate, certain (:math:`u` up to the threshold) and uncertain examples
    add :math:`c\,(1 - \tanh u)`, :math:`c \tanh u`, :math:`(1 - c)(1 - \tanh u)` and
    :math:`(1 - c) \tanh u` to their cell. A usual threshold is the mean of the mean entropies of
    right and of wrong validation examples. Being wrong and uncertain throughout scores as well as
    being right and certain: with a large weight (published code has 3) from the first step on, a
    network learns nothing.

    >>> avuc(torch.tensor([[9.0, 0.0], [0.0, 9.0]]), torch.tensor([0, 0]))
    tensor(0.0001)
    """
    batch = batch_of(logits, labels)
    doubt, confidence, right = entropy(batch.log_probs), batch.confidence, batch.correct.bool()
    certain, sure = doubt.detach() <= threshold, 1 - doubt.tanh()
    value = torch.where(right, confidence, 1 - confidence) * torch.where(certain, sure, 1 - sure)
    good = torch.where(right == certain, value * batch.mask, 0).sum()
    bad = torch.where(right == certain, 0, value * batch.mask).sum()
    return bad.div(good.clamp(min=1e-12)).log1p()


class CRL(WithOptions, nn.Module):
    r"""Correctness ranking loss: examples that were right more often get more confidence.

    .. math:: -\log p_y + \lambda \operatorname{mean}_i
        \max\bigl(0,\ |k_i - k_j| - \operatorname{sign}(k_i - k_j)(c_i - c_j)\bigr)

    over neighbours :math:`j` of the batch, where :math:`k` is the share of past epochs in which
    the model was right about a training example. The loss keeps that history: pass the numbers
    of the examples as ``indices``, from 0 to ``examples - 1``.

    Parameters
    ----------
    examples : int
        Size of the training set.
    weight : float
        :math:`\lambda`.

    Examples
    --------
    >>> loss = CRL(examples=100)
    >>> logits, labels = torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    >>> loss(logits, labels, indices=torch.tensor([5, 7]))
    tensor(0.7201)
    """

    right_: Tensor
    seen_: Tensor

    def __init__(self, examples: Count, *, weight: NonNegative = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("right_", torch.zeros(examples))
        self.register_buffer("seen_", torch.zeros(examples))

    def forward(
        self, logits: Tensor, labels: Tensor, features: Extra = None, indices: Extra = None
    ) -> Tensor:
        """Mean loss of a batch ``(n, classes)``; in training mode its outcome joins the history."""
        if indices is None:
            raise ValueError("CRL needs indices=, the number of each example in the training set")
        batch = batch_of(logits, labels)
        low, high = self.right_.min(), self.seen_.max()
        past = (self.right_[indices] - low) / (high - low).clamp(min=1)
        confidence = batch.confidence
        lead = past - past.roll(-1)
        penalty = (lead.abs() - lead.sign() * (confidence - confidence.roll(-1))).clamp(min=0)
        pairs = batch.mask * batch.mask.roll(-1)
        loss = batch.mean(-batch.own) + self.weight * (penalty * pairs).sum() / pairs.sum().clamp(1)
        if self.training:
            self._remember(indices, batch)
        return loss

    @torch.no_grad()
    def _remember(self, indices: Tensor, batch: Batch) -> None:
        outcome = torch.stack([batch.correct * batch.mask, batch.mask]).float()
        added = torch.stack([self.right_, self.seen_]).zero_().index_add_(1, indices, outcome)
        right, seen = summed_over_ranks(added)
        self.right_ += right
        self.seen_ += seen


# These weights do not harm training. Published code has 2 for mmce, which belongs to sums that are
# divided ``twice``: with the formula as it is, CIFAR-10 was learned to 86 instead of 94 % and with
# an ECE of 14 %. It has 3 for avuc, of networks that are trained already.
TABLE = {
    "mmce": regularised_by(mmce, 0.2, "Kumar et al. 2018"),
    "mdca": regularised_by(mdca, 1.0, "Hebbalaguppe et al. 2022"),
    "soft_ece": regularised_by(soft_ece, 0.5, "Karandikar et al. 2021"),
    "avuc": regularised_by(avuc, 0.5, "Krishnan and Tickoo 2020"),
    "crl": Loss(CRL, CRL, "Moon et al. 2020"),
}
