"""Training recipes: network, loss, and schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.train.networks import NETWORKS
from calibrant._core.checks import check_whole
from calibrant._core.messages import unknown_name
from calibrant.losses import LOSSES

PAPER_OPTIONS: dict[str, dict[str, Any]] = {
    "fedlas_ls": {"theta": 0.95},
    "fedlas_mbls": {"theta": 0.95},
}
"""Options of the papers for CIFAR-10, where they differ from our defaults."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run; the defaults are those of the papers."""

    network: str = "resnet18"  # one of NETWORKS
    loss: str = "ce"  # one of LOSSES
    loss_options: dict[str, Any] = field(default_factory=dict)  # added to PAPER_OPTIONS
    epochs: int = 350
    # fractions of the epochs after which the learning rate is divided by ten
    milestones: tuple[float, ...] = (150 / 350, 250 / 350)
    batch: int = 128  # images over all processes
    rate: float = 0.1  # initial learning rate of SGD
    momentum: float = 0.9
    decay: float = 5e-4  # weight decay
    clip: float = 2.0  # largest norm of the gradient of the network
    augment: bool = True  # shift images by up to four pixels and mirror half of them
    mixup: float = 0.0  # parameter of the Beta distribution of mixup (Zhang et al. 2018); 0: none
    seed: int = 0
    half: bool = False  # compute in bfloat16, except for the last layer
    compiled: bool = False  # use torch.compile

    def __post_init__(self) -> None:
        """Check names and numbers, and add the options of the papers."""
        for kind, known in (("network", NETWORKS), ("loss", LOSSES)):
            if getattr(self, kind) not in known:
                raise unknown_name(kind, getattr(self, kind), known)
        check_whole("epochs", self.epochs)
        check_whole("batch", self.batch)
        if not 0 <= self.mixup < math.inf:
            raise ValueError(f"mixup must be at least 0, got {self.mixup}")
        options = {**PAPER_OPTIONS.get(self.loss, {}), **self.loss_options}
        object.__setattr__(self, "loss_options", options)  # the class is frozen
        object.__setattr__(self, "milestones", tuple(self.milestones))

    def rate_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        drops = (max(1, round(fraction * self.epochs)) for fraction in self.milestones)
        return self.rate * 0.1 ** sum(epoch >= drop for drop in drops)

    def make_loss(self, classes: int, examples: int) -> nn.Module:
        """Build the loss."""
        return LOSSES[self.loss](classes=classes, examples=examples, **self.loss_options)
