"""Image sets as arrays: readers for the usual forms, a split that all runs share, and shifts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from calibrant.bench.train.images.archives import read_file, read_folder
from calibrant.bench.train.images.forms import FORMS
from calibrant.bench.train.images.pictures import read_class_folders, read_tiny_imagenet
from calibrant.bench.train.images.sets import ImageSet, Part, Parts, cut, image_set, parts
from calibrant.bench.train.images.shifts import CORRUPTIONS, OOD_KINDS, corrupted, ood_images

__all__ = [
    "CORRUPTIONS",
    "OOD_KINDS",
    "ImageSet",
    "Part",
    "Parts",
    "corrupted",
    "image_set",
    "ood_images",
    "parts",
    "read_images",
]


def read_images(path: str | Path | None = None) -> ImageSet:
    """Read an image set, whichever of the known forms it has.

    Parameters
    ----------
    path : path, optional
        Scikit-learn's digits by default, or one of these:

        - CIFAR-10 or CIFAR-100, python or binary: the ``.tar.gz``, its folder, or the one above;
        - MNIST or Fashion-MNIST: a folder (or tar archive) of the four idx files, plain or
          ``.gz``;
        - the folder of Tiny-ImageNet, with its validation images as the test;
        - a folder with ``train/CLASS/*.png`` and ``test/CLASS/*.png`` (or ``val``; also ``.jpg``,
          ``.jpeg``), images of one size. One channel if all are gray, else three.

        Pickles can make nothing but arrays, lists and numbers. Archives are not unpacked to disk.

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
    found = _folder(place) if place.is_dir() else read_file(place)
    if found is None:
        raise ValueError(
            f"{place} is none of the known forms ({_contents(place)}): wanted are "
            f"{', '.join(form.title for form in FORMS)}, Tiny-ImageNet, or a folder with "
            "train/CLASS/*.png and test/CLASS/*.png"
        )
    return found


def _folder(place: Path) -> ImageSet | None:
    if (place / "wnids.txt").exists():
        return read_tiny_imagenet(place)
    if (place / "train").is_dir():
        return read_class_folders(place)
    return read_folder(place)


def _contents(place: Path) -> str:
    if place.is_file():
        return "no file of theirs is in it"
    names = sorted(path.name for path in place.iterdir())
    more = ", ..." if len(names) > 3 else ""
    return f"it holds {', '.join(names[:3])}{more}" if names else "it is empty"


def _digits() -> ImageSet:
    """Scikit-learn's 1797 digits, a fifth of them for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            f"the digits come with scikit-learn ({error}): pip install 'calibrant[sklearn]', or "
            "name other images"
        ) from error
    found = load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    return cut(Part(images[order], found.target[order].astype(np.int64)), one_in=5)
