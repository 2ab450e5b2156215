"""Token tables: hidden states and log-partition records of the labelled tokens of documents.

On disk a table is a folder with ``table.json`` and the folders ``shard-00000``, ``shard-00001`` and
so on. Each has a ``.npy`` file for the hidden states, one for the document numbers, and one for
every column of the records. If the states of prompts are stored too, ``states.npy`` has the row of
each token among them. A shard gets its name when every row of it was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrant._core.atomic_files import replacing, temporary_folder
from calibrant._core.checks import BoolArray, IntArray, check_whole
from calibrant.calibrators.logpartition import COLUMNS, Records, concatenate
from calibrant.data.formats import NpyReader
from calibrant.llm.heads.documents import _padded_batches
from calibrant.llm.models.huggingface import ModelFingerprint

_FORMAT = 1
HEADER = "table.json"
_MAPPED = ("hidden", "table")
"""Arrays that are memory-mapped; the others are a few numbers per token."""

Hidden: TypeAlias = NDArray[np.float16]
Selection: TypeAlias = IntArray | BoolArray | slice
PathLike: TypeAlias = "str | os.PathLike[str]"


class _TableShard(NamedTuple):
    """Consecutive tokens that are stored together, with the records of each.

    ``hidden`` are states, possibly with those of prompts, and ``states`` has the row of each token
    among them.
    """

    hidden: Hidden
    records: Records
    documents: IntArray
    states: IntArray

    def places(self) -> IntArray:
        """Position of each token ``(n,)`` among the states of its document.

        States are kept up to the last token that counts, where the next document begins.
        """
        starts = np.flatnonzero(np.diff(self.documents, prepend=-1))
        begin = np.where(starts > 0, self.states[starts - 1] + 1, 0)
        lengths = np.diff(starts, append=len(self.states))
        return np.asarray(self.states - np.repeat(begin, lengths))


class TokenTable:
    """Hidden state, records and document of each labelled token of some texts.

    Tables come from :func:`collect` or :func:`open_table`.

    Attributes
    ----------
    fingerprint : ModelFingerprint
    documents : (n,) int64
        Document number of each token, nondecreasing.
    places : (n,) int64
        Position of each token among the stored states of its document, from 0.
    whole : bool
        True if the states of all preceding tokens are stored, those of prompts included.
    collections : tuple of str
        Identifiers of the runs of :func:`collect` that were read.
    """

    def __init__(
        self,
        shards: Sequence[_TableShard],
        fingerprint: ModelFingerprint,
        whole: bool,
        collections: Iterable[str] = (),
    ) -> None:
        self.fingerprint = fingerprint
        self.whole = whole
        self.collections = tuple(dict.fromkeys(collections))
        self.documents: IntArray = np.concatenate([shard.documents for shard in shards])
        self.places: IntArray = np.concatenate([shard.places() for shard in shards])
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard.documents) for shard in shards])

    def __len__(self) -> int:
        return len(self.documents)

    def hidden(self, selection: Selection = slice(None)) -> Hidden:
        """Hidden states ``(m, width)`` of the tokens of a slice, a mask or an index."""
        located, order = self._located(selection)
        parts = [shard.hidden[shard.states[rows]] for shard, rows in located]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)[order]

    def records(self, selection: Selection = slice(None)) -> Records:
        """Records of the tokens of a slice, a mask or an index; classes are the vocabulary."""
        located, order = self._located(selection)
        parts = [shard.records.take(rows) for shard, rows in located]
        return parts[0] if len(parts) == 1 else concatenate(parts).take(order)

    def texts(self, selection: Selection) -> list[tuple[Hidden, IntArray]]:
        """Return the states ``(t, width)`` of each document, and the positions that count.

        The states end with the last token that counts. All tokens of each document must be
        selected, in order.
        """
        numbers, texts = np.arange(len(self))[selection], []
        starts = np.flatnonzero(np.diff(self.documents[numbers], prepend=-1))
        for run in np.split(numbers, starts[1:]):
            ((shard, rows),), _ = self._located(run[:1])
            begin = int(shard.states[rows[0]] - self.places[run[0]])
            places = self.places[run[0] : run[-1] + 1]
            texts.append((shard.hidden[begin : begin + int(places[-1]) + 1], places))
        return texts

    def document_lengths(self, documents: IntArray) -> IntArray:
        """Number of states of some documents, with those of their prompts."""
        after = np.searchsorted(self.documents, documents, side="right")
        return np.asarray(self.places[after - 1] + 1)

    def document_chunks(self, documents: IntArray, size: int) -> Iterator[IntArray]:
        """Rows of whole documents, ``size`` states with padding at a time, but at least one."""
        first, after = (np.searchsorted(self.documents, documents, s) for s in ("left", "right"))
        rows = [np.arange(a, b) for a, b in zip(first, after, strict=True)]
        for run in _padded_batches(self.document_lengths(documents).tolist(), size):
            yield np.concatenate(rows[run])

    def _located(self, selection: Selection) -> tuple[list[tuple[_TableShard, IntArray]], IntArray]:
        """Return the shards that hold the tokens, each with their rows, and their order.

        That is the place of each token among the rows of all these shards. There is at least one
        shard, so that a selection without tokens has shapes, too.
        """
        numbers = np.arange(len(self))[selection]
        home = np.searchsorted(self._ends, numbers, side="right")
        located = [
            (shard, numbers[home == k] - self._ends[k] + len(shard.documents))
            for k, shard in enumerate(self._shards)
            if k in home
        ]
        order = np.argsort(np.argsort(home, kind="stable"), kind="stable")
        return located or [(self._shards[0], numbers)], order


def _as_half(values: ArrayLike) -> Hidden:
    """Convert values to half precision, clipped to its range."""
    array = np.asarray(values)
    if array.dtype == np.float16:
        return array
    largest = float(np.finfo(np.float16).max)
    return np.asarray(np.clip(array, -largest, largest), dtype=np.float16)


def open_table(folder: PathLike | Sequence[PathLike]) -> TokenTable:
    """Open a table that was collected before.

    ``folder`` is that of :func:`collect`, possibly filled by several processes; or several folders,
    read as one table, with the documents numbered on. Hidden states and log-partition tables are
    read from disk when they are needed.
    """
    outer = [folder] if isinstance(folder, (str, os.PathLike)) else list(folder)
    if not outer:
        raise ValueError("at least one folder of a token table is needed, got none")
    folders = [inner for path in outer for inner in _with_ranks(Path(path))]
    headers = [_read_header(inner) for inner in folders]
    for number, (inner, header) in enumerate(zip(folders, headers, strict=True)):
        headers[0].fingerprint.check(header.fingerprint, str(inner))
        if header in headers[:number]:
            raise ValueError(
                f"{inner} holds the same documents as {folders[headers.index(header)]}: pass each "
                "table once, or copies of training tokens end up in the held-out part"
            )
    shifts = accumulate((header.documents for header in headers), initial=0)
    shards = [
        _read_shard(inner, number, header, shift)
        for inner, header, shift in zip(folders, headers, shifts, strict=False)
        for number in range(len(header.shards))
    ]
    whole = all(header.whole for header in headers)
    collections = (f"{header.settings}-{header.rank}" for header in headers)
    return TokenTable(shards, headers[0].fingerprint, whole, collections)


@dataclass(frozen=True)
class Header:
    """The content of ``table.json``.

    ``settings`` is a hash of everything that decides the content. ``documents`` counts also those
    without a labelled token; ``shards`` has the tokens of each shard. ``prompts`` says if states of
    prompts are stored too, ``whole`` if the states of all preceding tokens are. ``rank`` is the
    number of the process that writes the folder, one of ``ranks``.
    """

    fingerprint: ModelFingerprint
    settings: str
    documents: int
    shards: list[int]
    prompts: bool
    whole: bool
    rank: int = 0
    ranks: int = 1


def _read_header(folder: Path) -> Header:
    file = folder / HEADER
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content.pop("format", None)
        if version == _FORMAT:
            header = Header(ModelFingerprint(**content.pop("fingerprint")), **content)
            for count in (header.documents, *header.shards):
                check_whole("a number of documents or tokens", count, least=0)
            return header
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is not a token table: it has no {HEADER}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}); collect again") from error
    raise ValueError(f"{file} has format {version}, {_FORMAT} is needed: collect again")


def _write_header(folder: Path, header: Header) -> None:
    with replacing(folder / HEADER) as temporary:
        temporary.write_text(json.dumps({"format": _FORMAT, **asdict(header)}), encoding="utf-8")


def _shard_folder(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def _with_ranks(folder: Path) -> list[Path]:
    """Return the folder itself, or those that several processes wrote in it."""
    inside = [path for path in folder.glob("rank-*") if path.is_dir()]
    if not inside or (folder / HEADER).exists():
        return [folder]
    headers = {path: _read_header(path) for path in inside}
    first = headers[inside[0]]
    ranks = sorted(header.rank for header in headers.values())
    same = all(header.settings == first.settings for header in headers.values())
    if ranks != list(range(first.ranks)) or not same:
        raise ValueError(
            f"{folder} must have the tables of all {first.ranks} processes of one run, got "
            f"{', '.join(sorted(path.name for path in inside))}: collect again to complete it"
        )
    return sorted(inside, key=lambda path: headers[path].rank)


def _read_shard(folder: Path, number: int, header: Header, shift: int) -> _TableShard:
    """Open one shard; ``shift`` is added to its document numbers."""
    shard, tokens = _shard_folder(folder, number), header.shards[number]
    if not shard.is_dir():
        raise ValueError(
            f"{folder} is not finished: {shard.name} of {len(header.shards)} shards is missing; "
            "collect again with the same settings to complete it"
        )
    columns = {name: _read_column(shard, name, tokens) for name in ("documents", *COLUMNS)}
    states = _read_column(shard, "states", tokens) if header.prompts else np.arange(tokens)
    hidden = _read_column(shard, "hidden", int(states[-1]) + 1)
    documents = columns.pop("documents")
    records = Records(**columns, classes=header.fingerprint.vocabulary)
    last, labels = header.documents - 1, records.labels
    if not (
        (records.possible > 0).all()
        and (np.diff(documents, prepend=0, append=last) >= 0).all()
        and ((labels >= 0) & (labels < records.classes)).all()
    ):  # no model gives such rows, for instance zeros
        raise ValueError(
            f"{shard} has rows that were never written, or damaged ones; remove it and collect "
            "again with the same settings"
        )
    return _TableShard(hidden, records, documents + shift, states)


def _read_column(shard: Path, name: str, rows: int) -> Any:
    path = shard / f"{name}.npy"
    try:
        # a plain array over the mapped one: the subclass makes every small operation slower
        mapped = np.asarray(NpyReader(str(path)).mapped())
        values = mapped if name in _MAPPED else np.array(mapped)
        if values.shape[:1] != (rows,) or values.dtype.kind not in "biuf":
            raise ValueError(f"it must have {rows} rows of numbers, got {values.shape}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged or missing ({error}); remove {shard} and collect again"
        ) from error
    return values


def _write_shard(folder: Path, number: int, columns: Mapping[str, NDArray[Any]]) -> None:
    """Write the columns of a shard, which gets its name when all are on the disk."""
    target = _shard_folder(folder, number)
    try:
        with temporary_folder(target) as temporary:
            for name, values in columns.items():
                with (temporary / f"{name}.npy").open("wb") as stream:
                    np.save(stream, np.ascontiguousarray(values), allow_pickle=False)
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(temporary, target)
    except OSError as error:
        message = (
            f"{target} could not be written ({error.strerror or error}); complete shards are "
            "kept: make room if the disk is full, and start again to continue"
        )
        raise OSError(error.errno, message) from error
