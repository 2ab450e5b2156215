"""Images that a network was not trained for: test images made worse, and images of other things.

The corruptions are in the spirit of CIFAR-10-C (Hendrycks and Dietterich 2019), but their
formulas and severities are this project's own: figures do not compare with those of CIFAR-10-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.bench.train.images.sets import Bytes, check_images

BATCH = 1000
"""Images that are changed at a time, to bound the memory."""


def corrupted(images: Bytes, name: str, severity: int, seed: int = 0) -> Bytes:
    """Test images under a corruption, with their labels unchanged.

    ============  ===================================================  ========================
    name          what is done to pixels between 0 and 1               at severities 1 to 5
    ============  ===================================================  ========================
    noise         add independent Gaussian noise of this deviation     .04, .08, .12, .16, .20
    blur          Gaussian filter of this deviation in pixels          .5, .75, 1, 1.5, 2
    contrast      keep this share of the distance to the mean of the   .8, .6, .45, .3, .15
                  image's channel
    brightness    add this                                             .1, .2, .3, .4, .5
    pixelate      average over blocks of this many pixels a side       2, 3, 4, 6, 8
    ============  ===================================================  ========================

    Values beyond 0 and 1 are clipped. The severities are this project's own and meant for images
    of 16 to 64 pixels a side, on which each changes more than the one before. In images of 8 x 8
    blocks of 6 pixels leave small ones at the edges, so pixelate 4 changes less than 3 there.

    Parameters
    ----------
    images : uint8 array (n, channels, height, width)
    name : str
        One of ``CORRUPTIONS``.
    severity : int
        1 to 5.
    seed : int
        Of the noise; the others are not random.

    Returns
    -------
    uint8 array of the same shape

    Examples
    --------
    >>> gray = np.full((2, 3, 8, 8), 100, np.uint8)
    >>> int(corrupted(gray, "brightness", 2).max())
    151
    """
    check_images(images)
    if name not in _CHANGES:
        raise ValueError(f"name must be one of {', '.join(CORRUPTIONS)}, got {name!r}")
    change, levels = _CHANGES[name]
    if severity not in range(1, len(levels) + 1):
        raise ValueError(f"severity must be 1, 2 ... {len(levels)}, got {severity!r}")
    random = np.random.default_rng(seed)
    found = np.empty(images.shape, np.uint8)
    for batch in _batches(len(images)):
        pixels = torch.tensor(images[batch]).float() / 255
        found[batch] = _bytes(change(pixels, levels[severity - 1], random))
    return found


def _batches(count: int) -> Iterator[slice]:
    return (slice(start, start + BATCH) for start in range(0, count, BATCH))


def _bytes(pixels: Tensor) -> Bytes:
    return (pixels * 255).round().clamp(0, 255).byte().numpy()


def _noise(pixels: Tensor, level: float, random: np.random.Generator) -> Tensor:
    return pixels + level * _normal(tuple(pixels.shape), random)


def _normal(shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape, np.float32))


def _blur(pixels: Tensor, level: float, _: np.random.Generator) -> Tensor:
    height, width = pixels.shape[2:]
    return _gaussian_filter(height, level) @ pixels @ _gaussian_filter(width, level).mT


def _gaussian_filter(side: int, level: float) -> Tensor:
    """Matrix ``(side, side)`` of the filter; beyond the edge the outermost pixel goes on.

    For small images a product with it is several times as fast as a convolution.
    """
    reach = math.ceil(3 * level)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.softmax(-0.5 * (offsets / level) ** 2, 0)
    sources = (torch.arange(side)[:, None] + offsets).clamp(0, side - 1)
    return torch.zeros(side, side).scatter_add_(1, sources, weights.expand(side, -1))


def _contrast(pixels: Tensor, level: float, _: np.random.Generator) -> Tensor:
    mean = pixels.mean((2, 3), keepdim=True)
    return mean + level * (pixels - mean)


def _brightness(pixels: Tensor, level: float, _: np.random.Generator) -> Tensor:
    return pixels + level


def _pixelate(pixels: Tensor, level: float, _: np.random.Generator) -> Tensor:
    """Blocks are counted from the upper left corner; those at the other edges may be smaller."""
    height, width = pixels.shape[2:]
    block = int(level)
    means = F.avg_pool2d(pixels, block, ceil_mode=True)
    large = means.repeat_interleave(block, 2).repeat_interleave(block, 3)
    return large[:, :, :height, :width]


class _Change(NamedTuple):
    change: Callable[[Tensor, float, np.random.Generator], Tensor]
    levels: tuple[float, ...]


_CHANGES = {
    "noise": _Change(_noise, (0.04, 0.08, 0.12, 0.16, 0.20)),
    "blur": _Change(_blur, (0.5, 0.75, 1.0, 1.5, 2.0)),
    "contrast": _Change(_contrast, (0.8, 0.6, 0.45, 0.3, 0.15)),
    "brightness": _Change(_brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "pixelate": _Change(_pixelate, (2, 3, 4, 6, 8)),
}
CORRUPTIONS = tuple(_CHANGES)
"""Names for :func:`corrupted`."""


def ood_images(like: Bytes, kind: str | Bytes, seed: int = 0) -> Bytes:
    """Images of no class that the network knows, in the shape of those that it takes.

    Parameters
    ----------
    like : uint8 array (n, channels, height, width)
        Test images of the set that the network was trained on.
    kind : str or uint8 array (m, channels, height, width)
        ``"gaussian"``: independent pixels with the mean and deviation of each channel of
        ``like``, clipped; ``"uniform"``: independent pixels, all values alike; ``"shuffled"``:
        ``like`` with the pixels of each image in a random order, its colours kept.

        Or images of another set, of which up to n are drawn. Gray becomes colour by repetition
        and colour gray by the weights .299, .587, .114. Images that fit into the wanted size are
        put in its middle on black, as they are: scaling up would blur them, and blur alone is a
        sign of being foreign. Others are scaled to the size, bilinear with antialiasing; their
        aspect is not kept.
    seed : int

    Returns
    -------
    uint8 array (n or fewer, channels, height, width)
        With the shape of ``like`` but for the number of images.

    Examples
    --------
    >>> colour = np.full((5, 3, 32, 32), 90, np.uint8)
    >>> other = np.full((4, 1, 28, 28), 200, np.uint8)
    >>> found = ood_images(colour, other)
    >>> found.shape, found[0, :, 1:3, 16].tolist()
    ((4, 3, 32, 32), [[0, 200], [0, 200], [0, 200]])
    """
    check_images(like, "like")
    random = np.random.default_rng(seed)
    if not isinstance(kind, str):
        check_images(kind, "kind")
        drawn = np.sort(random.permutation(len(kind))[: len(like)])
        return _fitted(kind[drawn], like.shape[1:])
    if kind not in _OOD:
        raise ValueError(
            f"kind must be images of another set or one of {', '.join(OOD_KINDS)}, got {kind!r}"
        )
    return _OOD[kind](like, random)


def _gaussian(like: Bytes, random: np.random.Generator) -> Bytes:
    # channel by channel, because the deviation of bytes takes eight times their memory
    moments = torch.tensor([(plane.mean(), plane.std()) for plane in like.swapaxes(0, 1)])
    mean, deviation = (moments.float() / 255).T.reshape(2, -1, 1, 1)
    found = np.empty(like.shape, np.uint8)
    for batch in _batches(len(like)):
        found[batch] = _bytes(mean + deviation * _normal(like[batch].shape, random))
    return found


def _uniform(like: Bytes, random: np.random.Generator) -> Bytes:
    return random.integers(0, 256, like.shape, np.uint8)


def _shuffled(like: Bytes, random: np.random.Generator) -> Bytes:
    found = np.empty(like.shape, np.uint8)
    for batch in _batches(len(like)):
        pixels = like[batch].reshape(*like[batch].shape[:2], -1)
        order = random.random((len(pixels), 1, pixels.shape[2])).argsort(-1)
        found[batch] = np.take_along_axis(pixels, order, -1).reshape(like[batch].shape)
    return found


_OOD = {"gaussian": _gaussian, "uniform": _uniform, "shuffled": _shuffled}
OOD_KINDS = tuple(_OOD)
"""Names for :func:`ood_images`."""


def _fitted(images: Bytes, shape: tuple[int, ...]) -> Bytes:
    """Bring images to ``(channels, height, width)``."""
    images = _with_channels(images, shape[0])
    room = [wanted - given for wanted, given in zip(shape[1:], images.shape[2:], strict=True)]
    if min(room) >= 0:
        around = [(space // 2, space - space // 2) for space in room]
        return np.pad(images, [(0, 0), (0, 0), *around])
    found = np.empty((len(images), *shape), np.uint8)
    for batch in _batches(len(images)):
        pixels = torch.tensor(images[batch]).float() / 255
        found[batch] = _bytes(F.interpolate(pixels, shape[1:], mode="bilinear", antialias=True))
    return found


def _with_channels(images: Bytes, channels: int) -> Bytes:
    given = images.shape[1]
    if given == channels:
        return images
    if given == 1:
        return images.repeat(channels, 1)
    if (given, channels) == (3, 1):
        weights = np.array([0.299, 0.587, 0.114], np.float32)
        gray: Bytes = np.rint(np.einsum("nchw,c->nhw", images, weights)).astype(np.uint8)
        return gray[:, None]
    raise ValueError(
        f"images with {given} channels cannot become images with {channels}: gray or three colours "
        "are wanted; convert them first"
    )
