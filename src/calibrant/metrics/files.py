"""Evaluation of prediction files of any size, in this process or over an executor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from calibrant._checks import logits_from_probs
from calibrant.data import Part, open_predictions
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.rows import Estimand
from calibrant.metrics.stream import Accumulator, warn_floored
from calibrant.shards import Report, over_parts

BLOCK = 1 << 22
"""Numbers read at a time: 32 MiB of float64, enough work for every core."""


def evaluate_file(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    weight: str | None = None,
    groups: str | None = None,
    estimand: Estimand = "top_label",
    bins: int = 15,
    metrics: Sequence[str] | None = None,
    level: float | None = 0.9,
    seed: int = 0,
    executor: Executor | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Measure a prediction file, or a folder or glob of shards; logits are never held whole.

    Parameters that are not listed are those of :func:`calibrant.evaluate`.

    Parameters
    ----------
    path : path
        A prediction file, a folder, or a glob.
    split : str, optional
        Which split; ``test``, else the plain arrays, by default.
    weight, groups : str, optional
        Names of further columns of the file, with one value per example.
    executor : concurrent.futures.Executor, optional
        Each shard becomes a task: a process pool uses the cores, the ``get_executor()`` of a
        dask client a cluster. None works in this process.
    progress : callable, optional
        Called with (examples done, examples in all) after each block or shard.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> round(evaluate_file(sample_path(), level=None)["ece"].value, 4)
    0.0424
    """
    chosen = open_predictions(path).split(split, ("test", ""))
    total = Accumulator(
        bins=bins, estimand=estimand, pairs=True, metrics=metrics, level=level, seed=seed
    )
    block_rows = max(1, BLOCK // max(math.prod(chosen.shape), 1))
    task = partial(_measured, _Task(total.like(), chosen.domain, weight, groups, block_rows))
    floored = 0
    for found, zeros in over_parts(task, chosen.parts, executor, progress):
        total.merge(found)
        floored += zeros
    warn_floored(floored)
    return total.result()


@dataclass(frozen=True)
class _Task:
    """What every part is measured with; travels to other processes."""

    empty: Accumulator
    domain: str
    weight: str | None
    groups: str | None
    block_rows: int


def _measured(task: _Task, part: Part, report: Report) -> tuple[Accumulator, int]:
    """Sums of one part, and how many of its probabilities were zero."""
    columns = {"weight": task.weight, "groups": task.groups}
    names = {role: name for role, name in columns.items() if name}
    sums, floored, done = task.empty.like(), 0, 0
    wanted = ["logits", "labels", *names.values()]
    for scores, labels, *rest in part.blocks(task.block_rows, wanted):
        try:
            logits, zeros = scores, 0
            if task.domain == "probs":
                logits, zeros = logits_from_probs(scores, tags=sums.estimand == "multilabel")
            sums.update(logits, labels, **dict(zip(names, rest, strict=True)))
        except (TypeError, ValueError) as problem:
            where = f"{part.path}, counting from row {done}" if done else part.path
            raise type(problem)(f"{where}: {problem}") from problem
        floored, done = floored + zeros, done + len(labels)
        report(len(labels))
    return sums, floored
