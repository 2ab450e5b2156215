"""Prediction files: which files there are, which arrays belong together, and their rows."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import comma_separated
from calibrant.data.formats import FORMATS, Array, Shard, Stored, gathered, native

SCORES = ("logits", "probs")
COLUMNS = (*SCORES, "labels", "features")
LAST_LAYER = ("weight", "bias")
NUMERIC = (*SCORES, "features", *LAST_LAYER)

NAMED_SPLITS = ("train", "val", "test")
"""Names of files that say which split the file is, even where it calls its arrays plainly."""


@dataclass(frozen=True)
class Part:
    """One shard's share of a split: names and headers only, so that it travels to other processes.

    Attributes
    ----------
    columns
        The arrays by their name within the split: ``logits``, ``labels`` and so on.
    """

    columns: Mapping[str, Stored]

    @property
    def domain(self) -> str | None:
        """``"logits"`` or ``"probs"``, logits first; None where the part has neither."""
        return next((name for name in SCORES if name in self.columns), None)

    @property
    def path(self) -> str:
        """File of the scores, or of the features where there are no scores."""
        return self._main.path

    @property
    def rows(self) -> int:
        """Number of examples."""
        return self._main.shape[0]

    @property
    def _main(self) -> Stored:
        return self.columns[self.domain or "features"]

    def stored(self, column: str) -> Stored:
        """Return the header of ``column``, checked; ``"logits"`` may also be probs."""
        name = self.domain if column == "logits" else column
        if name is None or name not in self.columns:
            wanted = "logits or probs" if column == "logits" else column
            raise ValueError(
                f"{self.path} has no {wanted} in this split; found {comma_separated(self.columns)}"
            )
        found = self.columns[name]
        _check_values(name, found)
        self._check_rows(found)
        return found

    def blocks(self, rows: int, columns: Sequence[str]) -> Iterator[tuple[Array, ...]]:
        """Yield blocks of ``rows`` rows (the last may be shorter) of ``columns``, side by side.

        ``"logits"`` stands for the probs, as they are stored, where the domain is probs.
        """
        if rows < 1:
            raise ValueError(f"a block must have at least 1 row, got rows={rows}")
        streams = [self.stored(column).blocks(rows) for column in columns]
        yield from zip(*streams, strict=True)

    def _check_rows(self, found: Stored) -> None:
        if found.shape[0] != self.rows:
            raise ValueError(
                f"{found.path}: {found.key} has {found.shape[0]} rows, but {self._main.key} has "
                f"{self.rows}; every column of a split needs one row per example"
            )


@dataclass(frozen=True)
class Split:
    """The examples under one name, over all shards that have it; the plain arrays are ``""``."""

    name: str
    parts: list[Part]

    @property
    def rows(self) -> int:
        """Number of examples."""
        return sum(part.rows for part in self.parts)

    @property
    def keys(self) -> list[str]:
        """Columns that every part has, as stored: with probs in place of logits, ``"probs"``."""
        first, *others = self.parts
        return [key for key in first.columns if all(key in part.columns for part in others)]

    @property
    def domain(self) -> str:
        """What the scores are: ``"logits"`` or ``"probs"``."""
        self.parts[0].stored("logits")  # refuses a split without scores
        return "logits" if "logits" in self.parts[0].columns else "probs"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example's scores: ``(classes,)``, or ``()`` for one logit each."""
        return self.parts[0].stored("logits").shape[1:]

    @property
    def classes(self) -> int:
        """Number of classes; one logit per example means two."""
        return self.shape[-1] if self.shape else 2

    def read(self, column: str) -> Array:
        """Return the whole of ``column``; a single ``.npy`` file is mapped, not loaded."""
        return gathered(_agreeing(self.parts, column))


