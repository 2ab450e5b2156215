"""Prediction files: saved logits and labels, found by name and read in blocks of rows.

A file holds ``logits`` and ``labels``, or ``NAME_logits`` and ``NAME_labels`` for each split,
with ``probs`` in place of logits, ``features``, the last linear layer ``weight`` and ``bias``,
and any further columns. Opening one reads headers only. The rows come later, a block at a time,
so that the size of a file is not limited by memory:

>>> import os, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     path = os.path.join(folder, "predictions.npz")
...     save_predictions(path, {"val_logits": np.zeros((5, 3)), "val_labels": np.arange(5)})
...     val = open_predictions(path).split("val")
...     [labels.tolist() for logits, labels in val.parts[0].blocks(2, ["logits", "labels"])]
[[0, 1], [2, 3], [4]]
"""

from __future__ import annotations

import glob
import math
import os
import re
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[Any]

SCORES = ("logits", "probs")
COLUMNS = (*SCORES, "labels", "features")
LAST_LAYER = ("weight", "bias")
NUMERIC = (*SCORES, "features", *LAST_LAYER)

NAMED_SPLITS = ("train", "val", "test")
"""Names of files that say which split the file is, even where it calls its arrays plainly."""

READ_BYTES = 2**24
"""Size of the blocks in which a whole array is gathered."""

PARQUET_BUFFER = 2**18
"""Bytes of a parquet file that are read at once."""


@dataclass(frozen=True)
class Stored:
    """Where an array lies and what its header says; ``key`` is its name inside the file."""

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def suffix(self) -> str:
        """Suffix of the file, which decides how it is read."""
        return Path(self.path).suffix

    def blocks(self, rows: int) -> Iterator[Array]:
        """Yield the array in blocks of ``rows`` rows; the last one may be shorter."""
        for block in FORMATS[self.suffix].blocks(self, rows):
            yield _native(block)


Shard: TypeAlias = dict[str, Stored]
"""The arrays of one file, or of the ``.npy`` files that belong together, by key."""


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
                f"{self.path} has no {wanted} in this split; found {_listed(self.columns)}"
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
        return _gathered(_agreeing(self.parts, column))


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
        weight = _gathered([layer["weight"]])
        if "bias" not in layer:
            return weight, np.zeros(len(weight), weight.dtype)
        return weight, _gathered([layer["bias"]])

    def _found(self) -> str:
        if self.splits:
            return f"{_listed(map(_described, self.splits))}; choose one with --split"
        keys = dict.fromkeys(key for shard in self.shards for key in shard)
        return f"no logits, probs or features, only {_listed(keys)}"


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
    """
    given = os.fspath(path)
    return PredictionFile(given, _shards(given))


def save_predictions(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Write ``arrays`` under their keys as ``.npz``, ``.safetensors`` or ``.parquet``.

    A kill leaves the old file or the new one, never a half.
    """
    target = Path(path)
    write = FORMATS[target.suffix].write if target.suffix in FORMATS else None
    if write is None:
        suffixes = _listed(suffix for suffix, form in FORMATS.items() if form.write)
        raise ValueError(f"cannot write {target}: the suffix must be one of {suffixes}")
    ready = {key: _native(np.asarray(values, order="C")) for key, values in arrays.items()}
    for key, values in ready.items():
        if values.dtype.hasobject:
            raise ValueError(f"cannot write {key}: it holds Python objects; pass numbers or text")
    with _replacing(target) as temporary:
        write(temporary, ready)


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
            f"{path} is not a prediction file: the suffix must be one of {_listed(FORMATS)}; "
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
            f"folder {folder} holds no prediction file; expected files in {_listed(FORMATS)}"
        )
    return _keyed(files) if _one_suffix(files) == ".npy" else _files_as_shards(files)


def _glob_shards(pattern: str) -> list[Shard]:
    files = _prediction_files(pattern)
    if not files:
        raise FileNotFoundError(f"no file in {_listed(FORMATS)} matches {pattern}")
    if _one_suffix(files) != ".npy":
        return _files_as_shards(files)
    arrays = {match[2] if (match := _ARRAY_FILE.fullmatch(file.stem)) else None for file in files}
    return _keyed(files) if None in arrays or len(arrays) > 1 else _partnered(files)


