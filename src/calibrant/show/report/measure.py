"""Measure a split for a report: one walk that keeps sums, then the methods that may help."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from calibrant._core.binning import Bins, fill_at
from calibrant._core.checks import IGNORED, FloatArray, IntArray
from calibrant._core.chunks import Estimand, EstimandChoice
from calibrant.calibrators.auto import KeepArgmax
from calibrant.data.dataset import IN_MEMORY, Dataset, Split
from calibrant.decide.threshold_limits import threshold
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.ranking import risk_coverage
from calibrant.metrics.reductions import (
    WeightedPairs,
    labelled_examples,
    margins,
)
from calibrant.show.report.model import (
    ClassFigures,
    Coverage,
    Part,
    Remedy,
    SourceFile,
    Subject,
    _empty_part,
    _merged_bins,
    _parts_of,
    binomial_test,
)
from calibrant.slices import Slices
from calibrant.slices.examples import Reading
from calibrant.slices.find import has_one_label, metadata_keys, search
from calibrant.workflows.compare import compare, compared_splits
from calibrant.workflows.effect import paired_losses
from calibrant.workflows.large import describe_skipped

SURE = 0.9
"""Confidence above which answers are looked at on their own."""
MARGIN_GROUPS = 5
MOST_HASHED = 4 * 2**30
"""Bytes of files beyond which they are listed without hashes."""


@dataclass
class _Walk:
    """Everything that is kept of a split."""

    total: Accumulator
    predicted: list[IntArray] = field(default_factory=list)
    margin: list[FloatArray] = field(default_factory=list)
    ignored: int = 0

    def like(self) -> _Walk:
        return _Walk(self.total.like())

    def add(self, *, by: Any = None, **columns: Any) -> None:
        self.total.update(by=by, **columns)
        logits = columns.pop("logits", None)
        examples, _ = labelled_examples(logits, **columns, estimand=self.total.estimand)
        kept = examples.labels != IGNORED
        self.ignored += int((~kept).sum())
        if examples.event is not None:  # pairs of two classes and of tags tell the predicted one
            return
        stated = examples.logits if examples.probs is None else examples.probs
        if examples.one_logit:
            limit = 0.0 if examples.probs is None else 0.5
            self.predicted.append((np.asarray(stated)[kept] > limit).astype(np.int64))
            return
        shape = (-1, examples.classes)
        self.predicted.append(np.asarray(stated).reshape(shape)[kept].argmax(-1))
        self.margin.append(margins(np.asarray(examples.logits).reshape(shape)[kept]))

    def merge(self, other: _Walk) -> None:
        self.total.merge(other.total)
        self.predicted += other.predicted
        self.margin += other.margin
        self.ignored += other.ignored


def measure(
    split: Split,
    name: str,
    *,
    estimand: EstimandChoice,
    bins: int,
    level: float | None,
    seed: int,
) -> Subject:
    """Return the figures of a split, those of :func:`calibrant.evaluate` among them."""
    options: dict[str, Any] = {"bins": bins, "estimand": estimand, "level": level, "seed": seed}
    # classes and margins are those of single pairs
    total = Accumulator(pairs=True, most_pairs=math.inf, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        split.warn_of_mistakes()
        columns, rows = (split.domain, "labels", "sample_weight", "by"), split.chunk_rows
        walk = split.reduce(_Walk(total), *columns, rows=rows)
        evaluation = total.compute()
    pairs = total.kept_pairs()
    answers, predicted = _answers_of(pairs, evaluation.estimand, walk.predicted)
    (everything,) = _parts_of(answers.filled(np.array([0.0, 1.0])), ["all answers"], level)
    used = len(split.dataset.files)
    described = describe_skipped(split.dataset.skipped, used)
    return Subject(
        name=name,
        path=split.path,
        split=split.name,
        files=_files(split),
        columns=split.dataset.named,
        probs_stored=split.domain == "probs",
        class_names=split.dataset.class_names,
        evaluation=evaluation,
        answers=everything,
        sure=_sure(answers, level),
        certain=float(np.average(answers.confidence >= 1, weights=answers.weight)),
        ranges=_ranges(evaluation, level),
        classes=_classes(split, total, answers, predicted, level),
        margins=_margins(answers, walk.margin, level),
        coverage=[] if evaluation.estimand == "multilabel" else _coverage_of(answers),
        weighted=split.dataset.sample_weight is not None,
        ignored=walk.ignored,
        by=split.dataset.by,
        warnings=list(dict.fromkeys(str(warning.message) for warning in caught)),
        skipped=[line.strip() for line in described],
    )


def _answers_of(
    pairs: WeightedPairs, estimand: Estimand, predicted: Sequence[IntArray] = ()
) -> tuple[WeightedPairs, IntArray]:
    """Return confidences in the predicted class, and that class, from pairs of the estimand."""
    if estimand == "top_label":
        joined = np.concatenate([np.zeros(0, np.int64), *predicted]).astype(np.int64)
        return pairs, joined
    positive = pairs.confidence > 0.5
    claimed = np.maximum(pairs.confidence, 1 - pairs.confidence)
    right = (pairs.outcome == positive).astype(np.float64)
    return WeightedPairs(claimed, right, pairs.weight), positive.astype(np.int64)


def _coverage_of(answers: WeightedPairs, points: int = 100) -> list[Coverage]:
    """Return thresholds that about 1, 2, ... 100 % of the examples reach; ties stay together."""
    claimed, right, weight = answers
    curve = risk_coverage(confidence=claimed, outcome=right, sample_weight=weight)
    wanted = np.arange(1, points + 1) / points
    index = np.unique(np.searchsorted(curve.coverage, wanted - 1e-12).clip(max=len(curve.risk) - 1))
    mass = np.ones_like(claimed) if weight is None else weight
    _, group = np.unique(-claimed, return_inverse=True)
    kept, doubt = (np.cumsum(np.bincount(group, x)) for x in (mass, mass * (1 - claimed)))
    columns = (curve.threshold, curve.coverage, curve.risk, doubt / np.maximum(kept, 1e-300))
    return [Coverage(*(float(x[i]) for x in columns)) for i in index]


def _find_subgroups(
    split: Split, level: float | None, seed: int, predictions: bool
) -> Slices | None:
    """Search subgroups of the metadata, and of ``predictions`` if asked for; None without any."""
    metadata = metadata_keys(split)
    if not has_one_label(split) or not (metadata or predictions):
        return None
    reading = Reading(metadata, split.classes, split.dataset.class_names, predictions=predictions)
    return search(split, reading, level=level or 0.9, seed=seed).result


def _sure(answers: WeightedPairs, level: float | None) -> Part:
    sums = answers.filled(np.array([0.0, SURE, 1.0]))
    name = f"confidence above {SURE:g}"
    if not sums.count[1]:
        return _empty_part(name)
    return _parts_of(sums, ["", name], level)[-1]


def _ranges(evaluation: Evaluation, level: float | None) -> list[Part]:
    bins = _merged_bins(evaluation.bins)
    edges = [f"{100 * edge:.1f}".removesuffix(".0") for edge in bins.edges]
    return _parts_of(bins, [f"{low} to {high} %" for low, high in pairwise(edges)], level)


def _margins(
    answers: WeightedPairs, collected: Sequence[FloatArray], level: float | None
) -> list[Part]:
    if not collected:
        return []
    margin = np.concatenate(collected)
    cuts = np.unique(np.quantile(margin, np.arange(1, MARGIN_GROUPS) / MARGIN_GROUPS))
    ends = [float(margin.min()), *map(float, cuts), float(margin.max())]
    index = np.searchsorted(cuts, margin, side="left")
    sums = fill_at(index, *answers[:2], np.arange(cuts.size + 2.0), answers.weight)
    names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(ends)]
    return _parts_of(sums, names, level)


def _classes(
    split: Split,
    total: Accumulator,
    answers: WeightedPairs,
    predicted: IntArray,
    level: float | None,
) -> list[ClassFigures]:
    size = total.classes
    word = "tag" if total.estimand == "multilabel" else "class"
    names = split.dataset.class_names or [f"{word} {k}" for k in range(size)]
    edges = np.arange(size + 1.0)
    if total.estimand == "multilabel":
        sums = _tag_sums(total, edges)
    else:
        sums = fill_at(predicted, *answers[:2], edges, answers.weight)
    frequency, claimed = _frequencies(total, size)
    held = np.flatnonzero(sums.count).tolist()
    parts = dict(zip(held, _parts_of(sums, names, level), strict=True))
    # labels of a tag may be missing; every example is of some class
    whole = np.full(size, total.moments.effective)
    worth = (sums.effective if total.estimand == "multilabel" else whole).tolist()
    return [
        ClassFigures(
            parts.get(k) or _empty_part(names[k]),
            labelled=frequency[k],
            claimed=claimed[k],
            bias_p_value=1.0
            if math.isnan(claimed[k])
            else binomial_test(frequency[k] * worth[k], worth[k], claimed[k]),
        )
        for k in range(size)
    ]


def _frequencies(total: Accumulator, size: int) -> tuple[list[float], list[float]]:
    """Share of each label, and mean probability of each class; NaN for very many classes."""
    sums = total.classwise
    if sums is None:
        return [math.nan] * size, [math.nan] * size
    weight = sums.weight.sum(1).numpy()
    shares = [x.sum(1).numpy() / np.maximum(weight, 1e-300) for x in (sums.observed, sums.claimed)]
    return shares[0].tolist(), shares[1].tolist()


def _tag_sums(total: Accumulator, edges: FloatArray) -> Bins:
    sums = total.classwise
    if sums is None:
        return Bins.empty(edges)
    weight, claimed, observed, squares = (
        x.sum(1).numpy() for x in (sums.weight, sums.claimed, sums.observed, sums.squares)
    )
    count = np.rint(weight**2 / np.maximum(squares, 1e-300)).astype(np.int64)
    return Bins(edges, count, weight, claimed, observed, np.zeros_like(weight), squares)


def _files(split: Split) -> list[SourceFile]:
    paths = dict.fromkeys(c.path for s in split.shards for c in s.columns.values())
    there = [path for path in paths if path != IN_MEMORY and os.path.isfile(path)]
    sizes = {path: os.path.getsize(path) for path in there}
    hashed = sum(sizes.values()) <= MOST_HASHED
    return [SourceFile(p, size, _sha256(p) if hashed else None) for p, size in sizes.items()]


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


USUAL = ("none", "ts", "smart", "auto")
USUAL_OF_TWO = ("none", "ts", "sigmoid", "beta", "auto")
USUAL_OF_TAGS = ("none", "pooled", "tags")
MAX_ERRORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Error rates for which thresholds are sought."""


