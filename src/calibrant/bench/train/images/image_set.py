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
    """Check two splits against each other and combine them.

    Examples
    --------
    >>> train = ImageSplit(np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 1, 2, 1]))
    >>> images = make_image_set(train, train.subset(slice(2)))
    >>> images.classes, images.fingerprint[:8]
    (3, '4f32462f')
    """
    for name, (images, labels) in (("train", train), ("test", test)):
        check_images(images, f"{name} images")
        if len(images) == 0 or labels.shape != (len(images),):
            raise ValueError(
                f"{name} must have at least one image and a label for each, got {len(images)} "
                f"images and labels of shape {labels.shape}"
            )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            "train and test images must have the same (channels, height, width), got "
            f"{train.images.shape[1:]} and {test.images.shape[1:]}"
        )
    classes = int(train.labels.max()) + 1
    labels = np.concatenate([train.labels, test.labels])
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"labels must be from 0 to {classes - 1}, the largest in train, got {labels.min()} to "
            f"{labels.max()}"
        )
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
        raise ValueError(
            f"{name} must be uint8 of shape (n, channels, height, width), got {images.dtype} of "
            f"shape {images.shape}: scale to 0 ... 255 and reshape"
        )


def hold_out(images: ImageSet, share: float = 0.1, seed: int = 0) -> TrainingSplits:
    """Hold out the same share of every class of the training images for validation.

    The seed is not that of a run, so that all runs share the split.

    Examples
    --------
    >>> train = ImageSplit(np.zeros((40, 1, 2, 2), np.uint8), np.arange(40) % 2)
    >>> splits = hold_out(make_image_set(train, train))
    >>> len(splits.train.labels), np.bincount(splits.val.labels)
    (36, array([2, 2]))
    """
    train = images.train
    val = stratified_share(train.labels, share, seed)
    rest = np.setdiff1d(np.arange(len(train.labels)), val)
    return TrainingSplits(train.subset(rest), train.subset(val), images.test)