def _matches(folder: Path, pattern: str) -> list[Path]:
    return _prediction_files(os.path.join(glob.escape(str(folder)), pattern))


def _prediction_files(pattern: str) -> list[Path]:
    found = (Path(name) for name in glob.glob(pattern, recursive=True))
    files = [path for path in found if path.suffix in FORMATS and path.is_file()]
    return sorted(files, key=_natural)


def _natural(path: Path) -> tuple[list[str | int], str]:
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
            f"{folder} mixes {_listed(suffixes)} files; choose one kind, for example "
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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


# How arrays are read.


def _native(block: Array) -> Array:
    """Return ``block`` in the byte order of this machine, the only one that torch takes."""
    return block.astype(block.dtype.newbyteorder("="), copy=False)


def _gathered(pieces: Sequence[Stored]) -> Array:
    first = pieces[0]
    if len(pieces) == 1 and first.suffix == ".npy":
        # Copy-on-write: the array may be changed, as any other, and the file stays as it is.
        return _native(np.load(first.path, mmap_mode="c", allow_pickle=False))
    blocks = (block for piece in pieces for block in piece.blocks(_rows_at_once(piece)))
    dtype = np.result_type(*(piece.dtype for piece in pieces)).newbyteorder("=")
    if not dtype.itemsize:  # strings, whose length the header does not tell
        return np.concatenate([np.empty(0, dtype), *blocks])
    return _filled((sum(piece.shape[0] for piece in pieces), *first.shape[1:]), dtype, blocks)


def _rows_at_once(piece: Stored) -> int:
    row_bytes = math.prod(piece.shape[1:]) * piece.dtype.itemsize
    return max(1, READ_BYTES // max(1, row_bytes))


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[Array]) -> Array:
    whole = np.empty(shape, dtype)
    start = 0
    for block in blocks:
        whole[start : start + len(block)] = block
        start += len(block)
    return whole


def _sliced(whole: Array, rows: int) -> Iterator[Array]:
    """Yield copies: a block may be changed, and keeps no more than itself in memory."""
    for start in range(0, len(whole), rows):
        yield np.array(whole[start : start + rows], order="C")


@contextmanager
def _reading(path: str | Path, *damage: type[Exception]) -> Iterator[None]:
    """Turn the errors by which a library reports a damaged file into one that says so."""
    try:
        yield
    except damage as error:
        raise ValueError(
            f"{path} is damaged or incomplete ({error}); copy or write it again"
        ) from error


# .npy


_HEADER_DAMAGE = (ValueError, EOFError, TokenError)


def _npy_headers(path: Path) -> Shard:
    with path.open("rb") as stream:
        return {path.stem: _npy_header(stream, path, path.stem, path.stat().st_size)}


def _npy_header(stream: IO[bytes], path: Path, key: str, size: int) -> Stored:
    """Read the header of an array that is said to take ``size`` bytes with its header."""
    shape, _, dtype = _array_header(stream, path)
    needed = stream.tell() + math.prod(shape) * dtype.itemsize
    if size < needed and not dtype.hasobject:  # the length of a pickle is not in its header
        raise ValueError(
            f"{path} is damaged or incomplete ({key} has {size} bytes of {needed}); "
            "copy or write it again"
        )
    return Stored(str(path), key, shape, dtype)


def _array_header(
    stream: IO[bytes], path: str | Path
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether the order is Fortran's, and dtype."""
    with _reading(path, *_HEADER_DAMAGE):
        version = npy.read_magic(stream)
        if version == (1, 0):
            return npy.read_array_header_1_0(stream)
        if version == (2, 0):
            return npy.read_array_header_2_0(stream)
        raise ValueError(f".npy versions 1.0 and 2.0 are known, got {version}")


def _npy_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _reading(stored.path, *_HEADER_DAMAGE):
        mapped = np.load(stored.path, mmap_mode="r", allow_pickle=False)
    yield from _sliced(mapped, rows)


# .npz


_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError)


@contextmanager
def _archive(path: str | Path) -> Iterator[zipfile.ZipFile]:
    # Opened apart from the rest: a file that may not be read is no damaged file.
    with open(path, "rb") as source, _reading(path, *_ZIP_DAMAGE):
        yield zipfile.ZipFile(source)


