"""Read image sets of any known format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from calibrant._core.messages import comma_separated
from calibrant.bench.train.images.archives import IMAGE_FORMATS, read_archive, read_folder
from calibrant.bench.train.images.image_set import ImageSet, ImageSplit, Pixels, make_image_set
from calibrant.bench.train.images.shifts import OOD_KINDS, ood_images

SUFFIXES = {".png", ".jpg", ".jpeg"}
GRAY_MODES = {"1", "L", "LA"}
DEEP_MODES = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits per channel."""
LabelledFile: TypeAlias = tuple[Path, int]


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
    if (place / "wnids.txt").exists():
        return _read_tiny_imagenet(place)
    if (place / "train").is_dir():
        return _read_class_folders(place)
    images = read_folder(place) if place.is_dir() else read_archive(place)
    if images is None:
        titles = comma_separated(known.title for known in IMAGE_FORMATS)
        names = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
        raise ValueError(
            f"{place} must be {titles}, Tiny-ImageNet, or a folder with train/CLASS/*.png and "
            f"test/CLASS/*.png; it contains {', '.join(names[:3]) or 'no known file'}"
        )
    return images


def read_ood_images(images: ImageSet, kind: str) -> Pixels:
    """Return out-of-distribution images of a kind in ``OOD_KINDS``, or from another image set."""
    other = kind if kind in OOD_KINDS else read_images(kind).test.images
    return ood_images(images.test.images, other)


def _digits() -> ImageSet:
    """Read scikit-learn's 1797 digits, a fifth of them as the test split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        message = f"the digits need scikit-learn ({error}): pip install 'calibrant[sklearn]'"
        raise ImportError(message) from error
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    whole = ImageSplit(images[order], digits.target[order].astype(np.int64))
    train = len(images) * 4 // 5
    return make_image_set(whole.subset(slice(train)), whole.subset(slice(train, None)))


def _read_class_folders(folder: Path) -> ImageSet:
    """Read ``train/CLASS/*`` and ``test/CLASS/*``; classes are in the order of their names."""
    test = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if test is None:
        raise ValueError(f"{folder} has neither test nor val: move some images to test/CLASS")
    labels = {name: label for label, name in enumerate(_class_names(folder / "train"))}
    tested = _class_names(test)
    unknown = [name for name in tested if name not in labels]
    if unknown:
        raise ValueError(f"{test / unknown[0]} is a class that train lacks: add or remove it")
    test_labels = {name: labels[name] for name in tested}
    return _read(_files(folder / "train", labels), _files(test, test_labels))


def _read_tiny_imagenet(folder: Path) -> ImageSet:
    """Read ``train/CLASS/images/*``, and ``val`` as the test split; classes as in wnids.txt."""
    labels = {name: label for label, name in enumerate(_text(folder, "wnids.txt").split())}
    train, test = _files(folder / "train", labels, "images"), []
    for number, line in enumerate(_text(folder, "val/val_annotations.txt").splitlines(), 1):
        name, kind = (*line.split("\t"), "", "")[:2]
        if kind not in labels:
            place = f"line {number} of {folder / 'val/val_annotations.txt'}"
            raise ValueError(
                f"{place} must have a file and a class of wnids.txt, got {line[:80]!r}"
            )
        test.append((folder / "val" / "images" / Path(name).name, labels[kind]))
    return _read(train, test)


def _text(folder: Path, name: str) -> str:
    text = (folder / name).read_text() if (folder / name).is_file() else ""
    if not text.strip():
        message = f"{folder} looks like Tiny-ImageNet, but {name} is missing or empty"
        raise ValueError(f"{message}: download it again")
    return text


def _class_names(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())
    if not names:
        raise ValueError(f"{folder} must have a folder of images for each class, got none")
    return names


def _files(folder: Path, labels: Mapping[str, int], below: str = "") -> list[LabelledFile]:
    files: list[LabelledFile] = []
    for name, label in labels.items():
        home = folder / name / below
        paths = [path for path in home.glob("[!.]*") if path.suffix.lower() in SUFFIXES]
        if not paths:
            raise ValueError(f"{home} has no PNG or JPEG files: add some or remove the folder")
        files += ((path, label) for path in sorted(paths))
    return files


def _read(train: list[LabelledFile], test: list[LabelledFile]) -> ImageSet:
    """Decode all files into one array: both splits must agree in size and channels."""
    # On one thread: most of the time is spent in Python, and more threads were slower.
    paths, labels = zip(*train, *test, strict=True)
    whole = ImageSplit(_decode_all(paths), np.array(labels, np.int64))
    return make_image_set(whole.subset(slice(len(train))), whole.subset(slice(len(train), None)))


def _decode_all(paths: tuple[Path, ...]) -> Pixels:
    shape = _decode(paths[0])[0].shape
    images = np.empty((len(paths), *shape), np.uint8)
    all_gray = True
    for target, path in zip(images, paths, strict=True):
        pixels, gray = _decode(path)
        if pixels.shape != shape:
            sizes = f"{pixels.shape[1:]} in {path} and {shape[1:]} in {paths[0]}"
            raise ValueError(f"images must have one size, got {sizes}: resize or crop them first")
        target[:] = pixels
        all_gray = all_gray and gray
    return np.ascontiguousarray(images[:, :1]) if all_gray else images


def _decode(path: Path) -> tuple[Pixels, bool]:
    """Return the pixels ``(3, height, width)`` without transparency, and if they were gray."""
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise ImportError(f"reading {path} needs Pillow: pip install pillow", name="PIL") from error
    try:
        with pillow.open(path) as image:
            if image.mode.startswith(DEEP_MODES):
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel")
            return np.array(image.convert("RGB")).transpose(2, 0, 1), image.mode in GRAY_MODES
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        message = f"{path} must be a PNG or JPEG file with 8 bits per channel, got {error}"
        raise ValueError(f"{message}: replace or remove it") from error