def usual_methods(estimand: EstimandChoice, classes: int) -> tuple[str, ...]:
    """Return the methods that a report tries: few, quick and good."""
    if estimand == "multilabel":
        return USUAL_OF_TAGS
    return USUAL_OF_TWO if classes == 2 else USUAL


def _try_methods(
    dataset: Dataset,
    *,
    methods: Sequence[str],
    split: str,
    fit_split: str | None,
    keep_argmax: KeepArgmax,
    estimand: EstimandChoice,
    bins: int,
    level: float | None,
    seed: int,
) -> Remedy:
    """Compare methods on a dataset, and apply the chosen one to the examples measured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comparison = compare(
            dataset,
            methods=methods,
            fit_split=fit_split,
            test_split=split,
            keep_argmax=keep_argmax,
            estimand=estimand,
            bins=bins,
            level=level,
            seed=seed,
        )
        splits, *_ = compared_splits(dataset, fit_split, split, seed)
        remedy = Remedy(comparison, fit_split=splits[0].name)
        if remedy.chosen is not None and not remedy.changes_nothing:
            remedy = _applied(remedy, splits[1], level or 0.9)
    if splits[0].name == splits[1].name:  # the walk before has told
        return remedy
    told = [str(one.message) for one in caught]
    return replace(remedy, doubts=[one for one in told if one.startswith(comparison.fitted_on)])


def _applied(remedy: Remedy, measured: Split, level: float) -> Remedy:
    """Return what the chosen method gains on the examples measured, and what it makes possible."""
    row = remedy.chosen
    assert row is not None
    assert row.calibrator is not None
    losses = paired_losses(row.by_fold or [row.calibrator], measured)
    remedy = replace(remedy, gain=losses.reduction(level))
    if row.calibrator.multilabel:
        return remedy
    answers = WeightedPairs(losses.top, losses.correct.astype(np.float64), losses.weight)
    remedy = replace(remedy, coverage=_coverage_of(answers))
    if answers.weight is not None or remedy.comparison.folds:
        return remedy  # guarantees count examples, which the calibrator has not seen
    error = 1 - float(losses.correct.mean())
    sought = [most for most in MAX_ERRORS if most < error]
    pairs: Any = {"confidence": losses.top, "outcome": answers.outcome}
    return replace(remedy, thresholds=[threshold(**pairs, max_error=most) for most in sought])
