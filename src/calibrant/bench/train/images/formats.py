"""File formats of CIFAR and MNIST, each of which holds many images in a few files."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant.bench.train.images.image_set import ImageSplit, Pixels

PIXELS = 3 * 32 * 32
"""Bytes of an image of CIFAR."""


class ImageFormat(NamedTuple):
    """A published format: file names of its splits, a parser of one file, and of all of a split."""

    title: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Callable[[bytes], Any]
    combine: Callable[[Sequence[Any]], ImageSplit]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all files."""
        return self.train + self.test


class _ArrayUnpickler(pickle.Unpickler):
    """Refuses everything but what a pickle of arrays needs."""

    ALLOWED: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in an image archive")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def unpickle_arrays(content: bytes) -> dict[str, Any]:
    """Load a pickle that may contain only arrays, lists and numbers."""
    try:
        loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        # the keys are bytes if Python 2 wrote them
        return {key.decode() if isinstance(key, bytes) else key: loaded[key] for key in loaded}
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(f"not a pickle of arrays only: {error}") from error


def _pickled_cifar(content: bytes) -> ImageSplit:
    arrays = unpickle_arrays(content)
    labels = np.array(arrays.get("fine_labels", arrays.get("labels")))
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    return _cifar_split(np.asarray(arrays.get("data")), labels)


def _binary_cifar(content: bytes, labels: int) -> ImageSplit:
    """Parse images that each follow ``labels`` bytes, of which the last is the class."""
    record = labels + PIXELS
    if len(content) % record:
        raise ValueError(f"size must be a multiple of {record} bytes, got {len(content)}")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return _cifar_split(records[:, labels:], records[:, labels - 1])


def _cifar_split(pixels: NDArray[Any], labels: NDArray[Any]) -> ImageSplit:
    if pixels.dtype != np.uint8 or pixels.shape != (labels.size, PIXELS) or not labels.size:
        raise ValueError(
            f"a uint8 row of {PIXELS} pixels is needed for each label, got {pixels.dtype} of shape "
            f"{pixels.shape} and {labels.size} labels"
        )
    return ImageSplit(pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64))


def _concatenate(batches: Sequence[ImageSplit]) -> ImageSplit:
    return ImageSplit(*map(np.concatenate, zip(*batches, strict=True)))


def _idx_array(content: bytes) -> Pixels:
    """Parse bytes after a header: 0, 0, 8 (for bytes), the number of axes, and their lengths."""
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * axes
    if not axes or len(content) < start:
        raise ValueError(f"no idx header of bytes (0 0 8 ...), got {content[:4]!r}")
    shape = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{' x '.join(map(str, shape))} bytes must follow the header, got "
            f"{len(content) - start}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _idx_split(arrays: Sequence[Pixels]) -> ImageSplit:
    images, labels = arrays
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            "images must be (n, height, width) and labels (n,), got the shapes "
            f"{images.shape} and {labels.shape}"
        )
    return ImageSplit(images[:, None], labels.astype(np.int64))


def _five(name: str) -> tuple[str, ...]:
    return tuple(name.format(number) for number in range(1, 6))


_BINARY_10, _BINARY_100 = (partial(_binary_cifar, labels=labels) for labels in (1, 2))
IMAGE_FORMATS = (
    ImageFormat(
        "CIFAR-10 (python)",
        *(_five("data_batch_{}"), ("test_batch",)),
        *(_pickled_cifar, _concatenate),
    ),
    ImageFormat("CIFAR-100 (python)", ("train",), ("test",), _pickled_cifar, _concatenate),
    ImageFormat(
        "CIFAR-10 (binary)",
        *(_five("data_batch_{}.bin"), ("test_batch.bin",)),
        *(_BINARY_10, _concatenate),
    ),
    ImageFormat("CIFAR-100 (binary)", ("train.bin",), ("test.bin",), _BINARY_100, _concatenate),
    ImageFormat(
        "MNIST or Fashion-MNIST (idx)",
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        *(_idx_array, _idx_split),
    ),
)
