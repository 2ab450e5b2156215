"""Labelled images, and the validation split that all runs share."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant.retrain.features import stratified_share

Pixels = NDArray[np.uint8]


class ImageSplit(NamedTuple):
    """Images ``(n, channels, height, width)`` as bytes, and labels ``(n,)``."""

    images: Pixels
    labels: NDArray[np.int64]

    def subset(self, index: NDArray[np.int64] | slice) -> ImageSplit:
        """Return the examples at an index."""
        return ImageSplit(self.images[index], self.labels[index])


class ImageSet(NamedTuple):
    """An image set as published; results name it by its fingerprint."""

    train: ImageSplit
    test: ImageSplit
    classes: int
    fingerprint: str


class TrainingSplits(NamedTuple):
    """Splits to train on, to choose the checkpoint by, and to measure on."""

    train: ImageSplit
    val: ImageSplit
    test: ImageSplit


def make_image_set(train: ImageSplit, test: ImageSplit) -> ImageSet:
    """Check two splits against each other and combine them."""
    for name, (images, labels) in (("train", train), ("test", test)):
        check_images(images, f"{name} images")
        if len(images) == 0 or labels.shape != (len(images),):
            got = f"{len(images)} images and labels of shape {labels.shape}"
            raise ValueError(f"{name} must have some images and a label for each, got {got}")
    shape, other = train.images.shape[1:], test.images.shape[1:]
    if shape != other:
        raise ValueError(f"train and test images must have the same shape, got {shape} and {other}")
    classes = int(train.labels.max()) + 1
    labels = np.concatenate([train.labels, test.labels])
    if labels.min() < 0 or labels.max() >= classes:
        got = f"{labels.min()} to {labels.max()}"
        raise ValueError(f"labels must be from 0 to {classes - 1}, the largest in train, got {got}")
    return ImageSet(train, test, classes, fingerprint(train, test))


def fingerprint(*splits: ImageSplit) -> str:
    """Return the SHA-256 of the images and labels of some splits."""
    digest = hashlib.sha256()
    for split in splits:
        for values in split:
            digest.update(np.ascontiguousarray(values).data.cast("B"))
    return digest.hexdigest()


def check_images(images: Pixels, name: str = "images") -> None:
    """Raise unless the images are bytes of shape ``(n, channels, height, width)``."""
    if images.dtype != np.uint8 or images.ndim != 4:
        got = f"{images.dtype} of shape {images.shape}: scale to 0 ... 255 and reshape"
        raise ValueError(f"{name} must be uint8 (n, channels, height, width), got {got}")


def hold_out(images: ImageSet, share: float = 0.1, seed: int = 0) -> TrainingSplits:
    """Hold out the same share of every class of the training images for validation.

    The seed is not that of a run, so that all runs share the split.
    """
    train = images.train
    val = stratified_share(train.labels, share, seed)
    rest = np.setdiff1d(np.arange(len(train.labels)), val)
    return TrainingSplits(train.subset(rest), train.subset(val), images.test)
