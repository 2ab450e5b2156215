"""Try methods of calibration for a report, and see what the chosen one makes possible."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from calibrant._core.chunks import EstimandChoice, resolve_estimand
from calibrant.data.dataset import Dataset, Split
from calibrant.decide.thresholds import Threshold, threshold
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.reductions import WeightedPairs
from calibrant.show.report.measure import answers_of, coverage_of
from calibrant.show.report.model import Remedy
from calibrant.workflows.compare import compare, fit_and_test
from calibrant.workflows.comparison import Comparison
from calibrant.workflows.effect import calibrated_sums

USUAL = ("none", "ts", "smart", "auto")
USUAL_OF_TWO = ("none", "ts", "sigmoid", "beta", "auto")
USUAL_OF_TAGS = ("none", "pooled", "tags")
MAX_ERRORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Error rates for which thresholds are sought."""


def usual_methods(estimand: EstimandChoice, classes: int) -> tuple[str, ...]:
    """Return the methods that a report tries: few, quick and good."""
    if estimand == "multilabel":
        return USUAL_OF_TAGS
    return USUAL_OF_TWO if classes == 2 else USUAL


def try_methods(
    dataset: Dataset,
    *,
    methods: Sequence[str],
    split: str,
    fit_split: str | None,
    keep_argmax: bool | None,
    estimand: EstimandChoice,
    bins: int,
    level: float | None,
    seed: int,
) -> Remedy:
    """Compare methods on a dataset, and apply the chosen one to the examples measured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comparison = compare(
            dataset,
            methods=methods,
            fit_split=fit_split,
            test_split=split,
            keep_argmax=keep_argmax,
            estimand=estimand,
            bins=bins,
            level=level,
            seed=seed,
        )
        splits, _ = fit_and_test(dataset, fit_split, split, seed)
        remedy = _remedy(comparison, *splits, estimand)
    if splits[0].name == splits[1].name:  # the walk before has told
        return remedy
    told = [str(one.message) for one in caught]
    return replace(remedy, doubts=[one for one in told if one.startswith(comparison.fitted_on)])


def _remedy(
    comparison: Comparison,
    fitted: Split,
    measured: Split,
    estimand: EstimandChoice,
) -> Remedy:
    method = comparison.choice()
    chosen = None if method is None else comparison[method]
    if chosen is None or chosen.calibrator is None or estimand == "multilabel":
        return Remedy(comparison, chosen, [], [], fitted.name)
    stream = Accumulator(pairs=True, metrics=["accuracy"], level=None, estimand=estimand)
    calibrated_sums([chosen.calibrator], measured, stream)
    kind = resolve_estimand(estimand, comparison.classes)
    answers, _ = answers_of(stream.kept_pairs(), kind)
    thresholds = _guaranteed(answers)
    return Remedy(comparison, chosen, coverage_of(answers), thresholds, fitted.name)


def _guaranteed(answers: WeightedPairs) -> list[Threshold]:
    """Return thresholds with a guarantee, which counts examples and knows no weights."""
    if answers.weight is not None:
        return []
    error = 1 - float(answers.outcome.mean())
    claimed, right, _ = answers
    return [
        threshold(confidence=claimed, outcome=right, max_error=most)
        for most in MAX_ERRORS
        if most < error
    ]
