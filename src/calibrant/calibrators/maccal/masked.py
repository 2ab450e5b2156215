"""A two-layer classifier with randomly masked weights, and the control of its keep rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.options import Count, Seed, WithOptions, at_least

_Masks = tuple[Tensor, Tensor]  # factors of the weights of both layers: ones and zeros, or a number
_MAX_HALVINGS, _MAX_CHANGE = 4, 0.1  # how often the step is halved, how far q moves in one epoch


class MaskedClassifier(WithOptions, nn.Module):
    r"""Two layers with a bottleneck between them, which :class:`MaCCal` trains under masks.

    .. math:: z = (q W_2)\,\mathrm{relu}((q W_1) x + b_1) + b_2

    In training :math:`q W` is :math:`M \odot W`, with a mask :math:`M` of independent ones and
    zeros, one with probability :math:`q`. Without masks the weights are multiplied by that
    expectation, in ``train`` mode too: masks are always passed explicitly.

    Parameters
    ----------
    width, classes : int
        Numbers of features and of classes.
    bottleneck, samples, seed : int
        As for :class:`MaCCal`. Averages over masks use the same ones in every call, and return the
        logarithms of the mean probabilities.

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
        width: Count,
        classes: Count,
        *,
        bottleneck: Count | None = None,
        samples: Annotated[int, at_least(0)] = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.width, self.classes, self.samples, self.seed = width, classes, samples, seed
        self.bottleneck = bottleneck or min(256, max(64, classes, width // 4))
        # without torch's own initial values, which would advance its global random state
        self.first = nn.utils.skip_init(nn.Linear, width, self.bottleneck)
        self.second = nn.utils.skip_init(nn.Linear, self.bottleneck, classes)
        random = torch.Generator().manual_seed(seed)
        for layer in (self.first, self.second):
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=random)
            nn.init.uniform_(layer.bias, -bound, bound, generator=random)
        self.register_buffer("keep_", torch.tensor(1.0))

    def forward(self, features: Tensor, masks: _Masks | None = None) -> Tensor:
        """Logits ``(..., classes)`` of features ``(..., width)``."""
        if features.ndim == 0 or features.shape[-1] != self.width:
            wanted = f"(..., {self.width}), the inputs of the last layer"
            raise ValueError(f"features must be {wanted}, got {tuple(features.shape)}")
        if masks is None and self.samples:
            # NumPy draws are the same on every device, and constants in an exported graph
            random = np.random.default_rng(self.seed)
            draws = (
                self._masks(lambda shape: torch.from_numpy(random.random(shape, np.float32)))
                for _ in range(self.samples)
            )
            logs = [self(features, mask).log_softmax(-1) for mask in draws]
            return torch.stack(logs).logsumexp(0) - math.log(self.samples)
        first, second = masks or (self.keep_, self.keep_)
        inputs = features.to(self.first.weight.dtype)
        hidden = F.relu(F.linear(inputs, self.first.weight * first, self.first.bias))
        return F.linear(hidden, self.second.weight * second, self.second.bias)

    def draw(self, random: torch.Generator) -> _Masks:
        """Draw masks of ones and zeros for both weight matrices."""
        return self._masks(lambda shape: torch.rand(shape, generator=random, device=random.device))

    def _masks(self, uniform: Callable[[torch.Size], Tensor]) -> _Masks:
        first, second = (
            (uniform(layer.weight.shape).to(self.keep_.device) < self.keep_).to(layer.weight.dtype)
            for layer in (self.first, self.second)
        )
        return first, second


def masked_step(
    optimiser: torch.optim.Optimizer, classifier: MaskedClassifier, masks: _Masks
) -> None:
    """Take a step of an optimiser and restore masked weights.

    They have no gradient, but momentum, the averages of Adam and weight decay would move them.

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


@dataclass
class KeepRate:
    r"""The share q of weights that a mask keeps, controlled by confidence and accuracy.

    .. math:: q \leftarrow \mathrm{clip}(q - \eta\,(\mathit{conf} - \gamma\,\mathit{acc}),
        \; q_\mathrm{least}, \; 1)

    Over-confidence lowers q. Whenever the gap changes its sign, :math:`\eta` is halved, down to a
    sixteenth; with a fixed step q would oscillate. One update changes q by 0.1 at most. ``keep`` is
    the initial q and ``step`` the initial :math:`\eta`, where 0 leaves q unchanged.

    Examples
    --------
    >>> controller = KeepRate(0.9, step=2.0, gamma=1.0, least=0.1)
    >>> round(controller.update(confidence=0.97, accuracy=0.94), 6)
    0.84
    >>> round(controller.update(confidence=0.90, accuracy=0.94), 6), controller.step
    (0.88, 1.0)
    """

    keep: float
    step: float
    gamma: float
    least: float
    gap: float = 0.0
    halvings: int = 0

    def update(self, confidence: float, accuracy: float) -> float:
        """Take one step and return the new share."""
        gap = confidence - self.gamma * accuracy
        if gap * self.gap < 0 and self.halvings < _MAX_HALVINGS:
            self.step, self.halvings = self.step / 2, self.halvings + 1
        self.gap = gap
        change = min(max(-self.step * gap, -_MAX_CHANGE), _MAX_CHANGE)
        self.keep = min(max(self.keep + change, self.least), 1.0)
        return self.keep


class Epoch(NamedTuple):
    """Figures of one epoch; confidence and accuracy are those that the controller used."""

    keep: float
    confidence: float
    accuracy: float
    loss: float
