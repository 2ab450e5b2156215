"""Image sets in folders of PNG or JPEG files. Needs Pillow: ``pip install pillow``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from calibrant.bench.train.images.image_set import ImageSet, ImageSplit, Pixels, make_image_set

SUFFIXES = {".png", ".jpg", ".jpeg"}
GRAY_MODES = {"1", "L", "LA"}
DEEP_MODES = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits per channel."""
LabelledFile: TypeAlias = tuple[Path, int]


def read_class_folders(folder: Path) -> ImageSet:
    """Read ``train/CLASS/*`` and ``test/CLASS/*``, or ``val`` in place of ``test``.

    Classes are numbered in the order of their names. Images have one channel if all of them are
    gray, otherwise three.
    """
    test = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if test is None:
        raise ValueError(
            f"{folder} has a folder train, but neither test nor val: move some images of each "
            "class to test/CLASS"
        )
    labels = {name: label for label, name in enumerate(_class_names(folder / "train"))}
    tested = _class_names(test)
    unknown = [name for name in tested if name not in labels]
    if unknown:
        raise ValueError(
            f"{test / unknown[0]} is a class that {folder / 'train'} lacks: add training images or "
            "remove it"
        )
    test_labels = {name: labels[name] for name in tested}
    return _read(_files(folder / "train", labels), _files(test, test_labels))


def read_tiny_imagenet(folder: Path) -> ImageSet:
    """Read ``train/CLASS/images/*``, and ``val`` as the test split.

    Classes are numbered as in ``wnids.txt``.
    """
    labels = {name: label for label, name in enumerate(_text(folder, "wnids.txt").split())}
    train, test = _files(folder / "train", labels, "images"), []
    for number, line in enumerate(_text(folder, "val/val_annotations.txt").splitlines(), 1):
        name, kind = (*line.split("\t"), "", "")[:2]
        if kind not in labels:
            raise ValueError(
                f"line {number} of {folder / 'val/val_annotations.txt'} must have a file and a "
                f"class of wnids.txt, got {line[:80]!r}: download Tiny-ImageNet again"
            )
        test.append((folder / "val" / "images" / Path(name).name, labels[kind]))
    return _read(train, test)


def _text(folder: Path, name: str) -> str:
    text = (folder / name).read_text() if (folder / name).is_file() else ""
    if not text.strip():
        raise ValueError(
            f"{folder} looks like Tiny-ImageNet, but {name} is missing or empty: download it again"
        )
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
            raise ValueError(
                f"images must have one size, got (height, width) {pixels.shape[1:]} in {path} and "
                f"{shape[1:]} in {paths[0]}: resize or crop them first"
            )
        target[:] = pixels
        all_gray = all_gray and gray
    return np.ascontiguousarray(images[:, :1]) if all_gray else images


def _decode(path: Path) -> tuple[Pixels, bool]:
    """Return the pixels ``(3, height, width)`` without transparency, and if they were gray."""
    pillow = _import_pillow(path)
    try:
        with pillow.open(path) as image:
            if image.mode.startswith(DEEP_MODES):
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel")
            return np.array(image.convert("RGB")).transpose(2, 0, 1), image.mode in GRAY_MODES
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ValueError(
            f"{path} must be a PNG or JPEG file with 8 bits per channel, got {error}: replace or "
            "remove it"
        ) from error


def _import_pillow(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading {path} needs Pillow: pip install pillow", name="PIL") from error
    return Image