def _npz_headers(path: Path) -> Shard:
    with _archive(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        found = [_npz_header(archive, info, path) for info in members]
    return {stored.key: stored for stored in found}


def _npz_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Stored:
    with archive.open(info) as stream:
        return _npy_header(stream, path, info.filename.removesuffix(".npy"), info.file_size)


def _npz_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _archive(stored.path) as archive, archive.open(f"{stored.key}.npy") as stream:
        _, fortran, _ = _array_header(stream, stored.path)
        if fortran:  # column by column: no row is complete before the end
            yield from _sliced(_taken(stream, stored, stored.shape[0], "F"), rows)
        else:
            for start in range(0, stored.shape[0], rows):
                yield _taken(stream, stored, min(rows, stored.shape[0] - start), "C")
        stream.read(1)  # the checksum is compared when the end is reached


def _taken(stream: IO[bytes], stored: Stored, rows: int, order: Literal["C", "F"]) -> Array:
    shape = (rows, *stored.shape[1:])
    raw = bytearray(stream.read(math.prod(shape) * stored.dtype.itemsize))
    with _reading(stored.path, TypeError):  # the buffer is too small
        return np.ndarray(shape, stored.dtype, raw, order=order)


def _write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for key, values in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as stream:
                npy.write_array(stream, values, allow_pickle=False)


# .safetensors


# NumPy has no bfloat16: it is widened, which loses nothing.
_SAFETENSORS_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"BF16": "float32", "F16": "float16", "F32": "float32", "F64": "float64"},
}


@contextmanager
def _safetensors(path: str | Path, framework: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    with _reading(path, SafetensorError), safe_open(path, framework) as file:
        yield file


def _safetensors_headers(path: Path) -> Shard:
    with _safetensors(path, "np") as file:
        return {key: _safetensors_header(file, path, key) for key in file.keys()}  # noqa: SIM118


def _safetensors_header(file: Any, path: Path, key: str) -> Stored:
    view = file.get_slice(key)
    if view.get_dtype() not in _SAFETENSORS_DTYPES:
        raise ValueError(f"{path}: {key} is {view.get_dtype()}; save it again as float32")
    dtype = np.dtype(_SAFETENSORS_DTYPES[view.get_dtype()])
    return Stored(str(path), key, tuple(view.get_shape()), dtype)


def _safetensors_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _safetensors(stored.path, "np") as file:
        widened = file.get_slice(stored.key).get_dtype() == "BF16"
    with _safetensors(stored.path, "pt" if widened else "np") as file:
        view = file.get_slice(stored.key)
        for start in range(0, stored.shape[0], rows):
            block = view[start : min(start + rows, stored.shape[0])]
            yield block.float().numpy() if widened else block


def _write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    from safetensors.numpy import save_file

    for key, values in arrays.items():
        if values.dtype.name not in _SAFETENSORS_DTYPES.values():
            raise ValueError(
                f"a .safetensors file cannot hold {key}, which is {values.dtype.name}; write .npz"
            )
    save_file(dict(arrays), path)


# .parquet


def _pyarrow() -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "parquet files need pyarrow: pip install 'calibrant[data]'", name="pyarrow"
        ) from error
    return pyarrow


@contextmanager
def _parquet(path: str | Path) -> Iterator[Any]:
    pa = _pyarrow()
    # Opened apart from the rest, as in _archive.
    with pa.OSFile(str(path), "rb") as source, _reading(path, pa.ArrowInvalid, OSError):
        # Both options keep it from holding a row group, which may be the whole file, in memory.
        yield pa.parquet.ParquetFile(source, pre_buffer=False, buffer_size=PARQUET_BUFFER)


def _parquet_headers(path: Path) -> Shard:
    with _parquet(path) as file:
        rows, schema = file.metadata.num_rows, file.schema_arrow
        return {
            field.name: Stored(
                str(path),
                field.name,
                (rows, *_row_shape(file.metadata, field)),
                _parquet_dtype(field.type),
            )
            for field in schema
        }