@dataclass(frozen=True)
class PredictionFile:
    """What a prediction file, or a folder or glob of its shards, holds."""

    path: str
    shards: list[Shard]

    @cached_property
    def splits(self) -> list[str]:
        """Names of the splits, in the order of the file; ``""`` stands for the plain arrays."""
        return list(
            dict.fromkeys(name for shard in self.shards for name in _split_names(_rowwise(shard)))
        )

    def split(self, name: str | None = None, prefer: Sequence[str] = ("",)) -> Split:
        """Return the split ``name``, or without a name the first of ``prefer`` that is there."""
        wanted = prefer if name is None else [name]
        chosen = next((candidate for candidate in wanted if candidate in self.splits), None)
        if chosen is None:
            names = " or ".join(map(_described, wanted))
            raise ValueError(f"{self.path} has no {names}; found {self._found()}")
        return _split(chosen, self.shards)

    def last_layer(self) -> tuple[Array, Array] | None:
        """Return weight (classes, features) and bias (classes,) of the last linear layer.

        A layer without bias has a bias of zeros. Shards come from one model: the first
        that holds the layer speaks for all.
        """
        shard = next((shard for shard in self.shards if "weight" in shard), None)
        if shard is None:
            return None
        layer = {key: shard[key] for key in LAST_LAYER if key in shard}
        _check_layer(layer)
        weight = gathered([layer["weight"]])
        if "bias" not in layer:
            return weight, np.zeros(len(weight), weight.dtype)
        return weight, gathered([layer["bias"]])

    def _found(self) -> str:
        if self.splits == [""]:
            return "plain arrays only; leave out --split"
        if self.splits:
            return f"{comma_separated(map(_described, self.splits))}; choose one with --split"
        keys = dict.fromkeys(key for shard in self.shards for key in shard)
        return f"no logits, probs or features, only {comma_separated(keys)}"


def open_predictions(path: str | os.PathLike[str]) -> PredictionFile:
    """Find the arrays of a prediction file; only headers are read.

    Parameters
    ----------
    path
        One of

        - a ``.npz``, ``.safetensors`` or ``.parquet`` file;
        - ``X_logits.npy``, ``X_labels.npy`` or ``logits.npy``: the files that share its prefix
          belong to it. They are plain arrays, unless X is train, val or test;
        - a folder of ``.npy`` files: each stem is a key, numbers in front (``0_logits.npy``)
          count shards;
        - a folder or glob of other files, or a glob of ``*_logits.npy``: shards, whose rows
          follow one another in natural order. Files named train, val or test are those splits.

    Examples
    --------
    >>> file = open_predictions(sample_path())
    >>> file.splits, file.split("val").read("logits").shape
    (['val', 'test'], (5000, 10))
    """
    given = os.fspath(path)
    return PredictionFile(given, _shards(given))


