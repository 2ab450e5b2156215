"""Split log loss and Brier score into what calibration could save and what it could not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import IGNORED, Values, spread, warnings_at_caller
from calibrant._core.chunks import EstimandChoice
from calibrant.calibrators.base import Calibrator, feature_rows
from calibrant.calibrators.registry import make_calibrator
from calibrant.data.dataset import TEST_SPLITS
from calibrant.data.files import Data, as_dataset
from calibrant.metrics.intervals import Estimate, loss_interval, normal_interval
from calibrant.metrics.reductions import labelled_examples, reduce_examples
from calibrant.metrics.summary import Moments
from calibrant.workflows.effect import _check_inputs, input_names
from calibrant.workflows.fit import _fit_without, _row_folds
from calibrant.workflows.large import _in_memory, _is_many


class LossTerms(NamedTuple):
    """A loss, what recalibration saves of it, and the rest, each with an interval."""

    total: Estimate
    calibration: Estimate
    """The loss that a recalibration saves out of fold; below 0 where it does harm."""
    refinement: Estimate
    """The loss after recalibration, by which models can be compared that are calibrated later."""


@warnings_at_caller()
def loss_split(
    data: Data | Values | None = None,
    labels: Values | None = None,
    *,
    method: str | Calibrator = "ts",
    probs: Values | None = None,
    features: Values | None = None,
    folds: int = 5,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
    sample_weight: Values | str | None = None,
    groups: Values | str | None = None,
    estimand: EstimandChoice = "auto",
    level: float = 0.9,
    seed: int = 0,
) -> dict[str, LossTerms]:
    """Split the NLL and the Brier score into calibration and refinement.

    Each fold is recalibrated by a fit on the others. The calibration term is what this saves, with
    the interval of a mean of paired differences, and the refinement what is left. Intervals count
    the chance of the examples, not that of the fits: with ten events they are too narrow. The terms
    depend on the method: one with more freedom finds more to save, and pays more for its fit (Berta
    et al. 2025). ``calibrant compare`` shows the same losses for many methods.

    Parameters
    ----------
    data, labels, probs, features, sample_weight, groups, estimand, level, seed
        As in :func:`calibrant.cross_fit`.
    method, options
        A calibrator as in :func:`calibrant.fit`; temperature scaling by default. For two classes
        "sigmoid" also corrects the share of events; for tags name one of ``TAG_CALIBRATORS``.
    folds : int
        Number of folds, at least 2.
    split : str, optional
        ``test``, else the unnamed split, by default.

    Returns
    -------
    dict
        The terms of "nll" and "brier".

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> honest = 2 * rng.normal(size=(4000, 5))
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> terms = loss_split(2 * honest, labels)["nll"]
    >>> terms.calibration.low > 0.1
    True
    """
    calibrator = make_calibrator(method, options, estimand)
    beside: Any = {"probs": probs, "features": features}
    beside |= {"sample_weight": sample_weight, "groups": groups}
    dataset = as_dataset(data, labels, multilabel=calibrator.multilabel, **beside)
    examples = dataset.split(split, TEST_SPLITS)
    _check_inputs(calibrator, examples)
    examples.warn_of_mistakes(copies=False)
    examples = examples.floored()
    if _is_many(examples):
        examples = _in_memory(examples, seed, input_names(calibrator))
    fold = _row_folds(examples, folds, seed)
    logits, targets = np.asarray(examples.logits), examples.labels
    after = np.array(logits, np.float64)
    inputs = {name: examples.read(name) for name in input_names(calibrator)}
    for i in range(folds):
        one = _fit_without(copy.deepcopy(calibrator), examples, fold, i, None)
        rows = fold == i
        given = one.input_features(inputs)
        after[rows] = one.transform(logits[rows], feature_rows(given, rows))
    # rows in no fold have no label
    kept = np.where(spread(fold, targets.shape, "fold") >= 0, targets, IGNORED)
    kind = calibrator.estimand_for(estimand)
    before, later = (
        labelled_examples(scores, kept, None, examples.weights, kind)[0]
        for scores in (logits, after)
    )
    weight = before.labelled_weight()
    losses, rest = reduce_examples(before), reduce_examples(later)
    saved = losses._replace(nll=losses.nll - rest.nll, brier=losses.brier - rest.brier)
    total, gain, left = (Moments.of(reduced, weight) for reduced in (losses, saved, rest))
    return {
        name: LossTerms(
            loss_interval(total.mean(name), total.deviation(name), level),
            normal_interval(gain.mean(name), gain.deviation(name), level),
            loss_interval(left.mean(name), left.deviation(name), level),
        )
        for name in ("nll", "brier")
    }
