"""Image sets: CIFAR, MNIST and folders of PNG or JPEG files, and the validation split."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrant._core.messages import comma_separated
from calibrant.calibrators.maccal.frozen import _stratified_share

Pixels = NDArray[np.uint8]
SUFFIXES = {".png", ".jpg", ".jpeg"}
GRAY_MODES = {"1", "L", "LA"}
DEEP_MODES = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits per channel."""
LabelledFile: TypeAlias = tuple[Path, int]


class ImageSplit(NamedTuple):
    """Images ``(n, channels, height, width)`` as bytes, and labels ``(n,)``."""

    images: Pixels
    labels: NDArray[np.int64]

    def subset(self, index: NDArray[np.int64] | slice) -> ImageSplit:
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
    val = _stratified_share(train.labels, share, seed)
    rest = np.setdiff1d(np.arange(len(train.labels)), val)
    return TrainingSplits(train.subset(rest), train.subset(val), images.test)


def read_images(path: str | Path | None = None) -> ImageSet:
    """Read an image set, by default scikit-learn's digits.

    Otherwise ``path`` is the folder of CIFAR-10 or CIFAR-100 (python), of the four idx files of
    MNIST or Fashion-MNIST, plain or ``.gz``, or one with ``train/CLASS/*.png`` and
    ``test/CLASS/*.png`` (or ``val``; also ``.jpg``, ``.jpeg``) with images of one size, in one
    channel if all are gray. Pickles may contain only arrays, lists and numbers.
    """
    if path is None:
        return _digits()
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{place} does not exist; name a folder of images")
    return _read_class_folders(place) if (place / "train").is_dir() else _read_files(place)


def _digits() -> ImageSet:
    """Read scikit-learn's 1797 digits, a fifth of them as the test split."""
    from sklearn.datasets import load_digits

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
    trained, tested = (
        sorted(path.name for path in home.glob("[!.]*") if path.is_dir())
        for home in (folder / "train", test)
    )
    labels = {name: label for label, name in enumerate(trained)}
    unknown = [name for name in tested if name not in labels]
    if unknown:
        raise ValueError(f"{test / unknown[0]} is a class that train lacks: add or remove it")
    test_labels = {name: labels[name] for name in tested}
    return _read_pictures(_files(folder / "train", labels), _files(test, test_labels))


def _files(folder: Path, labels: Mapping[str, int]) -> list[LabelledFile]:
    files: list[LabelledFile] = []
    for name, label in labels.items():
        paths = [path for path in (folder / name).glob("[!.]*") if path.suffix.lower() in SUFFIXES]
        if not paths:
            raise ValueError(f"{folder / name} has no PNG or JPEG files: add some or remove it")
        files += ((path, label) for path in sorted(paths))
    if not files:
        raise ValueError(f"{folder} must have a folder of images for each class, got none")
    return files


def _read_pictures(train: list[LabelledFile], test: list[LabelledFile]) -> ImageSet:
    """Decode all files into one array: both splits must agree in size and channels."""
    paths, labels = zip(*train, *test, strict=True)
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
    images = np.ascontiguousarray(images[:, :1]) if all_gray else images
    whole = ImageSplit(images, np.array(labels, np.int64))
    return make_image_set(whole.subset(slice(len(train))), whole.subset(slice(len(train), None)))


def _decode(path: Path) -> tuple[Pixels, bool]:
    """Return the pixels ``(3, height, width)`` without transparency, and if they were gray."""
    from PIL import Image as pillow

    try:
        with pillow.open(path) as image:
            if image.mode.startswith(DEEP_MODES):
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel")
            return np.array(image.convert("RGB")).transpose(2, 0, 1), image.mode in GRAY_MODES
    except (OSError, SyntaxError, ValueError) as error:
        message = f"{path} must be a PNG or JPEG file with 8 bits per channel, got {error}"
        raise ValueError(f"{message}: replace or remove it") from error


# CIFAR and MNIST

PIXELS = 3 * 32 * 32
"""Bytes of an image of CIFAR."""
RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
"""The function that pickles of arrays call; its module depends on the version of numpy."""


class _ArrayUnpickler(pickle.Unpickler):
    """Refuses everything but what a pickle of arrays needs."""

    ALLOWED: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in an image set")
        return RECONSTRUCT if name == "_reconstruct" else super().find_class(module, name)


def _pickled_cifar(content: bytes) -> ImageSplit:
    try:
        loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        # the keys are bytes if Python 2 wrote them
        arrays = {k.decode() if isinstance(k, bytes) else k: loaded[k] for k in loaded}
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(f"not a pickle of arrays only: {error}") from error
    labels = np.array(arrays.get("fine_labels", arrays.get("labels")))
    pixels = np.asarray(arrays.get("data"))
    if pixels.shape != (labels.size, PIXELS) or labels.dtype.kind not in "iu":
        got = f"{pixels.shape} and {labels.size} labels of {labels.dtype}"
        raise ValueError(f"{PIXELS} pixels and a whole label are needed for each image, got {got}")
    return ImageSplit(pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64))


def _concatenate(batches: Sequence[ImageSplit]) -> ImageSplit:
    return ImageSplit(*map(np.concatenate, zip(*batches, strict=True)))


def _idx_array(content: bytes) -> Pixels:
    """Parse bytes after a header: 0, 0, 8 (for bytes), the number of axes, and their lengths."""
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * axes
    if not axes or len(content) < start:
        raise ValueError(f"no idx header of bytes (0 0 8 ...), got {content[:4]!r}")
    shape = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    size = len(content) - start
    if size != math.prod(shape):
        raise ValueError(f"{' x '.join(map(str, shape))} bytes must follow the header, got {size}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _idx_split(arrays: Sequence[Pixels]) -> ImageSplit:
    return ImageSplit(arrays[0][:, None], arrays[1].astype(np.int64))


class ImageFormat(NamedTuple):
    """A published format: file names of its splits, a parser of a file, and a join."""

    title: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Callable[[bytes], Any]
    combine: Callable[[Sequence[Any]], ImageSplit]


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
IMAGE_FORMATS = (
    ImageFormat("CIFAR-10 (python)", _BATCHES, ("test_batch",), _pickled_cifar, _concatenate),
    ImageFormat("CIFAR-100 (python)", ("train",), ("test",), _pickled_cifar, _concatenate),
    ImageFormat(
        "MNIST or Fashion-MNIST (idx)",
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        *(_idx_array, _idx_split),
    ),
)


def _read_files(folder: Path) -> ImageSet:
    """Read the files of a published format, each plain or as ``.gz``."""
    names = {path.name.removesuffix(".gz"): path for path in sorted(folder.iterdir(), reverse=True)}
    complete = [f for f in IMAGE_FORMATS if names.keys() >= {*f.train, *f.test}]
    if not complete:
        titles = comma_separated(known.title for known in IMAGE_FORMATS)
        raise ValueError(
            f"{folder} must have all files of {titles}, or train/CLASS/*.png and test/CLASS/*.png, "
            f"got {comma_separated(sorted(names)[:3])}"
        )
    kind, splits = complete[0], []
    for split in (kind.train, kind.test):
        parsed = []
        for name in split:
            content = names[name].read_bytes()
            try:
                unpacked = gzip.decompress(content) if names[name].suffix == ".gz" else content
                parsed.append(kind.parse(unpacked))
            except (OSError, EOFError, zlib.error, ValueError) as error:
                problem = f"{names[name]} is damaged ({error})"
                raise ValueError(f"{problem}: download it again, from a trusted site") from error
        splits.append(kind.combine(parsed))
    return make_image_set(*splits)
