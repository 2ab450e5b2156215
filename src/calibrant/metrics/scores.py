"""Accuracy and proper scores: means over the examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from calibrant._core.checks import check_some
from calibrant.metrics import reductions
from calibrant.metrics.intervals import Estimate, loss_interval, share_interval
from calibrant.metrics.reductions import Data, Input, ScoreData
from calibrant.metrics.summary import Metric, Moments, Summary

if TYPE_CHECKING:
    from typing_extensions import Unpack


@reductions.keywords(Data)
def accuracy(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> float:
    """Share of examples whose top class is right.

    Of equally probable classes the first counts. Of pairs: the share of the outcomes that
    happened. Input as for :func:`calibrant.ece`.

    >>> accuracy([[2.0, 1.0], [2.0, 1.0]], [0, 1])
    0.5
    """
    pairs = reductions.answers_from(logits, labels, **data)
    return min(float(np.average(pairs.outcome, weights=pairs.weight)), 1.0)  # but for rounding


@reductions.keywords(ScoreData)
def nll(logits: Input = None, labels: Input = None, **data: Unpack[ScoreData]) -> float:
    r"""Mean negative log-likelihood, :math:`-\frac1n \sum_i \log p_{i, y_i}`, in nats.

    >>> round(nll([[0.0, 0.0]], [1]), 4)
    0.6931
    """
    moments, floored = _moments(logits, labels, **data)
    reductions._warn_of_floor(floored)
    return moments.mean("nll")


@reductions.keywords(ScoreData)
def brier(logits: Input = None, labels: Input = None, **data: Unpack[ScoreData]) -> float:
    r"""Mean Brier score summed over the classes, from 0 to 2.

    .. math:: \frac1n \sum_i \sum_k (p_{ik} - 1[y_i = k])^2

    >>> brier([[0.0, 0.0]], [1])
    0.5
    """
    return _moments(logits, labels, **data)[0].mean("brier")


def _moments(logits: Input, labels: Input, **data: Unpack[ScoreData]) -> tuple[Moments, int]:
    examples, floored = reductions._examples_of_caller(logits, labels, **data)
    reduced = reductions.reduce_examples(examples)
    check_some(reduced.nll.size)
    return Moments.of(reduced, examples.labelled_weight()), floored


def _mean_of(score: str) -> Callable[[Summary], Estimate]:
    return lambda s: s.interval(loss_interval, s.moments.mean(score), s.moments.deviation(score))


TABLE = (
    Metric(
        "accuracy",
        accuracy,
        lambda s: s.interval(share_interval, s.moments.mean("correct"), s.moments.worth),
        aliases=("acc",),
        higher_is_better=True,
        by_groups=True,
    ),
    Metric(
        "NLL",
        nll,
        _mean_of("nll"),
        aliases=("log_loss", "cross_entropy", "negative_log_likelihood"),
        percent=False,
        by_groups=True,
    ),
    Metric(
        "Brier",
        brier,
        _mean_of("brier"),
        "Brier 1950",
        ("brier_score",),
        percent=False,
        by_groups=True,
    ),
)
