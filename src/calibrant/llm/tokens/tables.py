"""Token tables: hidden states and log-partition records of the labelled tokens of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrant._core.checks import BoolArray, IntArray
from calibrant._core.logpartition import Records, concatenate
from calibrant.llm.fingerprint import ModelFingerprint

T = TypeVar("T")
Hidden: TypeAlias = NDArray[np.float16]
Selection: TypeAlias = IntArray | BoolArray | slice


class TableShard(NamedTuple):
    """Consecutive tokens that are stored together."""

    hidden: Hidden  # (states, width), possibly with those of prompts
    records: Records
    documents: IntArray  # (n,)
    states: IntArray | None = None  # (n,) row of each token in hidden; None: its own number

    def rows(self, selection: Selection) -> Selection:
        """Rows of ``hidden`` for some tokens."""
        return selection if self.states is None else self.states[selection]

    def places(self) -> IntArray:
        """Position of each token ``(n,)`` among the states of its document.

        States are kept up to the last token that counts, where the next document begins.
        """
        rows = np.asarray(self.rows(np.arange(len(self.documents))))
        starts = np.flatnonzero(np.diff(self.documents, prepend=-1))
        begin = np.where(starts > 0, rows[starts - 1] + 1, 0)
        return np.asarray(rows - np.repeat(begin, np.diff(starts, append=len(rows))))


class Text(NamedTuple):
    """Hidden states ``(t, width)`` of a document, and the positions ``(m,)`` that count."""

    states: Hidden
    places: IntArray


class TokenTable:
    """Hidden state, records and document of each labelled token of some texts.

    Tables come from :func:`collect`, :func:`open_table` or :meth:`from_arrays`.

    Attributes
    ----------
    fingerprint : ModelFingerprint
        Of the model that was run.
    documents : (n,) int64
        Document number of each token, nondecreasing.
    places : (n,) int64
        Position of each token among the stored states of its document, from 0.
    whole : bool
        True if the states of all preceding tokens are stored, those of prompts included.
    collections : tuple of str
        Identifiers of the runs of :func:`collect` that were read; empty for a table in memory.

    Examples
    --------
    >>> from calibrant._core.logpartition import tabulate
    >>> from calibrant._core.chunks import examples
    >>> tiny = ModelFingerprint("tiny", 2, 3, "0" * 16, None)
    >>> records = tabulate(examples(np.eye(3), [0, 1, 1]))
    >>> table = TokenTable.from_arrays(np.ones((3, 2)), records, [0, 0, 1], tiny)
    >>> len(table), table.hidden(table.documents == 0).shape
    (3, (2, 2))
    >>> table.records(slice(1, 3)).correct
    array([ True, False])
    """

    def __init__(
        self,
        shards: Sequence[TableShard],
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

    @classmethod
    def from_arrays(
        cls,
        hidden: ArrayLike,
        records: Records,
        documents: ArrayLike,
        fingerprint: ModelFingerprint,
    ) -> TokenTable:
        """Make a table in memory, of texts without prompts.

        ``hidden`` ``(n, width)`` is stored in half precision; ``records`` have the vocabulary as
        classes; ``documents`` ``(n,)`` must not decrease.
        """
        states, numbers = as_half(hidden), np.asarray(documents, dtype=np.int64)
        shapes = {
            "hidden": (states.shape, (len(records), fingerprint.hidden_size)),
            "documents": (numbers.shape, (len(records),)),
            "classes of the records": (records.classes, fingerprint.vocabulary),
        }
        for name, (got, wanted) in shapes.items():
            if got != wanted:
                raise ValueError(
                    f"{name} must be {wanted} for {len(records)} tokens of {fingerprint.name}, "
                    f"got {got}"
                )
        if (np.diff(numbers) < 0).any():
            raise ValueError("documents must not decrease: sort the tokens by document")
        return cls([TableShard(states, records, numbers)], fingerprint, True)

    def __len__(self) -> int:
        return len(self.documents)

    def hidden(self, selection: Selection = slice(None)) -> Hidden:
        """Hidden states ``(m, width)`` of the tokens of a slice, a mask or an index."""
        return self._gathered(
            selection,
            lambda shard, rows: shard.hidden[shard.rows(rows)],
            lambda hidden, rows: hidden[rows],
            lambda parts: np.concatenate(parts),
        )

    def records(self, selection: Selection = slice(None)) -> Records:
        """Records of the tokens of a slice, a mask or an index; the vocabulary are the classes."""
        return self._gathered(
            selection, lambda shard, rows: shard.records.take(rows), Records.take, concatenate
        )

    def texts(self, selection: Selection) -> list[Text]:
        """Return the states of each selected document, up to its last token that counts.

        All tokens of each document must be selected, in order.
        """
        numbers = self._numbers(selection)
        starts = np.flatnonzero(np.diff(self.documents[numbers], prepend=-1))
        return [self._text(int(run[0]), int(run[-1])) for run in np.split(numbers, starts[1:])]

    def _text(self, first: int, last: int) -> Text:
        k = int(np.searchsorted(self._ends, first, side="right"))
        places = self.places[first : last + 1]
        row = np.asarray(self._shards[k].rows(np.array([first - self._start(k)])))
        begin = int(row[0] - places[0])
        return Text(self._shards[k].hidden[begin : begin + int(places[-1]) + 1], places)

    def _gathered(
        self,
        selection: Selection,
        read: Callable[[TableShard, Selection], T],
        take: Callable[[T, IntArray], T],
        join: Callable[[list[T]], T],
    ) -> T:
        """Read tokens from the shards that hold them, in the order of the selection."""
        if isinstance(selection, slice) and selection.step in (None, 1):
            parts = [read(self._shards[k], rows) for k, rows in self._cut(selection)]
            return parts[0] if len(parts) == 1 else join(parts)
        numbers = self._numbers(selection)
        home = np.searchsorted(self._ends, numbers, side="right")
        parts, places = [read(self._shards[0], slice(0, 0))], [np.empty(0, np.int64)]
        for k in np.unique(home):
            places.append(np.flatnonzero(home == k))
            parts.append(read(self._shards[k], numbers[places[-1]] - self._start(k)))
        order = np.concatenate(places)
        joined = join(parts[1:] or parts)
        return joined if (np.diff(order) > 0).all() else take(joined, np.argsort(order))

    def _cut(self, selection: slice) -> list[tuple[int, slice]]:
        """Shards that a slice touches, each with its rows there; at least one."""
        start, stop, _ = selection.indices(len(self))
        cuts = []
        for k, end in enumerate(self._ends):
            first, last = max(start, self._start(k)), min(stop, int(end))
            if first < last:
                cuts.append((k, slice(first - self._start(k), last - self._start(k))))
        return cuts or [(0, slice(0, 0))]

    def _start(self, k: int) -> int:
        return int(self._ends[k]) - len(self._shards[k].documents)

    def _numbers(self, selection: Selection) -> IntArray:
        """Numbers of the tokens of a slice, a mask or an index."""
        if isinstance(selection, slice):
            return np.arange(*selection.indices(len(self)))
        chosen: NDArray[Any] = np.asarray(selection)
        if chosen.dtype == bool:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask must be ({len(self)},), got {chosen.shape}")
            return np.flatnonzero(chosen)
        numbers: IntArray = np.where(chosen < 0, chosen + len(self), chosen).astype(np.int64)
        if len(numbers) and not (0 <= numbers.min() <= numbers.max() < len(self)):
            raise IndexError(f"tokens are numbered from 0 to {len(self) - 1}, got {chosen}")
        return numbers


def as_half(values: ArrayLike) -> Hidden:
    """Convert values to half precision, clipped to its range."""
    array = np.asarray(values)
    if array.dtype == np.float16:
        return array
    largest = float(np.finfo(np.float16).max)
    return np.asarray(np.clip(array, -largest, largest), dtype=np.float16)