def _is_list(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _row_shape(metadata: Any, field: Any) -> tuple[int, ...]:
    """Shape of one row. The footer counts values, which tells the length of lists of one length."""
    if not _is_list(field.type):
        return ()
    if _pyarrow().types.is_fixed_size_list(field.type):
        return (field.type.list_size,)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    leaf = next(i for i, path in enumerate(paths) if path.startswith(f"{field.name}."))
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    values = sum(group.column(leaf).num_values for group in groups)
    return (values // max(1, metadata.num_rows),)


def _parquet_dtype(kind: Any) -> np.dtype[Any]:
    """NumPy's type for numbers, of a list for its values; everything else is read as text."""
    types = _pyarrow().types
    values = kind.value_type if _is_list(kind) else kind
    numeric = types.is_integer(values) or types.is_floating(values) or types.is_boolean(values)
    return np.dtype(values.to_pandas_dtype() if numeric else str)


def _parquet_blocks(stored: Stored, rows: int) -> Iterator[Array]:
    with _parquet(stored.path) as file:
        batches = file.iter_batches(rows, columns=[stored.key])
        yield from _reblocked((_parquet_values(stored, batch.column(0)) for batch in batches), rows)


def _reblocked(chunks: Iterable[Array], rows: int) -> Iterator[Array]:
    """Yield blocks of exactly ``rows`` rows: a batch may end early, with its row group."""
    held: list[Array] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held)) >= rows:  # a batch has at most ``rows``: one block is full
            joined = np.concatenate(held)
            yield joined[:rows]
            held = [joined[rows:]]
    if sum(map(len, held)):
        yield np.concatenate(held)


def _parquet_values(stored: Stored, column: Any) -> Array:
    if not _is_list(column.type):
        return _parquet_flat(stored, column)
    _check_lengths(stored, column)
    return _parquet_flat(stored, column.flatten()).reshape(len(column), *stored.shape[1:])


def _parquet_flat(stored: Stored, values: Any) -> Array:
    if values.null_count:
        raise ValueError(f"{stored.path}: {stored.key} has missing values; drop or fill those rows")
    if stored.dtype.kind == "U":
        return np.array(values.to_pylist(), dtype=str)
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _check_lengths(stored: Stored, column: Any) -> None:
    lengths = _pyarrow().compute.list_value_length(column).fill_null(0).to_numpy()
    wrong = lengths[lengths != stored.shape[1]]
    if len(wrong):
        raise ValueError(
            f"{stored.path}: the rows of {stored.key} must have one length, got {wrong[0]} values "
            f"where the mean is {stored.shape[1]}; write every class of every row"
        )


def _write_parquet(path: Path, arrays: Mapping[str, Array]) -> None:
    pa = _pyarrow()
    _check_table(arrays)
    table = pa.table({key: _parquet_column(values) for key, values in arrays.items()})
    pa.parquet.write_table(table, path)


def _check_table(arrays: Mapping[str, Array]) -> None:
    for key, values in arrays.items():
        if values.ndim not in (1, 2):
            raise ValueError(
                f"a .parquet file cannot hold {key} of shape {values.shape}, only (rows,) and "
                "(rows, classes); write .npz or .safetensors"
            )
    rows = {key: len(values) for key, values in arrays.items()}
    if len(set(rows.values())) > 1:
        counts = _listed(f"{key} {count}" for key, count in rows.items())
        raise ValueError(
            f"the columns of a .parquet file must have as many rows each, got {counts}; "
            "write a file per split, or .npz"
        )


def _parquet_column(values: Array) -> Any:
    pa = _pyarrow()
    flat = pa.array(values.reshape(-1))
    if values.ndim == 1:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


# The formats, and how a file is replaced.


class Format(NamedTuple):
    """How files with one suffix are read and, where one file holds several arrays, written."""

    headers: Callable[[Path], Shard]
    blocks: Callable[[Stored, int], Iterator[Array]]
    write: Callable[[Path, Mapping[str, Array]], None] | None


FORMATS = {
    ".npz": Format(_npz_headers, _npz_blocks, _write_npz),
    ".safetensors": Format(_safetensors_headers, _safetensors_blocks, _write_safetensors),
    ".parquet": Format(_parquet_headers, _parquet_blocks, _write_parquet),
    ".npy": Format(_npy_headers, _npy_blocks, None),
}


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary name next to ``target`` that takes its place when all went well."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
