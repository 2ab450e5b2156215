"""Image sets that are a few files of many images each, in a folder or in a tar archive.

Archives are read in memory. Only members with the known names are looked at, and the path of a
member is never used as a path.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrant.bench.train.images.forms import AGAIN, FORMS, NAMES, File, Form
from calibrant.bench.train.images.sets import ImageSet, image_set

UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError)
SUBFOLDERS = (
    *("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary"),
)
"""What the archives unpack to; the folder above may be named too."""


@dataclass(frozen=True)
class Files:
    """The files of a folder or an archive, by their base names; ``x.gz`` stands for ``x`` too."""

    place: Path
    held: Mapping[str, Path | bytes]

    def __contains__(self, name: object) -> bool:
        return name in self.held or f"{name}.gz" in self.held

    def read(self, name: str) -> File:
        """Read a file, unpacked if it is a ``.gz``."""
        packed = name not in self.held
        found = self.held[f"{name}.gz" if packed else name]
        content = found.read_bytes() if isinstance(found, Path) else found
        if packed:
            try:
                content = gzip.decompress(content)
            except UNREADABLE as error:
                raise ValueError(
                    f"{self.place / name}.gz is truncated or no gzip file ({error}): {AGAIN}"
                ) from error
        return File(str(self.place / name), content)


def read_folder(folder: Path) -> ImageSet | None:
    """Read the set in a folder or in a known folder below it; None if there is none."""
    for homes in ([folder], [folder / name for name in SUBFOLDERS if (folder / name).is_dir()]):
        found = [(form, files) for files in map(_in_folder, homes) if (form := _form(files))]
        if len(found) > 1:
            raise ValueError(
                f"{folder} holds several sets, {', '.join(files.place.name for _, files in found)}"
                ": name one of these folders"
            )
        for form, files in found:
            return _read(form, files)
    return None


def read_file(path: Path) -> ImageSet | None:
    """Read the set in a tar archive; None if it holds no known set."""
    files = _in_archive(path)
    form = _form(files)
    return _read(form, files) if form else None


def _in_folder(folder: Path) -> Files:
    return Files(folder, {path.name: path for path in folder.iterdir() if path.is_file()})


def _in_archive(path: Path) -> Files:
    held: dict[str, Path | bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if member.isreg() and name.removesuffix(".gz") in NAMES:
                    if name in held:
                        raise ValueError(f"{path} holds {name} twice: keep one of them")
                    held[name] = archive.extractfile(member).read()  # type: ignore[union-attr]  # None for folders only
            _read_on(archive.fileobj)
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is truncated, damaged or no tar archive ({error}): {AGAIN}, or unpack it and "
            "name the folder"
        ) from error
    return Files(path, held)


def _read_on(file: Any) -> None:
    """Go to the end of the file, where gzip compares its checksum."""
    while file.read(1 << 20):
        pass


def _form(files: Files) -> Form | None:
    """The form whose files are all there, or else one that has some of them."""
    return _first(files, all) or _first(files, any)


def _first(files: Files, enough: Callable[[Iterable[bool]], bool]) -> Form | None:
    found = (form for form in FORMS if enough(name in files for name in form.names))
    return next(found, None)


def _read(form: Form, files: Files) -> ImageSet:
    missing = [name for name in form.names if name not in files]
    if missing:
        raise ValueError(
            f"{files.place} looks like {form.title}, but lacks {', '.join(missing)}: {AGAIN}, or "
            "put all files of the set together"
        )
    return image_set(
        *(form.read([files.read(name) for name in names]) for names in (form.train, form.test))
    )
