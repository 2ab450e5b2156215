"""All methods side by side: fitted on the same examples, measured on the same other ones."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from calibrant._core.checks import IGNORED, spread
from calibrant._core.logpartition import Records
from calibrant._core.messages import comma_separated
from calibrant._core.solve import time_limit as limited
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS, make_calibrator
from calibrant.calibrators.scaling import Identity
from calibrant.data import PredictionFile
from calibrant.data.dataset import Block, Data, Progress, Source, opened, warn_of_zeros
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.registry import METRICS
from calibrant.workflows.cross_fit import row_folds
from calibrant.workflows.effect import Meter
from calibrant.workflows.fit import fit_table, fit_whole, fits_from_table

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Row:
    """One method of a comparison.

    Attributes
    ----------
    method : str
    evaluation : Evaluation or None
        Metrics on the test examples; None where the method failed.
    fit_seconds : float
        Time of the fit alone. Methods that are fitted from the log-partition table share one;
        the time that it took is in the figure of each, as if that method ran alone.
    argmax_changed : int or None
        Number of test examples whose predicted class changed.
    error : str or None
        Why it failed: the message, or that it ran out of time.
    notes : list of str
        Warnings of the fit.
    calibrator : Calibrator or None
        Fitted; None where the method failed.
    """

    method: str
    evaluation: Evaluation | None
    fit_seconds: float
    argmax_changed: int | None
    error: str | None
    notes: list[str] = field(default_factory=list)
    calibrator: Calibrator | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; what is undefined is None."""
        undefined = {name: dict.fromkeys(("value", "low", "high")) for name in METRICS}
        found = undefined if self.evaluation is None else self.evaluation.to_dict()["metrics"]
        return {
            "method": self.method,
            "metrics": found,
            "fit_seconds": self.fit_seconds,
            "argmax_changed": self.argmax_changed,
            "error": self.error,
            "notes": self.notes,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods side by side; printing it gives a table.

    Attributes
    ----------
    rows : list of Row
        One for each method, in the order asked for.
    n_fit, n_test : int
        Labelled examples that the methods were fitted on and measured on.
    classes : int
    fitted_on, measured_on : str
        Which examples these are, in words.
    level : float or None
        Coverage of the intervals.
    """

    rows: list[Row]
    n_fit: int
    n_test: int
    classes: int
    fitted_on: str
    measured_on: str
    level: float | None

    def __getitem__(self, method: str) -> Row:
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(method)

    @property
    def measured(self) -> dict[str, Evaluation]:
        """The methods that did not fail."""
        return {row.method: row.evaluation for row in self.rows if row.evaluation is not None}

    def best(self, metric: str = "ece") -> list[str]:
        """Methods whose figure is within the noise of the best one, from good to bad.

        Within its interval, or half the width of that away: noise lifts an ECE, so that its
        interval may lie below it. An interval tells how well a figure is
        known, not whether two methods differ: one that is left out may still be as good.
        """
        sign = -1 if METRICS[metric].higher_is_better else 1
        found = {m: e[metric] for m, e in self.measured.items() if not math.isnan(e[metric].value)}
        order = sorted(found, key=lambda method: sign * found[method].value)
        if not order:
            return []
        value, low, high = found[order[0]]
        ends = [sign * value, sign * value + (high - low) / 2, sign * (high if sign > 0 else low)]
        limit = max(end for end in ends if not math.isnan(end))
        return [method for method in order if sign * found[method].value <= limit]

    def choice(self) -> str | None:
        """The method with the least sum of NLL and ECE among those that keep the predictions.

        ECE alone can be had by giving up what the logits know; NLL does not allow that. Methods
        whose fit warned, or that change predictions, are chosen where there are no others.
        """
        sums = self._sums()
        safe = {row.method for row in self.rows if not row.argmax_changed and not row.notes}
        return min([m for m in sums if m in safe] or sums, key=lambda m: sums[m], default=None)

    def _sums(self) -> dict[str, float]:
        """NLL + ECE, by which ``auto`` chooses as well."""
        figures = {m: e for m, e in self.measured.items() if {"nll", "ece"} <= set(e)}
        return {m: e["nll"].value + e["ece"].value for m, e in figures.items()}

    def advice(self) -> str:
        """What to use, in words."""
        choice = self.choice()
        if choice is None:
            return "No method could be fitted and measured."
        if choice == "none" or all("none" in self.best(metric) for metric in ("ece", "nll")):
            return "No method is clearly better than none here: leave the logits as they are."
        sums = self._sums()
        lowest = min(sums, key=lambda method: sums[method])
        said = f"Use {choice}: the least NLL + ECE"
        if lowest == choice:
            return f"{said} of all."
        changed = self[lowest].argmax_changed
        why = f"but changes {changed:,} predictions" if changed else "but its fit warned"
        return f"{said} of those that keep the predictions; {lowest} has less, {why}."

    def describe(self) -> str:
        """One line that says what was done."""
        return (
            f"{self.classes} classes; fitted on {self.n_fit:,} examples ({self.fitted_on}), "
            f"measured on {self.n_test:,} ({self.measured_on})"
        )

    def table(self) -> list[tuple[str, ...]]:
        """Headings, then the cells of each row, as text.

        A star marks the best ECE and NLL, and those within its noise (see :meth:`best`).
        """
        interval = "" if self.level is None else f"{100 * self.level:g} % interval"
        headings = ("method", "ECE %", interval, "NLL", "Brier", "acc. %", "changed", "fit")
        marked = {name: self.best(name) for name in ("ece", "nll")}
        return [headings, *(_cells(row, marked) for row in self.rows)]

    def remarks(self) -> list[str]:
        """What went wrong, and the warnings of the fits."""
        failed = [f"{row.method} failed: {row.error}" for row in self.rows if row.error]
        return failed + [f"{row.method}: {note}" for row in self.rows for note in row.notes]

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_line(row, widths) for row in rows]
        return "\n".join([self.describe(), *lines, *self.remarks(), self.advice()])

    def to_dict(self) -> dict[str, Any]:
        """JSON form: errors as fractions, undefined values as None."""
        return {
            "n_fit": self.n_fit,
            "n_test": self.n_test,
            "classes": self.classes,
            "fitted_on": self.fitted_on,
            "measured_on": self.measured_on,
            "level": self.level,
            "choice": self.choice(),
            "rows": [row.to_dict() for row in self.rows],
        }


def compare(
    data: Data,
    methods: str | Sequence[str] | Mapping[str, Calibrator] | None = None,
    *,
    time_limit: float | None = 60.0,
    fit_split: str | None = None,
    test_split: str | None = None,
    sample_weight: str | None = None,
    groups: str | None = None,
    bins: int = 15,
    level: float | None = 0.9,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Fit every method on the same examples and measure it on the same other ones.

    A method that fails or runs out of time becomes a row that says so. The figures of the best
    method flatter it a little, since it was chosen by them.

    Parameters
    ----------
    data : path or mapping
        A prediction file, a folder, a glob, or arrays by their names in a file, such as
        ``{"logits": ..., "labels": ...}``.
    methods : sequence of str, or mapping of str to Calibrator, optional
        Names from ``CALIBRATORS``, or calibrators by names of your own. By default all that the
        file has the arrays for.
    time_limit : float, optional
        Seconds for the fit of each method; None lets each take its time. A fit stops at the
        next step of its search, so it may take a little longer.
    fit_split, test_split : str, optional
        What to fit on (val, else the plain arrays, by default) and to measure on (test, else the
        plain arrays). Where both are the same, or only one is there, its examples are cut at
        random into two halves in which every class has its share.
    weight, groups : str, optional
        Names of further columns of the file: weights of the examples, and groups of examples
        that stay together in that cut and wherever a method cross-validates.
    bins, level
        As in :func:`calibrant.evaluate`.
    seed : int
        Of that cut and of the draws behind the intervals.
    progress : callable, optional
        Called with (methods done, methods in all).

    Returns
    -------
    Comparison

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> honest = 2 * rng.normal(size=(4000, 5))
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> found = compare({"logits": 2 * honest, "labels": labels}, ["none", "ts"])
    >>> found.n_fit, found.n_test, found.choice()
    (2000, 2000, 'ts')
    """
    file = opened(data)
    sources, names = _sources(file, fit_split, test_split, sample_weight, groups, seed)
    features = all(source.has_features for source in sources)
    calibrators = _chosen(methods, features, sources[0].has_head)
    stream = Accumulator(bins=bins, pairs=True, level=level, seed=seed)
    bench = _Bench(*sources, stream, time_limit)
    n_test, classes = bench.prepare(list(calibrators.values()))
    rows = []
    for done, (name, calibrator) in enumerate(calibrators.items()):
        _tell(progress, done, len(calibrators))
        rows.append(bench.row(name, calibrator))
    _tell(progress, len(calibrators), len(calibrators))
    n_fit = int((sources[0].labels != IGNORED).sum())
    return Comparison(rows, n_fit, n_test, classes, *names, level)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


# Which examples, which methods.


def _sources(
    file: PredictionFile,
    fit_split: str | None,
    test_split: str | None,
    weight: str | None,
    groups: str | None,
    seed: int,
) -> tuple[tuple[Source, Source], tuple[str, str]]:
    """Return what is fitted on and what is measured on, and both in words."""
    wanted = _present(file, fit_split, ("val", "")), _present(file, test_split, ("test", ""))
    there = [name for name in wanted if name is not None]
    if not there:
        found = comma_separated(f"'{name}'" for name in file.splits)
        raise ValueError(
            f"{file.path} has no split 'val' or 'test' and no plain arrays, only {found}: name "
            "what to fit on and to measure on (--fit-split, --test-split)"
        )
    first, second = there[0], there[-1]
    one = Source(file, file.split(first), weight, groups)
    if first == second:
        drawn = f"a random half of the {_called(first)}, seed {seed}"
        return _halves(one, seed), (drawn, "the other half")
    other = Source(file, file.split(second), weight, groups)
    if one.split.classes != other.split.classes:
        raise ValueError(
            f"{file.path}: the {_called(first)} must have as many classes as the "
            f"{_called(second)}, got {one.split.classes} and {other.split.classes}"
        )
    return (one, other), (_called(first), _called(second))


def _present(file: PredictionFile, wanted: str | None, usual: Sequence[str]) -> str | None:
    if wanted is not None:
        return file.split(wanted).name
    return next((name for name in usual if name in file.splits), None)


def _called(split: str) -> str:
    return f"{split} split" if split else "plain arrays"


def _halves(source: Source, seed: int) -> tuple[Source, Source]:
    fold = spread(row_folds(source, 2, seed), source.labels.shape, "fold")
    first, second = (np.where(fold == i, source.labels, IGNORED) for i in (0, 1))
    return source.with_column("labels", first), source.with_column("labels", second)


def _chosen(
    methods: str | Sequence[str] | Mapping[str, Calibrator] | None, features: bool, head: bool
) -> dict[str, Calibrator]:
    if isinstance(methods, Mapping):
        return {name: make_calibrator(calibrator) for name, calibrator in methods.items()}
    if methods is None:
        usual = {name: make_calibrator(name) for name in CALIBRATORS}
        return {
            name: c
            for name, c in usual.items()
            if c.needs_features <= features and c.needs_head <= head
        }
    names = [methods] if isinstance(methods, str) else methods
    if not names:
        raise ValueError(f"methods must name at least one of {comma_separated(CALIBRATORS)}")
    return {name: make_calibrator(name) for name in names}


# Fit and measure.


@dataclass
class _Bench:
    """Where each method is fitted and measured, one after the other."""

    fit_on: Source
    measure_on: Source
    stream: Accumulator
    time_limit: float | None

    @cached_property
    def table(self) -> tuple[Records, float]:
        """The records that methods share, and the seconds that they took."""
        start = time.perf_counter()
        return self.fit_on.records(), time.perf_counter() - start

    def prepare(self, calibrators: Sequence[Calibrator]) -> tuple[int, int]:
        """Read what methods share: what is wrong with the data is no fault of a method.

        Returns the number of test examples, and of classes.
        """
        with _said_once():
            if any(map(self._from_table, calibrators)):
                _ = self.table
            else:
                _counted(self.fit_on)
            if not all(map(self._from_table, calibrators)):
                _ = self.fit_on.logits, self.fit_on.group_values
            wanted = any(c.needs_features or c.uses_features for c in calibrators)
            if wanted and self.fit_on.has_features:
                _ = self.fit_on.features
            return _counted(self.measure_on)

    def _from_table(self, calibrator: Calibrator) -> bool:
        return fits_from_table(calibrator, self.fit_on)

    def row(self, name: str, calibrator: Calibrator) -> Row:
        """Fit and measure one method; whatever goes wrong is written down."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            start = time.perf_counter()
            _, error = self._attempt(lambda: self._fit(calibrator))
            seconds = time.perf_counter() - start
            found = None
            if error is None:
                found, error = self._attempt(lambda: self._measured(calibrator))
        if self._from_table(calibrator) and not isinstance(calibrator, Identity):
            seconds += self.table[1]
        notes = list(dict.fromkeys(str(warning.message) for warning in told))
        if found is None:
            return Row(name, None, seconds, None, error, notes)
        return Row(name, found[0], seconds, found[1], None, notes, calibrator)

    def _fit(self, calibrator: Calibrator) -> None:
        with limited(self.time_limit):
            if self._from_table(calibrator):
                fit_table(calibrator, self.fit_on, self.table[0])
            else:
                fit_whole(calibrator, self.fit_on)

    def _measured(self, calibrator: Calibrator) -> tuple[Evaluation, int]:
        meter = Meter([calibrator], self.stream.like())
        self.measure_on.walk(meter, *meter.columns())
        return meter.after.compute(), meter.changed

    def _attempt(self, task: Callable[[], T]) -> tuple[T | None, str | None]:
        try:
            return task(), None
        except TimeoutError as problem:
            limit = self.time_limit
            return None, str(problem) if limit is None else f"the fit took longer than {limit:g} s"
        except (TypeError, ValueError, MemoryError) as problem:
            return None, str(problem) or type(problem).__name__
        except Exception as problem:  # a bug in one method must not cost the other rows
            return None, f"{type(problem).__name__}: {problem}".removesuffix(": ")


def _counted(source: Source) -> tuple[int, int]:
    """Check every row, and return the number of examples and of classes."""
    counts = Accumulator(metrics=["accuracy"], level=None)

    def use(block: Block) -> int:
        counts.update(block.logits, block.labels, sample_weight=block.weight)
        return block.floored

    warn_of_zeros(sum(source.walk(use, "labels")))
    found = counts.compute()
    return found.n, found.classes


@contextmanager
def _said_once() -> Iterator[None]:
    """Let each warning through once, whoever gives it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(warning.message) for warning in told):
        warnings.warn(text, stacklevel=4)


# Cells and lines of the printed table.


def _cells(row: Row, marked: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    seconds = f"{row.fit_seconds:.2f} s" if row.fit_seconds < 10 else f"{row.fit_seconds:.0f} s"
    if row.evaluation is None:
        return (row.method, "failed", "", "", "", "", "", seconds)
    shown = dict(zip(row.evaluation, row.evaluation.table(), strict=True))
    ece, nll, brier, accuracy = (
        ("*" if row.method in marked.get(name, ()) else "") + shown[name][1].removesuffix(" %")
        for name in ("ece", "nll", "brier", "accuracy")
    )
    changed = f"{row.argmax_changed:,}"
    return (row.method, ece, shown["ece"][2], nll, brier, accuracy, changed, seconds)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        f"{cell:{'>' if i else '<'}{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()
