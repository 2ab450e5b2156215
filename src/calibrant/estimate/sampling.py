r"""Examples to label next, so that the interval of the accuracy shrinks fastest.

Examples are stratified by their calibrated probabilities. A stratum of :math:`N_h` examples whose
outcomes have a standard deviation :math:`S_h`, the root of the mean of :math:`p (1 - p)`, gets a
part of the budget in proportion to :math:`N_h S_h` (Neyman 1934), and a fifth of the budget is
spread evenly, for the case that the probabilities are wrong. Within a stratum all examples are
equally likely. The probability of each is kept, so that the labels estimate the whole batch without
bias.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    IntArray,
    Values,
    check_whole,
    warnings_at_caller,
)
from calibrant._core.chunks import joined
from calibrant._core.class_names import ClassNumbers, LabelError, class_order, kept_names
from calibrant._core.messages import comma_separated
from calibrant._core.showing import columns_frame, one_line
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.data.dataset import Split
from calibrant.data.files import Data
from calibrant.data.shards import Chunk, uniform
from calibrant.estimate.cells import CELLS, _equal_parts, _event_cell, _reduce_rows, _sums_by
from calibrant.estimate.prediction_summary import (
    INCLUSION,
    NEVER,
    _batch_split,
    _chunk_labels,
    _chunk_probs,
    _summarise,
)
from calibrant.workflows.effect import input_names

if TYPE_CHECKING:
    import pandas as pd

STRATA = 20
PER_STRATUM = 5
"""Labels of each stratum, on average, below which there are fewer strata."""
EVEN = 0.2
"""Part of the budget that is spread evenly."""


class _LabelCandidates(NamedTuple):
    """Rows that may be chosen, ``(n,)`` each."""

    row: IntArray
    order: FloatArray  # random number of the row: the smallest of a stratum are chosen
    stratum: IntArray
    confidence: FloatArray
    predicted: IntArray

    def take(self, chosen: IntArray | BoolArray) -> _LabelCandidates:
        """Return some of the rows."""
        values: Any = [column[chosen] for column in self]
        return _LabelCandidates(*values)


@dataclass(frozen=True, eq=False)
class LabelSample:
    """Examples to label, in the order of the batch; arrays are ``(budget,)``."""

    row: IntArray
    predicted: IntArray  # numbers of classes in the order of the batch
    confidence: FloatArray
    inclusion: FloatArray  # probability of being chosen
    n: int  # examples of the batch
    gain: float  # labels chosen at random that would tell as much, for each of these
    class_names: tuple[str, ...] | None = None  # of the batch

    def __repr__(self) -> str:
        size = f"{self.row.size:,} of {self.n:,} examples to label"
        return one_line(self, size, f"each worth {self.gain:.1f} chosen at random")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.csv`` file with an empty column for the labels.

        Classes are written by their names if they have any, else as numbers.
        """
        predicted = self.predicted
        if self.class_names is not None:
            predicted = np.array(self.class_names)[predicted]
        with (
            replacing(Path(path)) as target,
            target.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(("row", "predicted", "confidence", INCLUSION, "label"))
            values = (self.row, predicted, self.confidence.round(6), self.inclusion)
            writer.writerows(
                [*line, ""] for line in zip(*(v.tolist() for v in values), strict=True)
            )

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each example. Needs pandas."""
        names = ("row", "predicted", "confidence")
        return columns_frame(
            {**{name: getattr(self, name) for name in names}, INCLUSION: self.inclusion}
        )


@warnings_at_caller()
def choose_labels(
    data: Data | Values | None = None,
    budget: int = 100,
    *,
    calibrator: Calibrator | None = None,
    probs: Values | None = None,
    features: Values | None = None,
    split: str | None = None,
    labels: Values | str | os.PathLike[str] | bool = True,
    seed: int = 0,
) -> LabelSample:
    """Choose the examples whose labels tell most about the accuracy of a batch.

    Parameters
    ----------
    data, probs, features, labels, split
        The batch, as for :func:`estimate_performance`. Examples with labels are not chosen.
    budget : int
        Number of examples to choose.
    calibrator : Calibrator, optional
        Applied to the logits first.
    seed : int
        Of the choice.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> probs = rng.beta(0.2, 0.2, size=10_000)
    >>> sample = choose_labels(probs=probs, budget=200)
    >>> sample.row.size, sample.gain > 1.5
    (200, True)
    >>> round(float((1 / sample.inclusion).sum()) / 10_000, 6)  # weights add up to the batch
    1.0
    """
    check_whole("budget", budget)
    if calibrator is not None:
        check_calibrator(calibrator)
    given = _batch_split(data, probs=probs, features=features, split=split)
    names = None if calibrator is None else calibrator.class_names_
    chosen = _with_known_labels(given, labels).in_order(names)
    use = labels is not False and "labels" in chosen.keys
    summary = _summarise(chosen, calibrator, threshold=None, labels=use)
    cells, count = summary.unlabelled, summary.n - summary.rows.label.size
    if budget > count:
        raise ValueError(
            f"{chosen.path}: budget must be at most the {count:,} unlabelled examples, got {budget}"
        )
    plan = _make_plan(cells.weight[:CELLS], cells.claimed[:CELLS], budget)
    task = partial(_shard_candidates, calibrator, plan, seed)
    columns = [*(["labels"] if use else []), *input_names(calibrator)]
    numbered = chosen.with_column("row", np.arange(chosen.rows))
    shards = numbered.walk(task, "logits", "row", *columns, rows=chosen.chunk_rows)
    candidates = _smallest(_LabelCandidates(*joined(list(shards))), plan.allotted)
    candidates = candidates.take(np.argsort(candidates.row))
    order = class_order(names, given.dataset.class_names, given.path)
    return LabelSample(
        candidates.row,
        candidates.predicted if order is None else order[candidates.predicted],
        candidates.confidence,
        (plan.allotted / np.maximum(plan.size, 1))[candidates.stratum],
        summary.n,
        plan.gain,
        kept_names(given.dataset.class_names),
    )


class _Plan(NamedTuple):
    """Strata of cells and their parts of the budget."""

    stratum: IntArray  # (CELLS,) stratum of each cell
    size: IntArray  # (strata,) examples
    allotted: IntArray  # (strata,) labels
    gain: float


def _make_plan(count: FloatArray, claimed: FloatArray, budget: int) -> _Plan:
    """Cut cells with ``count`` examples into strata, and share out the budget."""
    mean = claimed / np.maximum(count, 1)
    variance = count * mean * (1 - mean)
    measure = count / count.sum() + variance / max(variance.sum(), 1e-300)
    index = _equal_parts(measure, int(np.clip(budget // PER_STRATUM, 1, STRATA)))
    strata = int(index.max()) + 1
    size, scatter = (_sums_by(index, values, strata) for values in (count, variance))
    deviation = np.sqrt(scatter / np.maximum(size, 1))
    allotted = _allocate(size.round().astype(np.int64), deviation, budget)
    share = size / size.sum()
    at_random = share @ deviation**2 / budget
    stratified = share**2 @ (deviation**2 / np.maximum(allotted, 1))
    gain = at_random / stratified if stratified > 0 else 1.0
    return _Plan(index, size.round().astype(np.int64), allotted, float(gain))


def _allocate(size: IntArray, deviation: FloatArray, budget: int) -> IntArray:
    """Share out a budget over strata by Neyman's rule, and a part of it evenly.

    Each stratum gets one label at least, if the budget allows, and no more than it has examples.

    >>> _allocate(np.array([900, 100]), np.array([0.0, 0.5]), 50)
    array([ 9, 41])
    """
    products = size * deviation
    neyman = products / products.sum() if products.sum() > 0 else size / size.sum()
    wanted = budget * ((1 - EVEN) * neyman + EVEN * size / size.sum())
    allotted = np.asarray(np.clip(np.floor(wanted), 1, size), np.int64)
    while (left := budget - int(allotted.sum())) > 0:
        room = np.where(allotted < size, wanted - allotted, -np.inf)
        most = np.argsort(-room, kind="stable")[:left]
        allotted[most[np.isfinite(room[most])]] += 1
    while allotted.sum() > budget:
        over = np.where(allotted > 1, allotted - wanted, -np.inf)
        if not np.isfinite(over).any():
            over = allotted - wanted
        allotted[int(over.argmax())] -= 1
    return allotted


def _shard_candidates(
    calibrator: Calibrator | None, plan: _Plan, seed: int, chunks: Iterator[Chunk]
) -> _LabelCandidates:
    parts = []
    for chunk in chunks:
        probs, number = _chunk_probs(calibrator, chunk), chunk["row"]
        rows = _reduce_rows(probs)
        order = uniform(seed, int(number[0]), number.size)
        stratum = plan.stratum[_event_cell(rows, NEVER)]
        candidates = _LabelCandidates(number, order, stratum, rows.confidence, rows.predicted)
        free = _chunk_labels(chunk, number.shape) == IGNORED
        parts.append(_smallest(candidates.take(free), plan.allotted))
    return _smallest(_LabelCandidates(*joined(parts)), plan.allotted)


def _smallest(candidates: _LabelCandidates, allotted: IntArray) -> _LabelCandidates:
    """Keep the rows with the smallest numbers of each stratum."""
    order = np.lexsort((candidates.order, candidates.stratum))
    stratum = candidates.stratum[order]
    starts = np.searchsorted(stratum, np.arange(allotted.size))
    place = np.arange(stratum.size) - starts[stratum]
    return candidates.take(order[place < allotted[stratum]])


def _read_labels(
    path: str | os.PathLike[str], n: int, numbers: ClassNumbers
) -> tuple[IntArray, FloatArray]:
    """Read labels by row from a ``.csv`` file; lines without a label are left out.

    The file has columns ``row`` and ``label``, and ``inclusion_probability`` if it has to do with
    how the rows were selected. Returns labels ``(n,)``, -100 where there are none, and
    probabilities ``(n,)``.
    """
    labels, inclusion = np.full(n, IGNORED, np.int64), np.ones(n)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; pass a .csv file with rows and labels") from None
    reader = csv.DictReader(text.splitlines())
    names = reader.fieldnames or ["nothing"]
    if not {"row", "label"} <= set(names):
        raise ValueError(f"{path} needs the columns row and label, got {comma_separated(names)}")
    for line in reader:
        if not (line["label"] or "").strip():
            continue
        place = f"{path}, line {reader.line_num}"
        try:
            (label,) = numbers(np.array([line["label"]]))
        except LabelError as problem:
            raise ValueError(f"{place}: label {problem}") from None
        try:
            row, probability = int(line["row"]), float(line.get(INCLUSION) or 1)
        except (TypeError, ValueError) as problem:
            numeric = f"row and {INCLUSION} must be numbers"
            raise ValueError(f"{place}: {numeric} ({problem})") from None
        if not 0 <= row < n:
            raise ValueError(f"{place}: row must be in [0, {n}), the batch's rows, got {row}")
        if labels[row] != IGNORED:
            raise ValueError(f"{place}: row {row} has a label already; leave one of the lines out")
        labels[row], inclusion[row] = label, probability
    return labels, inclusion


def _with_known_labels(
    split: Split,
    labels: Values | str | os.PathLike[str] | bool,
    inclusion: Values | None = None,
) -> Split:
    """Return a split with labels that were passed beside it, as an array or a ``.csv`` file."""
    if isinstance(labels, (str, os.PathLike)):
        names = split.dataset.class_names or list(map(str, range(split.classes)))
        known, chance = _read_labels(labels, split.rows, ClassNumbers(names))
        return split.with_column("labels", known).with_column(INCLUSION, chance)
    columns = {"labels": None if isinstance(labels, bool) else labels, INCLUSION: inclusion}
    for name, values in columns.items():
        if values is not None:
            split = split.with_column(name, np.asarray(values))
    return split
