"""Compare methods: fitted on the same examples, measured on the same other ones."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import IGNORED, IntArray, Values, spread, warn, warnings_at_caller
from calibrant._core.chunks import EstimandChoice, resolve_estimand
from calibrant._core.engines import ENGINE_FAILURES, silently, steps
from calibrant._core.messages import comma_separated
from calibrant._core.solve import time_limit as limited
from calibrant.calibrators import fit_inputs
from calibrant.calibrators.auto import Auto, KeepArgmax
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.features import Multicalibration
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.records import records_of
from calibrant.calibrators.registry import calibrators_for, find_calibrator, make_calibrator
from calibrant.calibrators.scaling import Identity
from calibrant.data.dataset import FIT_SPLITS, TEST_SPLITS, Dataset, Split
from calibrant.data.files import Data, as_dataset
from calibrant.data.formats import Array
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.registry import METRICS
from calibrant.workflows.choice import choose
from calibrant.workflows.comparison import Comparison, Row
from calibrant.workflows.effect import (
    KeptLosses,
    LossReduction,
    calibrated_sums,
    input_names,
    mean_by_units,
    method_in_use,
    paired_losses,
    weights_and_units,
)
from calibrant.workflows.fit import (
    _fit_table,
    _fit_whole,
    _fit_without,
    _fits_from_table,
    _looked_at,
    _row_folds,
)
from calibrant.workflows.large import _halves, _in_memory, _is_many

FOR_SEVERAL_CLASSES = (
    *("none", "ts", "ets", "vector", "sms", "pts", "smart"),
    *("beta", "spline", "histogram", "isotonic", "auto"),
)
FOR_TWO_CLASSES = (
    *("none", "ts", "ets", "smart", "sigmoid", "beta", "spline"),
    *("histogram", "scaling_binning", "isotonic", "venn_abers", "auto"),
)
"""Methods that a comparison tries by default: of each kind (temperatures for all and for each
example, affine maps, maps of one probability, bins, isotonic regression) the best known that need
logits alone, and that fit 10,000 examples of 1,000 classes in seconds."""
FOLDS, FOLDS_OF_MANY, MANY_FOR_FOLDS = 5, 2, 10_000
"""Folds of a single split, in which fits on few examples should see most of them, and folds of more
rows than the last number, where half of them suffice."""


def compare(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    methods: str | Sequence[str] | Mapping[str, Calibrator] | None = None,
    time_limit: float | None = 60.0,
    fit_split: str | None = None,
    test_split: str | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    keep_argmax: KeepArgmax = "auto",
    columns: Sequence[str] | None = None,
    estimand: EstimandChoice = "auto",
    bins: int = 15,
    level: float | None = 0.9,
    seed: int = 0,
) -> Comparison:
    """Fit every method on the same examples and measure it on the same other ones.

    A method that fails or runs out of time becomes a row that says so. The advice is about the
    examples of the fit, as in :func:`calibrant.workflows.choice.choose`: a method that had been
    chosen by the figures of the test examples would look better there than it is. Of more than 2^22
    examples or 2^30 logits all methods are fitted on the same random sample.

    Parameters
    ----------
    data : logits (..., classes) or (n,), path, Dataset, mapping or data frame
        As for :func:`calibrant.evaluate`. Or a prediction file, a folder, a glob, or arrays by
        their keys in a file, such as ``{"val_logits": ..., "val_labels": ...}``, ...
    labels : (...) integers
        With logits or ``probs``; -100 is ignored.
    probs : (..., classes) or (n,), optional
        Probabilities in place of logits.
    methods : sequence of str, or mapping of str to Calibrator, optional
        Names from ``CALIBRATORS``, or from ``TAG_CALIBRATORS`` if the estimand is "multilabel",
        or calibrators by names of your own. By default a dozen: the best known of each kind that
        needs logits alone and is fitted in seconds, those of :data:`FOR_TWO_CLASSES` or
        :data:`FOR_SEVERAL_CLASSES`. ``"all"`` tries every method that the dataset has the arrays
        and the number of classes for.
    time_limit : float, optional
        Seconds for the fit of each method, which stops at the next step of its search.
    fit_split, test_split : str, optional
        Split to fit on (val, else the unnamed split, by default) and to measure on (test, else the
        unnamed split). A single split is cross-fitted: each example is measured with a fit on the
        other folds, and the calibrators in the rows are fitted on all examples.
    sample_weight, groups : str or array, optional
        Weights of the examples, and groups that stay together in folds.
    keep_argmax : "auto" or bool
        Whether to advise only methods that keep the predicted class. By default those that change
        it, of more than two classes, are advised only where the cross-validated accuracy rises by
        two standard errors. It is also the option of ``auto``, where that is a name.
    columns : sequence of str, optional
        Metadata columns for the methods that take them by name (``multicalibration``), which are
        not among the methods by default without.
    estimand, bins, level, seed
        As in :func:`calibrant.evaluate`; the seed is also that of folds.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> honest = 2 * rng.normal(size=(4000, 5))
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> comparison = compare(2 * honest, labels, methods=["none", "ts"])
    >>> comparison.n_fit, comparison.n_test, comparison.choice()
    (4000, 4000, 'ts')
    """
    if isinstance(methods, Mapping) and any(c.multilabel for c in methods.values()):
        estimand = "multilabel"
    beside: Any = {"probs": probs, "sample_weight": sample_weight, "groups": groups}
    dataset = as_dataset(data, labels, multilabel=estimand == "multilabel", **beside)
    stream = Accumulator(bins=bins, estimand=estimand, pairs=True, level=level, seed=seed)
    # closed before methods are fitted, whose warnings are notes
    with silently(), warnings_at_caller():
        splits, names, fold = compared_splits(dataset, fit_split, test_split, seed)
        options = {"keep_argmax": keep_argmax, "columns": columns}
        calibrators = _chosen(methods, splits, estimand, options)
        splits = (splits[0].floored(), splits[1])
        if _is_many(splits[0]):
            inputs = [n for n in input_names(*calibrators.values()) if n in splits[0].keys]
            splits = (_in_memory(splits[0], seed, inputs), splits[1])
            names = (f"{splits[0].rows:,} random examples of {names[0]}, seed {seed}", names[1])
        bench = _Bench(*splits, stream, time_limit, fold)
        n_test, classes = bench.prepare(list(calibrators.values()))
        some, arrays = _looked_at(splits[0], *calibrators.values())
        if mistake := fit_inputs.mistake_of(some):
            warn(f"{names[0]}: {mistake}")
    rows: list[Row] = []
    with fit_inputs.told(mistake), steps(len(calibrators)) as step:
        for name, calibrator in calibrators.items():
            rows.append(bench.row(name, calibrator))
            step()
        fitted = {row.method: row.calibrator for row in rows if row.calibrator is not None}
        chosen = choose(
            fitted,
            splits[0],
            bench.records,
            keep_argmax=keep_argmax,
            time_limit=time_limit,
            seed=seed,
        )
    if chosen.method is not None and not mistake:
        calibrator = fitted[chosen.method]
        features = calibrator.input_features(arrays)
        encoded = None if features is None else calibrator.encoded(features)
        if undone := fit_inputs.off_shares(calibrator, some, encoded):
            chosen = chosen._replace(remarks=[*chosen.remarks, undone])
    n_fit = int((splits[0].labels != IGNORED).sum())
    measured = resolve_estimand(estimand, classes)
    folds = 0 if fold is None else int(fold.max()) + 1
    gain = bench.gain({row.method: row for row in rows}.get(chosen.method or ""))
    level = stream.level
    about = (n_fit, n_test, classes, *names, level, measured, chosen, folds, gain)
    return Comparison(rows, *about, bench.behind(rows))


def compared_splits(
    dataset: Dataset, fit_split: str | None, test_split: str | None, seed: int
) -> tuple[tuple[Split, Split], tuple[str, str], IntArray | None]:
    """Return the examples to fit on and to measure on, their description, and folds of one split.

    A single split is both. If it has too many rows for memory, it is cut into random halves.
    """
    one, other = _named_splits(dataset, fit_split, test_split)
    names = _described(one), _described(other)
    if one.name != other.name:
        return (one, other), names, None
    if _is_many(one):
        return *_fit_and_test(dataset, fit_split, test_split, seed), None
    units = one.rows if one.groups is None else len(np.unique(one.groups))
    folds = max(2, min(FOLDS_OF_MANY if one.rows > MANY_FOR_FOLDS else FOLDS, units))
    fold = _row_folds(one, folds, seed)
    how = f"the same, each by a fit on the other folds; {folds} folds, seed {seed}"
    return (one, one.with_column("fold", fold)), (names[0], how), fold


def _fit_and_test(
    dataset: Dataset,
    fit_split: str | None,
    test_split: str | None,
    seed: int,
    *,
    stratified: bool = True,
) -> tuple[tuple[Split, Split], tuple[str, str]]:
    """Return different examples to fit on and to measure on, and the description of both.

    A single split is cut into random halves: the labels of the other half are ignored.
    """
    one, other = _named_splits(dataset, fit_split, test_split)
    if one.name != other.name:
        return (one, other), (_described(one), _described(other))
    names = f"a random half of the {_described(one)}, seed {seed}", "the other half"
    if _is_many(one) and dataset.groups is None:
        return _halves(one, seed), names  # so many that every class has its share
    halved = _row_folds(one, 2, seed, stratified=stratified)
    fold = spread(halved, one.labels.shape, "fold")
    half, rest = (np.where(fold == i, one.labels, IGNORED) for i in (0, 1))
    return (one.with_column("labels", half), one.with_column("labels", rest)), names


def _described(split: Split) -> str:
    return f"{split.name} split" if split.name else "unnamed split"


def _named_splits(
    dataset: Dataset, fit_split: str | None, test_split: str | None
) -> tuple[Split, Split]:
    """Return the splits to fit on and to measure on, which may be the same one."""
    wanted = (fit_split, FIT_SPLITS), (test_split, TEST_SPLITS)
    there = [
        dataset.split(name, prefer)
        for name, prefer in wanted
        if name is not None or dataset.find(None, prefer) is not None
    ]
    if not there and dataset.splits:
        raise ValueError(
            f"{dataset.path} has no split 'val', 'test' or unnamed split, only "
            f"{comma_separated(dataset.splits)}: name two with --fit-split and --split"
        )
    if not there:
        dataset.split()  # raises
    one, other = there[0], there[-1]
    for split in {one.name: one, other.name: other}.values():
        split.warn_of_mistakes()
    if one.classes != other.classes:
        raise ValueError(
            f"{dataset.path}: the {_described(one)} must have as many classes as the "
            f"{_described(other)}, got {one.classes} and {other.classes}"
        )
    return one, other


def _chosen(
    methods: str | Sequence[str] | Mapping[str, Calibrator] | None,
    splits: Sequence[Split],
    estimand: EstimandChoice,
    options: Mapping[str, Any],
) -> dict[str, Calibrator]:
    """Return calibrators by name; options are for ``auto``, or for all that read metadata."""
    if isinstance(methods, Mapping):
        return {name: make_calibrator(c, estimand=estimand) for name, c in methods.items()}
    known = calibrators_for(estimand)
    names = [methods] if isinstance(methods, str) else methods
    if names is not None and not names:
        raise ValueError(f"methods must name at least one of {comma_separated(known)}")

    def made(kind: type[Calibrator]) -> Calibrator:
        taken = ["keep_argmax"] if kind is Auto else []
        taken += ["columns"] if issubclass(kind, Multicalibration) else []
        return kind(**{option: options[option] for option in taken})

    if names is not None and list(names) != ["all"]:
        found = dict(find_calibrator(name, estimand) for name in names)
        return {name: made(kind) for name, kind in found.items()}
    usual = list(known)
    if names is None and estimand != "multilabel":
        usual = [*(FOR_TWO_CLASSES if splits[0].classes == 2 else FOR_SEVERAL_CLASSES)]
        usual += [name for name, kind in known.items() if issubclass(kind, Multicalibration)]
    there = {name for name in splits[0].keys if name in splits[1].keys}

    def suits(calibrator: Calibrator) -> bool:
        if isinstance(calibrator, Multicalibration):  # features of a last layer are no metadata
            return options["columns"] is not None
        has = calibrator.needs_head <= splits[0].dataset.has_head
        few = splits[0].classes == 2 or not calibrator.two_classes_only
        return has and few and set(calibrator.input_columns) <= there

    calibrators = {name: made(known[name]) for name in usual}
    return {name: calibrator for name, calibrator in calibrators.items() if suits(calibrator)}


class _MeasuredSums:
    """Metrics of predictions and, where they are kept, the losses of every example."""

    def __init__(self, metrics: Accumulator, losses: KeptLosses | None) -> None:
        self.metrics, self.losses = metrics, losses

    def like(self) -> _MeasuredSums:
        """Return sums of the same form that have seen nothing."""
        return _MeasuredSums(self.metrics.like(), self.losses and self.losses.like())

    def merge(self, other: _MeasuredSums) -> None:
        """Add the sums of other examples."""
        self.metrics.merge(other.metrics)
        if self.losses is not None and other.losses is not None:
            self.losses.merge(other.losses)

    def add(self, logits: Array, labels: Array, sample_weight: Array | None = None) -> None:
        """Add a batch."""
        self.metrics.add(logits, labels, sample_weight=sample_weight)
        if self.losses is not None:
            self.losses.add(logits, labels)


@dataclass
class _Bench:
    """Fits and measures one method after the other."""

    fit_on: Split
    measure_on: Split
    stream: Accumulator
    time_limit: float | None
    fold: IntArray | None = None
    records: Records | None = None  # that methods share, if one is fitted on them
    seconds: float = 0.0  # that the records took
    # by method and metric, of every example: what is worse is larger
    losses: dict[str, dict[str, NDArray[np.float32]]] = field(default_factory=dict)

    def prepare(self, calibrators: Sequence[Calibrator]) -> tuple[int, int]:
        """Read what methods share, so that faults of the data are not blamed on a method.

        Return the number of examples to measure on, and of classes.
        """
        from_table = [_fits_from_table(calibrator, self.fit_on) for calibrator in calibrators]
        if any(from_table):
            start = time.perf_counter()
            self.records = records_of(self.fit_on)
            self.seconds = time.perf_counter() - start
        else:
            self._counted(self.fit_on, "accuracy")
        if not all(from_table):
            _ = self.fit_on.logits, self.fit_on.groups
        wanted = "features" in input_names(*calibrators)
        if self.fit_on.has_features and (wanted or any(c.uses_features for c in calibrators)):
            _ = self.fit_on.features
        stated = any(isinstance(c, Identity) for c in calibrators)
        return self._counted(self.measure_on, "nll" if stated else "accuracy")

    def _counted(self, split: Split, metric: str) -> tuple[int, int]:
        """Check every row as ``metric`` does, and return the number of examples and of classes."""
        total = Accumulator(estimand=self.stream.estimand, metrics=[metric], level=None)
        result = split.reduce(total, split.domain, "labels", "sample_weight").compute()
        return result.n, result.classes

    def row(self, name: str, calibrator: Calibrator) -> Row:
        """Fit and measure one method; whatever goes wrong is written down."""
        from_table = _fits_from_table(calibrator, self.fit_on)
        evaluation, changed, error = None, None, None
        folds = 0 if self.fold is None else int(self.fold.max()) + 1
        by_fold = [copy.deepcopy(calibrator) for _ in range(folds)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            try:
                try:
                    with limited(self.time_limit):
                        if from_table and self.records is not None:
                            _fit_table(calibrator, self.fit_on, self.records)
                        else:
                            _fit_whole(calibrator, self.fit_on)
                finally:
                    seconds = time.perf_counter() - start
                with warnings.catch_warnings(), fit_inputs.told():
                    warnings.simplefilter("ignore")  # the fit on everything has warned
                    for i, one in enumerate(by_fold):
                        assert self.fold is not None
                        records = self.records if from_table else None
                        with limited(self.time_limit):
                            _fit_without(one, self.fit_on, self.fold, i, records)
                calibrators = by_fold or [calibrator]
                sums = calibrated_sums(calibrators, self.measure_on, self._nothing(calibrator))
                if sums.after.losses is not None:
                    found = sums.after.losses.joined()
                    each = {"nll": found.nll, "brier": found.brier, "accuracy": ~found.correct}
                    self.losses[name] = {m: v.astype(np.float32) for m, v in each.items()}
                evaluation, changed = sums.after.metrics.compute(), sums.changed
            except ENGINE_FAILURES:
                raise
            except Exception as problem:  # a bug in one method must not cost the other rows
                error = self._message(problem)
        if from_table and not isinstance(calibrator, Identity):
            seconds += self.seconds
        notes = list(dict.fromkeys(str(warning.message) for warning in caught))
        if evaluation is None:
            return Row(name, None, seconds, None, error, notes)
        return Row(name, evaluation, seconds, changed, None, notes, calibrator, by_fold)

    def _nothing(self, calibrator: Calibrator) -> _MeasuredSums:
        """Return sums of no examples, with losses unless there are too many to keep."""
        kept = self.stream.level is not None and not _is_many(self.measure_on)
        estimand: EstimandChoice = "multilabel" if calibrator.multilabel else "top_label"
        return _MeasuredSums(self.stream.like(), KeptLosses(estimand) if kept else None)

    def behind(self, rows: Sequence[Row]) -> dict[str, dict[str, Estimate]]:
        """Return by metric how much worse each method is than the best on the same examples."""
        if not self.losses or self.stream.level is None:
            return {}
        weight, unit = weights_and_units(self.measure_on)
        result: dict[str, dict[str, Estimate]] = {}
        for metric in ("nll", "brier", "accuracy"):
            sign = -1 if METRICS[metric].higher_is_better else 1
            values = {r.method: sign * r.evaluation[metric].value for r in rows if r.evaluation}
            least = self.losses[min(values, key=lambda method: values[method])][metric]
            result[metric] = {}
            for method in values:
                worse = (self.losses[method][metric] - least).astype(np.float64)
                mean, reach, error = mean_by_units(worse, weight, unit, self.stream.level)
                ends = mean - reach * error, mean + reach * error
                result[metric][method] = Estimate(mean, *ends)
        return result

    def gain(self, row: Row | None) -> LossReduction | None:
        """Return what a method gains on the examples measured.

        None where it changes nothing, or of so many examples that hardly any gain is noise.
        """
        if row is None or row.calibrator is None or _is_many(self.measure_on):
            return None
        if isinstance(method_in_use(row.calibrator), Identity):
            return None
        with silently():
            losses = paired_losses(row.by_fold or [row.calibrator], self.measure_on)
        return losses.reduction(self.stream.level or 0.9)

    def _message(self, problem: Exception) -> str:
        if isinstance(problem, TimeoutError) and self.time_limit is not None:
            return f"the fit took longer than {self.time_limit:g} s"
        if isinstance(problem, (TimeoutError, TypeError, ValueError, MemoryError)) and str(problem):
            return str(problem)
        return f"{type(problem).__name__}: {problem}".removesuffix(": ")
