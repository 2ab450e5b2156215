"""A classifier of two layers whose weights are masked at random while it is trained."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Masks = tuple[Tensor, Tensor]
"""What the weights of the two layers are multiplied by: ones and zeros, or one number each."""


class _MaskedLinear(nn.Linear):
    """A linear layer that is told what to multiply its weights by; the bias is never masked."""

    def reset_parameters(self) -> None:
        """Leave the values to :meth:`begin`, which draws them from a seed."""

    def begin(self, random: torch.Generator) -> None:
        """Draw weights and bias evenly within one over the root of the number of inputs."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for values in (self.weight, self.bias):
                values.uniform_(-bound, bound, generator=random)

    def forward(self, inputs: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]  # wants what is kept
        return F.linear(inputs, self.weight * kept, self.bias)


class MaskedClassifier(nn.Module):
    r"""Two layers with a bottleneck between them, which :class:`MaCCal` trains under masks.

    .. math:: z = (q W_2)\,\mathrm{relu}((q W_1) x + b_1) + b_2

    In training :math:`q W` is :math:`M \odot W`, with a mask :math:`M` of independent ones and
    zeros, one with probability :math:`q`. Without masks the weights are multiplied by that
    expectation, in ``train`` mode too: masks are given, never drawn behind one's back. The order
    of magnitude of the logits depends on it, and with it the confidence.

    Parameters
    ----------
    width : int
        Number of features.
    classes : int
    bottleneck : int, optional
        Units between the layers; ``min(256, max(64, classes, width // 4))`` by default.
    samples : int
        With 0, one pass with the expected masks. Else the probabilities are averaged over that
        many masks, the same ones for every call, and their logarithms returned.
    seed : int
        Of the weights at the start, and of those masks.

    Attributes
    ----------
    keep_ : () Tensor
        The share q of the weights that a mask keeps.

    Examples
    --------
    >>> head = MaskedClassifier(512, 10)
    >>> head(torch.randn(4, 512)).shape, head.bottleneck
    (torch.Size([4, 10]), 128)
    """

    keep_: Tensor

    def __init__(
        self,
        width: int,
        classes: int,
        *,
        bottleneck: int | None = None,
        samples: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.width, self.classes = width, classes
        self.bottleneck = bottleneck or min(256, max(64, classes, width // 4))
        self.samples, self.seed = samples, seed
        self.first = _MaskedLinear(width, self.bottleneck)
        self.second = _MaskedLinear(self.bottleneck, classes)
        random = torch.Generator().manual_seed(seed)
        self.first.begin(random)
        self.second.begin(random)
        self.register_buffer("keep_", torch.tensor(1.0))

    def forward(self, features: Tensor, masks: Masks | None = None) -> Tensor:
        """Logits ``(..., classes)`` of features ``(..., width)``."""
        if features.ndim == 0 or features.shape[-1] != self.width:
            raise ValueError(
                f"features must be (..., {self.width}), as in training, got "
                f"{tuple(features.shape)}: pass the inputs of the layer that this head replaces"
            )
        if masks is None and self.samples:
            return self._averaged(features)
        first, second = masks or (self.keep_, self.keep_)
        inputs = features.to(self.first.weight.dtype)
        found: Tensor = self.second(F.relu(self.first(inputs, first)), second)
        return found

    def draw(self, random: torch.Generator) -> Masks:
        """Masks of ones and zeros for both weight matrices."""
        first, second = (
            self._kept(torch.rand(layer.weight.shape, generator=random, device=random.device))
            for layer in (self.first, self.second)
        )
        return first, second

    def _kept(self, uniform: Tensor) -> Tensor:
        return (uniform.to(self.keep_.device) < self.keep_).to(self.first.weight.dtype)

    def _averaged(self, features: Tensor) -> Tensor:
        # by NumPy, whose numbers are the same on every device and constants in an exported graph
        random = np.random.default_rng(self.seed)
        layers = self.first, self.second
        logs = []
        for _ in range(self.samples):
            drawn = (random.random(layer.weight.shape, np.float32) for layer in layers)
            first, second = (self._kept(torch.from_numpy(uniform)) for uniform in drawn)
            logs.append(self(features, (first, second)).log_softmax(-1))
        return torch.stack(logs).logsumexp(0) - math.log(self.samples)


def masked_step(optimiser: torch.optim.Optimizer, head: MaskedClassifier, masks: Masks) -> None:
    """Take a step of an optimiser that leaves masked weights exactly where they are.

    A masked weight has no gradient, and yet an optimiser moves it: momentum and the averages of
    Adam remember earlier gradients, and weight decay needs none. So masked weights are put back.

    Examples
    --------
    >>> head = MaskedClassifier(3, 2, bottleneck=2)
    >>> optimiser = torch.optim.Adam(head.parameters())
    >>> head(torch.ones(4, 3)).sum().backward()
    >>> before = head.first.weight.detach().clone()
    >>> masked_step(optimiser, head, (torch.zeros(2, 3), torch.ones(2, 2)))
    >>> torch.equal(before, head.first.weight)
    True
    """
    weights = head.first.weight, head.second.weight
    before = [weight.detach().clone() for weight in weights]
    optimiser.step()
    with torch.no_grad():
        for weight, mask, old in zip(weights, masks, before, strict=True):
            weight.copy_(torch.where(mask > 0, weight, old))
