"""Evaluation of prediction files of any size, in this process or over an executor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from calibrant._core.checks import (
    Values,
    as_scores,
    warn_of_probs,
)
from calibrant._core.chunks import Estimand
from calibrant.data import Part, open_predictions
from calibrant.data.shards import BLOCK, Report, over_parts
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation


def evaluate(
    logits: Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    sample_weight: Values | None = None,
    by: Values | None = None,
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
    weight : (...)
        Weights of the examples; 0 leaves out.
    groups : (...) values of any kind
        The same metrics are computed for each group, worst first.
    estimand : {"top_label", "binary", "multilabel"}
        Which probability is compared with which event.
    bins : int
        Number of equal-width and of equal-mass bins.
    metrics : sequence of str, optional
        Names from ``METRICS``; all by default.
    level : float, optional
        Coverage of the intervals; None leaves them out.
    seed : int
        Of the random draws behind intervals and test.

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
    stream = Accumulator(
        bins=bins, estimand=estimand, pairs=True, metrics=metrics, level=level, seed=seed
    )
    if logits is not None and estimand != "multilabel":  # tags may add up to anything
        warn_of_probs(as_scores(logits), "if they are, pass them as probs=")
    return stream.update(logits, labels, probs=probs, sample_weight=sample_weight, by=by).compute()


def evaluate_file(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    sample_weight: str | None = None,
    by: str | None = None,
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
    task = partial(_measured, _Task(total.like(), chosen.domain, sample_weight, by, block_rows))
    for found in over_parts(task, chosen.parts, executor, progress):
        total.merge(found)
    return total.compute()


@dataclass(frozen=True)
class _Task:
    """What every part is measured with; travels to other processes."""

    empty: Accumulator
    domain: str
    weight: str | None
    groups: str | None
    block_rows: int


def _measured(task: _Task, part: Part, report: Report) -> Accumulator:
    """Sums of one part."""
    columns = {task.domain: "logits", "labels": "labels"}
    columns |= {"sample_weight": task.weight} if task.weight else {}
    columns |= {"by": task.groups} if task.groups else {}
    sums, done = task.empty.like(), 0
    for block in part.blocks(task.block_rows, list(columns.values())):
        try:
            sums.update(**dict(zip(columns, block, strict=True)))
        except (TypeError, ValueError) as problem:
            where = f"{part.path}, counting from row {done}" if done else part.path
            kind = TypeError if isinstance(problem, TypeError) else ValueError
            raise kind(f"{where}: {problem}") from problem
        done += len(block[0])
        report(len(block[0]))
    return sums
