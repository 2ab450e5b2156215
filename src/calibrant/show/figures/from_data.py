"""Draw figures of prediction files, whose examples are collected chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from calibrant._core import checks
from calibrant._core.checks import (
    IGNORED,
    FloatArray,
    Values,
    warn,
    warnings_at_caller,
)
from calibrant._core.chunks import EstimandChoice, resolve_estimand
from calibrant._core.messages import comma_separated, unknown_name
from calibrant._core.probs import logits_from_probs
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.data.dataset import TEST_SPLITS, Split
from calibrant.data.files import Data, as_dataset
from calibrant.data.shards import Chunk, counted
from calibrant.metrics import curves
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.ranking import RiskCoverage, risk_coverage
from calibrant.metrics.reductions import (
    WeightedPairs,
    event_probability,
    labelled_examples,
    margins,
    pairs_from,
    reduce_examples,
)
from calibrant.show import figures
from calibrant.show.figures.look import SizeName, _figure_of, _pyplot, _set_title, check_suffix
from calibrant.workflows.apply import check_fits
from calibrant.workflows.compare import compare
from calibrant.workflows.decide import decide
from calibrant.workflows.effect import effect, whole_inputs
from calibrant.workflows.evaluate import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


T = TypeVar("T")


class DrawnExamples(NamedTuple):
    """Examples of a split as pairs, and what else figures need of them."""

    pairs: WeightedPairs
    margin: FloatArray
    group: Any  # (n,) of str; empty without subgroups

    def of_group(self, name: str) -> DrawnExamples:
        """Return the examples of one subgroup."""
        kept = self.group == name
        weight = None if self.pairs.weight is None else self.pairs.weight[kept]
        pairs = WeightedPairs(self.pairs.confidence[kept], self.pairs.outcome[kept], weight)
        return DrawnExamples(pairs, self.margin[kept], self.group[kept])

    def columns(self) -> dict[str, Any]:
        """Return the pairs as metrics take them."""
        return dict(zip(("confidence", "outcome", "sample_weight"), self.pairs, strict=True))


def _collected(
    split: Split, calibrator: Calibrator | None, estimand: EstimandChoice
) -> DrawnExamples:
    """Reduce a split to pairs, in chunks; logits are never held whole."""
    parts = list(_walk(split, calibrator, partial(_reduced, estimand), estimand))
    checks.check_some(sum(len(part.margin) for part in parts))
    columns: Any = zip(*(part.pairs for part in parts), strict=True)
    joined: Any = (None if c[0] is None else np.concatenate(c) for c in columns)
    pairs = WeightedPairs(*joined)
    margin, group = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    return DrawnExamples(pairs, margin, group)


def _reduced(estimand: EstimandChoice, columns: dict[str, Any], group: Any) -> DrawnExamples:
    """Reduce labelled examples to pairs, with their margins and subgroups."""
    with checks.silenced():  # of logits that look like probabilities: said once for the file
        pairs = pairs_from(**columns, estimand=estimand)
    margin = np.full(len(pairs.outcome), np.nan)
    if estimand != "multilabel":
        stated = columns.get("logits")
        margin = margins(logits_from_probs(columns["probs"]) if stated is None else stated)
    return DrawnExamples(pairs, margin, np.zeros(0, str) if group is None else group.astype(str))


def _class_sums(
    split: Split, calibrator: Calibrator | None, estimand: EstimandChoice, bins: int
) -> ClassBins:
    """Sum a split per class and bin, in chunks."""
    sums = ClassBins.empty(split.classes, bins)

    def add(columns: dict[str, Any], group: Any) -> None:
        examples, _ = labelled_examples(columns.pop("logits", None), **columns, estimand=estimand)
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
    domain = "logits" if calibrator is not None else split.domain
    columns = [domain, "labels", "sample_weight", "by"]
    if calibrator is not None:
        check_fits(calibrator, split)
        columns += calibrator.input_columns

    def task(chunk: Chunk) -> list[T]:
        kept, tags = counted(chunk), estimand == "multilabel"
        if not kept.any():
            return []
        scores, labels = chunk[domain], checks.as_labels(chunk["labels"])
        weight, by = chunk.get("sample_weight"), chunk.get("by")
        inputs = None
        if tags:  # rows stay whole: tags that do not count are ignored
            scores, labels = np.where(kept, scores, 0), np.where(kept, labels, IGNORED)
        else:
            scores, labels = scores[kept], labels[kept]
            if weight is not None:
                weight = checks.spread(weight, kept.shape, "sample_weight")[kept]
            if calibrator is not None:
                inputs = calibrator.input_features(chunk, kept)
        if calibrator is not None:
            scores = calibrator.transform(scores, inputs)
        group = None if by is None else checks.spread(checks.as_keys(by), kept.shape, "by")[kept]
        return [use({domain: scores, "labels": labels, "sample_weight": weight}, group)]

    for results in split.map(task, *columns):
        yield from results


MOST_SETS = 8
"""Subgroups that are drawn."""


@dataclass(frozen=True)
class Request:
    """Everything that a figure is drawn from."""

    data: Sequence[Data]
    split: str | None
    by: str | Values | None
    calibrator: Calibrator | None
    sample_weight: str | Values | None
    estimand: EstimandChoice
    bins: int
    level: float | None
    seed: int
    methods: Sequence[str] | None
    max_error: float | None

    @property
    def multilabel(self) -> bool:
        """True if columns are tags."""
        return self.estimand == "multilabel"

    def evaluation_options(self) -> dict[str, Any]:
        """Return the options that ``evaluate`` and ``effect`` share."""
        names = ("split", "sample_weight", "estimand", "bins", "level", "seed")
        return {"metrics": ["ece"], **{name: getattr(self, name) for name in names}}

    def splits(self) -> dict[str, Split]:
        """Return the split of each dataset, by its name in the figure."""
        options: Any = {"by": self.by, "sample_weight": self.sample_weight}
        sets = [as_dataset(one, multilabel=self.multilabel, **options) for one in self.data]
        if self.calibrator is not None:
            sets = [one.in_order(self.calibrator.class_names_) for one in sets]
        splits = [one.split(self.split, TEST_SPLITS) for one in sets]
        for split in splits:
            split.warn_of_mistakes(copies=False)
        return dict(zip(_names_of([split.path for split in splits]), splits, strict=True))

    def probability(self, split: Split) -> str:
        """Return the name of the probability that is measured."""
        return event_probability(resolve_estimand(self.estimand, split.classes))

    def examples(self, *, answers: bool = False) -> dict[str, DrawnExamples]:
        """Return sets of examples by their titles: files, subgroups, or before and after.

        ``answers`` takes the confidence in the predicted class, whatever the estimand.
        """
        estimand: EstimandChoice = "top_label" if answers else self.estimand
        found: dict[str, DrawnExamples] = {}
        for name, split in self.splits().items():
            whole = _collected(split, None, estimand)
            if self.calibrator is not None:
                after = _collected(split, self.calibrator, estimand)
                return {"before": whole, "after": after}
            found |= {name: whole} if not whole.group.size else _by_group(whole)
        return found


@warnings_at_caller()
def figure(
    *data: Data,
    kind: str = "reliability",
    split: str | None = None,
    by: str | Values | None = None,
    calibrator: Calibrator | None = None,
    sample_weight: str | Values | None = None,
    estimand: EstimandChoice = "auto",
    bins: int = 15,
    level: float | None = 0.9,
    seed: int = 0,
    methods: Sequence[str] | None = None,
    max_error: float | None = None,
) -> Figure:
    """Draw a figure of one or several prediction files.

    Parameters
    ----------
    data : path, Dataset or mapping
        Prediction files, folders or globs, or arrays by their keys in a file. Several are drawn
        side by side, if the kind of figure allows it.
    kind : str
        A name from ``KINDS``.
    split, by, sample_weight, estimand, bins, level, seed
        As in :func:`calibrant.evaluate`; ``by`` draws each subgroup.
    calibrator : Calibrator, optional
        Fitted; the figure then shows predictions before and after it.
    methods : sequence of str, optional
        Methods of the kind "compare".
    max_error : float, optional
        Of the kind "threshold": marks the threshold that keeps the error at this level, found on
        other examples as by :func:`calibrant.workflows.decide.decide`.

    DrawnExamples
    --------
    >>> from calibrant.data import sample_path
    >>> drawn = figure(sample_path(), kind="smooth")
    >>> drawn.axes[0].get_xlabel()
    'confidence'
    """
    name = str(kind).strip().lower()
    if name not in KINDS:
        raise unknown_name("kind of figure", kind, KINDS)
    chosen = KINDS[name]
    if not data:
        raise TypeError("data are missing: pass at least one prediction file")
    if calibrator is not None:
        check_calibrator(calibrator)
        estimand = calibrator.estimand_for(estimand)
    request = Request(
        data=data,
        split=split,
        by=by,
        calibrator=calibrator,
        sample_weight=sample_weight,
        estimand=estimand,
        bins=bins,
        level=level or None,
        seed=seed,
        methods=methods,
        max_error=max_error,
    )
    _check(request, name, chosen)
    return chosen.draw(request)


def _names_of(paths: Sequence[str]) -> list[str]:
    """Return short names of files that tell them apart.

    >>> _names_of(["runs/a.npz", "runs/b.npz"]), _names_of(["a/test.npz", "b/test.npz"])
    (['a', 'b'], ['a/test.npz', 'b/test.npz'])
    """
    stems = [Path(path).stem or path for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    if len(set(paths)) == len(paths):
        return list(paths)
    return [f"{path} ({i})" for i, path in enumerate(paths, 1)]


def _by_group(examples: DrawnExamples) -> dict[str, DrawnExamples]:
    """Return the largest subgroups, by name."""
    names, counts = np.unique(examples.group, return_counts=True)
    largest = np.argsort(-counts, kind="stable")
    if len(names) > MOST_SETS:
        warn(f"there are {len(names):,} subgroups: the {MOST_SETS} largest are drawn")
    return {str(names[i]): examples.of_group(names[i]) for i in sorted(largest[:MOST_SETS])}


# ------------------------------------------------------------------------------------------- kinds


def _reliability(request: Request) -> Figure:
    if request.calibrator is not None:
        options = request.evaluation_options()
        return _figure_of(effect(request.calibrator, request.data[0], **options).plot())
    paths = [os.fspath(one) for one in request.data if isinstance(one, (str, os.PathLike))]
    if len(paths) < len(request.data):
        paths = [as_dataset(one).path for one in request.data]
    results = {
        name: evaluate(one, by=request.by, **request.evaluation_options())
        for name, one in zip(_names_of(paths), request.data, strict=True)
    }
    return _one_or_several(results, figures.reliability_diagrams)


def _one_or_several(results: Mapping[str, Any], several: Callable[[Any], Figure]) -> Figure:
    """Draw a single result by its own ``plot``, and others side by side."""
    return several(results) if len(results) > 1 else _figure_of(_only(results).plot())


def _smooth(request: Request) -> Figure:
    probability = request.probability(_only(request.splits()))
    options: Any = {"level": request.level or 0.9, "probability": probability}
    smooth = {
        name: curves.smooth_reliability_of(e.pairs, **options)
        for name, e in request.examples().items()
    }
    return _one_or_several(smooth, figures.smooth_diagrams)


def _histogram(request: Request) -> Figure:
    shares = {
        name: curves.confidence_histogram(**e.columns())
        for name, e in request.examples(answers=True).items()
    }
    return _one_or_several(shares, figures.confidence_histograms)


def _risk(request: Request) -> Figure:
    found = _risks(request)
    return _figure_of(figures.risk_coverage_plot(found if len(found) > 1 else _only(found)))


def _risks(request: Request) -> dict[str, RiskCoverage]:
    examples, level = request.examples(answers=True), request.level or 0.9
    return {name: risk_coverage(**e.columns(), level=level) for name, e in examples.items()}


def _threshold(request: Request) -> Figure:
    curve, limit = list(_risks(request).values())[-1], None  # after calibration, if there is any
    if request.max_error is not None:
        fitted = decide(
            request.data[0],
            max_error=request.max_error,
            calibrator=request.calibrator,
            test_split=request.split,
            seed=request.seed,
        )
        limit = fitted.rule.guarantee
    return figures.threshold_plot(curve, limit=limit)  # type: ignore[arg-type]  # no sets


def _margins(request: Request) -> Figure:
    probability = request.probability(_only(request.splits()))
    examples = list(request.examples().values())[-1]
    options: Any = {"bins": request.bins, "level": request.level, "probability": probability}
    return figures.margin_diagrams(curves.margin_groups(examples.pairs, examples.margin, **options))


def _classes(request: Request) -> Figure:
    split = _only(request.splits())
    kind = "P(tag)" if request.multilabel else "P(class)"
    options = (request.calibrator, request.estimand, request.bins)
    sums = _class_sums(split, *options)
    found = curves.class_reliability(sums, level=request.level, probability=kind)
    return figures.class_diagrams(found, names=split.dataset.class_names)


def _compare(request: Request) -> Figure:
    names = ("sample_weight", "estimand", "bins", "level", "seed")
    options = {name: getattr(request, name) for name in names}
    found = compare(request.data[0], methods=request.methods, test_split=request.split, **options)
    return _figure_of(found.plot())


def _map(request: Request) -> Figure:
    assert request.calibrator is not None
    split = _only(request.splits())
    check_fits(request.calibrator, split)
    features = whole_inputs(request.calibrator, split)
    return _figure_of(request.calibrator.plot(split.logits, features=features))


def _only(found: Mapping[str, Any]) -> Any:
    return next(iter(found.values()))


class Kind(NamedTuple):
    """A kind of figure, and what it can be drawn of."""

    draw: Callable[[Request], Figure]
    summary: str
    several: bool = False  # files
    by: bool = False
    calibrator: bool = True
    needs_calibrator: bool = False
    tags: bool = False


KINDS = {
    "reliability": Kind(_reliability, "accuracy per bin", several=True, by=True, tags=True),
    "smooth": Kind(_smooth, "the same without bins", several=True, by=True, tags=True),
    "histogram": Kind(_histogram, "confidence of right and wrong", several=True, by=True),
    "margins": Kind(_margins, "reliability by margin"),
    "classes": Kind(_classes, "reliability of the worst classes", tags=True),
    "risk": Kind(_risk, "error of the most confident answers", several=True, by=True),
    "threshold": Kind(_threshold, "answers and error at every threshold"),
    "compare": Kind(_compare, "methods with intervals", calibrator=False, tags=True),
    "effect": Kind(_reliability, "before and after", needs_calibrator=True, tags=True),
    "map": Kind(_map, "what a calibrator has learned", needs_calibrator=True, tags=True),
}
"""Kinds of figures by name."""


def _check(request: Request, name: str, kind: Kind) -> None:
    """Raise for what a kind of figure cannot show."""

    def able(what: str) -> str:
        return comma_separated(n for n, one in KINDS.items() if getattr(one, what))

    several, one_set = len(request.data) > 1, request.calibrator is not None
    if several and (not kind.several or one_set):
        but = "with a calibrator" if kind.several else name
        raise ValueError(
            f"a figure {but} is of one file, got {len(request.data)}: draw one at a time, or "
            f"several without a calibrator as {able('several')}"
        )
    if request.by is not None and (not kind.by or one_set or several):
        raise ValueError(
            f"subgroups of one file can be drawn as {able('by')}, without a calibrator: leave out "
            "by, or calibrate first with calibrant apply"
        )
    if kind.needs_calibrator and request.calibrator is None:
        raise ValueError(f"{name} needs a calibrator: pass one that calibrant fit has saved")
    if request.calibrator is not None and not kind.calibrator:
        raise ValueError(f"{name} fits calibrators of its own: leave the calibrator out")
    if request.multilabel and not kind.tags:
        raise ValueError(
            f"{name} is about answers, and tags have none: draw {able('tags')} of multi-label data"
        )
    if request.max_error is not None and name != "threshold":
        raise ValueError(f"max_error belongs to the kind threshold, got kind {name}")
    if request.max_error is not None and request.sample_weight is not None:
        raise ValueError(
            "max_error marks a threshold whose guarantee counts examples and takes no "
            "sample_weight: leave one of them out"
        )
    if request.methods is not None and name != "compare":
        raise ValueError(f"methods belong to the kind compare, got kind {name}")


def draw_file(
    *data: Data,
    out: str | os.PathLike[str],
    size: SizeName = "page",
    dark: bool = False,
    title: str = "",
    **options: Any,
) -> None:
    """Draw a figure as by :func:`figure`, with its options, and write it to a file.

    Parameters
    ----------
    data : path, Dataset or mapping
    out : path
        A ``.pdf``, ``.png`` or ``.svg`` file, which is replaced as a whole.
    size, dark
        As in :func:`calibrant.show.figures.look`.
    title : str
        Written above the figure.
    """
    check_suffix(out)
    plt = _pyplot()
    with plt.rc_context({"backend": "agg"}), figures.look(size, dark=dark):
        drawn = figure(*data, **options)
        try:
            if title:
                _set_title(drawn, title)
            figures.save_figure(drawn, out)
        finally:
            plt.close(drawn)
