"""Token tables: what a frozen language model said about every token, in folders of shards.

A folder holds ``table.json`` and the folders ``shard-00000``, ``shard-00001`` and so on. Each has
a ``.npy`` file for the hidden states, one for the number of the document, and one for every column
of the records. Where the states of prompts are kept too, ``states.npy`` has the row of each token
among them. A shard gets its name when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import BoolArray, IntArray
from calibrant._core.logpartition import Records, concatenate
from calibrant.llm.fingerprint import ModelMark

FORMAT = 1
HEADER = "table.json"
COLUMNS = tuple(f.name for f in fields(Records) if f.name != "classes")
WIDE = ("hidden", "table")
"""Arrays that are mapped; the others are a few numbers per token and are read."""

T = TypeVar("T")
Hidden: TypeAlias = NDArray[np.float16]
Which: TypeAlias = IntArray | BoolArray | slice
Where: TypeAlias = "str | os.PathLike[str]"


class _Part(NamedTuple):
    """A run of tokens that lie together."""

    hidden: Hidden  # (states, width), those of prompts among them
    records: Records
    documents: IntArray  # (n,)
    states: IntArray | None = None  # (n,) row of each token in hidden, where it is not its own

    def rows(self, which: Which) -> Which:
        """Rows of ``hidden`` for some tokens."""
        return which if self.states is None else self.states[which]

    def places(self) -> IntArray:
        """Place of each token ``(n,)`` among the states of its document.

        States are kept up to the last token that counts: after it the next document begins.
        """
        rows = np.asarray(self.rows(np.arange(len(self.documents))))
        starts = np.flatnonzero(np.diff(self.documents, prepend=-1))
        begin = np.where(starts > 0, rows[starts - 1] + 1, 0)
        return np.asarray(rows - np.repeat(begin, np.diff(starts, append=len(rows))))


class TokenTable:
    """Hidden state, records and document of each labelled token of some texts.

    Tables come from :func:`collect`, :func:`open_table` or :meth:`of`.

    Attributes
    ----------
    mark : ModelMark
        The model that they belong to.
    documents : (n,) int64
        Number of each token's document, nondecreasing.
    places : (n,) int64
        Place of each token among the states of its document that are kept, from 0 on.
    whole : bool
        Whether these are the states of all tokens before it, those of prompts too.
    sources : tuple of str
        Digests of the collections that it was read from; none of a table in memory.

    Examples
    --------
    >>> from calibrant._core.logpartition import tabulate
    >>> from calibrant._core.chunks import examples
    >>> mark = ModelMark("tiny", 2, 3, "0" * 16, None)
    >>> records = tabulate(examples(np.eye(3), [0, 1, 1]))
    >>> table = TokenTable.of(np.ones((3, 2)), records, [0, 0, 1], mark)
    >>> len(table), table.hidden(table.documents == 0).shape
    (3, (2, 2))
    >>> table.records(slice(1, 3)).correct
    array([ True, False])
    """

    def __init__(
        self, parts: Sequence[_Part], mark: ModelMark, whole: bool, sources: Iterable[str] = ()
    ) -> None:
        self.mark = mark
        self.whole = whole
        self.sources = tuple(dict.fromkeys(sources))
        self.documents: IntArray = np.concatenate([part.documents for part in parts])
        self.places: IntArray = np.concatenate([part.places() for part in parts])
        self._parts = list(parts)
        self._ends = np.cumsum([len(part.documents) for part in parts])

    @classmethod
    def of(
        cls, hidden: ArrayLike, records: Records, documents: ArrayLike, mark: ModelMark
    ) -> TokenTable:
        """A table in memory, of whole texts.

        Parameters
        ----------
        hidden : (n, width)
            Kept in half precision.
        records : Records
            Of the same tokens, with the vocabulary as classes.
        documents : (n,) int
            Number of each token's document, nondecreasing.
        mark : ModelMark
        """
        states, numbers = as_half(hidden), np.asarray(documents, dtype=np.int64)
        wanted = {
            "hidden": (states.shape, (len(records), mark.hidden_size)),
            "documents": (numbers.shape, (len(records),)),
            "classes of the records": (records.classes, mark.vocabulary),
        }
        for name, (got, want) in wanted.items():
            if got != want:
                raise ValueError(
                    f"{name} must be {want} for {len(records)} tokens of {mark.name}, got {got}"
                )
        if (np.diff(numbers) < 0).any():
            raise ValueError("documents must not decrease: sort the tokens by document first")
        return cls([_Part(states, records, numbers)], mark, True)

    def __len__(self) -> int:
        return len(self.documents)

    def hidden(self, which: Which = slice(None)) -> Hidden:
        """Hidden states ``(m, width)`` of the tokens of a slice, a mask or an index."""
        return self._gathered(
            which, lambda part, rows: part.hidden[part.rows(rows)], lambda x, rows: x[rows], _joined
        )

    def texts(self, which: Which) -> list[Text]:
        """Each document of some tokens, which must be all of it, with the states before them.

        Parameters
        ----------
        which : slice, mask or index
            Tokens of whole documents, in order.

        Returns
        -------
        list of Text
            States ``(t, width)`` of a document up to its last token that counts, and the places
            ``(m,)`` among them of those that do.
        """
        numbers = self._numbers(which)
        starts = np.flatnonzero(np.diff(self.documents[numbers], prepend=-1))
        return [self._text(int(run[0]), int(run[-1])) for run in np.split(numbers, starts[1:])]

    def _text(self, first: int, last: int) -> Text:
        k = int(np.searchsorted(self._ends, first, side="right"))
        places = self.places[first : last + 1]
        row = np.asarray(self._parts[k].rows(np.array([first - self._start(k)])))
        begin = int(row[0] - places[0])
        return Text(self._parts[k].hidden[begin : begin + int(places[-1]) + 1], places)

    def records(self, which: Which = slice(None)) -> Records:
        """Records of the tokens of a slice, a mask or an index; the vocabulary are the classes."""
        return self._gathered(
            which, lambda part, rows: part.records.take(rows), Records.take, concatenate
        )

    def _gathered(
        self,
        which: Which,
        taken: Callable[[_Part, Which], T],
        take: Callable[[T, IntArray], T],
        join: Callable[[list[T]], T],
    ) -> T:
        """Take rows from the parts that hold them, in the order that was asked for."""
        if isinstance(which, slice) and which.step in (None, 1):
            pieces = [taken(self._parts[k], rows) for k, rows in self._cut(which)]
            return pieces[0] if len(pieces) == 1 else join(pieces)
        numbers = self._numbers(which)
        home = np.searchsorted(self._ends, numbers, side="right")
        pieces, places = [taken(self._parts[0], slice(0, 0))], [np.empty(0, np.int64)]
        for k in np.unique(home):
            places.append(np.flatnonzero(home == k))
            pieces.append(taken(self._parts[k], numbers[places[-1]] - self._start(k)))
        asked = np.concatenate(places)
        found = join(pieces[1:] or pieces)
        in_order = (np.diff(asked) > 0).all()
        return found if in_order else take(found, np.argsort(asked))

    def _cut(self, which: slice) -> list[tuple[int, slice]]:
        """Parts that a run of tokens touches, each with its rows there; never none."""
        start, stop, _ = which.indices(len(self))
        found = []
        for k, end in enumerate(self._ends):
            first, last = max(start, self._start(k)), min(stop, int(end))
            if first < last:
                found.append((k, slice(first - self._start(k), last - self._start(k))))
        return found or [(0, slice(0, 0))]

    def _start(self, k: int) -> int:
        return int(self._ends[k]) - len(self._parts[k].documents)

    def _numbers(self, which: Which) -> IntArray:
        """Numbers of the tokens of a slice, a mask or an index."""
        if isinstance(which, slice):
            return np.arange(*which.indices(len(self)))
        chosen: NDArray[Any] = np.asarray(which)
        if chosen.dtype == bool:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask of {len(self)} tokens is wanted, got {chosen.shape}")
            return np.flatnonzero(chosen)
        numbers: IntArray = np.where(chosen < 0, chosen + len(self), chosen).astype(np.int64)
        if len(numbers) and not (0 <= numbers.min() <= numbers.max() < len(self)):
            raise IndexError(f"tokens are numbered from 0 to {len(self) - 1}, got {chosen}")
        return numbers


class Text(NamedTuple):
    """Hidden states ``(t, width)`` of a document, and the places ``(m,)`` that count."""

    states: Hidden
    places: IntArray


def _joined(pieces: list[Hidden]) -> Hidden:
    return np.concatenate(pieces)


def as_half(values: ArrayLike) -> Hidden:
    """Values in half precision; what is beyond its largest number is cut there."""
    given = np.asarray(values)
    if given.dtype == np.float16:
        return given
    largest = float(np.finfo(np.float16).max)
    return np.asarray(np.clip(given, -largest, largest), dtype=np.float16)


@dataclass(frozen=True)
class Header:
    """What ``table.json`` says of a folder.

    Attributes
    ----------
    mark : ModelMark
    settings : str
        Digest of all that decides what stands in the table.
    documents : int
        How many there are, with those that have no labelled token.
    shards : list of int
        Number of tokens of each shard.
    prompts : bool
        Whether the states of prompts are kept too.
    whole : bool
        Whether the states of all tokens before each one are there, asked for or not.
    rank, ranks : int
        Which of how many processes writes this folder.
    """

    mark: ModelMark
    settings: str
    documents: int
    shards: list[int]
    prompts: bool
    whole: bool
    rank: int = 0
    ranks: int = 1


def read_header(folder: Path) -> Header:
    """Read ``table.json`` of a folder."""
    try:
        content = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder} is no token table: it has no {HEADER}; calibrant llm collect makes one"
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder / HEADER} is damaged ({error}); collect again") from error
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"{folder / HEADER} has format {version}, this version reads {FORMAT}: install a "
            "version of calibrant that fits, or collect again"
        )
    try:
        return Header(**{**content, "mark": ModelMark(**content["mark"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / HEADER} is damaged ({error}); collect again") from error


def write_header(folder: Path, header: Header) -> None:
    """Write ``table.json`` as a whole."""
    with replacing(folder / HEADER) as temporary:
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(header)}), encoding="utf-8")


def shard_folder(folder: Path, number: int) -> Path:
    """Where a shard lies once it is whole."""
    return folder / f"shard-{number:05d}"


Put: TypeAlias = "Callable[[IntArray, Mapping[str, NDArray[Any]], int], None]"


@contextmanager
def new_shard(folder: Path, number: int) -> Iterator[Put]:
    """Yield a function that puts columns at some of all rows; the shard is named when all is well.

    The columns lie in files from the start, so that memory does not grow with the shard.
    """
    target = shard_folder(folder, number)
    temporary = target.with_name(f".{target.name}")  # a killed run may have left one
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


def open_table(folder: Where | Sequence[Where]) -> TokenTable:
    """Open a table that was collected before.

    Parameters
    ----------
    folder : path, or sequence of paths
        A folder of :func:`collect`, also one that several processes have filled; or several, which
        are read as one table, with the documents of each numbered after those before it.

    Returns
    -------
    TokenTable
        Hidden states and log-partition tables stay on the disk until they are asked for.
    """
    given = [folder] if isinstance(folder, (str, os.PathLike)) else list(folder)
    if not given:
        raise ValueError("at least one folder of a token table is wanted, got none")
    folders = [inner for outer in given for inner in _with_ranks(Path(outer))]
    headers = [read_header(inner) for inner in folders]
    for number, (inner, header) in enumerate(zip(folders, headers, strict=True)):
        headers[0].mark.check(header.mark, str(inner))
        if header in headers[:number]:
            raise ValueError(
                f"{inner} holds the same documents as {folders[headers.index(header)]}: a table "
                "counts once, or copies of a token judge what was trained on it"
            )
    shifts = accumulate((header.documents for header in headers), initial=0)
    parts = [
        _read_shard(inner, number, header, shift)
        for inner, header, shift in zip(folders, headers, shifts, strict=False)
        for number in range(len(header.shards))
    ]
    whole = all(header.whole for header in headers)
    sources = (f"{header.settings}-{header.rank}" for header in headers)
    return TokenTable(parts, headers[0].mark, whole, sources)


def _with_ranks(folder: Path) -> list[Path]:
    """The folder itself, or those that the processes of a collection wrote in it."""
    inside = [path for path in folder.glob("rank-*") if path.is_dir()]
    if not inside or (folder / HEADER).exists():
        return [folder]
    headers = {path: read_header(path) for path in inside}
    first = next(iter(headers.values()))
    if sorted(header.rank for header in headers.values()) != list(range(first.ranks)) or any(
        header.settings != first.settings for header in headers.values()
    ):
        raise ValueError(
            f"{folder} must have the tables of all {first.ranks} processes of one collection, got "
            f"{', '.join(sorted(path.name for path in inside))}: collect again with the same "
            "settings, which goes on where it stopped"
        )
    return sorted(inside, key=lambda path: headers[path].rank)


def _read_shard(folder: Path, number: int, header: Header, shift: int) -> _Part:
    """Open one shard; its document numbers are moved by ``shift``."""
    shard, tokens = shard_folder(folder, number), header.shards[number]
    if not shard.is_dir():
        raise ValueError(
            f"{folder} is not finished: {shard.name} of {len(header.shards)} shards is not there; "
            "collect again with the same settings, which goes on where it stopped"
        )
    states = _read(shard, "states", tokens) if header.prompts else None
    hidden = _read(shard, "hidden", tokens if states is None else int(states[-1]) + 1)
    columns = {name: _read(shard, name, tokens) for name in ("documents", *COLUMNS)}
    documents = columns.pop("documents") + shift
    return _Part(hidden, Records(**columns, classes=header.mark.vocabulary), documents, states)


def _read(shard: Path, name: str, rows: int) -> Any:
    path = shard / f"{name}.npy"
    try:
        # a plain array over the mapped one: the subclass makes every small operation slower
        found = np.asarray(np.load(path, mmap_mode="r" if name in WIDE else None))
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged or missing ({error}); remove {shard} and collect again"
        ) from error
    if len(found) != rows:
        raise ValueError(
            f"{path} must have {rows} rows, got {len(found)}; remove {shard} and collect again"
        )
    return found
