"""A two-layer classifier whose weights are masked at random during training."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Masks = tuple[Tensor, Tensor]
"""Factors of the weights of both layers: ones and zeros, or one number each."""


class _MaskedLinear(nn.Linear):
    """A linear layer with masked weights and an unmasked bias."""

    def reset_parameters(self) -> None:
        """Leave initialisation to :meth:`initialise`, which is seeded."""

    def initialise(self, random: torch.Generator) -> None:
        """Draw weights and bias uniformly within one over the root of the number of inputs."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for values in (self.weight, self.bias):
                values.uniform_(-bound, bound, generator=random)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(inputs, self.weight * mask, self.bias)


class MaskedClassifier(nn.Module):
    r"""Two layers with a bottleneck between them, which :class:`MaCCal` trains under masks.

    .. math:: z = (q W_2)\,\mathrm{relu}((q W_1) x + b_1) + b_2

    In training :math:`q W` is :math:`M \odot W`, with a mask :math:`M` of independent ones and
    zeros, one with probability :math:`q`. Without masks the weights are multiplied by that
    expectation, in ``train`` mode too: masks are always passed explicitly.

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
    >>> classifier = MaskedClassifier(512, 10)
    >>> classifier(torch.randn(4, 512)).shape, classifier.bottleneck
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
        self.first.initialise(random)
        self.second.initialise(random)
        self.register_buffer("keep_", torch.tensor(1.0))

    def forward(self, features: Tensor, masks: Masks | None = None) -> Tensor:
        """Logits ``(..., classes)`` of features ``(..., width)``."""
        if features.ndim == 0 or features.shape[-1] != self.width:
            raise ValueError(
                f"features must be (..., {self.width}), the inputs of the layer that this "
                f"classifier replaces, got {tuple(features.shape)}"
            )
        if masks is None and self.samples:
            return self._averaged(features)
        first, second = masks or (self.keep_, self.keep_)
        inputs = features.to(self.first.weight.dtype)
        logits: Tensor = self.second(F.relu(self.first(inputs, first)), second)
        return logits

    def draw(self, random: torch.Generator) -> Masks:
        """Draw masks of ones and zeros for both weight matrices."""
        first, second = (
            self._kept(torch.rand(layer.weight.shape, generator=random, device=random.device))
            for layer in (self.first, self.second)
        )
        return first, second

    def _kept(self, uniform: Tensor) -> Tensor:
        return (uniform.to(self.keep_.device) < self.keep_).to(self.first.weight.dtype)

    def _averaged(self, features: Tensor) -> Tensor:
        # NumPy draws are the same on every device, and constants in an exported graph
        random = np.random.default_rng(self.seed)
        layers = self.first, self.second
        logs = []
        for _ in range(self.samples):
            drawn = (random.random(layer.weight.shape, np.float32) for layer in layers)
            first, second = (self._kept(torch.from_numpy(uniform)) for uniform in drawn)
            logs.append(self(features, (first, second)).log_softmax(-1))
        return torch.stack(logs).logsumexp(0) - math.log(self.samples)


def masked_step(
    optimiser: torch.optim.Optimizer, classifier: MaskedClassifier, masks: Masks
) -> None:
    """Take a step of an optimiser that does not change masked weights.

    A masked weight has no gradient, but momentum, the averages of Adam and weight decay would
    still move it. So masked weights are restored after the step.

    Examples
    --------
    >>> classifier = MaskedClassifier(3, 2, bottleneck=2)
    >>> optimiser = torch.optim.Adam(classifier.parameters())
    >>> classifier(torch.ones(4, 3)).sum().backward()
    >>> before = classifier.first.weight.detach().clone()
    >>> masked_step(optimiser, classifier, (torch.zeros(2, 3), torch.ones(2, 2)))
    >>> torch.equal(before, classifier.first.weight)
    True
    """
    weights = classifier.first.weight, classifier.second.weight
    before = [weight.detach().clone() for weight in weights]
    optimiser.step()
    with torch.no_grad():
        for weight, mask, old in zip(weights, masks, before, strict=True):
            weight.copy_(torch.where(mask > 0, weight, old))
