"""Image sets that are folders of PNG or JPEG files. Needs Pillow: ``pip install pillow``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from calibrant.bench.train.images.sets import Bytes, ImageSet, Part, image_set

SUFFIXES = {".png", ".jpg", ".jpeg"}
GRAY = {"1", "L", "LA"}
DEEP = ("I", "F")
"""Beginnings of Pillow's names for more than 8 bits a channel."""

Labelled: TypeAlias = list[tuple[Path, int]]


class Picture(NamedTuple):
    """Pixels ``(height, width, 3)``, and whether the file was gray."""

    pixels: Bytes
    gray: bool


def picture(file: Path | IO[bytes], name: str | Path) -> Picture:
    """Decode one file; transparency is dropped. ``name`` is for the errors."""
    pillow = _pillow(name)
    try:
        with pillow.open(file) as opened:
            if opened.mode.startswith(DEEP):
                raise ValueError(f"mode {opened.mode} has more than 8 bits a channel")
            return Picture(np.array(opened.convert("RGB")), opened.mode in GRAY)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ValueError(
            f"{name} cannot be read as an image ({error}): a whole PNG or JPEG file with 8 "
            "bits a channel is wanted; replace it or take it out"
        ) from error


def _pillow(name: str | Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading {name} needs Pillow: pip install pillow", name="PIL") from error
    return Image


def read_class_folders(folder: Path) -> ImageSet:
    """``train/CLASS/*`` and ``test/CLASS/*``, or ``val`` in place of ``test``.

    Classes are numbered in the order of their names. One channel if every image is gray, else
    three.
    """
    others = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
    if not others:
        raise ValueError(
            f"{folder} has a folder train, but neither test nor val: move some images of each "
            "class to test/CLASS"
        )
    names = _class_names(folder / "train")
    unknown = sorted(set(_class_names(others[0])) - set(names))
    if unknown:
        raise ValueError(
            f"{others[0] / unknown[0]} is a class that {folder / 'train'} lacks ({len(names)} "
            "classes are there): give it images for training or take it out"
        )
    return _read(
        *(
            [
                (path, label)
                for label, name in enumerate(names)
                if (part / name).is_dir()
                for path in _files(part / name)
            ]
            for part in (folder / "train", others[0])
        )
    )


def read_tiny_imagenet(folder: Path) -> ImageSet:
    """``train/CLASS/images/*``, and ``val`` as the test; classes in the order of ``wnids.txt``."""
    labels = {name: label for label, name in enumerate(_text(folder, "wnids.txt").split())}
    train = [
        (path, label)
        for name, label in labels.items()
        for path in _files(folder / "train" / name / "images")
    ]
    test = []
    for number, line in enumerate(_text(folder, "val/val_annotations.txt").splitlines(), 1):
        name, kind = (*line.split("\t"), "", "")[:2]
        if kind not in labels:
            raise ValueError(
                f"line {number} of {folder / 'val/val_annotations.txt'} must give a file and a "
                f"class of wnids.txt, got {line[:80]!r}: fetch Tiny-ImageNet again"
            )
        test.append((folder / "val" / "images" / Path(name).name, labels[kind]))
    return _read(train, test)


def _text(folder: Path, name: str) -> str:
    found = (folder / name).read_text() if (folder / name).is_file() else ""
    if not found.strip():
        raise ValueError(
            f"{folder} looks like Tiny-ImageNet, but {name} is missing or empty: fetch it again"
        )
    return found


def _class_names(folder: Path) -> list[str]:
    found = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not found:
        raise ValueError(
            f"{folder} has no folders: one for each class is wanted, with its images inside"
        )
    return found


def _files(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("[!.]*") if path.suffix.lower() in SUFFIXES]
    if not found:
        raise ValueError(
            f"{folder} holds no image: PNG or JPEG files are wanted; fill the folder or remove it"
        )
    return sorted(found)


def _read(train: Labelled, test: Labelled) -> ImageSet:
    """Decode both lists into one array: they must agree in size and number of channels."""
    # One thread: with two and four, decoding 10,000 JPEGs of 64 x 64 took longer (2.2, 2.5
    # seconds and 2.1 for one), as most of the time is spent in Python.
    listed = [*train, *test]
    images = _stack([path for path, _ in listed])
    whole = Part(images, np.array([label for _, label in listed], np.int64))
    return image_set(whole.take(slice(len(train))), whole.take(slice(len(train), None)))


def _stack(paths: Sequence[Path]) -> Bytes:
    size = picture(paths[0], paths[0]).pixels.shape
    images = np.empty((len(paths), 3, *size[:2]), np.uint8)
    gray = True
    for target, path in zip(images, paths, strict=True):
        found = picture(path, path)
        if found.pixels.shape != size:
            raise ValueError(
                f"{path} is {_size(found.pixels.shape)} pixels (height x width), but {paths[0]} is "
                f"{_size(size)}: images of one size are wanted; resize or crop them first"
            )
        target[:] = found.pixels.transpose(2, 0, 1)
        gray = gray and found.gray
    return np.ascontiguousarray(images[:, :1]) if gray else images


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} x {shape[1]}"
