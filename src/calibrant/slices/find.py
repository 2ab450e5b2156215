"""Find the subgroups of examples whose confidence is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    Values,
    check_level,
    check_whole,
    warnings_at_caller,
)
from calibrant._core.class_names import as_array, is_frame
from calibrant._core.messages import unknown_name
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.data.dataset import TEST_SPLITS, Split
from calibrant.data.files import Data, as_dataset, is_data
from calibrant.data.metadata import NO_METADATA, as_metadata, conjunction_text
from calibrant.data.shards import Chunk
from calibrant.metrics.reductions import check_one_input
from calibrant.slices.examples import (
    Reading,
    _draw_sample,
    _with_clusters,
    _with_columns,
    encode,
)
from calibrant.slices.result import Off, Slice, Slices, _count_off
from calibrant.slices.search import (
    MOST_CANDIDATES,
    _all_candidates,
    _Candidate,
    _critical_value,
    _Family,
    _members,
    _one_candidate,
    _Overlap,
    _strongest,
    _Tables,
    overlap,
    select,
)

SMALLEST, SMALLEST_SHARE = 30, 1 / 500
"""Size of subgroups that are searched by default: the larger of both."""
BINS = {1: 16, 2: 8, 3: 4}
"""Bins of numbers, for subgroups of so many conditions."""
MOST_VALUES = {1: 1000, 2: 100, 3: 12}
"""Values of a category that are told apart, likewise."""


@warnings_at_caller()
def find_slices(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    metadata: Any = None,
    features: Values | None = None,
    columns: Sequence[str] | None = None,
    sample_weight: Values | str | None = None,
    calibrator: Calibrator | None = None,
    split: str | None = None,
    depth: int = 2,
    min_size: int | None = None,
    most: int = 20,
    level: float = 0.9,
    seed: int = 0,
) -> Slices:
    """Find the subgroups whose confidence is wrong, worst first.

    All subgroups of at most ``depth`` conditions are searched: ranges of numbers and dates, values
    of categories, and missing values; and likewise ranges of P(y = 1), or of the confidence, and
    the predicted and the second class. Intervals account for the search: with the probability
    ``level`` all of them hold, whatever is looked at. So with this probability no subgroup is named
    that is calibrated on average.

    Examples must be independent of each other.

    Parameters
    ----------
    data : logits (n, classes) or (n,), path, Dataset, mapping or data frame
        As for :func:`calibrant.evaluate`. Further columns of a file or data frame are metadata.
    labels : (n,) integers
        With logits; -100 is ignored.
    probs : (n, classes), or (n,) probabilities of class 1
        Instead of logits.
    metadata : data frame, mapping of (n,) values, or array (n, columns), optional
        With logits: numbers, texts, dates; missing values are a subgroup too.
    features : (n, width), optional
        With logits: clusters of them form subgroups as well.
    columns : sequence of str, optional
        Columns of metadata to use; by default all but those of whole numbers or texts that are all
        different, such as identifiers. An empty sequence uses the predictions alone.
    sample_weight : (n,), or the name of a column
        Example weights; 0 excludes.
    calibrator : Calibrator, optional
        Applied to the logits first.
    split : str, optional
        Split of a file; ``test``, else the unnamed split, by default.
    depth : int
        Conditions of a subgroup, from 1 to 3. With 3, numbers are cut into fewer ranges.
    min_size : int, optional
        Examples of the smallest subgroups that are searched; by default 30, or a 500th of all.
    most : int
        Number of subgroups that are shown at most.
    level : float
        Probability with which all intervals hold.
    seed : int
        Of the sample and of the noise behind the intervals.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> age, site = rng.uniform(20, 80, 20_000), rng.choice(["A", "B"], 20_000)
    >>> probs = rng.uniform(size=20_000)
    >>> wrong = (age < 35) & (site == "B")
    >>> labels = (rng.uniform(size=20_000) < np.where(wrong, probs / 2, probs)).astype(int)
    >>> found = find_slices(probs=probs, labels=labels, metadata={"age": age, "site": site})
    >>> found[0].name
    'age < 35 and site = B'
    """
    check_whole("min_size", 1 if min_size is None else min_size)
    check_whole("most", most)
    check_whole("depth", depth)
    check_whole("seed", seed, 0)
    check_level(level)
    if depth not in BINS:
        raise ValueError(f"depth must be 1, 2 or 3 conditions, got {depth}")
    chosen, keys = _open_examples(
        data, labels, probs, metadata, features, sample_weight, split, calibrator
    )
    names = [columns] if isinstance(columns, str) else keys if columns is None else columns
    for name in names:
        if name not in keys:
            raise unknown_name("column", name, keys)
    wanted, named = {name: keys[name] for name in names}, columns is not None
    reading = Reading(wanted, chosen.classes, chosen.dataset.class_names, named=named)
    reading = reading.calibrated_by(calibrator, keys)
    options: dict[str, Any] = {"depth": depth, "min_size": min_size, "most": most}
    return search(chosen, reading, **options, level=level, seed=seed).result


@dataclass(frozen=True, eq=False)
class SliceSearch:
    """A finished search: the way in which chunks are read, the subgroups chosen, and the result."""

    reading: Reading
    named: list[_Candidate]
    result: Slices

    def members(self, chunk: Chunk) -> dict[str, BoolArray]:
        """Return the labelled rows of a chunk that are in each subgroup, by its name."""
        _, codes, kept = self.reading.encoded(chunk)
        masks: dict[str, BoolArray] = {}
        for one in self.named:
            mask = np.zeros(len(kept), bool)
            mask[kept] = _members(one.conditions, codes)
            masks[conjunction_text(self.reading.columns, one.conditions)] = mask
        return masks


def search(
    split: Split,
    reading: Reading,
    *,
    depth: int = 2,
    min_size: int | None = None,
    most: int = 20,
    level: float = 0.9,
    seed: int = 0,
) -> SliceSearch:
    """Search the subgroups of a split, in three passes over its chunks."""
    check_one_label(split)
    reading.check_names()
    split.warn_of_mistakes(copies=False)
    sample = _draw_sample(reading, split, clusters=split.has_features, seed=seed)
    reading, sample, notes = _with_clusters(reading, sample, seed)
    if min_size is None:
        min_size = max(SMALLEST, round(sample.n * SMALLEST_SHARE))
    reading, left_out = _with_columns(reading, sample, min_size, BINS[depth], MOST_VALUES[depth])
    family, tables = _Family.of(reading.columns), _sum_tables(split, reading, depth)
    drawn = sample.outcomes, encode(reading.columns, sample.values, sample.row.size)
    critical = _critical_value(tables, family, drawn, min_size=min_size, level=level, seed=seed)
    whole, strongest, off, searched = _candidates(tables, family, min_size, critical)
    chosen: list[_Candidate] = []
    if shown := [one for one in (*whole, *strongest) if one.gap.excludes(0)]:
        overlaps = partial(_chunk_overlap, reading, shown)
        parts = split.map(overlaps, *reading.needed(), rows=split.chunk_rows)
        chosen = select(shown, reduce(_Overlap.plus, parts), critical, most)
    named = [one for one in chosen if one.conditions]
    slices = [_as_slice(one, reading, whole[0].weight) for one in named]
    result = Slices(
        slices=sorted(slices, key=lambda one: -one.least),
        whole=[_as_slice(one, reading, whole[0].weight) for one in whole],
        off=off,
        off_as_a_whole=[one.estimand for one in chosen if not one.conditions],
        n=whole[0].n,
        classes=reading.classes,
        searched=searched,
        columns=[column.name for column in reading.columns],
        left_out=left_out,
        level=level,
        critical=critical,
        min_size=min_size,
        probability=reading.probability,
        notes=notes,
    )
    return SliceSearch(reading, named, result)


def _as_slice(one: _Candidate, reading: Reading, total: float) -> Slice:
    name, share = conjunction_text(reading.columns, one.conditions), one.weight / total
    figures = (one.estimand, one.claimed, one.happened, one.gap)
    return Slice(name, one.n, share, *figures, one.conditions)


def has_one_label(split: Split) -> bool:
    """Return False for tags, and for several labels per row."""
    return len(split.shape) < 2 and not split.dataset.multilabel


def check_one_label(split: Split) -> None:
    """Raise for tags, and for several labels per row."""
    if not has_one_label(split):
        raise ValueError(
            f"{split.path}: subgroups need one label per row and scores (n, classes) or (n,), got "
            f"rows of {split.shape}: take one tag at a time, as log-odds (n,)"
        )


def _sum_tables(split: Split, reading: Reading, depth: int) -> _Tables:
    """Return the sums of all combinations of at most ``depth`` columns."""
    tables = _Tables.empty(reading.columns, reading.estimands, depth)
    task = partial(_shard_tables, reading, depth)
    for part in split.walk(task, *reading.needed(), rows=split.chunk_rows):
        tables.merge(part)
    return tables


def _shard_tables(reading: Reading, depth: int, chunks: Iterator[Chunk]) -> _Tables:
    tables = _Tables.empty(reading.columns, reading.estimands, depth)
    for chunk in chunks:
        outcomes, codes, _ = reading.encoded(chunk)
        tables.add(outcomes, codes)
    return tables


def _open_examples(
    data: Data | Values | None,
    labels: Values | None,
    probs: Values | None,
    metadata: Any,
    features: Values | None,
    sample_weight: Values | str | None,
    split: str | None,
    calibrator: Calibrator | None,
) -> tuple[Split, dict[str, str]]:
    """Return the examples, in the class order of a calibrator, and the keys of metadata by name."""
    beside = {} if metadata is None else as_metadata(metadata)
    # numbered keys: a column may be called "labels", or "dev_features" as a split would be
    names = {name: f"column {i}" for i, name in enumerate(beside)}
    further: dict[str, Any] = dict(zip(names.values(), beside.values(), strict=True))
    if isinstance(data, Mapping):
        data = {**data, **further}
    elif not is_data(data) and not (is_frame(data) and labels is None):
        if labels is None:
            raise TypeError("labels are missing: pass (logits, labels), or probs= and labels=")
        check_one_input(data, probs)
        scores: Any = {"logits": data} if probs is None else {"probs": probs}
        data = {**scores, "labels": labels, **further}
        rows = len(as_array(labels))
        for name, values in beside.items():
            if len(values) != rows:
                raise ValueError(
                    f"metadata: {name} has {len(values)} rows, but there are {rows} labels; every "
                    "column needs one value per example"
                )
    elif beside:
        raise TypeError("metadata goes with arrays: a file or data frame has it as further columns")
    dataset = as_dataset(data, features=features, sample_weight=sample_weight)
    if calibrator is not None:
        check_calibrator(calibrator)
        dataset = dataset.in_order(calibrator.class_names_)
    chosen = dataset.split(split, TEST_SPLITS)
    stored = {name: key for name, key in metadata_keys(chosen).items() if key not in further}
    return chosen, {**stored, **names}


def metadata_keys(split: Split) -> dict[str, str]:
    """Return the columns of a split that may form subgroups."""
    roles = (*NO_METADATA, split.dataset.sample_weight)
    return {key: key for key in split.further if key not in roles}


def _candidates(
    tables: _Tables, family: _Family, min_size: int, critical: float
) -> tuple[list[_Candidate], list[_Candidate], list[Off], int]:
    """Return all examples for each estimand, the strongest subgroups, and the numbers of all."""
    whole: list[_Candidate] = []
    found: list[_Candidate] = []
    gaps: dict[str, list[FloatArray]] = {estimand: [] for estimand in tables.estimands}
    for candidates in _all_candidates(tables, family, min_size):
        low, high = candidates.intervals(critical)
        if not candidates.columns:
            whole.append(_one_candidate(candidates, family, 0, low, high))
            continue
        gaps[candidates.estimand].append(np.stack([candidates.gap, low, high]))
        found += _strongest(candidates, family, low, high)
    every = {estimand: np.concatenate(each, 1) for estimand, each in gaps.items() if each}
    off = [one for estimand, each in every.items() for one in _count_off(estimand, each)]
    order = sorted(found, key=lambda one: -one.strength)[:MOST_CANDIDATES]
    return whole, order, off, sum(each.shape[1] for each in every.values())


def _chunk_overlap(reading: Reading, candidates: list[_Candidate], chunk: Chunk) -> _Overlap:
    outcomes, codes, _ = reading.encoded(chunk)
    return overlap(candidates, outcomes, codes)
