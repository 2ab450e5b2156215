"""All metrics at once, from arrays, a stream of batches, shards or ranks.

The pixels of an image and the tokens of a document are not independent. Groups of examples are: the
noise of a figure is what it varies by when other groups are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.special import ndtri, stdtrit

from calibrant._core import checks
from calibrant._core.binning import Bins, bin_index, fill, uniform_edges
from calibrant._core.checks import BoolArray, FloatArray
from calibrant._core.chunks import EstimandChoice, resolve_estimand
from calibrant._core.messages import comma_separated
from calibrant.metrics import gaps, reductions
from calibrant.metrics.classwise import MOST_CELLS, ClassBins
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.reductions import Input, Pairs, Reduced, WeightedPairs, labelled_examples
from calibrant.metrics.registry import METRICS
from calibrant.metrics.smooth import pairs_test
from calibrant.metrics.summary import SCORES, KeptPairs, Moments, Summary

_FORM = ("estimand", "pairs", "level", "grouped", "most_pairs")
MOST_SUBGROUPS = 1000
"""Each subgroup takes a fraction of a second."""


class Accumulator:
    """Metrics of a stream: ``update`` with batches, ``merge`` with others, ``compute``.

    Binned errors and proper scores equal those of all examples at once.

    Parameters
    ----------
    bins : int
        Number of equal-width bins.
    estimand : {"auto", "top_label", "binary", "multilabel"}
        The probability and the event that are compared, as in :func:`calibrant.evaluate`.
    pairs : bool
        Keep the confidence and outcome of every example (9 bytes, 17 with weights; with two classes
        9 more, for AUROC and AURC), so that every metric is available. Of more than 2^18 examples
        sums in 20,960 fine bins are kept instead. Otherwise the memory does not grow at all.
    metrics : sequence of str, optional
        Names from ``METRICS``; all that are possible by default.
    level : float, optional
        Coverage of the intervals; None or 0 computes none.
    seed : int
        Random seed for intervals and test.
    grouped : bool
        Batches come with ``groups``, and intervals are those of examples that depend on each other
        within a group. A few hundred bytes are kept of each group. Metrics that need sums alone
        have such intervals.
    most_pairs : float, optional
        Another number than 2^18 of labels up to which single pairs are kept; ``math.inf`` for any.

    Examples
    --------
    >>> stream = Accumulator(level=None)
    >>> for logits, labels in [([[2.0, 0.0]], [0]), ([[0.0, 1.0]], [0])]:
    ...     stream = stream.update(logits, labels)
    >>> stream.compute()["accuracy"].value
    0.5
    """

    def __init__(
        self,
        *,
        bins: int = 15,
        estimand: EstimandChoice = "auto",
        pairs: bool = False,
        metrics: Sequence[str] | None = None,
        level: float | None = 0.9,
        seed: int = 0,
        grouped: bool = False,
        most_pairs: float | None = None,
    ) -> None:
        if level:
            checks.check_level(level)
        self.estimand: EstimandChoice = estimand
        self.pairs = pairs
        self._all = metrics is None
        if metrics is None:
            usual = (name for name, metric in METRICS.items() if not metric.on_request)
            names = tuple(name for name in usual if pairs or not METRICS[name].needs_pairs)
        else:
            names = tuple(map(METRICS.name, [metrics] if isinstance(metrics, str) else metrics))
        if not names:
            raise ValueError(f"metrics must name at least one of {comma_separated(METRICS)}")
        if needy := [name for name in names if METRICS[name].needs_pairs and not pairs]:
            raise ValueError(f"{comma_separated(needy)} need all pairs: pass pairs=True")
        self.metrics = names
        self.level = level or None
        self.seed = seed
        self.moments = Moments.empty()
        self.bins = Bins.empty(uniform_edges(bins))
        self.classes = 0
        self.floored = 0
        self.classwise: ClassBins | None = None
        self.by: dict[str, Accumulator] = {}
        self._kept = KeptPairs(most_pairs)
        self.most_pairs = self._kept.most
        self.grouped = grouped
        self._groups = GroupSums()

    def like(self) -> Accumulator:
        """An accumulator of the same form that has seen nothing."""
        other = Accumulator(**self._form(), seed=self.seed)
        return other.pool() if self._kept.pooled else other

    def pool(self) -> Accumulator:
        """Keep sums in fine bins in place of single pairs, as streams of many examples do."""
        self._kept.pool()
        for part in self.by.values():
            part.pool()
        return self

    @checks.warnings_at_caller()
    def update(
        self,
        logits: Input = None,
        labels: Input = None,
        *,
        probs: Input = None,
        sample_weight: Input = None,
        by: Input = None,
        groups: Input = None,
        class_dim: int | None = None,
        ignore_index: int | None = None,
    ) -> Accumulator:
        """Add logits ``(..., classes)``, or ``probs``, with labels ``(...)``.

        ``sample_weight``, ``by``, the subgroups to report on, and ``groups`` of examples that
        depend on each other have one value per label or per row of labels. ``class_dim`` is the
        dimension of the classes where it is not the last, ``ignore_index`` a label of ignored
        examples beside -100. A refused batch leaves no trace. A warning tells if the logits of the
        first batch look like probabilities.
        """
        first = not self.moments.count
        if logits is not None:
            logits = checks.classes_last(logits, class_dim)
        if probs is not None:
            probs = checks.classes_last(probs, class_dim)
        if labels is not None:
            labels = checks.with_ignored(labels, ignore_index)
        self.add(logits, labels, probs=probs, sample_weight=sample_weight, by=by, groups=groups)
        if first and logits is not None and self.estimand != "multilabel":  # tags sum to anything
            checks.warn_of_probs(checks.as_scores(logits), "if they are, pass them as probs=")
        return self

    @np.errstate(under="ignore")
    def add(
        self,
        logits: Input = None,
        labels: Input = None,
        *,
        probs: Input = None,
        sample_weight: Input = None,
        by: Input = None,
        groups: Input = None,
    ) -> Accumulator:
        """Add a batch as :meth:`update` does, without its warning: callers look at all of it."""
        examples, floored = labelled_examples(logits, labels, probs, sample_weight, self.estimand)
        scores = examples.logits if examples.probs is None else examples.probs
        targets = examples.labels.reshape(scores.shape if examples.one_logit else scores.shape[:-1])
        rows = targets.shape[:-1] if self.estimand == "multilabel" else targets.shape
        members = {} if by is None else _members(by, rows, self.by)
        if self.grouped != (groups is not None):
            raise TypeError("groups= go with every batch of an Accumulator(grouped=True), and only")
        keys = None if groups is None else checks.as_keys(groups)
        classwise = self._class_bins(examples.columns)
        # may refuse the batch: nothing was added yet
        reduced = reductions.reduce_examples(examples, classwise)
        kept = examples.labelled_weight()
        if keys is not None:  # refuses other shapes
            self._groups.add(keys, targets != checks.IGNORED, reduced, kept, self.bins.edges)
        self._add_classes(examples.columns, classwise)
        self.moments += Moments.of(reduced, kept)
        outcome = reduced.outcome.astype(np.float64)
        self.bins += fill(reduced.confidence, outcome, self.bins.edges, kept)
        self.floored += floored
        if self.pairs:
            pairs = Pairs(reduced.confidence, reduced.outcome)
            ranked = examples.event is not None and self.estimand == "auto"
            answers = Pairs(reduced.top, reduced.correct) if ranked else None
            self._kept.add(pairs, answers, kept, targets.size)
            if self._kept.pooled:
                self.pool()  # subgroups as well
        weights = None if examples.weight is None else examples.weight.reshape(targets.shape)
        domain = "logits" if examples.probs is None else "probs"
        for name, where in members.items():
            part = None if weights is None else weights[where]
            subgroup = self.by.setdefault(name, self.like())
            columns: dict[str, Any] = {domain: scores[where], "sample_weight": part}
            if keys is not None:
                columns["groups"] = checks.spread(keys, targets.shape, "groups")[where]
            subgroup.add(labels=targets[where], **columns)
        return self

    def merge(self, other: Accumulator) -> Accumulator:
        """Add what another accumulator of the same form has seen."""
        self._check_form(other._form())
        _check_subgroups({*self.by, *other.by})
        if other.classes:
            self._class_bins(other.classes)  # refuses another number of classes
            self._add_classes(other.classes, other.classwise)
        self.moments += other.moments
        self.bins += other.bins
        self.floored += other.floored
        self._kept.merge(other._kept)
        self._groups.merge(other._groups)
        for name, part in other.by.items():
            self.by.setdefault(name, self.like()).merge(part)
        return self.pool() if self._kept.pooled else self

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Accumulator:
        """Add up over the ranks of ``torch.distributed``: afterwards every rank has the total.

        Sums are all-reduced; pairs and subgroups are gathered. Call it once, at the end: a second
        call would count everything again.
        """
        forms: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(forms, (self._form(), self.classes, self.floored), group)
        for form, classes, _ in forms:
            self._check_form(form)
            if classes:  # a rank may have had no data at all
                self._add_classes(classes, self._class_bins(classes))
        self.floored = sum(floored for _, _, floored in forms)
        self._reduce_sums(group)
        rest: list[Any] = [None] * len(forms)
        dist.all_gather_object(rest, (self._kept, self._groups, self.by), group)
        self._kept, self._groups, self.by = KeptPairs(self.most_pairs), GroupSums(), {}
        for kept, groups, _ in rest:
            self._kept.merge(kept)
            self._groups.merge(groups)
        for *_, subgroups in rest:
            for name, part in subgroups.items():
                self.by.setdefault(name, self.like()).merge(part)
        return self.pool() if self._kept.pooled else self

    @checks.warnings_at_caller()
    @np.errstate(under="ignore")
    def compute(self) -> Evaluation:
        """Metrics of everything seen so far."""
        checks.check_some(self.moments.count)
        if "nll" in self.metrics:
            reductions._warn_of_floor(self.floored)
        return self._computed()

    def _computed(self) -> Evaluation:
        if self.classwise is None and "classwise_ece" in self.metrics:
            checks.warn(f"classwise_ece is left out: {self.classes:,} classes are too many for it")
        moments, bins, groups, noise = self.moments, self.bins, len(self._groups.sums), None
        if groups > 1 and self.level is not None:
            noise = self._groups.noise(self.level)
            moments, bins = noise.moments(moments), noise.widened(bins)
        sums = (moments, bins, self.classwise, *self._kept.in_order())
        summary = Summary(
            *sums, self.estimand, self.level, self.seed, None if noise is None else noise.drawn
        )
        alone = replace(summary, level=None) if self.grouped else summary
        kind = resolve_estimand(self.estimand, self.classes)
        names = [n for n in self.metrics if kind == "binary" or not METRICS[n].two_classes_only]
        metrics = {
            name: METRICS[name].estimate(summary if noise and METRICS[name].by_groups else alone)
            for name in names
        }
        tested = self.pairs and self.level is not None and not self.grouped
        test = pairs_test(summary.pairs, seed=self.seed) if tested else None
        # a subgroup whose labels are all ignored has nothing to show
        parts = {name: part._computed() for name, part in self.by.items() if part.moments.count}
        by = dict(sorted(parts.items(), key=_badness, reverse=True))
        n, chance = self.moments.count, math.nan
        if self.classwise is not None and self.moments.weight:
            together = self.classwise.claimed.sum(1) @ self.classwise.observed.sum(1)
            chance = float(together) / self.moments.weight**2
        return Evaluation(
            *(metrics, n, self.classes, kind, bins, self.level, test, by, chance), groups=groups
        )

    def kept_pairs(self) -> WeightedPairs:
        """Return the pairs of all examples in the order of their arrival; needs ``pairs=True``.

        Of more than 2^18 examples there is one pair for each fine bin of confidence and outcome.
        """
        if not self.pairs:
            raise ValueError("no pairs were kept: make the Accumulator with pairs=True")
        return self._kept.joined()

    def _form(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in _FORM}
        metrics = None if self._all else self.metrics
        return {"bins": self.bins.count.size, "metrics": metrics, **same}

    def _check_form(self, other: dict[str, Any]) -> None:
        mine = self._form()
        if mine != other:
            raise ValueError(f"accumulators must have the same form to merge: {mine}, {other}")

    def _class_bins(self, classes: int) -> ClassBins | None:
        """Empty class-wise sums, where they are wanted; checks the number of classes."""
        if self.classes not in (0, classes):
            change = f"{self.classes} so far, now {classes}"
            raise ValueError(f"every batch must have the same classes: {change}")
        kind = resolve_estimand(self.estimand, classes)
        for name in () if self._all or kind == "binary" else self.metrics:
            if METRICS[name].two_classes_only:
                ranks = name == "roc_auc"
                raise ValueError(
                    f"{name} is a figure of P(y = 1) of two classes, and these are probabilities "
                    f"of {reductions.ESTIMANDS[kind]}: "
                    f"{'name auroc, which ranks them, or ' * ranks}use calibrant.metrics.{name} "
                    "of the pairs of one class against the rest (one_vs_rest)"
                )
        if "classwise_ece" not in self.metrics:
            return None
        bins = self.bins.count.size
        if self._all and classes * bins > MOST_CELLS:  # where it is named, this is an error
            return None
        return ClassBins.empty(classes, bins, interval=self.level is not None)

    def _add_classes(self, classes: int, sums: ClassBins | None) -> None:
        if self.classwise is None:
            self.classwise = self._class_bins(classes)
        self.classes = classes
        if self.classwise is not None and sums is not None:
            self.classwise.add(sums)

    def _reduce_sums(self, group: dist.ProcessGroup | None) -> None:
        """Replace moments, bins and class-wise sums by their totals over the ranks."""
        moments, bins = self.moments, self.bins
        sums = [np.array([moments.weight]), moments.first, moments.powers]
        sums += [bins.weight, bins.claimed, bins.observed, bins.spread, bins.squares]
        tensors = [torch.from_numpy(np.array(x)) for x in sums]
        if self.classwise is not None:
            tensors += self.classwise.sums()
        total = _summed(torch.cat([x.reshape(-1) for x in tensors]), group)
        for mine, summed in zip(tensors, total.split([x.numel() for x in tensors]), strict=True):
            mine.copy_(summed.view_as(mine))
        count = _summed(torch.from_numpy(np.append(bins.count, moments.count)), group).numpy()
        weight, first, powers, *binned = (x.numpy() for x in tensors[:8])
        self.moments = Moments(int(count[-1]), float(weight[0]), first, powers)
        self.bins = Bins(bins.edges, count[:-1], *binned)


def _members(
    by: checks.Values, shape: tuple[int, ...], known: Iterable[str]
) -> dict[str, BoolArray]:
    """Mask of the rows of each subgroup, over the leading dimensions of the labels."""
    keys = checks.as_keys(by)
    checks.spread(keys, shape, "by")  # refuses other shapes
    values, index = np.unique(keys, return_inverse=True)
    names = list(map(str, values))
    if keys.dtype.kind == "f":  # as whole numbers are in tables that lack one
        names = [name.removesuffix(".0") for name in names]
    _check_subgroups({*known, *names})  # before there is a mask for each
    return {name: index.reshape(keys.shape) == i for i, name in enumerate(names)}


def _check_subgroups(names: set[str]) -> None:
    if len(names) > MOST_SUBGROUPS:
        most = f"by must have at most {MOST_SUBGROUPS} values"
        raise ValueError(f"{most}, got {len(names)}: is it an identifier?")


def _badness(item: tuple[str, Evaluation]) -> tuple[float, float]:
    """Sort key of subgroups: the lower end of ECE, then ECE, or the first metric without it."""
    evaluation = item[1]
    name = "ece" if "ece" in evaluation else next(iter(evaluation))
    value, low, high = evaluation[name]
    if math.isnan(value):  # undefined: last
        return (-math.inf, -math.inf)
    if METRICS[name].higher_is_better:
        value, low = -value, -high
    return (0.0 if math.isnan(low) else low, value)


def _summed(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over the ranks, on the device that their backend needs."""
    moved = values.to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    dist.all_reduce(moved, group=group)
    return moved.cpu()


