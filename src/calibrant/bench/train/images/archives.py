"""Read CIFAR and MNIST, which hold many images in a few files, from a folder or a tar archive.

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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrant._core.messages import comma_separated
from calibrant.bench.train.images.image_set import ImageSet, ImageSplit, Pixels, make_image_set

PIXELS = 3 * 32 * 32
"""Bytes of an image of CIFAR."""


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
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


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


_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_BINARY_10, _BINARY_100 = (partial(_binary_cifar, labels=labels) for labels in (1, 2))
IMAGE_FORMATS = (
    ImageFormat("CIFAR-10 (python)", tuple(_BATCHES), ("test_batch",), _pickled_cifar),
    ImageFormat("CIFAR-100 (python)", ("train",), ("test",), _pickled_cifar),
    ImageFormat(
        "CIFAR-10 (binary)",
        tuple(f"{name}.bin" for name in _BATCHES),
        ("test_batch.bin",),
        _BINARY_10,
    ),
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
Files: TypeAlias = dict[str, Callable[[], bytes]]
"""Functions that read files of a folder or an archive, by base name."""


def read_folder(folder: Path) -> ImageSet | None:
    """Read the set in a folder or in a known folder below it; None if there is none."""
    below = [folder / name for name in SUBFOLDERS if (folder / name).is_dir()]
    for candidates in ([folder], below):
        known = [place for place in candidates if _format(_in_folder(place))]
        if len(known) > 1:
            names = comma_separated(place.name for place in known)
            raise ValueError(f"{folder} contains several sets, {names}: name one of them")
        if known:
            return _read(known[0], _in_folder(known[0]))
    return None


def read_archive(path: Path) -> ImageSet | None:
    """Read the set in a tar archive; None if it contains no known set."""
    return _read(path, _in_archive(path))


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
    return {n: lambda read=read: gzip.decompress(read()) for n, read in packed.items()} | files


def _format(files: Files) -> ImageFormat | None:
    """Return the format whose files are all there, or else one that has some of them."""
    for enough in (all, any):
        for image_format in IMAGE_FORMATS:
            if enough(name in files for name in image_format.names):
                return image_format
    return None


def _read(place: Path, files: Files) -> ImageSet | None:
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
