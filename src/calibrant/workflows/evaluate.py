"""Evaluate arrays, and prediction files of any size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from calibrant._core.checks import (
    Values,
    as_float64,
    as_keys,
    as_labels,
    as_scores,
    check_order,
    classes_last,
    warn_of_copies,
    warnings_at_caller,
    with_ignored,
)
from calibrant._core.chunks import EstimandChoice
from calibrant._core.class_names import class_names_of, is_frame, kept_names, numbered
from calibrant.data.dataset import TEST_SPLITS
from calibrant.data.files import Data, as_dataset, is_data
from calibrant.data.formats import Array
from calibrant.data.shards import Sample
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.registry import METRICS
from calibrant.slices.examples import Reading
from calibrant.slices.find import SliceSearch, check_one_label, metadata_keys, search

BLOCK = 1 << 18
"""Labels of dense predictions that are measured at a time."""
AUTO = "auto"
"""The name that stands for subgroups that are found, unless a column has it."""


@warnings_at_caller()
def evaluate(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    sample_weight: Values | str | None = None,
    by: Values | str | None = None,
    groups: Values | str | None = None,
    class_dim: int | None = None,
    ignore_index: int | None = None,
    split: str | None = None,
    estimand: EstimandChoice = "auto",
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
) -> Evaluation:
    """Measure the calibration of predictions, with intervals.

    Parameters
    ----------
    data : logits (..., classes) or (n,), path, Dataset, mapping or data frame
        Unnormalised log-probabilities, of which -inf masks a class; (n,) are log-odds of two
        classes. Or a prediction file, a folder or glob of shards, which are read in chunks, or
        arrays by their keys in a file, or a data frame with columns such as ``logit_CLASS``.
    labels : (...) integers
        With logits; -100 is ignored. Names of columns, if the logits are a data frame.
    probs : (..., classes), or (n,) probabilities of class 1
        Instead of logits. A label of probability 0 counts as 100 nats at most, with a warning.
    sample_weight : (...), or the name of a column
        Example weights; 0 excludes.
    by : (...) values of any kind, or the name of a column, or "auto"
        The same metrics are computed for each subgroup, worst first. With "auto" subgroups are
        found by :func:`calibrant.find_slices` in a random half of the examples, and measured in
        the other half, so that the search does not make them look worse than they are.
    groups : (...), or the name of a column
        Examples that depend on each other have one value: the pixels of an image, the tokens of a
        document. Intervals then follow from a bootstrap of whole groups. Metrics that need more
        than sums are computed where they are named, and have none.
    class_dim : int, optional
        Dimension of the classes of arrays, where it is not the last: 1 for scores ``(n, classes,
        height, width)`` with labels ``(n, height, width)``.
    ignore_index : int, optional
        Label of ignored examples in arrays, beside -100, such as 255.
    split : str, optional
        Split of a file; ``test``, else the unnamed split, by default.
    estimand : {"auto", "top_label", "binary", "multilabel"}
        Probability that calibration errors and test compare with an event. "auto" is P(y = 1) for
        two classes ("binary") and the largest probability for more ("top_label"), while AUROC and
        AURC rank the confidences in the predicted class. An estimand that is named holds for all.
    bins : int
        Number of equal-width and of equal-mass bins.
    metrics : sequence of str, optional
        Names from ``METRICS``; all by default.
    level : float, optional
        Coverage of the intervals; None or 0 leaves them out. Intervals, and metrics that sort, keep
        9 to 35 bytes of each of at most 2^18 examples, and fine bins of more; without them memory
        does not grow with the examples.
    seed : int
        Seed of the random draws behind intervals and test.

    Returns
    -------
    Evaluation
        A mapping from names of metrics to (value, low, high).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 5))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn from softmax(logits)
    >>> evaluate(logits, labels)["ece"].low
    0.0
    >>> evaluate(3 * logits, labels)["ece"].low > 0.1
    True

    >>> from calibrant.data import sample_path
    >>> round(evaluate(sample_path(), level=None)["ece"].value, 4)
    0.0424
    """
    names = [metrics] if isinstance(metrics, str) else metrics
    # sums suffice for some metrics: then memory does not grow with the examples
    grouped = groups is not None
    if names is None:
        pairs = not grouped
    else:
        wanted = any(METRICS[METRICS.name(name)].needs_pairs for name in names)
        pairs = wanted or (bool(level) and not grouped)
    form: Any = {"bins": bins, "estimand": estimand, "metrics": metrics, "level": level}
    total = Accumulator(pairs=pairs, seed=seed, grouped=grouped, **form)
    multilabel = estimand == "multilabel"
    auto = isinstance(by, str) and by == AUTO
    if not auto and not is_data(data) and not (is_frame(data) and labels is None):
        _check_arrays(split, by=by, sample_weight=sample_weight, groups=groups)
        if data is not None and labels is not None:
            check_order(data, labels)
        data = data if data is None else classes_last(data, class_dim)
        probs = probs if probs is None else classes_last(probs, class_dim)
        labels = labels if labels is None else with_ignored(labels, ignore_index)
        beside = {"sample_weight": sample_weight, "by": by, "groups": groups}
        for some in _blocks({"logits": data, "labels": labels, "probs": probs, **beside}):
            total.update(**some)
        if not multilabel and labels is not None:
            scores: Any = data if probs is None else probs
            targets = as_labels(numbered(labels, scores))
            warn_of_copies(as_scores(scores), targets, probs=probs is not None)
        return _with_names(total.compute(), class_names_of(data if probs is None else probs))
    if not class_dim is ignore_index is None:
        raise TypeError("class_dim= and ignore_index= are for arrays: files have the classes last")
    roles: Any = {"sample_weight": sample_weight, "by": by, "groups": groups}
    dataset = as_dataset(data, labels, probs=probs, multilabel=multilabel, **roles)
    chosen = dataset.split(split, TEST_SPLITS)
    searched = dataset.by == AUTO and AUTO not in chosen.keys
    if searched:
        check_one_label(chosen)
        chosen = replace(chosen, dataset=replace(dataset, by=None))
    chosen.warn_of_mistakes()
    columns, rows = [chosen.domain, "labels", "sample_weight", "by"], chosen.chunk_rows
    columns += ["groups"] if grouped else []
    labels_of_row = chosen.shards[0].column("labels").width
    if pairs and chosen.rows * labels_of_row > total.most_pairs:
        total.pool()  # so that workers do as well
    chosen.reduce(total, *columns, rows=rows)
    if not searched:
        return _with_names(total.compute(), dataset.class_names)
    one, other = (replace(chosen, sample=Sample(0.5, seed, start)) for start in (0.0, 0.5))
    reading = Reading(metadata_keys(chosen), chosen.classes, dataset.class_names)
    found = search(one, reading, seed=seed)
    needed = dict.fromkeys((chosen.domain, *found.reading.needed()))
    total.by = other.reduce(_Subgroups(total, found, chosen.domain), *needed, rows=rows).by
    said = f"Search in half of the examples: {found.result.verdict()}"
    return _with_names(replace(total.compute(), search=said), dataset.class_names)


def _with_names(evaluation: Evaluation, names: Sequence[str] | None) -> Evaluation:
    """Return an evaluation and its subgroups with the names of the classes, if they have any."""
    known = kept_names(names)
    if known is None or len(known) != evaluation.classes:
        return evaluation
    by = {name: replace(part, class_names=known) for name, part in evaluation.by.items()}
    return replace(evaluation, class_names=known, by=by)


def _blocks(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rows of large arrays of pixels or tokens, so that memory does not grow with them."""
    labels, scores = columns["labels"], columns["logits"]
    scores = columns["probs"] if scores is None else scores
    dense = isinstance(scores, (np.ndarray, Tensor)) and getattr(labels, "ndim", 1) > 1
    if not dense or labels.shape != scores.shape[: labels.ndim] or math.prod(labels.shape) <= BLOCK:
        yield columns
        return
    some = {name: values for name, values in columns.items() if values is not None}
    some |= {name: as_keys(some[name]) for name in ("by", "groups") if name in some}
    if "sample_weight" in some:
        some["sample_weight"] = as_float64(some["sample_weight"])
    step = max(1, BLOCK // math.prod(labels.shape[1:]))
    for start in range(0, len(labels), step):
        yield {name: values[start : start + step] for name, values in some.items()}


class _Subgroups:
    """Sums of the subgroups that were found; probabilities are measured as they are stated."""

    def __init__(self, form: Accumulator, found: SliceSearch, domain: str) -> None:
        self.form, self.found, self.domain = form.like(), found, domain
        self.by: dict[str, Accumulator] = {}

    def like(self) -> _Subgroups:
        return _Subgroups(self.form, self.found, self.domain)

    def add(self, **columns: Array) -> None:
        used = {key: columns.get(key) for key in (self.domain, "labels", "sample_weight")}
        for name, rows in self.found.members(columns).items():
            if rows.any():
                part = {key: v[rows] for key, v in used.items() if v is not None}
                self.by.setdefault(name, self.form.like()).add(**part)

    def merge(self, other: _Subgroups) -> None:
        for name, part in other.by.items():
            self.by.setdefault(name, self.form.like()).merge(part)


def _check_arrays(split: str | None, **columns: Values | str | None) -> None:
    """Raise for names of splits and columns, which arrays do not have."""
    if split is not None:
        raise ValueError(
            f"arrays have no splits, got split={split!r}: pass the logits and labels of that "
            "split, or a file"
        )
    for name, values in columns.items():
        if isinstance(values, str):
            raise TypeError(
                f"arrays have no columns, got {name}={values!r}: pass its values, or a file or "
                "data frame that has the column"
            )
