"""Token tables on disk, in folders of shards.

A folder holds ``table.json`` and the folders ``shard-00000``, ``shard-00001`` and so on. Each has
a ``.npy`` file for the hidden states, one for the document numbers, and one for every column of
the records. If the states of prompts are stored too, ``states.npy`` has the row of each token
among them. A shard gets its name when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IntArray
from calibrant._core.logpartition import Records
from calibrant.llm.fingerprint import ModelFingerprint
from calibrant.llm.tokens.tables import TableShard, TokenTable

FORMAT = 1
HEADER = "table.json"
FINGERPRINT = "mark"
"""Key of the fingerprint in the header."""
COLUMNS = tuple(f.name for f in fields(Records) if f.name != "classes")
MAPPED = ("hidden", "table")
"""Arrays that are memory-mapped; the others are a few numbers per token."""

PathLike: TypeAlias = "str | os.PathLike[str]"
PutRows: TypeAlias = "Callable[[IntArray, Mapping[str, NDArray[Any]], int], None]"


def open_table(folder: PathLike | Sequence[PathLike]) -> TokenTable:
    """Open a table that was collected before.

    Parameters
    ----------
    folder : path, or sequence of paths
        A folder of :func:`collect`, possibly filled by several processes; or several folders,
        read as one table, with the documents numbered on.

    Returns
    -------
    TokenTable
        Hidden states and log-partition tables are read from disk when they are needed.
    """
    outer = [folder] if isinstance(folder, (str, os.PathLike)) else list(folder)
    if not outer:
        raise ValueError("at least one folder of a token table is needed, got none")
    folders = [inner for path in outer for inner in _with_ranks(Path(path))]
    headers = [read_header(inner) for inner in folders]
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
    """The content of ``table.json``."""

    fingerprint: ModelFingerprint
    settings: str  # hash of everything that decides the content of the table
    documents: int  # with those that have no labelled token
    shards: list[int]  # number of tokens of each
    prompts: bool  # are the states of prompts stored too?
    whole: bool  # are those of all preceding tokens, with or without prompts?
    rank: int = 0  # of the process that writes this folder
    ranks: int = 1


def read_header(folder: Path) -> Header:
    """Read ``table.json`` of a folder."""
    file = folder / HEADER
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is not a token table: it has no {HEADER}") from error
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); collect again") from error
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"{file} has format {version}, this version of calibrant reads {FORMAT}: collect again"
        )
    try:
        return Header(ModelFingerprint(**content.pop(FINGERPRINT)), **content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}); collect again") from error


def write_header(folder: Path, header: Header) -> None:
    """Write ``table.json`` atomically."""
    content = asdict(header)
    content = {"format": FORMAT, FINGERPRINT: content.pop("fingerprint"), **content}
    with replacing(folder / HEADER) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")


def shard_folder(folder: Path, number: int) -> Path:
    """Return the folder of a complete shard."""
    return folder / f"shard-{number:05d}"


@contextmanager
def new_shard(folder: Path, number: int) -> Iterator[PutRows]:
    """Yield a function that writes rows of columns; the shard gets its name at the end.

    The columns are memory-mapped files from the start, so memory does not grow with the shard.
    """
    target = shard_folder(folder, number)
    temporary = target.with_name(f".{target.name}")  # an interrupted run may have left one
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    files: dict[str, Any] = {}

    def put(rows: IntArray, columns: Mapping[str, NDArray[Any]], total: int) -> None:
        for name, values in columns.items():
            if name not in files:
                files[name] = np.lib.format.open_memmap(
                    temporary / f"{name}.npy", "w+", values.dtype, (total, *values.shape[1:])
                )
            files[name][rows] = values

    try:
        yield put
        for file in files.values():
            file.flush()
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _with_ranks(folder: Path) -> list[Path]:
    """Return the folder itself, or those that several processes wrote in it."""
    inside = [path for path in folder.glob("rank-*") if path.is_dir()]
    if not inside or (folder / HEADER).exists():
        return [folder]
    headers = {path: read_header(path) for path in inside}
    first = next(iter(headers.values()))
    if sorted(header.rank for header in headers.values()) != list(range(first.ranks)) or any(
        header.settings != first.settings for header in headers.values()
    ):
        raise ValueError(
            f"{folder} must have the tables of all {first.ranks} processes of one run, got "
            f"{', '.join(sorted(path.name for path in inside))}: collect again to complete it"
        )
    return sorted(inside, key=lambda path: headers[path].rank)


def _read_shard(folder: Path, number: int, header: Header, shift: int) -> TableShard:
    """Open one shard; ``shift`` is added to its document numbers."""
    shard, tokens = shard_folder(folder, number), header.shards[number]
    if not shard.is_dir():
        raise ValueError(
            f"{folder} is not finished: {shard.name} of {len(header.shards)} shards is missing; "
            "collect again with the same settings to complete it"
        )
    states = _read_column(shard, "states", tokens) if header.prompts else None
    hidden = _read_column(shard, "hidden", tokens if states is None else int(states[-1]) + 1)
    columns = {name: _read_column(shard, name, tokens) for name in ("documents", *COLUMNS)}
    documents = columns.pop("documents") + shift
    records = Records(**columns, classes=header.fingerprint.vocabulary)
    return TableShard(hidden, records, documents, states)


def _read_column(shard: Path, name: str, rows: int) -> Any:
    path = shard / f"{name}.npy"
    try:
        # a plain array over the mapped one: the subclass makes every small operation slower
        values = np.asarray(np.load(path, mmap_mode="r" if name in MAPPED else None))
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged or missing ({error}); remove {shard} and collect again"
        ) from error
    if len(values) != rows:
        raise ValueError(
            f"{path} must have {rows} rows, got {len(values)}; remove {shard} and collect again"
        )
    return values
