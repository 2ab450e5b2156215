"""Examples of prediction files as figures need them, collected chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from calibrant._core import checks
from calibrant._core.checks import IGNORED, FloatArray
from calibrant._core.chunks import EstimandChoice
from calibrant.calibrators.base import Calibrator
from calibrant.data.dataset import Split
from calibrant.data.shards import Chunk
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.reductions import (
    WeightedPairs,
    labelled_examples,
    margins,
    pairs_from,
    reduce_examples,
)
from calibrant.workflows.apply import check_fits

T = TypeVar("T")


class Examples(NamedTuple):
    """Examples of a split as pairs, and what else figures need of them."""

    pairs: WeightedPairs
    margin: FloatArray
    group: Any  # (n,) of str; empty without subgroups

    def of_group(self, name: str) -> Examples:
        """Return the examples of one subgroup."""
        kept = self.group == name
        weight = None if self.pairs.weight is None else self.pairs.weight[kept]
        pairs = WeightedPairs(self.pairs.confidence[kept], self.pairs.outcome[kept], weight)
        return Examples(pairs, self.margin[kept], self.group[kept])


def collected(
    split: Split,
    calibrator: Calibrator | None,
    estimand: EstimandChoice,
) -> Examples:
    """Reduce a split to pairs, in chunks; logits are never held whole."""
    parts = list(_walk(split, calibrator, partial(_reduced, estimand), estimand))
    checks.check_some(sum(len(part.margin) for part in parts))
    confidence, outcome = (np.concatenate([part.pairs[i] for part in parts]) for i in (0, 1))
    weights = [part.pairs.weight for part in parts]
    weight = None if weights[0] is None else np.concatenate([w for w in weights if w is not None])
    margin, group = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    return Examples(WeightedPairs(confidence, outcome, weight), margin, group)


def class_sums(
    split: Split,
    calibrator: Calibrator | None,
    estimand: EstimandChoice,
    bins: int,
) -> ClassBins:
    """Sum a split per class and bin, in chunks."""
    sums = ClassBins.empty(split.classes, bins)

    def add(found: dict[str, Any], by: Any) -> None:
        examples, _ = labelled_examples(found.pop("logits", None), **found, estimand=estimand)
        reduce_examples(examples, sums)

    list(_walk(split, calibrator, add, estimand))
    return sums


def _walk(
    split: Split,
    calibrator: Calibrator | None,
    use: Callable[[dict[str, Any], Any], T],
    estimand: EstimandChoice,
) -> Iterator[T]:
    """Yield what ``use`` makes of the labelled examples of each chunk, calibrated."""
    columns = ["logits" if calibrator is not None else split.domain]
    columns += ["labels", "sample_weight", "by"]
    if calibrator is not None:
        check_fits(calibrator, split)
        columns += calibrator.input_columns
    labelled = _labelled_tags if estimand == "multilabel" else _labelled

    def task(chunk: Chunk) -> list[T]:
        found = labelled(chunk, calibrator)
        return [] if found is None else [use(*found)]

    for results in split.map(task, *columns):
        yield from results


def _labelled(chunk: Chunk, calibrator: Calibrator | None) -> tuple[dict[str, Any], Any] | None:
    """Return the labelled rows of a chunk, calibrated, and their subgroups; None without any."""
    kept = chunk.counted
    if not kept.any():
        return None

    def rows(name: str) -> Any:
        values = chunk.get(name)
        return None if values is None else checks.spread(values, kept.shape, name)[kept]

    domain = "probs" if "probs" in chunk.columns else "logits"
    scores = chunk.columns[domain][kept]
    if calibrator is not None:
        scores = calibrator.transform(scores, calibrator.input_features(chunk.columns, kept))
    found = {"labels": chunk.labels[kept], "sample_weight": rows("sample_weight")}
    return {domain: scores, **found}, rows("by")


def _labelled_tags(
    chunk: Chunk, calibrator: Calibrator | None
) -> tuple[dict[str, Any], Any] | None:
    """Return the rows of a chunk of tags; labels that do not count are ignored."""
    kept, by = chunk.counted, chunk.get("by")
    if not kept.any():
        return None
    domain = "probs" if "probs" in chunk.columns else "logits"
    scores = np.where(kept, chunk.columns[domain], 0)
    if calibrator is not None:
        scores = calibrator.transform(scores)
    labels = np.where(kept, checks.as_labels(chunk.labels), IGNORED)
    group = None if by is None else checks.spread(checks.as_keys(by), kept.shape, "by")[kept]
    return {domain: scores, "labels": labels, "sample_weight": chunk.get("sample_weight")}, group


def _reduced(estimand: EstimandChoice, found: dict[str, Any], by: Any) -> Examples:
    """Reduce labelled examples to pairs, with their margins and subgroups."""
    with checks.silenced():  # of logits that look like probabilities: said once for the file
        pairs = pairs_from(**found, estimand=estimand)
    margin = np.full(len(pairs.outcome), np.nan)
    if estimand != "multilabel":
        logits = found.get("logits")
        logits = checks.logits_from_probs(found["probs"]) if logits is None else logits
        margin = margins(logits)
    group = np.zeros(0, dtype=str) if by is None else checks.as_keys(by).astype(str)
    return Examples(pairs, margin, group)
