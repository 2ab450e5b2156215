"""Distribution shift: corrupted test images, and out-of-distribution images.

The corruptions follow the idea of CIFAR-10-C (Hendrycks and Dietterich 2019) with formulas and
severities of our own: results are not comparable with those on CIFAR-10-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.train.images import Pixels, check_images
from calibrant._core.checks import check_choice

CHUNK = 1000
"""Images processed at a time, to bound the memory."""


def corrupted(images: Pixels, name: str, severity: int, seed: int = 0) -> Pixels:
    """Corrupt images ``(n, channels, height, width)``; only noise depends on the seed.

    ``CORRUPTIONS`` has the names, and a level for each severity from 1 to 5. On images of 16 to 64
    pixels a side, each severity changes more than the one before.
    """
    check_images(images)
    check_choice("name", name, list(CORRUPTIONS))
    corrupt, levels = CORRUPTIONS[name]
    if severity not in range(1, len(levels) + 1):
        raise ValueError(f"severity must be 1, 2 ... {len(levels)}, got {severity!r}")
    random = np.random.default_rng(seed)

    def change(chunk: Pixels) -> Tensor:
        return corrupt(torch.tensor(chunk).float() / 255, levels[severity - 1], random)

    return _in_chunks(change, images, images.shape[1:])


def _in_chunks(change: Callable[[Pixels], Tensor], images: Pixels, shape: Sequence[int]) -> Pixels:
    """Apply a function whose results are pixels in [0, 1] of a shape, and return these as bytes."""
    result = np.empty((len(images), *shape), np.uint8)
    for start in range(0, len(images), CHUNK):
        pixels = change(images[start : start + CHUNK])
        result[start : start + CHUNK] = (pixels * 255).round().clamp(0, 255).byte().numpy()
    return result


def _normal(shape: Sequence[int], random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape, np.float32))


def _noise(pixels: Tensor, level: float, random: np.random.Generator) -> Tensor:
    return pixels + level * _normal(pixels.shape, random)


def _blur(pixels: Tensor, level: float, _: np.random.Generator) -> Tensor:
    height, width = pixels.shape[2:]
    return _gaussian_filter(height, level) @ pixels @ _gaussian_filter(width, level).mT


def _gaussian_filter(side: int, level: float) -> Tensor:
    """Return the filter as a matrix ``(side, side)``; edge pixels are repeated outwards.

    On small images the product with it is several times faster than a convolution.
    """
    reach = math.ceil(3 * level)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.softmax(-0.5 * (offsets / level) ** 2, 0)
    sources = (torch.arange(side)[:, None] + offsets).clamp(0, side - 1)
    return torch.zeros(side, side).scatter_add_(1, sources, weights.expand(side, -1))


def _contrast(pixels: Tensor, level: float, _: np.random.Generator) -> Tensor:
    mean = pixels.mean((2, 3), keepdim=True)
    return mean + level * (pixels - mean)


def _pixelate(pixels: Tensor, level: float, _: np.random.Generator) -> Tensor:
    (height, width), side = pixels.shape[2:], int(level)
    means = F.avg_pool2d(pixels, side, ceil_mode=True)  # smaller squares at the right and bottom
    large = means.repeat_interleave(side, 2).repeat_interleave(side, 3)
    return large[:, :, :height, :width]


_Corruption: TypeAlias = Callable[[Tensor, float, np.random.Generator], Tensor]
CORRUPTIONS: dict[str, tuple[_Corruption, tuple[float, ...]]] = {
    "noise": (_noise, (0.04, 0.08, 0.12, 0.16, 0.20)),  # standard deviation of pixels in [0, 1]
    "blur": (_blur, (0.5, 0.75, 1.0, 1.5, 2.0)),  # standard deviation of the filter in pixels
    "contrast": (_contrast, (0.8, 0.6, 0.45, 0.3, 0.15)),  # factor of differences from the mean
    # added to pixels in [0, 1]
    "brightness": (lambda pixels, level, _: pixels + level, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "pixelate": (_pixelate, (2, 3, 4, 6, 8)),  # side of the averaged squares in pixels
}
"""Corruptions and their levels at severities 1 to 5."""


def ood_images(like: Pixels, kind: str | Pixels, seed: int = 0) -> Pixels:
    """Return out-of-distribution images in the shape of the test images.

    ``"gaussian"``: independent pixels with the mean and standard deviation of each channel of
    ``like``, clipped; ``"uniform"``: independent uniform pixels; ``"shuffled"``: ``like`` with the
    pixels of each image in random order. Or images of another set, of which up to n are drawn: gray
    is repeated for colour, and colour becomes gray by the weights .299, .587, .114. Smaller images
    are centred on black, since blur from scaling up would give them away; larger ones are scaled
    down (bilinear with antialiasing), without keeping the aspect ratio.
    """
    check_images(like, "like")
    random = np.random.default_rng(seed)
    if not isinstance(kind, str):
        check_images(kind, "kind")
        drawn = np.sort(random.permutation(len(kind))[: len(like)])
        return _fitted(kind[drawn], like.shape[1:])
    check_choice("kind", kind, list(OOD_KINDS))
    return OOD_KINDS[kind](like, random)


def _gaussian(like: Pixels, random: np.random.Generator) -> Pixels:
    # channel by channel, because the deviation of bytes takes eight times their memory
    moments = torch.tensor([(plane.mean(), plane.std()) for plane in like.swapaxes(0, 1)])
    mean, deviation = (moments.float() / 255).T.reshape(2, -1, 1, 1)
    return _in_chunks(lambda x: mean + deviation * _normal(x.shape, random), like, like.shape[1:])


def _shuffled(like: Pixels, random: np.random.Generator) -> Pixels:
    result = np.empty(like.shape, np.uint8)
    for start in range(0, len(like), CHUNK):
        chunk = like[start : start + CHUNK]
        pixels = chunk.reshape(*chunk.shape[:2], -1)
        order = random.random((len(pixels), 1, pixels.shape[2])).argsort(-1)
        result[start : start + CHUNK] = np.take_along_axis(pixels, order, -1).reshape(chunk.shape)
    return result


OOD_KINDS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "gaussian": _gaussian,
    "uniform": lambda like, random: random.integers(0, 256, like.shape, np.uint8),
    "shuffled": _shuffled,
}


def _fitted(images: Pixels, shape: tuple[int, ...]) -> Pixels:
    """Bring images to ``(channels, height, width)``."""
    images = _with_channels(images, shape[0])
    room = [wanted - size for wanted, size in zip(shape[1:], images.shape[2:], strict=True)]
    if min(room) >= 0:
        around = [(space // 2, space - space // 2) for space in room]
        return np.pad(images, [(0, 0), (0, 0), *around])

    def scale(chunk: Pixels) -> Tensor:
        pixels = torch.tensor(chunk).float() / 255
        return F.interpolate(pixels, shape[1:], mode="bilinear", antialias=True)

    return _in_chunks(scale, images, shape)


def _with_channels(images: Pixels, channels: int) -> Pixels:
    current = images.shape[1]
    if current in (1, channels):
        return images.repeat(channels // current, 1)
    if (current, channels) == (3, 1):
        weights = np.array([0.299, 0.587, 0.114], np.float32)
        gray: Pixels = np.rint(np.einsum("nchw,c->nhw", images, weights)).astype(np.uint8)
        return gray[:, None]
    raise ValueError(f"images must have 1 or {channels} channels, got {current}: convert them")
