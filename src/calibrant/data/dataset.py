"""Datasets: everything in a prediction file, and its splits, walked over in chunks of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from calibrant._core import checks
from calibrant._core.checks import IGNORED, IntArray
from calibrant._core.class_names import class_order, columns_in_order, numbers_in_order
from calibrant._core.engines import current_work, silently
from calibrant._core.messages import comma_separated, unknown_name
from calibrant._core.probs import Zeros, logits_from_probs
from calibrant._core.showing import one_line
from calibrant.data.formats import Array
from calibrant.data.shards import (
    ARRAY_KEYS,
    CHUNK,
    CLASS_NAMES,
    SCORES,
    VAL_NAMES,
    BadShard,
    Chunk,
    Columns,
    Sample,
    Shard,
    _agreeing,
    _head_columns,
    _run_or_refuse,
    _run_shard,
    _sampled_labels,
    _seen_columns,
    array_column,
    columns_by_split,
    counted,
    full_key,
    located,
    read_all,
    run_all,
)
from calibrant.data.tables import BY_RULES, ColumnNames

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
FIT_SPLITS = ("val", "")
TEST_SPLITS = ("test", "")
ROLES = ("sample_weight", "by", "groups")
IN_MEMORY = "the arrays"
"""Stands in place of the path of a dataset that is no file."""


class Sums(Protocol):
    """Sums that a pass over chunks adds up, such as a :class:`calibrant.Accumulator`."""

    def like(self) -> Self: ...  # noqa: D102
    def add(self, *args: Any, **columns: Any) -> object: ...  # noqa: D102
    def merge(self, other: Self) -> object: ...  # noqa: D102


S = TypeVar("S", bound=Sums)


@dataclass(frozen=True)
class Split:
    """The examples under one name, over all shards that have it; the unnamed split is ``""``.

    What is read whole is kept, so that several methods share it.
    """

    dataset: Dataset
    name: str
    shards: list[Shard]
    sample: Sample | None = None  # of the rows whose labels count
    floor: float = 0.0  # what zeros count as in a fit on probabilities, see floored()

    def __repr__(self) -> str:
        return one_line(self, f"{self.name!r} of {self.path}", f"{self.rows:,} rows", *self.keys)

    @property
    def path(self) -> str:
        """Path of the dataset."""
        return self.dataset.path

    @property
    def rows(self) -> int:
        """Number of examples."""
        return sum(shard.rows for shard in self.shards)

    @property
    def keys(self) -> list[str]:
        """Columns that every shard has, as stored: with probs in place of logits, ``"probs"``."""
        return [key for key in self.shards[0].columns if all(key in s.columns for s in self.shards)]

    @property
    def further(self) -> list[str]:
        """Further columns with one value for each example, such as ids, metadata and weights."""
        first = self.shards[0].columns
        return [key for key in self.keys if key not in ARRAY_KEYS and len(first[key].shape) == 1]

    @property
    def domain(self) -> str:
        """``"logits"`` or ``"probs"``; an error if the split has neither."""
        self.shards[0].column("logits")
        return "logits" if "logits" in self.shards[0].columns else "probs"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example's scores: ``(classes,)``, or ``()`` for one logit each."""
        return self.shards[0].column("logits").shape[1:]

    @property
    def classes(self) -> int:
        """Number of classes; one logit per example means two."""
        return self.shape[-1] if self.shape else 2

    @property
    def chunk_rows(self) -> int:
        """Number of rows whose scores make a chunk."""
        return max(1, CHUNK // max(1, math.prod(self.shape)))

    @property
    def has_features(self) -> bool:
        """True if every shard has features."""
        return "features" in self.keys

    def read(self, column: str) -> Array:
        """Return the whole of a column; a single ``.npy`` file is mapped, not loaded.

        Columns are as they are stored, but ``"logits"`` are made of probabilities where the split
        has these.
        """
        values = read_all(_agreeing(self.shards, column))
        if column != "logits" or self.domain == "logits":
            return values
        with located(self.path):
            return self._from_probs(values)

    @cached_property
    def labels(self) -> IntArray:
        """Labels of all rows; if the weight is 0, the label is ignored."""
        with located(self.path):
            labels = checks.as_labels(self.read("labels"))
            if self.sample is not None:
                labels = _sampled_labels(labels, self.sample.keeps(0, len(labels)))
            if self.weights is None:
                return labels
            weight = checks.as_weight(self.weights, labels.shape).reshape(labels.shape)
            return np.where(weight > 0, labels, IGNORED)

    @cached_property
    def logits(self) -> Array:
        """Logits of all rows; probabilities have become logits."""
        return self.read("logits")

    @property
    def _from_probs(self) -> Callable[[Array], Array]:
        return partial(logits_from_probs, tags=self.dataset.multilabel, floor=self.floor)

    def floored(self) -> Split:
        """Return the split as a fit takes it: with a floor, if it has probabilities.

        A warning tells of zeros among those of labelled examples.
        """
        if self.floor or self.domain == "logits":
            return self
        zeros = Zeros()
        with silently():
            for found in self.map(_zeros, "probs", "labels", "sample_weight"):
                zeros = zeros.plus(found)
        floor = zeros.floor(2 if self.dataset.multilabel else self.classes)
        if zeros.exact:
            checks.warn(
                f"{zeros.exact:,} of {zeros.total:,} probabilities are 0 and have no logarithm: "
                f"they count as {floor:.2g} in the fit and after it, as smaller ones do; save "
                "logits to avoid it",
                stacklevel=5,
            )
        return replace(self, floor=floor)

    @cached_property
    def features(self) -> Array:
        """Features of all rows."""
        return self.read("features")

    @cached_property
    def weights(self) -> Array | None:
        """Weights of the examples, if a column of weights was named."""
        name = self.dataset.sample_weight
        return None if name is None else self.read(name)

    @cached_property
    def groups(self) -> Array | None:
        """Groups that stay together in folds, if a column of groups was named."""
        name = self.dataset.groups
        return None if name is None else self.read(name)

    def with_column(self, name: str, values: Array) -> Split:
        """Return the same rows with a column added or replaced."""
        ends = np.cumsum([shard.rows for shard in self.shards])
        shards = [
            replace(shard, columns={**shard.columns, name: array_column(name, part, shard.path)})
            for shard, part in zip(self.shards, np.split(values, ends[:-1]), strict=True)
        ]
        return replace(self, shards=shards)

    def in_order(self, names: Sequence[str] | None) -> Split:
        """Return the split with its classes in the order of these names, as of a dataset."""
        order = class_order(names, self.dataset.class_names, self.path)
        if order is None:
            return self
        views = self.dataset.views(order)
        shards = [replace(s, columns=_seen_columns(s.columns, views)) for s in self.shards]
        return replace(self, dataset=self.dataset.in_order(names), shards=shards)

    def walk(
        self,
        task: Callable[[Iterator[Chunk]], T],
        *columns: str,
        rows: int | None = None,
        skipped: dict[str, str] | None = None,
    ) -> Iterator[T]:
        """Yield ``task(chunks)`` for every shard, in order, with the executor of :func:`use`.

        ``task`` is called with an iterator over the chunks of a shard; its ValueErrors and
        TypeErrors get the file and the row in front. ``"logits"`` are converted from probs where
        those are stored; ``"sample_weight"``, ``"by"`` and ``"groups"`` are left out if the
        dataset names no columns for them. By default ``rows`` make about four million numbers.
        With an executor each shard is a task, which must be picklable for a process pool. A shard
        that cannot be read is an error, unless ``skipped`` is passed: it gets the message by the
        path.
        """
        roles = {role: getattr(self.dataset, role) for role in ROLES}
        wanted = {name: roles.get(name, name) for name in columns}
        stored = {name: column for name, column in wanted.items() if column is not None}
        widths = [self.shards[0].column(column).width for column in stored.values()]
        convert = self._from_probs if "logits" in stored and self.domain == "probs" else None
        rows = max(1, CHUNK // max(1, sum(widths))) if rows is None else rows
        work: Any = partial(_run_shard, task, stored, convert, rows, self.sample)
        work = work if skipped is None else partial(_run_or_refuse, work)
        progress, total, done = current_work().progress, self.rows, 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        results = run_all(work, self.shards, report)
        for shard, result in zip(self.shards, results, strict=True):
            if isinstance(result, BadShard):
                assert skipped is not None
                skipped[shard.path] = result.message
            else:
                yield result

    def map(
        self, task: Callable[[Chunk], T], *columns: str, rows: int | None = None
    ) -> Iterator[T]:
        """Yield ``task(chunk)`` for every chunk, in order; for the rest see :meth:`walk`."""
        for results in self.walk(partial(_each, task), *columns, rows=rows):
            yield from results

    def reduce(
        self,
        sums: S,
        *columns: str,
        rows: int | None = None,
        skipped: dict[str, str] | None = None,
    ) -> S:
        """Add every chunk to an accumulator, and return it; for the rest see :meth:`walk`.

        ``sums`` has the methods of :class:`calibrant.Accumulator`: ``like()`` returns an empty one
        for each shard, ``add(**columns)`` takes a chunk, and ``merge(other)`` adds the shards up.
        """
        task = partial(_summed, sums.like())
        for shard in self.walk(task, *columns, rows=rows, skipped=skipped):
            sums.merge(shard)
        return sums

    def warn_of_mistakes(self, *, copies: bool = True) -> None:
        """Warn if the first logits look like probabilities or, by default, many rows are copies.

        Tags may add up to anything, and groups tell copies.
        """
        if self.dataset.multilabel:
            return
        if self.domain == "logits":
            each = max(1, math.prod(self.shape[:-1]))  # tokens or pixels of one example
            (first,) = next(
                self.shards[0].chunks(-(-checks.LOOKED_AT // each), ["logits"]), (None,)
            )
            if first is not None and (reason := checks.look_like_probs(first)):
                name, remedy = (full_key(self.name, column) for column in SCORES)
                where, remedy = f"{name} of {self.path}", f"save them as {remedy}"
                if self.dataset.named.logits:
                    remedy = "name them as probs= (--probs)"
                if self.path == IN_MEMORY:
                    where, remedy = name, "name them probs"
                problem = f"{where} look like probabilities: {reason}"
                checks.warn(f"{problem}; if they are, {remedy}", stacklevel=4)
        rows = checks.first_rows(self.shape)
        if not copies or self.dataset.groups is not None or not rows:
            return
        for scores, labels in self.shards[0].chunks(rows, ["logits", "labels"]):
            checks.warn_of_copies(scores, checks.as_labels(labels), probs=self.domain == "probs")
            return


def _each(task: Callable[[Chunk], T], chunks: Iterator[Chunk]) -> list[T]:
    return list(map(task, chunks))  # no name holds a chunk while the next one is read


def _summed(empty: S, chunks: Iterator[Chunk]) -> S:
    sums = empty.like()
    for chunk in chunks:
        sums.add(**chunk)
        del chunk  # before the next one is read
    return sums


def _zeros(chunk: Chunk) -> Zeros:
    """Return the zeros among the probabilities of labelled examples."""
    probs, kept = chunk["probs"], counted(chunk)
    if probs.shape[: kept.ndim] != kept.shape:  # the fit refuses other labels
        return Zeros()
    return Zeros.among(probs[kept])


@dataclass(frozen=True)
class Dataset:
    """Everything in a prediction file, in the shards of a folder or glob, or in some arrays.

    ``files`` has the arrays of each file by key. ``sample_weight``, ``by`` and ``groups`` name the
    columns with weights, with subgroups to report on, and with examples that share a fold. With
    ``multilabel`` the scores are of tags, and probabilities need not sum to one.
    """

    path: str
    files: list[Columns]
    sample_weight: str | None = None
    by: str | None = None
    groups: str | None = None
    multilabel: bool = False
    cache: str | None = None  # folder for the log-partition tables of shards
    skipped: Mapping[str, str] = field(default_factory=dict)  # messages by the paths of bad shards
    named: ColumnNames = BY_RULES  # columns that the user has named

    def __repr__(self) -> str:
        splits = ", ".join(map(repr, self.splits)) or "none"
        return one_line(self, f"{self.path}", f"splits: {splits}")

    @cached_property
    def _by_split(self) -> list[dict[str, Columns]]:
        return list(map(columns_by_split, self.files))

    @cached_property
    def splits(self) -> list[str]:
        """Names of the splits, in the order of the file; ``""`` stands for the unnamed split."""
        return list(dict.fromkeys(name for splits in self._by_split for name in splits))

    def find(self, name: str | None, prefer: Sequence[str] = ("",)) -> str | None:
        """Return the name of a split, or of the first of ``prefer`` that is there, or None."""
        aliases = [split for split in self.splits if split in VAL_NAMES]
        for wanted in prefer if name is None else [name]:
            if wanted in self.splits:
                return wanted
            if wanted in VAL_NAMES and len(aliases) == 1:
                return aliases[0]
        return None

    def split(self, name: str | None = None, prefer: Sequence[str] = ("",)) -> Split:
        """Return the split ``name``, or without a name the first of ``prefer`` that is there.

        The names val, valid, validation and dev stand for each other where only one is there.
        """
        chosen = self.find(name, prefer)
        if chosen is None:
            raise self._no_split(prefer if name is None else [name])
        labels = full_key(chosen, "labels")
        for arrays, splits in zip(self.files, self._by_split, strict=True):
            orphaned = labels in arrays and chosen not in splits
            if orphaned or not (splits or _head_columns(arrays) or CLASS_NAMES in arrays):
                path = next(column.path for column in arrays.values())
                of = f" of split {chosen!r}" if chosen else ""
                raise ValueError(
                    f"{path} has no logits, probs or features{of}, only "
                    f"{comma_separated(arrays)}; write it again, or move it elsewhere"
                )
        _ = self.class_names  # which must agree
        shards = [Shard(splits[chosen]) for splits in self._by_split if chosen in splits]
        # An empty shard, as Spark writes them, may not even know its number of classes.
        shards = [shard for shard in shards if shard.rows] or shards[:1]
        first = shards[0]
        for shard in shards:
            if shard.domain != first.domain:
                raise ValueError(
                    f"{first.path} has {first.domain or 'no logits'}, but {shard.path} has "
                    f"{shard.domain or 'no logits'}; all shards of a split need the same"
                )
        for column in ARRAY_KEYS:
            _agreeing([shard for shard in shards if column in shard.columns], column)
        starts = np.cumsum([0, *(shard.rows for shard in shards)])
        numbered = [replace(s, first=int(n)) for s, n in zip(shards, starts, strict=False)]
        return Split(self, chosen, numbered)

    @property
    def has_head(self) -> bool:
        """True if the dataset has the last linear layer."""
        return any(map(_head_columns, self.files))

    @cached_property
    def head(self) -> tuple[Array, Array] | None:
        """Weight (classes, features) and bias (classes,) of the last linear layer, if stored."""
        head = next(filter(None, map(_head_columns, self.files)), None)
        if head is None:
            return None
        shapes = [column.shape for column in head]
        if len(shapes[0]) != 2 or shapes[1:] not in ([], [shapes[0][:1]]):
            raise ValueError(
                f"{head[0].path}: the last layer needs head_weight (classes, features) and "
                f"head_bias (classes,), got {' and '.join(map(str, shapes))}"
            )
        for column in head:
            column.check_dtype(numeric=True)
        weight, *bias = (read_all([column]) for column in head)
        return weight, bias[0] if bias else np.zeros(len(weight), weight.dtype)

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes, stored under ``class_names``; all files must have the same."""
        stored = [arrays[CLASS_NAMES] for arrays in self.files if CLASS_NAMES in arrays]
        names: list[list[str]] = []
        scores = (
            splits[name].get(one) for splits in self._by_split for name in splits for one in SCORES
        )
        counts = {column.shape[-1] if column.shape[1:] else 2 for column in filter(None, scores)}
        for column in stored:
            column.check_dtype(numeric=False)
            if column.shape not in {(count,) for count in counts or {column.shape[0]}}:
                wanted = comma_separated(map(str, sorted(counts)))
                raise ValueError(
                    f"{column.path}: {CLASS_NAMES} must be a list of {wanted} names, one for each "
                    f"class, got an array of shape {column.shape}"
                )
            names.append([str(name) for name in read_all([column])])
            if names[-1] != names[0]:
                raise ValueError(
                    f"{stored[0].path} has the classes {comma_separated(names[0][:20])}, but "
                    f"{column.path} {comma_separated(names[-1][:20])}: write their columns in one "
                    "order"
                )
        return names[0] if names else None

    @property
    def table_names(self) -> dict[str, str]:
        """Names of the columns of its tables by those that they are written with by default.

        There are none for other files, or tables with different columns.
        """
        tables = [next(iter(arrays.values())).table_names for arrays in self.files if arrays]
        return dict(tables[0]) if all(table == tables[0] for table in tables) else {}

    def in_order(self, names: Sequence[str] | None) -> Dataset:
        """Return the dataset with its classes in the order of these names, and labels accordingly.

        Classes without names, here or there, stay where they are. Other names are refused.
        """
        order = class_order(names, self.class_names, self.path)
        if order is None:
            return self
        views, files = self.views(order).items(), []
        for arrays, splits in zip(self.files, self._by_split, strict=True):
            by_key = {full_key(split, name): view for split in splits for name, view in views}
            files.append(_seen_columns(arrays, by_key))
            if CLASS_NAMES in arrays:
                files[-1][CLASS_NAMES] = array_column(CLASS_NAMES, np.array(names), self.path)
        return replace(self, files=files)

    def views(self, order: IntArray) -> dict[str, Callable[[Array], Array]]:
        """Return by column what brings its classes into another order."""
        columns = partial(columns_in_order, order)
        numbers = columns if self.multilabel else partial(numbers_in_order, order)
        return {**dict.fromkeys(SCORES, columns), "labels": numbers}

    def _no_split(self, wanted: Sequence[str]) -> ValueError:
        named = [name for name in self.splits if name]
        if not self.splits:
            keys = dict.fromkeys(key for arrays in self.files for key in arrays)
            problem = (
                f" has no logits, probs or features, only {comma_separated(keys)}: rename its "
                "scores to logits or probs, or name them (--logits or --probs on the command line)"
            )
        elif named and len(wanted) == 1 and wanted[0]:
            problem = f": {unknown_name('split', wanted[0], named)}"
        else:
            asked = " or ".join(f"split {name!r}" if name else "unnamed split" for name in wanted)
            known = ", only an unnamed split"
            if named:
                known = f", only {comma_separated(named)}: name the split to use, as --split does"
            problem = f" has no {asked}{known}"
        return ValueError(self.path + problem)
