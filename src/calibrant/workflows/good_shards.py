"""Shards that cannot be used, and the dataset without them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from calibrant._core.chunks import EstimandChoice
from calibrant.data.columns import SCORES, Columns, columns_by_split
from calibrant.data.dataset import Dataset
from calibrant.data.opening import open_dataset
from calibrant.data.shards import NoGoodShard
from calibrant.metrics.accumulator import Accumulator

_MAX_LISTED = 20


def open_good_shards(
    path: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    estimand: EstimandChoice = "auto",
    **columns: Any,
) -> Dataset:
    """Open a dataset without its bad shards, which are read once to find them.

    A shard is bad if it cannot be read to its end, if a row is refused (a NaN, a label that is no
    class), or if its scores have another form than most rows of the dataset. It is left out as a
    whole: ``skipped`` of the dataset has the errors by path.

    Parameters
    ----------
    path
        A folder or glob of shards, or a file.
    cache
        As in :func:`calibrant.open_dataset`.
    estimand
        As in :func:`calibrant.evaluate`.
    columns
        Names of columns, ``labels``, ``logits`` and ``probs`` of :func:`calibrant.open_dataset`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from calibrant.data import save_predictions
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i, value in enumerate([0.0, np.nan]):
    ...         shard = {"logits": np.full((2, 3), value), "labels": np.zeros(2, int)}
    ...         save_predictions(os.path.join(folder, f"{i}.npz"), shard)
    ...     data = open_good_shards(folder)
    >>> data.split().rows, [os.path.basename(path) for path in data.skipped]
    (2, ['1.npz'])
    """
    dataset = _uniform(open_dataset(path, skip_bad=True, cache=cache, **columns))
    if estimand == "multilabel":
        dataset = replace(dataset, multilabel=True)
    skipped: dict[str, str] = {}
    for split in map(dataset.split, dataset.splits):
        if split.shards[0].domain and "labels" in split.keys:
            checked = Accumulator(estimand=estimand, metrics=["accuracy"], level=None)
            split.reduce(checked, split.domain, "labels", skipped=skipped)
    return _without(dataset, skipped)


def describe_skipped(skipped: Mapping[str, str], used: int) -> Iterator[str]:
    """Yield lines about shards that were left out, by their messages, beside those in use."""
    if not (count := len(skipped)):
        return
    yield f"skipped {count:,} bad shard{'s' * (count != 1)} of {count + used:,}:"
    for message in list(skipped.values())[:_MAX_LISTED]:
        yield f"  {message}"
    if count > _MAX_LISTED:
        yield f"  and {count - _MAX_LISTED:,} more"


def _uniform(dataset: Dataset) -> Dataset:
    """Leave out the files whose scores have another form than most rows of their split."""
    rows: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for file in dataset.files:
        for name, domain, shape in _forms(file):
            rows[name, domain, shape[1:]] += shape[0]
    usual = {}
    for (name, domain, shape), _ in reversed(rows.most_common()):
        usual[name] = domain, shape
    skipped = {}
    for file in dataset.files:
        for name, domain, shape in _forms(file):
            if shape[0] and usual[name] != (domain, shape[1:]):
                most = f"{usual[name][0]} of shape {('rows', *usual[name][1])}".replace("'", "")
                path = _path(file)
                skipped[path] = f"{path} has {domain} of shape {shape}, most shards have {most}"
    return _without(dataset, skipped)


def _forms(file: Columns) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield split, domain and shape of the scores of a file."""
    for name, columns in columns_by_split(file).items():
        domain = next((domain for domain in SCORES if domain in columns), None)
        if domain is not None:
            yield name, domain, columns[domain].shape


def _without(dataset: Dataset, skipped: dict[str, str]) -> Dataset:
    kept = [
        file for file in dataset.files if skipped.keys().isdisjoint(c.path for c in file.values())
    ]
    if not kept:
        raise NoGoodShard(dataset.path, next(iter(skipped.values())))
    return replace(dataset, files=kept, skipped={**dataset.skipped, **skipped})


def _path(file: Columns) -> str:
    return next(iter(file.values())).path