def save_predictions(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Write ``arrays`` under their keys as ``.npz``, ``.safetensors`` or ``.parquet``.

    A kill leaves the old file or the new one, never a half.

    Examples
    --------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "predictions.npz")
    ...     save_predictions(path, {"logits": np.zeros((5, 3)), "labels": np.zeros(5, int)})
    ...     open_predictions(path).split().rows
    5
    """
    target = Path(path)
    write = FORMATS[target.suffix].write if target.suffix in FORMATS else None
    if write is None:
        suffixes = comma_separated(suffix for suffix, form in FORMATS.items() if form.write)
        raise ValueError(f"cannot write {target}: the suffix must be one of {suffixes}")
    ready = {key: native(np.asarray(values, order="C")) for key, values in arrays.items()}
    for key, values in ready.items():
        if values.dtype.hasobject:
            raise ValueError(f"cannot write {key}: it holds Python objects; pass numbers or text")
    with replacing(target) as temporary:
        write(temporary, ready)


def sample_path() -> Path:
    """Path of the real predictions that come with the package.

    They are those of a ResNet-50 that this project trained on CIFAR-10: ``val_logits`` and
    ``val_labels`` of 5,000 images held out of the training set, ``test_logits`` and
    ``test_labels`` of the 10,000 test images (float16 logits of 10 classes), and ``weight``
    (10, 2048) and ``bias`` (10,) of the last layer.

    >>> open_predictions(sample_path()).splits
    ['val', 'test']
    """
    return Path(__file__).parents[1] / "sample" / "cifar10_resnet50.npz"


# Which files there are.


_ARRAY_FILE = re.compile(r"(?:(.+)_)?(logits|labels|probs|features)")
_SPLIT_KEY = re.compile(r"(?:(.+)_)?(?:logits|probs|features)")


def _shards(given: str) -> list[Shard]:
    location = Path(given)
    if location.is_dir():
        return _folder_shards(location)
    if location.exists():
        return _file_shards(location)
    if re.search(r"[*?[]", given):
        return _glob_shards(given)
    raise FileNotFoundError(f"{given} does not exist; expected a prediction file, folder or glob")


def _file_shards(path: Path) -> list[Shard]:
    if path.suffix not in FORMATS:
        raise ValueError(
            f"{path} is not a prediction file: the suffix must be one of {comma_separated(FORMATS)}; "
            "numpy.savez(path, logits=..., labels=...) writes one"
        )
    if path.suffix != ".npy":
        return [_headers(path)]
    if not _ARRAY_FILE.fullmatch(path.stem):
        raise ValueError(
            f"{path} does not say what it holds; rename it to NAME_logits.npy, NAME_labels.npy, "
            "NAME_probs.npy or NAME_features.npy"
        )
    return _partnered([path])


def _folder_shards(folder: Path) -> list[Shard]:
    files = _matches(folder, "*")
    if not files:
        raise FileNotFoundError(
            f"folder {folder} holds no prediction file; expected files in {comma_separated(FORMATS)}"
        )
    return _keyed(files) if _one_suffix(files) == ".npy" else _files_as_shards(files)


def _glob_shards(pattern: str) -> list[Shard]:
    files = _prediction_files(pattern)
    if not files:
        raise FileNotFoundError(f"no file in {comma_separated(FORMATS)} matches {pattern}")
    if _one_suffix(files) != ".npy":
        return _files_as_shards(files)
    arrays = {match[2] if (match := _ARRAY_FILE.fullmatch(file.stem)) else None for file in files}
    return _keyed(files) if None in arrays or len(arrays) > 1 else _partnered(files)


def _matches(folder: Path, pattern: str) -> list[Path]:
    return _prediction_files(os.path.join(glob.escape(str(folder)), pattern))


def _prediction_files(pattern: str) -> list[Path]:
    found = (Path(name) for name in glob.glob(pattern, recursive=True))
    files = [path for path in found if path.suffix in FORMATS and path.is_file()]
    return sorted(files, key=natural_order)


def natural_order(path: Path) -> tuple[list[str | int], str]:
    """Sort key in which 2 comes before 10; the name itself decides between 1 and 01."""
    # A pattern with a group splits into text and digits in turn: like is compared with like.
    pieces = re.split(r"(\d+)", str(path))
    return [int(piece) if i % 2 else piece for i, piece in enumerate(pieces)], str(path)


def _one_suffix(files: list[Path]) -> str:
    """Return the suffix of the files; two kinds side by side may be the same rows twice."""
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1:
        folder = files[0].parent
        raise ValueError(
            f"{folder} mixes {comma_separated(suffixes)} files; choose one kind, for example "
            f"with the pattern '{folder / ('*' + suffixes[0])}'"
        )
    return suffixes[0]


def _headers(path: Path) -> Shard:
    return FORMATS[path.suffix].headers(path)


def _files_as_shards(files: list[Path]) -> list[Shard]:
    return [_under_split(_headers(file), file.stem) for file in files]


def _under_split(shard: Shard, stem: str) -> Shard:
    """Put the plain arrays of val.npz under val, so that they never mix with those of test.npz."""
    if stem not in NAMED_SPLITS:
        return shard
    plain = _columns(shard, "")
    return {f"{stem}_{key}" if key in plain else key: found for key, found in shard.items()}


def _keyed(files: list[Path]) -> list[Shard]:
    """``.npy`` files whose stems are keys; a number in front is the number of a shard."""
    shards: dict[tuple[Path, str], Shard] = {}
    for file in files:
        numbered = re.match(r"\d+_", file.stem)
        number = numbered[0] if numbered else ""
        key = file.stem.removeprefix(number)
        shards.setdefault((file.parent, number), {})[key] = _headers(file)[file.stem]
    return list(shards.values())


def _partnered(files: list[Path]) -> list[Shard]:
    """One shard for each of ``files``: the ``.npy`` files of its folder with the same prefix."""
    prefixes: dict[Path, list[str]] = {}
    for file in files:
        prefix = file.stem.rpartition("_")[0]
        prefixes.setdefault(file.parent, []).append(prefix)
    return [shard for folder in prefixes for shard in _prefixed(folder, prefixes[folder])]


def _prefixed(folder: Path, prefixes: list[str]) -> list[Shard]:
    shards: dict[str, Shard] = {prefix: {} for prefix in prefixes}
    files = _matches(folder, "*.npy")
    # Prefixes that nobody asked for count too: val_noise_logits is no column of val.
    known = {*prefixes, *_split_names(file.stem for file in files)}
    for file in files:
        prefix, column = _owner(file.stem, known)
        if prefix in shards:
            key = file.stem if prefix in NAMED_SPLITS else column
            shards[prefix][key] = _headers(file)[file.stem]
    return list(shards.values())


# Which arrays belong together.


def _split_names(keys: Iterable[str]) -> list[str]:
    """Names of the splits among ``keys``.

    Labels alone make no split: ``coarse_labels`` is a further column more often than not.
    """
    matches = (_SPLIT_KEY.fullmatch(key) for key in keys)
    return list(dict.fromkeys(match[1] or "" for match in matches if match))


def _owner(key: str, names: Iterable[str]) -> tuple[str, str]:
    """Return the longest of ``names`` that starts ``key``, and the column that remains.

    >>> _owner("noise_3_labels", ["noise", "noise_3"])
    ('noise_3', 'labels')
    >>> _owner("sample_weight", ["noise", "noise_3"])
    ('', 'sample_weight')
    """
    known = set(names)
    ends = [i for i, character in enumerate(key) if character == "_" and key[:i] in known]
    return (key[: ends[-1]], key[ends[-1] + 1 :]) if ends else ("", key)


def _rowwise(shard: Shard) -> Shard:
    """Leave out what cannot be a column: single values and the last layer."""
    return {key: found for key, found in shard.items() if found.shape and key not in LAST_LAYER}


def _columns(shard: Shard, name: str) -> Shard:
    """Return what the split ``name`` owns of a shard, under the names of the columns."""
    rowwise = _rowwise(shard)
    names = _split_names(rowwise)
    owned = ((*_owner(key, names), found) for key, found in rowwise.items())
    return {column: found for owner, column, found in owned if owner == name}


def _split(name: str, shards: list[Shard]) -> Split:
    having = [shard for shard in shards if name in _split_names(_rowwise(shard))]
    parts = [Part(_columns(shard, name)) for shard in having]
    # An empty shard, as Spark writes them, may not even know its number of classes.
    parts = [part for part in parts if part.rows] or parts[:1]
    _check_domains(parts)
    for column in COLUMNS:
        _agreeing([part for part in parts if column in part.columns], column)
    return Split(name, parts)


def _check_domains(parts: list[Part]) -> None:
    first = parts[0]
    for part in parts:
        if part.domain != first.domain:
            raise ValueError(
                f"{first.path} has {first.domain or 'no logits'}, but {part.path} has "
                f"{part.domain or 'no logits'}; all shards of a split need the same"
            )


def _agreeing(parts: list[Part], column: str) -> list[Stored]:
    """Return the headers of ``column``, which must differ in the number of rows only."""
    found = [part.stored(column) for part in parts]
    for other in found:
        if other.shape[1:] != found[0].shape[1:]:
            raise ValueError(
                f"{found[0].path} has {found[0].key} of shape {found[0].shape}, but {other.path} "
                f"has {other.shape}; shards of a split may differ in the number of rows only"
            )
    return found


def _check_values(name: str, found: Stored) -> None:
    if found.dtype.hasobject:
        raise ValueError(
            f"{found.path}: {found.key} was saved as a pickle of Python objects, which is never "
            "loaded because it could run any code; save it again as numbers, for example "
            "numpy.savez(path, logits=numpy.asarray(logits, dtype='float32'))"
        )
    if name in NUMERIC and found.dtype.kind not in "biuf":
        raise ValueError(f"{found.path}: {found.key} must be numbers, got {found.dtype.name}")


def _check_layer(layer: Shard) -> None:
    for key, found in layer.items():
        _check_values(key, found)
    shapes = [found.shape for found in layer.values()]
    if len(shapes[0]) != 2 or shapes[1:] not in ([], [shapes[0][:1]]):
        raise ValueError(
            f"{layer['weight'].path}: the last layer needs weight (classes, features) and bias "
            f"(classes,), got {' and '.join(map(str, shapes))}"
        )


def _described(name: str) -> str:
    return f"split '{name}'" if name else "plain arrays"
