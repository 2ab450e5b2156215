"""Prediction files: which files make up a dataset, and how they are written."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import comma_separated
from calibrant.data.columns import native
from calibrant.data.formats import READERS, WRITERS
from calibrant.data.keys import NAMED_SPLITS, owner, split_names

_ARRAY_FILE = re.compile(r"(?:(.+)_)?(logits|labels|probs|features)")


class ShardFiles(NamedTuple):
    """The files of one shard: one with keys of its own, or ``.npy`` files by key.

    ``split`` is the split that plain arrays belong to.
    """

    paths: dict[str, Path]
    split: str = ""


def save_predictions(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Write ``arrays`` under their keys as ``.npz``, ``.safetensors`` or ``.parquet``.

    An interrupted run leaves the old file or the new one, never a part.

    Examples
    --------
    >>> import os, tempfile
    >>> from calibrant.data import open_dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "predictions.npz")
    ...     save_predictions(path, {"logits": np.zeros((5, 3)), "labels": np.zeros(5, int)})
    ...     open_dataset(path).split().rows
    5
    """
    target = Path(path)
    check_writable(target)
    ready = {key: native(np.asarray(values, order="C")) for key, values in arrays.items()}
    for key, values in ready.items():
        if values.dtype.hasobject:
            raise ValueError(f"cannot write {key}: it holds Python objects; pass numbers or text")
    with replacing(target) as temporary:
        WRITERS[target.suffix](temporary, ready)


def check_writable(target: Path) -> None:
    """Raise unless the suffix names a format that holds several arrays."""
    if target.suffix not in WRITERS:
        suffixes = comma_separated(WRITERS)
        raise ValueError(f"cannot write {target}: the suffix must be one of {suffixes}")


def sample_path() -> Path:
    """Path of the real predictions that come with the package.

    They are those of a ResNet-50 that this project trained on CIFAR-10: ``val_logits`` and
    ``val_labels`` of 5,000 images held out of the training set, ``test_logits`` and
    ``test_labels`` of the 10,000 test images (float16 logits of 10 classes), and ``weight``
    (10, 2048) and ``bias`` (10,) of the last layer.

    >>> sample_path().name
    'cifar10_resnet50.npz'
    """
    return Path(__file__).parents[1] / "sample" / "cifar10_resnet50.npz"


def find_shards(path: str) -> list[ShardFiles]:
    """Return the shards of a prediction file, folder or glob, in natural order."""
    location = Path(path)
    if location.is_dir():
        return _in_folder(location)
    if location.exists():
        return _in_file(location)
    if re.search(r"[*?[]", path):
        return _in_glob(path)
    raise FileNotFoundError(f"{path} does not exist; expected a prediction file, folder or glob")


def _in_file(path: Path) -> list[ShardFiles]:
    if path.suffix not in READERS:
        raise ValueError(
            f"{path} is not a prediction file: the suffix must be one of "
            f"{comma_separated(READERS)}; numpy.savez(path, logits=..., labels=...) writes one"
        )
    if path.suffix != ".npy":
        return [ShardFiles({"": path})]
    if not _ARRAY_FILE.fullmatch(path.stem):
        raise ValueError(
            f"{path} does not say what it holds; rename it to NAME_logits.npy, NAME_labels.npy, "
            "NAME_probs.npy or NAME_features.npy"
        )
    return _with_partners([path])


def _in_folder(folder: Path) -> list[ShardFiles]:
    files = _matches(folder, "*")
    if not files:
        raise FileNotFoundError(
            f"folder {folder} holds no prediction file; expected {comma_separated(READERS)}"
        )
    return _by_stem(files) if _one_suffix(files) == ".npy" else _one_each(files)


def _in_glob(pattern: str) -> list[ShardFiles]:
    files = _prediction_files(pattern)
    if not files:
        raise FileNotFoundError(f"no file in {comma_separated(READERS)} matches {pattern}")
    if _one_suffix(files) != ".npy":
        return _one_each(files)
    arrays = {match[2] if (match := _ARRAY_FILE.fullmatch(file.stem)) else None for file in files}
    return _by_stem(files) if None in arrays or len(arrays) > 1 else _with_partners(files)


def _matches(folder: Path, pattern: str) -> list[Path]:
    return _prediction_files(os.path.join(glob.escape(str(folder)), pattern))


def _prediction_files(pattern: str) -> list[Path]:
    """Return files in natural order; a link to a missing file is kept, so that it is an error."""
    paths = (Path(name) for name in glob.glob(pattern, recursive=True))
    files = [p for p in paths if p.suffix in READERS and (p.is_file() or not p.exists())]
    return sorted(files, key=natural_order)


def natural_order(path: Path) -> tuple[list[str | int], str]:
    """Sort key in which 2 comes before 10; the name itself decides between 1 and 01."""
    # A pattern with a group splits into text and digits in turn: like is compared with like.
    runs = re.split(r"(\d+)", str(path))
    return [int(run) if i % 2 else run for i, run in enumerate(runs)], str(path)


def _one_suffix(files: Sequence[Path]) -> str:
    """Return the suffix of the files; two kinds side by side may be the same rows twice."""
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1:
        folder = files[0].parent
        raise ValueError(
            f"{folder} mixes {comma_separated(suffixes)} files; choose one kind, for example "
            f"with the pattern '{folder / ('*' + suffixes[0])}'"
        )
    return suffixes[0]


def _one_each(files: Sequence[Path]) -> list[ShardFiles]:
    """Take each file for a shard; val.npz is that split, so that it never mixes with test.npz."""
    return [ShardFiles({"": f}, f.stem if f.stem in NAMED_SPLITS else "") for f in files]


def _by_stem(files: Sequence[Path]) -> list[ShardFiles]:
    """Take stems of ``.npy`` files for keys; a number in front is the number of a shard."""
    shards: dict[tuple[Path, str], dict[str, Path]] = {}
    for file in files:
        numbered = re.match(r"\d+_", file.stem)
        number = numbered[0] if numbered else ""
        shards.setdefault((file.parent, number), {})[file.stem.removeprefix(number)] = file
    return [ShardFiles(paths) for paths in shards.values()]


def _with_partners(files: Sequence[Path]) -> list[ShardFiles]:
    """Make each file a shard, with the ``.npy`` files of its folder that have the same prefix."""
    prefixes: dict[Path, list[str]] = {}
    for file in files:
        prefix = file.stem.rpartition("_")[0]
        prefixes.setdefault(file.parent, []).append(prefix)
    return [shard for folder in prefixes for shard in _prefixed(folder, prefixes[folder])]


def _prefixed(folder: Path, prefixes: Sequence[str]) -> list[ShardFiles]:
    shards = {prefix: ShardFiles({}) for prefix in prefixes}
    files = _matches(folder, "*.npy")
    # Prefixes that nobody asked for count too: val_noise_logits is no column of val.
    known = {*prefixes, *split_names(file.stem for file in files)}
    for file in files:
        prefix, column = owner(file.stem, known)
        if prefix in shards:
            key = file.stem if prefix in NAMED_SPLITS else column
            shards[prefix].paths[key] = file
    return list(shards.values())
