"""Images with their labels, and the split that every run shares."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Part(NamedTuple):
    """Images ``(n, channels, height, width)`` as bytes, and labels ``(n,)``."""

    images: Bytes
    labels: NDArray[np.int64]

    def take(self, which: NDArray[np.int64] | slice) -> Part:
        """Some of the images."""
        return Part(self.images[which], self.labels[which])


class ImageSet(NamedTuple):
    """A data set for training.

    Attributes
    ----------
    train, test : Part
    classes : int
    digest : str
        SHA-256 over all images and labels, so that a result names its data.
    """

    train: Part
    test: Part
    classes: int
    digest: str


class Parts(NamedTuple):
    """What a run trains on, chooses its checkpoint on, and is measured on."""

    train: Part
    val: Part
    test: Part


def image_set(train: Part, test: Part) -> ImageSet:
    """Put two parts together and name them by their content.

    Examples
    --------
    >>> train = Part(np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 1, 2, 1]))
    >>> found = image_set(train, train.take(slice(2)))
    >>> found.classes, found.digest[:8]
    (3, '4f32462f')
    """
    for name, part in (("train", train), ("test", test)):
        check_images(part.images, f"{name} images")
        if len(part.images) == 0 or part.labels.shape != (len(part.images),):
            raise ValueError(
                f"{name} has {len(part.images)} images and labels of shape {part.labels.shape}: "
                "at least one image and one label for each are wanted"
            )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"train images are {train.images.shape[1:]} and test images {test.images.shape[1:]} "
            "(channels, height, width): make both the same"
        )
    classes = int(train.labels.max()) + 1
    low, high = min(map(_lowest, (train, test))), int(test.labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels from 0 to {classes - 1}, the largest of train, are wanted, got {low} to "
            f"{max(high, classes - 1)}: number the classes from 0 and train on all of them"
        )
    return ImageSet(train, test, classes, digest_of(train, test))


def _lowest(part: Part) -> int:
    return int(part.labels.min())


def digest_of(*parts: Part) -> str:
    """SHA-256 over images and labels of some parts."""
    digest = hashlib.sha256()
    for part in parts:
        for values in part:
            digest.update(np.ascontiguousarray(values).data.cast("B"))
    return digest.hexdigest()


def check_images(images: Bytes, name: str = "images") -> None:
    """Raise unless the images are bytes of shape ``(n, channels, height, width)``."""
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(
            f"{name} must be uint8 of shape (n, channels, height, width), got {images.dtype} of "
            f"shape {images.shape}: scale to 0 ... 255 and reshape"
        )


def parts(images: ImageSet, held_out: float = 0.1, seed: int = 0) -> Parts:
    """Hold out some of the training images, the same share of every class.

    The split depends on ``seed`` alone, not on that of a run, so that all runs share it.

    Examples
    --------
    >>> train = Part(np.zeros((40, 1, 2, 2), np.uint8), np.arange(40) % 2)
    >>> found = parts(image_set(train, train))
    >>> len(found.train.labels), np.bincount(found.val.labels)
    (36, array([2, 2]))
    """
    rng = np.random.default_rng(seed)
    held = []
    for name in range(images.classes):
        members = rng.permutation(np.flatnonzero(images.train.labels == name))
        held.append(members[: round(held_out * len(members))])
    val = np.sort(np.concatenate(held))
    rest = np.setdiff1d(np.arange(len(images.train.labels)), val)
    return Parts(images.train.take(rest), images.train.take(val), images.test)


def cut(whole: Part, one_in: int) -> ImageSet:
    """Take one in so many images for the test: the last ones."""
    at = len(whole.labels) * (one_in - 1) // one_in
    return image_set(whole.take(slice(at)), whole.take(slice(at, None)))
