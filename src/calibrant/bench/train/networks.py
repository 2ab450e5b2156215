"""The image networks of the papers: residual, wide residual and dense ones for small images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Network(nn.Module):
    """A backbone with pooled features and one linear layer.

    Attributes
    ----------
    backbone : Module
        (n, channels, height, width) -> (n, width, height', width')
    last : Linear
    """

    def __init__(self, backbone: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.last = nn.Linear(width, classes)

    def features(self, images: Tensor) -> Tensor:
        """Inputs of the last layer ``(n, width)``."""
        found: Tensor = self.backbone(images).mean((-2, -1))
        return found

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(n, classes)``."""
        found: Tensor = self.last(self.features(images))
        return found


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            _conv(inputs, width, stride=stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width),
            nn.BatchNorm2d(width),
        )
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the path to the shortcut."""
        return F.relu(self.path(x) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            _conv(inputs, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width, stride=stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, 4 * width, 1),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the path to the shortcut."""
        return F.relu(self.path(x) + self.shortcut(x), inplace=True)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def resnet(
    block: type[BasicBlock | Bottleneck],
    depths: Sequence[int],
    classes: int,
    channels: int = 3,
    width: int = 64,
) -> Network:
    """A residual network whose stem is one 3x3 convolution without pooling (He et al. 2016)."""
    layers: list[nn.Module] = [_conv(channels, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    inputs = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            stride = 2 if stage and not i else 1
            layers.append(block(inputs, width << stage, stride))
            inputs = (width << stage) * block.expansion
    return Network(nn.Sequential(*layers), inputs, classes)


class PreActivation(nn.Module):
    """Normalise, activate, convolve, twice, and a shortcut: the block of wide networks."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.path = nn.Sequential(
            _conv(inputs, width, stride=stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width),
        )
        same = stride == 1 and inputs == width
        self.shortcut = None if same else _conv(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the path to the shortcut, which starts after the activation where shapes differ."""
        active = self.first(x)
        short = x if self.shortcut is None else self.shortcut(active)
        found: Tensor = self.path(active) + short
        return found


def wide_resnet(depth: int, factor: int, classes: int, channels: int = 3) -> Network:
    """A wide residual network (Zagoruyko and Komodakis 2016) of ``depth = 6 n + 4`` layers."""
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ValueError(f"the depth of a wide network must be 6 n + 4, got {depth}")
    layers: list[nn.Module] = [_conv(channels, 16)]
    inputs = 16
    for stage in range(3):
        width = 16 * factor << stage
        for i in range(blocks):
            layers.append(PreActivation(inputs, width, 2 if stage and not i else 1))
            inputs = width
    layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
    return Network(nn.Sequential(*layers), inputs, classes)


class Dense(nn.Module):
    """A layer of a dense network: its output is put beside its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            _conv(inputs, 4 * growth, 1),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            _conv(4 * growth, growth),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, ...) -> (n, inputs + growth, ...)."""
        return torch.cat([x, self.path(x)], 1)


def densenet(depths: Sequence[int], classes: int, channels: int = 3, growth: int = 32) -> Network:
    """A dense network that halves channels and size between its blocks (Huang et al. 2017)."""
    inputs = 2 * growth
    layers: list[nn.Module] = [_conv(channels, inputs)]
    for stage, depth in enumerate(depths):
        if stage:
            layers += [
                nn.BatchNorm2d(inputs),
                nn.ReLU(inplace=True),
                _conv(inputs, inputs // 2, 1),
                nn.AvgPool2d(2),
            ]
            inputs //= 2
        for _ in range(depth):
            layers.append(Dense(inputs, growth))
            inputs += growth
    layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
    return Network(nn.Sequential(*layers), inputs, classes)


NETWORKS: dict[str, Callable[..., Network]] = {
    "resnet18": partial(resnet, BasicBlock, (2, 2, 2, 2)),
    "resnet50": partial(resnet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(resnet, Bottleneck, (3, 4, 23, 3)),
    "wrn16_4": partial(wide_resnet, 16, 4),
    "wrn28_10": partial(wide_resnet, 28, 10),
    "densenet121": partial(densenet, (6, 12, 24, 16)),
    "tiny": partial(resnet, BasicBlock, (1, 1), width=16),
}
"""Networks by name: call one with ``classes`` and ``channels``."""
