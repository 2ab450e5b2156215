"""Evaluate arrays, and prediction files of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from calibrant._core.checks import (
    Values,
    as_labels,
    as_scores,
    check_order,
    warnings_at_caller,
)
from calibrant._core.chunks import EstimandChoice
from calibrant._core.class_names import is_frame, numbered
from calibrant._core.rows import Sample, warn_of_copies
from calibrant.data.dataset import TEST_SPLITS, Split
from calibrant.data.opening import Data, as_dataset, is_data
from calibrant.data.shards import Chunk
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.registry import METRICS
from calibrant.slices.examples import Reading
from calibrant.slices.find import Search, Settings, check_one_label, metadata_keys, search

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
    split : str, optional
        Split of a file; ``test``, else the plain arrays, by default.
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
    pairs = bool(level) or _need_pairs(metrics)
    total = Accumulator(
        bins=bins, estimand=estimand, pairs=pairs, metrics=metrics, level=level, seed=seed
    )
    auto = isinstance(by, str) and by == AUTO
    if not auto and not is_data(data) and not (is_frame(data) and labels is None):
        _check_arrays(split, by=by, sample_weight=sample_weight)
        if data is not None and labels is not None:
            check_order(data, labels)
        total.update(data, labels, probs=probs, sample_weight=sample_weight, by=by)
        if estimand != "multilabel" and labels is not None:
            scores: Any = data if probs is None else probs
            targets = as_labels(numbered(labels, scores))
            warn_of_copies(as_scores(scores), targets, probs=probs is not None)
        return total.compute()
    multilabel = estimand == "multilabel"
    dataset = as_dataset(
        data, labels, probs=probs, sample_weight=sample_weight, by=by, multilabel=multilabel
    )
    chosen = dataset.split(split, TEST_SPLITS)
    searched = dataset.by == AUTO and AUTO not in chosen.keys
    if searched:
        check_one_label(chosen)
        chosen = replace(chosen, dataset=replace(dataset, by=None))
    chosen.warn_if_probs()
    chosen.warn_of_copies()
    columns, rows = (chosen.domain, "labels", "sample_weight", "by"), chosen.chunk_rows
    labels_of_row = chosen.shards[0].column("labels").width
    if pairs and chosen.rows * labels_of_row > total.most_pairs:
        total.pool()  # so that workers do as well
    chosen.reduce(total, *columns, rows=rows)
    if not searched:
        return total.compute()
    said = _add_found(total, chosen, seed)
    return replace(total.compute(), search=said)


def _add_found(total: Accumulator, split: Split, seed: int) -> str:
    """Find subgroups in one half of the examples, and measure them in the other."""
    halves = [replace(split, sample=Sample(0.5, seed, start)) for start in (0.0, 0.5)]
    reading = Reading(metadata_keys(split), split.classes, split.dataset.class_names)
    found = search(halves[0], reading, Settings(seed=seed))
    columns = list(dict.fromkeys((split.domain, *found.reading.needed())))
    task = partial(_measured_subgroups, total.like(), found, split.domain)
    for sums in halves[1].walk(task, *columns, rows=split.chunk_rows):
        for name, part in sums.items():
            total.by.setdefault(name, total.like()).merge(part)
    return f"Search in half of the examples: {found.result().verdict()}"


def _measured_subgroups(
    empty: Accumulator, found: Search, domain: str, chunks: Iterator[Chunk]
) -> dict[str, Accumulator]:
    """Sums of the subgroups of one shard; probabilities are measured as they are stated."""
    sums: dict[str, Accumulator] = {}
    for chunk in chunks:
        for name, rows in found.members(chunk).items():
            if not rows.any():
                continue
            part = {
                key: values[rows]
                for key, values in chunk.columns.items()
                if key in (domain, "labels", "sample_weight")
            }
            sums.setdefault(name, empty.like()).add(**part)
    return sums


def _need_pairs(metrics: str | Sequence[str] | None) -> bool:
    """Return False if sums suffice: then memory does not grow with the examples."""
    names = [metrics] if isinstance(metrics, str) else metrics
    return names is None or any(METRICS[METRICS.name(name)].needs_pairs for name in names)


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