class GroupSums:
    """Sums of weights, scores and residuals per bin for each group; they add up by its name."""

    def __init__(self) -> None:
        self.sums: dict[Any, FloatArray] = {}

    def add(
        self,
        groups: checks.Values,
        labelled: checks.BoolArray,
        reduced: Reduced,
        weight: FloatArray | None,
        edges: FloatArray,
    ) -> None:
        """Add reduced examples; ``groups`` go with the leading dimensions of ``labelled``."""
        keys = checks.as_keys(groups)
        checks.spread(keys, labelled.shape, "groups")  # refuses other shapes
        names, index = np.unique(keys, return_inverse=True)
        group = checks.spread(index.reshape(keys.shape), labelled.shape, "groups")[labelled]
        mass = np.ones(reduced.nll.size) if weight is None else weight
        scores = [mass, *(mass * getattr(reduced, name) for name in SCORES)]
        columns = [np.bincount(group, values, len(names)) for values in scores]
        bins = edges.size - 1
        place = group * bins + bin_index(reduced.confidence, edges)
        residual = np.bincount(
            place, mass * (reduced.confidence - reduced.outcome), len(names) * bins
        )
        table = np.column_stack([*columns, residual.reshape(-1, bins)])
        for name, row in zip(names.tolist(), table, strict=True):
            if row[0] > 0:
                self.sums[name] = self.sums[name] + row if name in self.sums else row

    def merge(self, other: GroupSums) -> None:
        """Add what others have seen."""
        for name, row in other.sums.items():
            self.sums[name] = self.sums[name] + row if name in self.sums else row

    def noise(self, level: float) -> _GroupNoise:
        """Return what the figures vary by, in intervals of this coverage."""
        count = len(self.sums)
        # few groups tell their own spread badly: Student's quantiles in place of normal ones
        wider = float(stdtrit(count - 1, (1 + level) / 2) / ndtri((1 + level) / 2))
        return _GroupNoise(
            np.stack(list(self.sums.values())), wider * math.sqrt(count / (count - 1))
        )


