"""Read image sets: CIFAR and MNIST from folders or archives, and folders of PNG or JPEG files.

Archives are read in memory. Only members with known names are read, and member paths are never
used as paths.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrant._core.messages import comma_separated
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
    images = _read_known_folder(place) if place.is_dir() else _read_files(place, _in_archive(place))
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
        message = f"the digits need scikit-learn ({error}): pip install 'calibrant[train]'"
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
    return _read_pictures(_files(folder / "train", labels), _files(test, test_labels))


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
    return _read_pictures(train, test)


def _text(folder: Path, name: str) -> str:
    text = (folder / name).read_text("utf-8") if (folder / name).is_file() else ""
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


def _read_pictures(train: list[LabelledFile], test: list[LabelledFile]) -> ImageSet:
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
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in an image archive")
        return RECONSTRUCT if name == "_reconstruct" else super().find_class(module, name)


def unpickle_arrays(content: bytes) -> dict[str, Any]:
    """Load a pickle that may contain only arrays, lists and numbers."""
    try:
        loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        # the keys are bytes if Python 2 wrote them
        return {key.decode() if isinstance(key, bytes) else key: loaded[key] for key in loaded}
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(f"not a pickle of arrays only: {error}") from error


def _pickled_cifar(content: bytes) -> ImageSplit:
    arrays = unpickle_arrays(content)
    labels = np.array(arrays.get("fine_labels", arrays.get("labels")))
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    return _cifar_split(np.asarray(arrays.get("data")), labels)


def _binary_cifar(content: bytes, labels: int) -> ImageSplit:
    """Parse images that each follow ``labels`` bytes, of which the last is the class."""
    record = labels + PIXELS
    if len(content) % record:
        raise ValueError(f"size must be a multiple of {record} bytes, got {len(content)}")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return _cifar_split(records[:, labels:], records[:, labels - 1])


def _cifar_split(pixels: NDArray[Any], labels: NDArray[Any]) -> ImageSplit:
    if pixels.dtype != np.uint8 or pixels.shape != (labels.size, PIXELS) or not labels.size:
        got = f"{pixels.dtype} of shape {pixels.shape} and {labels.size} labels"
        raise ValueError(f"a uint8 row of {PIXELS} pixels is needed for each label, got {got}")
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
    images, labels = arrays
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        shapes = f"{images.shape} and {labels.shape}"
        raise ValueError(f"images must be (n, height, width) and labels (n,), got {shapes}")
    return ImageSplit(images[:, None], labels.astype(np.int64))


class ImageFormat(NamedTuple):
    """A published format: file names of its splits, a parser of a file, and a join."""

    title: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Callable[[bytes], Any]
    combine: Callable[[Sequence[Any]], ImageSplit] = _concatenate

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all files."""
        return self.train + self.test


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_BATCHES_BIN = tuple(f"{name}.bin" for name in _BATCHES)
_BINARY_10, _BINARY_100 = (partial(_binary_cifar, labels=labels) for labels in (1, 2))
IMAGE_FORMATS = (
    ImageFormat("CIFAR-10 (python)", _BATCHES, ("test_batch",), _pickled_cifar),
    ImageFormat("CIFAR-100 (python)", ("train",), ("test",), _pickled_cifar),
    ImageFormat("CIFAR-10 (binary)", _BATCHES_BIN, ("test_batch.bin",), _BINARY_10),
    ImageFormat("CIFAR-100 (binary)", ("train.bin",), ("test.bin",), _BINARY_100),
    ImageFormat(
        "MNIST or Fashion-MNIST (idx)",
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        *(_idx_array, _idx_split),
    ),
)
FILE_NAMES = {name for image_format in IMAGE_FORMATS for name in image_format.names}
SUBFOLDERS = "cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary"
"""Folders that the archives unpack to; their parent folder may be named instead."""
UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError)
LARGEST = 1 << 30
"""Bytes of a file when it is decompressed; those of known sets have up to 155 MB."""
TOO_LARGE = f"holds more than {LARGEST / 1e6:,.0f} MB, as no file of a known set does"
Files: TypeAlias = dict[str, Callable[[], bytes]]
"""Functions that read files of a folder or an archive, by base name."""


def _read_known_folder(folder: Path) -> ImageSet | None:
    """Read the set in a folder, or in a known folder below it."""
    below = [folder / name for name in SUBFOLDERS if (folder / name).is_dir()]
    for candidates in ([folder], below):
        known = [place for place in candidates if _format(_in_folder(place))]
        if len(known) > 1:
            names = comma_separated(place.name for place in known)
            raise ValueError(f"{folder} contains several sets, {names}: name one of them")
        if known:
            return _read_files(known[0], _in_folder(known[0]))
    return None


def _in_folder(folder: Path) -> Files:
    paths = (path for path in folder.iterdir() if path.is_file())
    return _decompressing({path.name: path.read_bytes for path in paths})


def _in_archive(path: Path) -> Files:
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if member.isreg() and name.removesuffix(".gz") in FILE_NAMES:
                    if name in contents:
                        raise ValueError(f"{path} contains {name} twice: keep one of them")
                    if member.size > LARGEST:
                        raise ValueError(f"{path}: {name} {TOO_LARGE}")
                    contents[name] = archive.extractfile(member).read()  # type: ignore[union-attr]  # None for folders only
            while archive.fileobj.read(1 << 20):
                pass  # gzip compares its checksum at the end
    except UNREADABLE as error:
        problem = f"{path} is truncated, damaged or not a tar archive ({error})"
        raise ValueError(f"{problem}: download it again, or name the folder") from error
    return _decompressing({name: partial(bytes, content) for name, content in contents.items()})


def _decompressing(files: Files) -> Files:
    """Let ``x.gz`` stand for ``x`` if that is missing."""
    packed = {name.removesuffix(".gz"): read for name, read in files.items() if name[-3:] == ".gz"}
    return {name: lambda read=read: _unpacked(read()) for name, read in packed.items()} | files


def _unpacked(content: bytes) -> bytes:
    whole = gzip.GzipFile(fileobj=io.BytesIO(content)).read(LARGEST + 1)
    if len(whole) > LARGEST:
        raise ValueError(TOO_LARGE)
    return whole


def _format(files: Files) -> ImageFormat | None:
    """Return the format whose files are all there, or else one that has some of them."""
    for enough in (all, any):
        for image_format in IMAGE_FORMATS:
            if enough(name in files for name in image_format.names):
                return image_format
    return None


def _read_files(place: Path, files: Files) -> ImageSet | None:
    image_format = _format(files)
    if image_format is None:
        return None
    missing = [name for name in image_format.names if name not in files]
    if missing:
        problem = f"{place} looks like {image_format.title}, but lacks {comma_separated(missing)}"
        raise ValueError(f"{problem}: put all files of the set together")
    splits = []
    for names in (image_format.train, image_format.test):
        parsed = []
        try:
            for name in names:
                parsed.append(image_format.parse(files[name]()))
            splits.append(image_format.combine(parsed))
        except (*UNREADABLE, ValueError) as error:
            problem = f"{place / name} is damaged ({error})"
            raise ValueError(f"{problem}: download it again, from a trusted site") from error
    return make_image_set(*splits)
