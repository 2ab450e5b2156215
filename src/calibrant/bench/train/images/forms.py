"""The forms in which image sets are published as a few files of many images each."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from calibrant.bench.train.images.sets import Bytes, Part

AGAIN = "fetch it again"
SIDE = 32
PIXELS = 3 * SIDE * SIDE
"""Bytes of an image of CIFAR."""


class File(NamedTuple):
    """What a file holds, and its name for the errors."""

    name: str
    content: bytes


Reader: TypeAlias = Callable[[Sequence[File]], Part]


class Form(NamedTuple):
    """Files of the training and the test set in one published form, and their reader."""

    title: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Reader

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its files."""
        return self.train + self.test


def _part(name: str, images: Bytes, labels: Any) -> Part:
    """Check that there is a label for each image."""
    try:
        found = np.asarray(labels)
    except ValueError:  # lists of different lengths
        found = np.empty(0, object)
    if found.dtype.kind not in "iu" or found.shape != (len(images),):
        raise ValueError(
            f"{name} has {len(images)} images, so as many whole numbers are wanted as labels, got "
            f"{found.dtype} of shape {found.shape}: {AGAIN}"
        )
    return Part(images, found.astype(np.int64))


def _joined(batches: Sequence[Part]) -> Part:
    return Part(*(np.concatenate(values) for values in zip(*batches, strict=True)))


class _Plain(pickle.Unpickler):
    """Refuses everything but what an archive of arrays needs."""

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


def unpickle_arrays(file: File) -> dict[str, Any]:
    """Load a pickle that may hold nothing but arrays, lists and numbers."""
    try:
        found = _Plain(io.BytesIO(file.content), encoding="bytes").load()
        # the keys are bytes if Python 2 wrote them
        return {key.decode() if isinstance(key, bytes) else key: found[key] for key in found}
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(
            f"{file.name} is not a pickle of arrays alone, as wanted ({error}): {AGAIN}, from a "
            "source that you trust"
        ) from error


def _table(name: str, values: Any, dtype: type, width: int) -> Any:
    """Check that the values are an array ``(n, width)`` of this type."""
    wanted = f"an array of {np.dtype(dtype)} of shape (n, {width})"
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{name} must hold {wanted}, got {type(values).__name__}: {AGAIN}")
    if values.dtype != dtype or values.shape[1:] != (width,) or not len(values):
        raise ValueError(
            f"{name} must hold {wanted}, got {values.dtype} of shape {values.shape}: {AGAIN}"
        )
    return values


def _pickled_cifar(files: Sequence[File]) -> Part:
    return _joined([_pickled_batch(file) for file in files])


def _pickled_batch(file: File) -> Part:
    found = unpickle_arrays(file)
    rows = _table(file.name, found.get("data"), np.uint8, PIXELS)
    labels = found.get("fine_labels", found.get("labels"))
    return _part(file.name, rows.reshape(-1, 3, SIDE, SIDE), labels)


def _binary_cifar(files: Sequence[File], labels: int) -> Part:
    """Images one after another, each with ``labels`` bytes ahead of which the last counts."""
    return _joined([_binary_batch(file, labels) for file in files])


def _binary_batch(file: File, labels: int) -> Part:
    record = labels + PIXELS
    if len(file.content) == 0 or len(file.content) % record:
        raise ValueError(
            f"{file.name} has {len(file.content)} bytes, wanted is a multiple of {record} (labels "
            f"and {PIXELS} pixels of an image): {AGAIN}"
        )
    rows = np.frombuffer(file.content, np.uint8).reshape(-1, record)
    return _part(file.name, rows[:, labels:].reshape(-1, 3, SIDE, SIDE), rows[:, labels - 1])


def _idx(files: Sequence[File]) -> Part:
    images, labels = (_idx_array(file, axes) for file, axes in zip(files, (3, 1), strict=True))
    return _part(files[1].name, images[:, None], labels)


def _idx_array(file: File, axes: int) -> Bytes:
    """An array of bytes after its header: 0, 0, 8 for bytes, ``axes``, and their lengths."""
    start = 4 + 4 * axes
    if len(file.content) < start or file.content[:4] != bytes([0, 0, 8, axes]):
        raise ValueError(
            f"{file.name} must begin with 0 0 8 {axes} (bytes in {axes} axes) and {axes} lengths, "
            f"got {' '.join(map(str, file.content[:4]))}: {AGAIN}"
        )
    shape = np.frombuffer(file.content, ">u4", axes, offset=4).tolist()
    if len(file.content) - start != math.prod(shape):
        raise ValueError(
            f"{file.name} says {' x '.join(map(str, shape))} bytes, but {len(file.content) - start}"
            f" follow: {AGAIN}"
        )
    return np.frombuffer(file.content, np.uint8, offset=start).reshape(shape).copy()


def _five(name: str) -> tuple[str, ...]:
    return tuple(name.format(number) for number in range(1, 6))


FORMS = (
    Form("CIFAR-10 (python)", _five("data_batch_{}"), ("test_batch",), _pickled_cifar),
    Form("CIFAR-100 (python)", ("train",), ("test",), _pickled_cifar),
    Form(
        "CIFAR-10 (binary)",
        _five("data_batch_{}.bin"),
        ("test_batch.bin",),
        partial(_binary_cifar, labels=1),
    ),
    Form("CIFAR-100 (binary)", ("train.bin",), ("test.bin",), partial(_binary_cifar, labels=2)),
    Form(
        "MNIST or Fashion-MNIST (idx)",
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        _idx,
    ),
)
NAMES = {name for form in FORMS for name in form.names}
