"""Statistics of the gate of FeDLaS during training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from calibrant.losses.base import summed_over_ranks
from calibrant.losses.smoothing import FeDLaS


class GateStatistics:
    """Signs of the gate for each training example ``(n,)``, and its smoothing, in one epoch."""

    def __init__(self, loss: FeDLaS, examples: int) -> None:
        device = loss.mean_.device
        self.loss = loss
        self.signs = torch.zeros(examples, dtype=torch.int8, device=device)
        self.lowered = torch.zeros((), device=device)
        self.ratio = torch.zeros((), device=device)

    def update(self, index: Tensor) -> None:
        """Add the last batch, which had the training examples at an index."""
        signs, weights = self.loss.last
        self.signs[index] = signs.to(torch.int8)
        self.lowered += (weights < self.loss.alpha).sum()
        self.ratio += weights.sum() / self.loss.alpha

    def compute(self, before: Tensor | None) -> dict[str, float]:
        """Return fractions of the examples; ``before`` has the signs of the last epoch."""
        for values in (self.signs, self.lowered, self.ratio):
            summed_over_ranks(values)
        count = len(self.signs)
        flips = math.nan if before is None else float((self.signs != before).float().mean())
        return {
            "gate_positive": float((self.signs > 0).float().mean()),
            "gate_flips": flips,
            "smoothing_lowered": float(self.lowered) / count,
            "smoothing_ratio": float(self.ratio) / count,
        }
