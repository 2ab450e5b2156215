"""Mistakes in the data that figures give away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from calibrant._core.binning import Bins
from calibrant._core.chunks import Estimand

if TYPE_CHECKING:
    from calibrant.metrics.intervals import Estimate

ENOUGH = 100  # examples, below which chance may look like anything
ORDER = "check that labels are in the order of the logits, and that both number classes alike"


def hint_of(metrics: Mapping[str, Estimate], bins: Bins, classes: int, estimand: Estimand) -> str:
    """Return the mistake that the figures look like, with its remedy; empty for the usual ones.

    Labels in another order make accuracy that of guessing, whatever the confidence; a training set
    makes everything right and sure.
    """
    n = int(bins.count.sum())
    if estimand == "multilabel" or "accuracy" not in metrics or n < ENOUGH:
        return ""
    accuracy, confidence = metrics["accuracy"].value, _mean_confidence(bins, estimand)
    at = f"at a mean confidence of {100 * confidence:.1f} %"
    if accuracy >= 0.998 and confidence >= 0.99:
        right = f"{100 * accuracy:.2f} % of the predictions are right, {at}"
        return f"{right}: if the model was trained on these examples, measure held-out ones"
    if estimand == "binary":
        return _hint_of_ranks(metrics, bins)
    guessing = 1 / classes
    noise = 3 * math.sqrt(guessing * (1 - guessing) / n)
    if accuracy <= guessing + noise and confidence >= accuracy + 0.2:
        return f"accuracy is no better than guessing among {classes} classes, {at}: {ORDER}"
    return ""


def _hint_of_ranks(metrics: Mapping[str, Estimate], bins: Bins) -> str:
    """Return the mistake that P(y = 1) does not tell two classes apart, or the wrong way round."""
    positive = float(bins.observed.sum() / bins.weight.sum())
    if "roc_auc" not in metrics or not 0 < positive < 1:
        return ""
    n, area = float(bins.count.sum()), metrics["roc_auc"].value
    # of the area where ranks are drawn at random
    deviation = math.sqrt((n + 1) / (12 * n * n * positive * (1 - positive)))
    shown = f"ROC AUC {100 * area:.1f} %"
    if area < min(0.3, 0.5 - 5 * deviation):
        return f"P(y = 1) is higher where y = 0 ({shown}): check that class 1 is the second column"
    if abs(area - 0.5) <= 2.5 * deviation <= 0.1 and _spread(bins) >= 0.15:
        return f"P(y = 1) varies, but does not tell the classes apart ({shown}): {ORDER}"
    return ""


def _spread(bins: Bins) -> float:
    """Return the standard deviation of the probabilities, but for that within bins."""
    share, mean = bins.weight / bins.weight.sum(), bins.claimed.sum() / bins.weight.sum()
    means = bins.claimed / bins.weight.clip(min=1e-300)
    return math.sqrt(float(share @ (means - mean) ** 2))


def _mean_confidence(bins: Bins, estimand: Estimand) -> float:
    """Return the mean probability of the predicted class, from sums of P(y = 1) if need be."""
    claimed, weight = bins.claimed, bins.weight
    if estimand == "binary":
        claimed = claimed.clip(min=weight - claimed)
    return float(claimed.sum() / weight.sum())
