"""Image networks of the papers, for small images: ResNet, Wide ResNet and DenseNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _norm_relu(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels), nn.ReLU(inplace=True)


class Network(nn.Module):
    """A convolutional backbone, average pooling, and one linear layer."""

    def __init__(self, backbone: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.last = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``(n, classes)``, and the features ``(n, width)`` before the last layer."""
        features = self.backbone(images).mean((-2, -1))
        with torch.autocast(features.device.type, enabled=False):
            # bfloat16 is too coarse for confidences
            return self.last(features.float()), features


class _ResidualBlock(nn.Module):
    """Layers beside a shortcut."""

    def __init__(self, layers: Sequence[nn.Module], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(*layers, nn.BatchNorm2d(outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = _conv(inputs, outputs, 1, stride)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x), inplace=True)


def _basic_layers(inputs: int, width: int, stride: int) -> Sequence[nn.Module]:
    return _conv(inputs, width, stride=stride), *_norm_relu(width), _conv(width, width)


def _bottleneck_layers(inputs: int, width: int, stride: int) -> Sequence[nn.Module]:
    narrow = _conv(inputs, width, 1), *_norm_relu(width)
    middle = _conv(width, width, stride=stride), *_norm_relu(width)
    return *narrow, *middle, _conv(width, 4 * width, 1)


def resnet(
    layers: Callable[[int, int, int], Sequence[nn.Module]],
    expansion: int,
    depths: Sequence[int],
    classes: int,
    channels: int = 3,
    width: int = 64,
) -> Network:
    """Build a residual network that starts with a 3x3 convolution, no pooling (He et al. 2016)."""
    blocks: list[nn.Module] = [_conv(channels, width), *_norm_relu(width)]
    inputs = width
    for stage, depth in enumerate(depths):
        outputs = expansion * width << stage
        for i in range(depth):
            stride = 2 if stage and not i else 1
            inner = layers(inputs, width << stage, stride)
            blocks.append(_ResidualBlock(inner, inputs, outputs, stride))
            inputs = outputs
    return Network(nn.Sequential(*blocks), inputs, classes)


class _PreActivation(nn.Module):
    """Block of wide networks: twice normalisation, activation and convolution, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_norm_relu(inputs))
        self.path = nn.Sequential(*_basic_layers(inputs, width, stride))
        same = stride == 1 and inputs == width
        self.shortcut = None if same else _conv(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.first(x)
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return torch.add(self.path(active), shortcut)


def wide_resnet(depth: int, factor: int, classes: int, channels: int = 3) -> Network:
    """Build a wide residual network of ``6 n + 4`` layers (Zagoruyko and Komodakis 2016)."""
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ValueError(f"the depth of a wide network must be 6 n + 4, got {depth}")
    layers: list[nn.Module] = [_conv(channels, 16)]
    inputs = 16
    for stage in range(3):
        width = 16 * factor << stage
        for i in range(blocks):
            layers.append(_PreActivation(inputs, width, 2 if stage and not i else 1))
            inputs = width
    return Network(nn.Sequential(*layers, *_norm_relu(inputs)), inputs, classes)


class _DenseLayer(nn.Module):
    """Concatenates its output to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(*_norm_relu(inputs), _conv(inputs, 4 * growth, 1)),
            *(*_norm_relu(4 * growth), _conv(4 * growth, growth)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.path(x)], 1)


def densenet(depths: Sequence[int], classes: int, channels: int = 3, growth: int = 32) -> Network:
    """Build a dense network that halves channels and size between blocks (Huang et al. 2017)."""
    inputs = 2 * growth
    layers: list[nn.Module] = [_conv(channels, inputs)]
    for stage, depth in enumerate(depths):
        if stage:
            layers += [*_norm_relu(inputs), _conv(inputs, inputs // 2, 1), nn.AvgPool2d(2)]
            inputs //= 2
        for _ in range(depth):
            layers.append(_DenseLayer(inputs, growth))
            inputs += growth
    return Network(nn.Sequential(*layers, *_norm_relu(inputs)), inputs, classes)


NETWORKS: dict[str, Callable[..., Network]] = {
    "resnet18": partial(resnet, _basic_layers, 1, (2, 2, 2, 2)),
    "resnet50": partial(resnet, _bottleneck_layers, 4, (3, 4, 6, 3)),
    "resnet101": partial(resnet, _bottleneck_layers, 4, (3, 4, 23, 3)),
    "wrn16_4": partial(wide_resnet, 16, 4),
    "wrn28_10": partial(wide_resnet, 28, 10),
    "densenet121": partial(densenet, (6, 12, 24, 16)),
    "tiny": partial(resnet, _basic_layers, 1, (1, 1), width=16),
}
"""Networks by name: call one with ``classes`` and ``channels``."""
