"""Random changes of training images."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def shift_and_mirror(images: Tensor, random: torch.Generator, shift: int = 4) -> Tensor:
    """Shift each image ``(n, c, h, w)`` by up to ``shift`` pixels and mirror half of them."""
    count, _, height, width = images.shape
    down, right = (
        torch.randint(0, 2 * shift + 1, (count, 1), generator=random).to(images.device)
        for _ in range(2)
    )
    mirrored = (torch.rand((count, 1), generator=random) < 0.5).to(images.device)
    rows = down + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, width)
    columns = right + torch.where(mirrored, columns.flip(-1), columns)
    padded = F.pad(images, (shift,) * 4)
    image = torch.arange(count, device=images.device)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2)


def draw_mixup(parameter: float, count: int, random: torch.Generator) -> tuple[float, Tensor]:
    """Draw the share of each image in its mixture, and the order of the images added to them."""
    seed = int(torch.randint(1 << 62, (), generator=random))  # torch's Beta takes no generator
    share = float(np.random.default_rng(seed).beta(parameter, parameter))
    return share, torch.randperm(count, generator=random)
