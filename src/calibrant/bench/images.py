"""Image sets as arrays: readers for the usual archives, and a split that every run shares."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Part(NamedTuple):
    """Images ``(n, channels, height, width)`` as bytes, and labels ``(n,)``."""

    images: Bytes
    labels: NDArray[np.int64]

    def take(self, which: NDArray[np.int64]) -> Part:
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
    """Put two parts together and name them by their content."""
    digest = hashlib.sha256()
    for part in (train, test):
        for values in part:
            digest.update(np.ascontiguousarray(values).tobytes())
    return ImageSet(train, test, int(train.labels.max()) + 1, digest.hexdigest())


def parts(images: ImageSet, held_out: float = 0.1, seed: int = 0) -> Parts:
    """Hold out some of the training images, the same share of every class.

    The split depends on ``seed`` alone, not on that of a run, so that all runs share it.
    """
    rng = np.random.default_rng(seed)
    held = []
    for name in range(images.classes):
        members = rng.permutation(np.flatnonzero(images.train.labels == name))
        held.append(members[: round(held_out * len(members))])
    val = np.sort(np.concatenate(held))
    rest = np.setdiff1d(np.arange(len(images.train.labels)), val)
    return Parts(images.train.take(rest), images.train.take(val), images.test)


def read_images(path: str | Path | None = None) -> ImageSet:
    """Read an image set, whichever of the known forms it has.

    Parameters
    ----------
    path : path, optional
        A CIFAR-10 or CIFAR-100 archive or folder (python, binary or PNG form); scikit-learn's
        digits by default.

    Examples
    --------
    >>> digits = read_images()
    >>> digits.train.images.shape, digits.classes
    ((1437, 1, 8, 8), 10)
    """
    if path is None:
        return _digits()
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"there is no {place}; name an archive or a folder of images")
    for matches, read in READERS:
        if matches(place):
            return read(place)
    raise ValueError(f"{place} is none of the known forms: CIFAR archives or folders")


def _digits() -> ImageSet:
    """Scikit-learn's 1797 digits, a fifth of them for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    whole = Part(images[order], found.target[order].astype(np.int64))
    cut = len(order) * 4 // 5
    return image_set(
        *(whole.take(np.arange(len(order))[s]) for s in (slice(cut), slice(cut, None)))
    )


def _stacked_pngs(folder: Path) -> ImageSet:
    """CIFAR-10 as PNG files, each row of pixels an image, with labels in two JSON files."""
    train = Part(
        np.concatenate([_stacked(path) for path in sorted(folder.glob("data_batch_*.png"))]),
        np.array(json.loads((folder / "train_lables.json").read_text()), np.int64),
    )
    labels = np.array(json.loads((folder / "test_lables.json").read_text()), np.int64)
    return image_set(train, Part(_stacked(folder / "test_batch.png"), labels))


def _stacked(path: Path) -> Bytes:
    from PIL import Image

    rows = np.asarray(Image.open(path).convert("RGB"))
    return np.ascontiguousarray(rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _python_cifar(folder: Path) -> ImageSet:
    """CIFAR as pickled batches; only bytes and lists of numbers are unpickled."""
    names = sorted(folder.glob("data_batch_*")) or [folder / "train"]
    test = folder / ("test_batch" if (folder / "test_batch").exists() else "test")
    train = [_pickled(path) for path in names]
    whole = Part(*(np.concatenate(values) for values in zip(*train, strict=True)))
    return image_set(whole, _pickled(test))


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


def _pickled(path: Path) -> Part:
    with path.open("rb") as file:
        found = _Plain(file, encoding="bytes").load()
    labels = found[b"fine_labels"] if b"fine_labels" in found else found[b"labels"]
    return Part(found[b"data"].reshape(-1, 3, 32, 32), np.asarray(labels, np.int64))


def _has(name: str) -> Callable[[Path], bool]:
    return lambda place: place.is_dir() and (place / name).exists()


READERS: list[tuple[Callable[[Path], bool], Callable[[Path], ImageSet]]] = [
    (_has("test_batch.png"), _stacked_pngs),
    (_has("test_batch"), _python_cifar),
    (_has("meta"), _python_cifar),
]
