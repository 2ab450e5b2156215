"""Reading CIFAR and MNIST from a folder or from a tar archive.

Archives are read in memory. Only members with known names are read, and member paths are never
used as paths.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from calibrant.bench.train.images.formats import IMAGE_FORMATS, ImageFormat
from calibrant.bench.train.images.image_set import ImageSet, make_image_set

FILE_NAMES = {name for image_format in IMAGE_FORMATS for name in image_format.names}
SUBFOLDERS = (
    *("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary"),
)
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
            raise ValueError(
                f"{folder} contains several sets, {', '.join(place.name for place in known)}: name "
                "one of these folders"
            )
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
        raise ValueError(
            f"{path} is truncated, damaged or not a tar archive ({error}): download it again, or "
            "unpack it and name the folder"
        ) from error
    return _decompressing({name: partial(bytes, content) for name, content in contents.items()})


def _decompressing(files: Files) -> Files:
    """Let ``x.gz`` stand for ``x`` where that is missing."""
    packed = {name.removesuffix(".gz"): read for name, read in files.items() if name[-3:] == ".gz"}
    return {**{name: partial(_decompress, read) for name, read in packed.items()}, **files}


def _decompress(read: Callable[[], bytes]) -> bytes:
    return gzip.decompress(read())


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
        raise ValueError(
            f"{place} looks like {image_format.title}, but lacks {', '.join(missing)}: "
            "download it again, or put all files of the set together"
        )
    splits = []
    for names in (image_format.train, image_format.test):
        parsed = []
        try:
            for name in names:
                parsed.append(image_format.parse(files[name]()))
            splits.append(image_format.combine(parsed))
        except (*UNREADABLE, ValueError) as error:
            raise ValueError(
                f"{place / name} is damaged ({error}): download it again, from a trusted site"
            ) from error
    return make_image_set(*splits)