@dataclass(frozen=True, eq=False)
class _GroupNoise:
    """Sums ``(groups, 1 + scores + bins)``, and by how much their spread is widened."""

    table: FloatArray
    stretch: float

    def moments(self, moments: Moments) -> _GroupedMoments:
        """Return moments whose standard errors are those over groups."""
        return _GroupedMoments(
            moments.count, moments.weight, moments.first, moments.powers, self.table, self.stretch
        )

    def influence(self, filled: Bins) -> FloatArray:
        """Return what each group adds to the gaps, less its share of them, ``(groups, bins)``."""
        residual = self.table[:, 1 + len(SCORES) :]
        return np.asarray((residual - filled.gap * self.table[:, :1]) / filled.total)

    def widened(self, filled: Bins) -> Bins:
        """Return bins whose examples are worth as many independent ones, or as they are."""
        variance = (self.influence(filled) ** 2).sum(0) * self.stretch**2
        squares = filled.squares.sum()
        alone = np.maximum(filled.spread - filled.gap**2 * squares, 0) / filled.total**2
        effect = np.divide(variance, alone, out=np.ones_like(alone), where=alone > 0).clip(1.0)
        wide = filled.squares * effect
        spread = alone * effect * filled.total**2 + filled.gap**2 * wide.sum()
        return replace(filled, squares=wide, spread=spread)

    def drawn(self, filled: Bins, replicates: int, seed: int) -> FloatArray:
        """Return the noise of the gaps in samples of other groups, ``(replicates, bins)``."""
        influence = self.stretch * self.influence(filled)
        return gaps._group_noise(influence, replicates, [seed, 3])


@dataclass(frozen=True)
class _GroupedMoments(Moments):
    """Moments of examples in groups that are independent of each other."""

    table: FloatArray
    stretch: float

    def deviation(self, name: str) -> float:
        """Standard error of a mean over groups."""
        sums = self.table[:, 1 + SCORES.index(name)]
        off = sums - self.mean(name) * self.table[:, 0]
        return self.stretch * float(np.sqrt((off**2).sum())) / self.weight

    @property
    def worth(self) -> float:
        """Number of independent examples whose accuracy would vary as much."""
        accuracy, deviation = self.mean("correct"), self.deviation("correct")
        return accuracy * (1 - accuracy) / deviation**2 if deviation > 0 else float(len(self.table))
