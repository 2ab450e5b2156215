"""All metrics at once: from arrays, from a stream of batches, from shards and ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from calibrant._binning import RULE, Bins, equal_mass_edges, fill, uniform_edges
from calibrant._checks import (
    FloatArray,
    as_labels,
    as_scores,
    as_weight,
    check_some,
    logits_from_probs,
)
from calibrant.metrics import binned, intervals, ranking, scores, smooth
from calibrant.metrics.binned import Values
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.intervals import CalibrationTest, Estimate, Gaps
from calibrant.metrics.rows import Estimand, examples, top_label, walk
from calibrant.metrics.scores import Moments

REPLICATES = 1000
"""Draws of the sampling noise behind an interval; the exact smooth error takes a fifth."""

CLASS_NOISE = 1 << 21
"""Numbers kept for the noise of class-wise sums: replicates are as many as fit, up to 200."""


class Metric(NamedTuple):
    """A line of :data:`METRICS`."""

    title: str
    compute: Callable[[Values, Values], float]
    """The figure, from logits ``(..., classes)`` and labels ``(...)``."""
    estimate: Callable[[Summary], Estimate]
    """The figure with its interval, from what an accumulator holds."""
    percent: bool = True
    higher_is_better: bool = False
    proper: bool = False
    needs_pairs: bool = False
    """Whether a stream must keep every (confidence, outcome) for it."""


@dataclass(frozen=True)
class Summary:
    """What the metrics are computed from, once all examples are in."""

    moments: Moments
    bins: Bins
    classwise: ClassBins | None
    confidence: FloatArray
    outcome: FloatArray
    weight: FloatArray | None
    level: float | None
    seed: int

    @cached_property
    def gaps(self) -> Gaps:
        """Gaps of the equal-width bins with noise."""
        return intervals.gaps_of(self.bins, REPLICATES, self.seed)

    @cached_property
    def smooths(self) -> bool:
        """Whether the gap curve is smooth; see :func:`intervals.smooths`."""
        return intervals.smooths(self.bins)

    def filled(self, edges: FloatArray) -> Bins:
        """Sums of the pairs in other bins."""
        return fill(self.confidence, self.outcome, edges, self.weight)

    def error(
        self,
        value: float,
        error: intervals.Functional,
        edges: FloatArray | None = None,
        replicates: int = REPLICATES,
    ) -> Estimate:
        """Attach an interval to a calibration error; the bins are the usual ones by default."""
        if self.level is None or math.isnan(value):
            return Estimate(value)
        gaps = self.gaps
        if edges is not None:
            gaps = intervals.gaps_of(self.filled(edges), replicates, self.seed, self.smooths)
        return intervals.error_interval(value, error, gaps, self.level)

    def interval(
        self, value: float, deviation: float, kind: Callable[[float, float, float], Estimate]
    ) -> Estimate:
        """Attach an interval to a figure with a standard error."""
        return Estimate(value) if self.level is None else kind(value, deviation, self.level)


def _accuracy(s: Summary) -> Estimate:
    return s.interval(s.moments.mean("correct"), s.moments.effective, intervals.share_interval)


def _score(name: str) -> Callable[[Summary], Estimate]:
    def estimate(s: Summary) -> Estimate:
        return s.interval(s.moments.mean(name), s.moments.deviation(name), intervals.mean_interval)

    return estimate


def _classwise(s: Summary) -> Estimate:
    if s.classwise is None:
        return Estimate(math.nan)
    value = s.classwise.average()
    if s.level is None:
        return Estimate(value)
    return intervals.class_interval(value, s.classwise, s.level)


def _ada_ece(s: Summary) -> Estimate:
    edges = equal_mass_edges(s.confidence, s.bins.count.size, s.weight)
    return s.error(binned.absolute(s.filled(edges).gap), intervals.total, edges)


def _mce(s: Summary) -> Estimate:
    return s.error(binned.largest(s.bins), intervals.worst(s.bins))


def _ks(s: Summary) -> Estimate:
    value = smooth.ks(s.confidence, s.outcome, weight=s.weight)
    return s.error(value, intervals.running, equal_mass_edges(s.confidence, 300, s.weight))


def _smooth_ece(s: Summary) -> Estimate:
    value = smooth.smooth_ece(s.confidence, s.outcome, weight=s.weight)
    return s.error(value, smooth.smoothed, uniform_edges(200), REPLICATES // 2)


def _smce(s: Summary) -> Estimate:
    value = smooth.smce(s.confidence, s.outcome, weight=s.weight)
    return s.error(value, smooth.lipschitz_error, uniform_edges(100), REPLICATES // 5)


def _auroc(s: Summary) -> Estimate:
    value, deviation = ranking.placement(s.confidence, s.outcome, s.weight)
    return s.interval(value, deviation, intervals.logit_interval)


def _aurc(s: Summary) -> Estimate:
    value, deviation = ranking.accumulated_risk(s.confidence, s.outcome, s.weight)
    return s.interval(value, deviation, intervals.logit_interval)


def _of_pairs(function: Callable[..., float]) -> Callable[[Values, Values], float]:
    def compute(logits: Values, labels: Values) -> float:
        return function(*top_label(logits, labels))

    return compute


METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy", scores.accuracy, _accuracy, higher_is_better=True),
    "ece": Metric(
        "ECE",
        _of_pairs(binned.ece),
        lambda s: s.error(binned.absolute(s.bins.gap), intervals.total),
    ),
    "debiased_ece": Metric(
        "ECE, debiased",
        _of_pairs(binned.debiased_ece),
        lambda s: s.error(binned.debiased(s.bins), intervals.total),
    ),
    "ada_ece": Metric(
        "ECE, equal mass", _of_pairs(binned.ada_ece), _ada_ece, needs_pairs=True
    ),
    "classwise_ece": Metric("ECE, class-wise", binned.classwise_ece, _classwise),
    "mce": Metric("maximum error", _of_pairs(binned.mce), _mce),
    "over_ece": Metric(
        "ECE, over-confident",
        _of_pairs(binned.over_ece),
        lambda s: s.error(binned.positive(s.bins.gap), intervals.over),
    ),
    "under_ece": Metric(
        "ECE, under-confident",
        _of_pairs(binned.under_ece),
        lambda s: s.error(binned.positive(-s.bins.gap), intervals.under),
    ),
    "ks": Metric("KS error", _of_pairs(smooth.ks), _ks, needs_pairs=True),
    "smooth_ece": Metric(
        "smooth ECE", _of_pairs(smooth.smooth_ece), _smooth_ece, needs_pairs=True
    ),
    "smce": Metric("smCE", _of_pairs(smooth.smce), _smce, needs_pairs=True),
    "nll": Metric("NLL", scores.nll, _score("nll"), percent=False, proper=True),
    "brier": Metric("Brier", scores.brier, _score("brier"), percent=False, proper=True),
    "auroc": Metric(
        "AUROC of confidence",
        _of_pairs(ranking.auroc),
        _auroc,
        higher_is_better=True,
        needs_pairs=True,
    ),
    "aurc": Metric("AURC", _of_pairs(ranking.aurc), _aurc, needs_pairs=True),
}
"""Every metric of :func:`evaluate`, by its name on the command line and in JSON."""


@dataclass(frozen=True)
class Evaluation(Mapping[str, Estimate]):
    """Figures of one set of predictions, with what they mean.

    A mapping from metric name to :class:`Estimate`; printing it gives a table.

    Attributes
    ----------
    metrics : figures by name, each ``(value, low, high)``
    n : labelled examples
    classes : number of classes
    estimand : which probability was compared with which event
    bins : sums per equal-width bin, for diagrams
    level : coverage of the intervals; None without intervals
    test : test of "is this model miscalibrated at all"; None in a stream without pairs
    groups : the same by group, worst first; empty when no groups were given
    """

    metrics: dict[str, Estimate]
    n: int
    classes: int
    estimand: Estimand
    bins: Bins
    level: float | None
    test: CalibrationTest | None = None
    groups: dict[str, Evaluation] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Estimate:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    @property
    def binning(self) -> str:
        """The binning rule behind the figures."""
        return f"{self.bins.count.size} equal-width bins {RULE}"

    def describe(self) -> str:
        """One line that says what was measured."""
        names = {"top_label": "top label", "binary": "P(class 1)", "multilabel": "every tag"}
        examples = f"{self.n:,} examples, {self.classes} classes"
        return f"{examples}; estimand: {names[self.estimand]}; {self.binning}"

    def verdict(self) -> str:
        """The test of calibration in words; empty without one."""
        if self.test is None:
            return ""
        p = self.test.p_value
        chance = f"p < {p:.2g}" if p <= 0.001 else f"p = {p:.2g}"
        if p < 0.05:
            return f"miscalibrated: a calibrated model would rarely look this far off ({chance})"
        return f"no evidence of miscalibration in {self.n:,} examples ({chance})"

    def table(self) -> list[tuple[str, str, str]]:
        """Title, value and interval of each metric, as text."""
        return [
            (METRICS[name].title, _shown(name, e.value), _range(name, e))
            for name, e in self.metrics.items()
        ]

    def __str__(self) -> str:
        heading = "" if self.level is None else f"{100 * self.level:g} % interval"
        rows = [("", "value", heading), *self.table()]
        left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{a:<{left}}  {b:>{middle}}  {c}".rstrip() for a, b, c in rows]
        for name, part in self.groups.items():
            ece = part["ece"]
            lines.append(f"group {name}: ECE {_shown('ece', ece.value)} {_range('ece', ece)}")
        return "\n".join(filter(None, [self.describe(), *lines, self.verdict()]))

    def to_dict(self) -> dict[str, Any]:
        """JSON form: errors as fractions, undefined values as None."""
        found: dict[str, Any] = {
            "n": self.n,
            "classes": self.classes,
            "estimand": self.estimand,
            "binning": self.binning,
            "level": self.level,
            "metrics": {
                name: {key: None if math.isnan(v) else v for key, v in e._asdict().items()}
                for name, e in self.metrics.items()
            },
            "test": None if self.test is None else self.test._asdict(),
        }
        if self.groups:
            found["groups"] = {name: part.to_dict() for name, part in self.groups.items()}
        return found


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{100 * value:.2f} %" if METRICS[name].percent else f"{value:.4f}"


def _range(name: str, e: Estimate) -> str:
    if math.isnan(e.low):
        return ""
    scale, digits = (100, 2) if METRICS[name].percent else (1, 4)
    return f"[{scale * e.low:.{digits}f}, {scale * e.high:.{digits}f}]"


class Accumulator:
    """Metrics of a stream: ``update`` with batches, ``merge`` with others, ``result``.

    Without ``pairs`` the memory does not grow with the examples, and the binned errors and
    proper scores equal those of all examples at once. With ``pairs`` each example's confidence
    and outcome are kept (9 bytes, 17 with weights) and every metric is available.

    Parameters
    ----------
    bins : number of equal-width bins
    estimand : which probability is compared with which event
    pairs : keep (confidence, outcome), for the metrics that need all of them
    metrics : names to compute; all that are possible by default
    level : coverage of the intervals; None computes none
    seed : of the random draws behind intervals and test

    Examples
    --------
    >>> stream = Accumulator(level=None)
    >>> for logits, labels in [([[2.0, 0.0]], [0]), ([[0.0, 1.0]], [0])]:
    ...     stream = stream.update(logits, labels)
    >>> stream.result()["accuracy"].value
    0.5
    """

    def __init__(
        self,
        *,
        bins: int = 15,
        estimand: Estimand = "top_label",
        pairs: bool = False,
        metrics: Sequence[str] | None = None,
        level: float | None = 0.9,
        seed: int = 0,
    ) -> None:
        if level is not None and not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, or None, got {level}")
        self.estimand: Estimand = estimand
        self.pairs = pairs
        self.metrics = _chosen(metrics, pairs)
        self.level = level
        self.seed = seed
        self.moments = Moments.empty()
        self.bins = Bins.empty(uniform_edges(bins))
        self.classes = 0
        self.classwise: ClassBins | None = None
        self.groups: dict[str, Accumulator] = {}
        self._kept: list[tuple[FloatArray, NDArray[np.bool_], FloatArray | None]] = []

    def update(
        self,
        logits: Values,
        labels: Values,
        *,
        weight: Values | None = None,
        groups: Values | None = None,
    ) -> Accumulator:
        """Add logits ``(..., classes)`` with labels ``(...)`` and, optionally, weights ``(...)``.

        ``groups`` ``(...)`` of any values asks for the same metrics by group.
        """
        weights = None if weight is None else as_weight(weight, as_labels(labels).size)
        given = examples(logits, labels, weights, self.estimand)
        self._expect(given.classes, given.columns)
        rows = walk(given, self.classwise)
        kept = given.labelled_weight()
        self.moments += Moments.of(rows, kept)
        outcome = rows.outcome.astype(np.float64)
        self.bins += fill(rows.confidence, outcome, self.bins.edges, kept)
        if self.pairs:
            self._kept.append((rows.confidence, rows.outcome, kept))
        if groups is not None:
            self._update_groups(logits, labels, weights, groups)
        return self

    def merge(self, other: Accumulator) -> Accumulator:
        """Add what another accumulator of the same form has seen."""
        if self._form() != other._form():
            raise ValueError(
                f"accumulators of different form do not merge: {self._form()}, {other._form()}"
            )
        self.moments += other.moments
        self.bins += other.bins
        self._kept += other._kept
        if other.classwise is not None:
            self._expect(other.classes, len(other.classwise.weight))
            assert self.classwise is not None
            self.classwise.add(other.classwise)
        elif other.classes:
            self._expect(other.classes, 0)
        for name, part in other.groups.items():
            self._group(name).merge(part)
        return self

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Accumulator:
        """Add up over the ranks of ``torch.distributed``: afterwards every rank has the total.

        Sums travel in one all-reduce; pairs and groups, where kept, are gathered.
        """
        shapes: list[Any] = [None] * dist.get_world_size(group)
        columns = 0 if self.classwise is None else len(self.classwise.weight)
        dist.all_gather_object(shapes, (self.classes, columns), group)
        for shape in shapes:
            if shape[0]:
                self._expect(*shape)
        self._reduce_sums(group)
        rest: list[Any] = [None] * len(shapes)
        dist.all_gather_object(rest, (self._kept, self.groups), group)
        self._kept = [kept for part, _ in rest for kept in part]
        self.groups = {}
        for _, groups in rest:
            for name, part in groups.items():
                self._group(name).merge(part)
        return self

    def result(self) -> Evaluation:
        """Metrics of everything seen so far."""
        check_some(self.moments.count)
        summary = self._summary()
        found = {name: METRICS[name].estimate(summary) for name in self.metrics}
        test = None
        if self.pairs and self.level is not None:
            test = intervals.calibration_test(
                summary.confidence, summary.outcome, weight=summary.weight, seed=self.seed
            )
        groups = {name: part.result() for name, part in self.groups.items()}
        return Evaluation(
            found,
            self.moments.count,
            self.classes,
            self.estimand,
            self.bins,
            self.level,
            test,
            dict(sorted(groups.items(), key=_badness, reverse=True)),
        )

    def _form(self) -> tuple[Any, ...]:
        return (self.bins.count.size, self.estimand, self.pairs, self.metrics, self.level)

    def _expect(self, classes: int, columns: int) -> None:
        """Fix the number of classes at the first batch, and hold later ones to it."""
        if self.classes and self.classes != classes:
            raise ValueError(
                f"every batch must have the same classes: {self.classes} so far, now {classes}"
            )
        self.classes = classes
        if self.classwise is None and "classwise_ece" in self.metrics and columns:
            bins = self.bins.count.size
            replicates = max(20, min(200, CLASS_NOISE // (columns * bins)))
            self.classwise = ClassBins.empty(
                columns, bins, replicates=0 if self.level is None else replicates
            )

    def _update_groups(
        self, logits: Values, labels: Values, weight: FloatArray | None, groups: Values
    ) -> None:
        scores, targets = as_scores(logits), as_labels(labels)
        names = np.asarray(groups)
        if names.shape != targets.shape:
            raise ValueError(
                f"groups must have the shape of the labels, got {names.shape} for {targets.shape}"
            )
        for name in np.unique(names):
            where = names == name
            rows = torch.from_numpy(where) if isinstance(scores, torch.Tensor) else where
            self._group(str(name)).update(
                scores[rows],
                targets[where],
                weight=None if weight is None else weight[where.reshape(-1)],
            )

    def _group(self, name: str) -> Accumulator:
        if name not in self.groups:
            self.groups[name] = Accumulator(
                bins=self.bins.count.size,
                estimand=self.estimand,
                pairs=self.pairs,
                metrics=self.metrics,
                level=self.level,
                seed=self.seed,
            )
        return self.groups[name]

    def _reduce_sums(self, group: dist.ProcessGroup | None) -> None:
        m, b = self.moments, self.bins
        floats = [np.array([m.weight]), m.first, m.powers]
        floats += [b.weight, b.claimed, b.observed, b.spread, b.squares]
        tensors = [torch.from_numpy(np.array(x)) for x in floats]
        if self.classwise is not None:
            tensors += self.classwise.state()
        counts = torch.from_numpy(np.append(b.count, m.count))
        total = _summed(torch.cat([t.reshape(-1) for t in tensors]), group)
        count = _summed(counts, group).numpy()
        parts = [p.view_as(t) for p, t in zip(total.split([t.numel() for t in tensors]), tensors)]
        for mine, summed in zip(tensors, parts, strict=True):
            mine.copy_(summed)
        weight, first, powers, *sums = (t.numpy() for t in tensors[:8])
        self.moments = Moments(int(count[-1]), float(weight[0]), first, powers)
        self.bins = Bins(b.edges, count[:-1], *sums)

    def _summary(self) -> Summary:
        columns = list(zip(*self._kept, strict=True)) or [[], [], []]
        confidence = np.concatenate([np.zeros(0), *columns[0]])
        outcome = np.concatenate([np.zeros(0), *columns[1]])
        weight = None
        if any(w is not None for w in columns[2]):
            weight = np.concatenate(
                [np.ones(c.size) if w is None else w for c, _, w in self._kept]
            )
        return Summary(
            self.moments,
            self.bins,
            self.classwise,
            confidence,
            outcome,
            weight,
            self.level,
            self.seed,
        )


def evaluate(
    logits: Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    weight: Values | None = None,
    groups: Values | None = None,
    estimand: Estimand = "top_label",
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
) -> Evaluation:
    """Measure the calibration of predictions, with intervals.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds of two classes
        Unnormalised log-probabilities; log-probabilities are logits. -inf masks a class.
    labels : (...) integers
        -100 is ignored.
    probs : (..., classes), or (n,) probabilities of class 1
        Instead of logits. Zeros are floored at the smallest number of their dtype, with a
        warning. Nothing is ever taken for probabilities because of its values.
    weight : (...) weights of the examples
    groups : (...) values of any kind
        The same metrics are computed for each group, worst first.
    estimand : {"top_label", "binary", "multilabel"}
        Which probability is compared with which event.
    bins : number of equal-width and of equal-mass bins
    metrics : names from :data:`METRICS`; all by default
    level : coverage of the intervals; None leaves them out
    seed : of the random draws behind intervals and test

    Returns
    -------
    Evaluation
        A mapping from metric name to (value, low, high).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 5))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn from softmax(logits)
    >>> calibrated = evaluate(logits, labels)
    >>> calibrated["ece"].low
    0.0
    >>> overconfident = evaluate(3 * logits, labels)
    >>> overconfident["ece"].low > 0.1
    True
    """
    if labels is None or (logits is None) == (probs is None):
        raise TypeError("evaluate(logits, labels) or evaluate(probs=..., labels=...) is wanted")
    if probs is not None:
        logits, floored = logits_from_probs(probs)
        warn_floored(floored)
        if estimand == "multilabel":
            raise ValueError("multilabel needs logits: pass log(p) - log(1 - p) of every tag")
    stream = Accumulator(
        bins=bins, estimand=estimand, pairs=True, metrics=metrics, level=level, seed=seed
    )
    assert logits is not None
    return stream.update(logits, labels, weight=weight, groups=groups).result()


def warn_floored(count: int) -> None:
    """Warn that zeros among probabilities were floored."""
    if count:
        warnings.warn(
            f"{count} probabilities are exactly 0 and were floored: NLL depends on the floor; "
            "pass logits to avoid it",
            stacklevel=3,
        )


def _chosen(metrics: Sequence[str] | None, pairs: bool) -> tuple[str, ...]:
    names = tuple(METRICS) if metrics is None else tuple(metrics)
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r}: choose from {', '.join(METRICS)}")
    if pairs:
        return names
    needy = [name for name in names if METRICS[name].needs_pairs]
    if metrics is not None and needy:
        raise ValueError(f"{', '.join(needy)} need all pairs: pass pairs=True")
    return tuple(name for name in names if not METRICS[name].needs_pairs)


def _badness(item: tuple[str, Evaluation]) -> tuple[float, float]:
    """Order of groups: by the ECE that the data prove, then by the ECE seen."""
    found = item[1].get("ece", Estimate(0.0))
    return (0.0 if math.isnan(found.low) else found.low, found.value)


def _summed(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    moved = values.to(device)
    dist.all_reduce(moved, group=group)
    return moved.cpu()
