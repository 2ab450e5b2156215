"""Fit decision rules on prediction files, check them on other examples, and apply them."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from numpy.typing import ArrayLike

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import (
    IGNORED,
    IntArray,
    Values,
    as_labels,
    check_some,
    known_rows,
    warnings_at_caller,
)
from calibrant._core.class_names import class_order
from calibrant._core.messages import comma_separated
from calibrant._core.showing import as_html, frame, one_line
from calibrant.calibrators.base import Calibrator, check_calibrator, feature_rows
from calibrant.data.dataset import Dataset, Split
from calibrant.data.files import TABLES, Data, as_dataset
from calibrant.data.formats import Array
from calibrant.data.shards import ARRAY_KEYS, CLASS_NAMES, SCORES, Chunk, located
from calibrant.decide.conformal_sets import ConformalSets, Score, conformal
from calibrant.decide.rules import DecisionRule, Tally, renumbered
from calibrant.decide.threshold_limits import class_number, threshold
from calibrant.decide.threshold_results import Threshold
from calibrant.workflows.apply import (
    _check_target,
    _part_of,
    _scored_splits,
    _write_splits,
    check_fits,
    empty_array,
)
from calibrant.workflows.compare import _fit_and_test
from calibrant.workflows.effect import input_names, whole_inputs

if TYPE_CHECKING:
    import pandas as pd

DECISIONS = ("predicted", "confidence")
"""Columns that every rule makes, beside its own."""
TEXT = ".csv"
"""Suffix of decisions for people: a line for each example, with names of classes."""


@dataclass(frozen=True, eq=False)
class FittedRule:
    """A decision rule, and what it does with the examples of its fit and with others.

    Attributes
    ----------
    rule : DecisionRule
    fitted_on, checked_on : str
        Description of the examples.
    fitted, checked : Tally
        Counts of the decisions about them.
    """

    rule: DecisionRule
    fitted_on: str
    checked_on: str
    fitted: Tally
    checked: Tally

    @property
    def tallies(self) -> dict[str, Tally]:
        """Counts by what was done with the examples."""
        names = f"fitted on: {self.fitted_on}", f"checked on: {self.checked_on}"
        return dict(zip(names, (self.fitted, self.checked), strict=True))

    def verdict(self) -> str:
        """Return whether the check agrees with the guarantee."""
        return self.rule.verdict(self.checked)

    def __repr__(self) -> str:
        return _rule_line(self)

    _repr_html_ = as_html

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for the fit and one for the check. Needs pandas."""
        return _rule_frame(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: shares as fractions, undefined values as None."""
        fitted, checked = map(self.rule.figures, (self.fitted, self.checked))
        return {
            **_rule_dict(self.rule),
            "fitted_on": {"examples": self.fitted_on, **fitted},
            "checked_on": {"examples": self.checked_on, **checked},
            "p_value": self.rule.p_value(self.checked),
        }


def _rule_dict(rule: DecisionRule) -> dict[str, Any]:
    return {
        "rule": {"kind": rule.kind, **rule.guarantee.state()},
        "promise": rule.promise() or None,
        "classes": rule.classes,
        "positive": rule.positive,
        "calibrated": rule.calibrator is not None,
    }


@dataclass(frozen=True, eq=False)
class AppliedRule:
    """A decision rule, and counts of its decisions by split."""

    rule: DecisionRule
    tallies: dict[str, Tally]

    def verdict(self) -> str:
        """Return whether the labelled examples agree with the guarantee."""
        return self.rule.verdict(Tally.total(self.tallies.values()))

    def __repr__(self) -> str:
        return _rule_line(self)

    _repr_html_ = as_html

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each split. Needs pandas."""
        return _rule_frame(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: shares as fractions, undefined values as None."""
        splits = {name: self.rule.figures(tally) for name, tally in self.tallies.items()}
        p_value = self.rule.p_value(Tally.total(self.tallies.values()))
        return {**_rule_dict(self.rule), "splits": splits, "p_value": p_value}


def _rule_line(result: FittedRule | AppliedRule) -> str:
    return one_line(result, repr(result.rule), result.verdict().rstrip("."))


def _rule_frame(result: FittedRule | AppliedRule) -> pd.DataFrame:
    figures = {name: result.rule.figures(tally) for name, tally in result.tallies.items()}
    return frame({"examples": name, **values} for name, values in figures.items())


@warnings_at_caller()
def decide(
    data: Data | Values,
    labels: Values | None = None,
    *,
    max_error: float | None = None,
    precision: float | None = None,
    recall: float | None = None,
    max_fpr: float | None = None,
    max_fnr: float | None = None,
    max_cost: float | None = None,
    cost: ArrayLike | None = None,
    positive: int | str | None = None,
    certainty: float = 0.95,
    coverage: float | None = None,
    score: Score = "aps",
    by_class: bool = False,
    calibrator: Calibrator | None = None,
    fit_split: str | None = None,
    test_split: str | None = None,
    seed: int = 0,
) -> FittedRule:
    """Fit a threshold or conformal sets on some examples of a file, and check it on others.

    Parameters
    ----------
    data : logits, path, Dataset, mapping or data frame
        As for :func:`calibrant.evaluate`.
    labels : (n,) integers
        With logits; -100 is ignored.
    max_error, precision, recall, max_fpr, max_fnr, max_cost, cost, certainty
        For a threshold, as in :func:`calibrant.threshold`.
    positive : int or str, optional
        Number or name of the class to find, for limits other than ``max_error``; class 1 of two by
        default, that of the second column.
    coverage, score : float and str
        For sets, as in :func:`calibrant.conformal`; either this or limits of a threshold.
    by_class : bool
        Sets whose coverage holds for each class.
    calibrator : Calibrator, optional
        Fitted on other examples; applied to logits first.
    fit_split, test_split : str, optional
        Splits to fit the rule on (val, else the unnamed split, by default) and to check it on
        (test, else the unnamed split). With a calibrator, which has probably seen val, both are
        test where there is one. A single split is cut at random into two halves.
    seed : int
        Of the cut, and of the random part of sets.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> fitted = decide(sample_path(), max_error=0.01)
    >>> round(fitted.rule.guarantee.threshold, 3), fitted.fitted_on, fitted.checked_on
    (1.0, 'val split', 'test split')
    >>> fitted.checked.wrong / fitted.checked.judged < 0.01
    True
    """
    limits: dict[str, Any] = {"max_error": max_error, "precision": precision, "recall": recall}
    limits |= {"max_fpr": max_fpr, "max_fnr": max_fnr, "max_cost": max_cost, "cost": cost}
    limits = {name: value for name, value in limits.items() if value is not None}
    if by_class and coverage is None:
        raise TypeError("by_class=True is for sets: pass coverage= with it")
    if bool(limits) == (coverage is not None):
        got = "both" if limits else "neither"
        raise TypeError(f"pass either limits, such as max_error=, or coverage=, got {got}")
    dataset, splits, names = _opened(data, labels, calibrator, fit_split, test_split, seed)
    examples: dict[str, Any] = _calibrated_examples(splits[0], calibrator)
    place = class_number(positive, splits[0].classes, dataset.class_names)
    with located(dataset.path), known_rows():
        guarantee: Threshold | ConformalSets
        if coverage is None:
            guarantee = threshold(**examples, **limits, positive=place, certainty=certainty)
        else:
            by = {"by": "class"} if by_class else {}
            guarantee = conformal(**examples, coverage=coverage, score=score, seed=seed, **by)
    rule = DecisionRule(guarantee, splits[0].classes, calibrator, dataset.class_names, place)
    tallies = (_walk(rule, split, labelled_only=True) for split in splits)
    return FittedRule(rule, *names, *tallies)


def _opened(
    data: Data | Values,
    labels: Values | None,
    calibrator: Calibrator | None,
    fit_split: str | None,
    test_split: str | None,
    seed: int,
    by: Values | str | None = None,
) -> tuple[Dataset, tuple[Split, Split], tuple[str, str]]:
    """Return data as a dataset, and the splits to fit and to check a rule on with their names."""
    dataset = as_dataset(data, labels, by=by)
    if calibrator is not None:
        check_calibrator(calibrator)
        dataset = dataset.in_order(calibrator.class_names_)
    if calibrator is not None and fit_split is None and dataset.find("test") is not None:
        fit_split = test_split = test_split or "test"
    splits, names = _fit_and_test(dataset, fit_split, test_split, seed, stratified=False)
    if calibrator is not None:
        for split in splits:
            check_fits(calibrator, split)
    return dataset, splits, names


def _calibrated_examples(split: Split, calibrator: Calibrator | None) -> dict[str, Array]:
    """Return the labelled examples of a split, read whole, as a rule sees them."""
    labels = split.labels
    if labels.shape[1:] != split.shape[:-1]:
        raise ValueError(
            f"{split.path}: decisions need one label for each row of scores, got labels "
            f"{labels.shape} for {(split.rows, *split.shape)}; tags are not supported"
        )
    kept = labels != IGNORED
    check_some(int(kept.sum()))
    if calibrator is None:
        return {split.domain: split.read(split.domain)[kept], "labels": labels[kept]}
    features = whole_inputs(calibrator, split, kept)
    with known_rows():
        after = calibrator.transform(split.logits[kept], features)
    return {"logits": after, "labels": labels[kept]}


def apply_rule(
    rule: DecisionRule,
    data: Data,
    out: str | os.PathLike[str] | None = None,
) -> AppliedRule:
    """Decide about every example of a prediction file, and count by split.

    With ``out`` the decisions are written: as ``.npz``, ``.safetensors`` or ``.parquet`` the
    columns of :meth:`DecisionRule.decide` under each split, beside all arrays of the file but
    logits, probs and features, and with names of classes only in ``.npz``; as ``.csv`` a line for
    each example, with the names of classes where they are known. They stand behind all columns of a
    table. Labels are not needed.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> rule = decide(sample_path(), coverage=0.9).rule
    >>> applied = apply_rule(rule, {"logits": [[9.0] + [0.0] * 9, [1.0] * 10]})
    >>> applied.tallies[""].n, applied.tallies[""].judged
    (2, 0)
    """
    dataset = as_dataset(data)
    ordered = dataset.in_order(rule.class_names)
    splits = _scored_splits(ordered)
    for split in splits:
        _check_split(rule, split)
        split.warn_of_mistakes(copies=False)
    tallies: dict[str, Tally] = {}
    if out is None:
        for split in splits:
            with _part_of(splits, split):
                tallies[split.name] = _walk(rule, split)
        return AppliedRule(rule, tallies)
    _check_target(dataset, Path(out))
    if Path(out).suffix == TEXT:
        with (
            replacing(Path(out)) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            lines = _CsvLines(rule, file, splits)
            for split in splits:
                with _part_of(splits, split):
                    use, names = lines.of(split), lines.arrays(split)
                    tallies[split.name] = _walk(rule, split, use, further=names)
        return AppliedRule(rule, tallies)

    places = class_order(rule.class_names, dataset.class_names, dataset.path)

    def make(split: Split, folder: Path) -> dict[str, Array]:
        columns = _Columns(folder, split.rows, places)
        tallies[split.name] = _walk(rule, ordered.split(split.name), columns.add)
        as_table = dataset.table_names and Path(out).suffix in TABLES
        return ({split.domain: split.read(split.domain)} if as_table else {}) | columns.arrays

    left_out = ["features", *([] if Path(out).suffix == ".npz" else [CLASS_NAMES])]
    _write_splits(dataset, _scored_splits(dataset), Path(out), make, left_out=left_out)
    return AppliedRule(rule, tallies)


def _check_split(rule: DecisionRule, split: Split) -> None:
    if split.classes != rule.classes:
        raise ValueError(
            f"the rule is for {rule.classes} classes, but {split.path} has {split.classes}"
        )
    if rule.calibrator is not None:
        check_fits(rule.calibrator, split)
    if taken := [name for name in (*DECISIONS, rule.decision) if name in split.keys]:
        raise ValueError(f"{split.path} has {comma_separated(taken)} already: rename that column")


Use: TypeAlias = Callable[[Mapping[str, Array], IntArray | None, Chunk], object]


def _walk(
    rule: DecisionRule,
    split: Split,
    use: Use | None = None,
    *,
    labelled_only: bool = False,
    further: Sequence[str] = (),
) -> Tally:
    """Decide about a split, and count.

    ``use`` is called with the decisions of each chunk, which has the columns ``further`` as well.
    """
    calibrator = rule.calibrator
    domain = split.domain if calibrator is None else "logits"
    columns = [domain, *(["labels"] if "labels" in split.keys else [])]
    columns = list(dict.fromkeys([*columns, *input_names(calibrator), *further]))

    def decided(chunk: Chunk) -> Tally:
        scores, features, labels = chunk[domain], None, None
        if calibrator is not None:
            features = calibrator.input_features(chunk)
        if "labels" in columns:
            labels = as_labels(chunk["labels"])
        if labelled_only and labels is not None:
            kept = labels != IGNORED
            scores, labels = scores[kept], labels[kept]
            features = feature_rows(features, kept)
        if not len(scores):
            return Tally.total([])
        decisions = rule.decide(**{domain: scores}, features=features)
        if use is not None:
            use(decisions, labels, chunk)
        return rule.tally(decisions, labels)

    return Tally.total(split.map(decided, *columns))


class _Columns:
    """Decisions of chunks, gathered in files of a folder; classes get the numbers of ``places``."""

    def __init__(self, folder: Path, rows: int, places: IntArray | None) -> None:
        self.folder, self.rows, self.done, self.places = folder, rows, 0, places
        self.arrays: dict[str, Array] = {}

    def add(self, decisions: Mapping[str, Array], _: object, __: object) -> None:
        end = self.done + len(decisions["predicted"])
        for name, values in renumbered(decisions, self.places).items():
            if name not in self.arrays:
                shape = (self.rows, *values.shape[1:])
                self.arrays[name] = empty_array(self.folder, shape, values.dtype)
            self.arrays[name][self.done : end] = values
        self.done = end


class _CsvLines:
    """Decisions of chunks as lines of a ``.csv`` file, with names in place of numbers.

    They stand behind the columns of a table as it is. Other files give columns with one value for
    each example, such as ids, and the label.
    """

    def __init__(self, rule: DecisionRule, file: TextIO, splits: Sequence[Split]) -> None:
        self.rule, self.writer = rule, csv.writer(file)
        self.table = splits[0].dataset.table_names
        self.kept = [*dict.fromkeys(name for split in splits for name in split.further)]
        decided = *DECISIONS, rule.decision
        header = (*self.table.values(), *decided)
        if not self.table:
            header = ("split", "row", *self.kept, *decided, "label")
        self.writer.writerow(header)

    def arrays(self, split: Split) -> list[str]:
        """Return the arrays of a split that its lines need."""
        if not self.table:
            return split.further
        return [name for name in split.keys if name in self.table or name in ARRAY_KEYS]

    def of(self, split: Split) -> Use:
        """Return the function that writes the decisions of one split."""
        if len(split.shape) > 1:
            raise ValueError(f"a {TEXT} file has a line for each row, got tokens: write .npz")
        return partial(self._add, split, count())

    def _add(
        self,
        split: Split,
        rows: Iterator[int],
        decisions: Mapping[str, Array],
        labels: IntArray | None,
        chunk: Chunk,
    ) -> None:
        predicted, confidence, decided = decisions.values()
        known = [IGNORED] * len(predicted) if labels is None else labels
        truth = ["" if label == IGNORED else self.rule.name(label) for label in known]
        made = [
            [self.rule.name(k) for k in predicted],
            [f"{probability:.6g}" for probability in confidence],
            [self.rule.names(x) if x.ndim else ("no", "yes")[int(x)] for x in decided],
        ]
        columns: list[Iterable[Any]]
        if self.table:
            columns = [*(self._column(key, split, chunk, truth) for key in self.table), *made]
        else:
            kept = [chunk.get(name, repeat("")) for name in self.kept]
            columns = [repeat(split.name), islice(rows, len(predicted)), *kept, *made, truth]
        self.writer.writerows(zip(*columns, strict=False))

    def _column(self, key: str, split: Split, chunk: Chunk, truth: Sequence[str]) -> Iterable[Any]:
        """Return the values of a column of a table, by its name in :attr:`Dataset.table_names`."""
        if key == "labels":
            return truth
        if key in chunk:
            return chunk[key]
        array, _, name = key.partition("_")
        if array not in chunk:
            return repeat(split.name)
        values = chunk[array]
        names = split.dataset.class_names if array in SCORES else None
        return values[:, names.index(name) if names else int(name)]
