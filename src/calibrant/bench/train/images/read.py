"""Reading image sets of any known format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from calibrant.bench.train.images.archives import read_archive, read_folder
from calibrant.bench.train.images.formats import IMAGE_FORMATS
from calibrant.bench.train.images.image_set import ImageSet, ImageSplit, Pixels, make_image_set
from calibrant.bench.train.images.picture_folders import read_class_folders, read_tiny_imagenet
from calibrant.bench.train.images.shifts import OOD_KINDS, ood_images


def read_images(path: str | Path | None = None) -> ImageSet:
    """Read an image set.

    Parameters
    ----------
    path : path, optional
        By default scikit-learn's digits. Otherwise one of:

        - CIFAR-10 or CIFAR-100, python or binary: the ``.tar.gz``, its folder, or the parent of
          that;
        - MNIST or Fashion-MNIST: a folder or tar archive of the four idx files, plain or ``.gz``;
        - the folder of Tiny-ImageNet, whose validation images become the test split;
        - a folder with ``train/CLASS/*.png`` and ``test/CLASS/*.png`` (or ``val``; also ``.jpg``,
          ``.jpeg``), images of one size. One channel if all are gray, otherwise three.

        Pickles may contain only arrays, lists and numbers. Archives are not unpacked to disk.

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
        raise FileNotFoundError(f"{place} does not exist; name an archive or a folder of images")
    images = _read_any_folder(place) if place.is_dir() else read_archive(place)
    if images is None:
        names = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
        raise ValueError(
            f"{place} must be {', '.join(known.title for known in IMAGE_FORMATS)}, Tiny-ImageNet, "
            "or a folder with train/CLASS/*.png and test/CLASS/*.png; it contains "
            f"{', '.join(names[:3]) or 'no known file'}"
        )
    return images


def _read_any_folder(folder: Path) -> ImageSet | None:
    if (folder / "wnids.txt").exists():
        return read_tiny_imagenet(folder)
    if (folder / "train").is_dir():
        return read_class_folders(folder)
    return read_folder(folder)


def read_ood_images(images: ImageSet, kind: str) -> Pixels:
    """Return out-of-distribution images of a kind in ``OOD_KINDS``, or from another image set."""
    other = kind if kind in OOD_KINDS else read_images(kind).test.images
    return ood_images(images.test.images, other)


def _digits() -> ImageSet:
    """Return scikit-learn's 1797 digits, a fifth of them as the test split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            f"the digits need scikit-learn ({error}): pip install 'calibrant[sklearn]', or name "
            "other images"
        ) from error
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    whole = ImageSplit(images[order], digits.target[order].astype(np.int64))
    train = len(images) * 4 // 5
    return make_image_set(whole.subset(slice(train)), whole.subset(slice(train, None)))
